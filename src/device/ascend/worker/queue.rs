//! The bounded queue between callers and the device's thread. Its room is reserved once.

#![forbid(unsafe_code)]

use std::collections::VecDeque;

use parking_lot::{Condvar, Mutex};

/// Commands that may wait. A step is some ten of them, so this is several steps ahead; whoever is further waits.
const CAPACITY: usize = 256;

/// First in, first out.
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

    /// Adds what `make` gives, which is called in the queue's order; `None` once nobody takes anything any more.
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

    /// Takes the oldest, waiting for one.
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

    /// Refuses everything from now on, and drops what waits.
    pub(crate) fn close(&self) {
        let left = {
            let mut state = self.state.lock();
            state.is_closed = true;
            std::mem::take(&mut state.items)
        };
        // What commands hold may call back when it is dropped.
        drop(left);
        self.drained.notify_all();
    }
}
