//! The only view the engine has of a tokenizer.

/// Interface between the engine and a vocabulary: encoding, bytes of tokens, special tokens.
pub trait Vocabulary: Send + Sync + std::fmt::Debug {
    /// Number of token ids (the model's table may be larger).
    fn len(&self) -> usize;

    /// Whether the vocabulary has no token.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Appends the bytes of a token to `out`; nothing for an unknown id.
    ///
    /// The bytes of one token need not be valid UTF-8. `first` marks the first token of a text (some vocabularies strip
    /// the leading space there).
    fn token_bytes(&self, id: u32, first: bool, out: &mut Vec<u8>);

    /// Encodes a text.
    ///
    /// `add_special` adds the tokens that the tokenizer puts around a prompt (for example BOS); special tokens spelled
    /// out in the text are recognized in both cases.
    ///
    /// # Errors
    /// The reason why the text cannot be encoded.
    fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, String>;

    /// Ids of a rendered chat, whose template has written the special tokens already.
    fn encode_chat(&self, rendered: &str) -> Result<Vec<u32>, String> {
        self.encode(rendered, false)
    }

    /// Whether the token is a control token, which streamed text leaves out.
    fn is_special(&self, id: u32) -> bool;

    /// The tokenizer's own end-of-sequence tokens.
    fn eos_ids(&self) -> &[u32] {
        &[]
    }
}
