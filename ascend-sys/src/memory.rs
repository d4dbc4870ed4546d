//! Device memory, pinned host memory, and blocking copies between host and device.
//!
//! Freeing a buffer does not wait for work that still uses it: wait for its streams before you drop it.

#![allow(unsafe_code)]

use crate::abi::{
    ACL_MEM_MALLOC_HUGE_FIRST, ACL_MEM_MALLOC_HUGE_ONLY, ACL_MEM_MALLOC_NORMAL_ONLY, ACL_MEMCPY_DEVICE_TO_HOST,
    ACL_MEMCPY_HOST_TO_DEVICE,
};
use crate::context::Context;
use crate::error::AscendError;
use std::ffi::c_void;
use std::{ptr, slice};

/// Page size of a device allocation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pages {
    /// 2 MiB pages for allocations above 1 MiB; small pages if no 2 MiB page is available.
    #[default]
    HugeFirst,
    /// 2 MiB pages only; the allocation fails if none is available.
    HugeOnly,
    /// 4 KiB pages.
    Normal,
}

/// Address in device memory. The host must never dereference it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct DeviceAddress(pub usize);

impl DeviceAddress {
    /// Returns the address `bytes` bytes after this one.
    #[must_use]
    pub const fn offset(self, bytes: usize) -> Self {
        Self(self.0 + bytes)
    }

    pub(crate) const fn as_ptr(self) -> *mut c_void {
        self.0 as *mut c_void
    }
}

/// Buffer in device memory, uninitialized and aligned to 64 bytes.
#[derive(Debug)]
pub struct DeviceBuffer {
    context: Context,
    address: DeviceAddress,
    bytes: usize,
}

impl DeviceBuffer {
    /// Allocates a buffer in the context, which must be current.
    ///
    /// The call is slow and not ordered with streams: do not call it in the step loop.
    ///
    /// # Errors
    /// [`AscendError`] if `aclrtMalloc` fails; of kind [`OutOfMemory`](crate::AscendErrorKind::OutOfMemory) if the
    /// device has too little free memory.
    pub fn new(context: &Context, bytes: usize, pages: Pages) -> Result<Self, AscendError> {
        let policy = match pages {
            Pages::HugeFirst => ACL_MEM_MALLOC_HUGE_FIRST,
            Pages::HugeOnly => ACL_MEM_MALLOC_HUGE_ONLY,
            Pages::Normal => ACL_MEM_MALLOC_NORMAL_ONLY,
        };
        let mut address = ptr::null_mut();
        // SAFETY: `address` is a local variable; the call writes one pointer to it.
        let code = unsafe { (context.runtime().symbols().aclrt_malloc)(&raw mut address, bytes, policy) };
        context.runtime().check("aclrtMalloc", code)?;
        Ok(Self { context: context.clone(), address: DeviceAddress(address as usize), bytes })
    }

    /// Returns the device address of the first byte.
    pub fn address(&self) -> DeviceAddress {
        self.address
    }

