//! The model on a device, behind [`ModelExecutor`]: stages a batch's buffers, launches the program, reads the results back.
//!
//! Each batch in flight has an [`BatchBuffers`] of its own. What computes (copies of blocks, copies, launches) is queued on one
//! stream, so batches run in the order of their launches, and a block that changes hands is written by its new owner behind
//! everything its old one had in flight. Rows that run a second time after an overflow, and rows of sequences that did so
//! before, run when their batch is collected, behind batches launched since: only for sequences that still hold their
//! blocks, which is why [`ModelExecutor::collect`] is told of those that do not. Dropping the runner waits for what is in flight
//! before any buffer is freed.

use crate::graph::NO_TOKEN;
use crate::num::to_u32;
use crate::runner::RunnerShape;
use std::sync::Arc;

use super::io_buffers::{BatchBuffers, HostStaging, Streams};
use super::sub_batch::{SubBatch, local_row};
use super::{BatchId, ForwardInput, ForwardOutput, LogitRows, ModelExecutor, RowOutcome, SequenceOutcome};
use crate::device::{
    CustomFailure, Device, DeviceError, KvLayout, LaunchArgs, MemKind, OwnedBuffer, OwnedProgram, ProgramId, Span,
};
use crate::graph::{Bucket, Cost, CostRates, RowStatus};
use crate::kv_cache::BlockId;

/// The programs of one model.
#[derive(Debug)]
pub struct Programs {
    /// One a bucket, ascending in its rows; the last has [`RunnerShape::bucket`].
    pub by_bucket: Vec<(Bucket, OwnedProgram)>,
    /// The same model with f32 activations, for sequences that overflowed; none if that is no other program, or not wanted.
    pub f32: Option<OwnedProgram>,
    /// What a batch costs, one for each rank.
    pub rates: Vec<CostRates>,
    /// Whether custom operations are in it.
    pub custom_ops: bool,
}

/// Runs batches of one model on one device.
#[derive(Debug)]
pub struct ModelRunner {
    device: Arc<dyn Device>,
    programs: Programs,
    streams: Streams,
    layout: KvLayout,
    shape: RunnerShape,
    padded_rows: u64,
    /// Batches launched so far; the id of the next one.
    launched_batches: u64,
    pool: OwnedBuffer,
    /// A batch is in the buffers with the index of its id modulo their number.
    batches: Vec<BatchBuffers>,
    staging: HostStaging,
    /// Rows to feed from one set, `(to, from)`.
    copies: Vec<(u32, u32)>,
    /// What the batch gave, in its own order, whichever programs ran its parts.
    host: HostRows,
    outcomes: Vec<SequenceOutcome>,
    /// Custom operations that failed in the batch, by its own rows.
    custom_failures: Vec<CustomFailure>,
    /// What of the batch runs with f32 activations.
    retry: SubBatch,
}

/// Results of a batch on the host.
#[derive(Debug)]
struct HostRows {
    logits: Vec<f32>,
    argmax: Vec<u32>,
    /// Status of each row of logits.
    logit_status: Vec<u8>,
    /// Status of each row of the batch.
    row_status: Vec<u8>,
}

impl ModelRunner {
    /// Reserves every buffer a batch may need.
    pub fn new(
        device: Arc<dyn Device>,
        programs: Programs,
        layout: KvLayout,
        shape: RunnerShape,
    ) -> Result<Self, DeviceError> {
        let Bucket { tokens, logit_rows, .. } = shape.bucket;
        if !programs.by_bucket.last().is_some_and(|(bucket, _)| *bucket == shape.bucket) {
            return Err(DeviceError::Invalid { what: "no program for the runner's largest batch".into() });
        }
        if shape.max_in_flight == 0 {
            return Err(DeviceError::Invalid { what: "max_in_flight is 0, expected at least 1".into() });
        }
        let pool_bytes = (shape.pool_blocks as u64 + layout.reserved_blocks).saturating_mul(layout.bytes_per_block);
        Ok(Self {
            pool: OwnedBuffer::new(&device, pool_bytes, MemKind::Device)?,
            batches: (0..shape.max_in_flight).map(|_| BatchBuffers::new(&device, &shape)).collect::<Result<_, _>>()?,
            staging: HostStaging::new(&shape),
            copies: Vec::with_capacity(shape.max_seqs),
            host: HostRows {
                logits: vec![0.0; logit_rows * shape.vocab_size],
                argmax: vec![0; logit_rows],
                logit_status: vec![0; logit_rows],
                row_status: vec![0; tokens],
            },
            outcomes: Vec::with_capacity(shape.max_seqs),
            custom_failures: Vec::new(),
            retry: SubBatch::default(),
            streams: Streams::new(device.as_ref())?,
            padded_rows: 0,
            launched_batches: 0,
            device,
            programs,
            layout,
            shape,
        })
    }

