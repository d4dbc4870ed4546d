//! Regions of device memory: each part starts at a multiple of 512 bytes and is followed by padding that kernels may
//! read.

pub(super) mod constants;
pub(super) mod kv_layout;
pub(super) mod staging;

use ascend_sys::{AscendError, Context, DeviceAddress, DeviceBuffer, ElemType, Pages, TensorDesc};

/// Alignment of parts, the same as in torch-npu: a multiple of the line size of every cache on the chip.
pub(super) const ALIGNMENT: usize = 512;
/// Padding after each contiguous operand; kernels may read it.
pub(super) const TAIL_PADDING: usize = 32;

/// Bytes of a part with its padding.
pub(super) const fn padded(bytes: usize) -> usize {
    (bytes + TAIL_PADDING).next_multiple_of(ALIGNMENT)
}

/// Allocates zeroed device memory. The fill does not wait for streams, which cannot use the memory yet.
pub(super) fn alloc_zeroed(context: &Context, bytes: usize) -> Result<DeviceBuffer, AscendError> {
    let buffer = DeviceBuffer::new(context, padded(bytes), Pages::HugeFirst)?;
    buffer.fill(0)?;
    Ok(buffer)
}

/// Adds up the sizes of parts that are allocated as one region.
#[derive(Debug, Default)]
pub(super) struct RegionBuilder {
    bytes: usize,
}

impl RegionBuilder {
    /// Offset of the next part.
    pub(super) fn add(&mut self, bytes: usize) -> usize {
        let offset = self.bytes;
        self.bytes += padded(bytes);
        offset
    }

    pub(super) const fn bytes(&self) -> usize {
        self.bytes
    }
}

/// A range of device memory with its element type, from which tensor descriptors are built.
#[derive(Clone, Copy, Debug)]
pub(super) struct TypedAddress {
    pub address: DeviceAddress,
    pub elem: ElemType,
}

impl TypedAddress {
    pub(super) const fn new(address: DeviceAddress, elem: ElemType) -> Self {
        Self { address, elem }
    }

    /// Address of the element at index `elements`.
    pub(super) const fn from(self, elements: usize) -> Self {
        Self { address: self.address.offset(elements * self.elem.bits() / 8), elem: self.elem }
    }

    pub(super) fn tensor(self, dims: &[usize]) -> TensorDesc {
        TensorDesc::new(self.address, self.elem, dims)
    }
}
