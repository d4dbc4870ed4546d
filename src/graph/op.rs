//! The closed set of operations. Each has one reference implementation that defines it (see `device::cpu::reference`)
//! and one lowering per device. Only passes create fused operations and collectives.

use super::{AttentionSchedules, Elem, WeightId};
use crate::settings::with_methods;
use std::fmt;

/// Type that rows are rounded to before a product. Sums are always in f32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ActivationType {
    /// Not rounded.
    #[default]
    F32,
    /// bfloat16, ties to even.
    BF16,
    /// Half precision, ties to even, saturating at ±65,504 (which is counted as an overflow); stored in f32 rows.
    F16,
    /// int8 in blocks of 32, with one scale per block.
    Int8,
}

impl ActivationType {
    /// Element type of the rounded rows.
    pub const fn elem(self) -> Elem {
        match self {
            Self::Int8 => Elem::Q8,
            Self::BF16 => Elem::BF16,
            Self::F32 | Self::F16 => Elem::F32,
        }
    }

    /// Name in dumps.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::BF16 => "bf16",
            Self::F16 => "f16",
            Self::Int8 => "q8",
        }
    }
}

/// Element-wise activation of a gated MLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ActivationKind {
    /// `x · sigmoid(x)`.
    Silu,
    /// The tanh approximation of GELU.
    GeluTanh,
}

/// Pairing of the elements of a head for the rotation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RopeStyle {
    /// Element `i` with `i + half`: the layout of Hugging Face models (GPT-NeoX style).
    Half,
    /// Element `2i` with `2i + 1`: the layout of GGUF files of the `llama` architecture.
    Interleaved,
}

/// RMS normalization over groups of a row.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct NormSpec {
    /// Scale vector, of the length of a group.
    pub weight: WeightId,
    /// Added to the mean square.
    pub eps: f32,
    /// Number of elements per group: the row for a hidden norm, the head for a query or key norm.
    pub group: usize,
}

impl NormSpec {
    /// Creates a norm over groups of `group` elements.
    pub const fn new(weight: WeightId, eps: f32, group: usize) -> Self {
        Self { weight, eps, group }
    }
}

/// One matrix of a linear operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LinearPart {
    /// `[n, k]`.
    pub weight: WeightId,
    /// `[n]`, added to the product.
    pub bias: Option<WeightId>,
}

impl LinearPart {
    /// Creates a part without a bias.
    pub const fn new(weight: WeightId) -> Self {
        Self { weight, bias: None }
    }

    with_methods! {
        option { bias with_bias: WeightId }
    }
}

/// Parameters of one layer's attention.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct AttentionShape {
    /// Layer in the KV pool.
    pub layer: usize,
    /// Number of query heads.
    pub heads: usize,
    /// Number of KV heads; divides `heads`.
    pub kv_heads: usize,
    /// Number of elements per head.
    pub head_dim: usize,
    /// Factor of the scores.
    pub scale: f32,
    /// Sliding window: number of keys that a row can see, itself included; `None` is no window.
    pub window: Option<u32>,
    /// Loop orders by length; `None` is the blocked order at every length.
    pub schedules: Option<AttentionSchedules>,
}

impl AttentionShape {
    /// Attention over all tokens up to a row, with scores scaled by `1 / sqrt(head_dim)`.
    pub fn new(layer: usize, heads: usize, kv_heads: usize, head_dim: usize) -> Self {
        let scale = 1.0 / (head_dim as f32).sqrt();
        Self { layer, heads, kv_heads, head_dim, scale, window: None, schedules: None }
    }

    with_methods! {
        value { scale with_scale: f32 }
        option { window with_window: u32, schedules with_schedules: AttentionSchedules }
    }
}

