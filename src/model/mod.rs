//! From a model's own description (`config.json` or GGUF metadata) to a graph.
//!
//! [`ModelConfig`] is what all descriptions become; [`decoder_graph`] turns it into operations over named weights. A model
//! that is not supported, or a feature of one that would change its numbers, is refused by name.

#![forbid(unsafe_code)]

mod architecture;
mod config;
mod decoder;
mod error;
mod gguf_config;
mod hub_config;
pub mod rope;

pub use architecture::Architecture;
pub use config::{ModelConfig, RopeConfig};
pub use decoder::{decoder_graph, decoder_graph_with};
pub use error::ModelError;
pub use gguf_config::config_from_gguf;
pub use hub_config::config_from_hub;
pub(crate) use hub_config::eos_ids_of_generation_config;
