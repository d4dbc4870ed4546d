//! The narrow waist between the loop and the device: one batch of rows in, logits out.
//!
//! Hosts with a loop of their own call this and [`Sampler`](crate::sampler) directly; the engine's tests drive the loop
//! with a scripted model behind the same trait.

use crate::device::{CustomFailure, DeviceError};
use crate::graph::{Cost, RowStatus};
use crate::kv_cache::BlockId;
pub use crate::sampler::LogitRows;

/// Stands for a sequence none of whose rows have overflowed, in [`ForwardInput::f32_from`].
pub const NEVER: u32 = u32::MAX;

/// One step's batch: rows of all sequences concatenated, sequence after sequence.
///
/// ```text
/// tokens     [ s0 s0 s0 | s1 | s2 s2 ]      one row a token
/// q_lens     [ 3          1    2     ]      rows a sequence brings in this step
/// kv_lens    [ 3          40   18    ]      tokens in its cache after this step, its own rows included
/// tables     [ b7 | b1 b4 b9 | b2 b3 ]      ceil(kv_len / block_size) blocks a sequence, concatenated
/// logit_rows [ 2, 3, 5 ]                    rows whose logits are wanted, ascending
/// f32_from   [ NEVER, NEVER, 9 ]            position from which on a sequence runs with f32 activations (or empty: none)
/// ```
/// Row `r` of sequence `s` stands at position `kv_lens[s] - q_lens[s] + r`.
#[derive(Clone, Debug, Default)]
pub struct ForwardInput {
    /// Token ids of all rows.
    pub tokens: Vec<u32>,
    /// Rows each sequence brings, at least 1.
    pub q_lens: Vec<u32>,
    /// Visible length of each sequence after this step.
    pub kv_lens: Vec<u32>,
    /// Block tables, concatenated.
    pub tables: Vec<BlockId>,
    /// Rows whose logits are wanted, ascending.
    pub logit_rows: Vec<u32>,
    /// Where an earlier call told of [`Outcome::Retried`], its position, at most that of the sequence's first row here; or
    /// [`NEVER`]. Empty if no sequence has any.
    pub f32_from: Vec<u32>,
}

impl ForwardInput {
    /// Empties every list, keeping the room.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.q_lens.clear();
        self.kv_lens.clear();
        self.tables.clear();
        self.logit_rows.clear();
        self.f32_from.clear();
    }
}

/// What came of a sequence beside its logits.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Outcome {
    /// A row overflowed; it and what follows ran again with f32 activations, and all is well. Further rows of the sequence
    /// must say so in [`ForwardInput::f32_from`].
    Retried,
    /// A row cannot be used, nor any behind it.
    Failed {
        /// Why.
        status: RowStatus,
        /// Who, if it was a custom operation.
        custom: Option<CustomFailure>,
    },
}

/// An [`Outcome`] with its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SequenceOutcome {
    /// Index of the sequence in the batch.
    pub sequence: usize,
    /// Position of its first bad row.
    pub position: u32,
    /// What came of it.
    pub outcome: Outcome,
}

/// What a batch gives.
#[derive(Clone, Copy, Debug)]
pub struct Forwarded<'a> {
    /// The wanted logits.
    pub logits: LogitRows<'a>,
    /// Sequences with bad rows, wanted or not; at most one of each kind a sequence, the retry first.
    pub outcomes: &'a [SequenceOutcome],
}

impl<'a> From<LogitRows<'a>> for Forwarded<'a> {
    fn from(logits: LogitRows<'a>) -> Self {
        Self { logits, outcomes: &[] }
    }
}

/// Runs the model over a batch. One call writes the keys and values of its rows and returns logits.
pub trait Forward: Send {
    /// Runs one batch; the answer borrows buffers that the next call overwrites.
    fn forward(&mut self, input: &ForwardInput) -> Result<Forwarded<'_>, DeviceError>;
    /// Copies whole KV blocks `(from, to)` before the next batch (copy on write).
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
    /// What running this batch costs, without what runs a second time after an overflow; zero if the model cannot tell.
    /// Called before each batch, so it must be cheap.
    fn cost(&self, input: &ForwardInput) -> Cost {
        let _ = input;
        Cost::default()
    }
}
