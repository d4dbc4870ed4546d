//! Bounded queue between callers and the device's thread. Its capacity is reserved once.

#![forbid(unsafe_code)]

use std::collections::VecDeque;

use parking_lot::{Condvar, Mutex};

/// Largest number of queued commands. A step has about ten of them, so this is several steps ahead; further callers
/// wait.
const CAPACITY: usize = 256;

/// A FIFO queue.
#[derive(Debug)]
pub(crate) struct Queue<T> {
    state: Mutex<State<T>>,
    filled: Condvar,
    drained: Condvar,
}

#[derive(Debug)]
struct State<T> {
    items: VecDeque<T>,
    is_closed: bool,
}

impl<T> Queue<T> {
    pub(crate) fn new() -> Self {
        let state = State { items: VecDeque::with_capacity(CAPACITY), is_closed: false };
        Self { state: Mutex::new(state), filled: Condvar::new(), drained: Condvar::new() }
    }

    /// Pushes the value that `make` returns; `make` is called in queue order. Returns `None` once the queue is closed.
    pub(crate) fn push_with<R>(&self, make: impl FnOnce() -> (T, R)) -> Option<R> {
        let mut state = self.state.lock();
        while state.items.len() == CAPACITY && !state.is_closed {
            self.drained.wait(&mut state);
        }
        if state.is_closed {
            return None;
        }
        let (item, result) = make();
        state.items.push_back(item);
        drop(state);
        self.filled.notify_one();
        Some(result)
    }

    /// Pops the oldest value, waiting for one if necessary.
    pub(crate) fn pop(&self) -> T {
        let mut state = self.state.lock();
        loop {
            if let Some(item) = state.items.pop_front() {
                drop(state);
                self.drained.notify_one();
                return item;
            }
            self.filled.wait(&mut state);
        }
    }

    /// Refuses all further values, and drops those that are queued.
    pub(crate) fn close(&self) {
        let left = {
            let mut state = self.state.lock();
            state.is_closed = true;
            std::mem::take(&mut state.items)
        };
        // Dropped outside the lock: values owned by commands may call back when dropped.
        drop(left);
        self.drained.notify_all();
    }
}
