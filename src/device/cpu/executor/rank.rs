//! The shards of a tensor-parallel model, run by one thread pool on one host.
//!
//! Each rank has its own plan, weights and arena. The KV pool holds the heads of all ranks, and the launch's buffers
//! are shared: rank 0 writes what is equal on all ranks. A collective adds or concatenates in rank order, so results
//! have the same bits in every run.

use super::group::GroupContext;
use super::launch::{IoBytes, Launch, floats, floats_mut, overlap};
use super::scratch::Scratch;
use super::{
    AlignedBytes, Arc, ArenaBorrows, ArenaPoison, CompileError, CpuKvLayout, DeviceError, Instant, Op, Plan, Poison,
    Range, StepTimes, WeightSet, no_arena,
};
use crate::device::cpu::memory::Partition;
use crate::graph::{Io, Operand, PlanValue, RowDim};

/// Largest number of ranks of a program.
pub(super) const MAX_RANKS: usize = 16;

/// One rank's plan, weights and arena.
#[derive(Debug)]
pub(super) struct RankProgram {
    pub plan: Plan,
    /// Token ids whose embeddings this rank holds.
    pub ids: Range<usize>,
    weights: Arc<WeightSet>,
    arena: AlignedBytes,
    /// Layout of this rank's heads in the KV pool.
    kv: CpuKvLayout,
    groups: Vec<Range<usize>>,
    poison: ArenaPoison,
}

/// Checks that plans, weights and KV layout match, and reserves the arenas.
pub(super) fn load(
    plans: &[Plan],
    weights: Vec<Arc<WeightSet>>,
    kv: CpuKvLayout,
    poison: Poison,
) -> Result<Vec<RankProgram>, CompileError> {
    let invalid = |what: &str| Err(CompileError::Invalid(what.to_owned()));
    if plans.is_empty() || plans.len() > MAX_RANKS || plans.len() != weights.len() {
        return invalid("expected 1 to 16 plans, one per rank, each with a weight set");
    }
    let collectives =
        |plan: &Plan| plan.steps.iter().map(|step| step.op.is_collective().then(|| step.op.clone())).collect();
    let meetings: Vec<Option<Op>> = collectives(&plans[0]);
    let mut ranks = Vec::with_capacity(plans.len());
    let mut first_head = 0;
    for (index, (plan, weights)) in plans.iter().zip(weights).enumerate() {
        if (plan.rank.index as usize, plan.rank.of as usize) != (index, plans.len()) {
            return invalid("expected the plans of all ranks, in rank order");
        }
        if plan.bucket != plans[0].bucket || plan.streams != plans[0].streams || collectives(plan) != meetings {
            return invalid("the plans of the ranks are not shards of one graph");
        }
        if !same_collectives(plan, &plans[0]) {
            return invalid("the collectives of the ranks do not have the same values");
        }
        if !weights.serves(&plan.weights) {
            return invalid("the weight set belongs to another plan");
        }
        let heads = heads_of(plan, kv)?;
        let ids = ids_of(plan, &weights);
        let arena = AlignedBytes::zeroed(plan.arena_bytes)
            .map_err(|_| CompileError::Memory(no_arena(plan.arena_bytes as u64)))?;
        ranks.push(RankProgram {
            ids,
            weights,
            arena,
            kv: kv.with_heads(first_head, heads),
            groups: plan.groups(),
            poison: ArenaPoison::new(poison, plan),
            plan: plan.clone(),
        });
        first_head += heads;
    }
    if !gather_whole_rows(plans) {
        return invalid("the columns of all ranks do not cover a row");
    }
    if first_head != kv.geometry().kv_heads {
        return invalid("the heads of all ranks differ from the KV geometry");
    }
    Ok(ranks)
}

/// Whether the collectives of both plans read and write values of the same number, size and place.
fn same_collectives(plan: &Plan, first: &Plan) -> bool {
    let result = |plan: &Plan, at: usize| {
        let step = &plan.steps[at];
        let value = &plan.values[step.outputs[0]];
        (step.inputs[0], step.outputs[0], value.rows, value.cols, matches!(value.operand, Operand::Io(_)))
    };
    let mut meetings = (0..plan.steps.len()).filter(|&at| plan.steps[at].op.is_collective());
    meetings.all(|at| result(plan, at) == result(first, at))
}

/// Whether the columns of all ranks cover a whole row in each all-gather.
fn gather_whole_rows(plans: &[Plan]) -> bool {
    let gathers = |at: &usize| plans[0].steps[*at].op == Op::AllGather;
    (0..plans[0].steps.len()).filter(gathers).all(|at| {
        let brought = |plan: &Plan| plan.values[plan.steps[at].inputs[0]].cols;
        plans.iter().map(brought).sum::<usize>() == plans[0].values[plans[0].steps[at].outputs[0]].cols
    })
}

/// Number of KV heads of the plan, which must fit the KV layout.
fn heads_of(plan: &Plan, kv: CpuKvLayout) -> Result<usize, CompileError> {
    let g = kv.geometry();
    let mut heads = None;
    for step in &plan.steps {
        let (layer, cols) = match &step.op {
            Op::KvWrite { layer } | Op::RopeKvWrite { layer, .. } => (*layer, plan.values[step.inputs[0]].cols),
            Op::Attention(shape) if shape.head_dim == g.head_dim => (shape.layer, shape.kv_heads * shape.head_dim),
            Op::Attention(_) => return Err(CompileError::Invalid("attention differs from the KV geometry".into())),
            _ => continue,
        };
        let fits = cols.is_multiple_of(g.head_dim) && layer < g.layers;
        if !fits || heads.is_some_and(|heads| heads != cols / g.head_dim) {
            return Err(CompileError::Invalid("the stored keys differ from the KV geometry".into()));
        }
        heads = Some(cols / g.head_dim);
    }
    Ok(heads.unwrap_or(g.kv_heads))
}

