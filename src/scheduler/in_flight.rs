//! Plans in flight.

use std::collections::VecDeque;

use super::plan::{Chunk, StepPlan};
use crate::kv_cache::SeqId;

/// Plans that have not been committed, oldest first. Lists are used again.
#[derive(Clone, Debug, Default)]
pub(super) struct Flights {
    next_plan: u64,
    flying: VecDeque<Flight>,
    spare: Vec<Vec<Chunk>>,
}

#[derive(Clone, Debug)]
pub(super) struct Flight {
    pub plan: u64,
    pub chunks: Vec<Chunk>,
}

impl Flights {
    /// The number of the plan that is made next.
    pub fn next_plan(&self) -> u64 {
        self.next_plan
    }

    pub fn is_empty(&self) -> bool {
        self.flying.is_empty()
    }

    /// Makes room for plans of so many chunks.
    pub fn reserve(&mut self, chunks: usize) {
        let flying = self.flying.iter_mut().map(|flight| &mut flight.chunks);
        for list in flying.chain(&mut self.spare) {
            list.reserve(chunks.saturating_sub(list.len()));
        }
    }

    /// Rows of a sequence, and those of them that sample, in plans from `valid_from` on.
    pub fn rows_of(&self, seq: SeqId, valid_from: u64) -> (u32, u32) {
        let counting = self.flying.iter().filter(|flight| flight.plan >= valid_from);
        let own = counting.flat_map(|flight| &flight.chunks).filter(|chunk| chunk.seq == seq);
        own.fold((0, 0), |(rows, samples), chunk| (rows + chunk.len, samples + u32::from(chunk.samples)))
    }

    /// Counts a plan, and keeps what it holds until it is committed.
    pub fn take_off(&mut self, plan: &StepPlan) {
        self.next_plan = plan.number + 1;
        if plan.chunks.is_empty() {
            return;
        }
        let mut chunks = self.spare.pop().unwrap_or_else(|| Vec::with_capacity(plan.chunks.capacity()));
        chunks.extend_from_slice(&plan.chunks);
        self.flying.push_back(Flight { plan: plan.number, chunks });
    }

    /// The oldest plan.
    pub fn pop(&mut self) -> Option<Flight> {
        self.flying.pop_front()
    }

    /// Takes a list back.
    pub fn recycle(&mut self, mut chunks: Vec<Chunk>) {
        chunks.clear();
        self.spare.push(chunks);
    }
}
