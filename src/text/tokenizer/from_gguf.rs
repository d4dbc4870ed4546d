//! Tokenizer from the metadata of a GGUF file.
//!
//! Two models are supported: `gpt2`, byte-level BPE with a list of merges and a named pre-tokenizer, and `llama`,
//! `SentencePiece` BPE, whose merges are derived from the scores. Any other model is an error with its name. Absent
//! keys have the defaults that writers of such files assume.

use std::collections::HashMap;

use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::normalizers::{NFC, Prepend, Replace, Sequence};
use tokenizers::{AddedToken, NormalizerWrapper};

use super::super::pre_tokenizer::PreTokenizer;
use super::super::{TextError, TokenizerMetadata};
use super::{NamedToken, Tokenizer};
use crate::text::token_bytes::{TokenBytes, TokenEncoding};

const MODEL: &str = "tokenizer.ggml.model";
const PRE: &str = "tokenizer.ggml.pre";
const TOKENS: &str = "tokenizer.ggml.tokens";
const SCORES: &str = "tokenizer.ggml.scores";
const TYPES: &str = "tokenizer.ggml.token_type";
const MERGES: &str = "tokenizer.ggml.merges";
const BOS: &str = "tokenizer.ggml.bos_token_id";
const EOS: &str = "tokenizer.ggml.eos_token_id";
const UNKNOWN: &str = "tokenizer.ggml.unknown_token_id";

/// Tokens that end a turn. Older files specify only one end-of-sequence id; their other ends are found by their text.
const TURN_ENDS: [&str; 13] = [
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eom_id|>",
    "<EOT>",
    "[EOT]",
    "<｜end▁of▁sentence｜>",
    "<end_of_utterance>",
];

/// Type of a token in `tokenizer.ggml.token_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TokenType {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

impl TokenType {
    fn from_code(id: usize, code: i32) -> Result<Self, TextError> {
        Ok(match code {
            // Type 0 is "undefined"; some writers use it for ordinary tokens.
            0 | 1 => Self::Normal,
            2 => Self::Unknown,
            3 => Self::Control,
            4 => Self::UserDefined,
            5 => Self::Unused,
            6 => Self::Byte,
            _ => return Err(unsupported(TYPES, format!("{code} for token {id}"), "a type from 0 to 6")),
        })
    }
}

/// Vocabulary of the file.
struct Table {
    tokens: Vec<String>,
    types: Vec<TokenType>,
    ids: HashMap<String, u32>,
}

impl Tokenizer {
    /// Builds a tokenizer from the metadata of a GGUF file.
    ///
    /// # Errors
    /// [`TextError::MissingKey`] if a required key is absent; [`TextError::Unsupported`] if a value is invalid or not
    /// supported.
    pub fn from_gguf(meta: &dyn TokenizerMetadata) -> Result<Self, TextError> {
        let model = meta.str(MODEL).ok_or(TextError::MissingKey { key: MODEL, expected: "\"gpt2\" or \"llama\"" })?;
        match model {
            "gpt2" => byte_level(meta),
            "llama" => sentence_piece(meta),
            other => {
                Err(unsupported(MODEL, format!("{other:?}"), "\"gpt2\" (byte-level) or \"llama\" (SentencePiece)"))
            }
        }
    }
}

fn unsupported(field: &'static str, got: String, expected: &str) -> TextError {
    TextError::Unsupported { field, got, expected: expected.to_owned() }
}

fn in_key(field: &'static str) -> impl Fn(tokenizers::Error) -> TextError {
    move |error| unsupported(field, error.to_string(), "a consistent vocabulary")
}

impl Table {
    fn read(meta: &dyn TokenizerMetadata) -> Result<Self, TextError> {
        let tokens = meta.strings(TOKENS).ok_or(TextError::MissingKey { key: TOKENS, expected: "the vocabulary" })?;
        if tokens.is_empty() || u32::try_from(tokens.len()).is_err() {
            return Err(unsupported(TOKENS, format!("{} tokens", tokens.len()), "at least one token"));
        }
        let types = match meta.i32s(TYPES) {
            Some(codes) if codes.len() == tokens.len() => {
                codes.iter().enumerate().map(|(id, &code)| TokenType::from_code(id, code)).collect::<Result<_, _>>()?
            }
            Some(codes) => return Err(wrong_count(TYPES, codes.len(), tokens.len())),
            None => vec![TokenType::Normal; tokens.len()],
        };
        let mut ids = HashMap::with_capacity(tokens.len());
        for (id, token) in (0_u32..).zip(&tokens) {
            // Unused tokens pad the table to a round size; an empty text would never match.
            if types[id as usize] == TokenType::Unused || token.is_empty() {
                continue;
            }
            if let Some(before) = ids.insert(token.clone(), id) {
                return Err(unsupported(TOKENS, format!("{token:?} as both {before} and {id}"), "each token once"));
            }
        }
        Ok(Self { tokens, types, ids })
    }

