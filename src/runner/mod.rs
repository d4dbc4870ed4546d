//! Interface between the engine's loop and the device: a batch of rows in, logits out.
//!
//! Hosts with a loop of their own call a [`ModelExecutor`] and the [`Sampler`](crate::sampler::Sampler) directly. The
//! engine's tests run the loop with a scripted model that implements the same trait.
//!
//! A batch has two phases: [`ModelExecutor::launch`] starts it, and [`ModelExecutor::collect`] returns its results.
//! Between the two calls the batch is *in flight*, and further batches may be launched. Batches run in the order of
//! their launches, as if each batch ended before the next one starts. [`ModelExecutor::forward`] performs both phases.

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

/// Batch of one step: the rows of all sequences, concatenated.
///
/// ```text
/// tokens      [ s0 s0 s0 | s1 | s2 s2 ]      one row per token
/// q_lens      [ 3          1    2     ]      number of rows of each sequence in this step
/// kv_lens     [ 3          40   18    ]      tokens of each sequence in the KV cache after this step, its rows included
/// tables      [ b7 | b1 b4 b9 | b2 b3 ]      ceil(kv_len / block_size) blocks per sequence, concatenated
/// logit_rows  [ 2, 3, 5 ]                    rows whose logits are requested, ascending
/// f32_fallback_from    [ -, -, 9 ]                    position from which a sequence runs with f32 activations (or empty: none)
/// argmax_only [ f, t, f ]                    logit rows of which only the argmax is requested (or empty: none)
/// deferred    [ (3, batch 7, 0) ]            rows whose token is the argmax of a logit row of an in-flight batch
/// ```
/// Row `r` of sequence `s` has the position `kv_lens[s] - q_lens[s] + r`.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct ForwardInput {
    /// Token ids of all rows.
    pub tokens: Vec<u32>,
    /// Number of rows of each sequence, at least 1.
    pub q_lens: Vec<u32>,
    /// Length of each sequence in the KV cache after this step, including its rows of this step.
    pub kv_lens: Vec<u32>,
    /// Block tables of all sequences, concatenated.
    pub tables: Vec<BlockId>,
    /// Rows whose logits are requested, ascending.
    pub logit_rows: Vec<u32>,
    /// For each sequence: position from which on it runs with f32 activations, or `None`.
    ///
    /// This is the position of an earlier [`RowOutcome::Retried`], at most the position of the sequence's first row in
    /// this batch. The list may be empty if it would contain only `None`.
    pub f32_fallback_from: Vec<Option<u32>>,
    /// For each of `logit_rows`: whether only the argmax is requested.
    ///
    /// The executor may leave the logits of such a row unchanged. The list may be empty if all logits are requested.
    pub argmax_only: Vec<bool>,
    /// Deferred tokens, by ascending row; `tokens` contains an arbitrary valid id for these rows.
    pub deferred: Vec<DeferredToken>,
}

/// Deferred token: its id is not known at the launch; the device copies it from an in-flight batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeferredToken {
    /// Row whose token is deferred.
    pub row: u32,
    /// In-flight batch that samples the token.
    pub batch_id: BatchId,
    /// Index of the logit row in that batch: the token is its argmax, the lowest id wins a tie.
    ///
    /// If that row has a logit that is not finite, the result of the deferred token's row is undefined and must be
    /// ignored.
    pub logit_row: u32,
}

/// Id of a launched batch; the ids of one executor ascend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BatchId(pub u64);

impl ForwardInput {
    /// Creates a batch without requested logits.
    ///
    /// The lists are the token ids of all rows, the number of rows and the length of each sequence, and the block
    /// tables.
    pub fn new(tokens: Vec<u32>, q_lens: Vec<u32>, kv_lens: Vec<u32>, tables: Vec<BlockId>) -> Self {
        Self { tokens, q_lens, kv_lens, tables, ..Self::default() }
    }

    with_methods! {
        value {
            logit_rows with_logit_rows: Vec<u32>,
            f32_fallback_from with_f32_from: Vec<Option<u32>>,
            argmax_only with_argmax_only: Vec<bool>,
            deferred with_deferred: Vec<DeferredToken>,
        }
    }

    /// Creates an empty batch with capacity for this number of rows, sequences, block table entries and logit rows.
    pub(crate) fn with_capacity(tokens: usize, seqs: usize, table_blocks: usize, logit_rows: usize) -> Self {
        Self {
            tokens: Vec::with_capacity(tokens),
            q_lens: Vec::with_capacity(seqs),
            kv_lens: Vec::with_capacity(seqs),
            tables: Vec::with_capacity(table_blocks),
            logit_rows: Vec::with_capacity(logit_rows),
            f32_fallback_from: Vec::with_capacity(seqs),
            argmax_only: Vec::with_capacity(logit_rows),
            deferred: Vec::with_capacity(seqs),
        }
    }

