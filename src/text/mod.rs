//! Text on either side of the engine: vocabulary, tokenizer, streaming detokeniser, chat templates.
//!
//! The engine itself sees only [`Vocabulary`] and bytes; the feature `text` provides one from `tokenizer.json` or from
//! GGUF metadata.

#![forbid(unsafe_code)]

mod detokenizer;
mod gguf_text;
mod vocabulary;

pub use detokenizer::Detokenizer;
pub use gguf_text::GgufText;
pub use vocabulary::Vocabulary;
