//! Pipeline of in-flight steps: steps that are launched and not completed yet.
//!
//! ```text
//!   depth 2     prepare 1 ─ launch 1 ─ prepare 2 ─ launch 2 ─ complete 1 ─ prepare 3 ─ launch 3 ─ complete 2 …
//!   the device              └── 1 runs ──────────────────────┘└── 2 runs ───────────────────────┘└── 3 runs …
//! ```
//! - *prepare*: process requests, schedule, build the batch (rows and block tables);
//! - *launch*: queue the batch on the device, which then computes it;
//! - *complete*: wait, sample, detokenize, publish, commit.
//!
//! One thread does all of this; only the device's work overlaps with it. Steps complete in the order in which they were
//! planned, so a request receives the same tokens in the same order at any depth. If a sequence ends while it has rows
//! in a later in-flight step, these rows are stale and their results are ignored. An error in a step ends the engine;
//! the later in-flight steps end with it, and none of their results are published.

use crate::num::to_u32;
use std::collections::VecDeque;

use crate::graph::Cost;
use crate::kv_cache::BlockAllocator;
use crate::scheduler::{Placeholder, Scheduler, SeqResult, StepOutput, Tick};

use super::active_requests::ActiveRequests;
use super::batch_builder::BatchBuilder;
use crate::engine::config::EngineConfig;
use crate::runner::BatchId;

/// One planned step and its results.
#[derive(Debug, Default)]
pub(crate) struct InFlightStep {
    /// Number of the plan.
    pub plan: u64,
    pub batch: BatchBuilder,
    pub output: StepOutput,
    /// For each chunk: whether its results are ignored.
    pub stale: Vec<bool>,
    pub batch_id: BatchId,
    /// Time at which the step was planned.
    pub planned_at: Tick,
    /// Time at which the step was launched.
    pub launched_at: Tick,
    pub cost: Cost,
}

#[derive(Debug)]
pub(crate) struct Pipeline {
    depth: usize,
    /// Oldest step first.
    in_flight: VecDeque<InFlightStep>,
    free_steps: Vec<InFlightStep>,
}

impl Pipeline {
    /// Reserves the memory of `depth` steps.
    pub fn with_capacity(
        depth: u32,
        config: &EngineConfig,
        longest_blocks: u32,
        pool_blocks: u32,
        max_rows: u32,
    ) -> Self {
        let depth = depth as usize;
        let spare =
            (0..depth).map(|_| InFlightStep::with_capacity(config, longest_blocks, pool_blocks, max_rows)).collect();
        Self { depth, in_flight: VecDeque::with_capacity(depth), free_steps: spare }
    }

    /// Returns whether one more step may be launched.
    pub fn has_capacity(&self) -> bool {
        self.in_flight.len() < self.depth
    }

    pub fn is_empty(&self) -> bool {
        self.in_flight.is_empty()
    }

    /// Returns the step of the plan made last, with its batch.
    pub fn prepare(
        &mut self,
        now: Tick,
        scheduler: &Scheduler,
        blocks: &BlockAllocator,
        requests: &ActiveRequests,
    ) -> InFlightStep {
        let mut step = self.free_steps.pop().unwrap_or_default();
        let plan = scheduler.plan();
        step.plan = plan.number;
        step.planned_at = now;
        step.batch.build(&plan.chunks, scheduler, blocks, requests, |placeholder| self.deferred_source(placeholder));
        step
    }

    /// Adds a launched step as the newest one.
    pub fn push(&mut self, step: InFlightStep) {
        self.in_flight.push_back(step);
    }

    /// Removes and returns the oldest step, so that it can be completed.
    pub fn pop(&mut self) -> Option<InFlightStep> {
        self.in_flight.pop_front()
    }

    /// Keeps a completed step, so that its memory is reused.
    pub fn reuse(&mut self, step: InFlightStep) {
        self.free_steps.push(step);
    }

    /// Returns the in-flight batch that samples the token of a placeholder, and the index of its logit row.
    fn deferred_source(&self, placeholder: Placeholder) -> Option<(BatchId, u32)> {
        let step = self.in_flight.iter().find(|step| step.plan == placeholder.plan)?;
        Some((step.batch_id, step.batch.sampled_row(placeholder.chunk)?))
    }
}

impl InFlightStep {
    fn with_capacity(config: &EngineConfig, longest_blocks: u32, pool_blocks: u32, max_rows: u32) -> Self {
        let seqs = config.max_num_seqs as usize;
        let rows = config.max_num_batched_tokens as usize;
        // One entry per block. With shared prefixes, the block tables of a step may contain a block more than once.
        let longest = longest_blocks.min(pool_blocks) as usize;
        let tables = longest.saturating_mul(seqs).min(rows.saturating_add(pool_blocks as usize));
        Self {
            output: StepOutput { results: Vec::with_capacity(seqs) },
            stale: Vec::with_capacity(seqs),
            batch: BatchBuilder::with_capacity(rows, seqs, tables, seqs.min(max_rows as usize)),
            ..Self::default()
        }
    }

    /// Marks the chunks whose results are ignored, and initializes the result of each chunk.
    pub fn mark_stale(&mut self, scheduler: &Scheduler) {
        let Self { plan, batch, output, stale, .. } = self;
        let chunks = scheduler.in_flight_chunks(*plan);
        stale.clear();
        stale.extend(chunks.iter().map(|chunk| scheduler.is_stale(*plan, chunk.seq)));
        batch.drop_stale(stale);
        output.results.clear();
        output.results.extend(chunks.iter().map(|chunk| SeqResult { seq: chunk.seq, token: None, finished: false }));
    }

    /// Marks the results of sequences whose request failed in this step as finished without a token. The scheduler then
    /// does not publish the rows of this step to the prefix cache.
    pub fn discard_failed(&mut self, requests: &ActiveRequests) {
        let results = self.output.results.iter_mut();
        for result in results.filter(|result| !result.finished && requests.get(result.seq).is_none()) {
            *result = SeqResult { seq: result.seq, token: None, finished: true };
        }
    }

    /// Returns the number of choices that end with this step.
    pub fn finished(&self) -> u32 {
        let ends = |(result, stale): &(&SeqResult, &bool)| result.finished && !**stale;
        to_u32(self.output.results.iter().zip(&self.stale).filter(ends).count())
    }
}
