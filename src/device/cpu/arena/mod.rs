//! Memory of the CPU device: aligned buffers, and the ways in which several may use pieces of one at a time.
//!
//! | | who uses pieces of a buffer | how they are kept apart |
//! |---|---|---|
//! | [`Loans`] | steps of one run: any number reads, one writes | ranges are compared as they are asked for |
//! | [`Parts`] | members of a team: rows or columns of a matrix | cut once, each part claimed once |
//! | [`Pieces`] | members of a team: equal pieces in any order | a bit a piece |
//!
//! Callers need no `unsafe`: what breaks the rules is refused or panics, never a race. Nothing here grows or moves a buffer.

#![allow(unsafe_code)]

mod loans;
mod parts;
mod pieces;

pub use loans::Loans;
pub use parts::{Parts, Tile};
pub use pieces::Pieces;

use crate::device::DeviceError;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

/// A cache line and an AVX-512 register.
pub const ALIGNMENT: usize = 64;
/// From here on a buffer is mapped directly and backed by huge pages where the system has them: 28 instead of 25 GB/s.
const HUGE_PAGE: usize = 2 << 20;

/// Zeroed bytes at an address that is a multiple of 64. Large ones are untouched pages until written, so that the threads
/// that fill them bring them in.
#[derive(Debug)]
pub struct AlignedBytes {
    start: NonNull<u8>,
    len: usize,
    /// What to give back; the mapping of a large buffer is longer than the buffer.
    mapping: Option<(NonNull<u8>, usize)>,
}

// SAFETY: the buffer is owned memory without interior mutability.
unsafe impl Send for AlignedBytes {}
// SAFETY: as above; `&AlignedBytes` only reads.
unsafe impl Sync for AlignedBytes {}

impl AlignedBytes {
    /// `len` zero bytes, or a typed error if the system has no room for them.
    pub fn zeroed(len: usize) -> Result<Self, DeviceError> {
        if len == 0 {
            return Ok(Self { start: NonNull::<Aligned>::dangling().cast(), len, mapping: None });
        }
        let refused =
            || DeviceError::OutOfMemory { kind: "host", asked_bytes: len as u64, free_bytes: available_bytes() };
        #[cfg(target_os = "linux")]
        if len >= HUGE_PAGE {
            return Self::mapped(len).ok_or_else(refused);
        }
        let layout = Layout::from_size_align(len, ALIGNMENT).map_err(|_| refused())?;
        // SAFETY: the layout's size is not zero.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(refused)?;
        Ok(Self { start, len, mapping: None })
    }

    #[cfg(target_os = "linux")]
    fn mapped(len: usize) -> Option<Self> {
        let mapped = len.checked_add(HUGE_PAGE)?.checked_next_multiple_of(4096)?;
        // SAFETY: an anonymous private mapping at an address of the system's choice touches no memory of ours.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                mapped,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return None;
        }
        let base = NonNull::new(base.cast::<u8>())?;
        let skip = base.as_ptr().align_offset(HUGE_PAGE);
        // SAFETY: `skip` < HUGE_PAGE, so the start and its `len` bytes lie within the mapping.
        let start = unsafe { base.add(skip) };
        // SAFETY: the range lies within the mapping. Huge pages are a wish: a refusal changes speed only.
        unsafe { libc::madvise(start.as_ptr().cast(), len, libc::MADV_HUGEPAGE) };
        Some(Self { start, len, mapping: Some((base, mapped)) })
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: `start` is valid for `len` initialised (zeroed) bytes for as long as `self` lives.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }

    /// The bytes, to write.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as `as_slice`, and `&mut self` is the only access.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

/// Gives empty buffers an aligned address.
#[repr(align(64))]
struct Aligned;

impl Drop for AlignedBytes {
    fn drop(&mut self) {
        match self.mapping {
            #[cfg(target_os = "linux")]
            Some((base, mapped)) => {
                // SAFETY: exactly the mapping made in `mapped`; nothing borrows it any more.
                unsafe { libc::munmap(base.as_ptr().cast(), mapped) };
            }
            _ if self.len > 0 => {
                // SAFETY: allocated in `zeroed` with this layout, whose validity was checked there.
                unsafe { dealloc(self.start.as_ptr(), Layout::from_size_align_unchecked(self.len, ALIGNMENT)) };
            }
            _ => {}
        }
    }
}

/// Memory the system could still give, for the error message; 0 if it does not say.
pub(in crate::device::cpu) fn available_bytes() -> u64 {
    let Ok(text) = std::fs::read_to_string("/proc/meminfo") else { return 0 };
    text.lines()
        .find_map(|line| line.strip_prefix("MemAvailable:")?.trim().strip_suffix("kB")?.trim().parse::<u64>().ok())
        .map_or(0, |kib| kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_aligned_zeroed_and_writable_to_the_end() {
        for len in [0, 1, 63, 4096, HUGE_PAGE - 1, HUGE_PAGE, 3 * HUGE_PAGE + 5] {
            let mut bytes = AlignedBytes::zeroed(len).unwrap();
            assert_eq!(bytes.as_slice().as_ptr().align_offset(ALIGNMENT), 0);
            assert!(bytes.len() == len && bytes.as_slice().iter().all(|&byte| byte == 0));
            bytes.as_mut_slice().fill(7);
            assert!(bytes.as_slice().iter().all(|&byte| byte == 7));
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
