//! The parts of a model that were cut for several ranks, run by one team on one host.
//!
//! Each rank has its plan, weights and arena; the KV pool holds the heads of all, and the buffers of a launch are shared:
//! what is the same on all ranks, rank 0 writes. A collective adds or joins in the order of the ranks, so results are the
//! same bits in every run.

use super::group::{Frame, Scratch};
use super::operands::{broken, floats, floats_mut, overlap};
use super::{
    AlignedBytes, Arc, ArenaPoison, ArenaTooLarge, CompileError, DeviceError, Instant, IoBytes, KvLayout, Launch,
    Loans, Op, Plan, Poison, Range, StepTimes, WeightSet,
};
use crate::device::cpu::arena::Parts;
use crate::graph::{Io, Operand, Rows};

/// Most ranks of one program.
pub(super) const MAX_RANKS: usize = 16;

/// One rank's plan with what it runs on.
#[derive(Debug)]
pub(super) struct Rank {
    pub plan: Plan,
    /// Token ids whose embedding it has.
    pub ids: Range<usize>,
    weights: Arc<WeightSet>,
    arena: AlignedBytes,
    /// The cache as it sees it.
    kv: KvLayout,
    groups: Vec<Range<usize>>,
    poison: ArenaPoison,
}

/// Checks that plans, weights and cache belong together, and reserves the arenas.
pub(super) fn load(
    plans: &[Plan],
    weights: Vec<Arc<WeightSet>>,
    kv: KvLayout,
    poison: Poison,
) -> Result<Vec<Rank>, CompileError> {
    let invalid = |what: &str| Err(CompileError::Invalid(what.to_owned()));
    if plans.is_empty() || plans.len() > MAX_RANKS || plans.len() != weights.len() {
        return invalid("a program has 1 to 16 plans, one a rank, with a weight set each");
    }
    let collectives =
        |plan: &Plan| plan.steps.iter().map(|step| step.op.is_collective().then(|| step.op.clone())).collect();
    let meetings: Vec<Option<Op>> = collectives(&plans[0]);
    let mut ranks = Vec::with_capacity(plans.len());
    let mut first_head = 0;
    for (index, (plan, weights)) in plans.iter().zip(weights).enumerate() {
        if (plan.rank.index as usize, plan.rank.of as usize) != (index, plans.len()) {
            return invalid("plans are not those of all ranks in order");
        }
        if plan.bucket != plans[0].bucket || plan.lanes != plans[0].lanes || collectives(plan) != meetings {
            return invalid("the ranks' plans are not cut from one");
        }
        if !weights.serves(&plan.weights) {
            return invalid("the weight set is not the plan's");
        }
        let heads = heads_of(plan, kv)?;
        let ids = ids_of(plan, &weights);
        let arena = AlignedBytes::zeroed(plan.arena_bytes)
            .map_err(|_| CompileError::Memory(ArenaTooLarge { bytes: plan.arena_bytes as u64 }))?;
        ranks.push(Rank {
            ids,
            weights,
            arena,
            kv: kv.of_heads(first_head, heads),
            groups: plan.groups(),
            poison: ArenaPoison::new(poison, plan),
            plan: plan.clone(),
        });
        first_head += heads;
    }
    if first_head != kv.geometry().kv_heads {
        return invalid("the ranks' heads are not those of the KV geometry");
    }
    Ok(ranks)
}

