//! A tokenizer from `tokenizer.json` and `tokenizer_config.json`.
//!
//! `tokenizer.json` decides how text becomes ids; the config names BOS and EOS, may say whether they are added, and
//! carries the chat template. A decoder that is neither byte-level nor `SentencePiece` is refused: its tokens have no
//! bytes of their own.

use std::fmt;

use serde::Deserialize;
use serde::de::{IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::Value;
use tokenizers::AddedToken;

use super::super::TextError;
use super::super::pieces::{Pieces, Spelling};
use super::{NamedToken, Tokenizer};

const JSON: &str = "tokenizer.json";
const CONFIG: &str = "tokenizer_config.json";

impl Tokenizer {
    /// Builds a tokenizer from the contents of the two files of a model folder.
    pub fn from_json(tokenizer_json: &[u8], tokenizer_config_json: Option<&[u8]>) -> Result<Self, TextError> {
        check_model(tokenizer_json)?;
        let mut encoder =
            tokenizers::Tokenizer::from_bytes(tokenizer_json).map_err(|error| in_file(JSON, &error.to_string()))?;
        encoder.with_padding(None);
        encoder.with_truncation(None).map_err(|error| in_file(JSON, &error.to_string()))?;
        let config: Config = match tokenizer_config_json {
            Some(bytes) => {
                // A list would be read as a struct's fields in order, and an empty one as a config that says nothing.
                if bytes.iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b'[') {
                    return Err(in_file(CONFIG, "got a list, expected an object"));
                }
                serde_json::from_slice(bytes).map_err(|error| in_file(CONFIG, &error.to_string()))?
            }
            None => Config::default(),
        };
        config.add_missing_tokens(&mut encoder)?;

        let decoder = serde_json::to_value(encoder.get_decoder()).map_err(|error| in_file(JSON, &error.to_string()))?;
        let decoding = Decoding::of(&decoder)?;
        let (pieces, special) = pieces_of(&encoder, decoding.spelling)?;

        let (mut prefix, mut suffix) = surroundings(&encoder)?;
        let named = |token: Option<TokenText>| {
            token.map(TokenText::into_text).map(|text| NamedToken { id: encoder.token_to_id(&text), text })
        };
        let mut bos = named(config.bos_token);
        let eos = named(config.eos_token);
        // Either flag, once given, decides about both ends, as in Transformers.
        if config.add_bos_token.is_some() || config.add_eos_token.is_some() {
            prefix = wanted(config.add_bos_token, bos.as_ref(), "bos_token")?;
            suffix = wanted(config.add_eos_token, eos.as_ref(), "eos_token")?;
        }
        if bos.is_none()
            && let Some(&id) = prefix.first()
            && let Some(text) = encoder.id_to_token(id)
        {
            bos = Some(NamedToken { text, id: Some(id) });
        }
        let eos_ids = eos.as_ref().and_then(|token| token.id).into_iter().collect();
        Ok(Self {
            encoder,
            pieces,
            special,
            strips_first_space: decoding.strips_first_space,
            prefix,
            suffix,
            bos,
            eos,
            eos_ids,
            chat_templates: config.chat_template.map(Templates::into_list).unwrap_or_default(),
        })
    }
}

fn in_file(file: &'static str, reason: &str) -> TextError {
    TextError::File { file, reason: reason.to_owned() }
}

/// The part of `tokenizer_config.json` that matters.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Config {
    bos_token: Option<TokenText>,
    eos_token: Option<TokenText>,
    add_bos_token: Option<bool>,
    add_eos_token: Option<bool>,
    chat_template: Option<Templates>,
    added_tokens_decoder: std::collections::BTreeMap<String, AddedToken>,
}

/// A special token is written as its text or as an object with flags.
#[derive(Deserialize)]
#[serde(untagged)]
enum TokenText {
    Text(String),
    Object { content: String },
}

impl TokenText {
    fn into_text(self) -> String {
        match self {
            Self::Text(text) | Self::Object { content: text } => text,
        }
    }
}

/// One chat template, or several with names.
#[derive(Deserialize)]
#[serde(untagged)]
enum Templates {
    One(String),
    Named(Vec<NamedTemplate>),
}

#[derive(Deserialize)]
struct NamedTemplate {
    name: String,
    template: String,
}

impl Templates {
    fn into_list(self) -> Vec<(String, String)> {
        match self {
            Self::One(source) => vec![("default".to_owned(), source)],
            Self::Named(list) => list.into_iter().map(|entry| (entry.name, entry.template)).collect(),
        }
    }
}