    /// Empties all lists, keeping their capacity.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.q_lens.clear();
        self.kv_lens.clear();
        self.tables.clear();
        self.logit_rows.clear();
        self.f32_fallback_from.clear();
        self.argmax_only.clear();
        self.deferred.clear();
    }
}

/// Outcome of a sequence with bad rows, in addition to its logits.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RowOutcome {
    /// A row overflowed or was not finite. This row and the later rows of the sequence ran again with f32 activations.
    ///
    /// Later batches must pass the position of the row in [`ForwardInput::f32_fallback_from`]. If a row is still bad, an outcome
    /// [`Failed`](Self::Failed) follows.
    Retried,
    /// A row and all later rows of the sequence are unusable.
    Failed {
        /// Status of the row.
        status: RowStatus,
        /// The custom operation that failed, if a custom operation is the cause.
        custom: Option<CustomFailure>,
    },
}

/// [`RowOutcome`] of a sequence, with its position.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SequenceOutcome {
    /// Index of the sequence in the batch.
    pub sequence: usize,
    /// Position in the sequence of its first bad row.
    pub position: u32,
    /// Outcome of the sequence.
    pub outcome: RowOutcome,
}

impl SequenceOutcome {
    /// Creates the outcome of the sequence with this index in the batch, whose first bad row has this `position`.
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
    /// Outcomes of sequences with bad rows, whether or not the rows' logits are requested.
    ///
    /// A sequence has at most one outcome of each kind; `Retried` comes first.
    pub outcomes: &'a [SequenceOutcome],
    /// The input of the batch, so that its lists can be reused.
    pub input: ForwardInput,
}

impl<'a> ForwardOutput<'a> {
    /// Creates the results of a batch without bad rows.
    pub fn new(logits: LogitRows<'a>, input: ForwardInput) -> Self {
        Self { logits, outcomes: &[], input }
    }

    /// Sets the outcomes of sequences with bad rows.
    #[must_use]
    pub fn with_outcomes(self, outcomes: &'a [SequenceOutcome]) -> Self {
        Self { outcomes, ..self }
    }
}

/// Executor of a model: writes the keys and values of a batch's rows and computes the requested logits.
pub trait ModelExecutor: Send {
    /// Launches a batch, which runs after all batches launched before.
    ///
    /// After an error, the batch is not in flight, and its lists are dropped.
    ///
    /// # Errors
    /// [`DeviceError::Invalid`] if lists contradict each other, an id does not exist, or the number of rows or
    /// in-flight batches exceeds the executor's limits. Any other [`DeviceError`] if the device fails.
    fn launch(&mut self, input: ForwardInput) -> Result<BatchId, DeviceError>;
    /// Waits for an in-flight batch, but not for batches launched after it, and returns its results.
    ///
    /// The results borrow buffers that the next call overwrites.
    ///
    /// `stale` marks sequences of the batch whose results are no longer needed (empty: none). They are not computed
    /// again in f32: later batches may already use their blocks for other sequences.
    ///
    /// # Errors
    /// [`DeviceError::Invalid`] if the batch is not in flight; any other [`DeviceError`] if the device fails. After an
    /// error, the batch is no longer in flight.
    fn collect(&mut self, batch_id: BatchId, stale: &[bool]) -> Result<ForwardOutput<'_>, DeviceError>;
    /// Launches a batch and waits for it.
    ///
    /// # Errors
    /// The same as [`launch`](Self::launch) and [`collect`](Self::collect).
    fn forward(&mut self, input: ForwardInput) -> Result<ForwardOutput<'_>, DeviceError> {
        let batch_id = self.launch(input)?;
        self.collect(batch_id, &[])
    }
    /// Returns the maximum number of in-flight batches.
    fn max_in_flight(&self) -> u32 {
        1
    }
    /// Queues copies of whole KV blocks, as `(from, to)` pairs (copy on write).
    ///
    /// The copies run after the in-flight batches and before the next batch.
    ///
    /// # Errors
    /// [`DeviceError`] if the device rejects the copies or fails.
    fn copy_blocks(&mut self, pairs: &[(BlockId, BlockId)]) -> Result<(), DeviceError>;
    /// Returns the width of a logit row.
    fn vocab_size(&self) -> usize;
    /// Returns the number of elements clamped so far, by operation.
    ///
    /// An element is clamped if it is too large for the type that it is stored in.
    fn overflows(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }
    /// Returns the number of padding rows computed so far, which fill batches up to their bucket.
    fn padded_rows(&self) -> u64 {
        0
    }
    /// Returns the cost of a batch, or zero if the executor cannot estimate it.
    ///
    /// Rows that run a second time after an overflow are not included. The engine calls this method before each batch,
    /// so it must be cheap.
    fn cost(&self, input: &ForwardInput) -> Cost {
        let _ = input;
        Cost::default()
    }
}
