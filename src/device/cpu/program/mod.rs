//! A loaded plan: runs its steps one after the other, each on the whole team.
//!
//! A step is one run of the team (two where it has two phases): the caller hands in its operands as slices of the arena,
//! checked to be disjoint, and members write disjoint parts of them. The run's end is the barrier. All scratch is reserved
//! at the bucket's size when the plan is loaded; only the first launch on a pool allocates (its maps of blocks).

#![forbid(unsafe_code)]

mod attention;
mod linear;
mod operands;
mod poison;
mod rows;

pub use poison::Poison;

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Instant;

use super::Isa;
use super::arena::AlignedBytes;
use super::attention::{AttentionScratch, AttentionShape, Schedule};
use super::kv::{KvLayout, Rows};
use super::pool::Team;
use super::profile::{StepTime, StepTimes};
use super::weight_set::WeightSet;
use crate::device::{DeviceError, LaunchShape, StepArgs};
use crate::graph::{ArenaTooLarge, CompileError, Elem, Op, Plan, Step, row_bytes};
use crate::kv_cache::BlockId;
use poison::ArenaPoison;

/// The plan's int8 rows and this device's are one layout.
const _: () = {
    let mut cols = 1;
    while cols < 600 {
        assert!(row_bytes(Elem::Q8, cols) == super::quant::QuantLayout::new(cols).row_bytes());
        cols += 1;
    }
};

/// Buffers of one launch.
#[derive(Debug)]
pub(super) struct IoBytes<'a> {
    pub token_ids: &'a [u32],
    pub positions: &'a [u32],
    pub block_tables: &'a [u32],
    pub logit_rows: &'a [u32],
    pub logits: &'a mut [f32],
    pub row_status: &'a mut [u8],
    pub kv_pool: &'a mut [u8],
}

/// A plan with its weights, its arena and room for each member.
#[derive(Debug)]
pub(super) struct Program {
    plan: Plan,
    weights: Arc<WeightSet>,
    arena: AlignedBytes,
    kv: KvLayout,
    scratch: Scratch,
    /// Block tables of the launch, concatenated.
    tables: Vec<BlockId>,
    /// A bit for each block that the launch writes.
    written: Vec<u64>,
    /// Token ids it can embed.
    ids: usize,
    times: Option<StepTimes>,
    poison: ArenaPoison,
}

/// Room that members need besides the arena.
#[derive(Debug)]
struct Scratch {
    members: Vec<MemberScratch>,
    schedule: Schedule,
    /// Partial sums of attention over split segments.
    partials: Vec<f32>,
    /// A bit for each piece that members claim.
    claims: Vec<AtomicU64>,
    /// Where members' shares of several matrices begin.
    bounds: Vec<Vec<usize>>,
}

#[derive(Debug)]
struct MemberScratch {
    attention: Option<AttentionScratch>,
    row: Vec<f32>,
}

/// Everything a step may touch, borrowed for one launch.
struct Frame<'a> {
    team: &'a Team,
    isa: Isa,
    plan: &'a Plan,
    weights: &'a WeightSet,
    arena: &'a mut AlignedBytes,
    kv: KvLayout,
    io: IoBytes<'a>,
    batch: Rows<'a>,
    shape: LaunchShape,
    scratch: &'a mut Scratch,
}

impl Program {
    /// Prepares a plan that passed its own check.
    pub(super) fn new(
        plan: Plan,
        weights: Arc<WeightSet>,
        arena: AlignedBytes,
        kv: KvLayout,
        members: usize,
        poison: Poison,
    ) -> Result<Self, CompileError> {
        if !weights.serves(&plan.weights) {
            return Err(CompileError::Invalid("the weight set is not the plan's".into()));
        }
        let mut attention: Option<AttentionShape> = None;
        let mut ids = usize::MAX;
        let g = kv.geometry();
        for step in &plan.steps {
            match &step.op {
                Op::Embed { table } => ids = ids.min(weights.matrix(*table).n()),
                Op::KvWrite { layer } | Op::RopeKvWrite { layer, .. }
                    if plan.values[step.inputs[0]].cols != g.kv_heads * g.head_dim || *layer >= g.layers =>
                {
                    return Err(CompileError::Invalid("stored keys and KV geometry differ".into()));
                }
                _ => {}
            }
            let Op::Attention(shape) = &step.op else { continue };
            if (shape.kv_heads, shape.head_dim) != (g.kv_heads, g.head_dim) || shape.layer >= g.layers {
                return Err(CompileError::Invalid("attention and KV geometry differ".into()));
            }
            let shape = attention::shape_of(shape);
            if attention.is_some_and(|first| (first.heads, first.kv_heads) != (shape.heads, shape.kv_heads)) {
                let reason = "its layers differ in their number of heads".into();
                return Err(CompileError::Unsupported { op: "attention", reason });
            }
            attention = Some(shape);
        }
        let widest = plan.values.iter().map(|value| value.cols).max().unwrap_or(0);
        let member =
            |_| MemberScratch { attention: attention.as_ref().map(AttentionScratch::new), row: vec![0.0; widest] };
        let most_parts = plan.steps.iter().map(|step| step.outputs.len()).max().unwrap_or(0);
        let scratch = Scratch {
            members: (0..members).map(member).collect(),
            schedule: Schedule::new(members),
            partials: with_room(most_partials(attention.as_ref(), members, plan.bucket.kv_tokens))?,
            claims: Vec::new(),
            bounds: (0..most_parts).map(|_| Vec::with_capacity(members + 1)).collect(),
        };
        let longest = plan.bucket.kv_tokens.div_ceil(g.block_size);
        let tables = with_room(plan.bucket.seqs.saturating_mul(longest))?;
        let poison = ArenaPoison::new(poison, &plan);
        Ok(Self { plan, weights, arena, kv, scratch, tables, written: Vec::new(), ids, times: None, poison })
    }

