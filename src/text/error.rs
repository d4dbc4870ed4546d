//! What can be wrong with a tokenizer file, a prompt or a chat template.

/// Why a tokenizer could not be built, or a text not be encoded or rendered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TextError {
    /// A file of the model folder is not what it should be.
    #[error("{file}: {reason}")]
    File {
        /// Name of the file.
        file: &'static str,
        /// What is wrong with it.
        reason: String,
    },
    /// The GGUF metadata lacks a key that the tokenizer needs.
    #[error("{key}: absent from the gguf metadata, expected {expected}")]
    MissingKey {
        /// The key.
        key: &'static str,
        /// What should stand there.
        expected: &'static str,
    },
    /// A value that this crate does not implement, or that cannot be right.
    #[error("{field}: got {got}, expected {expected}")]
    Unsupported {
        /// Field of the file or key of the metadata.
        field: &'static str,
        /// What stands there.
        got: String,
        /// What would be accepted.
        expected: String,
    },
    /// A value is not JSON, or has no JSON form.
    #[error("{field}: {reason}")]
    Json {
        /// The message, option or variable.
        field: &'static str,
        /// The reason in the words of the JSON library.
        reason: String,
    },
    /// The text could not be tokenized.
    #[error("text cannot be tokenized: {reason}")]
    Encode {
        /// Why.
        reason: String,
    },
    /// The chat template is not valid, or failed on this conversation.
    #[error("chat template, line {line}: {reason}")]
    Template {
        /// Line of the template, from 1; 0 where unknown.
        line: usize,
        /// What went wrong.
        reason: String,
    },
    /// The chat template itself refused the conversation (`raise_exception`).
    #[error("chat template refused the conversation: {reason}")]
    Refused {
        /// The template's own words.
        reason: String,
    },
    /// Rendering took more steps or memory than a conversation of this size may take.
    #[error("chat template exceeded its budget of {budget} steps (one step is an instruction or 64 bytes of text)")]
    Budget {
        /// The budget that was exceeded.
        budget: u64,
    },
}

impl TextError {
    pub(super) fn json(field: &'static str, error: &serde_json::Error) -> Self {
        Self::Json { field, reason: error.to_string() }
    }
}
