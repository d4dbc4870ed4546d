//! Data between the scheduler and its caller: the plan of a step and its results.

use crate::kv_cache::BlockId;
use crate::scheduler::SeqId;

/// Plan of one step. The next plan reuses the vectors.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct StepPlan {
    /// Sequential number of the plan; empty plans count too.
    pub number: u64,
    /// Rows to compute: decodes, then chunks of running prefills, then chunks of newly admitted sequences.
    pub chunks: Vec<Chunk>,
    /// Sequences preempted in this step: their blocks are freed, and they are waiting again.
    pub preempted: Vec<SeqId>,
    /// Capped sequences: at their length limit, or alone in a pool without a block for one more token.
    ///
    /// They have left the running list and the waiting queue; the engine finishes them with the reason length. Their
    /// tokens can be read until the next `schedule`.
    pub capped: Vec<SeqId>,
    /// Blocks to copy before the rows run, as `(from, to)`, in this order.
    pub copies: Vec<(BlockId, BlockId)>,
}

impl StepPlan {
    /// Returns the number of rows of all chunks.
    pub fn rows(&self) -> u32 {
        self.chunks.iter().map(|chunk| chunk.len).sum()
    }

    pub(crate) fn clear(&mut self) {
        self.chunks.clear();
        self.preempted.clear();
        self.capped.clear();
        self.copies.clear();
    }
}

/// Rows `start..start + len` of one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Chunk {
    /// The sequence.
    pub seq: SeqId,
    /// Position of the first row.
    pub start: u32,
    /// Number of rows, at least 1.
    pub len: u32,
    /// Whether the last row samples a token, because it is the row of the sequence's last token.
    pub samples: bool,
    /// Source of the token of the chunk's only row, if its id is not known yet (a deferred token).
    pub placeholder: Option<Placeholder>,
}

/// Token that a chunk of an in-flight plan samples; its id is known at the commit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Placeholder {
    /// Number of the plan.
    pub plan: u64,
    /// Index of the chunk in [`StepPlan::chunks`].
    pub chunk: usize,
}

/// Results of a plan: one result per chunk, in the same order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct StepOutput {
    /// Results of the chunks. A chunk without a result counts as not run and is planned again.
    pub results: Vec<SeqResult>,
}

/// Result of one chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SeqResult {
    /// The sequence.
    pub seq: SeqId,
    /// The sampled token, if the chunk sampled.
    ///
    /// If a chunk should have sampled and has no token, its last row failed and is planned again.
    pub token: Option<u32>,
    /// Whether the sequence ends: the scheduler removes it and frees its blocks.
    ///
    /// If the result also has no token, the last row counts as failed, and no rows of the chunk are published to the
    /// prefix cache.
    pub finished: bool,
}

impl SeqResult {
    /// Creates the result of one chunk.
    pub const fn new(seq: SeqId, token: Option<u32>, finished: bool) -> Self {
        Self { seq, token, finished }
    }
}

impl From<Vec<SeqResult>> for StepOutput {
    fn from(results: Vec<SeqResult>) -> Self {
        Self { results }
    }
}
