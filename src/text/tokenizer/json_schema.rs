//! Components of `tokenizer.json`: checks before the `tokenizers` crate parses the file, and components parsed here.
//!
//! The `tokenizers` crate panics on some damaged files and silently applies some unsupported options. All known cases
//! are errors here. The decoder and the post-processor are parsed only here.

use std::fmt;

use serde::Deserialize;
use serde::de::{IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::Value;

use crate::text::TextError;
use crate::text::token_bytes::TokenEncoding;

/// Name of the file.
pub(super) const JSON: &str = "tokenizer.json";

/// Creates an error that concerns a file as a whole.
pub(super) fn in_file(file: &'static str, reason: &str) -> TextError {
    TextError::File { file, reason: reason.to_owned() }
}

/// Conversion of tokens to bytes that a decoder defines.
pub(super) struct Decoding {
    pub(super) spelling: TokenEncoding,
    pub(super) strips_first_space: bool,
}

impl Decoding {
    fn from_decoder(decoder: &Value) -> Result<Self, TextError> {
        let steps = match decoder["type"].as_str() {
            Some("Sequence") => decoder["decoders"].as_array().map(Vec::as_slice).unwrap_or_default(),
            _ => std::slice::from_ref(decoder),
        };
        let mut spelling = None;
        let mut strips_first_space = false;
        for step in steps {
            match step["type"].as_str() {
                Some("ByteLevel") => spelling = Some(TokenEncoding::ByteLevel),
                Some("Metaspace") if step["replacement"] == "▁" => {
                    spelling = Some(TokenEncoding::SentencePiece);
                    strips_first_space |= step["prepend_scheme"] != "never";
                }
                Some("Replace") if step["pattern"]["String"] == "▁" && step["content"] == " " => {
                    spelling = Some(TokenEncoding::SentencePiece);
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

/// Components of the file, without the vocabulary: those that the `tokenizers` crate may panic on or silently apply.
#[derive(Deserialize)]
pub(super) struct Schema {
    model: Model,
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    post_processor: Value,
    #[serde(default)]
    decoder: Value,
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

impl Schema {
    /// Parses the components and rejects unsupported files.
    ///
    /// A file is rejected if the `tokenizers` crate would panic on it: a merge longer than any token makes the crate
    /// index beyond a buffer, and so does a component that cannot be parsed. It is also rejected if this crate would
    /// not apply an option: a subword prefix or suffix changes the bytes of a token, and dropout makes encoding random.
    pub(super) fn read(tokenizer_json: &[u8]) -> Result<Self, TextError> {
        let text = std::str::from_utf8(tokenizer_json).map_err(|error| in_file(JSON, &error.to_string()))?;
        let schema: Self = serde_json::from_str(text).map_err(|error| in_file(JSON, &error.to_string()))?;
        let refuse = |field, got: String, expected: &str| {
            Err(TextError::Unsupported { field, got, expected: expected.to_owned() })
        };
        for (field, component, unsupported) in [
            // Character maps of Unigram models, and splits into pieces of fixed length: no BPE model has them.
            ("normalizer", &schema.normalizer, "Precompiled"),
            ("pre_tokenizer", &schema.pre_tokenizer, "FixedLength"),
        ] {
            if contains_type(component, unsupported) {
                return refuse(field, unsupported.to_owned(), "a component of another type");
            }
        }
        let model = &schema.model;
        if let Some(other) = model.r#type.as_deref().filter(|&kind| kind != "BPE") {
            return refuse("model.type", format!("{other:?}"), "\"BPE\"");
        }
        for (field, affix) in [
            ("model.continuing_subword_prefix", &model.continuing_subword_prefix),
            ("model.end_of_word_suffix", &model.end_of_word_suffix),
        ] {
            if let Some(affix) = affix.as_ref().filter(|affix| !affix.is_empty()) {
                return refuse(field, format!("{affix:?}"), "none");
            }
        }
        if let Some(dropout) = model.dropout.filter(|&dropout| dropout != 0.0) {
            return refuse("model.dropout", dropout.to_string(), "none");
        }
        let (longest, made) = (model.vocab.0, model.merges.0);
        if made > longest {
            let expected = format!("tokens of the vocabulary, at most {longest} bytes");
            return refuse("model.merges", format!("a merge that yields {made} bytes"), &expected);
        }
        Ok(schema)
    }

    /// Returns the conversion of tokens to bytes.
    pub(super) fn decoding(&self) -> Result<Decoding, TextError> {
        Decoding::from_decoder(&self.decoder)
    }

    /// Returns the ids that the post-processor adds before and after a text.
    pub(super) fn surroundings(&self) -> Result<(Vec<u32>, Vec<u32>), TextError> {
        surroundings(&self.post_processor)
    }
}

/// Returns whether a component, or a component inside it, has this type.
fn contains_type(component: &Value, name: &str) -> bool {
    match component {
        Value::Object(fields) => {
            fields.get("type").is_some_and(|kind| kind == name)
                || fields.values().any(|field| contains_type(field, name))
        }
        Value::Array(items) => items.iter().any(|item| contains_type(item, name)),
        _ => false,
    }
}

/// Length of the longest key of a map, in bytes.
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

/// Length of the longest token that a merge yields, in bytes.
#[derive(Default)]
struct LongestMerge(usize);

impl<'de> Deserialize<'de> for LongestMerge {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        /// Merge: one string with a space, or a list of two strings.
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

/// Returns the ids that a post-processor adds before and after a text.
fn surroundings(processor: &Value) -> Result<(Vec<u32>, Vec<u32>), TextError> {
    let refuse = || TextError::Unsupported {
        field: "post_processor",
        got: processor.to_string(),
        expected: "TemplateProcessing around one sequence, ByteLevel, or a sequence of these".to_owned(),
    };
    let (mut prefix, mut suffix) = (Vec::new(), Vec::new());
    match processor["type"].as_str() {
        None if processor.is_null() => {}
        // This post-processor only trims offsets.
        Some("ByteLevel") => {}
        Some("Sequence") => {
            for step in processor["processors"].as_array().ok_or_else(refuse)? {
                let (before, after) = surroundings(step)?;
                // A later step adds its ids outside those of the earlier steps.
                prefix.splice(0..0, before);
                suffix.extend(after);
            }
        }
        Some("TemplateProcessing") => {
            let mut before_text = true;
            for piece in processor["single"].as_array().ok_or_else(refuse)? {
                if let Some(name) = piece["SpecialToken"]["id"].as_str() {
                    let ids = processor["special_tokens"][name]["ids"].clone();
                    let ids: Vec<u32> = serde_json::from_value(ids).map_err(|_| refuse())?;
                    if before_text { &mut prefix } else { &mut suffix }.extend(ids);
                } else if piece["Sequence"]["id"] == "A" && before_text {
                    before_text = false;
                } else {
                    return Err(refuse());
                }
            }
            if before_text {
                return Err(refuse());
            }
        }
        _ => return Err(refuse()),
    }
    Ok((prefix, suffix))
}