/// An operation. The comments show inputs → outputs.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Op {
    /// (token ids) → rows of the table; zeros for ids that it does not contain.
    Embed {
        /// `[ids, hidden]`.
        table: WeightId,
        /// Token id of the first row; more than 0 on a rank that holds a part of the vocabulary.
        first_id: u32,
    },
    /// (positions) → cosines, then sines of each rotated pair.
    RopeAngles {
        /// Index into [`Graph::ropes`](super::Graph::ropes).
        rope: usize,
    },
    /// x → normalized x.
    RmsNorm(NormSpec),
    /// a, b → a + b.
    Add,
    /// a, b → a · b.
    Mul,
    /// x → act(x).
    Activation(ActivationKind),
    /// x → x · factor.
    Scale(f32),
    /// x → x rounded to a narrower type.
    Cast(ActivationType),
    /// x → x · Wᵀ + b.
    Linear(LinearPart),
    /// x, angles → x with each head rotated.
    Rope {
        /// Number of elements per head.
        head_dim: usize,
        /// Pairing.
        style: RopeStyle,
    },
    /// k, v → effect: writes the rows' keys and values into their KV slots.
    KvWrite {
        /// Layer in the KV pool.
        layer: usize,
    },
    /// q, effect → attention output, over the sequence's stored keys and values.
    Attention(AttentionShape),
    /// x → the rows whose logits are requested.
    GatherRows,
    /// logits → argmax of each row; the lowest id wins a tie. [`NO_TOKEN`](super::NO_TOKEN) for a row with a logit that
    /// is not finite.
    ArgMax,
    /// final hidden state, argmax ids → row status, which shows the valid rows.
    RowStatus,
    /// x → x after the user's operation; index into [`Graph::customs`](super::Graph::customs).
    Custom(usize),

    // Collectives: every rank has them at the same places of its plan.
    /// x → sum of all ranks' x, added in rank order.
    AllReduce,
    /// x → all ranks' columns, concatenated in rank order.
    AllGather,

    // Fused operations.
    /// x, d → x + d, norm(x + d) rounded.
    AddRmsNorm {
        /// The normalization.
        norm: NormSpec,
        /// Type that the second output is rounded to.
        to: ActivationType,
    },
    /// x → norm(x) rounded.
    NormCast {
        /// The normalization.
        norm: NormSpec,
        /// Type that the output is rounded to.
        to: ActivationType,
    },
    /// x, angles → x normalized head by head, then rotated.
    QkNormRope {
        /// The head norm.
        norm: NormSpec,
        /// Number of elements per head.
        head_dim: usize,
        /// Pairing.
        style: RopeStyle,
    },
    /// k, angles, v → effect: (head norm,) rotation and KV write.
    RopeKvWrite {
        /// Layer in the KV pool.
        layer: usize,
        /// Number of elements per head.
        head_dim: usize,
        /// Pairing.
        style: RopeStyle,
        /// Head norm before the rotation.
        norm: Option<NormSpec>,
    },
    /// gate, up → act(gate) · up.
    ActMul(ActivationKind),
    /// x → one output per part; x is read once for all.
    LinearMulti(Vec<LinearPart>),
    /// gate, up → (act(gate) · up) · Wᵀ + b, with the product in scratch.
    SwigluLinear {
        /// Activation of the gate.
        activation: ActivationKind,
        /// The down projection.
        part: LinearPart,
        /// Type that the product is rounded to before the projection.
        to: ActivationType,
    },
    /// x → x · Wᵀ + b, and the argmax of each row as in `ArgMax`.
    LinearArgMax(LinearPart),
}

impl Op {
    /// Names of all operations.
    pub const NAMES: [&str; 26] = [
        "embed",
        "rope_angles",
        "rms_norm",
        "add",
        "mul",
        "activation",
        "scale",
        "cast",
        "linear",
        "rope",
        "kv_write",
        "attention",
        "gather_rows",
        "arg_max",
        "row_status",
        "custom",
        "all_reduce",
        "all_gather",
        "add_rms_norm",
        "norm_cast",
        "qk_norm_rope",
        "rope_kv_write",
        "act_mul",
        "linear_multi",
        "swiglu_linear",
        "linear_arg_max",
    ];

