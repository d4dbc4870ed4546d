//! Tokenizer from `tokenizer.json` and `tokenizer_config.json`.
//!
//! `tokenizer.json` defines how text becomes ids. The config names BOS and EOS, may specify whether they are added, and
//! contains the chat template. A decoder that is neither byte-level nor `SentencePiece` is an error: the bytes of its
//! tokens would be unknown.

use serde::Deserialize;
use tokenizers::AddedToken;

use super::super::TextError;
use super::json_schema::{JSON, Schema, in_file};
use super::{NamedToken, Tokenizer};
use crate::text::token_bytes::{TokenBytes, TokenEncoding};

const CONFIG: &str = "tokenizer_config.json";

impl Tokenizer {
    /// Builds a tokenizer from the contents of the two files of a model folder.
    ///
    /// # Errors
    /// [`TextError::File`] if a file cannot be parsed; [`TextError::Unsupported`] if a file contains a component or a
    /// value that this crate does not support.
    pub fn from_json(tokenizer_json: &[u8], tokenizer_config_json: Option<&[u8]>) -> Result<Self, TextError> {
        let schema = Schema::read(tokenizer_json)?;
        let decoding = schema.decoding()?;
        let (mut prefix, mut suffix) = schema.surroundings()?;
        let mut encoder =
            tokenizers::Tokenizer::from_bytes(tokenizer_json).map_err(|error| in_file(JSON, &error.to_string()))?;
        encoder.with_padding(None);
        encoder.with_post_processor(None::<tokenizers::PostProcessorWrapper>);
        encoder.with_truncation(None).map_err(|error| in_file(JSON, &error.to_string()))?;
        let config: Config = match tokenizer_config_json {
            // serde would read a list as the fields of a struct in order, and an empty list as an empty config.
            Some(bytes) if bytes.trim_ascii_start().starts_with(b"[") => {
                return Err(in_file(CONFIG, "got a list, expected an object"));
            }
            Some(bytes) => serde_json::from_slice(bytes).map_err(|error| in_file(CONFIG, &error.to_string()))?,
            None => Config::default(),
        };
        config.add_missing_tokens(&mut encoder)?;

        let (pieces, special) = pieces_of(&encoder, decoding.spelling)?;

        let named = |token: Option<TokenText>| {
            token.map(TokenText::into_text).map(|text| NamedToken { id: encoder.token_to_id(&text), text })
        };
        let mut bos = named(config.bos_token);
        let eos = named(config.eos_token);
        // If either flag is present, the config defines both prefix and suffix, as in Transformers.
        if config.add_bos_token.is_some() || config.add_eos_token.is_some() {
            prefix = affix(config.add_bos_token, bos.as_ref(), "bos_token")?;
            suffix = affix(config.add_eos_token, eos.as_ref(), "eos_token")?;
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

/// Used fields of `tokenizer_config.json`.
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

/// Special token: its text, or an object with flags.
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

/// One chat template, or several named ones.
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
    /// Adds tokens that only the config lists; each new token must receive the id of its entry.
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

/// Returns the id of `token` if `add` is true, otherwise no ids.
fn affix(add: Option<bool>, token: Option<&NamedToken>, field: &'static str) -> Result<Vec<u32>, TextError> {
    if !add.unwrap_or(false) {
        return Ok(Vec::new());
    }
    match token.and_then(|token| token.id) {
        Some(id) => Ok(vec![id]),
        None => Err(TextError::Unsupported {
            field,
            got: token.map_or("nothing".to_owned(), |token| format!("{:?}", token.text)),
            expected: format!("a token of the vocabulary, because {CONFIG} requests to add it"),
        }),
    }
}

/// Returns the bytes and the special flags of all ids.
fn pieces_of(encoder: &tokenizers::Tokenizer, spelling: TokenEncoding) -> Result<(TokenBytes, Vec<bool>), TextError> {
    let mut tokens: Vec<(u32, String)> = encoder.get_vocab(true).into_iter().map(|(token, id)| (id, token)).collect();
    tokens.sort_unstable();
    let added = encoder.get_added_vocabulary().get_added_tokens_decoder();
    let mut pieces = TokenBytes::default();
    let mut special = Vec::with_capacity(tokens.len());
    for (id, token) in tokens {
        // Two tokens with the same id: an added token and a token of the model. The added token takes precedence, as in
        // decoding.
        let id = id as usize;
        if id < pieces.len() {
            continue;
        }
        if id - pieces.len() > MAX_HOLE_TOKENS {
            return Err(TextError::Unsupported {
                field: "model.vocab",
                got: format!("id {id} for {token:?}, with {} ids before it", pieces.len()),
                expected: format!("ids with gaps of at most {MAX_HOLE_TOKENS}"),
            });
        }
        while pieces.len() < id {
            pieces.push_nothing();
            special.push(false);
        }
        let known = u32::try_from(id).ok().and_then(|id| added.get(&id));
        special.push(known.is_some_and(|token| token.special));
        match known {
            // A byte-level decoder would decode "é" to the byte E9; the spelling of an added token is its text.
            Some(known) if spelling == TokenEncoding::ByteLevel => pieces.push_literal(&known.content),
            _ => pieces.push_spelled(&token, spelling),
        }
    }
    Ok((pieces, special))
}

/// Largest accepted gap between adjacent ids; real vocabularies have gaps of a few hundred.
const MAX_HOLE_TOKENS: usize = 1 << 20;
