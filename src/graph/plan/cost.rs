//! Cost of a plan: operations and bytes of each step, as a pure function of a batch's shape.
//!
//! The model is the roofline's: a step reads each weight once from its storage, reads its inputs, writes its outputs,
//! and reads the visible keys and values of its sequences. Caches, padding to tiles and the packing of a device are
//! ignored, so fusion saves bytes but never operations: a fused step counts exactly the operations of the steps it
//! replaces. Integer operations count as floating-point ones, and also separately, because devices have a different
//! peak rate for them.

use std::iter::Sum;
use std::ops::{Add, AddAssign};

use crate::graph::{
    ActivationKind, ActivationType, Elem, LinearPart, NormSpec, Op, Plan, PlanValue, RowDim, Step, Weight, WeightId,
};
use crate::settings::with_methods;

/// Operations per element: square and sum, scale, weight.
const NORM_FLOPS: u64 = 4;
/// Operations per element: largest magnitude, scale, round.
const QUANTIZE_FLOPS: u64 = 3;
/// Operations per rotated pair: four products, two sums.
const ROTATE_FLOPS: u64 = 6;
/// Operations per angle: the angle, its cosine, its sine.
const ANGLE_FLOPS: u64 = 3;
/// Bytes of a token id, a position or a row index.
const WORD_BYTES: u64 = 4;
/// Bytes of a row's status.
const STATUS_BYTES: u64 = 1;

/// Operations and bytes of one step or of several.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize)]
#[non_exhaustive]
pub struct Cost {
    /// Arithmetic operations, including integer ones.
    pub flops: u64,
    /// The integer operations among them: products and sums of matrices with int8 activations, without their biases.
    pub int8_flops: u64,
    /// Bytes of weights read, as stored in the file.
    pub weight_bytes: u64,
    /// Bytes of activations, ids, positions, logits and status read and written.
    pub activation_bytes: u64,
    /// Bytes of keys and values read and written.
    pub kv_bytes: u64,
}

impl Cost {
    with_methods! {
        value {
            flops with_flops: u64,
            int8_flops with_int8_flops: u64,
            weight_bytes with_weight_bytes: u64,
            activation_bytes with_activation_bytes: u64,
            kv_bytes with_kv_bytes: u64,
        }
    }

    /// Sum of all bytes read and written.
    pub const fn bytes(&self) -> u64 {
        self.weight_bytes.saturating_add(self.activation_bytes).saturating_add(self.kv_bytes)
    }

    /// Operations per byte; 0 if no bytes are moved.
    pub fn intensity(&self) -> f64 {
        if self.bytes() == 0 { 0.0 } else { self.flops as f64 / self.bytes() as f64 }
    }
}

impl Add for Cost {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            flops: self.flops.saturating_add(other.flops),
            int8_flops: self.int8_flops.saturating_add(other.int8_flops),
            weight_bytes: self.weight_bytes.saturating_add(other.weight_bytes),
            activation_bytes: self.activation_bytes.saturating_add(other.activation_bytes),
            kv_bytes: self.kv_bytes.saturating_add(other.kv_bytes),
        }
    }
}

impl AddAssign for Cost {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl Sum for Cost {
    fn sum<I: Iterator<Item = Self>>(costs: I) -> Self {
        costs.fold(Self::default(), Add::add)
    }
}

/// Cost of all steps of one operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct OpCost {
    /// Name of the operation.
    pub op: &'static str,
    /// Number of launches per batch.
    pub launches: u32,
    /// Sum of the costs of these launches.
    pub cost: Cost,
}

/// Dimensions of a batch that determine its cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct CostShape {
    /// Number of rows of the batch.
    pub tokens: u64,
    /// Number of rows whose logits are requested.
    pub logit_rows: u64,
    /// Number of sequences of the batch.
    pub seqs: u64,
    /// Number of keys that each row sees, summed over the rows; see [`attended_tokens`].
    pub attended_tokens: u64,
    /// Number of keys that the rows of each sequence see, summed over the sequences; see [`shown_tokens`].
    pub kv_tokens: u64,
    /// Bytes of an element of stored keys and values, without the scales of int8.
    pub kv_element_bytes: u64,
}

impl CostShape {
    with_methods! {
        value {
            tokens with_tokens: u64,
            logit_rows with_logit_rows: u64,
            seqs with_seqs: u64,
            attended_tokens with_attended_tokens: u64,
            kv_tokens with_kv_tokens: u64,
            kv_element_bytes with_kv_element_bytes: u64,
        }
    }

