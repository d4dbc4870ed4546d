//! Tests of tokenizers, detokenizers and chat templates.

#[path = "../common/mod.rs"]
mod common;

mod chat_template;
mod detokenizer;
mod tokenizer;
