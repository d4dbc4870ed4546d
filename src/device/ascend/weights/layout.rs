//! Layouts that a matrix can have on the card, and the choice among those that the card's operations accept.
//!
//! A layout is chosen when weights are uploaded, by querying the operations themselves. A matrix whose layout they
//! refuse or lack is stored in 16 bits, and a note names the layout and the reason.

#![forbid(unsafe_code)]

use crate::device::ascend::program::aclnn_op::{GROUP_SIZE, Quantized};
use ascend_sys::{AscendError, AscendErrorKind, DeviceAddress, ElemType, Ops, TensorDesc};

use crate::device::ascend::memory::TypedAddress;
use crate::device::ascend::notes::Diagnostics;
use crate::device::ascend::options::{WeightForm, WeightTiles};
use crate::device::ascend::program::aclnn_op::AclnnOp;
use crate::graph::{Weight, WeightRole};
use crate::weights::DType;

/// Group size as a `usize`.
pub(crate) const GROUP: usize = GROUP_SIZE as usize;

/// Layout of a weight on the card. `n` rows are outputs of the product, `k` columns its inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum WeightLayout {
    /// `[n, k]` or `[len]` in the element type of the activations.
    Rows,
    /// `[n, k]` in the element type of the activations, in tiles (the `FRACTAL_NZ` format).
    Tiles,
    /// int8 or int4 `[k, n]`, with scales and optional offsets `[k / 32, n]` in the element type of the activations:
    /// `weight = (quant + offset) · scale`. Not transposed, as the vendor's documents recommend for groups.
    Groups { elem: ElemType, has_offsets: bool },
    /// int8 `[n, k]` and f32 scales `[n]`, for activation rows that are also rounded to int8.
    Channels { in_tiles: bool },
}

impl WeightLayout {
    /// Layout of a matrix if the operations accept it.
    fn wanted(weight: &Weight, asked: WeightForm, tiles: WeightTiles) -> Self {
        let plain = if tiles == WeightTiles::Always { Self::Tiles } else { Self::Rows };
        if weight.role != WeightRole::Matrix {
            // An embedding table is gathered by rows.
            return Self::Rows;
        }
        let is_whole = weight.shape.last().is_some_and(|k| k.is_multiple_of(weight.dtype.block_len()));
        let asked = if is_whole { asked } else { WeightForm::Widened };
        match (asked, weight.dtype) {
            (WeightForm::Widened, _) | (_, DType::F32 | DType::F16 | DType::BF16) => plain,
            (WeightForm::Dynamic, _) => Self::Channels { in_tiles: tiles != WeightTiles::Never },
            (WeightForm::WeightOnly, dtype) => {
                let (elem, has_offsets) = match dtype {
                    DType::Q4_0 => (ElemType::I4, false),
                    DType::Q4_1 | DType::Q4_K => (ElemType::I4, true),
                    DType::Q5_1 | DType::Q5_K => (ElemType::I8, true),
                    _ => (ElemType::I8, false),
                };
                Self::Groups { elem, has_offsets }
            }
        }
    }

    /// Layout to use instead if the operations refuse this one.
    fn fallback(self, tiles: WeightTiles) -> Self {
        match self {
            Self::Channels { in_tiles: true } => Self::Channels { in_tiles: false },
            Self::Channels { in_tiles: false } | Self::Groups { .. } if tiles == WeightTiles::Always => Self::Tiles,
            _ => Self::Rows,
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Rows => "16 bits",
            Self::Tiles => "tiles of 16 bits",
            Self::Groups { elem: ElemType::I4, .. } => "groups of int4",
            Self::Groups { .. } => "groups of int8",
            Self::Channels { in_tiles: true } => "tiles of int8",
            Self::Channels { in_tiles: false } => "rows of int8",
        }
    }

