//! What every model description becomes.

pub(super) mod gguf;
pub(super) mod hub;

use super::rope::RopeScaling;
use super::{Architecture, ModelError};
use crate::graph::{ActivationKind, RopeStyle};
use crate::model::error::invalid;

/// How positions enter queries and keys.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeConfig {
    /// Base of the frequencies.
    pub theta: f64,
    /// Stretching for longer contexts.
    pub scaling: RopeScaling,
    /// Divisors of the frequencies that come as a tensor of the file (GGUF's `rope_freqs.weight`).
    pub divisors: Option<Vec<f32>>,
    /// Leading elements of a head that rotate.
    pub dim: usize,
    /// Which elements rotate together.
    pub style: RopeStyle,
}

/// A decoder-only transformer, whatever file it was described in.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
#[allow(clippy::struct_excessive_bools)] // independent facts of a model
pub struct ModelConfig {
    /// Family.
    pub architecture: Architecture,
    /// Rows of the embedding table.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Transformer layers.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Elements a head.
    pub head_dim: usize,
    /// Added to the mean square in each norm.
    pub rms_norm_eps: f32,
    /// Positions.
    pub rope: RopeConfig,
    /// Activation of the gate.
    pub activation: ActivationKind,
    /// Whether logits come from the embedding table.
    pub tied_embeddings: bool,
    /// Bias on queries, keys and values.
    pub qkv_bias: bool,
    /// Bias on attention's output projection.
    pub output_bias: bool,
    /// Bias on the MLP's projections.
    pub mlp_bias: bool,
    /// Norm on each query and key head.
    pub qk_norm: bool,
    /// Keys each layer's rows may see (themselves included); one entry a layer.
    pub windows: Vec<Option<u32>>,
    /// Longest sequence it was made for.
    pub max_position_embeddings: usize,
    /// End-of-sequence ids of the description.
    pub eos_ids: Vec<u32>,
}

impl ModelConfig {
    /// Checks sizes against each other, so that the graph can be built without a doubt.
    pub fn validate(&self) -> Result<(), ModelError> {
        // Upper bounds keep products far from overflow, and tables that are made from a size alone small.
        let positive = [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.layers),
            ("num_attention_heads", self.heads),
            ("num_key_value_heads", self.kv_heads),
            ("max_position_embeddings", self.max_position_embeddings),
        ];
        for (field, value) in positive {
            if value == 0 || value > 1 << 28 {
                return Err(invalid(field, value, "a size from 1 to 2^28"));
            }
        }
        if self.head_dim == 0 || self.head_dim > 1 << 16 {
            return Err(invalid("head_dim", self.head_dim, "a size from 1 to 2^16"));
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return Err(invalid("num_key_value_heads", self.kv_heads, &format!("a divisor of {} heads", self.heads)));
        }
        if !self.rope.dim.is_multiple_of(2) || self.rope.dim == 0 || self.rope.dim > self.head_dim {
            let expected = format!("an even number up to head_dim {}", self.head_dim);
            return Err(invalid("rotary dimension", self.rope.dim, &expected));
        }
        if self.windows.len() != self.layers {
            let expected = format!("one window for each of {} layers", self.layers);
            return Err(invalid("windows", format!("{} entries", self.windows.len()), &expected));
        }
        if self.windows.contains(&Some(0)) {
            return Err(invalid("sliding_window", 0, "at least 1, or none"));
        }
        if !(self.rms_norm_eps.is_finite() && self.rms_norm_eps >= 0.0) {
            return Err(invalid("rms_norm_eps", self.rms_norm_eps, "a finite number of at least 0"));
        }
        if !(self.rope.theta.is_finite() && self.rope.theta > 0.0) {
            return Err(invalid("rope_theta", self.rope.theta, "a finite number above 0"));
        }
        self.rope.scaling.validate()?;
        // Each of the parameters may be sound and the frequencies still not be.
        let (inv_freq, factor) = self.rope.scaling.inv_freq(self.rope.dim, self.rope.theta);
        if !factor.is_finite() || !inv_freq.iter().all(|f| f.is_finite()) {
            let value = format!("{:?} with rope_theta {}", self.rope.scaling, self.rope.theta);
            return Err(invalid("rope_scaling", value, "parameters that give finite frequencies"));
        }
        Ok(())
    }

    /// Weights' count of parameters, embeddings included once where tied; biases and head norms are left out.
    pub fn parameters(&self) -> u64 {
        let product = |factors: [usize; 3]| factors.iter().fold(1u64, |n, &m| n.saturating_mul(m as u64));
        let projections = product([self.hidden_size, 2 * self.head_dim, self.heads.saturating_add(self.kv_heads)]);
        let mlp = product([3, self.hidden_size, self.intermediate_size]);
        let layer = projections.saturating_add(mlp).saturating_add(2 * self.hidden_size as u64);
        let tables = product([if self.tied_embeddings { 1 } else { 2 }, self.vocab_size, self.hidden_size]);
        layer.saturating_mul(self.layers as u64).saturating_add(tables).saturating_add(self.hidden_size as u64)
    }
}
