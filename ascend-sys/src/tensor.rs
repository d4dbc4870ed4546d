//! Descriptions of tensors in device memory, as the operations expect them.

#![forbid(unsafe_code)]

use crate::abi::{
    ACL_BF16, ACL_BOOL, ACL_FLOAT, ACL_FLOAT16, ACL_FORMAT_FRACTAL_NZ, ACL_FORMAT_ND, ACL_INT4, ACL_INT8, ACL_INT32,
    ACL_INT64,
};
use crate::memory::DeviceAddress;

/// Maximum number of dimensions of a tensor.
pub const MAX_RANK: usize = 8;

/// Element type of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ElemType {
    /// 32-bit float.
    F32,
    /// 16-bit IEEE float (half).
    F16,
    /// bfloat16.
    BF16,
    /// Signed 8-bit integer.
    I8,
    /// Signed 4-bit integers, two per byte, the first in the low half.
    I4,
    /// Signed 32-bit integer.
    I32,
    /// Signed 64-bit integer.
    I64,
    /// Boolean: a byte with the value 0 or 1.
    Bool,
}

impl ElemType {
    /// Returns the value of `aclDataType`.
    pub const fn code(self) -> i32 {
        match self {
            Self::F32 => ACL_FLOAT,
            Self::F16 => ACL_FLOAT16,
            Self::BF16 => ACL_BF16,
            Self::I8 => ACL_INT8,
            Self::I4 => ACL_INT4,
            Self::I32 => ACL_INT32,
            Self::I64 => ACL_INT64,
            Self::Bool => ACL_BOOL,
        }
    }

    /// Returns the number of bits per element.
    pub const fn bits(self) -> usize {
        match self {
            Self::I4 => 4,
            Self::I8 | Self::Bool => 8,
            Self::F16 | Self::BF16 => 16,
            Self::F32 | Self::I32 => 32,
            Self::I64 => 64,
        }
    }
}

/// Tensor in device memory. The layout is that of the kernel shim's struct `ascend_tensor`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct TensorDesc {
    address: DeviceAddress,
    elem: i32,
    format: i32,
    rank: u32,
    storage_rank: u32,
    dims: [i64; MAX_RANK],
    strides: [i64; MAX_RANK],
    storage_dims: [i64; MAX_RANK],
    offset: i64,
}

impl TensorDesc {
    /// Describes a contiguous tensor.
    ///
    /// # Panics
    /// If `dims` has more than [`MAX_RANK`] dimensions.
    pub fn new(address: DeviceAddress, elem: ElemType, dims: &[usize]) -> Self {
        let mut strides = [0; MAX_RANK];
        let mut step = 1;
        for (stride, &dim) in strides[..dims.len()].iter_mut().zip(dims).rev() {
            *stride = step;
            step *= as_i64(dim);
        }
        let wide = widen(dims);
        Self {
            address,
            elem: elem.code(),
            format: ACL_FORMAT_ND,
            rank: rank_of(dims),
            storage_rank: rank_of(dims),
            dims: wide,
            strides,
            storage_dims: wide,
            offset: 0,
        }
    }

    /// Describes a view of a larger contiguous tensor with the shape `storage`.
    ///
    /// `strides` and `first`, the index of the view's first element, count elements.
    ///
    /// # Panics
    /// If `dims` or `storage` has more than [`MAX_RANK`] dimensions, or if `strides` does not have one stride per
    /// dimension.
    pub fn view(
        address: DeviceAddress,
        elem: ElemType,
        dims: &[usize],
        strides: &[usize],
        first: usize,
        storage: &[usize],
    ) -> Self {
        assert_eq!(dims.len(), strides.len(), "a view needs one stride per dimension");
        Self {
            strides: widen(strides),
            offset: as_i64(first),
            storage_rank: rank_of(storage),
            storage_dims: widen(storage),
            ..Self::new(address, elem, dims)
        }
    }

    /// Describes a matrix stored in tiles (`FRACTAL_NZ`) of 16 rows by 32 bytes each.
    pub fn tiled(address: DeviceAddress, elem: ElemType, rows: usize, cols: usize) -> Self {
        let width = 32 * 8 / elem.bits();
        let storage = [cols.div_ceil(width), rows.div_ceil(16), 16, width];
        Self {
            format: ACL_FORMAT_FRACTAL_NZ,
            storage_rank: 4,
            storage_dims: widen(&storage),
            ..Self::new(address, elem, &[rows, cols])
        }
    }

    /// Returns the same description with another address.
    #[must_use]
    pub fn at(self, address: DeviceAddress) -> Self {
        Self { address, ..self }
    }

    /// Returns the dimensions.
    pub fn dims(&self) -> &[i64] {
        &self.dims[..self.rank as usize]
    }
}

fn as_i64(n: usize) -> i64 {
    i64::try_from(n).expect("a tensor dimension fits in an i64")
}

fn rank_of(dims: &[usize]) -> u32 {
    assert!(dims.len() <= MAX_RANK, "a tensor of {} dimensions, expected at most {MAX_RANK}", dims.len());
    u32::try_from(dims.len()).expect("a rank of at most MAX_RANK fits in a u32")
}

fn widen(dims: &[usize]) -> [i64; MAX_RANK] {
    rank_of(dims);
    std::array::from_fn(|i| dims.get(i).map_or(0, |&dim| as_i64(dim)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::{offset_of, size_of};

    /// Compares with the layout of `ascend_tensor` in the shim on LP64.
    #[test]
    fn layout_is_the_shims() {
        assert_eq!(size_of::<TensorDesc>(), 8 + 4 * 4 + 3 * 64 + 8);
        assert_eq!(offset_of!(TensorDesc, dims), 24);
        assert_eq!(offset_of!(TensorDesc, offset), 216);
    }

    #[test]
    fn strides_count_elements_from_the_last_dimension() {
        let desc = TensorDesc::new(DeviceAddress(64), ElemType::F16, &[2, 3, 5]);
        assert_eq!((&desc.strides[..3], desc.dims()), (&[15, 5, 1][..], &[2, 3, 5][..]));
        let tiles = TensorDesc::tiled(DeviceAddress(64), ElemType::I8, 17, 33);
        assert_eq!((tiles.dims(), &tiles.storage_dims[..4]), (&[17, 33][..], &[2, 2, 16, 32][..]));
    }
}
