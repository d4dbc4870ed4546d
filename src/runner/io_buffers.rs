//! The buffers of one batch in flight, and what of it has to be kept until it is collected.
//!
//! ```text
//!   prepare  ─ write ids, positions, tables ─┐ staged
//!   compute  ──────────────────── wait ──────┴─ feed ─ launch ─┐ launched
//!   output   ──────────────────────────────────────── wait ────┴─ copy status, argmax, logits ─┐ done
//!   host     ────────────────────────────────────────────────────────────── read ────────────┘
//! ```
//! A set belongs to its batch from the launch until the batch is collected. Then the host has waited for `done`, so all work
//! that names the set's buffers has ended, except feeds of later batches that read `best`: these stand before their own
//! launches on the compute stream, and the next launch into this set behind them.
//!
//! Where the device's memory is the host's there is no copying out: results are read in place once `launched` is reached.

use std::sync::Arc;

use super::shape::RunnerShape;
use super::sub_batch::{SubBatch, local_row};
use super::{BatchId, ForwardInput};
use crate::device::{
    Bindings, CustomFailure, Device, DeviceError, EventId, LaunchShape, MemKind, OwnedBuffer, Span, StreamId,
};
use crate::graph::Bucket;

/// The queues of a runner.
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

    /// Waits until nothing is queued on any of them. What fails has stopped running, which is all that is asked here.
    pub fn drain(&self, device: &dyn Device) {
        for stream in [self.prepare, self.compute, self.output] {
            if let Ok(end) = device.record(stream) {
                let _ = device.wait_host(end);
            }
        }
    }
}

/// Host memory that results are copied to behind the launch.
#[derive(Debug)]
struct HostResults {
    logits: OwnedBuffer,
    argmax: OwnedBuffer,
    row_status: OwnedBuffer,
}

/// What a launch queued.
#[derive(Clone, Copy, Debug)]
struct LaunchedBatch {
    io: Bindings,
    /// Status, best and logits where the host finds them once `done` is reached.
    results: [Span; 3],
    launched_event: EventId,
    done_event: EventId,
}

/// See the head of this file.
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
    /// The batch the set belongs to.
    pub batch_id: Option<BatchId>,
    /// The batch as it was launched.
    pub input: ForwardInput,
    /// What of it ran, if not all of it did.
    pub sub_batch: SubBatch,
    pub is_sub_batch: bool,
    /// Custom operations that failed in the launch.
    pub custom_failures: Vec<CustomFailure>,
    /// Nothing if no row had to run yet.
    launched: Option<LaunchedBatch>,
}

/// Lists that a launch is staged from, used again.
#[derive(Debug)]
pub(crate) struct HostStaging {
    positions: Vec<u32>,
    tables: Vec<u32>,
}

impl HostStaging {
    pub fn new(shape: &RunnerShape) -> Self {
        Self {
            positions: Vec::with_capacity(shape.bucket.tokens),
            tables: Vec::with_capacity(shape.max_seqs * shape.max_blocks_per_seq),
        }
    }

    /// Lays the tables out in lines of equal length; that length.
    fn fill(&mut self, input: &ForwardInput, block_size: usize) -> usize {
        self.positions.clear();
        for (q, kv) in input.q_lens.iter().zip(&input.kv_lens) {
            self.positions.extend(kv - q..*kv);
        }
        let blocks_of = |kv_len: u32| (kv_len as usize).div_ceil(block_size);
        let stride = input.kv_lens.iter().map(|kv| blocks_of(*kv)).max().unwrap_or(0);
        self.tables.clear();
        let mut tables = input.tables.as_slice();
        for kv in &input.kv_lens {
            let (table, rest) = tables.split_at(blocks_of(*kv));
            tables = rest;
            self.tables.extend(table.iter().map(|block| block.0));
            self.tables.resize(self.tables.len().next_multiple_of(stride), 0);
        }
        stride
    }
}

