//! One step: `schedule` makes the plan, and `commit` applies its results.
//!
//! A plan lists rows; the results contain the token of each chunk that sampled. The rows of a sequence are computed in
//! order and without gaps, each row once, unless the sequence is preempted and recomputed or in-flight rows become
//! stale.

use super::in_flight::InFlightPlan;
use super::preempt::PreemptOutcome;
use super::{Scheduler, SeqState, SeqStatus, Tick, max_tokens_held};
use crate::kv_cache::{BlockAllocator, SeqId};
use crate::scheduler::{Chunk, Placeholder, SeqResult, StepOutput, StepPlan};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Decode,
    Prefill,
}

/// Budget left in a step.
#[derive(Clone, Copy, Debug)]
struct Budget {
    rows: u32,
    logit_rows: u32,
}

impl Budget {
    fn spend(&mut self, rows: u32, logit_rows: u32) {
        self.rows -= rows;
        self.logit_rows -= logit_rows;
    }
}

impl Scheduler {
    /// Makes the plan of the next step.
    ///
    /// Running sequences come first, then waiting sequences in queue order. A step that preempts a sequence admits
    /// none. A plan without chunks needs no commit.
    pub fn schedule(&mut self, now: Tick, blocks: &mut BlockAllocator) -> &StepPlan {
        self.clock = self.clock.max(now);
        for seq in self.plan.capped.drain(..) {
            if self.sequences.get(&seq).is_some_and(|sequence| sequence.status == SeqStatus::Capped) {
                self.sequences.remove(&seq);
            }
        }
        self.plan.clear();
        self.plan.number = self.in_flight.next_plan();
        let mut budget = Budget { rows: self.step_budget_tokens, logit_rows: self.config.max_logit_rows };
        let may_admit = self.plan_running(Phase::Decode, &mut budget, blocks)
            && self.plan_running(Phase::Prefill, &mut budget, blocks);
        if may_admit && self.plan.preempted.is_empty() {
            self.plan_waiting(&mut budget, blocks);
        }
        self.in_flight.push(&self.plan);
        &self.plan
    }

    /// Returns the last plan that `schedule` made.
    pub fn plan(&self) -> &StepPlan {
        &self.plan
    }

    /// Returns whether the rows of a sequence in an in-flight plan are stale, so that their results must be ignored.
    ///
    /// An unknown sequence is stale.
    pub fn is_stale(&self, plan: u64, seq: SeqId) -> bool {
        self.sequences.get(&seq).is_none_or(|sequence| sequence.is_stale(plan))
    }

    /// Commits the results of the oldest in-flight plan, ignoring those of stale chunks.
    pub fn commit(&mut self, done: &StepOutput, blocks: &mut BlockAllocator) {
        let Some(InFlightPlan { plan, chunks }) = self.in_flight.pop() else { return };
        let mut results = done.results.as_slice();
        for chunk in &chunks {
            let found = results.iter().position(|result| result.seq == chunk.seq);
            let result = found.map(|at| {
                let result = results[at];
                results = &results[at + 1..];
                result
            });
            self.commit_chunk(plan, chunk, result, blocks);
        }
        self.in_flight.reuse(chunks);
    }

    fn commit_chunk(&mut self, plan: u64, chunk: &Chunk, result: Option<SeqResult>, blocks: &mut BlockAllocator) {
        let next_plan = self.in_flight.next_plan();
        let is_valid = |sequence: &&mut SeqState| !sequence.is_stale(plan);
        let Some(sequence) = self.sequences.get_mut(&chunk.seq).filter(is_valid) else { return };
        sequence.in_flight -= chunk.len;
        sequence.pending -= u32::from(chunk.samples);
        let recompute = std::mem::take(&mut sequence.recompute);
        let Some(result) = result else {
            self.wasted_rows += u64::from(sequence.mark_stale(next_plan));
            return;
        };
        let end = chunk.start + chunk.len;
        let failed = result.token.is_none() && (chunk.samples || result.finished);
        sequence.computed = if failed { end - 1 } else { end };
        sequence.logits_from = sequence.logits_from.map(|from| from.max(sequence.computed));
        if !(failed && result.finished) {
            let shared = sequence.f32_fallback_from.map_or(sequence.computed, |from| from.min(sequence.computed));
            blocks.publish(chunk.seq, &sequence.tokens[..shared as usize]);
        }
        if result.finished {
            let (key, in_flight) = (sequence.key, sequence.in_flight);
            self.wasted_rows += u64::from(in_flight);
            self.sequences.remove(&chunk.seq);
            self.stop_running(chunk.seq, key, blocks);
            return;
        }
        if chunk.samples
            && let Some(token) = result.token
        {
            sequence.tokens.push(token);
        }
        if failed || recompute {
            self.wasted_rows += u64::from(sequence.mark_stale(next_plan));
        }
    }

