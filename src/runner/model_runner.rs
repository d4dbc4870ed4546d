//! [`ModelExecutor`] for a model on a device: stages the buffers of a batch, launches the program, reads the results.
//!
//! Each in-flight batch has [`BatchBuffers`] of its own. All work that computes (copies of blocks, copies of sampled
//! tokens, launches) is queued on one stream, so batches run in the order of their launches. When a block changes its
//! owner, the new owner's writes therefore run after all in-flight work of the old owner.
//!
//! Some rows run only when their batch is collected, after batches that were launched since: rows that run a second
//! time after an overflow, and rows of sequences that did so before. This is correct only for sequences that still hold
//! their blocks, so [`ModelExecutor::collect`] receives the other sequences as stale.
//!
//! Dropping the runner waits for all in-flight work before any buffer is freed.

use crate::graph::NO_TOKEN;
use crate::num::to_u32;
use crate::runner::RunnerShape;
use std::sync::Arc;

use super::io_buffers::{BatchBuffers, HostStaging, Streams};
use super::sub_batch::{SubBatch, consecutive_runs};
use super::{BatchId, ForwardInput, ForwardOutput, LogitRows, ModelExecutor, RowOutcome, SequenceOutcome};
use crate::device::{
    CustomFailure, Device, DeviceError, KvLayout, LaunchArgs, MemKind, OwnedBuffer, OwnedProgram, ProgramId, Span,
};
use crate::graph::{Bucket, Cost, CostRates, RowStatus};
use crate::kv_cache::BlockId;
use crate::settings::with_methods;

/// Programs of one model.
#[derive(Debug)]
#[non_exhaustive]
pub struct Programs {
    /// One program per bucket, by ascending number of rows; the last bucket is [`RunnerShape::bucket`].
    pub by_bucket: Vec<(Bucket, OwnedProgram)>,
    /// Program with f32 activations for sequences that overflowed; `None` if the f32 fallback is not needed or not
    /// enabled.
    pub f32: Option<OwnedProgram>,
    /// Cost rates of a batch, one per rank.
    pub rates: Vec<CostRates>,
    /// Whether the programs contain custom operations.
    pub custom_ops: bool,
}

impl Programs {
    /// Creates programs without an f32 fallback and without custom operations.
    ///
    /// The buckets must ascend in their rows.
    pub fn new(by_bucket: Vec<(Bucket, OwnedProgram)>, rates: Vec<CostRates>) -> Self {
        Self { by_bucket, f32: None, rates, custom_ops: false }
    }

    with_methods! {
        option { f32 with_f32: OwnedProgram }
        value { custom_ops with_custom_ops: bool }
    }
}

/// [`ModelExecutor`] that runs the batches of one model on one device.
#[derive(Debug)]
pub struct ModelRunner {
    device: Arc<dyn Device>,
    programs: Programs,
    streams: Streams,
    layout: KvLayout,
    shape: RunnerShape,
    padded_rows: u64,
    /// Number of batches launched so far; the id of the next batch.
    launched_batches: u64,
    pool: OwnedBuffer,
    /// Buffers of the in-flight batches; a batch uses the buffers at its id modulo the number of buffers.
    batches: Vec<BatchBuffers>,
    staging: HostStaging,
    /// Deferred tokens to copy from one batch, as `(to, from)`.
    copies: Vec<(u32, u32)>,
    /// Results of the batch in its own order, independent of the programs that ran its parts.
    host: HostRows,
    outcomes: Vec<SequenceOutcome>,
    /// Custom operations that failed in the batch, with its own rows.
    custom_failures: Vec<CustomFailure>,
    /// Rows of the batch that run in the f32 fallback plan.
    retry: SubBatch,
}

/// Results of a batch on the host.
#[derive(Debug)]
struct HostRows {
    logits: Vec<f32>,
    argmax: Vec<u32>,
    /// Status of each logit row.
    logit_status: Vec<u8>,
    /// Status of each row of the batch.
    row_status: Vec<u8>,
}