    /// Times its steps if asked to.
    pub(super) fn timed(mut self, timed: bool) -> Self {
        self.times = timed.then(|| StepTimes::new(&self.plan));
        self
    }

    pub(super) fn take_profile(&mut self) -> Vec<StepTime> {
        self.times.as_mut().map_or(Vec::new(), StepTimes::take)
    }

    /// Runs the plan over one batch.
    pub(super) fn launch(
        &mut self,
        team: &Team,
        isa: Isa,
        args: &StepArgs<'_>,
        io: IoBytes<'_>,
    ) -> Result<(), DeviceError> {
        self.check(args, &io)?;
        let block_size = self.kv.geometry().block_size;
        self.tables.clear();
        for (kv_len, line) in args.kv_lens.iter().zip(io.block_tables.chunks(args.shape.table_stride.max(1))) {
            let blocks = (*kv_len as usize).div_ceil(block_size);
            self.tables.extend(line[..blocks].iter().map(|&block| BlockId(block)));
        }
        let batch = Rows { q_lens: args.q_lens, kv_lens: args.kv_lens, tables: &self.tables };
        let mut frame = Frame {
            team,
            isa,
            plan: &self.plan,
            weights: &self.weights,
            arena: &mut self.arena,
            kv: self.kv,
            io,
            batch,
            shape: args.shape,
            scratch: &mut self.scratch,
        };
        for (at, step) in self.plan.steps.iter().enumerate() {
            frame.poison(&self.poison, at)?;
            let start = self.times.is_some().then(Instant::now);
            frame.run(step)?;
            if let (Some(times), Some(start)) = (&mut self.times, start) {
                times.add(at, start);
            }
        }
        Ok(())
    }

