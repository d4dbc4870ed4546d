//! One layer as data: its attention, its MLP, its norms and their placement.
//!
//! Kinds are enums: a new kind of layer is a new variant and a new arm of [`transformer`](crate::model::decoder_graph),
//! not a flag.

use crate::graph::ActivationKind;

/// One transformer layer.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct LayerConfig {
    /// How rows see other rows.
    pub attention: AttentionConfig,
    /// The part that is computed for each row independently.
    pub mlp: MlpConfig,
    /// The norms and their placement.
    pub norms: NormPlacement,
    /// Factor on the outputs of attention and MLP before they are added to the residual stream; `None` means 1.
    pub residual_scale: Option<f32>,
}

impl LayerConfig {
    /// A layer without a residual factor.
    pub(in crate::model) const fn new(attention: AttentionConfig, mlp: MlpConfig, norms: NormPlacement) -> Self {
        Self { attention, mlp, norms, residual_scale: None }
    }
}

/// How the rows of a sequence see each other.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum AttentionConfig {
    /// Softmax attention in which query heads share key and value heads (MHA, GQA, MQA).
    GroupedQuery(GroupedQueryAttention),
}

/// Softmax attention with a projection each for queries, keys, values and the output.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct GroupedQueryAttention {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Elements a head.
    pub head_dim: usize,
    /// Whether the query, key and value projections have a bias.
    pub qkv_bias: bool,
    /// Whether the output projection has a bias.
    pub output_bias: bool,
    /// Norm of queries and keys before they rotate.
    pub qk_norm: Option<QkNorm>,
    /// Index into [`ModelConfig::ropes`](super::ModelConfig::ropes); `None` if queries and keys are not rotated.
    pub rope: Option<usize>,
    /// Number of keys that a row can see, itself included; `None` means all before it.
    pub window: Option<u32>,
    /// Factor on the scores.
    pub scale: f32,
}

/// A norm of queries and keys.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum QkNorm {
    /// Each head by itself, all heads with the same weights.
    EachHead(NormConfig),
}

/// Part of a layer that is computed for each row independently.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum MlpConfig {
    /// `down(act(gate(x)) · up(x))`.
    Gated(GatedMlp),
}

/// An MLP of three projections, one of which gates another.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct GatedMlp {
    /// Outputs of the gate and up projections.
    pub intermediate_size: usize,
    /// Activation of the gate.
    pub activation: ActivationKind,
    /// Whether the three projections have a bias.
    pub bias: bool,
}

/// Placement of the norms of a layer.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum NormPlacement {
    /// One before attention and one before the MLP: `x + attention(norm(x))`, then `x + mlp(norm(x))`.
    Pre(NormConfig),
}

/// Kind of a norm. Its weights are the model's.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum NormConfig {
    /// `x / √(mean(x²) + eps) · weight`.
    Rms {
        /// Added to the mean square.
        eps: f32,
    },
}