    /// Plans the running sequences of a phase; returns false if nothing more may be planned, so that in-flight plans
    /// drain.
    fn plan_running(&mut self, phase: Phase, budget: &mut Budget, blocks: &mut BlockAllocator) -> bool {
        let mut at = 0;
        while at < self.running.len() && budget.rows > 0 {
            let seq = self.running[at].seq;
            let Some(sequence) = self.sequences.get_mut(&seq) else { break };
            let (start, left) = (sequence.next_row(), sequence.rows_left());
            if left == 0 || (left == 1) != (phase == Phase::Decode) {
                at += 1;
                continue;
            }
            if sequence.is_capped(blocks) {
                if sequence.in_flight > 0 {
                    at += 1;
                } else {
                    self.cap(at, blocks);
                }
                continue;
            }
            let rows = sequence.rows_within(start, left.min(budget.rows), budget.logit_rows);
            if rows == 0 {
                at += 1;
                continue;
            }
            if blocks.prepare_rows(seq, start, start + rows, &mut self.plan.copies).is_ok() {
                sequence.plan_rows(seq, rows, &mut self.plan, budget);
                at += 1;
                continue;
            }
            match self.free_blocks_for(at, blocks) {
                PreemptOutcome::Preempted | PreemptOutcome::Stopped => {}
                PreemptOutcome::Skipped => at += 1,
                PreemptOutcome::Stall => return false,
            }
        }
        true
    }

    fn plan_waiting(&mut self, budget: &mut Budget, blocks: &mut BlockAllocator) {
        while budget.rows > 0 && self.running.len() < self.config.max_num_seqs as usize {
            let Some((key, seq)) = self.waiting.first() else { return };
            let Some(sequence) = self.sequences.get_mut(&seq) else { return };
            let len = sequence.len();
            if sequence.is_capped(blocks) {
                // The sequence was at its limit and was preempted before `plan_running` reached it.
                sequence.status = SeqStatus::Capped;
                self.waiting.remove(key);
                self.plan.capped.push(seq);
                continue;
            }
            if sequence.read_prefix_cache {
                blocks.lookup_into(&sequence.tokens, &sequence.salt, &mut self.hit);
            } else {
                self.hit.reset(&sequence.salt);
            }
            let start = self.hit.tokens();
            let rows = sequence.rows_within(start, (len - start).min(budget.rows), budget.logit_rows);
            let spare = if self.running.is_empty() { 0 } else { self.config.watermark_blocks };
            let needed = blocks.admission_blocks(&self.hit, len);
            let fits = needed.saturating_add(spare) <= blocks.available();
            if rows == 0 || !fits || blocks.admit(seq, &self.hit, len).is_err() {
                return;
            }
            let reserved = max_tokens_held(sequence, blocks);
            let table = blocks.reserve_table(seq, reserved);
            debug_assert!(table.is_ok());
            sequence.tokens.reserve_exact((reserved as usize).saturating_sub(sequence.tokens.len()));
            sequence.status = SeqStatus::Running;
            sequence.computed = start;
            sequence.cached_tokens = start.min(sequence.prompt_len);
            sequence.plan_rows(seq, rows, &mut self.plan, budget);
            self.waiting.remove(key);
            self.start_running(seq, key);
        }
    }
}

impl SeqState {
    /// Adds the next `rows` rows of the sequence to the plan.
    fn plan_rows(&mut self, seq: SeqId, rows: u32, plan: &mut StepPlan, budget: &mut Budget) {
        let start = self.next_row();
        let samples = start + rows == self.schedulable_len();
        let placeholder = (start >= self.len()).then_some(self.newest_placeholder);
        budget.spend(rows, self.prompt_logits(start, start + rows) + u32::from(samples));
        self.in_flight += rows;
        if samples {
            self.pending += 1;
            self.newest_placeholder = Placeholder { plan: plan.number, chunk: plan.chunks.len() };
        }
        plan.chunks.push(Chunk { seq, start, len: rows, samples, placeholder });
    }
}