    /// The sizes it was made for.
    pub const fn shape(&self) -> &RunnerShape {
        &self.shape
    }

    /// The program of its largest batches, as its device names it.
    pub fn program(&self) -> ProgramId {
        self.program_of(self.shape.bucket.tokens).0
    }

    /// The program that runs this many rows, and the rows it runs them as.
    fn program_of(&self, rows: usize) -> (ProgramId, usize) {
        let largest = self.shape.bucket.tokens;
        let fits = |(bucket, _): &&(Bucket, OwnedProgram)| bucket.tokens >= rows;
        let found = self.programs.by_bucket.iter().find(fits).or(self.programs.by_bucket.last());
        found.map_or((ProgramId(0), largest), |(bucket, program)| (program.id(), bucket.tokens))
    }

    fn buffer_index(&self, batch_id: BatchId) -> usize {
        usize::try_from(batch_id.0 % self.batches.len() as u64).unwrap_or(0)
    }

    /// Launches one batch into a set, all of it or the set's part of it, and queues the way out of its results.
    fn launch_batch(&mut self, index: usize) -> Result<(), DeviceError> {
        let rows = self.batches[index].launched_input().tokens.len();
        if rows == 0 {
            return Ok(());
        }
        let (program, bucket_rows) = self.program_of(rows);
        let pool = self.pool.span();
        let Self { device, batches, staging, shape, streams, copies, padded_rows, .. } = self;
        let (device, streams) = (device.as_ref(), *streams);
        let (buffers, input) = (&batches[index], batches[index].launched_input());
        let (io, launch) = buffers.stage(device, streams, staging, input, shape, pool)?;
        for source in batches.iter().filter(|source| source.batch_id.is_some()) {
            copies.clear();
            for deferred in buffers.input.deferred.iter().filter(|deferred| source.batch_id == Some(deferred.batch_id))
            {
                let to = if buffers.is_sub_batch {
                    local_row(&buffers.sub_batch.rows, deferred.row)
                } else {
                    Some(deferred.row)
                };
                let from = source.launched_logit_row(deferred.logit_row);
                // Rows that run when their batch is collected are neither fed nor feed others; `check` has seen to the rest.
                let (Some(to), Some(from)) = (to, from) else { return Err(deferred_and_f32(deferred.row)) };
                copies.push((to, from));
            }
            if let (Some(best), false) = (source.argmax(), copies.is_empty()) {
                device.copy_sampled_tokens(io.token_ids, best, copies, streams.compute)?;
            }
        }
        let args = LaunchArgs { io, shape: launch, q_lens: &input.q_lens, kv_lens: &input.kv_lens };
        device.launch(program, &args, streams.compute)?;
        if device.caps().static_shapes {
            *padded_rows += (bucket_rows - rows) as u64;
        }
        let buffers = &mut batches[index];
        buffers.copy_results_to_host(device, streams, io, shape.vocab_size)?;
        // A device tells of the last launch of a program only, and that may be another one when this is collected.
        if self.programs.custom_ops && self.shape.max_in_flight > 1 {
            buffers.custom_failures.extend(device.custom_failures(program));
        }
        Ok(())
    }

