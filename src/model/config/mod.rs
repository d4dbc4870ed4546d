//! Configuration of a model, independent of the form of its files.

mod fields;
pub(super) mod gguf;
pub(super) mod hub;
mod layer;
mod tensor_names;

pub(super) use fields::{Fields, Sizes, WindowRule};
pub(super) use hub::HubDefaults;
pub use layer::{
    AttentionConfig, GatedMlp, GroupedQueryAttention, LayerConfig, MlpConfig, NormConfig, NormPlacement, QkNorm,
};
pub(super) use tensor_names::TensorNames;

use super::rope::RopeScaling;
use super::{Architecture, ModelError};
use crate::graph::RopeStyle;
use crate::model::error::invalid;

/// Largest number of layers of a model, checked before a table of layers is allocated.
const MAX_LAYERS: usize = 1 << 16;

/// Rotary position embedding of queries and keys.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct RopeConfig {
    /// Base of the frequencies.
    pub theta: f64,
    /// Scaling for longer contexts.
    pub scaling: RopeScaling,
    /// Divisors of the frequencies, if the file contains them as a tensor (GGUF's `rope_freqs.weight`).
    pub divisors: Option<Vec<f32>>,
    /// Number of leading elements of a head that are rotated.
    pub dim: usize,
    /// Pairing of the elements that are rotated together.
    pub style: RopeStyle,
}

/// Source of the output projection's weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum OutputHead {
    /// The embedding table.
    Tied,
    /// A matrix of its own.
    Untied,
}

/// Configuration of a decoder-only transformer: settings of the whole model, and its layers as a list.
///
/// It does not depend on the form of the files or on rules of the family: [`decoder_graph`](super::decoder_graph)
/// builds the graph from this configuration only.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct ModelConfig {
    /// Family, for reports.
    pub architecture: Architecture,
    /// Number of rows of the embedding table.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Factor on the rows of the embedding table; `None` means 1.
    pub embedding_scale: Option<f32>,
    /// Layers, in order.
    pub layers: Vec<LayerConfig>,
    /// Rotary embeddings, to which the layers refer by index.
    pub ropes: Vec<RopeConfig>,
    /// Norm after the last layer.
    pub final_norm: NormConfig,
    /// Output projection.
    pub head: OutputHead,
    /// Factor on the logits; `None` means 1.
    pub logit_scale: Option<f32>,
    /// Longest sequence for which the model was made.
    pub max_position_embeddings: usize,
    /// End-of-sequence ids in the model's files.
    pub eos_ids: Vec<u32>,
    /// Names of the tensors.
    pub(super) tensors: &'static TensorNames,
}

impl ModelConfig {
    /// Returns the number of key and value heads per layer, which is the same for all layers.
    pub fn kv_heads(&self) -> usize {
        self.kv_shape().0
    }

    /// Returns the number of elements per key or value head, which is the same for all layers.
    pub fn head_dim(&self) -> usize {
        self.kv_shape().1
    }

    fn kv_shape(&self) -> (usize, usize) {
        self.layers.first().map_or((0, 0), |layer| {
            let AttentionConfig::GroupedQuery(attention) = &layer.attention;
            (attention.kv_heads, attention.head_dim)
        })
    }

    /// Checks all sizes and their relations, so that building the graph cannot overflow or index out of bounds.
    ///
    /// # Errors
    /// [`ModelError::InvalidField`] with the name of the field in a hub config.
    pub fn validate(&self) -> Result<(), ModelError> {
        size("vocab_size", self.vocab_size)?;
        size("hidden_size", self.hidden_size)?;
        size("max_position_embeddings", self.max_position_embeddings)?;
        layer_count("num_hidden_layers", self.layers.len())?;
        for layer in &self.layers {
            self.check_layer(layer)?;
        }
        for rope in &self.ropes {
            check_rope(rope)?;
        }
        check_scale("embedding_scale", self.embedding_scale)?;
        check_scale("logit_scale", self.logit_scale)?;
        check_norm(self.final_norm)
    }

    fn check_layer(&self, layer: &LayerConfig) -> Result<(), ModelError> {
        let AttentionConfig::GroupedQuery(attention) = &layer.attention;
        self.check_attention(attention)?;
        let MlpConfig::Gated(mlp) = &layer.mlp;
        size("intermediate_size", mlp.intermediate_size)?;
        let NormPlacement::Pre(norm) = layer.norms;
        check_scale("residual_scale", layer.residual_scale)?;
        check_norm(norm)
    }