    /// Shape of a batch whose sequences have `q_lens` rows, and `kv_lens` tokens after the step, for layers with this
    /// window.
    pub fn from_batch(
        q_lens: &[u32],
        kv_lens: &[u32],
        logit_rows: u64,
        window: Option<u32>,
        kv_element_bytes: u64,
    ) -> Self {
        Self {
            tokens: q_lens.iter().map(|&q| u64::from(q)).sum(),
            logit_rows,
            seqs: q_lens.len() as u64,
            attended_tokens: attended_tokens(q_lens, kv_lens, window),
            kv_tokens: shown_tokens(q_lens, kv_lens, window),
            kv_element_bytes,
        }
    }

    /// Decodes one token of one sequence that has `context` tokens including it.
    pub fn decode(context: u32, kv_element_bytes: u64) -> Self {
        Self::from_batch(&[1], &[context.max(1)], 1, None, kv_element_bytes)
    }

    /// Prefills the first `tokens` tokens of one sequence, with the logits of the last one.
    pub fn prefill(tokens: u32, kv_element_bytes: u64) -> Self {
        Self::from_batch(&[tokens], &[tokens], 1, None, kv_element_bytes)
    }

    /// Shape for a layer with this window. Exact if all rows see fewer keys than the window, or all see at least that
    /// many; else an upper bound. [`Plan::batch_costs`] is always exact.
    #[must_use]
    pub fn within(self, window: Option<u32>) -> Self {
        let Some(window) = window.map(u64::from) else { return self };
        let shown = self.seqs.saturating_mul(window.saturating_sub(1)).saturating_add(self.tokens);
        Self {
            attended_tokens: self.attended_tokens.min(self.tokens.saturating_mul(window)),
            kv_tokens: self.kv_tokens.min(shown),
            ..self
        }
    }

    const fn rows(&self, rows: RowDim) -> u64 {
        match rows {
            RowDim::Tokens => self.tokens,
            RowDim::LogitRows => self.logit_rows,
        }
    }
}

/// Number of visible keys, summed over the rows of a batch: a row sees itself and the tokens before it, at most
/// `window` keys in total.
pub fn attended_tokens(q_lens: &[u32], kv_lens: &[u32], window: Option<u32>) -> u64 {
    let of_sequence = |(&q, &kv): (&u32, &u32)| {
        let (rows, last) = (u64::from(q), u64::from(kv));
        // The rows see first, first + 1, … last keys, up to the window.
        let first = (last + 1).saturating_sub(rows);
        let cut = window.map_or(last, |window| last.min(u64::from(window)));
        let growing = (cut + 1).saturating_sub(first);
        growing * (first + cut) / 2 + (rows - growing.min(rows)) * cut
    };
    q_lens.iter().zip(kv_lens).map(of_sequence).fold(0, u64::saturating_add)
}

/// Number of distinct keys that the rows of each sequence see, summed over the sequences: all keys of the sequence, or
/// with a window, those from the first visible key of its first row on.
pub fn shown_tokens(q_lens: &[u32], kv_lens: &[u32], window: Option<u32>) -> u64 {
    let of_sequence = |(&q, &kv): (&u32, &u32)| {
        let seen = window.map_or(u64::MAX, |window| u64::from(window) + u64::from(q.saturating_sub(1)));
        u64::from(kv).min(seen)
    };
    q_lens.iter().zip(kv_lens).map(of_sequence).fold(0, u64::saturating_add)
}

fn product<const N: usize>(factors: [u64; N]) -> u64 {
    factors.into_iter().fold(1, u64::saturating_mul)
}

impl Plan {
    /// Cost of each step in a batch of this shape, in the order of the steps.
    pub fn step_costs(&self, shape: &CostShape) -> Vec<Cost> {
        self.steps.iter().map(|step| self.step_cost(step, shape.within(window_of(step)))).collect()
    }

    /// Cost of the whole plan in a batch of this shape.
    pub fn cost(&self, shape: &CostShape) -> Cost {
        self.step_costs(shape).into_iter().sum()
    }

    /// Cost of each step in this batch, counted row by row with the window of each layer.
    pub fn batch_costs(&self, q_lens: &[u32], kv_lens: &[u32], logit_rows: u64, kv_element_bytes: u64) -> Vec<Cost> {
        let shape = |step| CostShape::from_batch(q_lens, kv_lens, logit_rows, window_of(step), kv_element_bytes);
        self.steps.iter().map(|step| self.step_cost(step, shape(step))).collect()
    }

