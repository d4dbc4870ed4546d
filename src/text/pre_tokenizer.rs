//! Pre-tokenizers of GGUF files: split text into words before byte-pair merging.
//!
//! Each name (`tokenizer.ggml.pre`) selects the split patterns of the `tokenizer.json` from which the file was
//! converted. The patterns run in order; each isolates its matches within the pieces that the previous patterns did not
//! match. An unknown name is an error: a wrong split would yield wrong ids without any other symptom.

use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{PreTokenizerWrapper, SplitDelimiterBehavior};

use super::TextError;

/// Pattern of GPT-2, also the default of the byte-level pre-tokenizer.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const DIGIT: &str = r"\p{N}";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const SEED: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+";
const BAILING: &str =
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+";
const O200K: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const DIGITS_1_TO_3: &str = r"\p{N}{1,3}";
const HAN_KANA: &str = r"[一-龥぀-ゟ゠-ヿ]+";
const DEEPSEEK3: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;
const BLOOM: &str = r" ?[^(\s|.,!?…。，、।۔،)]+";

/// Pre-tokenizer that a name of `tokenizer.ggml.pre` selects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PreTokenizer {
    /// Split patterns, in order.
    patterns: &'static [&'static str],
    /// Whether the tokenizer's normalizer composes characters (NFC).
    pub(super) composes: bool,
    /// Whether a word that is a token of the vocabulary becomes that token without applying the merges.
    pub(super) ignore_merges: bool,
    /// Whether BOS is added before a prompt if the file does not specify it.
    pub(super) adds_bos: bool,
}

const fn plain(patterns: &'static [&'static str]) -> PreTokenizer {
    PreTokenizer { patterns, composes: false, ignore_merges: false, adds_bos: false }
}

impl PreTokenizer {
    /// Returns the pre-tokenizer with this name.
    pub(super) fn named(name: &str) -> Result<Self, TextError> {
        Ok(match name {
            "gpt-2" | "default" | "phi-2" | "mpt" | "olmo" | "jais" | "trillion" | "granite-docling" | "exaone4"
            | "modern-bert" | "gigachat" | "a.x-4.0" | "mellum" => plain(&[GPT2]),
            "smollm" | "starcoder" | "refact" | "command-r" | "codeshell" | "exaone" | "minerva-7b" | "mellum2" => {
                plain(&[DIGIT, GPT2])
            }
            "llama-bpe" | "llama3" | "llama-v3" | "falcon3" | "falcon-h1" | "pixtral" | "midm-2.0" | "lfm2" => {
                PreTokenizer { ignore_merges: true, adds_bos: true, ..plain(&[LLAMA3]) }
            }
            "dbrx" | "smaug-bpe" | "glm4" | "chatglm-bpe" => plain(&[LLAMA3]),
            "qwen2" => PreTokenizer { composes: true, ..plain(&[QWEN2]) },
            "qwen35" => PreTokenizer { composes: true, ..plain(&[QWEN35]) },
            "deepseek-r1-qwen" | "stablelm2" | "hunyuan" | "megrez" | "grok-2" | "solar-open" | "kormo" => {
                plain(&[QWEN2])
            }
            "seed-coder" => plain(&[SEED]),
            "bailingmoe" | "bailingmoe2" | "llada-moe" => plain(&[BAILING]),
            "gpt-4o" | "llama4" => PreTokenizer { ignore_merges: true, ..plain(&[O200K]) },
            "minimax-m2" => plain(&[O200K]),
            "tekken" => PreTokenizer { ignore_merges: true, adds_bos: true, ..plain(&[TEKKEN]) },
            "deepseek-v3" | "hunyuan-dense" => plain(&[DIGITS_1_TO_3, HAN_KANA, DEEPSEEK3]),
            "deepseek-coder" => plain(&[r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", DIGIT]),
            "falcon" => plain(&[r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"]),
            "bloom" | "poro-chat" | "gpt3-finnish" => plain(&[BLOOM]),
            "viking" => plain(&[BLOOM, DIGIT]),
            _ => {
                return Err(TextError::Unsupported {
                    field: "tokenizer.ggml.pre",
                    got: format!("{name:?}"),
                    expected: "a known pre-tokenizer, for example gpt-2, smollm, llama-bpe, qwen2, gpt-4o, tekken, \
                               deepseek-v3"
                        .to_owned(),
                });
            }
        })
    }

    /// Builds the pre-tokenizer: the splits, then the conversion of bytes to the byte-level alphabet.
    pub(super) fn build(&self) -> Result<PreTokenizerWrapper, TextError> {
        let mut steps: Vec<PreTokenizerWrapper> = Vec::with_capacity(self.patterns.len() + 1);
        for pattern in self.patterns {
            let pattern = SplitPattern::Regex((*pattern).to_owned());
            let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false)
                .map_err(|error| TextError::Encode { reason: error.to_string() })?;
            steps.push(split.into());
        }
        steps.push(ByteLevel::new(false, false, false).into());
        Ok(Sequence::new(steps).into())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;
    use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer as _};

    use super::*;

    /// Returns the pieces of the text, as slices of the text itself.
    fn split<'t>(name: &str, text: &'t str) -> Vec<&'t str> {
        let mut pieces = PreTokenizedString::from(text);
        PreTokenizer::named(name).unwrap().build().unwrap().pre_tokenize(&mut pieces).unwrap();
        pieces
            .get_splits(OffsetReferential::Original, OffsetType::Byte)
            .into_iter()
            .map(|(_, (start, end), _)| &text[start..end])
            .collect()
    }

    #[test]
    fn splits_match_the_golden_pieces_of_each_family() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/cases/pretokenizer_splits.json");
        let cases: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        let cases = cases["cases"].as_array().unwrap();
        assert!(cases.len() >= 10);
        for case in cases {
            let text = case["text"].as_str().unwrap();
            for (family, name) in [("llama3", "llama-bpe"), ("qwen2", "qwen2"), ("gpt2", "gpt-2")] {
                let expected: Vec<&str> = case[family].as_array().unwrap().iter().filter_map(Value::as_str).collect();
                assert_eq!(split(name, text), expected, "{name} on {text:?}");
            }
        }
    }

    #[test]
    fn smollm_splits_digits_one_by_one() {
        assert_eq!(split("smollm", "in 1984!"), ["in", " ", "1", "9", "8", "4", "!"]);
    }

    #[test]
    fn every_name_builds_and_keeps_the_text_whole() {
        let text = "It's 1234567 o'clock — naïve ÅNGSTRÖM 東京2025年\r\n\n\t x=y;\u{a0}//  \n end ";
        for name in [
            "gpt-2",
            "smollm",
            "llama-bpe",
            "dbrx",
            "qwen2",
            "qwen35",
            "stablelm2",
            "seed-coder",
            "bailingmoe",
            "gpt-4o",
            "tekken",
            "deepseek-v3",
            "deepseek-coder",
            "falcon",
            "bloom",
            "viking",
        ] {
            assert_eq!(split(name, text).concat(), text, "{name}");
        }
    }

    #[test]
    fn an_unknown_name_is_an_error_with_the_name() {
        let error = PreTokenizer::named("klingon-bpe").unwrap_err().to_string();
        assert!(error.contains("tokenizer.ggml.pre") && error.contains("klingon-bpe"), "{error}");
    }
}
