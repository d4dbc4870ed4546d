//! Pinned host memory for the copies of the step loop: a fixed number of slots to the device, and one readback buffer.
//!
//! A slot has one owner at a time: a caller takes a free one and fills it; the device's thread queues the copy and
//! keeps the slot until the stream has passed the copy; then the slot is free again.

#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::sync::Arc;

use ascend_sys::{AscendError, Context, DeviceAddress, PinnedBuffer, Stream};
use parking_lot::{Condvar, Mutex};

use crate::device::ascend::worker::wait::WaitPolicy;

/// Bytes of a slot: ids, positions or tables of a large step fit one.
pub(crate) const SLOT_BYTES: usize = 64 << 10;
/// Slots of callers: a step needs about six.
pub(crate) const SLOTS: usize = 64;
/// Slots of the device's thread, which must not wait for slots of commands queued before: a launch needs one.
pub(crate) const OWN_SLOTS: usize = 8;

/// Free slots, for callers and the device's thread.
#[derive(Debug)]
pub(crate) struct FreeSlots {
    state: Mutex<(Vec<PinnedBuffer>, bool)>,
    returned: Condvar,
}

impl FreeSlots {
    pub(crate) fn new(context: &Context, count: usize) -> Result<Self, AscendError> {
        let slots = (0..count).map(|_| PinnedBuffer::new(context, SLOT_BYTES)).collect::<Result<_, _>>()?;
        Ok(Self { state: Mutex::new((slots, false)), returned: Condvar::new() })
    }

    /// A free slot, if there is one.
    pub(crate) fn try_take(&self) -> Option<PinnedBuffer> {
        self.state.lock().0.pop()
    }

    /// Waits for a free slot; `None` once the device has ended.
    pub(crate) fn take(&self) -> Option<PinnedBuffer> {
        let mut state = self.state.lock();
        loop {
            if state.1 {
                return None;
            }
            if let Some(slot) = state.0.pop() {
                return Some(slot);
            }
            self.returned.wait(&mut state);
        }
    }

    pub(crate) fn give(&self, slot: PinnedBuffer) {
        self.state.lock().0.push(slot);
        self.returned.notify_one();
    }

    /// Removes all slots; no call waits from now on.
    pub(crate) fn close(&self) -> Vec<PinnedBuffer> {
        let mut state = self.state.lock();
        state.1 = true;
        let slots = std::mem::take(&mut state.0);
        drop(state);
        self.returned.notify_all();
        slots
    }
}

/// Progress of a stream, as the number of copies queued to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mark {
    pub stream: usize,
    pub count: u64,
}

/// Slots whose copies may still run, oldest first.
#[derive(Debug)]
pub(crate) struct InFlight {
    slots: VecDeque<(PinnedBuffer, Mark)>,
    free: Arc<FreeSlots>,
}

impl InFlight {
    pub(crate) fn new(free: Arc<FreeSlots>) -> Self {
        Self { slots: VecDeque::with_capacity(SLOTS), free }
    }

    /// Pool of free slots.
    pub(crate) fn free(&self) -> &FreeSlots {
        &self.free
    }

    /// Queues the copy of a slot's first bytes, and keeps the slot until the copy has run.
    pub(crate) fn copy_in(
        &mut self,
        slot: PinnedBuffer,
        bytes: usize,
        dst: DeviceAddress,
        on: &Stream,
        mark: Mark,
    ) -> Result<(), AscendError> {
        debug_assert!(bytes <= slot.bytes(), "a copy of a slot is within it");
        // SAFETY: the slot is pinned and holds at least `bytes` bytes. It is kept here, where nothing writes to it,
        // until `on` has passed the copy.
        let queued = unsafe { on.copy_in(dst, slot.as_ptr(), bytes) };
        self.slots.push_back((slot, mark));
        queued
    }

    /// The oldest slot's mark.
    pub(crate) fn oldest(&self) -> Option<Mark> {
        self.slots.front().map(|(_, mark)| *mark)
    }

    /// Frees the slots that a stream has passed.
    pub(crate) fn reclaim(&mut self, passed: Mark) {
        for _ in 0..self.slots.len() {
            let Some((slot, mark)) = self.slots.pop_front() else { return };
            if mark.stream == passed.stream && mark.count <= passed.count {
                self.free.give(slot);
            } else {
                self.slots.push_back((slot, mark));
            }
        }
    }
}

/// Copies device memory to `landing` and waits for it.
pub(crate) fn copy_out(
    readback: &mut PinnedBuffer,
    src: DeviceAddress,
    bytes: usize,
    on: &Stream,
    wait_policy: &WaitPolicy,
) -> Result<(), AscendError> {
    debug_assert!(bytes <= readback.bytes(), "a copy to the landing place fits it");
    // SAFETY: the buffer is pinned and has capacity for the copied bytes. It is borrowed exclusively until the stream
    // is idle; if that does not happen within the limit, the device has ended, its streams are aborted, and the memory
    // is not freed before.
    unsafe { on.copy_out(readback.as_ptr(), src, bytes) }?;
    wait_policy.wait(|limit| on.synchronize(Some(limit)))
}

/// Queues a copy between device memory and a pinned buffer of the caller's.
pub(crate) fn copy_pinned(
    pinned: &PinnedBuffer,
    offset: usize,
    device: DeviceAddress,
    bytes: usize,
    to_device: bool,
    on: &Stream,
) -> Result<(), AscendError> {
    assert!(offset.checked_add(bytes).is_some_and(|end| end <= pinned.bytes()), "a span within its buffer");
    // SAFETY: the range is within the buffer, which is pinned. The buffer is freed only after all streams are idle, and
    // only queued copies read and write it, in the order of streams and events of the caller.
    unsafe {
        let host = pinned.as_ptr().add(offset);
        if to_device { on.copy_in(device, host, bytes) } else { on.copy_out(host, device, bytes) }
    }
}
