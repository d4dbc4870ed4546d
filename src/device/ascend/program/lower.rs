//! Lowers the steps of a plan to operations of the library.
//!
//! Values keep the offsets of the plan; buffers sized for f32 rows hold 16-bit rows here. Further operands of a step
//! (norm factors, rotated keys, tables of cosines) are in buffers of the program.

#![forbid(unsafe_code)]

use crate::device::ascend::program::SharedScratch;
use crate::device::ascend::program::context::Collective;
use std::sync::Arc;

use ascend_sys::{AscendError, DeviceAddress, ElemType, TensorDesc};

use super::aclnn_op::AclnnOp;
use crate::device::ascend::memory::constants::Constants;
use crate::device::ascend::memory::{RegionBuilder, TypedAddress};
use crate::device::ascend::program::aclnn_op::Quantized;
use crate::device::ascend::weights::WeightSet;
use crate::device::ascend::weights::layout::Matrix;
use crate::graph::{ActivationKind, AttentionShape, Io, LinearPart, NormSpec, Op, Operand, Plan, Step, TpRank};

/// Rows that a launch computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RowCounts {
    pub tokens: usize,
    pub logits: usize,
}

/// Destinations of a launch's results.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OutputBuffers {
    pub logits: DeviceAddress,
    pub argmax: DeviceAddress,
    pub status: DeviceAddress,
}

/// Lowered form of a step.
#[derive(Clone, Debug)]
#[allow(clippy::large_enum_variant)] // made on the stack, one at a time: the step loop allocates nothing
pub(crate) enum LoweredOp {
    Op(AclnnOp),
    Collective(Collective),
    /// Writes keys and values of all rows to their slots.
    KvWrite {
        layer: usize,
        key: TypedAddress,
        value: TypedAddress,
    },
    /// Attention over the stored keys and values.
    Attention {
        shape: AttentionShape,
        query: TypedAddress,
        out: TypedAddress,
    },
}

/// Buffers of a program in its region, after the arena.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ProgramBuffers {
    pub ids: DeviceAddress,
    /// Token ids as row indices of the rank's part of the embedding table.
    own_ids: DeviceAddress,
    pub positions: DeviceAddress,
    pub logit_rows: DeviceAddress,
    /// Block tables with `table_cols` entries per sequence, and one more row whose first entry is the reserved block.
    pub table: DeviceAddress,
    /// For each row, its index in `table`, then (starting at a multiple of 8) its slot in the block; written by the
    /// host.
    pub entries: DeviceAddress,
    pub slots: DeviceAddress,
    /// For each row of logits, the row of the batch that its status belongs to; padding rows have indices after the
    /// batch's.
    pub status_rows: DeviceAddress,
    /// Whether rows are finite: those of the batch, then those of padding rows of logits.
    pub finite: DeviceAddress,
    row_flags: DeviceAddress,
    logit_flags: DeviceAddress,
    logits_finite: DeviceAddress,
    argmax: DeviceAddress,
    addends: [DeviceAddress; 2],
    rstd: DeviceAddress,
    rotated: [DeviceAddress; 2],
    gate_up: DeviceAddress,
    /// Rows rounded to int8 before a product, and their scales.
    int8_rows: DeviceAddress,
    int8_scales: DeviceAddress,
}

/// Dimensions that determine the buffers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BufferDims {
    pub tokens: usize,
    pub logits: usize,
    pub seqs: usize,
    /// Number of entries per row of the block table, a multiple of 8.
    pub table_cols: usize,
    /// Largest width of rows that are rounded to int8; 0 if there are none.
    pub int8_cols: usize,
}

