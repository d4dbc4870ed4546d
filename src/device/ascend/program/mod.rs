//! A loaded plan: its buffers, and its launches operation by operation.
//!
//! The layers run at the bucket's rows with operations that are built once. Operations that depend on lengths or on the
//! pool (attention, KV writes) are built for each launch, and so are those for the few rows of logits.

#![forbid(unsafe_code)]

pub(super) mod aclnn_op;
pub(super) mod attention;
pub(super) mod capture;
pub(super) mod check;
pub(super) mod context;
pub(super) mod lower;
pub(super) mod stream;

use crate::num::to_u32;
use std::sync::Arc;

use ascend_sys::{AscendError, DeviceAddress, DeviceBuffer, ElemType, Op, Stream, TensorDesc};

use super::error::compile_error;
use super::memory::kv_layout::KvShard;
use super::memory::{ALIGNMENT, TypedAddress, alloc_zeroed, padded};
use super::weights::WeightSet;
use super::weights::layout::is_refusal;
use crate::device::LaunchShape;
use crate::graph::{AttentionShape, CompileError, Op as PlanOp, Plan};
use aclnn_op::AclnnOp;
use attention::{AttentionLayout, Layer, Lengths, probe};
use capture::Captured;
use check::{check_plan, fuse_gate_up, rope_styles};
use context::{ExecContext, Shared, SharedBytes, SharedScratch};
use lower::{BufferDims, LoweredOp, Lowering, OutputBuffers, ProgramBuffers, RopeTables, RowCounts};

/// Arguments of a launch, with its buffers as addresses.
#[derive(Clone, Copy, Debug)]
pub(super) struct Batch<'a> {
    pub token_ids: DeviceAddress,
    pub positions: DeviceAddress,
    pub block_tables: DeviceAddress,
    pub logit_rows: DeviceAddress,
    pub results: OutputBuffers,
    pub pool: DeviceAddress,
    pub pool_bytes: u64,
    pub shape: LaunchShape,
    pub q_lens: &'a [u32],
    pub kv_lens: &'a [u32],
}

impl Batch<'_> {
    pub(super) const fn rows(&self) -> RowCounts {
        RowCounts { tokens: self.shape.tokens, logits: self.shape.logit_rows }
    }
}

/// One operation of the layers.
#[derive(Debug)]
enum Prepared {
    /// Built once.
    Cached(Op),
    /// Built for each launch: depends on lengths, on the pool or on other cards, or cannot be reused by the library.
    PerLaunch(Box<LoweredOp>),
}

/// A loaded plan.
#[derive(Debug)]
pub(super) struct Program {
    pub lowering: Lowering,
    pub cache: KvShard,
    pub sizes: BufferDims,
    /// Attention layout by layer of the pool.
    pub forms: Vec<AttentionLayout>,
    pub has_kv_scatter: bool,
    body: Vec<Prepared>,
    pub tail_from: usize,
    pub block_size: TensorDesc,
    pub lengths: Lengths,
    words: Vec<u32>,
    /// Pool whose reserved block is in the block table.
    known_pool: Option<(DeviceAddress, u64)>,
    pub captured: Captured,
    /// Dropped last, because all fields above refer to it.
    _region: DeviceBuffer,
}