/// KV heads of the plan, which must fit the cache.
fn heads_of(plan: &Plan, kv: KvLayout) -> Result<usize, CompileError> {
    let g = kv.geometry();
    let mut heads = None;
    for step in &plan.steps {
        let (layer, cols) = match &step.op {
            Op::KvWrite { layer } | Op::RopeKvWrite { layer, .. } => (*layer, plan.values[step.inputs[0]].cols),
            Op::Attention(shape) if shape.head_dim == g.head_dim => (shape.layer, shape.kv_heads * shape.head_dim),
            Op::Attention(_) => return Err(CompileError::Invalid("attention and KV geometry differ".into())),
            _ => continue,
        };
        let fits = cols.is_multiple_of(g.head_dim) && layer < g.layers;
        if !fits || heads.is_some_and(|heads| heads != cols / g.head_dim) {
            return Err(CompileError::Invalid("stored keys and KV geometry differ".into()));
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
        Rows::Tokens => launch.shape.tokens,
        Rows::LogitRows => launch.shape.logit_rows,
    };
    match value.operand {
        Operand::Arena { offset } => offset..offset + rows * value.row_bytes(),
        _ => 0..0,
    }
}

impl Rank {
    /// Runs the groups from `next` on; stops before a collective and says at which group.
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
            let frame = Frame {
                launch,
                plan,
                weights,
                kv: *kv,
                scratch,
                arena: Loans::new(arena.as_mut_slice()),
                logits: Loans::new(io.logits),
                best: Loans::new(io.best),
                row_status: Loans::new(io.row_status),
                kv_pool: Loans::new(io.kv_pool),
            };
            frame.run_group(steps)?;
            if let (Some(times), Some(start), 0) = (times.as_mut(), start, plan.rank.index) {
                times.add(group.start, start);
            }
        }
        Ok(None)
    }
}

/// Runs the collective that all ranks have come to.
pub(super) fn meet(
    ranks: &mut [Rank],
    group: usize,
    launch: &Launch<'_>,
    logits: &mut [u8],
) -> Result<(), DeviceError> {
    let at = ranks[0].groups[group].start;
    let step = ranks[0].plan.steps[at].clone();
    let (from, to) = (step.inputs[0], step.outputs[0]);
    let mut parts: [&[f32]; MAX_RANKS] = [&[]; MAX_RANKS];
    let mut results: [Option<&mut [f32]>; MAX_RANKS] = [const { None }; MAX_RANKS];
    let count = ranks.len();
    let leaves = ranks[0].plan.values[to].operand == Operand::Io(Io::Logits);
    let (cols, rows) = (ranks[0].plan.values[to].cols, ranks[0].plan.values[to].rows);
    let mut widths = [0; MAX_RANKS];
    for (index, rank) in ranks.iter_mut().enumerate() {
        let Rank { plan, arena, .. } = rank;
        let loans = Loans::new(arena.as_mut_slice());
        parts[index] = floats(loans.read(range_of(plan, from, launch)).ok_or_else(overlap)?);
        widths[index] = plan.values[from].cols;
        if !leaves {
            results[index] = Some(floats_mut(loans.write(range_of(plan, to, launch)).ok_or_else(overlap)?));
        }
    }
    let parts = &parts[..count];
    let gathered = if leaves { Some(floats_mut(logits)) } else { results[0].take() };
    let gathered = gathered.ok_or_else(|| broken("a collective without a result"))?;
    let rows = match rows {
        Rows::Tokens => launch.shape.tokens,
        Rows::LogitRows => launch.shape.logit_rows,
    };
    if rows == 0 {
        return Ok(());
    }
    let reduces = step.op == Op::AllReduce;
    if !reduces && widths.iter().sum::<usize>() != cols {
        return Err(broken("the ranks' columns are not all of a row"));
    }
    let whole = Parts::rows(&mut *gathered, cols, launch.team.count(), 1);
    launch.team.run(&|member| {
        let mut tile = whole.claim(member.index());
        for index in 0..tile.rows() {
            let row = tile.first() + index;
            let out = tile.row_mut(index);
            if reduces {
                out.copy_from_slice(&parts[0][row * cols..][..cols]);
                for part in &parts[1..] {
                    out.iter_mut().zip(&part[row * cols..][..cols]).for_each(|(sum, x)| *sum += x);
                }
            } else {
                let mut rest = out;
                for (part, width) in parts.iter().zip(widths) {
                    let (mine, others) = rest.split_at_mut(width);
                    mine.copy_from_slice(&part[row * width..][..width]);
                    rest = others;
                }
            }
        }
    });
    for result in results.into_iter().flatten() {
        result.copy_from_slice(gathered);
    }
    Ok(())
}
