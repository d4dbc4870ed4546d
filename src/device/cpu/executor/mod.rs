//! A loaded plan, or one per rank: runs its steps group by group, each group on the whole thread pool.
//!
//! A group is one run of the thread pool shared by all its steps (more runs if a step has several phases). Steps pass
//! their operands as slices borrowed from the arena and checked to be disjoint; workers write disjoint parts of them.
//! The end of the run is the barrier. Ranks run in sequence up to each collective. All scratch is reserved at the
//! bucket's size when the plan is loaded; only the first launch on a pool allocates (its block maps).

#![forbid(unsafe_code)]

mod attention;
mod custom;
mod group;
pub(crate) mod launch;
mod linear;
mod operands;
mod poison;
mod rank;
mod row_ops;
mod row_status;
mod scratch;

use crate::device::cpu::executor::launch::{AttentionBuffers, IoBytes, Launch};
pub use poison::Poison;

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use super::Isa;
use super::kernels::attention::{AttentionDims, AttentionScratch, WorkSplit};
use super::kernels::kv_cache::{BatchRows, CpuKvLayout};
use super::measure::profile::{StepTime, StepTimes};
use super::memory::{AlignedBytes, ArenaBorrows, available_bytes};
use super::thread_pool::ThreadPool;
use super::weights::WeightSet;
use crate::device::{CustomFailure, DeviceError, LaunchArgs, LaunchShape};
use crate::graph::{ArenaTooLarge, CompileError, Elem, Op, Plan, row_bytes};
use crate::kv_cache::BlockId;
use poison::ArenaPoison;
use rank::RankProgram;
use row_status::RowStatusFlags;
use scratch::{Scratch, StreamScratch, WorkerScratch};

/// The plan's int8 rows and this device's have the same layout.
const _: () = {
    let mut cols = 1;
    while cols < 600 {
        assert!(row_bytes(Elem::Q8, cols) == super::kernels::q8_rows::QuantLayout::new(cols).row_bytes());
        cols += 1;
    }
};

/// The plans of all ranks with their weights, arenas and scratch.
#[derive(Debug)]
pub(super) struct Program {
    ranks: Vec<RankProgram>,
    /// Layout of the whole KV pool.
    kv: CpuKvLayout,
    scratch: Scratch,
    flags: RowStatusFlags,
    /// Concatenated block tables of the launch.
    tables: Vec<BlockId>,
    /// One bit per block that the launch writes.
    written: Vec<u64>,
    times: Option<StepTimes>,
}

impl Program {
    /// Prepares plans that passed their own check, one per rank with its weights.
    pub(super) fn new(
        plans: &[Plan],
        weights: Vec<Arc<WeightSet>>,
        kv: CpuKvLayout,
        (workers, parts_per_thread): (usize, usize),
        poison: Poison,
    ) -> Result<Self, CompileError> {
        let ranks = rank::load(plans, weights, kv, poison)?;
        let mut attention: Option<AttentionDims> = None;
        for step in plans.iter().flat_map(|plan| &plan.steps) {
            let Op::Attention(shape) = &step.op else { continue };
            let shape = attention::shape_of(shape);
            // Reserve scratch for the widest group of heads and for the loop order that needs most.
            attention = Some(attention.map_or(shape, |most| if shape.heads > most.heads { shape } else { most }));
        }
        let bucket = plans[0].bucket;
        let widest = plans.iter().flat_map(|plan| &plan.values).map(|value| value.cols).max().unwrap_or(0);
        let worker =
            |_| WorkerScratch { attention: attention.as_ref().map(AttentionScratch::new), row: vec![0.0; widest] };
        let most_parts = plans.iter().flat_map(|plan| &plan.steps).map(|step| step.outputs.len()).max().unwrap_or(0);
        let lane = |_| {
            Ok(RefCell::new(StreamScratch {
                claims: Vec::new(),
                bounds: (0..most_parts).map(|_| Vec::with_capacity(workers + 1)).collect(),
                bests: vec_with_capacity(bucket.logit_rows.saturating_mul(workers))?,
            }))
        };
        let scratch = Scratch {
            workers: RefCell::new((0..workers).map(worker).collect()),
            streams: (0..plans[0].streams).map(lane).collect::<Result<_, CompileError>>()?,
            attention: RefCell::new(AttentionBuffers {
                schedule: WorkSplit::new(workers).parts_per_thread(parts_per_thread),
                partials: vec_with_capacity(most_partials(attention.as_ref(), workers, bucket.kv_tokens))?,
            }),
        };
        let longest = bucket.kv_tokens.div_ceil(kv.geometry().block_size);
        let tables = vec_with_capacity(bucket.seqs.saturating_mul(longest))?;
        let flags = RowStatusFlags::new(bucket.tokens, plans[0].overflow);
        Ok(Self { ranks, kv, scratch, flags, tables, written: Vec::new(), times: None })
    }

