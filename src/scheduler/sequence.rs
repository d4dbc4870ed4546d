//! What the scheduler knows of one sequence: its tokens, and how far they are planned and computed.

use super::Placeholder;
use super::queue::QueueKey;
use crate::kv_cache::BlockAllocator;
use crate::num::to_u32;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SeqStatus {
    Waiting,
    Running,
    /// Reported in the last plan; kept readable until the next one.
    Capped,
}

/// See the head of this file.
#[derive(Clone, Debug)]
pub(super) struct SeqState {
    /// Prompt and output.
    pub tokens: Vec<u32>,
    pub prompt_len: u32,
    /// Length at which it ends whatever the engine says.
    pub limit_tokens: u32,
    pub key: QueueKey,
    pub salt: Box<[u8]>,
    pub read_prefix_cache: bool,
    pub allow_async_schedule: bool,
    /// The first prompt row whose logits are still wanted, if any are.
    pub logits_from: Option<u32>,
    pub status: SeqStatus,
    /// Leading tokens whose keys and values are in its blocks and committed.
    pub computed: u32,
    /// Rows behind those in plans that have not been committed yet.
    pub in_flight: u32,
    /// Of these, rows that sample: tokens behind the known ones that are being drawn.
    pub pending: u32,
    /// The newest of those tokens.
    pub newest_placeholder: Placeholder,
    /// The first plan whose rows of it count; those of earlier ones are void.
    pub first_valid_plan: u64,
    /// The rows in `in_flight_plan` behind the next commit were computed from something bad.
    pub recompute: bool,
    pub cached_tokens: u32,
    /// Rows from this position on were computed in another arithmetic: not to be shared with sequences that were not.
    pub f32_from: Option<u32>,
}

impl SeqState {
    pub fn len(&self) -> u32 {
        to_u32(self.tokens.len())
    }

    /// Where its next row stands.
    pub fn next_row(&self) -> u32 {
        self.computed + self.in_flight
    }

    /// Tokens that rows can be planned for: known ones, and placeholders if it runs ahead. Rows in another arithmetic are
    /// nobody's to run ahead of: whether they are right shows when they are committed.
    pub fn schedulable_len(&self) -> u32 {
        self.len() + if self.allow_async_schedule && self.f32_from.is_none() { self.pending } else { 0 }
    }

    /// Rows until its next token can be sampled.
    pub fn rows_left(&self) -> u32 {
        self.schedulable_len().saturating_sub(self.next_row())
    }

    /// Rows of `start..end` whose logits are wanted of the prompt.
    pub fn prompt_logits(&self, start: u32, end: u32) -> u32 {
        // The last prompt row predicts the first output token, which is drawn, not looked up.
        let last = end.min(self.prompt_len.saturating_sub(1));
        self.logits_from.map_or(0, |from| last.saturating_sub(from.max(start)))
    }

    /// Most rows from `start` on, at most `rows`, that want at most `room` rows of logits.
    pub fn rows_within(&self, start: u32, rows: u32, space: u32) -> u32 {
        let end = start + rows;
        let wanted = self.prompt_logits(start, end);
        let samples = u32::from(end == self.schedulable_len());
        if wanted + samples <= space {
            return rows;
        }
        if wanted > space {
            let first = self.logits_from.map_or(start, |from| from.max(start));
            return first + space - start;
        }
        // All but the row that samples.
        rows - 1
    }

    /// Whether its rows in this plan are stale.
    pub fn is_stale(&self, plan: u64) -> bool {
        self.first_valid_plan > plan
    }

    /// Makes all rows in `in_flight_plan` void; how many there were.
    pub fn mark_stale(&mut self, next_plan: u64) -> u32 {
        self.pending = 0;
        self.first_valid_plan = next_plan;
        std::mem::take(&mut self.in_flight)
    }

    /// Whether it can go no further: at its limit, or larger than the whole pool. With rows in `in_flight_plan` it is only about to.
    pub fn is_capped(&self, blocks: &BlockAllocator) -> bool {
        let len = self.schedulable_len();
        let at_limit = len >= self.limit_tokens && len > self.prompt_len;
        at_limit || blocks.blocks_for(len) > blocks.capacity()
    }
}

/// Tokens a sequence can come to hold: its limit, or one more than the pool has slots for.
pub(super) fn max_tokens_held(sequence: &SeqState, blocks: &BlockAllocator) -> u32 {
    let slots = blocks.capacity() * blocks.block_size();
    sequence.limit_tokens.min(slots.saturating_add(1)).max(sequence.len())
}