impl ProgramBuffers {
    /// Places the buffers of a plan starting at `base`; also returns their total size in bytes.
    pub(crate) fn new(plan: &Plan, sizes: BufferDims, base: DeviceAddress) -> (Self, usize) {
        let BufferDims { tokens, logits, seqs, table_cols, int8_cols } = sizes;
        let widest =
            plan.values.iter().map(|value| value.cols).filter(|&cols| cols != plan.vocab_size).max().unwrap_or(1);
        let most_groups = plan.steps.iter().map(|step| most_groups(plan, step)).max().unwrap_or(1);
        let mut pieces = RegionBuilder::default();
        let mut words = |count: usize| base.offset(pieces.add(4 * count));
        let fixed = Self {
            ids: words(tokens),
            own_ids: words(tokens),
            positions: words(tokens),
            logit_rows: words(logits),
            table: words((seqs + 1) * table_cols),
            entries: words(tokens.next_multiple_of(8) + tokens),
            slots: words(tokens),
            status_rows: words(logits),
            finite: words(tokens + logits),
            row_flags: words(tokens),
            logit_flags: words(logits),
            logits_finite: words(logits),
            argmax: words(logits),
            addends: [words(tokens.max(logits)), words(tokens.max(logits))],
            rstd: words(tokens.max(logits) * most_groups),
            rotated: [words(tokens * widest.div_ceil(2)), words(tokens * widest.div_ceil(2))],
            gate_up: words(tokens * widest),
            int8_rows: words(tokens.max(logits) * int8_cols.div_ceil(4)),
            int8_scales: words(tokens.max(logits)),
        };
        (fixed, pieces.bytes())
    }
}

/// Number of groups per row that a step normalizes.
fn most_groups(plan: &Plan, step: &Step) -> usize {
    match &step.op {
        Op::RmsNorm(norm) | Op::QkNormRope { norm, .. } | Op::RopeKvWrite { norm: Some(norm), .. } => {
            plan.values[step.inputs[0]].cols.div_ceil(norm.group.max(1))
        }
        _ => 1,
    }
}

/// Tables of one rotation: `[positions, head_dim]` each.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RopeTables {
    pub cos: DeviceAddress,
    pub sin: DeviceAddress,
    pub positions: usize,
    pub head_dim: usize,
    pub is_interleaved: bool,
}

/// Input rows of a product, in both types.
#[derive(Clone, Copy, Debug)]
struct Multiplied {
    plain: TensorDesc,
    int8: Quantized,
}

/// A plan with the locations of all its operands.
#[derive(Debug)]
pub(crate) struct Lowering {
    pub plan: Plan,
    pub weights: Arc<WeightSet>,
    pub arena: DeviceAddress,
    pub fixed: ProgramBuffers,
    pub ropes: Vec<RopeTables>,
    /// For each token id, the row of the rank's part of the embedding table; ids of other ranks map to the row of
    /// zeros.
    pub own_rows: Option<DeviceAddress>,
    /// Gate and up projections merged into one product, by step, with the combined weight; and the steps that read both
    /// halves.
    pub fused_gate_up: Vec<Option<Matrix>>,
    pub swiglu_halves: Vec<bool>,
}

impl Lowering {
    fn elem(&self) -> ElemType {
        self.weights.elem
    }

    /// Address of a value.
    pub(crate) fn place(&self, value: usize) -> TypedAddress {
        let offset = match self.plan.values[value].operand {
            Operand::Arena { offset } => offset,
            Operand::Io(_) | Operand::Effect => 0,
        };
        TypedAddress::new(self.arena.offset(offset), self.elem())
    }

    fn cols(&self, value: usize) -> usize {
        self.plan.values[value].cols
    }

    fn rows(&self, value: usize, rows: RowCounts) -> usize {
        match self.plan.values[value].rows {
            crate::graph::RowDim::Tokens => rows.tokens,
            crate::graph::RowDim::LogitRows => rows.logits,
        }
    }

    fn value(&self, value: usize, rows: RowCounts) -> TensorDesc {
        self.place(value).tensor(&[self.rows(value, rows), self.cols(value)])
    }

    fn is_logits(&self, value: usize) -> bool {
        self.plan.values[value].operand == Operand::Io(Io::Logits)
    }

    /// Whether a step computes rows of logits or their status; such steps are built for each launch.
    pub(crate) fn is_tail(&self, step: &Step) -> bool {
        matches!(step.op, Op::GatherRows | Op::RowStatus)
            || step.outputs.iter().any(|&value| self.plan.values[value].rows == crate::graph::RowDim::LogitRows)
    }

