//! Doorbell: wakes the engine's loop.
//!
//! Handles, clones of the engine and the loop share one [`Doorbell`]. A notification only signals that something has
//! changed (a new request, a cancellation, the lifecycle); the loop then checks all of them. Several notifications
//! between two checks count as one.

use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{Condvar, Mutex};

#[derive(Debug, Default)]
pub(crate) struct Doorbell {
    /// Whether something has changed since the last check of the loop.
    pending: AtomicBool,
    lock: Mutex<()>,
    wakeup: Condvar,
}

impl Doorbell {
    /// Wakes the loop, or prevents it from going to sleep if it is awake.
    pub fn notify(&self) {
        self.pending.store(true, Ordering::Release);
        // Locking the mutex orders this store before the check of a loop that is about to wait.
        drop(self.lock.lock());
        self.wakeup.notify_all();
    }

    /// Returns whether there was a notification since the last call.
    pub fn take_notification(&self) -> bool {
        self.has_notification() && self.pending.swap(false, Ordering::AcqRel)
    }

    /// Returns whether there is an unprocessed notification.
    pub fn has_notification(&self) -> bool {
        self.pending.load(Ordering::Acquire)
    }

    /// Sleeps until there is a notification, and leaves it unprocessed.
    pub fn wait(&self) {
        let mut lock = self.lock.lock();
        while !self.has_notification() {
            self.wakeup.wait(&mut lock);
        }
    }
}
