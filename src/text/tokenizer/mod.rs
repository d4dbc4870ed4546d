//! The crate's [`Vocabulary`]: byte-pair tokenizers from `tokenizer.json` or from GGUF metadata.
//!
//! The `tokenizers` crate encodes. The bytes of tokens come from this crate and are exact: the bytes that a token adds
//! to the text, even if they are only a part of a character. Settings for truncation and padding in the files are
//! ignored: a prompt is encoded completely or causes an error. The text of tokens is never cleaned up.

mod from_gguf;
mod from_json;
mod json_schema;

use super::token_bytes::TokenBytes;
use super::{TextError, Vocabulary};

/// Token that the tokenizer's configuration names (BOS, EOS).
#[derive(Clone, Debug, PartialEq, Eq)]
struct NamedToken {
    text: String,
    /// `None` if the vocabulary does not contain the token.
    id: Option<u32>,
}

/// Byte-pair tokenizer with its special tokens.
pub struct Tokenizer {
    encoder: tokenizers::Tokenizer,
    pieces: TokenBytes,
    /// Whether each id is a control token.
    special: Vec<bool>,
    /// Whether the first token of a text loses one leading space, which `encode` added.
    strips_first_space: bool,
    /// Tokens that `encode` adds before a prompt.
    prefix: Vec<u32>,
    /// Tokens that `encode` adds after a prompt.
    suffix: Vec<u32>,
    bos: Option<NamedToken>,
    eos: Option<NamedToken>,
    eos_ids: Vec<u32>,
    chat_templates: Vec<(String, String)>,
}

impl Tokenizer {
    /// Returns the id of the beginning-of-sequence token.
    pub fn bos_id(&self) -> Option<u32> {
        self.bos.as_ref()?.id
    }

    /// Returns the text of the beginning-of-sequence token, as chat templates write it.
    pub fn bos_token(&self) -> Option<&str> {
        self.bos.as_ref().map(|token| token.text.as_str())
    }

    /// Returns the id of the end-of-sequence token.
    pub fn eos_id(&self) -> Option<u32> {
        self.eos.as_ref()?.id
    }

    /// Returns the text of the end-of-sequence token, as chat templates write it.
    pub fn eos_token(&self) -> Option<&str> {
        self.eos.as_ref().map(|token| token.text.as_str())
    }

    /// Returns the id of the token with exactly this spelling (`<|im_end|>`, `Ġthe`).
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.encoder.token_to_id(token)
    }

    /// Returns whether BOS is added before a plain prompt.
    pub fn adds_bos(&self) -> bool {
        self.bos_id().is_some_and(|bos| self.prefix.first() == Some(&bos))
    }

    /// Returns the chat template in the tokenizer's files, if any.
    pub fn chat_template(&self) -> Option<&str> {
        self.named_chat_template("default")
    }

    /// Returns the chat template with this name, if the model has several (`default`, `tool_use`, `rag`).
    pub fn named_chat_template(&self, name: &str) -> Option<&str> {
        self.chat_templates.iter().find(|(known, _)| known == name).map(|(_, source)| source.as_str())
    }

    /// Returns the token ids of a rendered chat.
    ///
    /// The template has already written the special tokens, so no others are added, except BOS: if
    /// [`adds_bos`](Self::adds_bos) is true and the rendered chat does not start with BOS, it is added.
    ///
    /// # Errors
    /// [`TextError::Encode`] if the text cannot be encoded.
    pub fn encode_chat(&self, rendered: &str) -> Result<Vec<u32>, TextError> {
        let mut ids = self.encode_plain(rendered)?;
        if let Some(bos) = self.bos_id()
            && self.adds_bos()
            && ids.first() != Some(&bos)
        {
            ids.insert(0, bos);
        }
        Ok(ids)
    }

    /// Returns the text of token ids, as the streaming detokenizer returns it from the start of a text.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let mut detokenizer = super::Detokenizer::new(skip_special);
        let mut text = String::new();
        for &id in ids {
            detokenizer.push(self, id, &mut text);
        }
        detokenizer.flush(&mut text);
        text
    }

    fn encode_plain(&self, text: &str) -> Result<Vec<u32>, TextError> {
        let encoding =
            self.encoder.encode_fast(text, false).map_err(|error| TextError::Encode { reason: error.to_string() })?;
        Ok(encoding.get_ids().to_vec())
    }
}

impl Vocabulary for Tokenizer {
    fn len(&self) -> usize {
        self.pieces.len()
    }

    fn token_bytes(&self, id: u32, first: bool, out: &mut Vec<u8>) {
        let bytes = self.pieces.get(id);
        let stripped = if first && self.strips_first_space { bytes.strip_prefix(b" ") } else { None };
        out.extend_from_slice(stripped.unwrap_or(bytes));
    }

    fn encode_chat(&self, rendered: &str) -> Result<Vec<u32>, String> {
        Self::encode_chat(self, rendered).map_err(|error| error.to_string())
    }

    fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, String> {
        let ids = self.encode_plain(text).map_err(|error| error.to_string())?;
        if !add_special {
            return Ok(ids);
        }
        Ok([&self.prefix, &ids, &self.suffix].into_iter().flatten().copied().collect())
    }

    fn is_special(&self, id: u32) -> bool {
        self.special.get(id as usize).copied().unwrap_or(false)
    }

    fn eos_ids(&self) -> &[u32] {
        &self.eos_ids
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer")
            .field("tokens", &self.pieces.len())
            .field("bos", &self.bos)
            .field("eos", &self.eos)
            .field("eos_ids", &self.eos_ids)
            .field("prefix", &self.prefix)
            .field("suffix", &self.suffix)
            .finish_non_exhaustive()
    }
}