fn ids_of(plan: &Plan, weights: &WeightSet) -> Range<usize> {
    let tables = plan.steps.iter().filter_map(|step| match step.op {
        Op::Embed { table, first_id } => Some(first_id as usize..first_id as usize + weights.matrix(table).n()),
        _ => None,
    });
    tables.reduce(|a, b| a.start.max(b.start)..a.end.min(b.end)).unwrap_or(0..usize::MAX)
}

/// Bytes of the arena that hold a value's rows in this launch.
fn range_of(plan: &Plan, value: usize, launch: &Launch<'_>) -> Range<usize> {
    let value = &plan.values[value];
    let rows = match value.rows {
        RowDim::Tokens => launch.shape.tokens,
        RowDim::LogitRows => launch.shape.logit_rows,
    };
    match value.operand {
        Operand::Arena { offset } => offset..offset + rows * value.row_bytes(),
        _ => 0..0,
    }
}

impl RankProgram {
    /// Runs the groups from `next` on; stops before a collective and returns its group.
    pub(super) fn run(
        &mut self,
        next: usize,
        launch: &Launch<'_>,
        io: &mut IoBytes<'_>,
        scratch: &Scratch,
        times: &mut Option<StepTimes>,
    ) -> Result<Option<usize>, DeviceError> {
        let Self { plan, weights, arena, kv, groups, poison, .. } = self;
        for (index, group) in groups.iter().enumerate().skip(next) {
            let steps = &plan.steps[group.clone()];
            if steps[0].op.is_collective() {
                return Ok(Some(index));
            }
            if plan.rank.index > 0 && matches!(steps[0].op, Op::ArgMax | Op::RowStatus) {
                continue;
            }
            poison.fill(plan, group.start, |value| range_of(plan, value, launch), arena.as_mut_slice());
            let start = times.is_some().then(Instant::now);
            let context = GroupContext {
                launch,
                plan,
                weights,
                kv: *kv,
                scratch,
                arena: ArenaBorrows::new(arena.as_mut_slice()),
                logits: ArenaBorrows::new(io.logits),
                best: ArenaBorrows::new(io.best),
                row_status: ArenaBorrows::new(io.row_status),
                kv_pool: ArenaBorrows::new(io.kv_pool),
            };
            context.run_group(steps)?;
            if let (Some(times), Some(start), 0) = (times.as_mut(), start, plan.rank.index) {
                times.add(group.start, start);
            }
        }
        Ok(None)
    }
}

/// Runs the collective that all ranks have reached.
pub(super) fn run_collective(
    ranks: &mut [RankProgram],
    group: usize,
    launch: &Launch<'_>,
    logits: &mut [u8],
) -> Result<(), DeviceError> {
    let step = &ranks[0].plan.steps[ranks[0].groups[group].start];
    let (reduces, from, to) = (step.op == Op::AllReduce, step.inputs[0], step.outputs[0]);
    let PlanValue { cols, operand, .. } = ranks[0].plan.values[to];
    let count = ranks.len();
    let mut parts: [&[f32]; MAX_RANKS] = [&[]; MAX_RANKS];
    let mut results: [&mut [f32]; MAX_RANKS] = std::array::from_fn(|_| Default::default());
    for ((rank, part), result) in ranks.iter_mut().zip(&mut parts).zip(&mut results) {
        let borrows = ArenaBorrows::new(rank.arena.as_mut_slice());
        *part = floats(borrows.read(range_of(&rank.plan, from, launch)).ok_or_else(overlap)?);
        *result = floats_mut(borrows.write(range_of(&rank.plan, to, launch)).ok_or_else(overlap)?);
    }
    let parts = &parts[..count];
    // Logits are outputs of the plan; other results are copied to every rank's arena.
    let (first, others) = results[..count].split_at_mut(1);
    let whole = if operand == Operand::Io(Io::Logits) { floats_mut(logits) } else { &mut *first[0] };
    let rows = Partition::rows(&mut *whole, cols, launch.threads.parts(), 1);
    launch.threads.run_parallel(&|worker| {
        let mut tile = rows.claim(worker.index());
        for index in 0..tile.rows() {
            let row = tile.first() + index;
            if reduces {
                add_rows(parts, row, tile.row_mut(index));
            } else {
                join_rows(parts, row, cols, tile.row_mut(index));
            }
        }
    });
    for result in others.iter_mut().filter(|result| !result.is_empty()) {
        result.copy_from_slice(whole);
    }
    Ok(())
}

/// Adds one row of every rank, in rank order.
fn add_rows(parts: &[&[f32]], row: usize, out: &mut [f32]) {
    let cols = out.len();
    out.copy_from_slice(&parts[0][row * cols..][..cols]);
    for part in &parts[1..] {
        out.iter_mut().zip(&part[row * cols..][..cols]).for_each(|(sum, x)| *sum += x);
    }
}

/// Concatenates one row of every rank. A rank's columns are its share of all elements.
fn join_rows(parts: &[&[f32]], row: usize, cols: usize, out: &mut [f32]) {
    let elements: usize = parts.iter().map(|part| part.len()).sum();
    let rows = elements / cols.max(1);
    let mut rest = out;
    for part in parts {
        let width = part.len() / rows.max(1);
        let (mine, others) = rest.split_at_mut(width);
        mine.copy_from_slice(&part[row * width..][..width]);
        rest = others;
    }
}
