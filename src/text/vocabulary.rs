//! Interface between the engine and a tokenizer.

/// Vocabulary as the engine uses it: bytes of a token, ids of a text, special tokens.
pub trait Vocabulary: Send + Sync + std::fmt::Debug {
    /// Returns the number of ids of the vocabulary (the model's embedding table may be larger).
    fn len(&self) -> usize;

    /// Returns whether the vocabulary has no ids.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Appends to `out` the bytes that the token adds to the text; no bytes for an unknown id.
    ///
    /// The bytes of one token need not be valid UTF-8. `first` is true for the first token of a text (some vocabularies
    /// strip its leading space).
    fn token_bytes(&self, id: u32, first: bool, out: &mut Vec<u8>);

    /// Returns the token ids of a text.
    ///
    /// With `add_special`, the result includes the tokens that the tokenizer adds around a prompt (e.g. BOS). Special
    /// tokens that are written out in the text are recognized in both cases.
    ///
    /// # Errors
    /// A description of the reason why the text cannot be encoded.
    fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, String>;

    /// Returns the token ids of a rendered chat, into which the template has already written the special tokens.
    ///
    /// # Errors
    /// A description of the reason why the text cannot be encoded.
    fn encode_chat(&self, rendered: &str) -> Result<Vec<u32>, String> {
        self.encode(rendered, false)
    }

    /// Returns whether the token is a control token, which streamed text leaves out.
    fn is_special(&self, id: u32) -> bool;

    /// Returns the tokenizer's own end-of-sequence ids.
    fn eos_ids(&self) -> &[u32] {
        &[]
    }
}
