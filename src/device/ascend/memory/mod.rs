//! Device memory in pieces: every piece starts at a multiple of 512 bytes and has room behind it that kernels may read.

pub(super) mod constants;
pub(super) mod kv_layout;
pub(super) mod staging;

use ascend_sys::{AscendError, Context, DeviceAddress, DeviceBuffer, ElemType, Pages, TensorDesc};

/// Where pieces start: what torch-npu uses, whole lines of every cache on the chip.
pub(super) const ALIGNMENT: usize = 512;
/// Bytes behind every contiguous operand that kernels may read.
pub(super) const TAIL_PADDING: usize = 32;

/// Bytes of a piece with what is behind it.
pub(super) const fn padded(bytes: usize) -> usize {
    (bytes + TAIL_PADDING).next_multiple_of(ALIGNMENT)
}

/// Zeroed device memory. The fill does not wait for streams, which cannot know the memory yet.
pub(super) fn alloc_zeroed(context: &Context, bytes: usize) -> Result<DeviceBuffer, AscendError> {
    let buffer = DeviceBuffer::new(context, padded(bytes), Pages::HugeFirst)?;
    buffer.fill(0)?;
    Ok(buffer)
}

/// Sums up pieces before they are allocated as one.
#[derive(Debug, Default)]
pub(super) struct RegionBuilder {
    bytes: usize,
}

impl RegionBuilder {
    /// Offset of a further piece.
    pub(super) fn add(&mut self, bytes: usize) -> usize {
        let offset = self.bytes;
        self.bytes += padded(bytes);
        offset
    }

    pub(super) const fn bytes(&self) -> usize {
        self.bytes
    }
}

/// A stretch of device memory with its element type: what descriptions are made of.
#[derive(Clone, Copy, Debug)]
pub(super) struct TypedAddress {
    pub address: DeviceAddress,
    pub elem: ElemType,
}

impl TypedAddress {
    pub(super) const fn new(address: DeviceAddress, elem: ElemType) -> Self {
        Self { address, elem }
    }

    /// The place some elements on.
    pub(super) const fn from(self, elements: usize) -> Self {
        Self { address: self.address.offset(elements * self.elem.bits() / 8), elem: self.elem }
    }

    pub(super) fn tensor(self, dims: &[usize]) -> TensorDesc {
        TensorDesc::new(self.address, self.elem, dims)
    }
}