    fn vocab(&self) -> Vocab {
        self.ids.iter().map(|(token, &id)| (token.clone(), id)).collect()
    }

    /// Returns the control tokens, which streamed text leaves out; the unknown token is one of them.
    fn special(&self) -> Vec<bool> {
        self.types.iter().map(|kind| matches!(kind, TokenType::Control | TokenType::Unknown)).collect()
    }

    /// Returns the tokens that are matched literally, before the text is normalized and split.
    fn added(&self) -> Vec<AddedToken> {
        self.tokens
            .iter()
            .zip(&self.types)
            .filter(|(token, kind)| {
                !token.is_empty() && matches!(kind, TokenType::Control | TokenType::Unknown | TokenType::UserDefined)
            })
            .map(|(token, kind)| AddedToken::from(token.clone(), *kind != TokenType::UserDefined).normalized(false))
            .collect()
    }

    fn pieces(&self, spelling: TokenEncoding) -> TokenBytes {
        let mut pieces = TokenBytes::default();
        for (token, kind) in self.tokens.iter().zip(&self.types) {
            match (kind, spelling) {
                (TokenType::Unused, _) => pieces.push_nothing(),
                (TokenType::Normal | TokenType::Byte, _) | (_, TokenEncoding::SentencePiece) => {
                    pieces.push_spelled(token, spelling);
                }
                (_, TokenEncoding::ByteLevel) => pieces.push_literal(token),
            }
        }
        pieces
    }

    fn named(&self, meta: &dyn TokenizerMetadata, key: &'static str) -> Result<Option<NamedToken>, TextError> {
        let Some(id) = meta.u32(key) else { return Ok(None) };
        match self.tokens.get(id as usize) {
            Some(text) => Ok(Some(NamedToken { text: text.clone(), id: Some(id) })),
            None => Err(unsupported(key, id.to_string(), &format!("an id below {}", self.tokens.len()))),
        }
    }

    /// Returns the end-of-sequence, end-of-turn and end-of-message ids, and the control tokens of [`TURN_ENDS`].
    fn eos_ids(&self, meta: &dyn TokenizerMetadata) -> Result<Vec<u32>, TextError> {
        let mut ids = Vec::new();
        for key in [EOS, "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"] {
            ids.extend(self.named(meta, key)?.and_then(|token| token.id));
        }
        ids.extend(
            TURN_ENDS
                .iter()
                .filter_map(|text| self.ids.get(*text).copied())
                .filter(|&id| self.types[id as usize] == TokenType::Control),
        );
        ids.sort_unstable();
        ids.dedup();
        Ok(ids)
    }

    fn finish(
        &self,
        meta: &dyn TokenizerMetadata,
        mut encoder: tokenizers::Tokenizer,
        spelling: TokenEncoding,
        strips_first_space: bool,
        adds_bos: bool,
    ) -> Result<Tokenizer, TextError> {
        encoder.add_tokens(self.added()).map_err(in_key(TOKENS))?;
        let (bos, eos) = (self.named(meta, BOS)?, self.named(meta, EOS)?);
        let around = |key: &'static str, default: bool, token: &Option<NamedToken>| {
            let requested = meta.bool(key);
            match (requested.unwrap_or(default), token.as_ref().and_then(|token| token.id)) {
                (true, Some(id)) => Ok(vec![id]),
                (true, None) if requested.is_some() => {
                    Err(unsupported(key, "true".to_owned(), "false, because the file does not define this token"))
                }
                _ => Ok(Vec::new()),
            }
        };
        Ok(Tokenizer {
            pieces: self.pieces(spelling),
            special: self.special(),
            strips_first_space,
            prefix: around("tokenizer.ggml.add_bos_token", adds_bos, &bos)?,
            suffix: around("tokenizer.ggml.add_eos_token", false, &eos)?,
            eos_ids: self.eos_ids(meta)?,
            bos,
            eos,
            chat_templates: meta
                .str("tokenizer.chat_template")
                .map(|source| ("default".to_owned(), source.to_owned()))
                .into_iter()
                .collect(),
            encoder,
        })
    }
}

fn wrong_count(field: &'static str, got: usize, tokens: usize) -> TextError {
    unsupported(field, format!("{got} entries"), &format!("{tokens}, one per token"))
}

