//! Device memory: addresses that no host may follow, and the bytes behind them.
//!
//! Addresses come from a range that is reserved without access, so that a host that follows one crashes at once; the bytes
//! lie at the same distance in a second range. One lock guards all of it: a task runs alone, and which order tasks of
//! different streams take is what shows a missing event. Memory is filled with 0xFF when it is given out and when it is
//! given back: not-a-number in every float type, -1 in every integer.

#![allow(unsafe_code)]

use crate::codes::{Done, RT_AICORE_EXCEPTION, RT_MEMORY_ALLOCATION, RT_PARAM_INVALID, fail, rule};
use crate::ffi::HostBytes;
use crate::registry::lock;
use crate::settings::Setting;
use std::collections::BTreeMap;
use std::sync::{LazyLock, Mutex, MutexGuard};
use std::{ptr, slice};

/// Byte of memory nobody has written.
pub(crate) const POISON: u8 = 0xFF;

/// Alignment that `aclrtMalloc` promises.
const ALIGNMENT: usize = 64;

/// Unit of sizes, and what is added behind each allocation.
pub(crate) const GRANULE: usize = 32;

/// Address space of all devices together: sixteen of 64 GB. None of it is real before it is written.
const SPAN: usize = 1 << 40;

/// Page of the host.
const PAGE: usize = 1 << 12;

/// Freed stretches from this size on go back to the host.
const LARGE: usize = 1 << 20;

pub(crate) struct DeviceMemory {
    /// First device address; its range cannot be accessed.
    base: usize,
    /// Bytes of the first device address.
    shadow: *mut u8,
    blocks: BTreeMap<usize, Block>,
}

// SAFETY: the ranges belong to this alone and live until the process ends.
unsafe impl Send for DeviceMemory {}
// SAFETY: as above, and a shared reference only reads.
unsafe impl Sync for DeviceMemory {}

struct Block {
    bytes: usize,
    device: u32,
}

static MEMORY: LazyLock<Mutex<DeviceMemory>> = LazyLock::new(|| Mutex::new(DeviceMemory::reserve()));

/// The memory, for one task or call alone.
pub(crate) fn memory() -> MutexGuard<'static, DeviceMemory> {
    lock(&MEMORY)
}

impl DeviceMemory {
    fn reserve() -> Self {
        let map = |access| {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
            // SAFETY: a new range wherever there is room.
            let start = unsafe { libc::mmap(ptr::null_mut(), SPAN, access, flags, -1, 0) };
            assert!(start != libc::MAP_FAILED, "no address space for the simulated device");
            start
        };
        let shadow = map(libc::PROT_READ | libc::PROT_WRITE).cast();
        Self { base: map(libc::PROT_NONE) as usize, shadow, blocks: BTreeMap::new() }
    }

    /// Whether an address lies in the devices' range.
    pub(crate) fn holds(&self, address: usize) -> bool {
        (self.base..self.base + SPAN).contains(&address)
    }

    /// Gives memory out, at the lowest address that fits: what was freed last is soon used again.
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

    /// Takes memory back at once, whatever is still queued.
    pub(crate) fn free(&mut self, address: usize) -> Done {
        let Some(block) = self.blocks.remove(&address) else {
            fail!(RT_PARAM_INVALID, "{address:#x} was not allocated, or is freed already");
        };
        if block.bytes >= LARGE {
            let start = (self.shadow_of(address) as usize).next_multiple_of(PAGE);
            let end = (self.shadow_of(address) as usize + block.bytes) / PAGE * PAGE;
            // SAFETY: whole pages of the own range; they read as zeros until the memory is given out and poisoned again.
            unsafe { libc::madvise(start as *mut libc::c_void, end - start, libc::MADV_DONTNEED) };
        } else {
            self.poison(address, block.bytes);
        }
        Ok(())
    }

    pub(crate) fn used_bytes(&self, device: u32) -> u64 {
        self.blocks.values().filter(|block| block.device == device).map(|block| block.bytes as u64).sum()
    }

    /// Takes everything back, for tests.
    pub(crate) fn clear(&mut self) {
        for address in self.blocks.keys().copied().collect::<Vec<_>>() {
            drop(self.free(address));
        }
    }

    pub(crate) fn live(&self) -> (usize, u64) {
        (self.blocks.len(), self.blocks.values().map(|block| block.bytes as u64).sum())
    }