    /// Sums step costs by operation, in the order in which operations first appear.
    pub fn costs_by_op(&self, costs: &[Cost]) -> Vec<OpCost> {
        let mut sums: Vec<OpCost> = Vec::new();
        for (step, &cost) in self.steps.iter().zip(costs) {
            let op = step.op.name();
            if let Some(sum) = sums.iter_mut().find(|sum| sum.op == op) {
                sum.launches += 1;
                sum.cost += cost;
            } else {
                sums.push(OpCost { op, launches: 1, cost });
            }
        }
        sums
    }

    /// Row dimension of a step. A step is skipped in a batch without such rows.
    pub(crate) fn rows_of(&self, step: &Step) -> Option<RowDim> {
        step.outputs.iter().chain(&step.inputs).next().map(|&value| self.values[value].rows)
    }

    pub(crate) fn step_cost(&self, step: &Step, shape: CostShape) -> Cost {
        let costed = Costed { plan: self, step, shape };
        if self.rows_of(step).is_none_or(|rows| shape.rows(rows) == 0) {
            return Cost::default();
        }
        Cost {
            flops: costed.flops(),
            int8_flops: costed.int8_flops(),
            weight_bytes: costed.weight_bytes(),
            activation_bytes: costed.activation_bytes(),
            kv_bytes: costed.kv_bytes(),
        }
    }
}

pub(crate) const fn window_of(step: &Step) -> Option<u32> {
    match &step.op {
        Op::Attention(shape) => shape.window,
        _ => None,
    }
}

/// Cost computation of one step in one batch.
#[derive(Clone, Copy)]
struct Costed<'a> {
    plan: &'a Plan,
    step: &'a Step,
    shape: CostShape,
}