    /// Returns the size in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Copies `src` to the buffer at `offset`, and waits for the copy, but not for any stream.
    ///
    /// # Errors
    /// [`AscendError`] if `aclrtMemcpy` fails.
    ///
    /// # Panics
    /// If the copy would exceed the end of the buffer.
    pub fn write(&self, offset: usize, src: &[u8]) -> Result<(), AscendError> {
        self.assert_inside(offset, src.len());
        let dst = self.address.offset(offset).as_ptr();
        // SAFETY: `assert_inside` has checked that `self.bytes - offset` bytes at `dst` (`destMax`) hold the copy.
        // SAFETY: `src` is a slice of `src.len()` bytes.
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

    /// Copies from the buffer at `offset` to `dst`, and waits for the copy, but not for any stream.
    ///
    /// The copy may therefore miss the results of work that is still queued.
    ///
    /// # Errors
    /// [`AscendError`] if `aclrtMemcpy` fails.
    ///
    /// # Panics
    /// If the copy would exceed the end of the buffer.
    pub fn read(&self, offset: usize, dst: &mut [u8]) -> Result<(), AscendError> {
        self.assert_inside(offset, dst.len());
        let src = self.address.offset(offset).as_ptr();
        // SAFETY: `assert_inside` has checked that the buffer contains `dst.len()` bytes at `offset`.
        // SAFETY: `dst` is a mutable slice of `dst.len()` bytes.
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

    /// Sets all bytes of the buffer to `byte`, and waits for that, but not for any stream.
    ///
    /// # Errors
    /// [`AscendError`] if `aclrtMemset` fails.
    pub fn fill(&self, byte: u8) -> Result<(), AscendError> {
        // SAFETY: The call sets `self.bytes` bytes, the size of the allocation at `self.address`.
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
    /// If `offset + bytes` exceeds the end of the buffer.
    pub(crate) fn assert_inside(&self, offset: usize, bytes: usize) {
        assert!(
            offset.checked_add(bytes).is_some_and(|end| end <= self.bytes),
            "access to {bytes} bytes at offset {offset} exceeds the device buffer of {} bytes",
            self.bytes
        );
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        // SAFETY: The address comes from `aclrtMalloc` and is freed only here.
        self.context
            .destroy("aclrtFree", || unsafe { (self.context.runtime().symbols().aclrt_free)(self.address.as_ptr()) });
    }
}

/// Pinned host memory, which a device can copy from and to without the CPU.
#[derive(Debug)]
pub struct PinnedBuffer {
    context: Context,
    memory: *mut u8,
    bytes: usize,
}

// SAFETY: The buffer is plain host memory, which any thread may access and free.
unsafe impl Send for PinnedBuffer {}
// SAFETY: Methods that borrow the buffer shared only read from it.
unsafe impl Sync for PinnedBuffer {}

impl PinnedBuffer {
    /// Allocates a buffer of zeros.
    ///
    /// # Errors
    /// [`AscendError`] if `aclrtMallocHost` fails, e.g. because the host is out of memory.
    pub fn new(context: &Context, bytes: usize) -> Result<Self, AscendError> {
        let mut memory = ptr::null_mut();
        // SAFETY: `memory` is a local variable; the call writes one pointer to it.
        let code = unsafe { (context.runtime().symbols().aclrt_malloc_host)(&raw mut memory, bytes) };
        context.runtime().check("aclrtMallocHost", code)?;
        // SAFETY: `aclrtMallocHost` succeeded, so `memory` points to `bytes` bytes of host memory.
        unsafe { memory.cast::<u8>().write_bytes(0, bytes) };
        Ok(Self { context: context.clone(), memory: memory.cast(), bytes })
    }

    /// Returns the size in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns a pointer to the first byte, for queued copies.
    pub fn as_ptr(&self) -> *mut u8 {
        self.memory
    }

    /// Returns the content.
    ///
    /// Queued copies into the buffer must have ended; [`Stream::copy_out`](crate::Stream::copy_out) requires that of
    /// its caller.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: `memory` points to `self.bytes` bytes, which `new` initialized.
        // SAFETY: No queued copy writes to them, as `Stream::copy_out` requires of its caller.
        unsafe { slice::from_raw_parts(self.memory, self.bytes) }
    }

    /// Returns the content for writing. As for [`Self::as_slice`], queued copies must have ended.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: `memory` points to `self.bytes` bytes, which `new` initialized.
        // SAFETY: `self` is borrowed exclusively, so no other slice of these bytes exists.
        // SAFETY: No queued copy accesses them, as `Stream::copy_in` and `Stream::copy_out` require of their callers.
        unsafe { slice::from_raw_parts_mut(self.memory, self.bytes) }
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        // SAFETY: The memory comes from `aclrtMallocHost` and is freed only here.
        self.context.destroy("aclrtFreeHost", || unsafe {
            (self.context.runtime().symbols().aclrt_free_host)(self.memory.cast())
        });
    }
}