    /// What kernels rely on: sizes agree, every id, row and block is in range, and no block has two writers.
    fn check(&mut self, args: &StepArgs<'_>, io: &IoBytes<'_>) -> Result<(), DeviceError> {
        let LaunchShape { tokens, seqs, logit_rows, table_stride } = args.shape;
        let bucket = &self.plan.bucket;
        let block_size = self.kv.geometry().block_size;
        let pool_blocks = io.kv_pool.len() / self.kv.bytes_per_block();
        let lens = || args.q_lens.iter().zip(args.kv_lens);
        let rules = [
            ("rows fit the bucket", tokens <= bucket.tokens && logit_rows <= bucket.logit_rows),
            ("sequences fit the bucket", seqs <= bucket.seqs),
            ("the longest sequence fits the bucket", args.kv_lens.iter().all(|&kv| kv as usize <= bucket.kv_tokens)),
            ("every sequence has its lengths", args.q_lens.len() == seqs && args.kv_lens.len() == seqs),
            ("a sequence brings 1 to kv_len rows", lens().all(|(q, kv)| 1 <= *q && q <= kv)),
            ("row lengths add up", args.q_lens.iter().map(|&q| u64::from(q)).sum::<u64>() == tokens as u64),
            ("there is an id and a position a row", io.token_ids.len() == tokens && io.positions.len() == tokens),
            ("ids are rows of the embedding table", io.token_ids.iter().all(|&id| (id as usize) < self.ids)),
            ("logit rows are rows of the batch", io.logit_rows.iter().all(|&row| (row as usize) < tokens)),
            ("there is a logit row each", io.logit_rows.len() == logit_rows && io.row_status.len() == logit_rows),
            ("logits have room", Some(io.logits.len()) == logit_rows.checked_mul(self.plan.vocab_size)),
            ("there is a table line a sequence", Some(io.block_tables.len()) == seqs.checked_mul(table_stride)),
            (
                "a table line has all blocks of its sequence",
                args.kv_lens.iter().all(|kv_len| (*kv_len as usize).div_ceil(block_size) <= table_stride),
            ),
        ];
        let broken = |rule: &str| DeviceError::Invalid { what: format!("launch: broken rule: {rule}") };
        if let Some((rule, _)) = rules.iter().find(|(_, holds)| !holds) {
            return Err(broken(rule));
        }
        let lines = || io.block_tables.chunks(table_stride.max(1)).zip(lens());
        let in_pool = |(line, (_, kv_len)): (&[u32], (&u32, &u32))| {
            let blocks = (*kv_len as usize).div_ceil(block_size);
            line[..blocks].iter().all(|&block| (block as usize) < pool_blocks)
        };
        if !lines().all(in_pool) {
            return Err(broken("tables name blocks of the pool"));
        }
        let written = &mut self.written;
        written.clear();
        written.resize(pool_blocks.div_ceil(64), 0);
        for (line, (q_len, kv_len)) in lines() {
            let first = (kv_len - q_len) as usize / block_size;
            for &block in &line[first..(*kv_len as usize).div_ceil(block_size)] {
                let (word, bit) = (block as usize / 64, 1 << (block % 64));
                if written[word] & bit != 0 {
                    return Err(broken("a block is written by one sequence, at one place of its table"));
                }
                written[word] |= bit;
            }
        }
        Ok(())
    }
}

/// Floats of partial sums that a step can need: none for a member alone, who never splits a segment off.
fn most_partials(attention: Option<&AttentionShape>, members: usize, kv_tokens: usize) -> usize {
    match attention {
        Some(shape) if members > 1 => shape.max_partials(members, kv_tokens) * shape.partial_len(),
        _ => 0,
    }
}

/// Room that stays untouched pages until it is used, so that no step has to ask for it.
fn with_room<T>(len: usize) -> Result<Vec<T>, CompileError> {
    let mut room = Vec::new();
    let bytes = (len as u64).saturating_mul(size_of::<T>() as u64);
    room.try_reserve_exact(len).map_err(|_| CompileError::Memory(ArenaTooLarge { bytes }))?;
    Ok(room)
}

impl Frame<'_> {
    fn run(&mut self, step: &Step) -> Result<(), DeviceError> {
        // A batch whose rows are all mid-prompt has no rows of logits.
        let rows_at = step.outputs.iter().chain(&step.inputs).next();
        if rows_at.is_some_and(|&v| self.rows(v) == 0) {
            return Ok(());
        }
        match &step.op {
            Op::Embed { table } => self.embed(*table, step),
            Op::RopeAngles { rope } => self.rope_angles(*rope, step),
            Op::RmsNorm(norm) => self.rms_norm(norm, step),
            Op::Add => self.add(step),
            Op::Mul => self.mul(step),
            Op::Activation(kind) => self.activation(*kind, step),
            Op::Quantise => self.quantise(step),
            Op::Linear(part) => self.linear(part, step.inputs[0], step.outputs[0]),
            Op::Rope { head_dim, style } => self.rope(*head_dim, *style, None, step),
            Op::KvWrite { layer } => self.kv_write(*layer, None, step),
            Op::Attention(shape) => self.attention(shape, step),
            Op::GatherRows => self.gather_rows(step),
            Op::RowStatus => {
                self.row_status();
                Ok(())
            }
            Op::AddRmsNorm { norm, quantise } => self.add_rms_norm(norm, *quantise, step),
            Op::NormQuantise(norm) => self.norm_quantise(norm, step),
            Op::QkNormRope { norm, head_dim, style } => self.rope(*head_dim, *style, Some(norm), step),
            Op::RopeKvWrite { layer, head_dim, style, norm } => {
                self.kv_write(*layer, Some((*head_dim, *style, norm.as_ref())), step)
            }
            Op::ActMul(kind) => self.act_mul(*kind, step.inputs[0], step.inputs[1], step.outputs[0]),
            Op::LinearMulti(parts) => self.linear_multi(parts, step),
            Op::SwigluLinear { activation, part, .. } => {
                let scratch = step.scratch.ok_or_else(|| operands::broken("a fused MLP has no scratch"))?;
                self.act_mul(*activation, step.inputs[0], step.inputs[1], scratch)?;
                self.linear(part, scratch, step.outputs[0])
            }
        }
    }
}
