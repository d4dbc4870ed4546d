//! Device memory: addresses that the host cannot dereference, and the bytes they stand for.
//!
//! Addresses come from a range that is reserved without access, so that a host that dereferences one crashes at once.
//! The bytes are at the same offset in a second range. One lock guards both: only one task runs at a time, and the
//! order of tasks from different streams reveals a missing event. Memory is filled with 0xFF when it is allocated and
//! when it is freed: NaN in every float type, -1 in every integer type.

#![allow(unsafe_code)]

use crate::codes::{Done, RT_AICORE_EXCEPTION, RT_MEMORY_ALLOCATION, RT_PARAM_INVALID, fail, rule};
use crate::ffi::HostBytes;
use crate::registry::lock;
use crate::settings::Setting;
use std::collections::BTreeMap;
use std::sync::{LazyLock, Mutex, MutexGuard};
use std::{ptr, slice};

/// Byte of unwritten memory.
pub(crate) const POISON: u8 = 0xFF;

/// Alignment guaranteed by `aclrtMalloc`.
const ALIGNMENT: usize = 64;

/// Granularity of sizes, and padding after each allocation.
pub(crate) const GRANULE: usize = 32;

/// Address space of all devices together: sixteen of 64 GB. Physical memory is allocated when it is written.
const SPAN: usize = 1 << 40;

/// Page size of the host.
const PAGE: usize = 1 << 12;

/// Freed ranges of at least this size are returned to the host.
const LARGE: usize = 1 << 20;

pub(crate) struct DeviceMemory {
    /// First device address; the range cannot be accessed.
    base: usize,
    /// Start of the bytes, which corresponds to the first device address.
    shadow: *mut u8,
    blocks: BTreeMap<usize, Block>,
}

// SAFETY: the ranges are owned by this value and are mapped until the process ends.
unsafe impl Send for DeviceMemory {}
// SAFETY: as above; a shared reference only reads.
unsafe impl Sync for DeviceMemory {}

struct Block {
    bytes: usize,
    device: u32,
}

static MEMORY: LazyLock<Mutex<DeviceMemory>> = LazyLock::new(|| Mutex::new(DeviceMemory::reserve()));

/// Locks the device memory for one task or call.
pub(crate) fn memory() -> MutexGuard<'static, DeviceMemory> {
    lock(&MEMORY)
}

impl DeviceMemory {
    fn reserve() -> Self {
        let map = |access| {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
            // SAFETY: creates a new mapping at an address that the system chooses.
            let start = unsafe { libc::mmap(ptr::null_mut(), SPAN, access, flags, -1, 0) };
            assert!(start != libc::MAP_FAILED, "no address space for the simulated device");
            start
        };
        let shadow = map(libc::PROT_READ | libc::PROT_WRITE).cast();
        Self { base: map(libc::PROT_NONE) as usize, shadow, blocks: BTreeMap::new() }
    }

    /// Whether an address is in the devices' range.
    pub(crate) fn holds(&self, address: usize) -> bool {
        (self.base..self.base + SPAN).contains(&address)
    }

    /// Allocates memory at the lowest address that fits, so that freed memory is soon reused.
    pub(crate) fn allocate(&mut self, bytes: usize, device: u32) -> Done<usize> {
        rule!(bytes > 0, RT_PARAM_INVALID, "size 0");
        let room = bytes.next_multiple_of(GRANULE).saturating_add(GRANULE);
        let (used, total) = (self.used_bytes(device), Setting::hbm_bytes.size());
        rule!(
            used.saturating_add(room as u64) <= total,
            RT_MEMORY_ALLOCATION,
            "{bytes} bytes asked for, {used} of {total} in use"
        );
        let largest = Setting::largest_block_bytes.size();
        rule!(
            largest == 0 || bytes as u64 <= largest,
            RT_MEMORY_ALLOCATION,
            "{bytes} bytes asked for, the largest piece has {largest}"
        );
        let mut address = self.base;
        for (&start, block) in &self.blocks {
            if start - address >= room {
                break;
            }
            address = (start + block.bytes).next_multiple_of(ALIGNMENT);
        }
        rule!(address + room <= self.base + SPAN, RT_MEMORY_ALLOCATION, "the address space is full");
        self.blocks.insert(address, Block { bytes: room, device });
        self.poison(address, room);
        Ok(address)
    }

