//! Interface between the engine's loop and the device: a batch of rows in, logits out.
//!
//! Hosts with their own loop call this module and the [`Sampler`](crate::sampler) directly. The engine's tests drive
//! the loop with a scripted model that implements the same trait.
//!
//! A batch has two phases: [`ModelExecutor::launch`] takes its rows, [`ModelExecutor::collect`] returns its results.
//! Between the two, the batch is *in flight*, and further batches may be launched: they run in the order of their
//! launches, as if each had ended before the next began. [`ModelExecutor::forward`] combines both phases.

mod io_buffers;
mod model_runner;
#[cfg(feature = "internals")]
pub mod scripted;
mod shape;
mod sub_batch;

pub use model_runner::{ModelRunner, Programs};
pub use shape::RunnerShape;

use crate::device::{CustomFailure, DeviceError};
use crate::graph::{Cost, RowStatus};
use crate::kv_cache::BlockId;
pub use crate::sampler::LogitRows;
use crate::settings::with_methods;

/// Batch of one step: the rows of all sequences, concatenated by sequence.
///
/// ```text
/// tokens      [ s0 s0 s0 | s1 | s2 s2 ]      one row per token
/// q_lens      [ 3          1    2     ]      rows of each sequence in this step
/// kv_lens     [ 3          40   18    ]      tokens in its cache after this step, including its own rows
/// tables      [ b7 | b1 b4 b9 | b2 b3 ]      ceil(kv_len / block_size) blocks per sequence, concatenated
/// logit_rows  [ 2, 3, 5 ]                    rows whose logits are requested, ascending
/// f32_from    [ -, -, 9 ]                    first position that runs with f32 activations (or empty: none)
/// argmax_only [ f, t, f ]                    rows of logits of which only the argmax is needed (or empty: none)
/// deferred    [ (3, batch 7, 0) ]            rows whose token is the argmax of a row of logits of a batch in flight
/// ```
/// Row `r` of sequence `s` has position `kv_lens[s] - q_lens[s] + r`.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct ForwardInput {
    /// Token ids of all rows.
    pub tokens: Vec<u32>,
    /// Rows each sequence brings, at least 1.
    pub q_lens: Vec<u32>,
    /// Visible length of each sequence after this step.
    pub kv_lens: Vec<u32>,
    /// Block tables, concatenated.
    pub tables: Vec<BlockId>,
    /// Rows whose logits are requested, ascending.
    pub logit_rows: Vec<u32>,
    /// For each sequence the position from which on it runs with f32 activations: that of an earlier
    /// [`RowOutcome::Retried`], at most the position of its first row here. Empty if no sequence has one.
    pub f32_from: Vec<Option<u32>>,
    /// Rows of `logit_rows` of which only the argmax is needed; the model may leave their logits unset. Empty if all
    /// logits are needed.
    pub argmax_only: Vec<bool>,
    /// Rows whose token is not known yet, by ascending row; `tokens` has any id of the vocabulary in their place.
    pub deferred: Vec<DeferredToken>,
}

/// Deferred token: a row takes its token id from a batch in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeferredToken {
    /// The row.
    pub row: u32,
    /// A batch in flight.
    pub batch_id: BatchId,
    /// Row of logits of that batch. The token is its argmax, the lowest id of equals. If a logit is not finite, the
    /// row's result is undefined and must be ignored.
    pub logit_row: u32,
}

/// Id of a launched batch; the ids of a model ascend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BatchId(pub u64);

impl ForwardInput {
    /// A batch without requested logits: rows of all sequences, rows and visible length of each, and their block tables.
    pub fn new(tokens: Vec<u32>, q_lens: Vec<u32>, kv_lens: Vec<u32>, tables: Vec<BlockId>) -> Self {
        Self { tokens, q_lens, kv_lens, tables, ..Self::default() }
    }

    with_methods! {
        value {
            logit_rows with_logit_rows: Vec<u32>,
            f32_from with_f32_from: Vec<Option<u32>>,
            argmax_only with_argmax_only: Vec<bool>,
            deferred with_deferred: Vec<DeferredToken>,
        }
    }

    /// An empty batch with capacity for these numbers of rows, sequences, table entries and rows of logits.
    pub(crate) fn with_capacity(tokens: usize, seqs: usize, table_blocks: usize, logit_rows: usize) -> Self {
        Self {
            tokens: Vec::with_capacity(tokens),
            q_lens: Vec::with_capacity(seqs),
            kv_lens: Vec::with_capacity(seqs),
            tables: Vec::with_capacity(table_blocks),
            logit_rows: Vec::with_capacity(logit_rows),
            f32_from: Vec::with_capacity(seqs),
            argmax_only: Vec::with_capacity(logit_rows),
            deferred: Vec::with_capacity(seqs),
        }
    }

