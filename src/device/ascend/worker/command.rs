//! State that a card's thread shares with its callers: the command queue and the buffers passed between them.

#![forbid(unsafe_code)]

use std::sync::Arc;

use ascend_sys::PinnedBuffer;

use super::Worker;
use super::queue::Queue;
use super::readback::Readback;
use crate::device::ascend::error::ErrorState;
use crate::device::ascend::memory::kv_layout::KvShard;
use crate::device::ascend::memory::staging::FreeSlots;
use crate::device::ascend::notes::Diagnostics;
use crate::device::{Bindings, DeviceError, LaunchShape, Span};
use crate::kv_cache::BlockId;

/// Commands to the thread. Lists are taken from a pool and returned to it.
pub(crate) enum Command {
    Write {
        dst: Span,
        slot: PinnedBuffer,
        bytes: usize,
        on: usize,
    },
    Read {
        src: Span,
        after: Option<u64>,
    },
    Copy {
        dst: Span,
        src: Span,
        on: usize,
    },
    Feed {
        ids: Span,
        best: Span,
        rows: Vec<u32>,
        on: usize,
    },
    Record {
        on: usize,
        event: u64,
    },
    Wait {
        on: usize,
        event: u64,
    },
    /// Waits for an event, or for all queued work.
    WaitHost {
        event: Option<u64>,
    },
    Launch {
        program: u64,
        io: Bindings,
        shape: LaunchShape,
        lens: Vec<u32>,
        on: usize,
    },
    CopyBlocks {
        cache: KvShard,
        src: Span,
        dst: Span,
        pairs: Vec<u32>,
        on: usize,
    },
    /// Frees slots whose copies have completed.
    Reclaim,
    Call(Box<dyn FnOnce(&mut Worker) + Send>),
    Stop,
}

/// State that the thread shares with its callers.
#[derive(Debug)]
pub(crate) struct WorkerShared {
    pub queue: Queue<Command>,
    pub errors: Arc<ErrorState>,
    pub slots: Arc<FreeSlots>,
    pub readback: Readback,
    /// Empty lists for reuse.
    pub lists: parking_lot::Mutex<Vec<Vec<u32>>>,
    pub diagnostics: Arc<Diagnostics>,
}

impl std::fmt::Debug for Command {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Command")
    }
}

impl WorkerShared {
    /// Returns an empty list.
    pub(crate) fn list(&self) -> Vec<u32> {
        self.lists.lock().pop().unwrap_or_default()
    }

    /// Returns a slot to fill, waiting for one if necessary; `None` once the device has ended.
    pub(crate) fn free_slot(&self) -> Option<PinnedBuffer> {
        self.slots.try_take().or_else(|| {
            self.queue.push_with(|| (Command::Reclaim, ()))?;
            self.slots.take()
        })
    }

    pub(crate) fn give_list(&self, mut list: Vec<u32>) {
        list.clear();
        self.lists.lock().push(list);
    }
}

/// Closes all queues when dropped, so that no caller waits for a thread that has ended.
pub(crate) struct CloseOnDrop<'a>(pub &'a WorkerShared);

impl Drop for CloseOnDrop<'_> {
    fn drop(&mut self) {
        self.0.errors.note(DeviceError::Lost);
        self.0.queue.close();
        drop(self.0.slots.close());
        drop(self.0.readback.close(DeviceError::Lost));
    }
}

pub(crate) fn pairs_list(pairs: &[(BlockId, BlockId)], list: &mut Vec<u32>) {
    list.extend(pairs.iter().flat_map(|(from, to)| [from.0, to.0]));
}
