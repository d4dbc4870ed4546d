//! Device buffers and host state of one in-flight batch.
//!
//! ```text
//!   prepare stream ─ write ids, positions, tables ─┐ staged
//!   compute stream ───────────────────────── wait ─┴─ copy sampled tokens ─ launch ─┐ launched
//!   output stream  ───────────────────────────────────────────────────────── wait ──┴─ copy status, argmax, logits ─┐ done
//!   host           ────────────────────────────────────────────────────────────────────────────────────────── read ─┘
//! ```
//! The buffers belong to their batch from its launch until it is collected. By then the host has waited for `done`, so
//! every operation that uses them has ended, with one exception: copies of sampled tokens for later batches read
//! `argmax`. These copies are queued on the compute stream, and so is the next launch that writes the buffers, after
//! them.
//!
//! On devices with unified memory, nothing is copied to the host: the host reads results in place once `launched` is
//! reached.

use std::ops::Range;
use std::sync::Arc;

use super::shape::RunnerShape;
use super::sub_batch::{SubBatch, consecutive_runs};
use super::{BatchId, ForwardInput};
use crate::device::{
    Bindings, CustomFailure, Device, DeviceError, EventId, LaunchShape, MemKind, OwnedBuffer, Span, StreamId,
};
use crate::graph::Bucket;

/// Streams of a runner.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Streams {
    pub prepare: StreamId,
    pub compute: StreamId,
    pub output: StreamId,
}

impl Streams {
    pub fn new(device: &dyn Device) -> Result<Self, DeviceError> {
        Ok(Self { prepare: device.stream()?, compute: device.stream()?, output: device.stream()? })
    }

    /// Waits until all three streams are idle. Errors are ignored: work that failed has ended too.
    pub fn drain(&self, device: &dyn Device) {
        for stream in [self.prepare, self.compute, self.output] {
            if let Ok(end) = device.record(stream) {
                let _ = device.wait_host(end);
            }
        }
    }
}

/// Host buffers that receive the results of a launch.
#[derive(Debug)]
struct HostResults {
    logits: OwnedBuffer,
    argmax: OwnedBuffer,
    row_status: OwnedBuffer,
}

/// Results of a launch: their locations, and the events after which they can be read.
#[derive(Clone, Copy, Debug)]
struct LaunchedBatch {
    io: Bindings,
    /// Status, argmax and logits, in the buffers that the host reads after `done_event`.
    results: [Span; 3],
    launched_event: EventId,
    done_event: EventId,
}

/// Buffers of one in-flight batch; the diagram in the module documentation shows the order of their use.
#[derive(Debug)]
pub(crate) struct BatchBuffers {
    token_ids: OwnedBuffer,
    positions: OwnedBuffer,
    block_tables: OwnedBuffer,
    logit_rows: OwnedBuffer,
    logits: OwnedBuffer,
    argmax: OwnedBuffer,
    row_status: OwnedBuffer,
    host_results: Option<HostResults>,
    /// Id of the in-flight batch that owns the buffers.
    pub batch_id: Option<BatchId>,
    /// Input of that batch.
    pub input: ForwardInput,
    /// Rows of that batch that were launched.
    ///
    /// The others run in the f32 fallback plan when the batch is collected.
    pub launched_rows: SubBatch,
    /// Custom operations that failed in the launch, with their local rows.
    pub custom_failures: Vec<CustomFailure>,
    /// `None` if no row was launched.
    launched: Option<LaunchedBatch>,
}

/// Lists of one launch in the layout that the device expects; all launches reuse them.
#[derive(Debug)]
pub(crate) struct HostStaging {
    tokens: Vec<u32>,
    positions: Vec<u32>,
    tables: Vec<u32>,
    logit_rows: Vec<u32>,
    pub q_lens: Vec<u32>,
    pub kv_lens: Vec<u32>,
}

impl HostStaging {
    pub fn new(shape: &RunnerShape) -> Self {
        Self {
            tokens: Vec::with_capacity(shape.bucket.tokens),
            positions: Vec::with_capacity(shape.bucket.tokens),
            tables: Vec::with_capacity(shape.max_seqs * shape.max_blocks_per_seq),
            logit_rows: Vec::with_capacity(shape.bucket.logit_rows),
            q_lens: Vec::with_capacity(shape.max_seqs),
            kv_lens: Vec::with_capacity(shape.max_seqs),
        }
    }

