//! One card: the thread that owns its context, and the execution of its commands.

#![forbid(unsafe_code)]

pub(super) mod command;
pub(super) mod consensus;
pub(super) mod group;
pub(super) mod queue;
pub(super) mod readback;
pub(super) mod wait;

use std::collections::HashMap;
use std::sync::Arc;

use ascend_sys::{
    AscendError, Collectives, Communicator, Context, DeviceAddress, DeviceBuffer, ElemType, Library, Ops, PinnedBuffer,
    RootInfo, Runtime, TensorDesc,
};

use super::error::{ErrorState, device_error};
use super::memory::kv_layout::KvShard;
use super::memory::staging::{FreeSlots, SLOTS, copy_out, copy_pinned};
use super::memory::{alloc_zeroed, padded};
use super::notes::Diagnostics;
use super::program::context::ExecContext;
use super::program::lower::{OutputBuffers, words};
use super::program::{Batch, Program, capture};
use super::weights::WeightSet;
use crate::device::{Bindings, DeviceError, LaunchShape, MemKind, Span};
use crate::graph::TpRank;
use command::{CloseOnDrop, Command, WorkerShared};
use consensus::Consensus;
use queue::Queue;
use readback::Readback;
use wait::WaitPolicy;

/// Largest number of bytes copied back at once; larger reads take several copies.
const READBACK_BYTES: usize = 64 << 20;

#[derive(Debug)]
enum Memory {
    Device(DeviceBuffer),
    Pinned(PinnedBuffer),
}

/// A card with everything allocated on it.
#[derive(Debug)]
pub(super) struct Worker {
    programs: HashMap<u64, Program>,
    weights: HashMap<u64, Arc<WeightSet>>,
    buffers: HashMap<u64, Memory>,
    pub exec: ExecContext,
    /// The four lists on the device used to copy deferred tokens, and the bytes of each.
    feed: Option<(DeviceBuffer, usize)>,
    capture_max_rows: usize,
    rank: TpRank,
    /// Whether the card has ended; waits then return at once.
    is_lost: bool,
}

/// Configuration of a card.
pub(super) struct WorkerConfig {
    pub library: Arc<Library>,
    pub runtime: Runtime,
    pub card: u32,
    /// Its rank among the cards of the device.
    pub rank: TpRank,
    pub wait_policy: WaitPolicy,
    pub is_deterministic: bool,
    /// Largest number of rows of a captured step; 0 disables capture.
    pub capture_max_rows: usize,
    /// Set for the card that creates the root information that all cards join with.
    pub root_of: Option<Collectives>,
    pub errors: Arc<ErrorState>,
    pub diagnostics: Arc<Diagnostics>,
}

/// Information about an open card.
#[derive(Clone, Debug)]
pub(super) struct CardInfo {
    pub chip: Option<String>,
    pub cann: Option<i32>,
    pub free_bytes: u64,
    pub total_bytes: u64,
}

impl Worker {
    /// Opens the card and binds the calling thread to it.
    pub(super) fn open(config: &WorkerConfig) -> Result<(Self, Arc<WorkerShared>, CardInfo), AscendError> {
        let runtime = &config.runtime;
        runtime.init()?;
        let context = Context::create(runtime, config.card)?;
        let notes = Arc::clone(&config.diagnostics);
        if runtime.capabilities().kernel_time_limit {
            // Otherwise a kernel that hangs is detected only after 18 minutes.
            runtime.set_kernel_time_limit(config.wait_policy.limit)?;
        } else {
            notes.add(
                "this CANN version cannot limit a kernel's run time: only the host detects a kernel that hangs".into(),
            );
        }
        if !runtime.capabilities().stop_on_failure {
            notes.add(
                "this CANN version cannot stop a stream at its first failure: errors may name a later operation".into(),
            );
        }
        if config.is_deterministic {
            context.set_deterministic(true)?;
        }
        let (free, total) = context.memory_bytes()?;
        let info = CardInfo {
            chip: runtime.soc_name(),
            cann: runtime.cann_version().ok(),
            free_bytes: free,
            total_bytes: total,
        };
        let ops = Ops::load(&config.library, runtime);
        let slots = Arc::new(FreeSlots::new(&context, SLOTS)?);
        let exec = ExecContext::new(&context, ops, Arc::clone(&slots), config.wait_policy.clone(), Arc::clone(&notes))?;
        let mut capture_max_rows = config.capture_max_rows;
        if capture_max_rows == 0 {
            notes.add("capture is disabled".into());
        } else if let Some(reason) = capture::missing(&exec) {
            notes.add(format!("decode steps run operation by operation: {reason}"));
            capture_max_rows = 0;
        } else {
            notes.add(format!("decode steps of up to {capture_max_rows} rows are captured when they first run"));
        }
        let readback = PinnedBuffer::new(&context, 1 << 16)?;
        let shared = WorkerShared {
            queue: Queue::new(),
            errors: Arc::clone(&config.errors),
            slots,
            readback: Readback::new(readback),
            lists: parking_lot::Mutex::default(),
            diagnostics: notes,
        };
        let card = Self {
            programs: HashMap::new(),
            weights: HashMap::new(),
            buffers: HashMap::new(),
            exec,
            feed: None,
            capture_max_rows,
            rank: config.rank,
            is_lost: false,
        };
        Ok((card, Arc::new(shared), info))
    }

