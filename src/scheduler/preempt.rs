//! Who gives way when a sequence needs a block and none is left.
//!
//! Rule: the last of the order (lowest priority, then newest) that has no rows in flight. It is recomputed later: blocks
//! go back, tokens stay, and its rank puts it at the front of its class. Published blocks stay findable, so recomputing
//! often costs little. A sequence that is last itself gives way itself; one that is alone is exhausted.

use super::{Scheduler, Seat, State};
use crate::kv_cache::BlockAllocator;

/// What became of the seat that needed room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Relief {
    /// Somebody behind it gave way: try again.
    Freed,
    /// It has left its seat itself.
    Left,
    /// Everybody else is in this very step: it sits it out.
    Wait,
    /// Whoever could give way has rows in earlier plans: nobody else is planned until they are committed.
    Stall,
}

impl Scheduler {
    /// Makes room for the sequence on seat `at`.
    pub(super) fn relieve(&mut self, at: usize, blocks: &mut BlockAllocator) -> Relief {
        let in_flight = |seat: &Seat| self.entries.get(&seat.seq).is_some_and(|entry| entry.in_flight > 0);
        let sit_out = if self.flights.is_empty() { Relief::Wait } else { Relief::Stall };
        let last = self.running.len() - 1;
        match self.running.iter().rposition(|seat| !in_flight(seat)) {
            Some(victim) if victim > at => {
                self.preempt(victim, blocks);
                Relief::Freed
            }
            Some(victim) if victim == at && last == 0 => {
                self.exhaust(at, blocks);
                Relief::Left
            }
            Some(victim) if victim == at && at == last => {
                self.preempt(at, blocks);
                Relief::Left
            }
            // It is in flight itself, or everyone behind it is: a preemption there would throw planned work away.
            _ => sit_out,
        }
    }

    fn preempt(&mut self, at: usize, blocks: &mut BlockAllocator) {
        let Seat { rank, seq } = self.running[at];
        self.leave_seat(seq, rank, blocks);
        if let Some(entry) = self.entries.get_mut(&seq) {
            entry.state = State::Waiting;
            (entry.computed, entry.f32_from) = (0, None);
        }
        self.waiting.push(rank, seq);
        self.plan.preempted.push(seq);
        self.preemptions += 1;
    }

    /// Ends the sequence on seat `at`: it can go no further.
    pub(super) fn exhaust(&mut self, at: usize, blocks: &mut BlockAllocator) {
        let Seat { rank, seq } = self.running[at];
        self.leave_seat(seq, rank, blocks);
        if let Some(entry) = self.entries.get_mut(&seq) {
            entry.state = State::Exhausted;
            entry.computed = 0;
        }
        self.plan.exhausted.push(seq);
    }
}
