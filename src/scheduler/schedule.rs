//! One step: the plan, its results, and the two calls that make and digest them.
//!
//! A plan lists rows; the results say which token came out of each chunk that wanted one. A sequence's rows are computed
//! in order and without gaps, each once, unless it is preempted and starts over, or rows ahead of a result are void.

use super::in_flight::Flight;
use super::preempt::Relief;
use super::{Scheduler, State, Tick, reserved_tokens};
use crate::kv_cache::{BlockAllocator, SeqId};
use crate::scheduler::{Chunk, Placeholder, SeqResult, StepOutput, StepPlan};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Decode,
    Prefill,
}

/// What is left of a step.
#[derive(Clone, Copy, Debug)]
struct Budget {
    rows: u32,
    logit_rows: u32,
}

impl Budget {
    fn take(&mut self, rows: u32, logit_rows: u32) {
        self.rows -= rows;
        self.logit_rows -= logit_rows;
    }
}

impl Scheduler {
    /// Makes the plan of the next step. Running sequences first, then admissions in order; none is admitted in a step that
    /// had to preempt. A plan without chunks needs no commit.
    pub fn schedule(&mut self, now: Tick, blocks: &mut BlockAllocator) -> &StepPlan {
        self.clock = self.clock.max(now);
        for seq in self.plan.exhausted.drain(..) {
            if self.entries.get(&seq).is_some_and(|entry| entry.state == State::Exhausted) {
                self.entries.remove(&seq);
            }
        }
        self.plan.clear();
        self.plan.number = self.flights.next_plan();
        let mut budget = Budget { rows: self.step_budget_tokens, logit_rows: self.config.max_logit_rows };
        let flows = self.plan_running(Phase::Decode, &mut budget, blocks)
            && self.plan_running(Phase::Prefill, &mut budget, blocks);
        if flows && self.plan.preempted.is_empty() {
            self.plan_waiting(&mut budget, blocks);
        }
        self.flights.take_off(&self.plan);
        &self.plan
    }

    /// The plan made last.
    pub fn plan(&self) -> &StepPlan {
        &self.plan
    }

    /// Whether rows of the sequence in a plan in flight are void by now: their results mean nothing.
    pub fn is_void(&self, plan: u64, seq: SeqId) -> bool {
        self.entries.get(&seq).is_none_or(|entry| entry.valid_from > plan)
    }

    /// Takes the results of the oldest plan in flight. Those of void chunks are ignored.
    pub fn commit(&mut self, done: &StepOutput, blocks: &mut BlockAllocator) {
        let Some(Flight { plan, chunks }) = self.flights.pop() else { return };
        let mut results = done.results.as_slice();
        for chunk in &chunks {
            let found = results.iter().position(|result| result.seq == chunk.seq);
            let result = found.map(|at| {
                let result = results[at];
                results = &results[at + 1..];
                result
            });
            if !self.is_void(plan, chunk.seq) {
                self.commit_chunk(chunk, result, blocks);
            }
        }
        self.flights.recycle(chunks);
    }

    fn commit_chunk(&mut self, chunk: &Chunk, result: Option<SeqResult>, blocks: &mut BlockAllocator) {
        let next_plan = self.flights.next_plan();
        let Some(entry) = self.entries.get_mut(&chunk.seq) else { return };
        entry.in_flight -= chunk.len;
        entry.pending -= u32::from(chunk.samples);
        let redo = std::mem::take(&mut entry.redo);
        let Some(result) = result else {
            self.wasted_rows += u64::from(entry.void(next_plan));
            return;
        };
        let end = chunk.start + chunk.len;
        let failed = result.token.is_none() && (chunk.samples || result.finished);
        entry.computed = if failed { end - 1 } else { end };
        entry.logits_from = entry.logits_from.map(|from| from.max(entry.computed));
        if !(failed && result.finished) {
            let shared = entry.f32_from.map_or(entry.computed, |from| from.min(entry.computed));
            blocks.publish(chunk.seq, &entry.tokens[..shared as usize]);
        }
        if result.finished {
            let (rank, in_flight) = (entry.rank, entry.in_flight);
            self.wasted_rows += u64::from(in_flight);
            self.entries.remove(&chunk.seq);
            self.leave_seat(chunk.seq, rank, blocks);
            return;
        }
        if chunk.samples
            && let Some(token) = result.token
        {
            entry.tokens.push(token);
        }
        if failed || redo {
            self.wasted_rows += u64::from(entry.void(next_plan));
        }
    }

    /// False if nothing more may be planned, so that rows in flight come out of it.
    fn plan_running(&mut self, phase: Phase, budget: &mut Budget, blocks: &mut BlockAllocator) -> bool {
        let mut at = 0;
        while at < self.running.len() && budget.rows > 0 {
            let seq = self.running[at].seq;
            let Some(entry) = self.entries.get(&seq) else { break };
            let (start, left) = (entry.next_row(), entry.rows_left());
            if left == 0 || (left == 1) != (phase == Phase::Decode) {
                at += 1;
                continue;
            }
            if entry.is_exhausted(blocks) {
                if entry.in_flight > 0 {
                    at += 1;
                } else {
                    self.exhaust(at, blocks);
                }
                continue;
            }
            let rows = entry.rows_within(start, left.min(budget.rows), budget.logit_rows);
            if rows == 0 {
                at += 1;
                continue;
            }
            if blocks.prepare_rows(seq, start, start + rows, &mut self.plan.copies).is_ok() {
                self.plan_chunk(seq, rows, budget);
                at += 1;
                continue;
            }
            match self.relieve(at, blocks) {
                Relief::Freed | Relief::Left => {}
                Relief::Wait => at += 1,
                Relief::Stall => return false,
            }
        }
        true
    }

    fn plan_waiting(&mut self, budget: &mut Budget, blocks: &mut BlockAllocator) {
        while budget.rows > 0 && self.running.len() < self.config.max_num_seqs as usize {
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
            let start = self.hit.tokens();
            let rows = entry.rows_within(start, (len - start).min(budget.rows), budget.logit_rows);
            let spare = if self.running.is_empty() { 0 } else { self.config.watermark_blocks };
            let needed = blocks.admission_blocks(&self.hit, len);
            let fits = needed.saturating_add(spare) <= blocks.available();
            if rows == 0 || !fits || blocks.admit(seq, &self.hit, len).is_err() {
                return;
            }
            let reserved = reserved_tokens(entry, blocks);
            let table = blocks.reserve_table(seq, reserved);
            debug_assert!(table.is_ok());
            entry.tokens.reserve_exact((reserved as usize).saturating_sub(entry.tokens.len()));
            entry.state = State::Running;
            entry.computed = start;
            entry.cached_tokens = start.min(entry.prompt_len);
            self.waiting.remove(rank);
            self.seat(seq, rank);
            self.plan_chunk(seq, rows, budget);
        }
    }

    fn plan_chunk(&mut self, seq: SeqId, rows: u32, budget: &mut Budget) {
        let Some(entry) = self.entries.get_mut(&seq) else { return };
        let start = entry.next_row();
        let samples = start + rows == entry.plannable();
        let placeholder = (start >= entry.len()).then_some(entry.newest);
        budget.take(rows, entry.prompt_logits(start, start + rows) + u32::from(samples));
        entry.in_flight += rows;
        if samples {
            entry.pending += 1;
            entry.newest = Placeholder { plan: self.plan.number, chunk: self.plan.chunks.len() };
        }
        self.plan.chunks.push(Chunk { seq, start, len: rows, samples, placeholder });
    }
}