    /// The operations of a step, in order.
    pub(crate) fn lower(
        &self,
        at: usize,
        rows: RowCounts,
        results: OutputBuffers,
        room: SharedScratch,
        constants: &Constants,
        emit: &mut dyn FnMut(LoweredOp) -> Result<(), AscendError>,
    ) -> Result<(), AscendError> {
        let Step { op, inputs, outputs, scratch, .. } = &self.plan.steps[at];
        let ints = |address: DeviceAddress, dims: &[usize]| TensorDesc::new(address, ElemType::I32, dims);
        let flags = |address: DeviceAddress, dims: &[usize]| TensorDesc::new(address, ElemType::Bool, dims);
        let input = |n: usize| self.value(inputs[n], rows);
        let output = |n: usize| self.value(outputs[n], rows);
        let mut op_of = |recipe: AclnnOp| emit(LoweredOp::Op(recipe));
        let fixed = &self.fixed;
        match op {
            Op::Embed { table, .. } => {
                let ids = ints(fixed.ids, &[rows.tokens]);
                let Some(own_rows) = self.own_rows else {
                    return op_of(AclnnOp::Embedding { table: self.weights.tensor(*table), ids, out: output(0) });
                };
                let (all, own_ids) = (ints(own_rows, &[self.plan.vocab_size]), ints(fixed.own_ids, &[rows.tokens]));
                op_of(AclnnOp::GatherRows { x: all, rows: ids, out: own_ids })?;
                let table = self.weights.table_with_zeros(*table);
                op_of(AclnnOp::Embedding { table, ids: own_ids, out: output(0) })
            }
            Op::RopeAngles { rope } => {
                let RopeTables { cos, sin, positions, head_dim, .. } = self.ropes[*rope];
                let [cos_rows, sin_rows] = self.angles(outputs[0], head_dim);
                for (table, out) in [(cos, cos_rows), (sin, sin_rows)] {
                    op_of(AclnnOp::GatherRows {
                        x: TensorDesc::new(table, self.elem(), &[positions, head_dim]),
                        rows: ints(fixed.positions, &[rows.tokens]),
                        out: out.tensor(&[rows.tokens, head_dim]),
                    })?;
                }
                Ok(())
            }
            Op::RmsNorm(norm) | Op::NormCast { norm, .. } => {
                let (x, out) = (self.place(inputs[0]), self.place(outputs[0]));
                op_of(self.norm(norm, x, out, self.rows(inputs[0], rows), self.cols(inputs[0])))
            }
            Op::AddRmsNorm { norm, .. } => {
                let rstd = TensorDesc::new(fixed.rstd, ElemType::F32, &[self.rows(inputs[0], rows), 1]);
                let gamma = self.weights.tensor(norm.weight);
                let operands = Box::new([input(0), input(1), gamma, output(1), rstd, output(0)]);
                op_of(AclnnOp::AddRmsNorm { operands, eps: f64::from(norm.eps) })
            }
            Op::Add => op_of(AclnnOp::Add { a: input(0), b: input(1), out: output(0) }),
            Op::Mul => op_of(AclnnOp::Mul { a: input(0), b: input(1), out: output(0) }),
            Op::Activation(kind) => op_of(activation(*kind, input(0), output(0))),
            Op::Scale(factor) => op_of(AclnnOp::Scale { x: input(0), factor: *factor, out: output(0) }),
            Op::Cast(_) => op_of(AclnnOp::Copy { dst: output(0), src: input(0) }),
            Op::Linear(part) => {
                let x = self.multiplied(std::slice::from_ref(part), input(0), &mut op_of)?;
                self.linear(part, &x, outputs[0], rows, results, room, &mut op_of)
            }
            Op::LinearMulti(parts) => {
                let x = self.multiplied(parts, input(0), &mut op_of)?;
                match self.fused_gate_up[at] {
                    Some(matrix) => {
                        let out = self.gate_up(rows.tokens, self.cols(outputs[0]));
                        op_of(matrix.product(x.plain, &x.int8, out))
                    }
                    None => parts
                        .iter()
                        .zip(outputs)
                        .try_for_each(|(part, &out)| self.linear(part, &x, out, rows, results, room, &mut op_of)),
                }
            }
            Op::ActMul(kind) => self.act_mul(at, *kind, [input(0), input(1)], output(0), &mut op_of),
            Op::SwigluLinear { activation, part, .. } => {
                let product = self.value(scratch.unwrap_or(inputs[0]), rows);
                self.act_mul(at, *activation, [input(0), input(1)], product, &mut op_of)?;
                let x = self.multiplied(std::slice::from_ref(part), product, &mut op_of)?;
                self.linear(part, &x, outputs[0], rows, results, room, &mut op_of)
            }
            Op::Rope { head_dim, .. } => {
                let (x, out) = (self.place(inputs[0]), self.place(outputs[0]));
                op_of(self.rope(x, inputs[1], out, rows.tokens, self.cols(inputs[0]), *head_dim))
            }
            Op::QkNormRope { norm, head_dim, .. } => {
                let cols = self.cols(inputs[0]);
                let normed = TypedAddress::new(fixed.rotated[0], self.elem());
                op_of(self.norm(norm, self.place(inputs[0]), normed, rows.tokens, cols))?;
                op_of(self.rope(normed, inputs[1], self.place(outputs[0]), rows.tokens, cols, *head_dim))
            }
            Op::KvWrite { layer } => {
                emit(LoweredOp::KvWrite { layer: *layer, key: self.place(inputs[0]), value: self.place(inputs[1]) })
            }
            Op::RopeKvWrite { layer, head_dim, norm, .. } => {
                let (cols, mut key) = (self.cols(inputs[0]), self.place(inputs[0]));
                if let Some(norm) = norm {
                    let normed = TypedAddress::new(fixed.rotated[0], self.elem());
                    op_of(self.norm(norm, key, normed, rows.tokens, cols))?;
                    key = normed;
                }
                let turned = TypedAddress::new(fixed.rotated[1], self.elem());
                op_of(self.rope(key, inputs[1], turned, rows.tokens, cols, *head_dim))?;
                emit(LoweredOp::KvWrite { layer: *layer, key: turned, value: self.place(inputs[2]) })
            }
            Op::Attention(shape) => {
                emit(LoweredOp::Attention { shape: *shape, query: self.place(inputs[0]), out: self.place(outputs[0]) })
            }
            Op::GatherRows => {
                let wanted = ints(fixed.logit_rows, &[rows.logits]);
                op_of(AclnnOp::GatherRows { x: input(0), rows: wanted, out: output(0) })
            }
            Op::ArgMax => self.argmax(rows.logits, results, room, constants, &mut op_of),
            Op::LinearArgMax(part) => {
                let x = self.multiplied(std::slice::from_ref(part), input(0), &mut op_of)?;
                self.linear(part, &x, outputs[0], rows, results, room, &mut op_of)?;
                self.argmax(rows.logits, results, room, constants, &mut op_of)
            }
            Op::RowStatus => {
                let (tokens, cols) = (rows.tokens, self.cols(inputs[0]));
                op_of(AclnnOp::IsFinite { x: input(0), out: flags(room.flags, &[tokens, cols]) })?;
                op_of(AclnnOp::All { x: flags(room.flags, &[tokens, cols]), out: flags(fixed.row_flags, &[tokens]) })?;
                op_of(AclnnOp::Cast { x: flags(fixed.row_flags, &[tokens]), out: ints(fixed.finite, &[tokens]) })?;
                self.join_logits_status(rows, &mut op_of)?;
                let [sound, term] = [ints(fixed.finite, &[tokens]), ints(fixed.addends[0], &[tokens])];
                op_of(AclnnOp::Mul { a: sound, b: constants.minus_two(), out: term })?;
                op_of(AclnnOp::Add { a: term, b: constants.two(), out: term })?;
                let out = TensorDesc::new(results.status, ElemType::I8, &[tokens]);
                op_of(AclnnOp::Cast { x: term, out })
            }
            Op::AllReduce => {
                let elements = self.rows(inputs[0], rows) * self.cols(inputs[0]);
                let (src, dst) = (self.place(inputs[0]), self.place(outputs[0]));
                emit(LoweredOp::Collective(Collective { gathers: false, src, dst, elements }))
            }
            Op::AllGather => self.gather_logits(inputs[0], rows, results, room, emit),
            // Not among the device's operations: plans that have it are refused when they are compiled.
            Op::Custom(_) => Ok(()),
        }
    }

