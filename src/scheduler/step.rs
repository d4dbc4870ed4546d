//! One step: the plan, its results, and the two calls that make and digest them.
//!
//! A plan lists rows; the results say which token came out of each chunk that wanted one. A sequence's rows are computed
//! in order and without gaps, each once, unless it is preempted and starts over.

use super::preempt::Relief;
use super::{Scheduler, State, Tick, reserved_tokens};
use crate::kv_cache::{BlockAllocator, BlockId, SeqId};

/// What one step computes. The vectors are used again by the next plan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepPlan {
    /// Rows to compute: decodes, then chunks of running prompts, then newly admitted sequences.
    pub chunks: Vec<Chunk>,
    /// Sequences that gave their blocks back and wait again.
    pub preempted: Vec<SeqId>,
    /// Sequences that can go no further: alone in the pool without room for one more token, or at their limit. They have
    /// left the scheduler; the engine ends them for their length. Their tokens can be read until the next `schedule`.
    pub exhausted: Vec<SeqId>,
    /// Blocks to copy, `(from, to)`, in this order, before the rows run.
    pub copies: Vec<(BlockId, BlockId)>,
}

impl StepPlan {
    /// Rows of all chunks.
    pub fn rows(&self) -> u32 {
        self.chunks.iter().map(|chunk| chunk.len).sum()
    }

    fn clear(&mut self) {
        self.chunks.clear();
        self.preempted.clear();
        self.exhausted.clear();
        self.copies.clear();
    }
}

/// Rows `start..start + len` of one sequence's tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// The sequence.
    pub seq: SeqId,
    /// Position of the first row.
    pub start: u32,
    /// Rows, at least 1.
    pub len: u32,
    /// Whether the last row's logits are wanted: it is the last token known.
    pub samples: bool,
}

/// What came out of a plan: a result a chunk, in the same order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepOutput {
    /// Results. A chunk without one counts as not run and is planned again.
    pub results: Vec<SeqResult>,
}

/// What came out of one chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Decode,
    Prefill,
}

impl Scheduler {
    /// Makes the plan of the next step. Running sequences first, then admissions in order; none is admitted in a step that
    /// had to preempt.
    pub fn schedule(&mut self, now: Tick, blocks: &mut BlockAllocator) -> &StepPlan {
        self.clock = self.clock.max(now);
        for seq in self.plan.exhausted.drain(..) {
            if self.entries.get(&seq).is_some_and(|entry| entry.state == State::Exhausted) {
                self.entries.remove(&seq);
            }
        }
        self.plan.clear();
        let mut budget = self.step_budget_tokens;
        self.plan_running(Phase::Decode, &mut budget, blocks);
        self.plan_running(Phase::Prefill, &mut budget, blocks);
        if self.plan.preempted.is_empty() {
            self.plan_waiting(&mut budget, blocks);
        }
        &self.plan
    }

    /// The plan made last.
    pub fn plan(&self) -> &StepPlan {
        &self.plan
    }

    /// Takes the results of the plan made last.
    pub fn commit(&mut self, done: &StepOutput, blocks: &mut BlockAllocator) {
        for result in &done.results {
            // Unknown: aborted meanwhile. Nothing in flight: aborted and added again under the same id.
            let Some(entry) = self.entries.get_mut(&result.seq).filter(|entry| entry.in_flight > 0) else { continue };
            let end = entry.computed + std::mem::take(&mut entry.in_flight);
            let samples = end == entry.len();
            let failed = result.token.is_none() && (samples || result.finished);
            entry.computed = if failed { end - 1 } else { end };
            if !(failed && result.finished) {
                let shared = entry.f32_from.map_or(entry.computed, |from| from.min(entry.computed));
                blocks.publish(result.seq, &entry.tokens[..shared as usize]);
            }
            if result.finished {
                let rank = entry.rank;
                self.entries.remove(&result.seq);
                self.leave_seat(result.seq, rank, blocks);
            } else if samples && let Some(token) = result.token {
                entry.tokens.push(token);
            }
        }
        for chunk in &self.plan.chunks {
            if let Some(entry) = self.entries.get_mut(&chunk.seq) {
                entry.in_flight = 0;
            }
        }
    }

    fn plan_running(&mut self, phase: Phase, budget: &mut u32, blocks: &mut BlockAllocator) {
        let mut at = 0;
        while at < self.running.len() && *budget > 0 {
            let seq = self.running[at].seq;
            let Some(entry) = self.entries.get(&seq) else { break };
            let (start, len) = (entry.computed, entry.len());
            let decodes = len - start == 1;
            if entry.in_flight > 0 || decodes != (phase == Phase::Decode) {
                at += 1;
                continue;
            }
            if entry.is_exhausted(blocks) {
                self.exhaust(at, blocks);
                continue;
            }
            let rows = (len - start).min(*budget);
            if blocks.prepare_rows(seq, start, start + rows, &mut self.plan.copies).is_ok() {
                self.plan_chunk(seq, rows);
                *budget -= rows;
                at += 1;
                continue;
            }
            if self.relieve(at, blocks) == Relief::Wait {
                at += 1;
            }
        }
    }

    fn plan_waiting(&mut self, budget: &mut u32, blocks: &mut BlockAllocator) {
        while *budget > 0 && self.running.len() < self.config.max_num_seqs as usize {
            let Some((rank, seq)) = self.waiting.first() else { return };
            let Some(entry) = self.entries.get_mut(&seq) else { return };
            let len = entry.len();
            if entry.is_exhausted(blocks) {
                // It was preempted just before its turn to be reported.
                entry.state = State::Exhausted;
                self.waiting.remove(rank);
                self.plan.exhausted.push(seq);
                continue;
            }
            if entry.read_prefix_cache {
                blocks.lookup_into(&entry.tokens, &entry.salt, &mut self.hit);
            } else {
                self.hit.reset(&entry.salt);
            }
            let spare = if self.running.is_empty() { 0 } else { self.config.watermark_blocks };
            let needed = blocks.admission_blocks(&self.hit, len);
            if needed.saturating_add(spare) > blocks.available() || blocks.admit(seq, &self.hit, len).is_err() {
                return;
            }
            let reserved = reserved_tokens(entry, blocks);
            let table = blocks.reserve_table(seq, reserved);
            debug_assert!(table.is_ok());
            entry.tokens.reserve_exact((reserved as usize).saturating_sub(entry.tokens.len()));
            entry.state = State::Running;
            entry.computed = self.hit.tokens();
            entry.cached_tokens = self.hit.tokens().min(entry.prompt_len);
            let rows = (len - entry.computed).min(*budget);
            self.waiting.remove(rank);
            self.seat(seq, rank);
            self.plan_chunk(seq, rows);
            *budget -= rows;
        }
    }

    fn plan_chunk(&mut self, seq: SeqId, rows: u32) {
        if let Some(entry) = self.entries.get_mut(&seq) {
            let samples = entry.computed + rows == entry.len();
            entry.in_flight = rows;
            self.plan.chunks.push(Chunk { seq, start: entry.computed, len: rows, samples });
        }
    }
}