    /// Creates the root information that all cards join with, if this card is the one to create it.
    pub(super) fn make_root(&self, config: &WorkerConfig) -> Result<Option<RootInfo>, AscendError> {
        config.root_of.map(|collectives| collectives.root_info(self.exec.context.runtime())).transpose()
    }

    /// Joins the other cards; waits for them.
    pub(super) fn join(
        &mut self,
        collectives: &Collectives,
        root: &RootInfo,
        consensus: Arc<Consensus>,
    ) -> Result<(), AscendError> {
        let TpRank { index, of } = self.rank;
        let communicator = Communicator::join(collectives, &self.exec.context, root, of, index)?;
        self.exec.join(communicator, consensus);
        Ok(())
    }

    /// Executes commands until `Stop`.
    pub(super) fn serve(mut self, shared: &WorkerShared) {
        // Waiting callers must receive an error, however this thread ends.
        let _closing = CloseOnDrop(shared);
        loop {
            let command = shared.queue.pop();
            if matches!(command, Command::Stop) {
                break;
            }
            self.handle_command(command, shared);
        }
        self.flush();
        drop(shared.slots.close());
        drop(shared.readback.close(DeviceError::Lost));
    }

    fn handle_command(&mut self, command: Command, shared: &WorkerShared) {
        if let Err(fatal) = shared.errors.check() {
            self.end();
            match command {
                Command::Write { slot, .. } => shared.slots.give(slot),
                Command::Read { .. } | Command::WaitHost { .. } => shared.readback.answer(Err(fatal)),
                // The call frees memory, or returns a failure of its own.
                Command::Call(call) => call(self),
                _ => {}
            }
            return;
        }
        if shared.errors.has_unreported() {
            // Work queued after a failure would use stale lengths and slots, so it is skipped. The next waiting call
            // receives the error; later work runs again.
            match command {
                Command::Write { slot, .. } => return shared.slots.give(slot),
                Command::Feed { rows: list, .. }
                | Command::Launch { lens: list, .. }
                | Command::CopyBlocks { pairs: list, .. } => return shared.give_list(list),
                Command::Copy { .. } | Command::Record { .. } | Command::Wait { .. } => return,
                _ => {}
            }
        }
        let outcome = match command {
            Command::Write { dst, slot, bytes, on } => self.write(dst, slot, bytes, on),
            Command::Copy { dst, src, on } => self.copy(dst, src, on),
            Command::Feed { ids, best, rows, on } => {
                let outcome = self.copy_sampled_tokens(ids, best, &rows, on);
                shared.give_list(rows);
                outcome
            }
            Command::Record { on, event } => self.exec.streams.record(on, event, &self.exec.wait_policy),
            Command::Wait { on, event } => self.exec.streams.wait(on, event),
            Command::Launch { program, io, shape, lens, on } => {
                let outcome = self.launch(program, &io, shape, &lens, on);
                shared.give_list(lens);
                outcome
            }
            Command::CopyBlocks { cache, src, dst, pairs, on } => {
                let outcome = self.copy_blocks(&cache, src, dst, &pairs, on);
                shared.give_list(pairs);
                outcome
            }
            Command::Reclaim => self.reclaim(),
            Command::Read { src, after } => {
                let mut readback = shared.readback.take();
                let outcome = self.read(src, after, &mut readback);
                let told = self.report(shared, outcome);
                shared.readback.put(readback);
                shared.readback.answer(told);
                return;
            }
            Command::WaitHost { event } => {
                let outcome = self.wait_host(event);
                let told = self.report(shared, outcome);
                shared.readback.answer(told);
                return;
            }
            Command::Call(call) => {
                call(self);
                return;
            }
            Command::Stop => return,
        };
        if let Err(error) = outcome {
            self.record_failure(shared, error);
        }
    }