    /// Frees memory at once, even if queued work still uses it.
    pub(crate) fn free(&mut self, address: usize) -> Done {
        let Some(block) = self.blocks.remove(&address) else {
            fail!(RT_PARAM_INVALID, "{address:#x} was not allocated, or is freed already");
        };
        if block.bytes >= LARGE {
            let start = (self.shadow_of(address) as usize).next_multiple_of(PAGE);
            let end = (self.shadow_of(address) as usize + block.bytes) / PAGE * PAGE;
            // SAFETY: whole pages of the owned range; they read as zeros until the memory is allocated and poisoned
            // again.
            unsafe { libc::madvise(start as *mut libc::c_void, end - start, libc::MADV_DONTNEED) };
        } else {
            self.poison(address, block.bytes);
        }
        Ok(())
    }

    pub(crate) fn used_bytes(&self, device: u32) -> u64 {
        self.blocks.values().filter(|block| block.device == device).map(|block| block.bytes as u64).sum()
    }

    /// Frees all memory, for tests.
    pub(crate) fn clear(&mut self) {
        for address in self.blocks.keys().copied().collect::<Vec<_>>() {
            drop(self.free(address));
        }
    }

    pub(crate) fn live(&self) -> (usize, u64) {
        (self.blocks.len(), self.blocks.values().map(|block| block.bytes as u64).sum())
    }

    /// Bytes of a range, which must be within one live allocation.
    pub(crate) fn bytes(&self, address: usize, bytes: usize) -> Done<&[u8]> {
        self.check(address, bytes)?;
        // SAFETY: the range is inside a live allocation, so inside the mapping; `self` owns it.
        Ok(unsafe { slice::from_raw_parts(self.shadow_of(address), bytes) })
    }

    pub(crate) fn bytes_mut(&mut self, address: usize, bytes: usize) -> Done<&mut [u8]> {
        self.check(address, bytes)?;
        // SAFETY: as in `bytes`; `&mut self` makes the access exclusive.
        Ok(unsafe { slice::from_raw_parts_mut(self.shadow_of(address), bytes) })
    }

    /// Copies bytes from the host. Does nothing if computation is off.
    pub(crate) fn copy_in(&mut self, dst: usize, src: HostBytes, bytes: usize) -> Done {
        self.check(dst, bytes)?;
        if computes() {
            src.copy_to(self.bytes_mut(dst, bytes)?);
        }
        Ok(())
    }

    /// Copies bytes to the host; zeros if computation is off.
    pub(crate) fn copy_out(&self, dst: HostBytes, src: usize, bytes: usize) -> Done {
        self.check(src, bytes)?;
        if computes() {
            dst.copy_from(self.bytes(src, bytes)?);
        } else {
            dst.fill(0);
        }
        Ok(())
    }

    /// Fills a range with a byte, if computation is on.
    pub(crate) fn fill(&mut self, address: usize, byte: u8, bytes: usize) -> Done {
        self.check(address, bytes)?;
        if computes() {
            self.bytes_mut(address, bytes)?.fill(byte);
        }
        Ok(())
    }

    pub(crate) fn copy(&mut self, dst: usize, src: usize, bytes: usize) -> Done {
        self.check(dst, bytes)?;
        self.check(src, bytes)?;
        if !computes() {
            return Ok(());
        }
        // SAFETY: both ranges are inside live allocations; they may overlap.
        unsafe { ptr::copy(self.shadow_of(src), self.shadow_of(dst), bytes) };
        Ok(())
    }