    /// Gathers the selected rows of a batch and pads their block tables to equal length.
    fn gather(&mut self, batch: &ForwardInput, selected: &SubBatch, block_size: usize) -> LaunchShape {
        let Self { tokens, positions, tables, logit_rows, q_lens, kv_lens } = self;
        for list in [&mut *tokens, positions, tables, logit_rows, q_lens, kv_lens] {
            list.clear();
        }
        for (rows, first) in consecutive_runs(&selected.rows) {
            tokens.extend_from_slice(&batch.tokens[first..first + rows.len()]);
        }
        for &(index, skipped) in &selected.sequences {
            let (rows, kv_len) = (batch.q_lens[index] - skipped, batch.kv_lens[index]);
            q_lens.push(rows);
            kv_lens.push(kv_len);
            positions.extend(kv_len - rows..kv_len);
        }
        let blocks_of = |kv_len: u32| (kv_len as usize).div_ceil(block_size);
        let table_stride = kv_lens.iter().map(|kv_len| blocks_of(*kv_len)).max().unwrap_or(0);
        let (mut next_sequence, mut first_block) = (0, 0);
        for &(index, _) in &selected.sequences {
            first_block += batch.kv_lens[next_sequence..index].iter().map(|kv_len| blocks_of(*kv_len)).sum::<usize>();
            let blocks = blocks_of(batch.kv_lens[index]);
            tables.extend(batch.tables[first_block..first_block + blocks].iter().map(|block| block.0));
            tables.resize(tables.len().next_multiple_of(table_stride), 0);
            (next_sequence, first_block) = (index + 1, first_block + blocks);
        }
        logit_rows.extend(selected.logit_rows.iter().filter_map(|&at| selected.local_row(batch.logit_rows[at])));
        LaunchShape { tokens: tokens.len(), seqs: q_lens.len(), logit_rows: logit_rows.len(), table_stride }
    }
}

impl BatchBuffers {
    /// Allocates the buffers of the largest batch.
    pub fn new(device: &Arc<dyn Device>, shape: &RunnerShape) -> Result<Self, DeviceError> {
        let buffer = |elements: usize, bytes: u64, kind| OwnedBuffer::new(device, elements as u64 * bytes, kind);
        let on_device = |elements, bytes| buffer(elements, bytes, MemKind::Device);
        let pinned = |elements, bytes| buffer(elements, bytes, MemKind::Pinned);
        let Bucket { tokens, logit_rows, .. } = shape.bucket;
        let logits = logit_rows * shape.vocab_size;
        let host_results = if device.caps().unified_memory {
            None
        } else {
            let (logits, argmax, row_status) = (pinned(logits, 4)?, pinned(logit_rows, 4)?, pinned(tokens, 1)?);
            Some(HostResults { logits, argmax, row_status })
        };
        Ok(Self {
            token_ids: on_device(tokens, 4)?,
            positions: on_device(tokens, 4)?,
            block_tables: on_device(shape.max_seqs * shape.max_blocks_per_seq, 4)?,
            logit_rows: on_device(logit_rows, 4)?,
            logits: on_device(logits, 4)?,
            argmax: on_device(logit_rows, 4)?,
            row_status: on_device(tokens, 1)?,
            host_results,
            batch_id: None,
            input: ForwardInput::default(),
            launched_rows: SubBatch::with_capacity(tokens, shape.max_seqs, logit_rows),
            custom_failures: Vec::new(),
            launched: None,
        })
    }

    /// Stores a batch of which no row is launched yet.
    pub fn begin(&mut self, input: ForwardInput) {
        self.input = input;
        self.custom_failures.clear();
        self.launched = None;
    }

    /// Writes the selected rows of a batch to the device.
    ///
    /// Later work on the compute stream waits for these writes.
    pub fn stage(
        &self,
        device: &dyn Device,
        streams: Streams,
        staging: &mut HostStaging,
        selected: &SubBatch,
        shape: &RunnerShape,
        kv_pool: Span,
    ) -> Result<(Bindings, LaunchShape), DeviceError> {
        let launch = staging.gather(&self.input, selected, shape.block_size);
        let LaunchShape { tokens, seqs, logit_rows, table_stride } = launch;
        let words = |buffer: &OwnedBuffer, n: usize| buffer.prefix(4 * n as u64);
        let io = Bindings {
            token_ids: words(&self.token_ids, tokens),
            positions: words(&self.positions, tokens),
            block_tables: words(&self.block_tables, seqs * table_stride),
            logit_rows: words(&self.logit_rows, logit_rows),
            logits: words(&self.logits, logit_rows * shape.vocab_size),
            argmax: words(&self.argmax, logit_rows),
            row_status: self.row_status.prefix(tokens as u64),
            kv_pool,
        };
        let write = |span: Span, data: &[u32]| device.write(span, bytemuck::cast_slice(data), streams.prepare);
        write(io.token_ids, &staging.tokens)?;
        write(io.positions, &staging.positions)?;
        write(io.block_tables, &staging.tables)?;
        write(io.logit_rows, &staging.logit_rows)?;
        let staged = device.record(streams.prepare)?;
        device.wait(streams.compute, staged)?;
        Ok((io, launch))
    }

