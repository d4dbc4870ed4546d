//! Execution context of a card, shared by its programs: runtime context, operations, streams, staging, constants and
//! scratch.

#![forbid(unsafe_code)]

use crate::device::ascend::program::TypedAddress;
use std::cell::RefCell;
use std::sync::Arc;

use ascend_sys::{AscendError, Communicator, Context, DeviceAddress, DeviceBuffer, Event, EventKind, Op, Ops, Stream};

use super::stream::Streams;
use crate::device::ascend::memory::constants::Constants;
use crate::device::ascend::memory::staging::{FreeSlots, InFlight, Mark, OWN_SLOTS, SLOT_BYTES};
use crate::device::ascend::memory::{alloc_zeroed, padded};
use crate::device::ascend::notes::Diagnostics;
use crate::device::ascend::worker::consensus::Consensus;
use crate::device::ascend::worker::wait::WaitPolicy;

/// Scratch that consecutive launches share; a captured graph keeps the scratch it was captured with.
#[derive(Debug)]
pub(crate) struct Shared {
    pub workspace: DeviceBuffer,
    logits: DeviceBuffer,
    gathered: DeviceBuffer,
    flags: DeviceBuffer,
}

/// Bytes of each part of the scratch.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SharedBytes {
    pub workspace: usize,
    pub logits: usize,
    pub gathered: usize,
    pub flags: usize,
}

impl SharedBytes {
    fn max(self, other: Self) -> Self {
        Self {
            workspace: self.workspace.max(other.workspace),
            logits: self.logits.max(other.logits),
            gathered: self.gathered.max(other.gathered),
            flags: self.flags.max(other.flags),
        }
    }

    fn fits(self, room: Self) -> bool {
        self.workspace <= room.workspace
            && self.logits <= room.logits
            && self.gathered <= room.gathered
            && self.flags <= room.flags
    }
}

impl Shared {
    fn new(context: &Context, bytes: SharedBytes) -> Result<Self, AscendError> {
        let SharedBytes { workspace, logits, gathered, flags } = bytes;
        let (workspace, logits) = (alloc_zeroed(context, workspace)?, alloc_zeroed(context, logits)?);
        Ok(Self { workspace, logits, gathered: alloc_zeroed(context, gathered)?, flags: alloc_zeroed(context, flags)? })
    }

    fn bytes(&self) -> SharedBytes {
        SharedBytes {
            workspace: self.workspace.bytes(),
            logits: self.logits.bytes(),
            gathered: self.gathered.bytes(),
            flags: self.flags.bytes(),
        }
    }

    pub(crate) fn scratch(&self) -> SharedScratch {
        let Self { logits, gathered, flags, .. } = self;
        SharedScratch { logits: logits.address(), gathered: gathered.address(), flags: flags.address() }
    }
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct ExecContext {
    // Fields are dropped in this order: memory that queued work may still use is dropped last.
    pub streams: Streams,
    /// Stream that updates captured graphs; created with the first of them.
    pub update: Option<Stream>,
    pub output: Stream,
    pub ops: Ops,
    pub constants: Constants,
    /// Copies of callers' slots.
    pub in_flight: InFlight,
    own: InFlight,
    shared: RefCell<Arc<Shared>>,
    /// Stream of the last launch, and the event at its end.
    last_launch: Option<usize>,
    launched: Event,
    pub wait_policy: WaitPolicy,
    pub diagnostics: Arc<Diagnostics>,
    /// Rank of this card and the consensus of the ranks, if there are several cards.
    ranks: Option<(Communicator, Arc<Consensus>)>,
    pub context: Context,
}

impl ExecContext {
    pub(crate) fn new(
        context: &Context,
        ops: Ops,
        slots: Arc<FreeSlots>,
        wait_policy: WaitPolicy,
        notes: Arc<Diagnostics>,
    ) -> Result<Self, AscendError> {
        Ok(Self {
            streams: Streams::new(context)?,
            update: None,
            output: Stream::new(context)?,
            ops,
            constants: Constants::new(context)?,
            in_flight: InFlight::new(slots),
            own: InFlight::new(Arc::new(FreeSlots::new(context, OWN_SLOTS)?)),
            shared: RefCell::new(Arc::new(Shared::new(context, SharedBytes::default())?)),
            last_launch: None,
            launched: Event::new(context, EventKind::Ordering)?,
            wait_policy,
            diagnostics: notes,
            ranks: None,
            context: context.clone(),
        })
    }

    /// The scratch in use.
    pub(crate) fn shared(&self) -> Arc<Shared> {
        Arc::clone(&self.shared.borrow())
    }

    /// Grows the scratch to at least this size, and the table of ids to `vocab`. Waits for the streams only if
    /// something grows.
    pub(crate) fn reserve(&mut self, bytes: SharedBytes, vocab: usize) -> Result<(), AscendError> {
        self.grow(bytes)?;
        if vocab > 0 {
            self.synchronize()?;
            self.constants.grow_id_table(&self.context, vocab)?;
        }
        Ok(())
    }

    fn grow(&self, asked: SharedBytes) -> Result<(), AscendError> {
        let have = self.shared().bytes();
        if asked.fits(have) {
            return Ok(());
        }
        self.streams.synchronize_all(&self.wait_policy)?;
        self.shared.replace(Arc::new(Shared::new(&self.context, asked.max(have))?));
        Ok(())
    }

