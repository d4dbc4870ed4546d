//! Wakes the engine's loop.
//!
//! Handles, engine clones and the loop share one [`Doorbell`]. A notification carries no data: the loop checks for new
//! requests, cancellations and changes of the lifecycle after each one. Several notifications between two checks count
//! as one.

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
    /// Wakes the loop if it sleeps, and keeps it awake otherwise.
    pub fn notify(&self) {
        self.pending.store(true, Ordering::Release);
        // The lock orders this store before the wait of a loop that is about to sleep.
        drop(self.lock.lock());
        self.wakeup.notify_all();
    }

    /// Whether a notification came since the last call.
    pub fn take_notification(&self) -> bool {
        self.has_notification() && self.pending.swap(false, Ordering::AcqRel)
    }

    /// Whether a notification is pending.
    pub fn has_notification(&self) -> bool {
        self.pending.load(Ordering::Acquire)
    }

    /// Sleeps until a notification is pending, and leaves it pending.
    pub fn wait(&self) {
        let mut lock = self.lock.lock();
        while !self.has_notification() {
            self.wakeup.wait(&mut lock);
        }
    }
}