    /// Bytes of the values, scales and offsets of a weight that [`is_countable`].
    fn bytes(self, shape: &[usize], elem: ElemType, ops: &Ops) -> Result<[usize; 3], AscendError> {
        let elements: usize = shape.iter().product();
        let [n, k] = [0, 1].map(|dim| shape.get(dim).copied().unwrap_or(1));
        Ok(match self {
            Self::Rows => [2 * elements, 0, 0],
            Self::Tiles => [ops.tiled_elements(n, k, elem)?.saturating_mul(2), 0, 0],
            Self::Groups { elem, has_offsets } => {
                let scales = 2 * elements / GROUP;
                [elements * elem.bits() / 8, scales, if has_offsets { scales } else { 0 }]
            }
            Self::Channels { in_tiles: false } => [elements, 4 * n, 0],
            Self::Channels { in_tiles: true } => [ops.tiled_elements(n, k, ElemType::I8)?, 4 * n, 0],
        })
    }

    /// Returns why the operations refuse a matrix `[n, k]` in this layout, or `None` if they accept it.
    fn refusal(
        self,
        [n, k]: [usize; 2],
        elem: ElemType,
        ops: &Ops,
        at: DeviceAddress,
    ) -> Result<Option<AscendError>, AscendError> {
        let ask = || -> Result<(), AscendError> {
            if self.is_tiled() {
                self.bytes(&[n, k], elem, ops)?;
                if !ops.has("aclnnTransMatmulWeight") {
                    return Err(missing_op("aclnnTransMatmulWeight"));
                }
            }
            let matrix = Matrix::new(self, elem, [n, k], [at; 3]);
            // Phase 1 only reads descriptors, so all tensors may share one address.
            let x = TensorDesc::new(at, elem, &[1, k]);
            let quantized = Quantized::new(at, at, &x);
            if matrix.takes_int8() {
                quantized.op(x).build(ops)?;
            }
            matrix.product(x, &quantized, TensorDesc::new(at, elem, &[1, n])).build(ops).map(drop)
        };
        match ask() {
            Ok(()) => Ok(None),
            Err(error) if is_refusal(&error) => Ok(Some(error)),
            Err(error) => Err(error),
        }
    }

    pub(crate) const fn is_tiled(self) -> bool {
        matches!(self, Self::Tiles | Self::Channels { in_tiles: true })
    }

    /// The same layout without tiles.
    pub(crate) const fn untiled(self) -> Self {
        match self {
            Self::Tiles => Self::Rows,
            Self::Channels { .. } => Self::Channels { in_tiles: false },
            other => other,
        }
    }
}

/// Bytes of the row of zeros after an embedding table; a rank looks it up for ids of other ranks.
pub(crate) fn zero_row_bytes(weight: &Weight) -> usize {
    if weight.role == WeightRole::Table { 2 * weight.shape.last().copied().unwrap_or(0) } else { 0 }
}

/// Whether a weight's sizes fit in `usize`: eight bytes per element are an upper bound for every layout.
fn is_countable(shape: &[usize]) -> bool {
    let bytes = shape.iter().try_fold(8usize, |bytes, &dim| bytes.checked_mul(dim));
    shape.iter().copied().chain(bytes).all(|size| i64::try_from(size).is_ok()) && bytes.is_some()
}

fn missing_op(call: &'static str) -> AscendError {
    let message = "the libraries do not have the operation".to_owned();
    AscendError { call, code: ascend_sys::SHIM_NO_SYMBOL, kind: AscendErrorKind::Unsupported, message }
}

pub(crate) fn is_refusal(error: &AscendError) -> bool {
    matches!(error.kind, AscendErrorKind::Refused | AscendErrorKind::Unsupported)
}

/// A weight's layout, and the bytes of its values, scales and offsets.
pub(crate) type Chosen = (WeightLayout, [usize; 3]);