impl Program {
    /// Checks a plan, allocates its buffers, and builds the operations of its layers.
    pub(super) fn load(
        exec: &mut ExecContext,
        plan: &Plan,
        weights: Arc<WeightSet>,
        cache: KvShard,
    ) -> Result<Self, CompileError> {
        let elem = weights.elem;
        check_plan(plan, elem)?;
        let bucket = plan.bucket;
        let geometry = cache.geometry;
        let table_cols = bucket.kv_tokens.div_ceil(geometry.block_size).max(1).next_multiple_of(8);
        let int8_cols = weights.int8_cols();
        let sizes =
            BufferDims { tokens: bucket.tokens, logits: bucket.logit_rows, seqs: bucket.seqs, table_cols, int8_cols };
        let styles = rope_styles(plan)?;
        let (_, fixed_bytes) = ProgramBuffers::new(plan, sizes, DeviceAddress(0));
        let table_bytes = |&(head_dim, _): &(usize, bool)| 2 * padded(bucket.kv_tokens * head_dim * 2);
        let rope_bytes: usize = styles.iter().map(table_bytes).sum();
        let arena_bytes = padded(plan.arena_bytes);
        let own_rows = (plan.rank.of > 1).then(|| own_rows(plan)).flatten();
        let own_bytes = own_rows.as_ref().map_or(0, |rows| padded(4 * rows.len()));
        let bytes = arena_bytes + fixed_bytes + rope_bytes + own_bytes + ALIGNMENT;
        let failed = |op: &'static str, error| compile_error(op, error, bytes as u64, &exec.context);
        let region = alloc_zeroed(&exec.context, bytes).map_err(|error| failed("arena", error))?;
        let at = |offset: usize| region.address().offset(offset);
        let (fixed, _) = ProgramBuffers::new(plan, sizes, at(arena_bytes));

        let mut ropes = Vec::with_capacity(styles.len());
        let mut end = arena_bytes + fixed_bytes;
        for (frequencies, &(head_dim, is_interleaved)) in plan.ropes.iter().zip(&styles) {
            let tables = angles(frequencies, bucket.kv_tokens, head_dim, is_interleaved, elem);
            let [cos, sin] = tables.map(|table| {
                let offset = end;
                end += padded(table.len());
                (offset, table)
            });
            for (offset, table) in [&cos, &sin] {
                region.write(*offset, table).map_err(|error| failed("rope_angles", error))?;
            }
            let (cos, sin) = (at(cos.0), at(sin.0));
            ropes.push(RopeTables { cos, sin, positions: bucket.kv_tokens, head_dim, is_interleaved });
        }
        let block_size = to_u32(geometry.block_size);
        region.write(end, &block_size.to_le_bytes()).map_err(|error| failed("kv_write", error))?;
        let block_size = TensorDesc::new(at(end), ElemType::I32, &[1]);

        if let Some(rows) = &own_rows {
            region.write(end + ALIGNMENT, bytemuck::cast_slice(rows)).map_err(|error| failed("embed", error))?;
        }
        let own_rows = own_rows.map(|_| at(end + ALIGNMENT));

        let (joined, halves) = fuse_gate_up(plan, &weights);
        let lowering = Lowering {
            plan: plan.clone(),
            weights,
            arena: at(0),
            fixed,
            ropes,
            own_rows,
            fused_gate_up: joined,
            swiglu_halves: halves,
        };
        let first_tail = plan.steps.iter().position(|step| lowering.is_tail(step)).unwrap_or(plan.steps.len());
        if plan.steps[first_tail..].iter().any(|step| !lowering.is_tail(step)) {
            return Err(CompileError::Invalid("a step of a layer is after the gathering of logit rows".into()));
        }
        let mut program = Self {
            lowering,
            cache,
            sizes,
            forms: Vec::new(),
            has_kv_scatter: exec.ops.has("aclnnScatterPaKvCache"),
            body: Vec::with_capacity(plan.steps.len() * 2),
            tail_from: first_tail,
            block_size,
            lengths: Lengths::with_capacity(bucket.seqs),
            words: Vec::with_capacity(2 * bucket.tokens + 8),
            known_pool: None,
            captured: Captured::default(),
            _region: region,
        };
        program.probe(exec)?;
        program.share(exec)?;
        program.prepare(exec)?;
        Ok(program)
    }

    /// Finds the attention layout of every layer.
    fn probe(&mut self, exec: &ExecContext) -> Result<(), CompileError> {
        let table = TypedAddress::new(self.lowering.fixed.table, ElemType::I32);
        let query = TypedAddress::new(self.lowering.arena, self.lowering.weights.elem);
        self.forms = vec![AttentionLayout::Packed; self.cache.geometry.layers];
        let mut known: Vec<(AttentionShape, AttentionLayout)> = Vec::new();
        for step in &self.lowering.plan.steps {
            let PlanOp::Attention(shape) = &step.op else { continue };
            let fits = shape.layer < self.forms.len()
                && shape.kv_heads == self.cache.geometry.kv_heads
                && shape.head_dim == self.cache.geometry.head_dim;
            if !fits || self.cache.elem() != self.lowering.weights.elem {
                let reason = format!(
                    "the KV cache has the geometry {:?}, the model's attention needs {shape:?}",
                    self.cache.geometry
                );
                return Err(CompileError::Unsupported { op: "attention", reason });
            }
            let alike = |other: &AttentionShape| AttentionShape { layer: shape.layer, ..*other } == *shape;
            let form = match known.iter().find(|(other, _)| alike(other)) {
                Some((_, form)) => *form,
                None => probe(&exec.ops, &exec.constants, shape, &self.cache, query, table)
                    .map_err(|error| compile_error("attention", error, 0, &exec.context))?,
            };
            known.push((*shape, form));
            self.forms[shape.layer] = form;
        }
        Ok(())
    }