    /// Checks that a range is inside a live allocation; a kernel that leaves its memory crashes.
    pub(crate) fn check(&self, address: usize, bytes: usize) -> Done {
        let block = self.blocks.range(..=address).next_back();
        let is_inside = block
            .is_some_and(|(&start, block)| address.checked_add(bytes).is_some_and(|end| end <= start + block.bytes));
        rule!(is_inside, RT_AICORE_EXCEPTION, "{bytes} bytes at {address:#x} are not device memory, or are freed");
        Ok(())
    }

    fn poison(&mut self, address: usize, bytes: usize) {
        if computes() {
            // SAFETY: the range is inside the mapping.
            unsafe { ptr::write_bytes(self.shadow_of(address), POISON, bytes) };
        }
    }

    fn shadow_of(&self, address: usize) -> *mut u8 {
        // SAFETY: callers pass addresses inside the range, which both mappings cover.
        unsafe { self.shadow.add(address - self.base) }
    }
}

/// Whether kernels compute and memory is written.
pub(crate) fn computes() -> bool {
    Setting::compute.get() != 0
}

/// Owned words of a pinned allocation.
struct Pinned(*mut [u64]);

// SAFETY: owned memory that is not tied to a thread.
unsafe impl Send for Pinned {}

impl Pinned {
    fn end(&self) -> usize {
        self.0.cast::<u64>() as usize + self.bytes()
    }

    fn bytes(&self) -> usize {
        self.0.len() * size_of::<u64>()
    }
}

/// Pinned host memory, by address.
static PINNED: Mutex<BTreeMap<usize, Pinned>> = Mutex::new(BTreeMap::new());

/// Pinned memory from before a reset: not counted, but valid until its owner frees it.
static LEFT_OVER: Mutex<BTreeMap<usize, Pinned>> = Mutex::new(BTreeMap::new());

/// Allocates pinned memory; poisoned if computation is on.
pub(crate) fn allocate_pinned(bytes: usize) -> Done<usize> {
    rule!(bytes > 0, RT_PARAM_INVALID, "size 0");
    let words = bytes.div_ceil(size_of::<u64>()) + ALIGNMENT / size_of::<u64>();
    let word = if computes() { u64::from_ne_bytes([POISON; 8]) } else { 0 };
    let words = Box::into_raw(vec![word; words].into_boxed_slice());
    let address = (words.cast::<u64>() as usize).next_multiple_of(ALIGNMENT);
    lock(&PINNED).insert(address, Pinned(words));
    Ok(address)
}

pub(crate) fn free_pinned(address: usize) -> Done {
    let found = lock(&PINNED).remove(&address).or_else(|| lock(&LEFT_OVER).remove(&address));
    let Some(Pinned(words)) = found else {
        fail!(RT_PARAM_INVALID, "{address:#x} is not pinned memory, or is freed already");
    };
    // SAFETY: created by `Box::into_raw` above, and removed from the map once.
    drop(unsafe { Box::from_raw(words) });
    Ok(())
}

/// Whether a range is inside one pinned allocation.
pub(crate) fn is_pinned(address: usize, bytes: usize) -> bool {
    let pinned = lock(&PINNED);
    pinned.range(..=address).next_back().is_some_and(|(_, pinned)| address + bytes <= pinned.end())
}

/// Whether pinned memory dates from before a reset.
pub(crate) fn is_left_over(address: usize) -> bool {
    lock(&LEFT_OVER).contains_key(&address)
}

/// Stops counting pinned memory, for tests; its owners may still use and free it.
pub(crate) fn reset_pinned() {
    let mut pinned = lock(&PINNED);
    lock(&LEFT_OVER).append(&mut pinned);
}

/// Number of blocks and bytes of pinned memory.
pub(crate) fn live_pinned() -> (usize, u64) {
    let pinned = lock(&PINNED);
    (pinned.len(), pinned.values().map(|pinned| pinned.bytes() as u64).sum())
}