    /// Name of the operation in dumps and cost tables.
    pub const fn name(&self) -> &'static str {
        Self::NAMES[self.index()]
    }

    /// Index of the operation in [`Self::NAMES`].
    pub const fn index(&self) -> usize {
        match self {
            Self::Embed { .. } => 0,
            Self::RopeAngles { .. } => 1,
            Self::RmsNorm(_) => 2,
            Self::Add => 3,
            Self::Mul => 4,
            Self::Activation(_) => 5,
            Self::Scale(_) => 6,
            Self::Cast(_) => 7,
            Self::Linear(_) => 8,
            Self::Rope { .. } => 9,
            Self::KvWrite { .. } => 10,
            Self::Attention(_) => 11,
            Self::GatherRows => 12,
            Self::ArgMax => 13,
            Self::RowStatus => 14,
            Self::Custom(_) => 15,
            Self::AllReduce => 16,
            Self::AllGather => 17,
            Self::AddRmsNorm { .. } => 18,
            Self::NormCast { .. } => 19,
            Self::QkNormRope { .. } => 20,
            Self::RopeKvWrite { .. } => 21,
            Self::ActMul(_) => 22,
            Self::LinearMulti(_) => 23,
            Self::SwigluLinear { .. } => 24,
            Self::LinearArgMax(_) => 25,
        }
    }

    /// Whether all ranks must reach the operation before any of them continues.
    pub const fn is_collective(&self) -> bool {
        matches!(self, Self::AllReduce | Self::AllGather)
    }

    /// Weights that the operation reads.
    pub fn weights(&self) -> Vec<WeightId> {
        let part = |p: &LinearPart| std::iter::once(p.weight).chain(p.bias).collect::<Vec<_>>();
        match self {
            Self::Embed { table, .. } => vec![*table],
            Self::RmsNorm(norm)
            | Self::AddRmsNorm { norm, .. }
            | Self::NormCast { norm, .. }
            | Self::QkNormRope { norm, .. }
            | Self::RopeKvWrite { norm: Some(norm), .. } => vec![norm.weight],
            Self::Linear(p) | Self::LinearArgMax(p) | Self::SwigluLinear { part: p, .. } => part(p),
            Self::LinearMulti(parts) => parts.iter().flat_map(part).collect(),
            _ => Vec::new(),
        }
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())?;
        match self {
            Self::Activation(kind) | Self::ActMul(kind) => write!(f, "<{kind:?}>"),
            Self::Scale(factor) => write!(f, "<{factor}>"),
            Self::Rope { style, .. } | Self::QkNormRope { style, .. } => write!(f, "<{style:?}>"),
            Self::KvWrite { layer } => write!(f, "<layer {layer}>"),
            Self::RopeKvWrite { layer, style, norm, .. } => {
                write!(f, "<layer {layer} {style:?}{}>", if norm.is_some() { " norm" } else { "" })
            }
            Self::Attention(a) => {
                write!(f, "<layer {} heads {}/{}x{}", a.layer, a.heads, a.kv_heads, a.head_dim)?;
                if let Some(window) = a.window {
                    write!(f, " window {window}")?;
                }
                if let Some(AttentionSchedules { full_max, partial_max }) = a.schedules {
                    write!(f, " full<={full_max} partial<={partial_max}")?;
                }
                f.write_str(">")
            }
            Self::Embed { first_id, .. } if *first_id > 0 => write!(f, "<from id {first_id}>"),
            Self::Cast(to) | Self::NormCast { to, .. } => write!(f, "<{}>", to.name()),
            Self::AddRmsNorm { to, .. } if *to != ActivationType::F32 => write!(f, "<{}>", to.name()),
            Self::SwigluLinear { activation, to: ActivationType::F32, .. } => write!(f, "<{activation:?}>"),
            Self::SwigluLinear { activation, to, .. } => write!(f, "<{activation:?} {}>", to.name()),
            Self::Custom(index) => write!(f, "<{index}>"),
            _ => Ok(()),
        }
    }
}