    /// Grows the card's shared scratch to the size that this program needs.
    fn share(&self, exec: &mut ExecContext) -> Result<(), CompileError> {
        let (plan, BufferDims { tokens, logits, .. }) = (&self.lowering.plan, self.sizes);
        let widest = |step: &crate::graph::Step| match step.op {
            PlanOp::RowStatus => tokens * plan.values[step.inputs[0]].cols,
            _ => 0,
        };
        let flags = plan.steps.iter().map(widest).max().unwrap_or(0).max(logits * plan.vocab_size);
        let ranks = plan.rank.of as usize;
        let gathered = if ranks > 1 { 2 * logits * ranks * plan.vocab_size.div_ceil(ranks) } else { 0 };
        let bytes = SharedBytes { workspace: 0, logits: 2 * logits * plan.vocab_size, gathered, flags };
        exec.reserve(bytes, plan.vocab_size)
            .map_err(|error| compile_error("logits", error, flags as u64, &exec.context))
    }

    /// Builds the operations of the layers, and measures their workspace.
    fn prepare(&mut self, exec: &mut ExecContext) -> Result<(), CompileError> {
        let rows = RowCounts { tokens: self.sizes.tokens, logits: self.sizes.logits };
        let (room, results) = (exec.shared().scratch(), nowhere());
        let mut workspace = 0;
        for at in 0..self.tail_from {
            let name = self.lowering.plan.steps[at].op.name();
            let body = &mut self.body;
            let mut prepare = |item: LoweredOp| {
                let ready = match &item {
                    LoweredOp::Op(recipe) => {
                        let mut op = recipe.build(&exec.ops)?;
                        workspace = workspace.max(op.workspace_bytes());
                        match op.make_repeatable() {
                            Ok(()) => Some(op),
                            Err(error) if is_refusal(&error) => None,
                            Err(error) => return Err(error),
                        }
                    }
                    LoweredOp::Collective(_) | LoweredOp::KvWrite { .. } | LoweredOp::Attention { .. } => None,
                };
                body.push(ready.map_or_else(|| Prepared::PerLaunch(Box::new(item)), Prepared::Cached));
                Ok(())
            };
            self.lowering
                .lower(at, rows, results, room, &exec.constants, &mut prepare)
                .map_err(|error| compile_error(name, error, 0, &exec.context))?;
        }
        for at in self.tail_from..self.lowering.plan.steps.len() {
            let name = self.lowering.plan.steps[at].op.name();
            let mut measure = |item: LoweredOp| {
                if let LoweredOp::Op(recipe) = item {
                    workspace = workspace.max(recipe.build(&exec.ops)?.workspace_bytes());
                }
                Ok(())
            };
            // The destinations of results are known only at launch; the widest rows represent them here.
            let results = OutputBuffers { logits: room.logits, argmax: self.lowering.fixed.ids, status: room.flags };
            self.lowering
                .lower(at, rows, results, room, &exec.constants, &mut measure)
                .map_err(|error| compile_error(name, error, 0, &exec.context))?;
        }
        workspace = workspace
            .max(self.attention_workspace(exec).map_err(|error| compile_error("attention", error, 0, &exec.context))?);
        exec.reserve(SharedBytes { workspace, ..SharedBytes::default() }, 0)
            .map_err(|error| compile_error("workspace", error, workspace as u64, &exec.context))
    }