    /// Addresses of cosines and sines in the buffer of the angles.
    fn angles(&self, value: usize, head_dim: usize) -> [TypedAddress; 2] {
        let cos = self.place(value);
        [cos, cos.from(self.plan.bucket.tokens * head_dim)]
    }

    fn norm(&self, norm: &NormSpec, x: TypedAddress, out: TypedAddress, rows: usize, cols: usize) -> AclnnOp {
        let heads = cols / norm.group;
        let (dims, factors) = if heads == 1 {
            (vec![rows, cols], vec![rows, 1])
        } else {
            (vec![rows, heads, norm.group], vec![rows, heads, 1])
        };
        AclnnOp::RmsNorm {
            x: x.tensor(&dims),
            gamma: self.weights.tensor(norm.weight),
            eps: f64::from(norm.eps),
            out: out.tensor(&dims),
            rstd: TensorDesc::new(self.fixed.rstd, ElemType::F32, &factors),
        }
    }

    fn rope(
        &self,
        x: TypedAddress,
        angles: usize,
        out: TypedAddress,
        rows: usize,
        cols: usize,
        head_dim: usize,
    ) -> AclnnOp {
        let dims = [rows, cols / head_dim, head_dim];
        let [cos, sin] = self.angles(angles, head_dim).map(|place| place.tensor(&[rows, 1, head_dim]));
        let is_interleaved = self.ropes.iter().any(|rope| rope.head_dim == head_dim && rope.is_interleaved);
        AclnnOp::Rope { x: x.tensor(&dims), cos, sin, is_interleaved, out: out.tensor(&dims) }
    }

