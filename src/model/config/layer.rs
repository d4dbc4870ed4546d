//! Configuration of one layer: attention, MLP, and norms with their positions.
//!
//! Kinds of components are enums: a new kind is a new variant and a new match arm in
//! [`decoder_graph`](crate::model::decoder_graph), not a flag.

use crate::graph::ActivationKind;

/// Configuration of one transformer layer.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct LayerConfig {
    /// Attention, which combines the rows of a sequence.
    pub attention: AttentionConfig,
    /// MLP, which is computed for each row independently.
    pub mlp: MlpConfig,
    /// Norms and their positions.
    pub norms: NormPlacement,
    /// Factor on the outputs of attention and MLP before they are added to the residual stream; `None` means 1.
    pub residual_scale: Option<f32>,
}

impl LayerConfig {
    /// Creates a layer without a residual factor.
    pub(in crate::model) const fn new(attention: AttentionConfig, mlp: MlpConfig, norms: NormPlacement) -> Self {
        Self { attention, mlp, norms, residual_scale: None }
    }
}

/// Kind of attention.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum AttentionConfig {
    /// Softmax attention in which query heads share key and value heads (MHA, GQA, MQA).
    GroupedQuery(GroupedQueryAttention),
}

/// Softmax attention with separate projections for queries, keys, values and the output.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct GroupedQueryAttention {
    /// Number of query heads.
    pub heads: usize,
    /// Number of key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Number of elements per head.
    pub head_dim: usize,
    /// Whether the query, key and value projections have a bias.
    pub qkv_bias: bool,
    /// Whether the output projection has a bias.
    pub output_bias: bool,
    /// Norm of queries and keys before the rotary embedding.
    pub qk_norm: Option<QkNorm>,
    /// Rotary embedding: an index into [`ModelConfig::ropes`](super::ModelConfig::ropes). `None` means that the layer
    /// uses no positions.
    pub rope: Option<usize>,
    /// Sliding window: number of keys that a row attends to, including its own; `None` means all keys up to its own.
    pub window: Option<u32>,
    /// Factor on the attention scores.
    pub scale: f32,
}

/// Norm of queries and keys.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum QkNorm {
    /// Norm of each head independently; all heads have the same weights.
    EachHead(NormConfig),
}

/// Kind of MLP.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum MlpConfig {
    /// `down(act(gate(x)) · up(x))`.
    Gated(GatedMlp),
}

/// Gated MLP: three projections, one of which gates another.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct GatedMlp {
    /// Output width of the gate and up projections.
    pub intermediate_size: usize,
    /// Activation function of the gate.
    pub activation: ActivationKind,
    /// Whether the three projections have a bias.
    pub bias: bool,
}

/// Positions of a layer's norms.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum NormPlacement {
    /// One before attention and one before the MLP: `x + attention(norm(x))`, then `x + mlp(norm(x))`.
    Pre(NormConfig),
}

/// Kind of norm; its weights are tensors of the model.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum NormConfig {
    /// `x / √(mean(x²) + eps) · weight`.
    Rms {
        /// Added to the mean square.
        eps: f32,
    },
}