    /// Waits for what was launched into a set, and puts it where the whole batch has it.
    fn read_results(&mut self, index: usize) -> Result<(), DeviceError> {
        let device = self.device.as_ref();
        let (buffers, host, vocab) = (&self.batches[index], &mut self.host, self.shape.vocab_size);
        if !buffers.has_results() {
            return Ok(());
        }
        if buffers.is_sub_batch {
            host.row_status[..buffers.input.tokens.len()].fill(RowStatus::Ok as u8);
            for (at, &row) in buffers.sub_batch.rows.iter().enumerate() {
                buffers.read_status(device, at, &mut host.row_status[row..=row])?;
            }
            for (at, &row) in buffers.sub_batch.logit_rows.iter().enumerate() {
                buffers.read_argmax(device, at, &mut host.argmax[row..=row])?;
            }
        } else {
            buffers.read_status(device, 0, &mut host.row_status[..buffers.input.tokens.len()])?;
            if !buffers.input.logit_rows.is_empty() {
                buffers.read_argmax(device, 0, &mut host.argmax[..buffers.input.logit_rows.len()])?;
            }
        }
        for rows in buffers.logit_runs() {
            if buffers.is_sub_batch {
                for at in rows {
                    let row = buffers.batch_logit_row(at);
                    buffers.read_logits(device, at * vocab, &mut host.logits[row * vocab..][..vocab])?;
                }
            } else {
                let into = &mut host.logits[rows.start * vocab..rows.end * vocab];
                buffers.read_logits(device, rows.start * vocab, into)?;
            }
        }
        // Whoever looks for a row's largest logit and finds none wants to know why.
        for (at, only) in buffers.input.argmax_only.iter().enumerate().filter(|(_, only)| **only) {
            let lost = *only && host.argmax[at] == NO_TOKEN;
            if let (true, Some(from)) = (lost, buffers.launched_logit_row(to_u32(at))) {
                let into = &mut host.logits[at * vocab..][..vocab];
                buffers.read_logits_in_place(device, from as usize * vocab, into)?;
            }
        }
        Ok(())
    }

    /// Runs the rows that the retry names with f32 activations, and puts what they give in its place.
    fn run_retry(&mut self, index: usize) -> Result<(), DeviceError> {
        let Self { device, batches, staging, shape, streams, host, retry, .. } = self;
        let (device, vocab) = (device.as_ref(), shape.vocab_size);
        if retry.input.tokens.is_empty() {
            return Ok(());
        }
        let (io, launch) = batches[index].stage(device, *streams, staging, &retry.input, shape, self.pool.span())?;
        let args = LaunchArgs { io, shape: launch, q_lens: &retry.input.q_lens, kv_lens: &retry.input.kv_lens };
        let program = self.programs.f32.as_ref().map_or(ProgramId(0), OwnedProgram::id);
        device.launch(program, &args, streams.compute)?;
        if device.caps().static_shapes {
            self.padded_rows += (shape.bucket.tokens - launch.tokens) as u64;
        }
        let done = Some(device.record(streams.compute)?);
        let piece = |span: Span, index: usize, bytes: usize| Span {
            offset: span.offset + (index * bytes) as u64,
            bytes: bytes as u64,
            ..span
        };
        for (at, &row) in retry.rows.iter().enumerate() {
            device.read(piece(io.row_status, at, 1), &mut host.row_status[row..=row], done)?;
        }
        for (at, &row) in retry.logit_rows.iter().enumerate() {
            let logits = &mut host.logits[row * vocab..][..vocab];
            device.read(piece(io.logits, at, 4 * vocab), bytemuck::cast_slice_mut(logits), done)?;
            device.read(piece(io.argmax, at, 4), bytemuck::cast_slice_mut(&mut host.argmax[row..=row]), done)?;
        }
        if retry.rows.iter().any(|&row| host.row_status[row] == RowStatus::CustomOpFailed as u8) {
            self.custom_failures.extend(to_batch_rows(device.custom_failures(program), &retry.rows));
        }
        Ok(())
    }

