//! Errors of tokenizer files, prompts and chat templates.

/// Why a tokenizer could not be built, or a text not be encoded or rendered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TextError {
    /// A file of the model folder is not valid.
    #[error("{file}: {reason}")]
    File {
        /// Name of the file.
        file: &'static str,
        /// The reason.
        reason: String,
    },
    /// The GGUF metadata lacks a key that the tokenizer needs.
    #[error("{key}: absent from the gguf metadata, expected {expected}")]
    MissingKey {
        /// The key.
        key: &'static str,
        /// The expected content.
        expected: &'static str,
    },
    /// A value that this crate does not implement, or that cannot be right.
    #[error("{field}: got {got}, expected {expected}")]
    Unsupported {
        /// Field of the file or key of the metadata.
        field: &'static str,
        /// The value found.
        got: String,
        /// The accepted values.
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
        /// The reason.
        reason: String,
    },
    /// The chat template itself refused the conversation (`raise_exception`).
    #[error("chat template refused the conversation: {reason}")]
    Refused {
        /// The template's own words.
        reason: String,
    },
    /// Rendering exceeded the steps or memory allowed for a conversation of this size.
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