fn byte_level(meta: &dyn TokenizerMetadata) -> Result<Tokenizer, TextError> {
    let name = meta.str(PRE).ok_or(TextError::MissingKey { key: PRE, expected: "the name of the pre-tokenizer" })?;
    let pre = PreTokenizer::named(name)?;
    let table = Table::read(meta)?;
    let lines = meta.strings(MERGES).ok_or(TextError::MissingKey { key: MERGES, expected: "the list of merges" })?;
    let mut merges = Vec::with_capacity(lines.len());
    let mut joined = String::new();
    for (rank, line) in lines.iter().enumerate() {
        // The left token has at least one character, so the first character is never the separator.
        let start = line.chars().next().map_or(0, char::len_utf8);
        let pair = line[start..].find(' ').map(|at| (&line[..start + at], &line[start + at + 1..]));
        let known = pair.filter(|(left, right)| {
            joined.clear();
            joined.push_str(left);
            joined.push_str(right);
            [*left, *right, joined.as_str()].iter().all(|token| table.ids.contains_key(*token))
        });
        let Some((left, right)) = known else {
            let got = format!("{line:?} at {rank}");
            return Err(unsupported(
                MERGES,
                got,
                "two tokens of the vocabulary that join to a third, separated by a space",
            ));
        };
        merges.push((left.to_owned(), right.to_owned()));
    }
    let model = BPE::builder()
        .vocab_and_merges(table.vocab(), merges)
        .ignore_merges(pre.ignore_merges)
        .build()
        .map_err(in_key(MERGES))?;
    let mut encoder = tokenizers::Tokenizer::new(model);
    encoder.with_pre_tokenizer(Some(pre.build()?));
    if pre.composes {
        encoder.with_normalizer(Some(NFC)).map_err(in_key(PRE))?;
    }
    table.finish(meta, encoder, TokenEncoding::ByteLevel, false, pre.adds_bos)
}

fn sentence_piece(meta: &dyn TokenizerMetadata) -> Result<Tokenizer, TextError> {
    let table = Table::read(meta)?;
    let scores = meta.f32s(SCORES).ok_or(TextError::MissingKey { key: SCORES, expected: "one score per token" })?;
    if scores.len() != table.tokens.len() {
        return Err(wrong_count(SCORES, scores.len(), table.tokens.len()));
    }
    let unknown = table.named(meta, UNKNOWN)?.map(|token| token.text);
    let byte_fallback = table.types.contains(&TokenType::Byte);
    let mut model = BPE::builder()
        .vocab_and_merges(table.vocab(), merges_by_score(&table, &scores))
        .fuse_unk(true)
        .byte_fallback(byte_fallback);
    if let Some(unknown) = unknown {
        model = model.unk_token(unknown);
    }
    let mut encoder = tokenizers::Tokenizer::new(model.build().map_err(in_key(TOKENS))?);
    let adds_space = meta.bool("tokenizer.ggml.add_space_prefix").unwrap_or(true);
    let mut steps: Vec<NormalizerWrapper> = Vec::with_capacity(2);
    if adds_space {
        steps.push(Prepend::new("▁".to_owned()).into());
    }
    steps.push(Replace::new(" ", "▁").map_err(in_key(TOKENS))?.into());
    encoder.with_normalizer(Some(Sequence::new(steps))).map_err(in_key(TOKENS))?;
    table.finish(meta, encoder, TokenEncoding::SentencePiece, adds_space, true)
}

/// Returns the merges that the scores define: each split of a token into two tokens, higher scores first.
///
/// `SentencePiece` merges the adjacent tokens whose union has the highest score; BPE does the same with merges in this
/// order.
fn merges_by_score(table: &Table, scores: &[f32]) -> Vec<(String, String)> {
    let mut merges = Vec::new();
    for (id, token) in table.tokens.iter().enumerate() {
        if table.types[id] != TokenType::Normal {
            continue;
        }
        for (split, _) in token.char_indices().skip(1) {
            let (left, right) = token.split_at(split);
            if let (Some(&left_id), Some(&right_id)) = (table.ids.get(left), table.ids.get(right)) {
                merges.push((scores[id], (left.chars().count(), right.chars().count()), (left_id, right_id)));
            }
        }
    }
    merges.sort_by(|(a, a_len, _), (b, b_len, _)| b.total_cmp(a).then_with(|| b_len.cmp(a_len)));
    let text = |id: u32| table.tokens[id as usize].clone();
    merges.into_iter().map(|(_, _, (left, right))| (text(left), text(right))).collect()
}
