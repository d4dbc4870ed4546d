//! `ascend-llm`: an LLM inference engine as a library that runs inside another Rust program.
//!
//! ```
//! use ascend_llm::engine::{Engine, Request};
//! use ascend_llm::sampler::SamplingParams;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # if cfg!(not(feature = "text")) { return Ok(()); }
//! let engine = Engine::builder("examples/models/fable-f16.gguf").build()?;
//! let mut params = SamplingParams::greedy();
//! params.max_tokens = Some(8);
//! let text = engine.generate("Once upon a time", &params)?;
//! for delta in engine.submit(Request::text("The duck").with_sampling(params))? {
//!     print!("{}", delta?.text);
//! }
//! # assert!(text.starts_with(", there was"));
//! # Ok(())
//! # }
//! ```
//!
//! | task | API |
//! |---|---|
//! | serve requests from the engine's own thread | [`engine::Engine`] |
//! | drive every step yourself | [`engine::EngineCore`] (`build_core`) |
//! | write your own loop, block tables and sampling | [`crate::runner::ModelRunner`] (`build_runner`), [`sampler::Sampler`] |
//! | schedule or allocate KV blocks without a model | [`scheduler::Scheduler`], [`kv_cache::BlockAllocator`] |
//! | read a model's compiled plan | [`model::decoder_graph`], [`graph::compile`], [`graph::Plan::dump`] |
//! | implement a device | [`device::Device`] |
//!
//! Features: `text` (default: tokenizers and chat templates), `async` (request handles are `futures_core::Stream`s),
//! `ascend` (Ascend NPUs).

#![cfg_attr(docsrs, feature(doc_cfg))]

pub mod device;
pub mod engine;
pub mod graph;
pub mod kv_cache;
pub mod model;
mod num;
mod panic_message;
pub mod runner;
pub mod sampler;
pub mod scheduler;
mod settings;
pub mod text;
mod version;
pub mod weights;

/// Runs the README's program as a test.
#[cfg(all(doctest, feature = "text"))]
#[doc = include_str!("../README.md")]
struct Readme;

pub use engine::{
    BuildError, Delta, Engine, EngineBuilder, EngineConfig, EngineCore, EngineError, ErrorKind, FinishReason,
    GenerateError, Output, Request, RequestError, RequestHandle, SubmitError, Usage,
};
pub use graph::Numerics;
pub use kv_cache::KvDType;
pub use sampler::SamplingParams;
pub use text::{ChatMessage, ChatPrompt};
