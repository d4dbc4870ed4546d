//! The only view the engine has of a tokenizer.

/// What the engine must know of a vocabulary: bytes of a token, ids of a text, which tokens are special.
pub trait Vocabulary: Send + Sync + std::fmt::Debug {
    /// Number of ids the vocabulary knows (the model's own table may be larger).
    fn len(&self) -> usize;

    /// Whether it knows no id at all.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The bytes that the token adds to the text, appended to `out`; nothing for an unknown id. The bytes of one token
    /// need not be valid UTF-8. `first` says that it is the first token of the text (some vocabularies strip the
    /// leading space there).
    fn token_bytes(&self, id: u32, first: bool, out: &mut Vec<u8>);

    /// Ids of a text. `add_special` adds what the tokenizer puts around a prompt (for example BOS); special tokens
    /// spelled out in the text are recognized either way.
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
