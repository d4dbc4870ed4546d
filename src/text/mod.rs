//! Text on either side of the engine: vocabulary, tokenizer, streaming detokeniser, chat templates.
//!
//! The engine itself sees only [`Vocabulary`] and bytes; the feature `text` provides one from `tokenizer.json` or from
//! GGUF metadata.

#![forbid(unsafe_code)]

mod vocabulary;

pub use vocabulary::Vocabulary;
