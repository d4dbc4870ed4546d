//! `aclnn` descriptors: tensors, lists, scalars, arrays. Arrays are copied when the descriptor is created.

use crate::codes::{Done, FORMAT_ND, FORMAT_NZ, OP_INVALID, OP_NULL, fail, rule};
use crate::registry::{Handle, Registry};
use crate::runtime::memory::GRANULE;
use std::sync::Arc;

pub(crate) static TENSORS: Registry<View> = Registry::new("aclTensor");
pub(crate) static LISTS: Registry<Vec<Handle>> = Registry::new("aclTensorList");
pub(crate) static SCALARS: Registry<f64> = Registry::new("aclScalar");
pub(crate) static INT_ARRAYS: Registry<Vec<i64>> = Registry::new("aclIntArray");

/// Element types, by their numbers in `aclDataType`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Elem {
    F32,
    F16,
    I8,
    I32,
    U8,
    I64,
    Bool,
    BF16,
    I4,
}

impl Elem {
    pub(crate) fn from_code(code: i32) -> Option<Self> {
        Some(match code {
            0 => Self::F32,
            1 => Self::F16,
            2 => Self::I8,
            3 => Self::I32,
            4 => Self::U8,
            9 => Self::I64,
            12 => Self::Bool,
            27 => Self::BF16,
            29 => Self::I4,
            _ => return None,
        })
    }

    pub(crate) fn bits(self) -> usize {
        match self {
            Self::I4 => 4,
            Self::I8 | Self::U8 | Self::Bool => 8,
            Self::F16 | Self::BF16 => 16,
            Self::F32 | Self::I32 => 32,
            Self::I64 => 64,
        }
    }

    /// f16, bf16 or f32.
    pub(crate) fn is_float(self) -> bool {
        matches!(self, Self::F32 | Self::F16 | Self::BF16)
    }

    /// f16 or bf16.
    pub(crate) fn is_half(self) -> bool {
        matches!(self, Self::F16 | Self::BF16)
    }

    /// int32 or int64.
    pub(crate) fn is_index(self) -> bool {
        matches!(self, Self::I32 | Self::I64)
    }
}

/// A tensor as an operand of an operation.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct View {
    pub(crate) address: usize,
    pub(crate) elem: Elem,
    pub(crate) format: i32,
    pub(crate) dims: Vec<usize>,
    pub(crate) strides: Vec<usize>,
    pub(crate) offset: usize,
    pub(crate) storage: Vec<usize>,
}

impl View {
    pub(crate) fn count(&self) -> usize {
        self.dims.iter().product()
    }

    /// Number of bytes of its elements.
    pub(crate) fn bytes(&self) -> usize {
        (self.count() * self.elem.bits()).div_ceil(8)
    }

    /// Size of the last dimension.
    pub(crate) fn cols(&self) -> usize {
        self.dims.last().copied().unwrap_or(1)
    }

    /// Product of all dimensions but the last.
    pub(crate) fn rows(&self) -> usize {
        self.dims.iter().rev().skip(1).product()
    }

    pub(crate) fn is_nz(&self) -> bool {
        self.format == FORMAT_NZ
    }

    /// Whether elements are consecutive in row-major order, without gaps.
    pub(crate) fn is_contiguous(&self) -> bool {
        let mut step = 1;
        let holds = |(&dim, &stride): (&usize, &usize)| {
            let fits = dim == 1 || stride == step;
            step *= dim;
            fits
        };
        !self.is_nz() && self.dims.iter().zip(&self.strides).rev().all(holds)
    }

    /// Whether a matrix is the transposition of stored rows.
    pub(crate) fn is_transposed(&self) -> bool {
        let n = self.dims.len();
        n >= 2 && self.strides[n - 2] == 1 && (self.strides[n - 1] == self.dims[n - 2] || self.dims[n - 1] == 1)
    }

    /// Storage index of the element with this row-major index.
    pub(crate) fn place(&self, index: usize) -> usize {
        let mut rest = index;
        let mut place = self.offset;
        for (&dim, &stride) in self.dims.iter().zip(&self.strides).rev() {
            place += rest % dim * stride;
            rest /= dim;
        }
        place
    }

    /// Storage index of an element of a tiled matrix, given by the row and column of the stored matrix.
    pub(crate) fn tiled_place(&self, row: usize, col: usize) -> usize {
        let &[_, row_tiles, height, width] = &self.storage[..] else { return 0 };
        ((col / width * row_tiles + row / height) * height + row % height) * width + col % width
    }

    /// Checks requirements that hold for the tensors of every operation.
    pub(crate) fn check(&self, what: &str) -> Done {
        rule!(self.address != 0, OP_NULL, "{what} has no data");
        rule!(
            self.address.is_multiple_of(GRANULE),
            OP_INVALID,
            "{what} at {:#x} is not aligned to {GRANULE} bytes",
            self.address
        );
        rule!(self.dims.iter().all(|&dim| dim > 0), OP_INVALID, "{what} is empty: {:?}", self.dims);
        Ok(())
    }
}

/// Creates a tensor, as `aclCreateTensor` does; `None` if that function returns null.
#[allow(clippy::too_many_arguments)]
pub(crate) fn describe(
    dims: &[i64],
    elem: i32,
    strides: &[i64],
    offset: i64,
    format: i32,
    storage: &[i64],
    address: usize,
) -> Option<Handle> {
    let sizes = |values: &[i64]| values.iter().map(|&value| usize::try_from(value).ok()).collect::<Option<Vec<_>>>();
    if !matches!(format, FORMAT_ND | FORMAT_NZ) || (format == FORMAT_NZ && storage.len() != 4) || dims.len() > 8 {
        return None;
    }
    let view = View {
        address,
        elem: Elem::from_code(elem)?,
        format,
        dims: sizes(dims)?,
        strides: sizes(strides)?,
        offset: usize::try_from(offset).ok()?,
        storage: sizes(storage)?,
    };
    Some(TENSORS.add(Arc::new(view)))
}

/// Returns a required tensor.
pub(crate) fn tensor(handle: Handle, what: &str) -> Done<View> {
    if handle == 0 {
        fail!(OP_NULL, "{what} is null");
    }
    let view = TENSORS.get(handle, OP_INVALID)?.as_ref().clone();
    view.check(what)?;
    Ok(view)
}

/// Returns an optional tensor.
pub(crate) fn optional(handle: Handle, what: &str) -> Done<Option<View>> {
    if handle == 0 { Ok(None) } else { tensor(handle, what).map(Some) }
}

/// Returns the only element of a required list.
pub(crate) fn single(handle: Handle, what: &str) -> Done<View> {
    rule!(handle != 0, OP_NULL, "{what} is null");
    let members = LISTS.get(handle, OP_INVALID)?;
    rule!(members.len() == 1, OP_INVALID, "{what} has {} tensors; one is supported here", members.len());
    tensor(members[0], what)
}

/// Returns an optional array.
pub(crate) fn ints(handle: Handle) -> Done<Option<Vec<i64>>> {
    if handle == 0 { Ok(None) } else { Ok(Some(INT_ARRAYS.get(handle, OP_INVALID)?.to_vec())) }
}

/// Returns a required scalar.
pub(crate) fn scalar(handle: Handle, what: &str) -> Done<f64> {
    rule!(handle != 0, OP_NULL, "{what} is null");
    Ok(*SCALARS.get(handle, OP_INVALID)?)
}

/// Refuses an argument that must be absent.
pub(crate) fn absent(handle: Handle, what: &str) -> Done {
    rule!(handle == 0, OP_INVALID, "{what} is not supported here");
    Ok(())
}
