//! Errors of tokenizer files, prompts and chat templates.

/// Reason why a tokenizer could not be built, or a text could not be encoded or rendered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TextError {
    /// A file of the model folder is invalid.
    #[error("{file}: {reason}")]
    File {
        /// Name of the file.
        file: &'static str,
        /// Description of the error.
        reason: String,
    },
    /// The GGUF metadata lacks a key that the tokenizer needs.
    #[error("{key}: absent from the gguf metadata, expected {expected}")]
    MissingKey {
        /// The missing key.
        key: &'static str,
        /// Description of the expected value.
        expected: &'static str,
    },
    /// A value is invalid, or this crate does not support it.
    #[error("{field}: got {got}, expected {expected}")]
    Unsupported {
        /// Field of the file or key of the metadata.
        field: &'static str,
        /// The value.
        got: String,
        /// Description of the supported values.
        expected: String,
    },
    /// A value is not valid JSON, or cannot be represented in JSON.
    #[error("{field}: {reason}")]
    Json {
        /// Name of the message, option or variable.
        field: &'static str,
        /// Error message of the JSON library.
        reason: String,
    },
    /// The text could not be tokenized.
    #[error("text cannot be tokenized: {reason}")]
    Encode {
        /// Error message of the tokenizer.
        reason: String,
    },
    /// The chat template is invalid, or rendering failed.
    #[error("chat template, line {line}: {reason}")]
    Template {
        /// Line of the template, counted from 1; 0 if unknown.
        line: usize,
        /// Error message of the template engine.
        reason: String,
    },
    /// The chat template rejected the conversation with `raise_exception`.
    #[error("the chat template rejected the conversation: {reason}")]
    Refused {
        /// Message that the template passed to `raise_exception`.
        reason: String,
    },
    /// Rendering exceeded its budget of steps and memory, which grows with the conversation.
    #[error("the chat template exceeded its budget of {budget} steps (one step is an instruction or 64 bytes of text)")]
    Budget {
        /// Number of steps of the budget.
        budget: u64,
    },
}

impl TextError {
    pub(super) fn json(field: &'static str, error: &serde_json::Error) -> Self {
        Self::Json { field, reason: error.to_string() }
    }
}
