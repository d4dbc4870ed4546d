//! Builds the graph of a model from its configuration (`config.json` or GGUF metadata).
//!
//! ```text
//! config.json ─► config/hub  ─┐                                             ┌─ transformer
//!                             ├─► families/NAME: describe ─► ModelConfig ─► decoder_graph ─► Graph
//! GGUF ────────► config/gguf ─┘                              (layers as data)
//! ```
//! Every configuration is converted to a [`ModelConfig`]; [`decoder_graph`] builds a graph of operations over named
//! weights from it. An unsupported model, or an unsupported feature that would change the model's results, causes an
//! error with its name.

#![forbid(unsafe_code)]

mod config;
mod error;
mod families;
mod open;
pub mod rope;
mod transformer;

pub use config::gguf::config_from_gguf;
pub use config::hub::config_from_hub;
pub(crate) use config::hub::eos_ids_of_generation_config;
pub use config::{
    AttentionConfig, GatedMlp, GroupedQueryAttention, LayerConfig, MlpConfig, ModelConfig, NormConfig, NormPlacement,
    OutputHead, QkNorm, RopeConfig,
};
pub use error::ModelError;
pub use families::{Architecture, gguf_conventions};
pub use open::open;
pub use transformer::{decoder_graph, decoder_graph_with};
