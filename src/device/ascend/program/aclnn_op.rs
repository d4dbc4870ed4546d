//! Descriptions of operations by their operands, from which an operation is built as often as needed.

#![forbid(unsafe_code)]

use ascend_sys::{AscendError, DeviceAddress, ElemType, Op, Ops, TensorDesc};

/// Description of one operation and its operands.
#[derive(Clone, Debug)]
pub(crate) enum AclnnOp {
    Embedding { table: TensorDesc, ids: TensorDesc, out: TensorDesc },
    GatherRows { x: TensorDesc, rows: TensorDesc, out: TensorDesc },
    RmsNorm { x: TensorDesc, gamma: TensorDesc, eps: f64, out: TensorDesc, rstd: TensorDesc },
    AddRmsNorm { operands: Box<[TensorDesc; 6]>, eps: f64 },
    Linear { x: TensorDesc, weight: TensorDesc, bias: Option<TensorDesc>, out: TensorDesc },
    Quantize { x: TensorDesc, rows: TensorDesc, scales: TensorDesc },
    GroupLinear { x: TensorDesc, values: TensorDesc, scales: TensorDesc, offsets: Option<TensorDesc>, out: TensorDesc },
    ChannelLinear { x: Quantized, values: TensorDesc, scales: TensorDesc, out: TensorDesc },
    Rope { x: TensorDesc, cos: TensorDesc, sin: TensorDesc, is_interleaved: bool, out: TensorDesc },
    Silu { x: TensorDesc, out: TensorDesc },
    Gelu { x: TensorDesc, out: TensorDesc },
    Swiglu { x: TensorDesc, out: TensorDesc },
    Add { a: TensorDesc, b: TensorDesc, out: TensorDesc },
    Mul { a: TensorDesc, b: TensorDesc, out: TensorDesc },
    Scale { x: TensorDesc, factor: f32, out: TensorDesc },
    Cast { x: TensorDesc, out: TensorDesc },
    Copy { dst: TensorDesc, src: TensorDesc },
    IsFinite { x: TensorDesc, out: TensorDesc },
    All { x: TensorDesc, out: TensorDesc },
    ArgMax { x: TensorDesc, out: TensorDesc },
    ScatterRows { cache: TensorDesc, indices: TensorDesc, updates: TensorDesc },
}

impl AclnnOp {
    /// Builds the operation by running its first phase.
    pub(crate) fn build(&self, ops: &Ops) -> Result<Op, AscendError> {
        match self {
            Self::Embedding { table, ids, out } => ops.embedding(table, ids, out),
            Self::GatherRows { x, rows, out } => ops.gather_rows(x, rows, out),
            Self::RmsNorm { x, gamma, eps, out, rstd } => ops.rms_norm(x, gamma, *eps, out, rstd),
            Self::AddRmsNorm { operands, eps } => {
                let [a, b, gamma, out, rstd, sum] = &**operands;
                ops.add_rms_norm(a, b, gamma, *eps, out, rstd, sum)
            }
            Self::Linear { x, weight, bias, out } => ops.linear(x, weight, bias.as_ref(), out),
            Self::Quantize { x, rows, scales } => ops.dynamic_quant(x, rows, scales),
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
            Self::Scale { x, factor, out } => ops.scale(x, *factor, out),
            Self::Cast { x, out } => ops.cast(x, out),
            Self::Copy { dst, src } => ops.copy(dst, src),
            Self::IsFinite { x, out } => ops.is_finite(x, out),
            Self::All { x, out } => ops.all(x, out),
            Self::ArgMax { x, out } => ops.argmax(x, out),
            Self::ScatterRows { cache, indices, updates } => ops.scatter_rows(cache, indices, updates),
        }
    }
}

/// Rows rounded to int8, with one scale per row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Quantized {
    pub rows: TensorDesc,
    pub scales: TensorDesc,
}

impl Quantized {
    /// Describes the rounded form of rows with the shape of `x`.
    pub(crate) fn new(rows: DeviceAddress, scales: DeviceAddress, x: &TensorDesc) -> Self {
        let dims = [0, 1].map(|dim| x.dims().get(dim).map_or(1, |&dim| usize::try_from(dim).unwrap_or(0)));
        Self {
            rows: TensorDesc::new(rows, ElemType::I8, &dims),
            scales: TensorDesc::new(scales, ElemType::F32, &dims[..1]),
        }
    }

    /// Operation that rounds `x` to these rows.
    pub(crate) fn op(&self, x: TensorDesc) -> AclnnOp {
        AclnnOp::Quantize { x, rows: self.rows, scales: self.scales }
    }
}

/// Number of elements of a column that share a scale, which equals the block of every format. A multiple of 32 and less
/// than a column, as `aclnnWeightQuantBatchMatmulV2` documents.
pub(crate) const GROUP_SIZE: i32 = 32;
