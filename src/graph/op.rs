//! The closed set of operations. One reference body an operation defines it (see `device::cpu::reference`); one lowering
//! a device runs it. Fused operations are made by passes only.

use super::WeightId;
use std::fmt;

/// Element-wise activation of a gated MLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ActivationKind {
    /// `x · sigmoid(x)`.
    Silu,
    /// The tanh approximation of GELU.
    GeluTanh,
}

/// Which elements of a head rotate together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RopeStyle {
    /// Element `i` with `i + half`: the hub's layout (GPT-NeoX style).
    Half,
    /// Element `2i` with `2i + 1`: the layout of GGUF files of the `llama` architecture.
    Interleaved,
}

/// RMS normalisation over groups of a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormSpec {
    /// Scale vector, as long as a group.
    pub weight: WeightId,
    /// Added to the mean square.
    pub eps: f32,
    /// Elements a group: the row for a hidden norm, the head for a query or key norm.
    pub group: usize,
}

/// One matrix of a linear operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinearPart {
    /// `[n, k]`.
    pub weight: WeightId,
    /// `[n]`, added to the product.
    pub bias: Option<WeightId>,
}

/// Constants of one layer's attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape {
    /// Layer in the KV pool.
    pub layer: usize,
    /// Query heads.
    pub heads: usize,
    /// KV heads; divides `heads`.
    pub kv_heads: usize,
    /// Elements a head.
    pub head_dim: usize,
    /// Factor on the scores.
    pub scale: f32,
    /// Keys a row may see, itself included; none means all before it.
    pub window: Option<u32>,
}

/// An operation. Comments give inputs → outputs.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Op {
    /// (token ids) → rows of the table.
    Embed {
        /// `[vocab, hidden]`.
        table: WeightId,
    },
    /// (positions) → cosines then sines of each rotated pair.
    RopeAngles {
        /// Index into [`Graph::ropes`](super::Graph::ropes).
        rope: usize,
    },
    /// x → normalised x.
    RmsNorm(NormSpec),
    /// a, b → a + b.
    Add,
    /// a, b → a · b.
    Mul,
    /// x → act(x).
    Activation(ActivationKind),
    /// x → x rounded to int8 in blocks of 32.
    Quantise,
    /// x → x · Wᵀ + b.
    Linear(LinearPart),
    /// x, angles → x with each head rotated.
    Rope {
        /// Elements a head.
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
    /// x → the rows whose logits are wanted.
    GatherRows,
    /// logits → (row status): says which rows are finite.
    RowStatus,

    // Fused operations.
    /// x, d → x + d, norm(x + d) (rounded to int8 where `quantise`).
    AddRmsNorm {
        /// The normalisation.
        norm: NormSpec,
        /// Whether the second output is int8.
        quantise: bool,
    },
    /// x → norm(x) rounded to int8.
    NormQuantise(NormSpec),
    /// x, angles → x normalised a head, then rotated.
    QkNormRope {
        /// The head norm.
        norm: NormSpec,
        /// Elements a head.
        head_dim: usize,
        /// Pairing.
        style: RopeStyle,
    },
    /// k, angles, v → effect: (head norm,) rotation and KV write.
    RopeKvWrite {
        /// Layer in the KV pool.
        layer: usize,
        /// Elements a head.
        head_dim: usize,
        /// Pairing.
        style: RopeStyle,
        /// Head norm before the rotation.
        norm: Option<NormSpec>,
    },
    /// gate, up → act(gate) · up.
    ActMul(ActivationKind),
    /// x → one output a part, all reading x once.
    LinearMulti(Vec<LinearPart>),
    /// gate, up → (act(gate) · up) · Wᵀ + b, with the product kept in scratch.
    SwigluLinear {
        /// Activation of the gate.
        activation: ActivationKind,
        /// The down projection.
        part: LinearPart,
        /// Whether the product is rounded to int8 before the projection.
        quantise: bool,
    },
}

impl Op {
    /// Names of all operations, so that tests can tell when one is left out.
    pub const NAMES: [&str; 20] = [
        "embed",
        "rope_angles",
        "rms_norm",
        "add",
        "mul",
        "activation",
        "quantise",
        "linear",
        "rope",
        "kv_write",
        "attention",
        "gather_rows",
        "row_status",
        "add_rms_norm",
        "norm_quantise",
        "qk_norm_rope",
        "rope_kv_write",
        "act_mul",
        "linear_multi",
        "swiglu_linear",
    ];

    /// The operation's name in dumps and cost tables.
    pub const fn name(&self) -> &'static str {
        Self::NAMES[self.index()]
    }

    const fn index(&self) -> usize {
        match self {
            Self::Embed { .. } => 0,
            Self::RopeAngles { .. } => 1,
            Self::RmsNorm(_) => 2,
            Self::Add => 3,
            Self::Mul => 4,
            Self::Activation(_) => 5,
            Self::Quantise => 6,
            Self::Linear(_) => 7,
            Self::Rope { .. } => 8,
            Self::KvWrite { .. } => 9,
            Self::Attention(_) => 10,
            Self::GatherRows => 11,
            Self::RowStatus => 12,
            Self::AddRmsNorm { .. } => 13,
            Self::NormQuantise(_) => 14,
            Self::QkNormRope { .. } => 15,
            Self::RopeKvWrite { .. } => 16,
            Self::ActMul(_) => 17,
            Self::LinearMulti(_) => 18,
            Self::SwigluLinear { .. } => 19,
        }
    }

    /// Weights the operation reads.
    pub fn weights(&self) -> Vec<WeightId> {
        let part = |p: &LinearPart| std::iter::once(p.weight).chain(p.bias).collect::<Vec<_>>();
        match self {
            Self::Embed { table } => vec![*table],
            Self::RmsNorm(norm)
            | Self::AddRmsNorm { norm, .. }
            | Self::NormQuantise(norm)
            | Self::QkNormRope { norm, .. }
            | Self::RopeKvWrite { norm: Some(norm), .. } => vec![norm.weight],
            Self::Linear(p) | Self::SwigluLinear { part: p, .. } => part(p),
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
                f.write_str(">")
            }
            Self::AddRmsNorm { quantise: true, .. } => f.write_str("<q8>"),
            Self::SwigluLinear { activation, quantise, .. } => {
                write!(f, "<{activation:?}{}>", if *quantise { " q8" } else { "" })
            }
            _ => Ok(()),
        }
    }
}
