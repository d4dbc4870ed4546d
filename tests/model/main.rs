//! Tests of model files: configurations, weights, and golden results of whole models.

#[path = "../common/mod.rs"]
mod common;

mod bad_model_files;
mod configs;
mod conformance;
mod dequantize;
mod gguf_format;
mod golden;
mod rope;
mod weight_files;
