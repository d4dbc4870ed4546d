//! Typed look-ups in the metadata of a GGUF file, as the tokenizer needs them.
//!
//! The trait keeps the tokenizer independent of `weights`: `weights::gguf::Metadata` implements it, and tests provide a
//! plain map. A getter returns `None` for a key of another type, as for an absent one.

/// Metadata of a GGUF file as the tokenizer reads it.
pub trait TokenizerMetadata {
    /// The string under `key`.
    fn str(&self, key: &str) -> Option<&str>;
    /// The unsigned number under `key`.
    fn u32(&self, key: &str) -> Option<u32>;
    /// The truth value under `key`.
    fn bool(&self, key: &str) -> Option<bool>;
    /// The array of strings under `key`.
    fn strings(&self, key: &str) -> Option<Vec<String>>;
    /// The array of signed numbers under `key`.
    fn i32s(&self, key: &str) -> Option<Vec<i32>>;
    /// The array of floats under `key`.
    fn f32s(&self, key: &str) -> Option<Vec<f32>>;
}
