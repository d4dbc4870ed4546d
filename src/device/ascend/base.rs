//! What all programs of a card stand on: its context, operations, streams, staging, constants and shared scratch.

#![forbid(unsafe_code)]

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;

use ascend_sys::{AscendError, Context, DeviceAddress, DeviceBuffer, Event, EventKind, Op, Ops, Stream};

use super::constants::Constants;
use super::lower::Room;
use super::memory::zeroed;
use super::notes::Notes;
use super::staging::{FreeSlots, InFlight, Mark, OWN_SLOTS, SLOT_BYTES};
use super::stream::Streams;

/// Scratch that one launch after the other uses; captured graphs hold the one they were captured with.
#[derive(Debug)]
pub(super) struct Shared {
    pub workspace: DeviceBuffer,
    logits: DeviceBuffer,
    flags: DeviceBuffer,
}

impl Shared {
    fn new(context: &Context, [workspace, logits, flags]: [usize; 3]) -> Result<Self, AscendError> {
        let (workspace, logits) = (zeroed(context, workspace)?, zeroed(context, logits)?);
        Ok(Self { workspace, logits, flags: zeroed(context, flags)? })
    }

    fn bytes(&self) -> [usize; 3] {
        [self.workspace.bytes(), self.logits.bytes(), self.flags.bytes()]
    }

    pub(super) fn room(&self) -> Room {
        Room { logits: self.logits.address(), flags: self.flags.address() }
    }
}

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Base {
    // Dropped in this order: what work may still use goes last.
    pub streams: Streams,
    /// Refreshes captured graphs; made with the first of them.
    pub update: Option<Stream>,
    pub output: Stream,
    pub ops: Ops,
    pub constants: Constants,
    /// Copies of callers' slots.
    pub in_flight: InFlight,
    own: InFlight,
    shared: RefCell<Arc<Shared>>,
    /// The stream of the last launch, and its end.
    last_launch: Option<usize>,
    launched: Event,
    pub limit: Duration,
    pub notes: Arc<Notes>,
    pub context: Context,
}

impl Base {
    pub(super) fn new(
        context: &Context,
        ops: Ops,
        slots: Arc<FreeSlots>,
        limit: Duration,
        notes: Arc<Notes>,
    ) -> Result<Self, AscendError> {
        Ok(Self {
            streams: Streams::new(context)?,
            update: None,
            output: Stream::new(context)?,
            ops,
            constants: Constants::new(context)?,
            in_flight: InFlight::new(slots),
            own: InFlight::new(Arc::new(FreeSlots::new(context, OWN_SLOTS)?)),
            shared: RefCell::new(Arc::new(Shared::new(context, [0; 3])?)),
            last_launch: None,
            launched: Event::new(context, EventKind::Ordering)?,
            limit,
            notes,
            context: context.clone(),
        })
    }

    /// The scratch in use.
    pub(super) fn shared(&self) -> Arc<Shared> {
        Arc::clone(&self.shared.borrow())
    }

    /// Makes the scratch at least as large, and ids up to `vocab` known. While nothing grows nothing is waited for.
    pub(super) fn reserve(
        &mut self,
        workspace: usize,
        logits: usize,
        flags: usize,
        vocab: usize,
    ) -> Result<(), AscendError> {
        self.grow([workspace, logits, flags])?;
        if vocab > 0 {
            self.synchronize()?;
            self.constants.know_ids(&self.context, vocab)?;
        }
        Ok(())
    }

    fn grow(&self, asked: [usize; 3]) -> Result<(), AscendError> {
        let have = self.shared().bytes();
        if asked.iter().zip(&have).all(|(asked, have)| asked <= have) {
            return Ok(());
        }
        self.streams.synchronize_all(self.limit)?;
        let most = [0, 1, 2].map(|i| asked[i].max(have[i]));
        self.shared.replace(Arc::new(Shared::new(&self.context, most)?));
        Ok(())
    }

    /// Queues an op that was made before.
    pub(super) fn launch(&self, op: &mut Op, on: usize) -> Result<(), AscendError> {
        let needed = op.workspace_bytes();
        // Everything was measured at load; an operation that wants more for shorter lengths is waited for once.
        self.grow([needed, 0, 0])?;
        let workspace = self.shared().workspace.address();
        op.launch(workspace, needed, self.streams.get(on))
    }

    /// Queues an op that is used once.
    pub(super) fn run(&self, mut op: Op, on: usize) -> Result<(), AscendError> {
        self.launch(&mut op, on)
    }

    /// Runs an op on the card's own stream and waits for it.
    pub(super) fn run_alone(&mut self, mut op: Op) -> Result<(), AscendError> {
        let needed = op.workspace_bytes();
        self.grow([needed, 0, 0])?;
        op.launch(self.shared().workspace.address(), needed, &self.output)?;
        self.output.synchronize(Some(self.limit))
    }

    /// Queues a copy of host bytes, through slots of the thread's own.
    pub(super) fn stage(&mut self, dst: DeviceAddress, bytes: &[u8], on: usize) -> Result<(), AscendError> {
        for (index, chunk) in bytes.chunks(SLOT_BYTES).enumerate() {
            let mut slot = loop {
                if let Some(slot) = self.own.free().try_take() {
                    break slot;
                }
                let oldest = self.own.oldest().map_or(on, |mark| mark.stream);
                let passed = self.streams.synchronize(oldest, self.limit)?;
                self.passed(passed);
            };
            slot.as_mut_slice()[..chunk.len()].copy_from_slice(chunk);
            let mark = self.streams.next_mark(on);
            let dst = dst.offset(index * SLOT_BYTES);
            self.own.copy_in(slot, chunk.len(), dst, self.streams.get(on), mark)?;
        }
        Ok(())
    }

    /// Notes what a stream has passed.
    pub(super) fn passed(&mut self, mark: Mark) {
        self.in_flight.reclaim(mark);
        self.own.reclaim(mark);
    }

    /// Lets a launch on `on` begin behind the last one: they share scratch.
    pub(super) fn begin_launch(&mut self, on: usize) -> Result<(), AscendError> {
        match self.last_launch {
            Some(last) if last != on => {
                let last = self.streams.get(last);
                last.record(&self.launched)?;
                self.streams.get(on).wait(&self.launched)?;
            }
            _ => {}
        }
        self.last_launch = Some(on);
        Ok(())
    }

    /// Waits until nothing runs.
    pub(super) fn synchronize(&mut self) -> Result<(), AscendError> {
        self.streams.synchronize_all(self.limit)?;
        if let Some(update) = &self.update {
            update.synchronize(Some(self.limit))?;
        }
        self.all_passed();
        Ok(())
    }

    /// Notes that all streams are at their ends.
    pub(super) fn all_passed(&mut self) {
        let Self { streams, in_flight, own, .. } = self;
        for mark in streams.all_reached() {
            in_flight.reclaim(mark);
            own.reclaim(mark);
        }
    }

    /// Ends what runs, so that nothing waits for a device that does not answer.
    pub(super) fn abort(&self) {
        self.streams.abort();
        for stream in [Some(&self.output), self.update.as_ref()].into_iter().flatten() {
            // As in `Streams::abort`.
            let _ = stream.abort();
        }
    }
}