    fn gate_up(&self, rows: usize, cols: usize) -> TensorDesc {
        TensorDesc::new(self.fixed.gate_up, self.elem(), &[rows, 2 * cols])
    }

    fn act_mul(
        &self,
        at: usize,
        kind: ActivationKind,
        [gate, up]: [TensorDesc; 2],
        out: TensorDesc,
        op_of: &mut dyn FnMut(AclnnOp) -> Result<(), AscendError>,
    ) -> Result<(), AscendError> {
        if self.swiglu_halves[at] {
            let (rows, cols) = (to_usize(out.dims()[0]), to_usize(out.dims()[1]));
            return op_of(AclnnOp::Swiglu { x: self.gate_up(rows, cols), out });
        }
        op_of(activation(kind, gate, out))?;
        op_of(AclnnOp::Mul { a: out, b: up, out })
    }

    /// The input rows of products with the given weights, rounded to int8 once if one of the products needs it.
    fn multiplied(
        &self,
        parts: &[LinearPart],
        x: TensorDesc,
        op_of: &mut dyn FnMut(AclnnOp) -> Result<(), AscendError>,
    ) -> Result<Multiplied, AscendError> {
        let int8 = Quantized::new(self.fixed.int8_rows, self.fixed.int8_scales, &x);
        if parts.iter().any(|part| self.weights.matrix(part.weight).takes_int8()) {
            op_of(int8.op(x))?;
        }
        Ok(Multiplied { plain: x, int8 })
    }

    #[allow(clippy::too_many_arguments)]
    fn linear(
        &self,
        part: &LinearPart,
        x: &Multiplied,
        out: usize,
        rows: RowCounts,
        results: OutputBuffers,
        room: SharedScratch,
        op_of: &mut dyn FnMut(AclnnOp) -> Result<(), AscendError>,
    ) -> Result<(), AscendError> {
        let matrix = self.weights.matrix(part.weight);
        let bias = part.bias.map(|bias| self.weights.tensor(bias));
        let dims = [rows.logits, self.plan.vocab_size];
        let is_logits = self.is_logits(out);
        let out = if is_logits { TensorDesc::new(room.logits, self.elem(), &dims) } else { self.value(out, rows) };
        match (matrix, bias) {
            (Matrix::Rows(weight), bias) => op_of(AclnnOp::Linear { x: x.plain, weight, bias, out })?,
            (_, bias) => {
                op_of(matrix.product(x.plain, &x.int8, out))?;
                // Tiles support no bias, and the other layouts differ in the type of the bias.
                bias.map_or(Ok(()), |bias| op_of(AclnnOp::Add { a: out, b: bias, out }))?;
            }
        }
        if is_logits {
            op_of(AclnnOp::Cast { x: out, out: TensorDesc::new(results.logits, ElemType::F32, &dims) })?;
        }
        Ok(())
    }