impl Config {
    /// Adds tokens that only the config lists; the id each gets must be the id it is listed under.
    fn add_missing_tokens(&self, encoder: &mut tokenizers::Tokenizer) -> Result<(), TextError> {
        let mut listed = Vec::with_capacity(self.added_tokens_decoder.len());
        for (id, token) in &self.added_tokens_decoder {
            let id: u32 = id.parse().map_err(|_| TextError::Unsupported {
                field: "added_tokens_decoder",
                got: format!("key {id:?}"),
                expected: "token ids".to_owned(),
            })?;
            listed.push((id, token));
        }
        listed.sort_unstable_by_key(|(id, _)| *id);
        let known = encoder.get_added_vocabulary().get_added_tokens_decoder();
        let missing: Vec<_> = listed.iter().filter(|(id, token)| known.get(id) != Some(*token)).copied().collect();
        for (id, token) in missing {
            encoder.add_tokens([token.clone()]).map_err(|error| in_file(CONFIG, &error.to_string()))?;
            let got = encoder.token_to_id(&token.content);
            if got != Some(id) {
                return Err(TextError::Unsupported {
                    field: "added_tokens_decoder",
                    got: format!("id {id} for {:?}", token.content),
                    expected: got.map_or("a token with text".to_owned(), |got| format!("its id in {JSON}, {got}")),
                });
            }
        }
        Ok(())
    }
}

fn wanted(add: Option<bool>, token: Option<&NamedToken>, field: &'static str) -> Result<Vec<u32>, TextError> {
    if !add.unwrap_or(false) {
        return Ok(Vec::new());
    }
    match token.and_then(|token| token.id) {
        Some(id) => Ok(vec![id]),
        None => Err(TextError::Unsupported {
            field,
            got: token.map_or("nothing".to_owned(), |token| format!("{:?}", token.text)),
            expected: format!("a token of the vocabulary, since {CONFIG} says to add it"),
        }),
    }
}

/// What the post-processor puts before and after a text, found by encoding one both ways.
fn surroundings(encoder: &tokenizers::Tokenizer) -> Result<(Vec<u32>, Vec<u32>), TextError> {
    let ids = |add_special| -> Result<Vec<u32>, TextError> {
        let encoding =
            encoder.encode("a", add_special).map_err(|error| TextError::Encode { reason: error.to_string() })?;
        Ok(encoding.get_ids().to_vec())
    };
    let (bare, dressed) = (ids(false)?, ids(true)?);
    let at = (0..=dressed.len().saturating_sub(bare.len())).find(|&at| dressed[at..].starts_with(&bare));
    match at {
        Some(at) => Ok((dressed[..at].to_vec(), dressed[at + bare.len()..].to_vec())),
        None => Err(TextError::Unsupported {
            field: "post_processor",
            got: "one that rewrites the text's own ids".to_owned(),
            expected: "one that adds ids before and after".to_owned(),
        }),
    }
}

/// Bytes and special flags of all ids.
fn pieces_of(encoder: &tokenizers::Tokenizer, spelling: Spelling) -> Result<(Pieces, Vec<bool>), TextError> {
    let mut tokens: Vec<(u32, String)> = encoder.get_vocab(true).into_iter().map(|(token, id)| (id, token)).collect();
    tokens.sort_unstable();
    let added = encoder.get_added_vocabulary().get_added_tokens_decoder();
    let mut pieces = Pieces::default();
    let mut special = Vec::with_capacity(tokens.len());
    for (id, token) in tokens {
        // Two texts of one id: an added token over one of the model's. The added token wins, as in decoding.
        let id = id as usize;
        if id < pieces.len() {
            continue;
        }
        if id - pieces.len() > MAX_HOLE_TOKENS {
            return Err(TextError::Unsupported {
                field: "model.vocab",
                got: format!("id {id} for {token:?}, with {} ids before it", pieces.len()),
                expected: "ids without wide gaps".to_owned(),
            });
        }
        while pieces.len() < id {
            pieces.push_nothing();
            special.push(false);
        }
        let known = u32::try_from(id).ok().and_then(|id| added.get(&id));
        special.push(known.is_some_and(|token| token.special));
        match known {
            // A byte-level decoder would read "é" as the byte E9; the added token stands for its own text.
            Some(known) if spelling == Spelling::ByteLevel => pieces.push_literal(&known.content),
            _ => pieces.push_spelled(&token, spelling),
        }
    }
    Ok((pieces, special))
}

/// The largest gap between neighbouring ids that is filled; real vocabularies have gaps of a few hundred.
const MAX_HOLE_TOKENS: usize = 1 << 20;

/// What a decoder means for the bytes of a token.
struct Decoding {
    spelling: Spelling,
    strips_first_space: bool,
}

