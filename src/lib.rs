//! `ascend-llm`: an LLM inference engine that lives inside another Rust program.

#![cfg_attr(docsrs, feature(doc_cfg))]

pub mod device;
pub mod engine;
pub mod graph;
pub mod kv_cache;
pub mod model;
pub mod sampler;
pub mod scheduler;
pub mod text;
pub mod weights;