    /// Records a failure of queued work for the next call that waits.
    fn record_failure(&mut self, shared: &WorkerShared, error: AscendError) {
        let words = error.to_string();
        let error = device_error(error, 0, self.exec.wait_policy.limit, &self.exec.context);
        if shared.errors.note(error) {
            let card = if self.rank.of > 1 { format!("card {}: ", self.exec.context.device()) } else { String::new() };
            shared.diagnostics.add(card.clone() + &words);
            if let Some(link) = self.exec.link_error() {
                shared.diagnostics.add(card + &link.to_string());
            }
        }
        if shared.errors.fatal().is_some() {
            self.end();
        }
    }

    /// Runs runtime calls for a waiting caller, and converts a failure to the error of the device contract.
    pub(super) fn attempt<R>(
        &mut self,
        asked_bytes: u64,
        run: impl FnOnce(&mut Self) -> Result<R, AscendError>,
    ) -> Result<R, DeviceError> {
        run(self).map_err(|error| device_error(error, asked_bytes, self.exec.wait_policy.limit, &self.exec.context))
    }

    /// Marks the card as ended and aborts its streams; nothing waits any longer.
    fn end(&mut self) {
        if !self.is_lost {
            self.is_lost = true;
            self.exec.abort();
        }
    }

    /// Result of a waiting call: its own failure, or that of queued work before it.
    fn report(&mut self, shared: &WorkerShared, outcome: Result<(), AscendError>) -> Result<(), DeviceError> {
        if let Err(error) = outcome {
            self.record_failure(shared, error);
        }
        shared.errors.take()
    }

    fn address(&self, span: Span) -> DeviceAddress {
        match self.buffers.get(&span.buffer.0) {
            Some(Memory::Device(buffer)) => buffer.address().offset(to_usize(span.offset)),
            // Spans were checked when the command was created; a buffer freed since then has a null address.
            _ => DeviceAddress(0),
        }
    }

    fn pinned(&self, span: Span) -> Option<&PinnedBuffer> {
        match self.buffers.get(&span.buffer.0) {
            Some(Memory::Pinned(buffer)) => Some(buffer),
            _ => None,
        }
    }

    fn write(&mut self, dst: Span, mut slot: PinnedBuffer, bytes: usize, on: usize) -> Result<(), AscendError> {
        let offset = to_usize(dst.offset);
        if let Some(Memory::Pinned(_)) = self.buffers.get(&dst.buffer.0) {
            // Host memory: wait for earlier queued work, then copy at once.
            self.exec.streams.synchronize(on, &self.exec.wait_policy)?;
            if let Some(Memory::Pinned(buffer)) = self.buffers.get_mut(&dst.buffer.0) {
                buffer.as_mut_slice()[offset..offset + bytes].copy_from_slice(&slot.as_mut_slice()[..bytes]);
            }
            self.exec.in_flight.free().give(slot);
            return Ok(());
        }
        let dst = self.address(dst);
        let mark = self.exec.streams.next_mark(on);
        let ExecContext { streams, in_flight, .. } = &mut self.exec;
        in_flight.copy_in(slot, bytes, dst, streams.get(on), mark)
    }

    fn reclaim(&mut self) -> Result<(), AscendError> {
        if let Some(oldest) = self.exec.in_flight.oldest() {
            let passed = self.exec.streams.synchronize(oldest.stream, &self.exec.wait_policy)?;
            self.exec.passed(passed);
        }
        Ok(())
    }