impl Costed<'_> {
    fn value(&self, value: usize) -> &PlanValue {
        &self.plan.values[value]
    }

    fn rows(&self, value: usize) -> u64 {
        self.shape.rows(self.value(value).rows)
    }

    fn elements(&self, value: usize) -> u64 {
        product([self.rows(value), self.value(value).cols as u64])
    }

    fn bytes(&self, value: usize) -> u64 {
        product([self.rows(value), self.value(value).row_bytes() as u64])
    }

    fn weight(&self, id: WeightId) -> &Weight {
        &self.plan.weights[id.0 as usize]
    }

    fn flops(&self) -> u64 {
        let input = |at: usize| self.elements(self.step.inputs[at]);
        match &self.step.op {
            // The cost of a custom operation is unknown. A collective adds the rows of all ranks, with one sum per
            // element and rank.
            Op::Embed { .. }
            | Op::KvWrite { .. }
            | Op::GatherRows
            | Op::ArgMax
            | Op::RowStatus
            | Op::Custom(_)
            | Op::AllGather => 0,
            Op::AllReduce => product([u64::from(self.plan.rank.of.saturating_sub(1)), input(0)]),
            Op::RopeAngles { .. } => product([ANGLE_FLOPS, self.elements(self.step.outputs[0])]) / 2,
            Op::RmsNorm(_) => product([NORM_FLOPS, input(0)]),
            Op::Add | Op::Mul | Op::Scale(_) => input(0),
            Op::Activation(kind) => product([activation_flops(*kind), input(0)]),
            Op::Cast(to) => product([cast_flops(*to), input(0)]),
            Op::Linear(part) | Op::LinearArgMax(part) => self.product_flops(part.weight, part.bias.is_some()),
            Op::Rope { head_dim, .. } => self.rotation_flops(*head_dim, None),
            Op::Attention(shape) => product([4, shape.heads as u64, shape.head_dim as u64, self.shape.attended_tokens]),
            Op::AddRmsNorm { to, .. } => product([1 + NORM_FLOPS + cast_flops(*to), input(0)]),
            Op::NormCast { to, .. } => product([NORM_FLOPS + cast_flops(*to), input(0)]),
            Op::QkNormRope { norm, head_dim, .. } => self.rotation_flops(*head_dim, Some(norm)),
            Op::RopeKvWrite { norm, head_dim, .. } => self.rotation_flops(*head_dim, norm.as_ref()),
            Op::ActMul(kind) => product([activation_flops(*kind) + 1, input(0)]),
            Op::LinearMulti(parts) => parts
                .iter()
                .map(|part| self.product_flops(part.weight, part.bias.is_some()))
                .fold(0, u64::saturating_add),
            Op::SwigluLinear { activation, part, to } => {
                let each = activation_flops(*activation) + 1 + cast_flops(*to);
                product([each, input(0)]).saturating_add(self.product_flops(part.weight, part.bias.is_some()))
            }
        }
    }

    fn int8_flops(&self) -> u64 {
        let int8_input = self.step.inputs.first().is_some_and(|&input| self.value(input).elem == Elem::Q8);
        let parts: &[LinearPart] = match &self.step.op {
            Op::Linear(part) | Op::LinearArgMax(part) if int8_input => std::slice::from_ref(part),
            Op::LinearMulti(parts) if int8_input => parts,
            Op::SwigluLinear { part, to: ActivationType::Int8, .. } => std::slice::from_ref(part),
            _ => &[],
        };
        parts.iter().map(|part| self.product_flops(part.weight, false)).fold(0, u64::saturating_add)
    }

    /// Operations of a product: a multiplication and a sum for every element of the matrix and row of the output, and
    /// the bias.
    fn product_flops(&self, weight: WeightId, bias: bool) -> u64 {
        let rows = self.rows(self.step.outputs[0]);
        let shape = &self.weight(weight).shape;
        let elements = shape.iter().fold(1, |n, &dim| product([n, dim as u64]));
        let sums = if bias { shape[0] as u64 } else { 0 };
        product([rows, product([2, elements]).saturating_add(sums)])
    }

    fn rotation_flops(&self, head_dim: usize, norm: Option<&NormSpec>) -> u64 {
        let (x, angles) = (self.step.inputs[0], self.step.inputs[1]);
        let heads = (self.value(x).cols / head_dim.max(1)) as u64;
        let pairs = (self.value(angles).cols / 2) as u64;
        let rotation = product([ROTATE_FLOPS, self.rows(x), heads, pairs]);
        rotation.saturating_add(if norm.is_some() { product([NORM_FLOPS, self.elements(x)]) } else { 0 })
    }

    fn weight_bytes(&self) -> u64 {
        let stored = |id: WeightId, rows: Option<u64>| {
            let Weight { shape, dtype, .. } = self.weight(id);
            let row = shape.last().copied().unwrap_or(1).div_ceil(dtype.block_len()) * dtype.block_bytes();
            let all = shape.iter().rev().skip(1).fold(1, |n, &dim| product([n, dim as u64]));
            product([row as u64, rows.map_or(all, |rows| rows.min(all))])
        };
        match &self.step.op {
            // One row of the table per token.
            Op::Embed { table, .. } => stored(*table, Some(self.shape.tokens)),
            op => op.weights().into_iter().map(|id| stored(id, None)).fold(0, u64::saturating_add),
        }
    }

    fn activation_bytes(&self) -> u64 {
        let Step { op, inputs, outputs, scratch, .. } = self.step;
        let words = |rows: u64| product([WORD_BYTES, rows]);
        let io = match op {
            Op::Embed { .. } | Op::RopeAngles { .. } => words(self.shape.tokens),
            Op::GatherRows => words(self.shape.logit_rows),
            Op::RowStatus => product([STATUS_BYTES, self.shape.tokens]),
            _ => 0,
        };
        let read = match op {
            // Only the requested rows are read.
            Op::GatherRows => self.bytes(outputs[0]),
            _ => inputs.iter().map(|&value| self.bytes(value)).fold(0, u64::saturating_add),
        };
        let written = outputs.iter().map(|&value| self.bytes(value)).fold(0, u64::saturating_add);
        let scratch = scratch.map_or(0, |value| product([2, self.bytes(value)]));
        [io, read, written, scratch].into_iter().fold(0, u64::saturating_add)
    }

    fn kv_bytes(&self) -> u64 {
        let both = product([2, self.shape.kv_element_bytes]);
        match &self.step.op {
            Op::KvWrite { .. } | Op::RopeKvWrite { .. } => product([both, self.elements(self.step.inputs[0])]),
            Op::Attention(shape) => product([both, shape.kv_heads as u64, shape.head_dim as u64, self.shape.kv_tokens]),
            _ => 0,
        }
    }
}

/// Operations per element of a cast.
const fn cast_flops(to: ActivationType) -> u64 {
    match to {
        ActivationType::F32 => 0,
        ActivationType::BF16 | ActivationType::F16 => 1,
        ActivationType::Int8 => QUANTIZE_FLOPS,
    }
}

/// Operations per element; the exponential counts as one.
const fn activation_flops(kind: ActivationKind) -> u64 {
    match kind {
        ActivationKind::Silu => 4,
        ActivationKind::GeluTanh => 8,
    }
}
