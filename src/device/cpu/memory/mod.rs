//! Memory of the CPU device: aligned buffers, and types that let several threads use disjoint parts of one buffer.
//!
//! | | who uses parts of a buffer | how they are kept disjoint |
//! |---|---|---|
//! | [`ArenaBorrows`] | steps of one run: any number of readers or one writer | each request is compared with earlier ones |
//! | [`Partition`] | workers: rows or columns of a matrix | split once, each part is claimed once |
//! | [`DisjointChunks`] | workers: equal chunks in any order | one bit per chunk |
//!
//! Callers need no `unsafe`: a violation is refused or panics, and never becomes a race. None of these types grows or
//! moves a buffer.

#![allow(unsafe_code)]

mod borrows;
mod disjoint_chunks;
mod partition;

pub use borrows::ArenaBorrows;
pub use disjoint_chunks::DisjointChunks;
pub use partition::{Partition, Tile};

use crate::device::DeviceError;
#[cfg(target_os = "linux")]
use memmap2::Advice;
use memmap2::{MmapOptions, MmapRaw};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;
use std::sync::Arc;

/// Size of a cache line and of an AVX-512 register.
pub const ALIGNMENT: usize = 64;
/// Smallest size of a buffer that is mapped directly and backed by huge pages where the system has them: 28 instead of
/// 25 GB/s.
const HUGE_PAGE: usize = 2 << 20;

/// Zeroed bytes at an address that is a multiple of 64. Pages of large buffers stay untouched until written, so that
/// the threads that fill them allocate them.
#[derive(Debug)]
pub struct AlignedBytes {
    start: NonNull<u8>,
    len: usize,
    /// Memory that contains the buffer; it may be shared with other buffers. `None` for an empty buffer.
    memory: Option<Arc<Memory>>,
}

// SAFETY: the buffer is owned memory without interior mutability, so it may move to another thread.
unsafe impl Send for AlignedBytes {}
// SAFETY: `&AlignedBytes` only reads, so it may be shared between threads.
unsafe impl Sync for AlignedBytes {}

impl AlignedBytes {
    /// Allocates `len` zero bytes.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] if the system cannot provide them.
    pub fn zeroed(len: usize) -> Result<Self, DeviceError> {
        let Some((start, memory)) = (len > 0).then(|| Memory::zeroed(len)).transpose()? else {
            return Ok(Self { start: NonNull::<Aligned>::dangling().cast(), len, memory: None });
        };
        Ok(Self { start, len, memory: Some(Arc::new(memory)) })
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the buffer is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bytes, for reading.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: `start` is valid for `len` initialized (zeroed) bytes for the life of `self`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }

    /// The bytes, for writing.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as in `as_slice`; `&mut self` makes this the only access.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

/// Provides an aligned address for empty buffers.
#[repr(align(64))]
struct Aligned;

/// One allocation shared by many buffers that are too small for huge pages of their own.
#[derive(Debug)]
pub struct Slab {
    rest: AlignedBytes,
}

impl Slab {
    /// Allocates memory for buffers of `len` bytes in total, each rounded up to [`ALIGNMENT`].
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] if the system cannot provide it.
    pub fn new(len: usize) -> Result<Self, DeviceError> {
        Ok(Self { rest: AlignedBytes::zeroed(len)? })
    }

    /// Returns the next `len` bytes, zeroed; allocates a separate buffer if the slab is exhausted.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] if a separate buffer cannot be allocated.
    pub fn take(&mut self, len: usize) -> Result<AlignedBytes, DeviceError> {
        let Some(taken) = len.checked_next_multiple_of(ALIGNMENT).filter(|&taken| taken <= self.rest.len) else {
            return AlignedBytes::zeroed(len);
        };
        let buffer = AlignedBytes { start: self.rest.start, len, memory: self.rest.memory.clone() };
        // SAFETY: the new start is at most the end of the remaining range, and the bytes before it now belong to the
        // returned buffer.
        self.rest.start = unsafe { self.rest.start.add(taken) };
        self.rest.len -= taken;
        Ok(buffer)
    }
}

/// Memory that is freed when the last of its buffers is dropped.
#[derive(Debug)]
enum Memory {
    /// An anonymous mapping; the buffer may start after its beginning.
    Mapped {
        _map: MmapRaw,
    },
    Allocated(NonNull<u8>, Layout),
}

// SAFETY: `Memory` only owns the allocation; the bytes are accessed through buffers, which have rules of their own.
unsafe impl Send for Memory {}
// SAFETY: as above; `&Memory` gives no access to the bytes.
unsafe impl Sync for Memory {}