    fn copy(&self, dst: Span, src: Span, on: usize) -> Result<(), AscendError> {
        let stream = self.exec.streams.get(on);
        let bytes = to_usize(src.bytes);
        match (self.pinned(dst), self.pinned(src)) {
            (None, None) => stream.copy_within(self.address(dst), self.address(src), bytes),
            (Some(host), None) => copy_pinned(host, to_usize(dst.offset), self.address(src), bytes, false, stream),
            (None, Some(host)) => copy_pinned(host, to_usize(src.offset), self.address(dst), bytes, true, stream),
            // Refused when the command was created.
            (Some(_), Some(_)) => Ok(()),
        }
    }

    fn read(&mut self, src: Span, after: Option<u64>, readback: &mut PinnedBuffer) -> Result<(), AscendError> {
        let bytes = to_usize(src.bytes);
        if readback.bytes() < bytes {
            *readback = PinnedBuffer::new(&self.exec.context, bytes.next_power_of_two().min(READBACK_BYTES))?;
        }
        let exec = &mut self.exec;
        match after {
            Some(event) => exec.streams.hold(&exec.output, event)?,
            None => exec.streams.hold_for_all(&exec.output)?,
        }
        if let Some(Memory::Pinned(buffer)) = self.buffers.get(&src.buffer.0) {
            exec.wait_policy.wait(|limit| exec.output.synchronize(Some(limit)))?;
            let from = to_usize(src.offset);
            readback.as_mut_slice()[..bytes].copy_from_slice(&buffer.as_slice()[from..from + bytes]);
        } else {
            let from = match self.buffers.get(&src.buffer.0) {
                Some(Memory::Device(buffer)) => buffer.address().offset(to_usize(src.offset)),
                _ => DeviceAddress(0),
            };
            copy_out(readback, from, bytes, &exec.output, &exec.wait_policy)?;
        }
        match after {
            Some(event) => {
                if let Some(passed) = exec.streams.reached(event) {
                    exec.passed(passed);
                }
            }
            None => exec.all_passed(),
        }
        Ok(())
    }

    fn wait_host(&mut self, event: Option<u64>) -> Result<(), AscendError> {
        let Some(event) = event else { return self.exec.synchronize() };
        if let Some(passed) = self.exec.streams.wait_host(event, &self.exec.wait_policy)? {
            self.exec.passed(passed);
        }
        Ok(())
    }

    /// Computes `ids[to] = ids_by_number[best[from] + 1]` on the device.
    fn copy_sampled_tokens(&mut self, ids: Span, best: Span, rows: &[u32], on: usize) -> Result<(), AscendError> {
        let count = rows.len() / 2;
        if count == 0 {
            return Ok(());
        }
        let needed = padded(4 * count);
        let (at, line) = match &self.feed {
            Some((buffer, line)) if *line >= needed => (buffer.address(), *line),
            _ => {
                self.exec.synchronize()?;
                let buffer = alloc_zeroed(&self.exec.context, 4 * needed)?;
                let at = buffer.address();
                self.feed = Some((buffer, needed));
                (at, needed)
            }
        };
        let word = |address: DeviceAddress, dims: &[usize]| TensorDesc::new(address, ElemType::I32, dims);
        let [to, from, sampled, tokens] = [0, 1, 2, 3].map(|i| at.offset(i * line));
        let (tos, froms) = rows.split_at(count);
        self.exec.stage(to, bytemuck::cast_slice(tos), on)?;
        self.exec.stage(from, bytemuck::cast_slice(froms), on)?;
        let (best_words, id_words) = (to_usize(best.bytes / 4), to_usize(ids.bytes / 4));
        let (best, ids) = (self.address(best), self.address(ids));
        let exec = &self.exec;
        let gather =
            exec.ops.gather_rows(&word(best, &[best_words]), &word(from, &[count]), &word(sampled, &[count]))?;
        exec.run(gather, on)?;
        exec.run(exec.ops.add(&word(sampled, &[count]), &exec.constants.one(), &word(sampled, &[count]))?, on)?;
        exec.run(
            exec.ops.gather_rows(&exec.constants.id_table(), &word(sampled, &[count]), &word(tokens, &[count]))?,
            on,
        )?;
        let (all, to, tokens) = (words(ids, &[id_words, 1]), word(to, &[count, 1]), words(tokens, &[count, 1]));
        exec.run(exec.ops.scatter_rows(&all, &to, &tokens)?, on)
    }