    /// Workspace that attention may need: for the longest sequences, with as many rows as the bucket has.
    fn attention_workspace(&mut self, exec: &ExecContext) -> Result<usize, AscendError> {
        let BufferDims { tokens, seqs, .. } = self.sizes;
        let longest = to_u32(self.lowering.plan.bucket.kv_tokens);
        let mut workspace = 0;
        let rows = to_u32(tokens).min(longest);
        let decode = (vec![1; seqs.min(tokens)], vec![longest; seqs.min(tokens)]);
        for (q_lens, kv_lens) in [(vec![rows], vec![longest]), decode] {
            self.lengths.fill(&q_lens, &kv_lens, 0);
            let shapes = self.lowering.plan.steps.iter().filter_map(|step| match &step.op {
                PlanOp::Attention(shape) => Some(shape),
                _ => None,
            });
            for shape in shapes {
                let query = TypedAddress::new(self.lowering.arena, self.lowering.weights.elem);
                let pool = (self.lowering.arena, 2 * self.cache.geometry.bytes_per_block() as u64);
                self.attend(exec, shape, query, query, pool, &self.lengths, &mut |op| {
                    workspace = workspace.max(op.workspace_bytes());
                    Ok(())
                })?;
            }
        }
        Ok(workspace)
    }

    /// One layer's keys and values in a pool.
    pub(super) fn kv_tensors(&self, layer: usize, pool: (DeviceAddress, u64)) -> [TypedAddress; 2] {
        let blocks = self.cache.blocks(pool.1);
        [0, 1].map(|side| TypedAddress::new(pool.0.offset(self.cache.offset(layer, side, blocks)), self.cache.elem()))
    }

