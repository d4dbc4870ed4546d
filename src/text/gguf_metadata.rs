//! What a tokenizer needs of a GGUF file: typed look-ups in its metadata.
//!
//! The trait lets the tokenizer be built without naming the weights room; `weights::gguf::Metadata` implements it, and
//! tests give a plain map. A key of another type than asked for answers `None`, as does an absent one.

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
