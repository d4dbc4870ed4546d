//! Typed lookups in GGUF metadata, as the tokenizer needs them.
//!
//! Because of this trait, the tokenizer does not depend on `weights`: `weights::gguf::Metadata` implements it, and
//! tests use a plain map. A lookup returns `None` if the key is absent or its value has another type.

/// Metadata of a GGUF file, as the tokenizer reads it.
pub trait TokenizerMetadata {
    /// Returns the string at `key`.
    fn str(&self, key: &str) -> Option<&str>;
    /// Returns the unsigned number at `key`.
    fn u32(&self, key: &str) -> Option<u32>;
    /// Returns the boolean at `key`.
    fn bool(&self, key: &str) -> Option<bool>;
    /// Returns the array of strings at `key`.
    fn strings(&self, key: &str) -> Option<Vec<String>>;
    /// Returns the array of signed numbers at `key`.
    fn i32s(&self, key: &str) -> Option<Vec<i32>>;
    /// Returns the array of floats at `key`.
    fn f32s(&self, key: &str) -> Option<Vec<f32>>;
}
