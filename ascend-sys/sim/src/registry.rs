//! Handles: numbers that look like pointers, are never reused, and are never valid addresses.
//!
//! A stale or foreign handle is detected, and a caller that dereferences one crashes.

use crate::codes::{Done, fail};
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

/// A handle in its C form.
pub(crate) type Handle = usize;

/// Not a canonical address on any 64-bit host of an Ascend card: dereferencing it faults.
const FIRST: usize = 0x5A51_0000_0000_0000;

static NEXT: AtomicUsize = AtomicUsize::new(1);

/// Live objects of one kind.
pub(crate) struct Registry<T> {
    sort: &'static str,
    live: LazyLock<Mutex<HashMap<Handle, Arc<T>>>>,
}

impl<T> Registry<T> {
    pub(crate) const fn new(sort: &'static str) -> Self {
        Self { sort, live: LazyLock::new(|| Mutex::new(HashMap::new())) }
    }

    /// Adds an object and returns its handle.
    pub(crate) fn add(&self, thing: Arc<T>) -> Handle {
        let handle = FIRST + NEXT.fetch_add(1, Ordering::Relaxed) * 16;
        lock(&self.live).insert(handle, thing);
        handle
    }

    /// Returns the object of a live handle; `code` is the failure for any other handle.
    pub(crate) fn get(&self, handle: Handle, code: i32) -> Done<Arc<T>> {
        match lock(&self.live).get(&handle) {
            Some(thing) => Ok(thing.clone()),
            None if handle == 0 => fail!(code, "the {} is null", self.sort),
            None => fail!(code, "no such {}: {handle:#x}, never made or already destroyed", self.sort),
        }
    }

    /// Removes an object.
    pub(crate) fn remove(&self, handle: Handle, code: i32) -> Done<Arc<T>> {
        let thing = self.get(handle, code)?;
        lock(&self.live).remove(&handle);
        Ok(thing)
    }

    pub(crate) fn len(&self) -> usize {
        lock(&self.live).len()
    }

    pub(crate) fn all(&self) -> Vec<Arc<T>> {
        lock(&self.live).values().cloned().collect()
    }

    /// Removes the object of a handle if it satisfies a condition.
    pub(crate) fn drain_one(&self, handle: Handle, which: impl Fn(&T) -> bool) -> Option<Arc<T>> {
        let mut live = lock(&self.live);
        if live.get(&handle).is_some_and(|thing| which(thing)) { live.remove(&handle) } else { None }
    }

    /// Removes all objects that satisfy a condition.
    pub(crate) fn drain(&self, which: impl Fn(&T) -> bool) -> Vec<Arc<T>> {
        let mut live = lock(&self.live);
        live.extract_if(|_, thing| which(thing)).map(|(_, thing)| thing).collect()
    }

    pub(crate) fn clear(&self) {
        lock(&self.live).clear();
    }
}

/// Locks even after a panic in another thread, so that tests can still inspect the simulator's state.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
