//! In-flight plans: plans that are made and not committed yet.

use std::collections::VecDeque;

use super::plan::{Chunk, StepPlan};
use crate::kv_cache::SeqId;

/// Queue of in-flight plans, oldest first. Chunk lists are reused.
#[derive(Clone, Debug, Default)]
pub(super) struct InFlightPlans {
    next_plan: u64,
    plans: VecDeque<InFlightPlan>,
    free_lists: Vec<Vec<Chunk>>,
}

#[derive(Clone, Debug)]
pub(super) struct InFlightPlan {
    pub plan: u64,
    pub chunks: Vec<Chunk>,
}

impl InFlightPlans {
    /// Returns the number of the next plan.
    pub fn next_plan(&self) -> u64 {
        self.next_plan
    }

    pub fn is_empty(&self) -> bool {
        self.plans.is_empty()
    }

    /// Returns the chunks of an in-flight plan; empty for the number of any other plan.
    pub fn chunks(&self, plan: u64) -> &[Chunk] {
        self.plans.iter().find(|in_flight| in_flight.plan == plan).map_or(&[], |in_flight| &in_flight.chunks)
    }

    /// Reserves capacity for plans of `chunks` chunks.
    pub fn reserve(&mut self, chunks: usize) {
        let plans = self.plans.iter_mut().map(|in_flight_plan| &mut in_flight_plan.chunks);
        for list in plans.chain(&mut self.free_lists) {
            list.reserve(chunks.saturating_sub(list.len()));
        }
    }

    /// Counts the rows of a sequence, and its chunks that sample, in plans from `first_valid_plan` on.
    pub fn rows_of(&self, seq: SeqId, first_valid_plan: u64) -> (u32, u32) {
        let valid = self.plans.iter().filter(|in_flight_plan| in_flight_plan.plan >= first_valid_plan);
        let own = valid.flat_map(|in_flight_plan| &in_flight_plan.chunks).filter(|chunk| chunk.seq == seq);
        own.fold((0, 0), |(rows, samples), chunk| (rows + chunk.len, samples + u32::from(chunk.samples)))
    }

    /// Advances the plan number, and keeps a copy of the plan's chunks until its commit.
    pub fn push(&mut self, plan: &StepPlan) {
        self.next_plan = plan.number + 1;
        if plan.chunks.is_empty() {
            return;
        }
        let mut chunks = self.free_lists.pop().unwrap_or_else(|| Vec::with_capacity(plan.chunks.capacity()));
        chunks.extend_from_slice(&plan.chunks);
        self.plans.push_back(InFlightPlan { plan: plan.number, chunks });
    }

    /// Removes and returns the oldest plan.
    pub fn pop(&mut self) -> Option<InFlightPlan> {
        self.plans.pop_front()
    }

    /// Stores an emptied chunk list for reuse.
    pub fn reuse(&mut self, mut chunks: Vec<Chunk>) {
        chunks.clear();
        self.free_lists.push(chunks);
    }
}