    /// Queues the copies of a launch's results to host memory.
    pub fn copy_results_to_host(
        &mut self,
        device: &dyn Device,
        streams: Streams,
        io: Bindings,
        vocab_size: usize,
    ) -> Result<(), DeviceError> {
        let launched_event = device.record(streams.compute)?;
        let results = [io.row_status, io.argmax, io.logits];
        let Some(HostResults { logits, argmax, row_status }) = &self.host_results else {
            self.launched = Some(LaunchedBatch { io, results, launched_event, done_event: launched_event });
            return Ok(());
        };
        device.wait(streams.output, launched_event)?;
        let out =
            [row_status.prefix(io.row_status.bytes), argmax.prefix(io.argmax.bytes), logits.prefix(io.logits.bytes)];
        device.copy(out[0], io.row_status, streams.output)?;
        if io.argmax.bytes > 0 {
            device.copy(out[1], io.argmax, streams.output)?;
        }
        for (rows, _) in self.logit_runs() {
            device.copy(row_span(out[2], &rows, vocab_size), row_span(io.logits, &rows, vocab_size), streams.output)?;
        }
        let done_event = device.record(streams.output)?;
        self.launched = Some(LaunchedBatch { io, results: out, launched_event, done_event });
        Ok(())
    }

    /// Returns the launched rows whose complete logits are requested, as runs of consecutive rows.
    ///
    /// Each run is a range of local logit rows, with the batch's index of its first logit row.
    pub fn logit_runs(&self) -> impl Iterator<Item = (Range<usize>, usize)> {
        let rows = self.launched_rows.logit_rows.as_slice();
        let requested = |row: usize| !self.input.argmax_only.get(row).is_some_and(|only| *only);
        let mut next = 0;
        std::iter::from_fn(move || {
            let start = (next..rows.len()).find(|&at| requested(rows[at]))?;
            let first = rows[start];
            let len = rows[start..].iter().zip(first..).take_while(|&(&row, at)| row == at && requested(row)).count();
            next = start + len;
            Some((start..next, first))
        })
    }

    /// Returns the argmax of all launched logit rows, on the device.
    pub fn argmax(&self) -> Option<Span> {
        self.launched.map(|launched| launched.io.argmax)
    }

    /// Returns whether any row was launched.
    pub fn has_results(&self) -> bool {
        self.launched.is_some()
    }

    /// Reads the status of local rows, starting at `first`.
    pub fn read_status(&self, device: &dyn Device, first: usize, into: &mut [u8]) -> Result<(), DeviceError> {
        let Some(launched) = &self.launched else { return Ok(()) };
        let span = Span { offset: first as u64, bytes: into.len() as u64, ..launched.results[0] };
        device.read(span, into, Some(launched.done_event))
    }

    /// Reads the argmax of local logit rows, starting at `first`.
    pub fn read_argmax(&self, device: &dyn Device, first: usize, into: &mut [u32]) -> Result<(), DeviceError> {
        let Some(launched) = &self.launched else { return Ok(()) };
        let span = Span { offset: 4 * first as u64, bytes: 4 * into.len() as u64, ..launched.results[1] };
        device.read(span, bytemuck::cast_slice_mut(into), Some(launched.done_event))
    }

    /// Reads logits that were copied to the host, starting at element `first`.
    pub fn read_logits(&self, device: &dyn Device, first: usize, into: &mut [f32]) -> Result<(), DeviceError> {
        let Some(launched) = &self.launched else { return Ok(()) };
        let span = Span { offset: 4 * first as u64, bytes: 4 * into.len() as u64, ..launched.results[2] };
        device.read(span, bytemuck::cast_slice_mut(into), Some(launched.done_event))
    }

    /// Reads logits that were not copied to the host, starting at element `first`.
    pub fn read_logits_in_place(&self, device: &dyn Device, first: usize, into: &mut [f32]) -> Result<(), DeviceError> {
        let Some(launched) = &self.launched else { return Ok(()) };
        let span = Span { offset: 4 * first as u64, bytes: 4 * into.len() as u64, ..launched.io.logits };
        device.read(span, bytemuck::cast_slice_mut(into), Some(launched.launched_event))
    }
}

/// Returns the part of a span of logits that holds `rows`.
fn row_span(span: Span, rows: &Range<usize>, vocab_size: usize) -> Span {
    let bytes = |rows: usize| (4 * rows * vocab_size) as u64;
    Span { offset: span.offset + bytes(rows.start), bytes: bytes(rows.len()), ..span }
}
