//! Global allocator that calls the test's own `count` function for each allocation.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};

use super::count;

struct Counting;

// SAFETY: Each call is forwarded to the system allocator unchanged.
// SAFETY: `count` does not allocate, so no call recurses.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: The caller guarantees the preconditions of `alloc`, which are those of `System.alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: The caller guarantees the preconditions of `alloc_zeroed`, which are those of `System.alloc_zeroed`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, old: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        count();
        // SAFETY: The caller guarantees the preconditions of `realloc`, which are those of `System.realloc`.
        unsafe { System.realloc(old, layout, new_size) }
    }

    unsafe fn dealloc(&self, old: *mut u8, layout: Layout) {
        // SAFETY: The caller guarantees the preconditions of `dealloc`, which are those of `System.dealloc`.
        unsafe { System.dealloc(old, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;
