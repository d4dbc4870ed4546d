//! State of one sequence in the scheduler: its tokens, and how far they are planned and computed.

use super::Placeholder;
use super::queue::QueueKey;
use crate::kv_cache::BlockAllocator;
use crate::num::to_u32;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SeqStatus {
    Waiting,
    Running,
    /// Reported as capped in the last plan; its tokens can be read until the next plan.
    Capped,
}

#[derive(Clone, Debug)]
pub(super) struct SeqState {
    /// Tokens of the prompt and of the output so far.
    pub tokens: Vec<u32>,
    pub prompt_len: u32,
    /// Maximum length, at which the scheduler caps the sequence.
    pub limit_tokens: u32,
    pub key: QueueKey,
    pub salt: Box<[u8]>,
    pub read_prefix_cache: bool,
    pub allow_async_schedule: bool,
    /// First prompt row whose requested logits are not computed yet; `None` if none are requested.
    pub logits_from: Option<u32>,
    pub status: SeqStatus,
    /// Number of leading tokens whose rows are committed: their keys and values are in the sequence's blocks.
    pub computed: u32,
    /// Number of rows after the computed ones in in-flight plans.
    pub in_flight: u32,
    /// Number of placeholders: in-flight rows that sample.
    pub pending: u32,
    /// The newest placeholder.
    pub newest_placeholder: Placeholder,
    /// First plan whose rows of this sequence are valid; its rows in earlier plans are stale.
    pub first_valid_plan: u64,
    /// Whether the commit of the oldest in-flight plan makes the later in-flight rows stale: they were computed from
    /// invalid rows.
    pub recompute: bool,
    pub cached_tokens: u32,
    /// First row that was computed in the f32 fallback plan; rows from it on are not published to the prefix cache.
    pub f32_fallback_from: Option<u32>,
}

impl SeqState {
    pub fn len(&self) -> u32 {
        to_u32(self.tokens.len())
    }

    /// Position of the next row to plan.
    pub fn next_row(&self) -> u32 {
        self.computed + self.in_flight
    }

    /// Number of tokens whose rows can be planned: known tokens, and placeholders if async scheduling is allowed.
    ///
    /// Rows after one of the f32 fallback plan are not scheduled ahead: their validity is known only at commit.
    pub fn schedulable_len(&self) -> u32 {
        self.len() + if self.allow_async_schedule && self.f32_fallback_from.is_none() { self.pending } else { 0 }
    }

    /// Number of rows to compute until the next token can be sampled.
    pub fn rows_left(&self) -> u32 {
        self.schedulable_len().saturating_sub(self.next_row())
    }

    /// Number of prompt rows in `start..end` whose logits are requested.
    pub fn prompt_logits(&self, start: u32, end: u32) -> u32 {
        // The last prompt row predicts the first output token, which is sampled: the prompt needs no log-probability of
        // it.
        let last = end.min(self.prompt_len.saturating_sub(1));
        self.logits_from.map_or(0, |from| last.saturating_sub(from.max(start)))
    }

    /// Largest number of rows from `start`, at most `rows`, that need at most `space` logit rows.
    pub fn rows_within(&self, start: u32, rows: u32, space: u32) -> u32 {
        let end = start + rows;
        let requested = self.prompt_logits(start, end);
        let samples = u32::from(end == self.schedulable_len());
        if requested + samples <= space {
            return rows;
        }
        if requested > space {
            let first = self.logits_from.map_or(start, |from| from.max(start));
            return first + space - start;
        }
        // All rows except the one that samples.
        rows - 1
    }

    /// Whether the rows of this sequence in a plan are stale.
    pub fn is_stale(&self, plan: u64) -> bool {
        self.first_valid_plan > plan
    }

    /// Marks all in-flight rows as stale and returns their number.
    pub fn mark_stale(&mut self, next_plan: u64) -> u32 {
        self.pending = 0;
        self.first_valid_plan = next_plan;
        std::mem::take(&mut self.in_flight)
    }

    /// Whether the sequence cannot get another token: it is at its limit, or larger than the whole pool. While it has
    /// in-flight rows, it only reaches that state when they are committed.
    pub fn is_capped(&self, blocks: &BlockAllocator) -> bool {
        let len = self.schedulable_len();
        let at_limit = len >= self.limit_tokens && len > self.prompt_len;
        at_limit || blocks.blocks_for(len) > blocks.capacity()
    }
}

/// Maximum number of tokens of a sequence: its limit, or one more than the pool has slots.
pub(super) fn max_tokens_held(sequence: &SeqState, blocks: &BlockAllocator) -> u32 {
    let slots = blocks.capacity() * blocks.block_size();
    sequence.limit_tokens.min(slots.saturating_add(1)).max(sequence.len())
}