    /// Takes a launched batch to its end.
    fn complete(&mut self, index: usize, stale: &[bool]) -> Result<(), DeviceError> {
        self.outcomes.clear();
        self.custom_failures.clear();
        self.read_results(index)?;
        let input = std::mem::take(&mut self.batches[index].input);
        let finished = self.resolve_rows(index, &input, stale);
        self.batches[index].input = input;
        finished
    }

    fn resolve_rows(&mut self, index: usize, input: &ForwardInput, stale: &[bool]) -> Result<(), DeviceError> {
        let tokens = input.tokens.len();
        let custom_failed = RowStatus::CustomOpFailed as u8;
        if self.host.row_status[..tokens].contains(&custom_failed) {
            if self.shape.max_in_flight == 1 {
                let program = self.program_of(launched_rows(&self.batches[index], input)).0;
                self.batches[index].custom_failures.extend(self.device.custom_failures(program));
            }
            let buffers = &mut self.batches[index];
            let failures = buffers.custom_failures.drain(..);
            if buffers.is_sub_batch {
                self.custom_failures.extend(to_batch_rows(failures, &buffers.sub_batch.rows));
            } else {
                self.custom_failures.extend(failures);
            }
        }
        let bad = |status: &u8| *status != RowStatus::Ok as u8;
        let is_sub_batch = self.batches[index].is_sub_batch;
        if self.programs.f32.is_some() && (is_sub_batch || self.host.row_status[..tokens].iter().any(bad)) {
            self.select_retry_rows(input, stale);
            self.run_retry(index)?;
        }
        if self.host.row_status[..tokens].iter().any(bad) {
            self.report_failures(input, stale);
        }
        for (status, row) in self.host.logit_status.iter_mut().zip(&input.logit_rows) {
            *status = self.host.row_status[*row as usize];
        }
        Ok(())
    }

    /// What has to run with f32 activations: sequences that overflowed earlier, and others from their first bad row on.
    fn select_retry_rows(&mut self, input: &ForwardInput, stale: &[bool]) {
        let Self { retry, outcomes, host, shape, .. } = self;
        let mut first_row = 0;
        retry.select(input, shape.block_size, |index| {
            let (rows, kv_len) = (input.q_lens[index], input.kv_lens[index]);
            let statuses = &host.row_status[first_row..first_row + rows as usize];
            first_row += rows as usize;
            if is_set(stale, index) {
                return None;
            }
            if input.f32_from.get(index).is_some_and(Option::is_some) {
                return Some(0);
            }
            let bad = statuses.iter().position(|status| *status != RowStatus::Ok as u8)?;
            if RowStatus::from_byte(statuses[bad]) == RowStatus::CustomOpFailed {
                return None;
            }
            let offset = to_u32(bad);
            let position = kv_len - rows + offset;
            outcomes.push(SequenceOutcome { sequence: index, position, outcome: RowOutcome::Retried });
            Some(offset)
        });
    }

    /// Tells of each sequence's first row that is still bad.
    fn report_failures(&mut self, input: &ForwardInput, stale: &[bool]) {
        let mut first_row = 0;
        for (sequence, (rows, kv_len)) in input.q_lens.iter().zip(&input.kv_lens).enumerate() {
            let statuses = &self.host.row_status[first_row..first_row + *rows as usize];
            let bad = statuses.iter().position(|status| *status != RowStatus::Ok as u8);
            if let Some(bad) = bad.filter(|_| !is_set(stale, sequence)) {
                let status = RowStatus::from_byte(statuses[bad]);
                let row = first_row + bad;
                let custom = (status == RowStatus::CustomOpFailed).then(|| self.custom_failure(row)).flatten();
                let position = kv_len - rows + to_u32(bad);
                let outcome = RowOutcome::Failed { status, custom };
                self.outcomes.push(SequenceOutcome { sequence, position, outcome });
            }
            first_row += *rows as usize;
        }
    }

    /// What the device said of a custom operation that failed at this row of the batch.
    fn custom_failure(&self, row: usize) -> Option<CustomFailure> {
        self.custom_failures.iter().find(|failure| failure.rows.contains(&row)).cloned()
    }

