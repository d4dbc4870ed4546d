//! Text input and output of the engine: vocabulary, tokenizer, streaming detokenizer, chat templates.
//!
//! The engine itself uses only [`Vocabulary`] and bytes. The feature `text` provides an implementation from
//! `tokenizer.json` or from GGUF metadata.

#![forbid(unsafe_code)]

mod chat;
#[cfg(feature = "text")]
mod chat_template;
mod detokenizer;
mod error;
mod gguf_metadata;
#[cfg(feature = "text")]
mod pre_tokenizer;
#[cfg(feature = "text")]
mod token_bytes;
#[cfg(feature = "text")]
mod tokenizer;
mod vocabulary;

pub use chat::{ChatMessage, ChatOptions, ChatPrompt, ChatRenderer};
#[cfg(feature = "text")]
pub use chat_template::ChatTemplate;
pub use detokenizer::Detokenizer;
pub use error::TextError;
pub use gguf_metadata::TokenizerMetadata;
#[cfg(feature = "text")]
pub use tokenizer::Tokenizer;
pub use vocabulary::Vocabulary;
