//! Handles: numbers that look like pointers, never two alike, never valid addresses.
//!
//! A stale or foreign handle is found out, and a caller that follows one crashes.

use crate::codes::{Done, fail};
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

/// A handle as C holds it.
pub(crate) type Handle = usize;

/// Not canonical on any 64-bit machine that Ascend runs beside: following it faults.
const FIRST: usize = 0x5A51_0000_0000_0000;

static NEXT: AtomicUsize = AtomicUsize::new(1);

/// Live things of one sort.
pub(crate) struct Registry<T> {
    sort: &'static str,
    live: LazyLock<Mutex<HashMap<Handle, Arc<T>>>>,
}

impl<T> Registry<T> {
    pub(crate) const fn new(sort: &'static str) -> Self {
        Self { sort, live: LazyLock::new(|| Mutex::new(HashMap::new())) }
    }

    /// A handle for a new thing.
    pub(crate) fn add(&self, thing: Arc<T>) -> Handle {
        let handle = FIRST + NEXT.fetch_add(1, Ordering::Relaxed) * 16;
        lock(&self.live).insert(handle, thing);
        handle
    }

    /// The thing of a live handle; `code` is the failure for any other.
    pub(crate) fn get(&self, handle: Handle, code: i32) -> Done<Arc<T>> {
        match lock(&self.live).get(&handle) {
            Some(thing) => Ok(thing.clone()),
            None if handle == 0 => fail!(code, "the {} is null", self.sort),
            None => fail!(code, "no such {}: {handle:#x}, never made or already destroyed", self.sort),
        }
    }

    /// Takes a thing out.
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

    /// Takes out one thing if it is of a sort.
    pub(crate) fn drain_one(&self, handle: Handle, which: impl Fn(&T) -> bool) -> Option<Arc<T>> {
        let mut live = lock(&self.live);
        if live.get(&handle).is_some_and(|thing| which(thing)) { live.remove(&handle) } else { None }
    }

    /// Takes out all things of a sort.
    pub(crate) fn drain(&self, which: impl Fn(&T) -> bool) -> Vec<Arc<T>> {
        let mut live = lock(&self.live);
        live.extract_if(|_, thing| which(thing)).map(|(_, thing)| thing).collect()
    }

    pub(crate) fn clear(&self) {
        lock(&self.live).clear();
    }
}

/// Locks even after a panic elsewhere: the simulator's state is for tests to look at.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