    fn launch(
        &mut self,
        program: u64,
        io: &Bindings,
        shape: LaunchShape,
        lens: &[u32],
        on: usize,
    ) -> Result<(), AscendError> {
        let (q_lens, kv_lens) = lens.split_at(shape.seqs);
        let results = OutputBuffers {
            logits: self.address(io.logits),
            argmax: self.address(io.argmax),
            status: self.address(io.row_status),
        };
        let batch = Batch {
            token_ids: self.address(io.token_ids),
            positions: self.address(io.positions),
            block_tables: self.address(io.block_tables),
            logit_rows: self.address(io.logit_rows),
            results,
            pool: self.address(io.kv_pool),
            pool_bytes: io.kv_pool.bytes,
            shape,
            q_lens,
            kv_lens,
        };
        // The program was unloaded in the meantime; no caller waits for it.
        let Some(program) = self.programs.get_mut(&program) else { return Ok(()) };
        self.exec.begin_launch(on)?;
        if program.can_replay(&batch, self.capture_max_rows) && program.replay(&mut self.exec, &batch, on)? {
            return Ok(());
        }
        program.launch(&mut self.exec, &batch, on)
    }

    /// Copies whole blocks: one piece for the keys and one for the values of each layer.
    fn copy_blocks(&self, cache: &KvShard, src: Span, dst: Span, pairs: &[u32], on: usize) -> Result<(), AscendError> {
        let piece = cache.block_bytes();
        let place = |pool: Span, layer: usize, side: usize, block: u32| {
            let offset = cache.offset(layer, side, cache.blocks(pool.bytes)) + block as usize * piece;
            Span { offset: pool.offset + offset as u64, bytes: piece as u64, ..pool }
        };
        for pair in pairs.chunks_exact(2) {
            for layer in 0..cache.geometry.layers {
                for side in [0, 1] {
                    self.copy(place(dst, layer, side, pair[1]), place(src, layer, side, pair[0]), on)?;
                }
            }
        }
        Ok(())
    }

    pub(super) fn alloc(&mut self, id: u64, bytes: u64, kind: MemKind) -> Result<(), AscendError> {
        let (context, bytes) = (&self.exec.context, usize::try_from(bytes).unwrap_or(usize::MAX / 2));
        let memory = match kind {
            MemKind::Device => Memory::Device(alloc_zeroed(context, bytes)?),
            MemKind::Pinned => Memory::Pinned(PinnedBuffer::new(context, bytes.max(1))?),
        };
        self.buffers.insert(id, memory);
        Ok(())
    }

    /// Waits until no queued work can use the memory to be freed.
    fn flush(&mut self) {
        // Memory of a device that does not respond is also freed, once none of its work runs.
        if !self.is_lost && self.exec.synchronize().is_err() {
            self.end();
        }
    }

    pub(super) fn free(&mut self, buffer: u64) {
        if self.buffers.contains_key(&buffer) {
            self.flush();
            self.buffers.remove(&buffer);
        }
    }

    pub(super) fn unload(&mut self, program: u64) {
        if self.programs.contains_key(&program) {
            self.flush();
            self.programs.remove(&program);
            self.shrink();
        }
    }

    /// Frees scratch that no program needs any longer.
    pub(super) fn shrink(&mut self) {
        if self.programs.is_empty() && !self.is_lost {
            self.exec.shrink();
        }
    }

    pub(super) fn release_weights(&mut self, set: u64) {
        if self.weights.contains_key(&set) {
            self.flush();
            self.weights.remove(&set);
        }
    }

    pub(super) fn add_weights(&mut self, id: u64, set: WeightSet) {
        self.weights.insert(id, Arc::new(set));
    }

    pub(super) fn weights(&self, id: u64) -> Option<Arc<WeightSet>> {
        self.weights.get(&id).map(Arc::clone)
    }

    /// Returns a weight set that no program uses yet, and the execution context to fill it with.
    pub(super) fn new_weights(&mut self, id: u64) -> Option<(&mut WeightSet, &mut ExecContext)> {
        Arc::get_mut(self.weights.get_mut(&id)?).map(|set| (set, &mut self.exec))
    }

    pub(super) fn add_program(&mut self, id: u64, program: Program) {
        self.programs.insert(id, program);
    }
}

fn to_usize(n: u64) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}