    /// Enables timing of each step.
    pub(super) fn timed(mut self, timed: bool) -> Self {
        self.times = timed.then(|| StepTimes::new(&self.ranks[0].plan));
        self
    }

    pub(super) fn take_profile(&mut self) -> Vec<StepTime> {
        self.times.as_mut().map_or(Vec::new(), StepTimes::take)
    }

    /// Number of elements that overflowed so far, by operation.
    pub(super) fn overflows(&self) -> Vec<(&'static str, u64)> {
        self.flags.overflows().collect()
    }

    /// Custom operation calls that failed in the last launch.
    pub(super) fn custom_failures(&self) -> Vec<CustomFailure> {
        self.flags.custom_failures()
    }

    /// Runs the plans over one batch.
    pub(super) fn launch(
        &mut self,
        threads: &ThreadPool,
        isa: Isa,
        args: &LaunchArgs<'_>,
        mut io: IoBytes<'_>,
    ) -> Result<(), DeviceError> {
        self.check(args, &io)?;
        let block_size = self.kv.geometry().block_size;
        self.tables.clear();
        for (kv_len, line) in args.kv_lens.iter().zip(io.block_tables.chunks(args.shape.table_stride.max(1))) {
            let blocks = (*kv_len as usize).div_ceil(block_size);
            self.tables.extend(line[..blocks].iter().map(|&block| BlockId(block)));
        }
        self.flags.clear(args.shape.tokens);
        let launch = Launch {
            threads,
            isa,
            token_ids: io.token_ids,
            positions: io.positions,
            logit_rows: io.logit_rows,
            pool_bytes: io.kv_pool.len(),
            batch: BatchRows { q_lens: args.q_lens, kv_lens: args.kv_lens, tables: &self.tables },
            shape: args.shape,
            flags: &self.flags,
        };
        let mut next = 0;
        // The plans of all ranks have their collectives at the same groups.
        loop {
            let mut met = None;
            for rank in &mut self.ranks {
                met = rank.run(next, &launch, &mut io, &self.scratch, &mut self.times)?;
            }
            let Some(group) = met else { return Ok(()) };
            rank::run_collective(&mut self.ranks, group, &launch, io.logits)?;
            next = group + 1;
        }
    }

    /// Whether any rank holds the embedding of this id.
    fn knows(&self, id: u32) -> bool {
        self.ranks.iter().any(|rank| rank.ids.contains(&(id as usize)))
    }

