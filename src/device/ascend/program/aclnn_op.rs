//! Operations by their operands: what an op is made from, as often as it has to be.

#![forbid(unsafe_code)]

use ascend_sys::{AscendError, Op, Ops, TensorDesc};

use crate::device::ascend::weights::layout::{GROUP_SIZE, Quantised};

/// One operation, ready to be made.
#[derive(Clone, Debug)]
pub(crate) enum Recipe {
    Embedding { table: TensorDesc, ids: TensorDesc, out: TensorDesc },
    GatherRows { x: TensorDesc, rows: TensorDesc, out: TensorDesc },
    RmsNorm { x: TensorDesc, gamma: TensorDesc, eps: f64, out: TensorDesc, rstd: TensorDesc },
    AddRmsNorm { operands: Box<[TensorDesc; 6]>, eps: f64 },
    Linear { x: TensorDesc, weight: TensorDesc, bias: Option<TensorDesc>, out: TensorDesc },
    Quantise { x: TensorDesc, rows: TensorDesc, scales: TensorDesc },
    GroupLinear { x: TensorDesc, values: TensorDesc, scales: TensorDesc, offsets: Option<TensorDesc>, out: TensorDesc },
    ChannelLinear { x: Quantised, values: TensorDesc, scales: TensorDesc, out: TensorDesc },
    Rope { x: TensorDesc, cos: TensorDesc, sin: TensorDesc, is_interleaved: bool, out: TensorDesc },
    Silu { x: TensorDesc, out: TensorDesc },
    Gelu { x: TensorDesc, out: TensorDesc },
    Swiglu { x: TensorDesc, out: TensorDesc },
    Add { a: TensorDesc, b: TensorDesc, out: TensorDesc },
    Mul { a: TensorDesc, b: TensorDesc, out: TensorDesc },
    Cast { x: TensorDesc, out: TensorDesc },
    Copy { dst: TensorDesc, src: TensorDesc },
    IsFinite { x: TensorDesc, out: TensorDesc },
    All { x: TensorDesc, out: TensorDesc },
    ArgMax { x: TensorDesc, out: TensorDesc },
    ScatterRows { cache: TensorDesc, indices: TensorDesc, updates: TensorDesc },
}

impl Recipe {
    /// Runs the operation's first phase.
    pub(crate) fn make(&self, ops: &Ops) -> Result<Op, AscendError> {
        match self {
            Self::Embedding { table, ids, out } => ops.embedding(table, ids, out),
            Self::GatherRows { x, rows, out } => ops.gather_rows(x, rows, out),
            Self::RmsNorm { x, gamma, eps, out, rstd } => ops.rms_norm(x, gamma, *eps, out, rstd),
            Self::AddRmsNorm { operands, eps } => {
                let [a, b, gamma, out, rstd, sum] = &**operands;
                ops.add_rms_norm(a, b, gamma, *eps, out, rstd, sum)
            }
            Self::Linear { x, weight, bias, out } => ops.linear(x, weight, bias.as_ref(), out),
            Self::Quantise { x, rows, scales } => ops.dynamic_quant(x, rows, scales),
            Self::GroupLinear { x, values, scales, offsets, out } => {
                ops.weight_quant_linear(x, values, scales, offsets.as_ref(), None, GROUP_SIZE, out)
            }
            Self::ChannelLinear { x, values, scales, out } => {
                ops.quant_linear(&x.rows, values, scales, &x.scales, None, out)
            }
            Self::Rope { x, cos, sin, is_interleaved, out } => ops.rope(x, cos, sin, *is_interleaved, out),
            Self::Silu { x, out } => ops.silu(x, out),
            Self::Gelu { x, out } => ops.gelu(x, out),
            Self::Swiglu { x, out } => ops.swiglu(x, out),
            Self::Add { a, b, out } => ops.add(a, b, out),
            Self::Mul { a, b, out } => ops.mul(a, b, out),
            Self::Cast { x, out } => ops.cast(x, out),
            Self::Copy { dst, src } => ops.copy(dst, src),
            Self::IsFinite { x, out } => ops.is_finite(x, out),
            Self::All { x, out } => ops.all(x, out),
            Self::ArgMax { x, out } => ops.argmax(x, out),
            Self::ScatterRows { cache, indices, updates } => ops.scatter_rows(cache, indices, updates),
        }
    }
}
