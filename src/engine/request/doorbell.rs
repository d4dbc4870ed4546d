//! Wakes the engine's loop.
//!
//! Handles, engine clones and the loop share one [`Doorbell`]. A notification says only that something changed (a new
//! request, a cancellation, the lifecycle); the loop then looks for itself. Notifications between two looks are one.

use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{Condvar, Mutex};

#[derive(Debug, Default)]
pub(crate) struct Doorbell {
    /// Something changed since the loop last looked.
    pending: AtomicBool,
    lock: Mutex<()>,
    wakeup: Condvar,
}

impl Doorbell {
    /// Wakes the loop, or keeps it from sleeping if it is awake.
    pub fn notify(&self) {
        self.pending.store(true, Ordering::Release);
        // Taking the lock orders this store against a loop that is about to wait.
        drop(self.lock.lock());
        self.wakeup.notify_all();
    }

    /// Whether a notification came since the last call.
    pub fn take_notification(&self) -> bool {
        self.has_notification() && self.pending.swap(false, Ordering::AcqRel)
    }

    /// Whether a notification waits to be taken.
    pub fn has_notification(&self) -> bool {
        self.pending.load(Ordering::Acquire)
    }

    /// Sleeps until there is a notification; leaves it in place.
    pub fn wait(&self) {
        let mut lock = self.lock.lock();
        while !self.has_notification() {
            self.wakeup.wait(&mut lock);
        }
    }
}