impl ModelRunner {
    /// Creates a runner and allocates every buffer that a batch may need.
    ///
    /// # Errors
    /// [`DeviceError::Invalid`] if the last program is not one for [`RunnerShape::bucket`] or `max_in_flight` is 0; any
    /// other [`DeviceError`] if the device cannot allocate the buffers or create the streams.
    pub fn new(
        device: Arc<dyn Device>,
        programs: Programs,
        layout: KvLayout,
        shape: RunnerShape,
    ) -> Result<Self, DeviceError> {
        let Bucket { tokens, logit_rows, .. } = shape.bucket;
        if !programs.by_bucket.last().is_some_and(|(bucket, _)| *bucket == shape.bucket) {
            let what = "the last program is not one for the bucket of the runner's shape".into();
            return Err(DeviceError::Invalid { what });
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
            retry: SubBatch::with_capacity(tokens, shape.max_seqs, logit_rows),
            streams: Streams::new(device.as_ref())?,
            padded_rows: 0,
            launched_batches: 0,
            device,
            programs,
            layout,
            shape,
        })
    }

    /// Returns the sizes for which the runner was created.
    pub const fn shape(&self) -> &RunnerShape {
        &self.shape
    }

    /// Returns the device's id of the program for the largest batches.
    pub fn program(&self) -> ProgramId {
        self.program_of(self.shape.bucket.tokens).0
    }

    /// Returns the program for this number of rows, and the number of rows of its bucket.
    fn program_of(&self, rows: usize) -> (ProgramId, usize) {
        let largest = self.shape.bucket.tokens;
        let fits = |(bucket, _): &&(Bucket, OwnedProgram)| bucket.tokens >= rows;
        let found = self.programs.by_bucket.iter().find(fits).or(self.programs.by_bucket.last());
        found.map_or((ProgramId(0), largest), |(bucket, program)| (program.id(), bucket.tokens))
    }

    fn buffer_index(&self, batch_id: BatchId) -> usize {
        usize::try_from(batch_id.0 % self.batches.len() as u64).unwrap_or(0)
    }

    /// Launches the selected rows of the batch in these buffers.
    ///
    /// Also queues the copies of the results to the host.
    fn launch_batch(&mut self, index: usize) -> Result<(), DeviceError> {
        let rows = self.batches[index].launched_rows.rows.len();
        if rows == 0 {
            return Ok(());
        }
        let (program, bucket_rows) = self.program_of(rows);
        let pool = self.pool.span();
        let Self { device, batches, staging, shape, streams, copies, padded_rows, .. } = self;
        let (device, streams, buffers) = (device.as_ref(), *streams, &batches[index]);
        let (io, launch) = buffers.stage(device, streams, staging, &buffers.launched_rows, shape, pool)?;
        for source in batches.iter().filter(|source| source.batch_id.is_some()) {
            copies.clear();
            for deferred in buffers.input.deferred.iter().filter(|deferred| source.batch_id == Some(deferred.batch_id))
            {
                let to = buffers.launched_rows.local_row(deferred.row);
                let from = source.launched_rows.local_logit_row(deferred.logit_row);
                // Rows of the f32 fallback run when their batch is collected. Then it is too late to copy a deferred
                // token to or from them.
                let (Some(to), Some(from)) = (to, from) else { return Err(deferred_and_f32(deferred.row)) };
                copies.push((to, from));
            }
            if let (Some(argmax), false) = (source.argmax(), copies.is_empty()) {
                device.copy_sampled_tokens(io.token_ids, argmax, copies, streams.compute)?;
            }
        }
        let args = LaunchArgs { io, shape: launch, q_lens: &staging.q_lens, kv_lens: &staging.kv_lens };
        device.launch(program, &args, streams.compute)?;
        if device.caps().static_shapes {
            *padded_rows += (bucket_rows - rows) as u64;
        }
        let buffers = &mut batches[index];
        buffers.copy_results_to_host(device, streams, io, shape.vocab_size)?;
        // A device reports the failures of a program's last launch only. When this batch is collected, that may be a
        // later launch.
        if self.programs.custom_ops && self.shape.max_in_flight > 1 {
            buffers.custom_failures.extend(device.custom_failures(program));
        }
        Ok(())
    }

    /// Waits for the launched rows of a batch, and stores their results in the order of the batch.
    fn read_results(&mut self, index: usize) -> Result<(), DeviceError> {
        let device = self.device.as_ref();
        let (buffers, host, vocab) = (&self.batches[index], &mut self.host, self.shape.vocab_size);
        host.row_status[..buffers.input.tokens.len()].fill(RowStatus::Ok as u8);
        if !buffers.has_results() {
            return Ok(());
        }
        for (local, first) in consecutive_runs(&buffers.launched_rows.rows) {
            buffers.read_status(device, local.start, &mut host.row_status[first..first + local.len()])?;
        }
        for (local, first) in consecutive_runs(&buffers.launched_rows.logit_rows) {
            buffers.read_argmax(device, local.start, &mut host.argmax[first..first + local.len()])?;
        }
        for (local, first) in buffers.logit_runs() {
            let into = &mut host.logits[first * vocab..(first + local.len()) * vocab];
            buffers.read_logits(device, local.start * vocab, into)?;
        }
        // A row without an argmax has a logit that is not finite. The sampler needs the logits to report which one.
        for (at, only) in buffers.input.argmax_only.iter().enumerate() {
            let undefined = *only && host.argmax[at] == NO_TOKEN;
            if let (true, Some(local)) = (undefined, buffers.launched_rows.local_logit_row(to_u32(at))) {
                let into = &mut host.logits[at * vocab..][..vocab];
                buffers.read_logits_in_place(device, local as usize * vocab, into)?;
            }
        }
        Ok(())
    }

    /// Runs the rows selected in `retry` in the f32 fallback plan and replaces their results.
    fn run_retry(&mut self, index: usize) -> Result<(), DeviceError> {
        let Self { device, batches, staging, shape, streams, host, retry, .. } = self;
        let (device, vocab) = (device.as_ref(), shape.vocab_size);
        if retry.is_empty() {
            return Ok(());
        }
        let (io, launch) = batches[index].stage(device, *streams, staging, retry, shape, self.pool.span())?;
        let args = LaunchArgs { io, shape: launch, q_lens: &staging.q_lens, kv_lens: &staging.kv_lens };
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

    /// Waits for a launched batch, runs its f32 fallback rows, and determines its outcomes and results.
    fn complete(&mut self, index: usize, stale: &[bool]) -> Result<(), DeviceError> {
        self.outcomes.clear();
        self.custom_failures.clear();
        self.read_results(index)?;
        let is_bad = |status: &u8| *status != RowStatus::Ok as u8;
        let tokens = self.batches[index].input.tokens.len();
        if self.host.row_status[..tokens].contains(&(RowStatus::CustomOpFailed as u8)) {
            self.collect_custom_failures(index);
        }
        let some_left = self.batches[index].launched_rows.rows.len() < tokens;
        if self.programs.f32.is_some() && (some_left || self.host.row_status[..tokens].iter().any(is_bad)) {
            self.select_retry_rows(index, stale);
            self.run_retry(index)?;
        }
        if self.host.row_status[..tokens].iter().any(is_bad) {
            self.report_failures(index, stale);
        }
        for (status, row) in self.host.logit_status.iter_mut().zip(&self.batches[index].input.logit_rows) {
            *status = self.host.row_status[*row as usize];
        }
        Ok(())
    }

    /// Collects the custom operations that failed in the launch of a batch.
    fn collect_custom_failures(&mut self, index: usize) {
        if self.shape.max_in_flight == 1 {
            let program = self.program_of(self.batches[index].launched_rows.rows.len()).0;
            self.batches[index].custom_failures.extend(self.device.custom_failures(program));
        }
        let BatchBuffers { custom_failures, launched_rows, .. } = &mut self.batches[index];
        self.custom_failures.extend(to_batch_rows(custom_failures.drain(..), &launched_rows.rows));
    }

    /// Selects the rows for the f32 fallback plan.
    ///
    /// These are all rows of sequences that overflowed earlier, and the rows of other sequences from their first bad
    /// row on.
    fn select_retry_rows(&mut self, index: usize, stale: &[bool]) {
        let Self { retry, outcomes, host, batches, .. } = self;
        let batch = &batches[index].input;
        let mut first_row = 0;
        retry.select(batch, |sequence| {
            let (rows, kv_len) = (batch.q_lens[sequence], batch.kv_lens[sequence]);
            let statuses = &host.row_status[first_row..first_row + rows as usize];
            first_row += rows as usize;
            if is_set(stale, sequence) {
                return None;
            }
            if batch.f32_fallback_from.get(sequence).is_some_and(Option::is_some) {
                return Some(0);
            }
            let bad = statuses.iter().position(|status| *status != RowStatus::Ok as u8)?;
            if RowStatus::from_byte(statuses[bad]) == RowStatus::CustomOpFailed {
                return None;
            }
            let offset = to_u32(bad);
            let position = kv_len - rows + offset;
            outcomes.push(SequenceOutcome { sequence, position, outcome: RowOutcome::Retried });
            Some(offset)
        });
    }

    /// Reports the first bad row of each sequence that has one after the fallback.
    fn report_failures(&mut self, index: usize, stale: &[bool]) {
        let batch = &self.batches[index].input;
        let mut first_row = 0;
        for (sequence, (rows, kv_len)) in batch.q_lens.iter().zip(&batch.kv_lens).enumerate() {
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

    /// Returns the device's report on the custom operation that failed at this row of the batch.
    fn custom_failure(&self, row: usize) -> Option<CustomFailure> {
        self.custom_failures.iter().find(|failure| failure.rows.contains(&row)).cloned()
    }

    /// Checks that the lists of a batch agree, so that staging cannot fail. The device itself checks ids and blocks.
    fn check(&self, input: &ForwardInput) -> Result<(), DeviceError> {
        let lens = || input.q_lens.iter().zip(&input.kv_lens);
        let longest = self.shape.max_blocks_per_seq;
        let starts = || lens().map(|(q, kv)| kv.saturating_sub(*q)).zip(&input.f32_fallback_from);
        let rules = [
            ("q_lens and kv_lens have one entry per sequence", input.q_lens.len() == input.kv_lens.len()),
            ("each sequence has 1 to kv_len rows", lens().all(|(q, kv)| (1..=*kv).contains(q))),
            ("each sequence fits into max_blocks_per_seq blocks", lens().all(|(_, kv)| self.blocks_of(*kv) <= longest)),
            ("q_lens add up to the tokens", lens().map(|(q, _)| *q as usize).sum::<usize>() == input.tokens.len()),
            (
                "tables has ceil(kv_len / block_size) blocks per sequence",
                lens().map(|(_, kv)| self.blocks_of(*kv)).sum::<usize>() == input.tables.len(),
            ),
            ("logit_rows ascend", input.logit_rows.is_sorted_by(|a, b| a < b)),
            (
                "logit_rows are rows of the batch",
                input.logit_rows.last().is_none_or(|&row| (row as usize) < input.tokens.len()),
            ),
            (
                "argmax_only is empty or has one flag per logit row",
                input.argmax_only.is_empty() || input.argmax_only.len() == input.logit_rows.len(),
            ),
            (
                "deferred tokens have ascending rows of the batch and refer to launched logit rows of in-flight batches",
                input.deferred.is_sorted_by(|a, b| a.row < b.row)
                    && input.deferred.last().is_none_or(|deferred| (deferred.row as usize) < input.tokens.len())
                    && input.deferred.iter().all(|deferred| self.has_logit_row(deferred.batch_id, deferred.logit_row)),
            ),
            (
                "f32_fallback_from is empty or has one position per sequence, at most the position of its first row",
                input.f32_fallback_from.is_empty()
                    || (input.f32_fallback_from.len() == input.q_lens.len()
                        && starts().all(|(start, from)| from.is_none_or(|from| from <= start))),
            ),
        ];
        match rules.iter().find(|(_, holds)| !holds) {
            Some((rule, _)) => Err(DeviceError::Invalid { what: format!("the batch violates the rule: {rule}") }),
            None => Ok(()),
        }
    }

    fn blocks_of(&self, kv_len: u32) -> usize {
        (kv_len as usize).div_ceil(self.shape.block_size)
    }

    /// Returns whether an in-flight batch has launched this logit row.
    fn has_logit_row(&self, batch_id: BatchId, logit_row: u32) -> bool {
        let buffers = self.batches.iter().find(|buffers| buffers.batch_id == Some(batch_id));
        buffers.is_some_and(|buffers| buffers.launched_rows.local_logit_row(logit_row).is_some())
    }
}

/// Converts failures from rows of the launch to rows of the batch.
///
/// A call has the rows of one sequence, which are consecutive in the batch too.
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
        what: format!(
            "row {row} of the batch has a deferred token, but this row or the row that samples the token runs in the f32 \
             fallback plan"
        ),
    }
}