    /// Lists that belong together agree, so that staging them cannot go wrong; ids and blocks are the device's to check.
    fn check(&self, input: &ForwardInput) -> Result<(), DeviceError> {
        let lens = || input.q_lens.iter().zip(&input.kv_lens);
        let longest = self.shape.max_blocks_per_seq;
        let starts = || lens().map(|(q, kv)| kv.saturating_sub(*q)).zip(&input.f32_from);
        let rules = [
            ("every sequence has both its lengths", input.q_lens.len() == input.kv_lens.len()),
            ("a sequence brings 1 to kv_len rows", lens().all(|(q, kv)| (1..=*kv).contains(q))),
            ("a sequence fits its line of blocks", lens().all(|(_, kv)| self.blocks_of(*kv) <= longest)),
            ("q_lens add up to the tokens", lens().map(|(q, _)| *q as usize).sum::<usize>() == input.tokens.len()),
            (
                "tables hold ceil(kv_len / block_size) blocks a sequence",
                lens().map(|(_, kv)| self.blocks_of(*kv)).sum::<usize>() == input.tables.len(),
            ),
            ("logit rows ascend", input.logit_rows.is_sorted_by(|a, b| a < b)),
            (
                "logit rows are rows of the batch",
                input.logit_rows.last().is_none_or(|&row| (row as usize) < input.tokens.len()),
            ),
            (
                "argmax_only has nothing or a flag a row of logits",
                input.argmax_only.is_empty() || input.argmax_only.len() == input.logit_rows.len(),
            ),
            (
                "fed rows ascend, are rows of the batch, and take their tokens from rows of logits in flight",
                input.deferred.is_sorted_by(|a, b| a.row < b.row)
                    && input.deferred.last().is_none_or(|deferred| (deferred.row as usize) < input.tokens.len())
                    && input.deferred.iter().all(|deferred| self.has_logit_row(deferred.batch_id, deferred.logit_row)),
            ),
            (
                "f32_from has nothing or a position a sequence, none behind its first row",
                input.f32_from.is_empty()
                    || (input.f32_from.len() == input.q_lens.len()
                        && starts().all(|(start, from)| from.is_none_or(|from| from <= start))),
            ),
        ];
        match rules.iter().find(|(_, holds)| !holds) {
            Some((rule, _)) => Err(DeviceError::Invalid { what: format!("batch: broken rule: {rule}") }),
            None => Ok(()),
        }
    }

    fn blocks_of(&self, kv_len: u32) -> usize {
        (kv_len as usize).div_ceil(self.shape.block_size)
    }

    /// Whether a batch in flight has this row of logits.
    fn has_logit_row(&self, batch_id: BatchId, logit_row: u32) -> bool {
        let buffers = self.batches.iter().find(|buffers| buffers.batch_id == Some(batch_id));
        buffers.is_some_and(|buffers| buffers.launched_logit_row(logit_row).is_some())
    }
}

/// The rows that are the main program's own.
fn launched_rows(buffers: &BatchBuffers, input: &ForwardInput) -> usize {
    if buffers.is_sub_batch { buffers.sub_batch.input.tokens.len() } else { input.tokens.len() }
}

/// Failures by the rows of the whole batch. A call has the rows of one sequence, which stand together there as well.
fn to_batch_rows(
    failures: impl IntoIterator<Item = CustomFailure>,
    rows: &[usize],
) -> impl Iterator<Item = CustomFailure> {
    failures.into_iter().map(|failure| {
        let start = rows.get(failure.rows.start).copied().unwrap_or(usize::MAX);
        CustomFailure { rows: start..start.saturating_add(failure.rows.len()), ..failure }
    })
}

fn is_set(flags: &[bool], index: usize) -> bool {
    flags.get(index).is_some_and(|flag| *flag)
}

fn deferred_and_f32(row: u32) -> DeviceError {
    DeviceError::Invalid {
        what: format!("batch: row {row} is fed and runs with f32 activations, or is fed by one that does"),
    }
}