    /// Builds the attention of one layer over a batch.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn attend(
        &self,
        exec: &ExecContext,
        shape: &AttentionShape,
        query: TypedAddress,
        out: TypedAddress,
        pool: (DeviceAddress, u64),
        lengths: &Lengths,
        run: &mut dyn FnMut(Op) -> Result<(), AscendError>,
    ) -> Result<(), AscendError> {
        let block_size = self.cache.geometry.block_size;
        let dims = [self.cache.blocks(pool.1), block_size, self.cache.row()];
        let layer = Layer {
            ops: &exec.ops,
            constants: &exec.constants,
            shape,
            layout: self.forms[shape.layer],
            block_size,
            caches: self.kv_tensors(shape.layer, pool).map(|place| place.tensor(&dims)),
            query,
            out,
            table: TypedAddress::new(self.lowering.fixed.table, ElemType::I32),
            table_cols: self.sizes.table_cols,
        };
        layer.each(lengths, run)
    }

    /// Builds the KV write of `rows` rows to their slots.
    pub(super) fn store(
        &self,
        exec: &ExecContext,
        layer: usize,
        [key, value]: [TypedAddress; 2],
        rows: usize,
        pool: (DeviceAddress, u64),
        run: &mut dyn FnMut(Op) -> Result<(), AscendError>,
    ) -> Result<(), AscendError> {
        let geometry = self.cache.geometry;
        let (blocks, row) = (self.cache.blocks(pool.1), self.cache.row());
        let [keys, values] = self.kv_tensors(layer, pool);
        let slots = self.lowering.fixed.slots;
        if self.has_kv_scatter {
            let new = [rows, geometry.kv_heads, geometry.head_dim];
            let all = [blocks, geometry.block_size, geometry.kv_heads, geometry.head_dim];
            let slots = TensorDesc::new(slots, ElemType::I32, &[rows]);
            let (key, value) = (key.tensor(&new), value.tensor(&new));
            return run(exec.ops.kv_scatter(&key, &value, &slots, &keys.tensor(&all), &values.tensor(&all))?);
        }
        let slots = TensorDesc::new(slots, ElemType::I32, &[rows, 1]);
        for (new, all) in [(key, keys), (value, values)] {
            let all = all.tensor(&[blocks * geometry.block_size, row]);
            run(exec.ops.scatter_rows(&all, &slots, &new.tensor(&[rows, row]))?)?;
        }
        Ok(())
    }

    /// Writes the inputs of a launch: ids, positions, logit rows, block tables, and slots of keys and values.
    pub(super) fn fill_in(&mut self, exec: &mut ExecContext, batch: &Batch<'_>, on: usize) -> Result<(), AscendError> {
        let fixed = self.lowering.fixed;
        let BufferDims { tokens, logits, seqs, table_cols, .. } = self.sizes;
        let block_size = self.cache.geometry.block_size;
        let pool = (batch.pool, batch.pool_bytes);
        if self.known_pool != Some(pool) {
            let reserved = u32::try_from(self.cache.blocks(pool.1).saturating_sub(1)).unwrap_or(0);
            exec.stage(fixed.table.offset(4 * seqs * table_cols), &reserved.to_le_bytes(), on)?;
            self.known_pool = Some(pool);
        }
        let LaunchShape { tokens: rows, seqs: sequences, logit_rows, table_stride } = batch.shape;
        let stream = exec.streams.get(on);
        stream.copy_within(fixed.ids, batch.token_ids, 4 * rows)?;
        stream.copy_within(fixed.positions, batch.positions, 4 * rows)?;
        if logit_rows > 0 {
            stream.copy_within(fixed.logit_rows, batch.logit_rows, 4 * logit_rows)?;
            stream.copy_within(fixed.status_rows, batch.logit_rows, 4 * logit_rows)?;
        }
        let needed = batch.kv_lens.iter().map(|&kv| (kv as usize).div_ceil(block_size)).max().unwrap_or(0);
        let dst = TensorDesc::view(
            fixed.table,
            ElemType::I32,
            &[sequences, needed],
            &[table_cols, 1],
            0,
            &[(seqs + 1) * table_cols],
        );
        let src = TensorDesc::view(
            batch.block_tables,
            ElemType::I32,
            &[sequences, needed],
            &[table_stride, 1],
            0,
            &[sequences * table_stride],
        );
        exec.run(exec.ops.copy(&dst, &src)?, on)?;

        // For each row, its index in the table, then its slot in the block; padding rows use the reserved block.
        let number = |n: usize| to_u32(n);
        self.words.clear();
        let rows_of = || batch.q_lens.iter().zip(batch.kv_lens).enumerate();
        for (sequence, (q, kv)) in rows_of() {
            let first = number(sequence * table_cols);
            self.words.extend((kv - q..*kv).map(|position| first + position / number(block_size)));
        }
        self.words.resize(tokens.next_multiple_of(8), number(seqs * table_cols));
        for (_, (q, kv)) in rows_of() {
            self.words.extend((kv - q..*kv).map(|position| position % number(block_size)));
        }
        self.words.extend((0..tokens - rows).map(|padding| number(padding % block_size)));
        exec.stage(fixed.entries, bytemuck::cast_slice(&self.words), on)?;
        debug_assert!(logit_rows <= logits, "the launch was checked");
        Ok(())
    }

    /// The operations that compute slot indices from table entries and positions.
    pub(super) fn slots(&self) -> [AclnnOp; 3] {
        let BufferDims { tokens, seqs, table_cols, .. } = self.sizes;
        let fixed = self.lowering.fixed;
        let ints = |address: DeviceAddress, count: usize| TensorDesc::new(address, ElemType::I32, &[count]);
        let slots = ints(fixed.slots, tokens);
        [
            AclnnOp::GatherRows {
                x: ints(fixed.table, (seqs + 1) * table_cols),
                rows: ints(fixed.entries, tokens),
                out: slots,
            },
            AclnnOp::Mul { a: slots, b: self.block_size, out: slots },
            AclnnOp::Add {
                a: slots,
                b: ints(fixed.entries.offset(4 * tokens.next_multiple_of(8)), tokens),
                out: slots,
            },
        ]
    }

    /// Queues one batch, operation by operation.
    pub(super) fn launch(&mut self, exec: &mut ExecContext, batch: &Batch<'_>, on: usize) -> Result<(), AscendError> {
        self.fill_in(exec, batch, on)?;
        for recipe in self.slots() {
            exec.run(recipe.build(&exec.ops)?, on)?;
        }
        self.lengths.fill(batch.q_lens, batch.kv_lens, 0);
        let pool = (batch.pool, batch.pool_bytes);
        let mut body = std::mem::take(&mut self.body);
        let exec = &*exec;
        let mut run = |op| exec.run(op, on);
        let ran = body.iter_mut().try_for_each(|prepared| match prepared {
            Prepared::Cached(op) => exec.launch(op, on),
            Prepared::PerLaunch(item) => match &**item {
                LoweredOp::Op(recipe) => run(recipe.build(&exec.ops)?),
                LoweredOp::Collective(meeting) => exec.run_collective(meeting, exec.streams.get(on)),
                LoweredOp::KvWrite { layer, key, value } => {
                    self.store(exec, *layer, [*key, *value], batch.shape.tokens, pool, &mut run)
                }
                LoweredOp::Attention { shape, query, out } => {
                    self.attend(exec, shape, *query, *out, pool, &self.lengths, &mut run)
                }
            },
        });
        self.body = body;
        ran?;
        let stream = exec.streams.get(on);
        self.tail(exec, batch.rows(), batch.results, &exec.shared(), stream, &mut |op| exec.run(op, on))
    }

    /// Builds the operations after the layers.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn tail(
        &self,
        exec: &ExecContext,
        rows: RowCounts,
        results: OutputBuffers,
        shared: &Shared,
        stream: &Stream,
        run: &mut dyn FnMut(Op) -> Result<(), AscendError>,
    ) -> Result<(), AscendError> {
        for at in self.tail_from..self.lowering.plan.steps.len() {
            if rows.logits == 0 && !matches!(self.lowering.plan.steps[at].op, PlanOp::RowStatus) {
                continue;
            }
            let mut make = |item: LoweredOp| match item {
                LoweredOp::Op(recipe) => run(recipe.build(&exec.ops)?),
                LoweredOp::Collective(meeting) => exec.run_collective(&meeting, stream),
                LoweredOp::KvWrite { .. } | LoweredOp::Attention { .. } => Ok(()),
            };
            self.lowering.lower(at, rows, results, shared.scratch(), &exec.constants, &mut make)?;
        }
        Ok(())
    }

    /// All operations of the layers at the bucket's rows, for a capture.
    pub(super) fn body_items(
        &self,
        exec: &ExecContext,
        room: SharedScratch,
        emit: &mut dyn FnMut(LoweredOp) -> Result<(), AscendError>,
    ) -> Result<(), AscendError> {
        let rows = RowCounts { tokens: self.sizes.tokens, logits: self.sizes.logits };
        (0..self.tail_from).try_for_each(|at| self.lowering.lower(at, rows, nowhere(), room, &exec.constants, emit))
    }
}