    /// The bytes of a stretch, all within one live allocation.
    pub(crate) fn bytes(&self, address: usize, bytes: usize) -> Done<&[u8]> {
        self.check(address, bytes)?;
        // SAFETY: inside a live allocation, hence inside the range; borrowed from the only owner.
        Ok(unsafe { slice::from_raw_parts(self.shadow_of(address), bytes) })
    }

    pub(crate) fn bytes_mut(&mut self, address: usize, bytes: usize) -> Done<&mut [u8]> {
        self.check(address, bytes)?;
        // SAFETY: as above, exclusively.
        Ok(unsafe { slice::from_raw_parts_mut(self.shadow_of(address), bytes) })
    }

    /// Brings host bytes in. Without computation they stay where they are.
    pub(crate) fn copy_in(&mut self, dst: usize, src: HostBytes, bytes: usize) -> Done {
        self.check(dst, bytes)?;
        if computes() {
            src.copy_to(self.bytes_mut(dst, bytes)?);
        }
        Ok(())
    }

    /// Takes bytes out to the host: zeros without computation.
    pub(crate) fn copy_out(&self, dst: HostBytes, src: usize, bytes: usize) -> Done {
        self.check(src, bytes)?;
        if computes() {
            dst.copy_from(self.bytes(src, bytes)?);
        } else {
            dst.fill(0);
        }
        Ok(())
    }

    /// Fills with a byte, if anything is computed.
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
        // SAFETY: both inside live allocations; they may overlap.
        unsafe { ptr::copy(self.shadow_of(src), self.shadow_of(dst), bytes) };
        Ok(())
    }

    /// A kernel that leaves its memory crashes.
    pub(crate) fn check(&self, address: usize, bytes: usize) -> Done {
        let block = self.blocks.range(..=address).next_back();
        let is_inside = block
            .is_some_and(|(&start, block)| address.checked_add(bytes).is_some_and(|end| end <= start + block.bytes));
        rule!(is_inside, RT_AICORE_EXCEPTION, "{bytes} bytes at {address:#x} are not device memory, or are freed");
        Ok(())
    }

    fn poison(&mut self, address: usize, bytes: usize) {
        if computes() {
            // SAFETY: inside the range.
            unsafe { ptr::write_bytes(self.shadow_of(address), POISON, bytes) };
        }
    }

    fn shadow_of(&self, address: usize) -> *mut u8 {
        // SAFETY: callers stay inside the range, which both maps cover.
        unsafe { self.shadow.add(address - self.base) }
    }
}

/// Whether anything is computed, and memory written.
pub(crate) fn computes() -> bool {
    Setting::compute.get() != 0
}

/// Words of a pinned allocation, owned.
struct Pinned(*mut [u64]);

// SAFETY: owned memory without ties to a thread.
unsafe impl Send for Pinned {}

impl Pinned {
    fn end(&self) -> usize {
        self.0.cast::<u64>() as usize + self.bytes()
    }

    fn bytes(&self) -> usize {
        self.0.len() * size_of::<u64>()
    }
}

/// Pinned host memory by address.
static PINNED: Mutex<BTreeMap<usize, Pinned>> = Mutex::new(BTreeMap::new());

/// Pinned memory from before a reset: not counted, but there until its owner gives it back.
static LEFT_OVER: Mutex<BTreeMap<usize, Pinned>> = Mutex::new(BTreeMap::new());

/// Gives out pinned memory, poisoned if anything is computed.
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
    // SAFETY: made by `Box::into_raw` above and taken out of the map once.
    drop(unsafe { Box::from_raw(words) });
    Ok(())
}

/// Whether a stretch lies inside one pinned allocation.
pub(crate) fn is_pinned(address: usize, bytes: usize) -> bool {
    let pinned = lock(&PINNED);
    pinned.range(..=address).next_back().is_some_and(|(_, pinned)| address + bytes <= pinned.end())
}

/// Whether pinned memory is from before a reset.
pub(crate) fn is_left_over(address: usize) -> bool {
    lock(&LEFT_OVER).contains_key(&address)
}

/// Forgets pinned memory, for tests; whoever still holds some may use it and free it.
pub(crate) fn reset_pinned() {
    let mut pinned = lock(&PINNED);
    lock(&LEFT_OVER).append(&mut pinned);
}

/// Blocks and bytes of pinned memory.
pub(crate) fn live_pinned() -> (usize, u64) {
    let pinned = lock(&PINNED);
    (pinned.len(), pinned.values().map(|pinned| pinned.bytes() as u64).sum())
}