impl Decoding {
    fn of(decoder: &Value) -> Result<Self, TextError> {
        let steps = match decoder["type"].as_str() {
            Some("Sequence") => decoder["decoders"].as_array().map(Vec::as_slice).unwrap_or_default(),
            _ => std::slice::from_ref(decoder),
        };
        let mut spelling = None;
        let mut strips_first_space = false;
        for step in steps {
            match step["type"].as_str() {
                Some("ByteLevel") => spelling = Some(Spelling::ByteLevel),
                Some("Metaspace") if step["replacement"] == "▁" => {
                    spelling = Some(Spelling::SentencePiece);
                    strips_first_space |= step["prepend_scheme"] != "never";
                }
                Some("Replace") if step["pattern"]["String"] == "▁" && step["content"] == " " => {
                    spelling = Some(Spelling::SentencePiece);
                }
                Some("Strip") if step["content"] == " " && step["start"] == 1 && step["stop"] == 0 => {
                    strips_first_space = true;
                }
                Some("ByteFallback" | "Fuse") => {}
                _ => return Err(unsupported_decoder(step)),
            }
        }
        let spelling = spelling.ok_or_else(|| unsupported_decoder(decoder))?;
        Ok(Self { spelling, strips_first_space })
    }
}

fn unsupported_decoder(got: &Value) -> TextError {
    TextError::Unsupported {
        field: "decoder",
        got: got.to_string(),
        expected: "ByteLevel, Metaspace, or a sequence of Replace(▁), ByteFallback, Fuse and Strip".to_owned(),
    }
}

/// Refuses a model that the byte-pair code would stumble over: a merge longer than any token makes it index beyond a
/// buffer, a subword prefix or suffix changes what bytes a token has, dropout makes encoding random.
fn check_model(tokenizer_json: &[u8]) -> Result<(), TextError> {
    #[derive(Deserialize)]
    struct Outline {
        model: Model,
        /// Read in full only to be refused here if broken: the `tokenizers` crate panics at a part that is no JSON.
        #[serde(flatten)]
        _other_parts: serde_json::Map<String, Value>,
    }
    #[derive(Deserialize)]
    struct Model {
        #[serde(default)]
        r#type: Option<String>,
        #[serde(default)]
        vocab: LongestKey,
        #[serde(default)]
        merges: LongestMerge,
        #[serde(default)]
        continuing_subword_prefix: Option<String>,
        #[serde(default)]
        end_of_word_suffix: Option<String>,
        #[serde(default)]
        dropout: Option<f32>,
    }
    let outline: Outline = serde_json::from_slice(tokenizer_json).map_err(|error| in_file(JSON, &error.to_string()))?;
    let model = outline.model;
    let refuse =
        |field, got: String, expected: &str| Err(TextError::Unsupported { field, got, expected: expected.to_owned() });
    match model.r#type.as_deref() {
        None | Some("BPE") => {}
        Some(other) => return refuse("model.type", format!("{other:?}"), "BPE"),
    }
    for (field, affix) in [
        ("model.continuing_subword_prefix", model.continuing_subword_prefix),
        ("model.end_of_word_suffix", model.end_of_word_suffix),
    ] {
        if let Some(affix) = affix.filter(|affix| !affix.is_empty()) {
            return refuse(field, format!("{affix:?}"), "none");
        }
    }
    if let Some(dropout) = model.dropout.filter(|&dropout| dropout != 0.0) {
        return refuse("model.dropout", dropout.to_string(), "none");
    }
    if model.merges.0 > model.vocab.0 {
        let got = format!("one that gives {} bytes", model.merges.0);
        return refuse("model.merges", got, &format!("tokens of the vocabulary, at most {} bytes", model.vocab.0));
    }
    Ok(())
}

/// Length of the longest key of a map.
#[derive(Default)]
struct LongestKey(usize);

impl<'de> Deserialize<'de> for LongestKey {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Keys;
        impl<'de> Visitor<'de> for Keys {
            type Value = LongestKey;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a vocabulary")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<LongestKey, A::Error> {
                let mut longest = 0;
                while let Some((key, IgnoredAny)) = map.next_entry::<std::borrow::Cow<'de, str>, _>()? {
                    longest = longest.max(key.len());
                }
                Ok(LongestKey(longest))
            }
        }
        deserializer.deserialize_map(Keys)
    }
}

/// Length of the longest token that a list of merges makes.
#[derive(Default)]
struct LongestMerge(usize);

impl<'de> Deserialize<'de> for LongestMerge {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        /// A merge is written `"a b"` or `["a", "b"]`.
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Merge {
            Line(String),
            Pair(String, String),
        }
        struct Merges;
        impl<'de> Visitor<'de> for Merges {
            type Value = LongestMerge;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of merges")
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<LongestMerge, A::Error> {
                let mut longest = 0;
                while let Some(merge) = list.next_element()? {
                    let bytes = match merge {
                        Merge::Line(line) => line.len().saturating_sub(1),
                        Merge::Pair(left, right) => left.len() + right.len(),
                    };
                    longest = longest.max(bytes);
                }
                Ok(LongestMerge(longest))
            }
        }
        deserializer.deserialize_seq(Merges)
    }
}