/// For each token id, the row of the rank's shard of the embedding table; ids of other ranks map to the row of zeros
/// after it.
fn own_rows(plan: &Plan) -> Option<Vec<u32>> {
    let (table, first) = plan.steps.iter().find_map(|step| match step.op {
        PlanOp::Embed { table, first_id } => Some((table, first_id)),
        _ => None,
    })?;
    let rows = u32::try_from(plan.weights[table.0 as usize].shape[0]).ok()?;
    let vocab = u32::try_from(plan.vocab_size).ok()?;
    Some((0..vocab).map(|id| id.checked_sub(first).filter(|row| *row < rows).unwrap_or(rows)).collect())
}

/// Output buffers of steps without results.
const fn nowhere() -> OutputBuffers {
    let none = DeviceAddress(0);
    OutputBuffers { logits: none, argmax: none, status: none }
}

/// Cosines and sines of all positions, each for a whole head: f32 angles as in the reference, rounded once.
#[allow(clippy::cast_possible_truncation)]
fn angles(
    frequencies: &crate::graph::RopeFrequencies,
    positions: usize,
    head_dim: usize,
    is_interleaved: bool,
    elem: ElemType,
) -> [Vec<u8>; 2] {
    let pairs = frequencies.inv_freq.len();
    let mut tables = [(); 2].map(|()| Vec::with_capacity(2 * positions * head_dim));
    let narrow = |value: f32| match elem {
        ElemType::BF16 => half::bf16::from_f32(value).to_le_bytes(),
        _ => half::f16::from_f32(value).to_le_bytes(),
    };
    for position in 0..positions {
        for i in 0..head_dim {
            let pair = if is_interleaved { i / 2 } else { i % pairs.max(1) };
            let angle = f64::from(position as f32 * frequencies.inv_freq.get(pair).copied().unwrap_or(0.0));
            let factor = frequencies.attention_factor;
            tables[0].extend_from_slice(&narrow(angle.cos() as f32 * factor));
            tables[1].extend_from_slice(&narrow(angle.sin() as f32 * factor));
        }
    }
    tables
}
