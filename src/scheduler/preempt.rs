//! Preemption: frees blocks when a running sequence needs a block and the pool has none available.
//!
//! The victim is the last sequence of the order (lowest priority, then newest) that has no in-flight rows. Preemption
//! is by recompute: the blocks of the victim are freed, its tokens are kept, and its unchanged key puts it at the front
//! of its class in the waiting queue. Its published blocks stay in the prefix cache until they are evicted, so
//! recomputing them often costs little. If the sequence that needs the block is itself the last one, it is preempted
//! itself; if it is the only running sequence, it is capped.

use super::{RunningSeq, Scheduler, SeqStatus};
use crate::kv_cache::BlockAllocator;

/// Outcome for the running sequence that needed a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PreemptOutcome {
    /// A later sequence was preempted: try again.
    Preempted,
    /// The sequence itself was preempted or capped.
    Stopped,
    /// Every other candidate has rows in this step: the sequence is skipped in this step.
    Skipped,
    /// A candidate may have rows in earlier plans: no further sequence is planned until they are committed.
    Stall,
}

impl Scheduler {
    /// Frees blocks for the running sequence at index `at`.
    pub(super) fn free_blocks_for(&mut self, at: usize, blocks: &mut BlockAllocator) -> PreemptOutcome {
        let in_flight = |running_seq: &RunningSeq| {
            self.sequences.get(&running_seq.seq).is_some_and(|sequence| sequence.in_flight > 0)
        };
        let skipped = if self.in_flight.is_empty() { PreemptOutcome::Skipped } else { PreemptOutcome::Stall };
        let last = self.running.len() - 1;
        match self.running.iter().rposition(|running_seq| !in_flight(running_seq)) {
            Some(victim) if victim > at => {
                self.preempt(victim, blocks);
                PreemptOutcome::Preempted
            }
            Some(victim) if victim == at && last == 0 => {
                self.cap(at, blocks);
                PreemptOutcome::Stopped
            }
            Some(victim) if victim == at && at == last => {
                self.preempt(at, blocks);
                PreemptOutcome::Stopped
            }
            // The sequence itself has in-flight rows, or all later ones have: to preempt one of them would waste
            // planned rows.
            _ => skipped,
        }
    }

    fn preempt(&mut self, at: usize, blocks: &mut BlockAllocator) {
        let RunningSeq { key, seq } = self.running[at];
        self.stop_running(seq, key, blocks);
        if let Some(sequence) = self.sequences.get_mut(&seq) {
            sequence.status = SeqStatus::Waiting;
            (sequence.computed, sequence.f32_fallback_from) = (0, None);
        }
        self.waiting.push(key, seq);
        self.plan.preempted.push(seq);
        self.preemptions += 1;
    }

    /// Caps the running sequence at index `at`: it cannot get another token.
    pub(super) fn cap(&mut self, at: usize, blocks: &mut BlockAllocator) {
        let RunningSeq { key, seq } = self.running[at];
        self.stop_running(seq, key, blocks);
        if let Some(sequence) = self.sequences.get_mut(&seq) {
            sequence.status = SeqStatus::Capped;
            sequence.computed = 0;
        }
        self.plan.capped.push(seq);
    }
}