impl Memory {
    /// Allocates `len` > 0 zero bytes and returns their start.
    fn zeroed(len: usize) -> Result<(NonNull<u8>, Self), DeviceError> {
        let refused =
            || DeviceError::OutOfMemory { kind: "host", asked_bytes: len as u64, free_bytes: available_bytes() };
        if len >= HUGE_PAGE {
            return Self::mapped(len).ok_or_else(refused);
        }
        let layout = Layout::from_size_align(len, ALIGNMENT).map_err(|_| refused())?;
        // SAFETY: the layout's size is not zero.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(refused)?;
        Ok((start, Self::Allocated(start, layout)))
    }

    fn mapped(len: usize) -> Option<(NonNull<u8>, Self)> {
        let map = MmapRaw::from(MmapOptions::new().len(len.checked_add(HUGE_PAGE)?).map_anon().ok()?);
        let base = NonNull::new(map.as_mut_ptr())?;
        let skip = base.align_offset(HUGE_PAGE);
        // Huge pages are only a hint: a refusal changes speed, not results.
        #[cfg(target_os = "linux")]
        let _ = map.advise_range(Advice::HugePage, skip, len);
        // SAFETY: `skip` < HUGE_PAGE, so the start and its `len` bytes are within the mapping.
        let start = unsafe { base.add(skip) };
        Some((start, Self::Mapped { _map: map }))
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Self::Allocated(start, layout) = *self {
            // SAFETY: allocated in `zeroed` with this layout, and freed only here.
            unsafe { dealloc(start.as_ptr(), layout) };
        }
    }
}

/// Bytes of memory that the system reports as available; 0 if unknown.
#[cfg(target_os = "linux")]
pub(in crate::device::cpu) fn available_bytes() -> u64 {
    let Ok(text) = std::fs::read_to_string("/proc/meminfo") else { return 0 };
    text.lines()
        .find_map(|line| line.strip_prefix("MemAvailable:")?.trim().strip_suffix("kB")?.trim().parse::<u64>().ok())
        .map_or(0, |kib| kib * 1024)
}

/// Bytes of memory that the system reports as available; 0 if unknown.
#[cfg(not(target_os = "linux"))]
pub(in crate::device::cpu) fn available_bytes() -> u64 {
    use sysinfo::{MemoryRefreshKind, RefreshKind, System};

    let memory = RefreshKind::nothing().with_memory(MemoryRefreshKind::nothing().with_ram());
    System::new_with_specifics(memory).available_memory()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_aligned_zeroed_and_writable_to_the_end() {
        for len in [0, 1, 63, 4096, HUGE_PAGE - 1, HUGE_PAGE, 3 * HUGE_PAGE + 5] {
            let mut bytes = AlignedBytes::zeroed(len).unwrap();
            let alignment = if len < HUGE_PAGE { ALIGNMENT } else { HUGE_PAGE };
            assert_eq!(bytes.as_slice().as_ptr().align_offset(alignment), 0);
            assert!(bytes.len() == len && bytes.as_slice().iter().all(|&byte| byte == 0));
            bytes.as_mut_slice().fill(7);
            assert!(bytes.as_slice().iter().all(|&byte| byte == 7));
        }
    }

    #[test]
    fn buffers_of_a_slab_are_their_own_and_outlive_it() {
        for len in [1000, 2 * HUGE_PAGE] {
            let mut slab = Slab::new(len).unwrap();
            let lens = [0, 1, 64, 65, len / 2, 7, len, 1];
            let mut buffers = lens.map(|len| slab.take(len).unwrap());
            drop(slab);
            for ((bytes, len), fill) in buffers.iter_mut().zip(lens).zip(1..) {
                assert!(bytes.as_slice().iter().all(|&byte| byte == 0) && bytes.len() == len);
                assert_eq!(bytes.as_slice().as_ptr().align_offset(ALIGNMENT), 0);
                bytes.as_mut_slice().fill(fill);
            }
            for (bytes, fill) in buffers.into_iter().zip(1..) {
                assert!(bytes.as_slice().iter().all(|&byte| byte == fill), "{fill} of {len}");
            }
        }
    }

    #[test]
    fn too_much_is_a_typed_error() {
        for len in [usize::MAX, isize::MAX as usize, 1 << 60] {
            let error = AlignedBytes::zeroed(len).unwrap_err();
            assert!(matches!(error, DeviceError::OutOfMemory { asked_bytes, .. } if asked_bytes == len as u64));
        }
    }
}
