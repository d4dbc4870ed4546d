//! Who gives way when a sequence needs a block and none is left.
//!
//! Rule: the last of the order (lowest priority, then newest) that has no rows in `in_flight_plan`. It is recomputed later: blocks
//! go back, tokens stay, and its key puts it at the front of its class. Published blocks stay findable, so recomputing
//! often costs little. A sequence that is last itself gives way itself; one that is alone is exhausted.

use super::{RunningSeq, Scheduler, SeqStatus};
use crate::kv_cache::BlockAllocator;

/// What became of the `running_seq` that needed room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PreemptOutcome {
    /// Somebody behind it gave way: try again.
    Preempted,
    /// It has left its `running_seq` itself.
    Stopped,
    /// Everybody else is in this very step: it sits it out.
    SitOut,
    /// Whoever could give way has rows in earlier plans: nobody else is planned until they are committed.
    Stall,
}

impl Scheduler {
    /// Makes room for the sequence on `running_seq` `at`.
    pub(super) fn make_space(&mut self, at: usize, blocks: &mut BlockAllocator) -> PreemptOutcome {
        let in_flight = |running_seq: &RunningSeq| {
            self.sequences.get(&running_seq.seq).is_some_and(|sequence| sequence.in_flight > 0)
        };
        let sit_out = if self.in_flight.is_empty() { PreemptOutcome::SitOut } else { PreemptOutcome::Stall };
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
            // It is in in_flight_plan itself, or everyone behind it is: a preemption there would throw planned work away.
            _ => sit_out,
        }
    }

    fn preempt(&mut self, at: usize, blocks: &mut BlockAllocator) {
        let RunningSeq { key, seq } = self.running[at];
        self.stop_running(seq, key, blocks);
        if let Some(sequence) = self.sequences.get_mut(&seq) {
            sequence.status = SeqStatus::Waiting;
            (sequence.computed, sequence.f32_from) = (0, None);
        }
        self.waiting.push(key, seq);
        self.plan.preempted.push(seq);
        self.preemptions += 1;
    }

    /// Ends the sequence on `running_seq` `at`: it can go no further.
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
