//! The C boundary: pointer types that check for null, and the wrapper around every call.
//!
//! Callers follow the header: a pointer is null, or it points to data of the documented type for the documented time.
//! All `unsafe` code that relies on this is in this module. Panics never cross the boundary.

#![allow(unsafe_code)]

use crate::codes::{Done, Fail, INTERNAL_ERROR, RT_PARAM_INVALID, rule};
use crate::control;
use crate::control::Note;
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;

/// Pointer to an output parameter.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(crate) struct Out<T>(*mut T);

impl<T> Out<T> {
    /// Writes the output; a null pointer is an error of the caller.
    pub(crate) fn put(self, value: T) -> Done {
        rule!(!self.0.is_null(), RT_PARAM_INVALID, "a place for an answer is null");
        // SAFETY: the pointer is not null, so by the header it is valid for a write.
        unsafe { self.0.write(value) };
        Ok(())
    }

    /// Writes the output unless the pointer is null.
    pub(crate) fn put_if_asked(self, value: T) {
        if !self.0.is_null() {
            // SAFETY: the pointer is not null, so by the header it is valid for a write.
            unsafe { self.0.write(value) };
        }
    }

    pub(crate) fn is_null(&self) -> bool {
        self.0.is_null()
    }

    /// Writes several values to an output array.
    pub(crate) fn put_all(self, values: &[T]) -> Done
    where
        T: Copy,
    {
        rule!(!self.0.is_null(), RT_PARAM_INVALID, "a place for answers is null");
        for (i, value) in values.iter().enumerate() {
            // SAFETY: the pointer is not null, so by the header it points to an array of this length.
            unsafe { self.0.add(i).write(*value) };
        }
        Ok(())
    }
}

/// Pointer to input values.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(crate) struct In<T>(*const T);

impl<T: Copy> In<T> {
    /// Copies `count` values.
    pub(crate) fn values(self, count: u64) -> Option<Vec<T>> {
        let count = usize::try_from(count).ok()?;
        if count == 0 {
            return Some(Vec::new());
        }
        if self.0.is_null() {
            return None;
        }
        // SAFETY: the pointer is not null, so by the header it points to `count` values.
        Some((0..count).map(|i| unsafe { self.0.add(i).read() }).collect())
    }
}

/// A C string argument.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(crate) struct Text(*const c_char);

impl Text {
    pub(crate) fn get(self) -> Option<String> {
        if self.0.is_null() {
            return None;
        }
        // SAFETY: the pointer is not null, so by the header it points to a C string.
        Some(unsafe { CStr::from_ptr(self.0) }.to_string_lossy().into_owned())
    }
}

/// Host memory that a call reads or writes, either at once or when its stream executes the task.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostBytes {
    address: usize,
    bytes: usize,
}

impl HostBytes {
    pub(crate) const fn new(address: usize, bytes: usize) -> Self {
        Self { address, bytes }
    }

    pub(crate) fn copy_to(self, dst: &mut [u8]) {
        // SAFETY: the caller keeps this memory alive until the copy is done, as the real runtime requires.
        unsafe { ptr::copy_nonoverlapping(self.address as *const u8, dst.as_mut_ptr(), self.bytes.min(dst.len())) };
    }

    pub(crate) fn copy_from(self, src: &[u8]) {
        // SAFETY: as above.
        unsafe { ptr::copy_nonoverlapping(src.as_ptr(), self.address as *mut u8, self.bytes.min(src.len())) };
    }

    pub(crate) fn fill(self, byte: u8) {
        // SAFETY: as above.
        unsafe { ptr::write_bytes(self.address as *mut u8, byte, self.bytes) };
    }
}

thread_local! {
    /// Message of the latest failure; returned once.
    static RECENT: RefCell<Option<CString>> = const { RefCell::new(None) };
    /// Message returned last; it stays valid until the next one is returned.
    static SHOWN: RefCell<Option<CString>> = const { RefCell::new(None) };
}

/// Message of the latest failure on this thread, or null.
pub(crate) fn recent_message() -> *const c_char {
    let text = RECENT.take();
    let shown = text.as_ref().map_or(ptr::null(), |text| text.as_ptr());
    SHOWN.set(text);
    shown
}

/// Wrapper around a call: counts it, logs it, injects a fault, and stores the message of a failure.
pub(crate) fn call(name: &'static str, note: Note, body: impl FnOnce() -> Done) -> i32 {
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        let demanded = control::enter(name);
        match demanded {
            // A function that frees a resource frees it even if a failure is injected; otherwise every caller would
            // leak.
            Some(fail) if gives_back(name) => body().and(Err(fail)),
            Some(fail) => Err(fail),
            None => body(),
        }
    }));
    let result = outcome.unwrap_or_else(|_| Err(Fail::new(INTERNAL_ERROR, "the simulator failed inside")));
    let code = match result {
        Ok(()) => 0,
        Err(fail) => {
            let words = format!("EZ9999: {name}: {}", fail.message).replace('\0', " ");
            RECENT.set(CString::new(words).ok());
            // Error codes of operations do not set the runtime's last error.
            if !matches!(fail.code, 161_000..162_000 | 361_000..362_000 | 561_000..562_000) {
                control::note_error(fail.code);
            }
            fail.code
        }
    };
    control::leave(name, note, code);
    code
}

/// As [`call`], for calls that log only their name.
pub(crate) fn plain(name: &'static str, body: impl FnOnce() -> Done) -> i32 {
    call(name, Note::default(), body)
}

fn gives_back(name: &str) -> bool {
    ["aclDestroy", "aclrtDestroy", "aclrtFree", "aclrtReset", "aclmdlRIDestroy", "HcclCommDestroy"]
        .iter()
        .any(|start| name.starts_with(start))
        && name != "aclrtResetEvent"
}
