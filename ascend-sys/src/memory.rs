//! Device memory and pinned host memory, and the blocking copies between host and device.
//!
//! Freeing does not wait for work that still uses the memory: whoever drops a buffer has waited for its streams.

#![allow(unsafe_code)]

use crate::abi::{
    ACL_MEM_MALLOC_HUGE_FIRST, ACL_MEM_MALLOC_HUGE_ONLY, ACL_MEM_MALLOC_NORMAL_ONLY, ACL_MEMCPY_DEVICE_TO_HOST,
    ACL_MEMCPY_HOST_TO_DEVICE,
};
use crate::context::Context;
use crate::error::AscendError;
use std::ffi::c_void;
use std::{ptr, slice};

/// Pages device memory is made of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pages {
    /// 2 MiB above 1 MiB, small ones where there are none left.
    #[default]
    HugeFirst,
    /// 2 MiB or failure.
    HugeOnly,
    /// 4 KiB.
    Normal,
}

/// An address on a device: never to be followed on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct DeviceAddress(pub usize);

impl DeviceAddress {
    /// The address some bytes on.
    #[must_use]
    pub const fn offset(self, bytes: usize) -> Self {
        Self(self.0 + bytes)
    }

    pub(crate) const fn as_ptr(self) -> *mut c_void {
        self.0 as *mut c_void
    }
}

/// A stretch of device memory, not initialized, aligned to 64 bytes.
#[derive(Debug)]
pub struct DeviceBuffer {
    context: Context,
    address: DeviceAddress,
    bytes: usize,
}

impl DeviceBuffer {
    /// Allocates in the context, which must be current. Slow, and not ordered with streams: not for the step loop.
    pub fn new(context: &Context, bytes: usize, pages: Pages) -> Result<Self, AscendError> {
        let policy = match pages {
            Pages::HugeFirst => ACL_MEM_MALLOC_HUGE_FIRST,
            Pages::HugeOnly => ACL_MEM_MALLOC_HUGE_ONLY,
            Pages::Normal => ACL_MEM_MALLOC_NORMAL_ONLY,
        };
        let mut address = ptr::null_mut();
        // SAFETY: a valid place for a pointer.
        let code = unsafe { (context.runtime().symbols().aclrt_malloc)(&raw mut address, bytes, policy) };
        context.runtime().check("aclrtMalloc", code)?;
        Ok(Self { context: context.clone(), address: DeviceAddress(address as usize), bytes })
    }

    /// Its start.
    pub fn address(&self) -> DeviceAddress {
        self.address
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Copies from the host and waits for the copy, but not for any stream.
    ///
    /// # Panics
    /// Where the buffer ends before the copy.
    pub fn write(&self, offset: usize, src: &[u8]) -> Result<(), AscendError> {
        self.assert_inside(offset, src.len());
        let dst = self.address.offset(offset).as_ptr();
        // SAFETY: the destination has room for `destMax` bytes, the source is a slice of that length.
        let code = unsafe {
            (self.context.runtime().symbols().aclrt_memcpy)(
                dst,
                self.bytes - offset,
                src.as_ptr().cast(),
                src.len(),
                ACL_MEMCPY_HOST_TO_DEVICE,
            )
        };
        self.context.runtime().check("aclrtMemcpy", code)
    }

    /// Copies to the host and waits for the copy, but not for any stream: what is still queued is not in it.
    ///
    /// # Panics
    /// Where the buffer ends before the copy.
    pub fn read(&self, offset: usize, dst: &mut [u8]) -> Result<(), AscendError> {
        self.assert_inside(offset, dst.len());
        let src = self.address.offset(offset).as_ptr();
        // SAFETY: the source holds as many bytes as the destination, which is a slice.
        let code = unsafe {
            (self.context.runtime().symbols().aclrt_memcpy)(
                dst.as_mut_ptr().cast(),
                dst.len(),
                src,
                dst.len(),
                ACL_MEMCPY_DEVICE_TO_HOST,
            )
        };
        self.context.runtime().check("aclrtMemcpy", code)
    }

    /// Fills it with a byte and waits for that, but not for any stream.
    pub fn fill(&self, byte: u8) -> Result<(), AscendError> {
        // SAFETY: the buffer has as many bytes as are filled.
        let code = unsafe {
            (self.context.runtime().symbols().aclrt_memset)(
                self.address.as_ptr(),
                self.bytes,
                i32::from(byte),
                self.bytes,
            )
        };
        self.context.runtime().check("aclrtMemset", code)
    }

    /// # Panics
    /// Where `offset + bytes` is beyond the end.
    pub(crate) fn assert_inside(&self, offset: usize, bytes: usize) {
        assert!(
            offset.checked_add(bytes).is_some_and(|end| end <= self.bytes),
            "{bytes} bytes at {offset} of a device buffer of {}",
            self.bytes
        );
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        // SAFETY: allocated once, freed once.
        self.context
            .destroy("aclrtFree", || unsafe { (self.context.runtime().symbols().aclrt_free)(self.address.as_ptr()) });
    }
}

/// Host memory that a device copies from and to on its own.
#[derive(Debug)]
pub struct PinnedBuffer {
    context: Context,
    memory: *mut u8,
    bytes: usize,
}

// SAFETY: plain memory; the runtime hands it out for any thread.
unsafe impl Send for PinnedBuffer {}
// SAFETY: shared access only reads.
unsafe impl Sync for PinnedBuffer {}

impl PinnedBuffer {
    /// Allocates and zeroes.
    pub fn new(context: &Context, bytes: usize) -> Result<Self, AscendError> {
        let mut memory = ptr::null_mut();
        // SAFETY: a valid place for a pointer.
        let code = unsafe { (context.runtime().symbols().aclrt_malloc_host)(&raw mut memory, bytes) };
        context.runtime().check("aclrtMallocHost", code)?;
        // SAFETY: the runtime has just given this many bytes of host memory; zero is a value of a byte.
        unsafe { memory.cast::<u8>().write_bytes(0, bytes) };
        Ok(Self { context: context.clone(), memory: memory.cast(), bytes })
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Its start, for queued copies.
    pub fn as_ptr(&self) -> *mut u8 {
        self.memory
    }

    /// What it holds.
    ///
    /// A queued copy into it must have ended: whoever queued it has promised so.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: this many initialized bytes, and no copy writes to them now.
        unsafe { slice::from_raw_parts(self.memory, self.bytes) }
    }

    /// What it holds, to be written. As with [`Self::as_slice`], queued copies must have ended.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: this many initialized bytes, borrowed exclusively, and no copy touches them now.
        unsafe { slice::from_raw_parts_mut(self.memory, self.bytes) }
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        // SAFETY: allocated once, freed once.
        self.context.destroy("aclrtFreeHost", || unsafe {
            (self.context.runtime().symbols().aclrt_free_host)(self.memory.cast())
        });
    }
}