    /// Checks what the kernels rely on: sizes agree; every id, row and block is in range; no block has two writers.
    fn check(&mut self, args: &LaunchArgs<'_>, io: &IoBytes<'_>) -> Result<(), DeviceError> {
        let LaunchShape { tokens, seqs, logit_rows, table_stride } = args.shape;
        let plan = &self.ranks[0].plan;
        let bucket = &plan.bucket;
        let block_size = self.kv.geometry().block_size;
        let pool_blocks = io.kv_pool.len() / self.kv.bytes_per_block();
        let lens = || args.q_lens.iter().zip(args.kv_lens);
        let rules = [
            ("rows fit the bucket", tokens <= bucket.tokens && logit_rows <= bucket.logit_rows),
            ("sequences fit the bucket", seqs <= bucket.seqs),
            ("the longest sequence fits the bucket", args.kv_lens.iter().all(|&kv| kv as usize <= bucket.kv_tokens)),
            ("every sequence has its lengths", args.q_lens.len() == seqs && args.kv_lens.len() == seqs),
            ("each sequence has 1 to kv_len rows", lens().all(|(q, kv)| 1 <= *q && q <= kv)),
            ("row lengths add up", args.q_lens.iter().map(|&q| u64::from(q)).sum::<u64>() == tokens as u64),
            ("every row has an id and a position", io.token_ids.len() == tokens && io.positions.len() == tokens),
            ("ids are rows of the embedding table", io.token_ids.iter().all(|&id| self.knows(id))),
            ("logit rows are rows of the batch", io.logit_rows.iter().all(|&row| (row as usize) < tokens)),
            ("every logit row has an argmax id", io.logit_rows.len() == logit_rows),
            ("the argmax buffer holds every logit row", Some(io.best.len()) == logit_rows.checked_mul(4)),
            ("every row has a status", io.row_status.len() == tokens),
            (
                "the logits buffer holds every logit row",
                Some(io.logits.len()) == logit_rows.checked_mul(4 * plan.vocab_size),
            ),
            ("every sequence has a block table", Some(io.block_tables.len()) == seqs.checked_mul(table_stride)),
            (
                "a block table has all blocks of its sequence",
                args.kv_lens.iter().all(|kv_len| (*kv_len as usize).div_ceil(block_size) <= table_stride),
            ),
        ];
        let broken =
            |rule: &str| DeviceError::Invalid { what: format!("launch: arguments do not satisfy the rule: {rule}") };
        if let Some((rule, _)) = rules.iter().find(|(_, holds)| !holds) {
            return Err(broken(rule));
        }
        let lines = || io.block_tables.chunks(table_stride.max(1)).zip(lens());
        let in_pool = |(line, (_, kv_len)): (&[u32], (&u32, &u32))| {
            let blocks = (*kv_len as usize).div_ceil(block_size);
            line[..blocks].iter().all(|&block| (block as usize) < pool_blocks)
        };
        if !lines().all(in_pool) {
            return Err(broken("block tables contain blocks of the pool"));
        }
        let written = &mut self.written;
        written.clear();
        written.resize(pool_blocks.div_ceil(64), 0);
        for (line, (q_len, kv_len)) in lines() {
            let first = (kv_len - q_len) as usize / block_size;
            for &block in &line[first..(*kv_len as usize).div_ceil(block_size)] {
                let (word, bit) = (block as usize / 64, 1 << (block % 64));
                if written[word] & bit != 0 {
                    return Err(broken("a block is written by one sequence, at one place of its block table"));
                }
                written[word] |= bit;
            }
        }
        Ok(())
    }
}

/// Number of floats of partial sums that a step may need; 0 with a single worker, which never splits a segment.
fn most_partials(attention: Option<&AttentionDims>, workers: usize, kv_tokens: usize) -> usize {
    match attention {
        Some(shape) if workers > 1 => shape.max_partials(workers, kv_tokens) * shape.partial_len(),
        _ => 0,
    }
}

fn no_arena(bytes: u64) -> ArenaTooLarge {
    ArenaTooLarge { bytes, free_bytes: available_bytes() }
}

/// Reserves capacity for `len` items whose pages stay untouched until first use, so that no step allocates.
fn vec_with_capacity<T>(len: usize) -> Result<Vec<T>, CompileError> {
    let mut scratch = Vec::new();
    let bytes = (len as u64).saturating_mul(size_of::<T>() as u64);
    scratch.try_reserve_exact(len).map_err(|_| CompileError::Memory(no_arena(bytes)))?;
    Ok(scratch)
}
