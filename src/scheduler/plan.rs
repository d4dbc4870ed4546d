//! What passes between the scheduler and its caller: the rows of a step, and what came of them.

use crate::kv_cache::BlockId;
use crate::scheduler::SeqId;

/// What one step computes. The vectors are used again by the next plan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct StepPlan {
    /// Counts plans, empty ones included.
    pub number: u64,
    /// Rows to compute: decodes, then chunks of running prompts, then newly admitted sequences.
    pub chunks: Vec<Chunk>,
    /// Sequences that gave their blocks back and wait again.
    pub preempted: Vec<SeqId>,
    /// Sequences that can go no further: alone in the pool without room for one more token, or at their limit. They have
    /// left the scheduler; the engine ends them for their length. Their tokens can be read until the next `schedule`.
    pub capped: Vec<SeqId>,
    /// Blocks to copy, `(from, to)`, in this order, before the rows run.
    pub copies: Vec<(BlockId, BlockId)>,
}

impl StepPlan {
    /// Rows of all chunks.
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

/// Rows `start..start + len` of one sequence's tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Chunk {
    /// The sequence.
    pub seq: SeqId,
    /// Position of the first row.
    pub start: u32,
    /// Rows, at least 1.
    pub len: u32,
    /// Whether the last row's logits are wanted: it is the last token there is.
    pub samples: bool,
    /// Where its one row's token comes from, if it is not known yet.
    pub placeholder: Option<Placeholder>,
}

/// The token that a chunk of a plan in `in_flight_plan` samples.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Placeholder {
    /// The plan's number.
    pub plan: u64,
    /// The chunk's place in it.
    pub chunk: usize,
}

/// What came out of a plan: a result a chunk, in the same order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct StepOutput {
    /// Results. A chunk without one counts as not run and is planned again.
    pub results: Vec<SeqResult>,
}

/// What came out of one chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SeqResult {
    /// The sequence.
    pub seq: SeqId,
    /// The sampled token, if the chunk sampled. A chunk that should have sampled and did not (its row failed) has its last
    /// row run again.
    pub token: Option<u32>,
    /// The sequence ends: its blocks go back and it is forgotten. Without a token its rows count as failed and are not
    /// published to the prefix cache.
    pub finished: bool,
}

impl SeqResult {
    /// Outcome of one chunk.
    pub const fn new(seq: SeqId, token: Option<u32>, finished: bool) -> Self {
        Self { seq, token, finished }
    }
}

impl From<Vec<SeqResult>> for StepOutput {
    fn from(results: Vec<SeqResult>) -> Self {
        Self { results }
    }
}