    /// Concatenates the ranks' columns of the logits. Each rank contributes as many columns as the largest shard has;
    /// the excess columns of a smaller shard are ignored.
    fn gather_logits(
        &self,
        part: usize,
        rows: RowCounts,
        results: OutputBuffers,
        room: SharedScratch,
        emit: &mut dyn FnMut(LoweredOp) -> Result<(), AscendError>,
    ) -> Result<(), AscendError> {
        let (vocab, of) = (self.plan.vocab_size, self.plan.rank.of);
        let most = vocab.div_ceil(of as usize);
        let gathered = TypedAddress::new(room.gathered, self.elem());
        let elements = rows.logits * most;
        emit(LoweredOp::Collective(Collective { gathers: true, src: self.place(part), dst: gathered, elements }))?;
        let dims = [rows.logits, vocab];
        let view = |base: DeviceAddress, first: usize, cols: usize, stride: usize, storage: &[usize]| {
            TensorDesc::view(base, self.elem(), &[rows.logits, cols], &[stride, 1], first, storage)
        };
        for index in 0..of {
            let share = TpRank { index, of }.share(vocab);
            let dst = view(room.logits, share.start, share.len(), vocab, &dims);
            let src =
                view(room.gathered, index as usize * elements, share.len(), share.len(), &[of as usize * elements]);
            emit(LoweredOp::Op(AclnnOp::Copy { dst, src }))?;
        }
        let narrow = TensorDesc::new(room.logits, self.elem(), &dims);
        let wide = TensorDesc::new(results.logits, ElemType::F32, &dims);
        emit(LoweredOp::Op(AclnnOp::Cast { x: narrow, out: wide }))
    }

    /// Computes whether each row of logits is finite, and `argmax = argmax · finite + (finite - 1)`, which is -1 (all
    /// bits set) for a row that is not.
    fn argmax(
        &self,
        rows: usize,
        results: OutputBuffers,
        room: SharedScratch,
        constants: &Constants,
        op_of: &mut dyn FnMut(AclnnOp) -> Result<(), AscendError>,
    ) -> Result<(), AscendError> {
        let fixed = &self.fixed;
        let ints = |address: DeviceAddress| TensorDesc::new(address, ElemType::I32, &[rows]);
        let dims = [rows, self.plan.vocab_size];
        let logits = TensorDesc::new(room.logits, self.elem(), &dims);
        let flags = TensorDesc::new(room.flags, ElemType::Bool, &dims);
        let row_flags = TensorDesc::new(fixed.logit_flags, ElemType::Bool, &[rows]);
        let (sound, largest) = (ints(fixed.logits_finite), ints(fixed.argmax));
        let [product, offset] = fixed.addends.map(ints);
        op_of(AclnnOp::IsFinite { x: logits, out: flags })?;
        op_of(AclnnOp::All { x: flags, out: row_flags })?;
        op_of(AclnnOp::Cast { x: row_flags, out: sound })?;
        op_of(AclnnOp::ArgMax { x: logits, out: largest })?;
        op_of(AclnnOp::Mul { a: largest, b: sound, out: product })?;
        op_of(AclnnOp::Add { a: sound, b: constants.minus_one(), out: offset })?;
        op_of(AclnnOp::Add { a: product, b: offset, out: ints(results.argmax) })
    }

    /// Marks a row as valid if its final hidden state and, if requested, its logits are finite.
    fn join_logits_status(
        &self,
        rows: RowCounts,
        op_of: &mut dyn FnMut(AclnnOp) -> Result<(), AscendError>,
    ) -> Result<(), AscendError> {
        if rows.logits == 0 {
            return Ok(());
        }
        let fixed = &self.fixed;
        let ints = |address: DeviceAddress, dims: &[usize]| TensorDesc::new(address, ElemType::I32, dims);
        let (wanted, joint) = (ints(fixed.logit_rows, &[rows.logits]), ints(fixed.addends[0], &[rows.logits]));
        op_of(AclnnOp::GatherRows { x: ints(fixed.finite, &[rows.tokens]), rows: wanted, out: joint })?;
        op_of(AclnnOp::Mul { a: joint, b: ints(fixed.logits_finite, &[rows.logits]), out: joint })?;
        let all = self.plan.bucket.tokens + self.plan.bucket.logit_rows;
        op_of(AclnnOp::ScatterRows {
            cache: words(fixed.finite, &[all, 1]),
            indices: ints(fixed.status_rows, &[rows.logits, 1]),
            updates: words(fixed.addends[0], &[rows.logits, 1]),
        })
    }
}

fn activation(kind: ActivationKind, x: TensorDesc, out: TensorDesc) -> AclnnOp {
    match kind {
        ActivationKind::Silu => AclnnOp::Silu { x, out },
        ActivationKind::GeluTanh => AclnnOp::Gelu { x, out },
    }
}

fn to_usize(n: i64) -> usize {
    usize::try_from(n).unwrap_or(0)
}

/// Descriptor of 32-bit words that are only copied. Scatter supports f32 but not int32, and copies either unchanged.
pub(crate) fn words(address: DeviceAddress, dims: &[usize]) -> TensorDesc {
    TensorDesc::new(address, ElemType::F32, dims)
}
