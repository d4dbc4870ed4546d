//! In-flight steps: launched and not completed yet.
//!
//! ```text
//!   depth 2     prepare 1 ─ launch 1 ─ prepare 2 ─ launch 2 ─ complete 1 ─ prepare 3 ─ launch 3 ─ complete 2 …
//!   the device              └── 1 runs ──────────────────────┘└── 2 runs ──────────────────────┘└── 3 runs …
//! ```
//! - *prepare*: poll requests, schedule, build rows and block tables;
//! - *launch*: queue the model's work on the device;
//! - *complete*: wait for the results, sample, detokenize, publish, commit.
//!
//! One thread does all of this; only the device runs concurrently. Steps are completed in the order in which they were
//! planned, so a request sees the same tokens in the same order at any depth. The rows of a sequence that has ended in
//! the meantime are stale, and their results are ignored. An error in a step ends the engine; the results of later
//! steps are not published.

use crate::num::to_u32;
use std::collections::VecDeque;

use crate::graph::Cost;
use crate::kv_cache::BlockAllocator;
use crate::scheduler::{Placeholder, Scheduler, SeqResult, StepOutput, Tick};

use super::active_requests::ActiveRequests;
use super::batch_builder::BatchBuilder;
use crate::engine::config::EngineConfig;
use crate::runner::BatchId;

/// One planned step with its results.
#[derive(Debug, Default)]
pub(crate) struct InFlightStep {
    /// The plan's number.
    pub plan: u64,
    pub batch: BatchBuilder,
    pub output: StepOutput,
    /// By chunk: whether its results are ignored.
    pub stale: Vec<bool>,
    pub batch_id: BatchId,
    /// When it was planned.
    pub planned_at: Tick,
    /// When it was launched.
    pub launched_at: Tick,
    pub cost: Cost,
}

#[derive(Debug)]
pub(crate) struct Pipeline {
    depth: usize,
    /// Oldest first.
    in_flight: VecDeque<InFlightStep>,
    free_steps: Vec<InFlightStep>,
}

impl Pipeline {
    /// Reserves capacity for the steps of `depth` plans.
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

    /// Whether one more step may be launched.
    pub fn has_capacity(&self) -> bool {
        self.in_flight.len() < self.depth
    }

    pub fn is_empty(&self) -> bool {
        self.in_flight.is_empty()
    }

    /// The step of the plan made last.
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

    /// Appends a launched step.
    pub fn push(&mut self, step: InFlightStep) {
        self.in_flight.push_back(step);
    }

    /// Removes the oldest step, which is completed next.
    pub fn pop(&mut self) -> Option<InFlightStep> {
        self.in_flight.pop_front()
    }

    /// Keeps the buffers of a completed step for reuse.
    pub fn reuse(&mut self, step: InFlightStep) {
        self.free_steps.push(step);
    }

    /// The in-flight batch that samples a placeholder, and the row of logits.
    fn deferred_source(&self, placeholder: Placeholder) -> Option<(BatchId, u32)> {
        let step = self.in_flight.iter().find(|step| step.plan == placeholder.plan)?;
        Some((step.batch_id, step.batch.sampled_row(placeholder.chunk)?))
    }
}

impl InFlightStep {
    fn with_capacity(config: &EngineConfig, longest_blocks: u32, pool_blocks: u32, max_rows: u32) -> Self {
        let seqs = config.max_num_seqs as usize;
        let rows = config.max_num_batched_tokens as usize;
        // One table entry per block. Shared prefixes may appear in several tables of a step.
        let longest = longest_blocks.min(pool_blocks) as usize;
        let tables = longest.saturating_mul(seqs).min(rows.saturating_add(pool_blocks as usize));
        Self {
            output: StepOutput { results: Vec::with_capacity(seqs) },
            stale: Vec::with_capacity(seqs),
            batch: BatchBuilder::with_capacity(rows, seqs, tables, seqs.min(max_rows as usize)),
            ..Self::default()
        }
    }

    /// Marks the chunks whose results are ignored, and adds an empty result for each chunk.
    pub fn mark_stale(&mut self, scheduler: &Scheduler) {
        let Self { plan, batch, output, stale, .. } = self;
        let chunks = scheduler.in_flight_chunks(*plan);
        stale.clear();
        stale.extend(chunks.iter().map(|chunk| scheduler.is_stale(*plan, chunk.seq)));
        batch.drop_stale(stale);
        output.results.clear();
        output.results.extend(chunks.iter().map(|chunk| SeqResult { seq: chunk.seq, token: None, finished: false }));
    }

    /// Keeps the rows of sequences that failed in this step out of the prefix cache.
    pub fn discard_failed(&mut self, requests: &ActiveRequests) {
        let results = self.output.results.iter_mut();
        for result in results.filter(|result| !result.finished && requests.get(result.seq).is_none()) {
            *result = SeqResult { seq: result.seq, token: None, finished: true };
        }
    }

    /// Choices that end on this step.
    pub fn finished(&self) -> u32 {
        let ends = |(result, void): &(&SeqResult, &bool)| result.finished && !**void;
        to_u32(self.output.results.iter().zip(&self.stale).filter(ends).count())
    }
}