impl BatchBuffers {
    /// Reserves the buffers of the largest batch.
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
            input: ForwardInput::with_capacity(tokens, shape.max_seqs, shape.most_table_blocks(), logit_rows),
            sub_batch: SubBatch::default(),
            is_sub_batch: false,
            custom_failures: Vec::new(),
            launched: None,
        })
    }

    /// Makes the set the batch's own.
    pub fn begin(&mut self, input: &ForwardInput) {
        self.input.copy_from(input);
        self.is_sub_batch = false;
        self.custom_failures.clear();
        self.launched = None;
    }

    /// Writes a batch, and orders what is computed from now on behind that.
    pub fn stage(
        &self,
        device: &dyn Device,
        streams: Streams,
        staging: &mut HostStaging,
        input: &ForwardInput,
        shape: &RunnerShape,
        kv_pool: Span,
    ) -> Result<(Bindings, LaunchShape), DeviceError> {
        let table_stride = staging.fill(input, shape.block_size);
        let (tokens, seqs, logit_rows) = (input.tokens.len(), input.q_lens.len(), input.logit_rows.len());
        let launch = LaunchShape { tokens, seqs, logit_rows, table_stride };
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
        write(io.token_ids, &input.tokens)?;
        write(io.positions, &staging.positions)?;
        write(io.block_tables, &staging.tables)?;
        write(io.logit_rows, &input.logit_rows)?;
        let staged = device.record(streams.prepare)?;
        device.wait(streams.compute, staged)?;
        Ok((io, launch))
    }

    /// Queues the way out of what was just launched into the set.
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
        for rows in self.logit_runs() {
            device.copy(row_span(out[2], &rows, vocab_size), row_span(io.logits, &rows, vocab_size), streams.output)?;
        }
        let done_event = device.record(streams.output)?;
        self.launched = Some(LaunchedBatch { io, results: out, launched_event, done_event });
        Ok(())
    }

    /// The batch's rows of logits of which more than the best is wanted, in runs.
    pub fn logit_runs(&self) -> impl Iterator<Item = std::ops::Range<usize>> {
        let wanted = |row: &usize| !self.input.argmax_only.get(self.batch_logit_row(*row)).is_some_and(|only| *only);
        let rows = self.launched_input().logit_rows.len();
        let mut next = 0;
        std::iter::from_fn(move || {
            let start = (next..rows).find(wanted)?;
            let end = (start..rows).find(|row| !wanted(row)).unwrap_or(rows);
            next = end;
            Some(start..end)
        })
    }

    /// What of the batch is launched.
    pub fn launched_input(&self) -> &ForwardInput {
        if self.is_sub_batch { &self.sub_batch.input } else { &self.input }
    }

    /// Which of the batch's rows of logits stands at this place of those launched.
    pub fn batch_logit_row(&self, launched: usize) -> usize {
        if self.is_sub_batch {
            self.sub_batch.logit_rows.get(launched).copied().unwrap_or(usize::MAX)
        } else {
            launched
        }
    }

    /// Where one of the batch's rows of logits stands among those launched, if it was.
    pub fn launched_logit_row(&self, whole: u32) -> Option<u32> {
        if self.is_sub_batch {
            local_row(&self.sub_batch.logit_rows, whole)
        } else {
            ((whole as usize) < self.input.logit_rows.len()).then_some(whole)
        }
    }

    /// Where the drawn tokens are.
    pub fn argmax(&self) -> Option<Span> {
        self.launched.map(|launched| launched.io.argmax)
    }

    /// Whether anything was launched.
    pub fn has_results(&self) -> bool {
        self.launched.is_some()
    }

    /// Reads the status of the rows launched from `first` on.
    pub fn read_status(&self, device: &dyn Device, first: usize, into: &mut [u8]) -> Result<(), DeviceError> {
        let Some(launched) = &self.launched else { return Ok(()) };
        let span = Span { offset: first as u64, bytes: into.len() as u64, ..launched.results[0] };
        device.read(span, into, Some(launched.done_event))
    }

    /// Reads the best of the rows of logits launched from `first` on.
    pub fn read_argmax(&self, device: &dyn Device, first: usize, into: &mut [u32]) -> Result<(), DeviceError> {
        let Some(launched) = &self.launched else { return Ok(()) };
        let span = Span { offset: 4 * first as u64, bytes: 4 * into.len() as u64, ..launched.results[1] };
        device.read(span, bytemuck::cast_slice_mut(into), Some(launched.done_event))
    }

    /// Reads rows of logits that have been brought out.
    pub fn read_logits(&self, device: &dyn Device, first: usize, into: &mut [f32]) -> Result<(), DeviceError> {
        let Some(launched) = &self.launched else { return Ok(()) };
        let span = Span { offset: 4 * first as u64, bytes: 4 * into.len() as u64, ..launched.results[2] };
        device.read(span, bytemuck::cast_slice_mut(into), Some(launched.done_event))
    }

    /// Reads logits that were left where they are.
    pub fn read_logits_in_place(&self, device: &dyn Device, first: usize, into: &mut [f32]) -> Result<(), DeviceError> {
        let Some(launched) = &self.launched else { return Ok(()) };
        let span = Span { offset: 4 * first as u64, bytes: 4 * into.len() as u64, ..launched.io.logits };
        device.read(span, bytemuck::cast_slice_mut(into), Some(launched.launched_event))
    }
}

/// Some rows of a span of logits.
fn row_span(span: Span, rows: &std::ops::Range<usize>, vocab_size: usize) -> Span {
    let bytes = |rows: usize| (4 * rows * vocab_size) as u64;
    Span { offset: span.offset + bytes(rows.start), bytes: bytes(rows.len()), ..span }
}