/// Waits for all queued work, which uses the buffers, before they are freed.
impl Drop for ModelRunner {
    fn drop(&mut self) {
        self.streams.drain(self.device.as_ref());
    }
}

impl ModelExecutor for ModelRunner {
    fn launch(&mut self, input: ForwardInput) -> Result<BatchId, DeviceError> {
        let rows = input.logit_rows.len();
        let Bucket { tokens, logit_rows, .. } = self.shape.bucket;
        if input.tokens.len() > tokens || rows > logit_rows || input.q_lens.len() > self.shape.max_seqs {
            let got =
                format!("{} rows, {rows} of them with logits, {} sequences", input.tokens.len(), input.q_lens.len());
            let most = format!("{tokens} rows, {logit_rows} with logits, {} sequences", self.shape.max_seqs);
            return Err(DeviceError::Invalid { what: format!("the batch has {got}, expected at most {most}") });
        }
        self.check(&input)?;
        let batch_id = BatchId(self.launched_batches);
        let index = self.buffer_index(batch_id);
        let buffers = &mut self.batches[index];
        if buffers.batch_id.is_some() {
            let max_in_flight = self.shape.max_in_flight;
            let what = format!("{max_in_flight} batches are in flight already, which is the maximum of the runner");
            return Err(DeviceError::Invalid { what });
        }
        let has_fallback = self.programs.f32.is_some();
        let needs_fallback =
            |sequence| has_fallback && input.f32_fallback_from.get(sequence).is_some_and(Option::is_some);
        buffers.launched_rows.select(&input, |sequence| (!needs_fallback(sequence)).then_some(0));
        buffers.begin(input);
        if let Err(error) = self.launch_batch(index) {
            // Queued work may use these buffers, and the next batch is staged in them.
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
        let completed = self.complete(index, stale);
        self.batches[index].batch_id = None;
        completed?;
        let input = std::mem::take(&mut self.batches[index].input);
        let (rows, vocab) = (input.logit_rows.len(), self.shape.vocab_size);
        let logits = LogitRows {
            logits: &self.host.logits[..rows * vocab],
            vocab,
            status: &self.host.logit_status[..rows],
            argmax: &self.host.argmax[..rows],
        };
        Ok(ForwardOutput { logits, outcomes: &self.outcomes, input })
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