/// Chooses the layout of each weight; `None` if sizes overflow.
///
/// # Errors
/// Any failure of an operation that is neither an acceptance nor a refusal.
pub(crate) fn choose(
    weights: &[Weight],
    (asked, tiles): (WeightForm, WeightTiles),
    elem: ElemType,
    ops: &Ops,
    at: DeviceAddress,
    notes: &Diagnostics,
) -> Result<Option<Vec<Chosen>>, AscendError> {
    let mut known: Vec<(WeightLayout, [usize; 2], WeightLayout)> = Vec::new();
    let mut all = Vec::with_capacity(weights.len());
    for weight in weights {
        if !is_countable(&weight.shape) {
            return Ok(None);
        }
        let wanted = WeightLayout::wanted(weight, asked, tiles);
        let mut form = wanted;
        if let &[n, k] = &weight.shape[..] {
            let answer = known.iter().find(|(other, shape, _)| (*other, *shape) == (wanted, [n, k]));
            if let Some((_, _, answer)) = answer {
                form = *answer;
            }
            while answer.is_none() && form != WeightLayout::Rows {
                let Some(refusal) = form.refusal([n, k], elem, ops, at)? else { break };
                let instead = form.fallback(tiles);
                let (dtype, held, form_name) = (weight.dtype, instead.name(), form.name());
                notes.add(format!(
                    "{dtype} matrices of {n} by {k} are stored as {held} instead of {form_name}: {refusal}"
                ));
                form = instead;
            }
            known.push((wanted, [n, k], form));
        } else {
            form = WeightLayout::Rows;
        }
        let mut bytes = form.bytes(&weight.shape, elem, ops)?;
        bytes[0] += zero_row_bytes(weight);
        all.push((form, bytes));
    }
    Ok(Some(all))
}

/// A matrix as an operand of a product.
#[derive(Clone, Copy, Debug)]
#[allow(clippy::large_enum_variant)] // made on the stack, one at a time
pub(crate) enum Matrix {
    /// Products with such a matrix accept a bias.
    Rows(TensorDesc),
    Tiles(TensorDesc),
    Groups {
        values: TensorDesc,
        scales: TensorDesc,
        offsets: Option<TensorDesc>,
    },
    Channels {
        values: TensorDesc,
        scales: TensorDesc,
    },
}

impl Matrix {
    /// Describes a matrix `[n, k]` whose values, scales and offsets are at three addresses.
    pub(crate) fn new(
        form: WeightLayout,
        elem: ElemType,
        [n, k]: [usize; 2],
        [values, scales, offsets]: [DeviceAddress; 3],
    ) -> Self {
        match form {
            WeightLayout::Rows => Self::Rows(TensorDesc::new(values, elem, &[n, k])),
            WeightLayout::Tiles => Self::Tiles(TensorDesc::tiled(values, elem, n, k)),
            WeightLayout::Groups { elem: quants, has_offsets } => {
                let of_groups = |at: DeviceAddress| TypedAddress::new(at, elem).tensor(&[k / GROUP, n]);
                Self::Groups {
                    values: TensorDesc::new(values, quants, &[k, n]),
                    scales: of_groups(scales),
                    offsets: has_offsets.then(|| of_groups(offsets)),
                }
            }
            WeightLayout::Channels { in_tiles } => Self::Channels {
                values: if in_tiles {
                    TensorDesc::tiled(values, ElemType::I8, n, k)
                } else {
                    TensorDesc::new(values, ElemType::I8, &[n, k])
                },
                scales: TensorDesc::new(scales, ElemType::F32, &[n]),
            },
        }
    }

    /// Whether its products take int8 activation rows.
    pub(crate) const fn takes_int8(&self) -> bool {
        matches!(self, Self::Channels { .. })
    }

    /// Computes `out = x · matrixᵀ`, without a bias.
    pub(crate) fn product(&self, x: TensorDesc, quantized: &Quantized, out: TensorDesc) -> AclnnOp {
        match *self {
            Self::Rows(weight) | Self::Tiles(weight) => AclnnOp::Linear { x, weight, bias: None, out },
            Self::Groups { values, scales, offsets } => AclnnOp::GroupLinear { x, values, scales, offsets, out },
            Self::Channels { values, scales } => AclnnOp::ChannelLinear { x: *quantized, values, scales, out },
        }
    }
}