/// What is queued names buffers: they are freed when it has run.
impl Drop for ModelRunner {
    fn drop(&mut self) {
        self.streams.drain(self.device.as_ref());
    }
}

impl ModelExecutor for ModelRunner {
    fn launch(&mut self, input: &ForwardInput) -> Result<BatchId, DeviceError> {
        let rows = input.logit_rows.len();
        let Bucket { tokens, logit_rows, .. } = self.shape.bucket;
        if input.tokens.len() > tokens || rows > logit_rows || input.q_lens.len() > self.shape.max_seqs {
            let got =
                format!("{} rows, {rows} of them with logits, {} sequences", input.tokens.len(), input.q_lens.len());
            let most = format!("{tokens} rows, {logit_rows} with logits, {} sequences", self.shape.max_seqs);
            return Err(DeviceError::Invalid { what: format!("batch of {got}; the runner was made for {most}") });
        }
        self.check(input)?;
        let batch_id = BatchId(self.launched_batches);
        let index = self.buffer_index(batch_id);
        let buffers = &mut self.batches[index];
        if buffers.batch_id.is_some() {
            let what = format!("{} batches are in flight, the runner was made for no more", self.shape.max_in_flight);
            return Err(DeviceError::Invalid { what });
        }
        buffers.begin(input);
        if self.programs.f32.is_some() && input.f32_from.iter().any(Option::is_some) {
            buffers.is_sub_batch = true;
            let stays = |index: usize| input.f32_from[index].is_none().then_some(0);
            buffers.sub_batch.select(input, self.shape.block_size, stays);
        }
        if let Err(error) = self.launch_batch(index) {
            // Some of it may be queued, and names the set's buffers, which the next batch is staged in.
            self.streams.drain(self.device.as_ref());
            return Err(error);
        }
        self.batches[index].batch_id = Some(batch_id);
        self.launched_batches += 1;
        Ok(batch_id)
    }

    fn collect(&mut self, batch_id: BatchId, stale: &[bool]) -> Result<ForwardOutput<'_>, DeviceError> {
        let index = self.buffer_index(batch_id);
        if self.batches[index].batch_id != Some(batch_id) {
            return Err(DeviceError::Invalid { what: format!("{batch_id:?} is not in flight") });
        }
        let finished = self.complete(index, stale);
        self.batches[index].batch_id = None;
        finished?;
        let (rows, vocab) = (self.batches[index].input.logit_rows.len(), self.shape.vocab_size);
        let logits = LogitRows {
            logits: &self.host.logits[..rows * vocab],
            vocab,
            status: &self.host.logit_status[..rows],
            argmax: &self.host.argmax[..rows],
        };
        Ok(ForwardOutput { logits, outcomes: &self.outcomes })
    }

    fn max_in_flight(&self) -> u32 {
        to_u32(self.shape.max_in_flight)
    }

    fn copy_blocks(&mut self, pairs: &[(BlockId, BlockId)]) -> Result<(), DeviceError> {
        let pool = self.pool.span();
        self.device.copy_blocks(&self.layout, pool, pool, pairs, self.streams.compute)
    }

    fn vocab_size(&self) -> usize {
        self.shape.vocab_size
    }

    fn overflows(&self) -> Vec<(&'static str, u64)> {
        let mut sums: Vec<(&'static str, u64)> = Vec::new();
        let programs = self.programs.by_bucket.iter().map(|(_, program)| program).chain(&self.programs.f32);
        for (op, count) in programs.flat_map(|program| self.device.overflows(program.id())) {
            match sums.iter_mut().find(|(known, _)| *known == op) {
                Some((_, sum)) => *sum += count,
                None => sums.push((op, count)),
            }
        }
        sums
    }

    fn padded_rows(&self) -> u64 {
        self.padded_rows
    }

    fn cost(&self, input: &ForwardInput) -> Cost {
        let of_rank = |rates: &CostRates| rates.cost(&input.q_lens, &input.kv_lens, input.logit_rows.len() as u64);
        self.programs.rates.iter().map(of_rank).sum()
    }
}