    /// Shrinks the scratch to its initial size. It must be unused; if the smaller one cannot be allocated, the larger
    /// one stays.
    pub(crate) fn shrink(&mut self) {
        let smallest = padded(0);
        let smallest = SharedBytes { workspace: smallest, logits: smallest, gathered: smallest, flags: smallest };
        let is_small = self.shared().bytes().fits(smallest);
        if !is_small
            && self.synchronize().is_ok()
            && let Ok(small) = Shared::new(&self.context, SharedBytes::default())
        {
            self.shared.replace(Arc::new(small));
        }
    }

    /// Queues a prebuilt operation.
    pub(crate) fn launch(&self, op: &mut Op, on: usize) -> Result<(), AscendError> {
        let needed = op.workspace_bytes();
        // All workspaces were measured at load; an operation that needs more for shorter lengths causes one wait.
        self.grow(SharedBytes { workspace: needed, ..SharedBytes::default() })?;
        let workspace = self.shared().workspace.address();
        op.launch(workspace, needed, self.streams.get(on))
    }

    /// Queues an operation that is used once.
    pub(crate) fn run(&self, mut op: Op, on: usize) -> Result<(), AscendError> {
        self.launch(&mut op, on)
    }

    /// Connects this card with the others.
    pub(crate) fn join(&mut self, communicator: Communicator, consensus: Arc<Consensus>) {
        self.ranks = Some((communicator, consensus));
    }

    /// Whether all cards of the device agree; all of them vote at the same points.
    pub(crate) fn all_agree(&self, agrees: bool) -> Result<bool, AscendError> {
        self.ranks.as_ref().map_or(Ok(agrees), |(_, consensus)| consensus.all_agree(agrees))
    }

    /// An asynchronous error of the collectives' library, if there is one.
    pub(crate) fn link_error(&self) -> Option<AscendError> {
        // A library that cannot be queried, or does not respond, reports no error.
        self.ranks.as_ref().and_then(|(communicator, _)| communicator.async_error().ok().flatten())
    }

    /// Queues a collective with the other cards.
    pub(crate) fn run_collective(&self, meeting: &Collective, on: &Stream) -> Result<(), AscendError> {
        // Plans with collectives are loaded on as many cards as they have ranks, so a communicator exists.
        let Some((communicator, _)) = &self.ranks else { return Ok(()) };
        let &Collective { gathers, src, dst, elements } = meeting;
        if gathers {
            communicator.all_gather(src.address, dst.address, elements, src.elem, on)
        } else {
            communicator.all_reduce(src.address, dst.address, elements, src.elem, on)
        }
    }

    /// Runs an operation while the streams are idle, and waits for it.
    pub(crate) fn run_alone(&mut self, mut op: Op) -> Result<(), AscendError> {
        let needed = op.workspace_bytes();
        self.synchronize()?;
        self.grow(SharedBytes { workspace: needed, ..SharedBytes::default() })?;
        op.launch(self.shared().workspace.address(), needed, &self.output)?;
        self.wait_policy.wait(|limit| self.output.synchronize(Some(limit)))
    }

    /// Queues a copy of host bytes, through slots of the thread's own.
    pub(crate) fn stage(&mut self, dst: DeviceAddress, bytes: &[u8], on: usize) -> Result<(), AscendError> {
        for (index, chunk) in bytes.chunks(SLOT_BYTES).enumerate() {
            let mut slot = loop {
                if let Some(slot) = self.own.free().try_take() {
                    break slot;
                }
                let oldest = self.own.oldest().map_or(on, |mark| mark.stream);
                let passed = self.streams.synchronize(oldest, &self.wait_policy)?;
                self.passed(passed);
            };
            slot.as_mut_slice()[..chunk.len()].copy_from_slice(chunk);
            let mark = self.streams.next_mark(on);
            let dst = dst.offset(index * SLOT_BYTES);
            self.own.copy_in(slot, chunk.len(), dst, self.streams.get(on), mark)?;
        }
        Ok(())
    }

    /// Records the progress of a stream.
    pub(crate) fn passed(&mut self, mark: Mark) {
        self.in_flight.reclaim(mark);
        self.own.reclaim(mark);
    }

    /// Orders a launch on `on` after the last one: they share scratch.
    pub(crate) fn begin_launch(&mut self, on: usize) -> Result<(), AscendError> {
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

    /// Waits until all streams are idle.
    pub(crate) fn synchronize(&mut self) -> Result<(), AscendError> {
        self.streams.synchronize_all(&self.wait_policy)?;
        if let Some(update) = &self.update {
            self.wait_policy.wait(|limit| update.synchronize(Some(limit)))?;
        }
        self.all_passed();
        Ok(())
    }

    /// Records that all queued work has ended.
    pub(crate) fn all_passed(&mut self) {
        let Self { streams, in_flight, own, .. } = self;
        for mark in streams.all_reached() {
            in_flight.reclaim(mark);
            own.reclaim(mark);
        }
    }

    /// Aborts the streams, so that no call waits for a device that does not respond.
    pub(crate) fn abort(&self) {
        self.streams.abort();
        for stream in [Some(&self.output), self.update.as_ref()].into_iter().flatten() {
            // As in `Streams::abort`.
            let _ = stream.abort();
        }
    }
}

/// Scratch that all programs of a card share.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SharedScratch {
    /// Logits before the conversion to f32.
    pub logits: DeviceAddress,
    /// Shards of the logits of all ranks, concatenated.
    pub gathered: DeviceAddress,
    /// One flag per element of the widest rows that are checked.
    pub flags: DeviceAddress,
}

/// A collective: each card contributes the same number of elements.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Collective {
    /// Whether the ranks' elements are concatenated; otherwise they are summed.
    pub gathers: bool,
    pub src: TypedAddress,
    pub dst: TypedAddress,
    pub elements: usize,
}