    /// Empties all lists and keeps their capacity.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.q_lens.clear();
        self.kv_lens.clear();
        self.tables.clear();
        self.logit_rows.clear();
        self.f32_from.clear();
        self.argmax_only.clear();
        self.deferred.clear();
    }
}

/// Outcome of a sequence, in addition to its logits.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RowOutcome {
    /// A row overflowed; it and the rows after it ran again with f32 activations and are valid. Further rows of the
    /// sequence must be listed in [`ForwardInput::f32_from`].
    Retried,
    /// A row and all rows after it are invalid.
    Failed {
        /// Why.
        status: RowStatus,
        /// Details, if a custom operation failed.
        custom: Option<CustomFailure>,
    },
}

/// An [`RowOutcome`] with its place.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SequenceOutcome {
    /// Index of the sequence in the batch.
    pub sequence: usize,
    /// Position of its first bad row.
    pub position: u32,
    /// The outcome.
    pub outcome: RowOutcome,
}

impl SequenceOutcome {
    /// Outcome of the sequence with this index in the batch; `position` is that of its first bad row.
    pub const fn new(sequence: usize, position: u32, outcome: RowOutcome) -> Self {
        Self { sequence, position, outcome }
    }
}

/// Results of a batch.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ForwardOutput<'a> {
    /// The requested logits.
    pub logits: LogitRows<'a>,
    /// Sequences with bad rows, requested or not: at most one outcome of each kind a sequence, the retry first.
    pub outcomes: &'a [SequenceOutcome],
    /// The batch as it was launched, for reuse of its lists.
    pub input: ForwardInput,
}

impl<'a> ForwardOutput<'a> {
    /// Results of a batch without bad rows.
    pub fn new(logits: LogitRows<'a>, input: ForwardInput) -> Self {
        Self { logits, outcomes: &[], input }
    }

    /// The same with outcomes of bad rows.
    #[must_use]
    pub fn with_outcomes(self, outcomes: &'a [SequenceOutcome]) -> Self {
        Self { outcomes, ..self }
    }
}

/// Runs the model over batches: writes the keys and values of a batch's rows and computes the requested logits.
pub trait ModelExecutor: Send {
    /// Launches a batch after the batches launched before. A refused batch is not in flight, and its lists are dropped.
    ///
    /// # Errors
    /// [`DeviceError::Invalid`] for inconsistent lists, more rows or batches than the executor has capacity for, or
    /// unknown ids; otherwise the error of the device.
    fn launch(&mut self, input: ForwardInput) -> Result<BatchId, DeviceError>;
    /// Waits for a batch in flight, but for none launched after it. The results borrow buffers that the next call
    /// overwrites.
    ///
    /// `stale` marks sequences of the batch whose results are no longer needed (empty: none). Their rows are not
    /// retried in f32, because their blocks may belong to other sequences of later batches by now.
    ///
    /// # Errors
    /// [`DeviceError::Invalid`] if the batch is not in flight, otherwise the error of the device; after an error the
    /// batch is no longer in flight.
    fn collect(&mut self, batch_id: BatchId, stale: &[bool]) -> Result<ForwardOutput<'_>, DeviceError>;
    /// Launches a batch and waits for it.
    ///
    /// # Errors
    /// Those of [`launch`](Self::launch) and [`collect`](Self::collect).
    fn forward(&mut self, input: ForwardInput) -> Result<ForwardOutput<'_>, DeviceError> {
        let batch_id = self.launch(input)?;
        self.collect(batch_id, &[])
    }
    /// Most batches in flight.
    fn max_in_flight(&self) -> u32 {
        1
    }
    /// Copies whole KV blocks `(from, to)` after the batches in flight and before the next one (copy on write).
    ///
    /// # Errors
    /// The error of the device.
    fn copy_blocks(&mut self, pairs: &[(BlockId, BlockId)]) -> Result<(), DeviceError>;
    /// Width of a row of logits.
    fn vocab_size(&self) -> usize;
    /// Elements that were clamped so far because they were too large for the type they are stored in, by operation.
    fn overflows(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }
    /// Rows computed so far only to fill batches up to a bucket.
    fn padded_rows(&self) -> u64 {
        0
    }
    /// Cost of this batch, without rows that run a second time after an overflow; zero if the model does not know it.
    /// Called before each batch, so it must be cheap.
    fn cost(&self, input: &ForwardInput) -> Cost {
        let _ = input;
        Cost::default()
    }
}