    fn check_attention(&self, attention: &GroupedQueryAttention) -> Result<(), ModelError> {
        let GroupedQueryAttention { heads, kv_heads, head_dim, qk_norm, rope, window, scale, .. } = *attention;
        size("num_attention_heads", heads)?;
        size("num_key_value_heads", kv_heads)?;
        if head_dim == 0 || head_dim > 1 << 16 {
            return Err(invalid("head_dim", head_dim, "a size from 1 to 2^16"));
        }
        if !heads.is_multiple_of(kv_heads) {
            return Err(invalid("num_key_value_heads", kv_heads, &format!("a divisor of {heads} heads")));
        }
        // All blocks of the KV cache have the same shape.
        if (kv_heads, head_dim) != self.kv_shape() {
            let (first_heads, first_dim) = self.kv_shape();
            let expected = format!("{first_heads} heads of {first_dim} in every layer, as in the first");
            return Err(invalid("num_key_value_heads", format!("{kv_heads} heads of {head_dim}"), &expected));
        }
        if let Some(index) = rope {
            let Some(rope) = self.ropes.get(index) else {
                return Err(invalid("rope", index, &format!("an index below {}", self.ropes.len())));
            };
            if !rope.dim.is_multiple_of(2) || rope.dim == 0 || rope.dim > head_dim {
                let expected = format!("an even number up to head_dim {head_dim}");
                return Err(invalid("rotary dimension", rope.dim, &expected));
            }
        }
        if window == Some(0) {
            return Err(invalid("sliding_window", 0, "at least 1, or none"));
        }
        check_scale("attention scale", Some(scale))?;
        qk_norm.map_or(Ok(()), |QkNorm::EachHead(norm)| check_norm(norm))
    }

    /// Returns the number of parameters; tied embeddings count once, and biases and head norms are left out.
    pub fn parameters(&self) -> u64 {
        let product = |factors: &[usize]| factors.iter().fold(1u64, |n, &m| n.saturating_mul(m as u64));
        let of_layer = |layer: &LayerConfig| {
            let AttentionConfig::GroupedQuery(attention) = &layer.attention;
            let heads = attention.heads.saturating_add(attention.kv_heads);
            let projections = product(&[2, self.hidden_size, attention.head_dim, heads]);
            let MlpConfig::Gated(mlp) = &layer.mlp;
            let mlp = product(&[3, self.hidden_size, mlp.intermediate_size]);
            let NormPlacement::Pre(_) = layer.norms;
            projections.saturating_add(mlp).saturating_add(product(&[2, self.hidden_size]))
        };
        let tables = match self.head {
            OutputHead::Tied => 1,
            OutputHead::Untied => 2,
        };
        let tables = product(&[tables, self.vocab_size, self.hidden_size]);
        let layers = self.layers.iter().map(of_layer).fold(0, u64::saturating_add);
        layers.saturating_add(tables).saturating_add(self.hidden_size as u64)
    }
}

/// Checks a size: within this limit, products of sizes do not overflow, and tables of this size stay small.
fn size(field: &str, value: usize) -> Result<(), ModelError> {
    if value == 0 || value > 1 << 28 { Err(invalid(field, value, "a size from 1 to 2^28")) } else { Ok(()) }
}

/// Checks the number of layers before a table of layers is allocated.
fn layer_count(field: &str, layers: usize) -> Result<(), ModelError> {
    let expected = "a number from 1 to 2^16";
    if layers == 0 || layers > MAX_LAYERS { Err(invalid(field, layers, expected)) } else { Ok(()) }
}

fn check_scale(field: &str, scale: Option<f32>) -> Result<(), ModelError> {
    match scale.filter(|scale| !(scale.is_finite() && *scale > 0.0)) {
        Some(scale) => Err(invalid(field, scale, "a finite number above 0")),
        None => Ok(()),
    }
}

fn check_norm(NormConfig::Rms { eps }: NormConfig) -> Result<(), ModelError> {
    let sound = eps.is_finite() && eps >= 0.0;
    if sound { Ok(()) } else { Err(invalid("rms_norm_eps", eps, "a finite number of at least 0")) }
}

fn check_rope(rope: &RopeConfig) -> Result<(), ModelError> {
    if !(rope.theta.is_finite() && rope.theta > 0.0) {
        return Err(invalid("rope_theta", rope.theta, "a finite number above 0"));
    }
    rope.scaling.validate()?;
    // Valid parameters can still yield infinite frequencies.
    let (inv_freq, factor) = rope.scaling.inv_freq(rope.dim, rope.theta);
    if !factor.is_finite() || !inv_freq.iter().all(|f| f.is_finite()) {
        let value = format!("{:?} with rope_theta {}", rope.scaling, rope.theta);
        return Err(invalid("rope_scaling", value, "parameters that yield finite frequencies"));
    }
    Ok(())
}
