//! Runs a model with the reference implementations: one sequence, keys and values in plain matrices, one operation at a
//! time.
//!
//! It is the test oracle of every device. It uses no plan, arena, block, panel, thread pool or instruction set, only
//! the graph and the definitions in [`reference`](super). A fused operation runs as its parts in order. It allocates
//! freely and is meant for small models. Graphs come from [`decoder_graph`](crate::model::decoder_graph) or a builder
//! and are assumed to be valid.

#![forbid(unsafe_code)]

use super::{Activation, AttentionParams};
use crate::device::cpu::reference;
use crate::graph::{
    ActivationKind, ActivationType, AttentionShape, CustomCall, Graph, LinearPart, NO_TOKEN, Node, NormSpec, Op,
    RopeStyle, RowStatus, WeightId,
};
use crate::kv_cache::KvDType;
use crate::num::to_u32;
use crate::weights::{DType, WeightError, WeightSource};

/// A graph with its weights converted to f32 and the keys and values of one sequence.
#[derive(Debug)]
pub struct ReferenceModel {
    graph: Graph,
    weights: Vec<Vec<f32>>,
    stored_as: KvDType,
    head_dim: usize,
    /// Keys and values of each layer, one row per token.
    stored: Vec<(Vec<f32>, Vec<f32>)>,
    /// Number of tokens so far.
    len: u32,
}

/// Result of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct ReferenceRows {
    /// Logits, row by row.
    pub logits: Vec<f32>,
    /// Status of each row of the step.
    pub status: Vec<RowStatus>,
}

/// Rows of one step.
struct StepRows<'a> {
    tokens: &'a [u32],
    positions: Vec<u32>,
    logit_rows: &'a [u32],
}

impl ReferenceModel {
    /// Loads and converts the weights; keys and values are rounded to `kv`.
    ///
    /// # Errors
    /// [`WeightError`] if a weight of the graph is missing or cannot be converted.
    pub fn new(graph: &Graph, source: &dyn WeightSource, kv: KvDType) -> Result<Self, WeightError> {
        let weights: Result<_, _> =
            graph.weights.iter().map(|weight| source.require(&weight.name).map(|tensor| tensor.to_f32())).collect();
        let layers = graph.nodes.iter().filter_map(|node| match &node.op {
            Op::KvWrite { layer } | Op::RopeKvWrite { layer, .. } => Some(layer + 1),
            _ => None,
        });
        let head_dims = graph.nodes.iter().filter_map(|node| match &node.op {
            Op::Attention(shape) => Some(shape.head_dim),
            _ => None,
        });
        let head_dim = head_dims.max().unwrap_or(1);
        let stored = vec![(Vec::new(), Vec::new()); layers.max().unwrap_or(0)];
        Ok(Self { graph: graph.clone(), weights: weights?, stored_as: kv, head_dim, stored, len: 0 })
    }

    /// Starts a new sequence.
    pub fn restart(&mut self) {
        self.len = 0;
        self.stored.iter_mut().for_each(|(k, v)| {
            k.clear();
            v.clear();
        });
    }

    /// Appends tokens and returns the logits of `logit_rows`.
    pub fn forward(&mut self, tokens: &[u32], logit_rows: &[u32]) -> ReferenceRows {
        let end = self.len + to_u32(tokens.len());
        let rows = StepRows { tokens, positions: (self.len..end).collect(), logit_rows };
        self.len = end;
        let mut values: Vec<Vec<f32>> = vec![Vec::new(); self.graph.values.len()];
        let mut out = ReferenceRows { logits: Vec::new(), status: Vec::new() };
        for node in &self.graph.nodes.clone() {
            let inputs: Vec<&[f32]> = node.inputs.iter().map(|id| values[id.0 as usize].as_slice()).collect();
            if let Op::RowStatus = node.op {
                out.status = self.status(inputs[0], self.cols(node, 0), &out.logits, logit_rows);
                continue;
            }
            if let Op::ArgMax = node.op {
                out.logits = inputs[0].to_vec();
            }
            let outputs = self.run(node, &inputs, &rows);
            if let Op::LinearArgMax(_) = node.op {
                out.logits.clone_from(&outputs[0]);
            }
            for (id, value) in node.outputs.iter().zip(outputs) {
                values[id.0 as usize] = value;
            }
        }
        out
    }

    /// Status of each row of the batch, from its last hidden state and, if requested, its logits.
    fn status(&self, last: &[f32], width: usize, logits: &[f32], logit_rows: &[u32]) -> Vec<RowStatus> {
        let mut status: Vec<RowStatus> = last.chunks_exact(width).map(reference::row_status).collect();
        for (row, logits) in logit_rows.iter().zip(logits.chunks_exact(self.graph.vocab_size)) {
            status[*row as usize] = status[*row as usize].max(reference::row_status(logits));
        }
        status
    }

    fn weight(&self, id: WeightId) -> &[f32] {
        &self.weights[id.0 as usize]
    }

    fn cols(&self, node: &Node, input: usize) -> usize {
        self.graph.value(node.inputs[input]).cols
    }

    fn run(&mut self, node: &Node, inputs: &[&[f32]], rows: &StepRows<'_>) -> Vec<Vec<f32>> {
        match &node.op {
            Op::Embed { table, .. } => vec![self.embed(*table, rows.tokens)],
            Op::RopeAngles { rope } => {
                let rope = &self.graph.ropes[*rope];
                let mut out = vec![0.0; rows.positions.len() * 2 * rope.inv_freq.len()];
                reference::rope_angles(&rope.inv_freq, rope.attention_factor, &rows.positions, &mut out);
                vec![out]
            }
            Op::RmsNorm(norm) => vec![self.norm(norm, inputs[0])],
            Op::Add => vec![map(inputs[0], |out| reference::add(inputs[0], inputs[1], out))],
            Op::Mul => vec![map(inputs[0], |out| reference::mul(inputs[0], inputs[1], out))],
            Op::Activation(kind) => vec![activation(*kind, inputs[0])],
            Op::Scale(factor) => vec![map(inputs[0], |out| reference::scale(inputs[0], *factor, out))],
            Op::Cast(to) => vec![cast(*to, inputs[0], self.cols(node, 0))],
            Op::Linear(part) => vec![self.linear(part, inputs[0])],
            Op::Rope { head_dim, style } => vec![self.rope(node, inputs, *head_dim, *style, None)],
            Op::KvWrite { layer } => {
                self.store(*layer, inputs[0], inputs[1]);
                vec![Vec::new()]
            }
            Op::Attention(shape) => vec![self.attention(shape, inputs[0])],
            Op::GatherRows => {
                let width = self.cols(node, 0);
                let mut out = vec![0.0; rows.logit_rows.len() * width];
                reference::gather_rows(inputs[0], rows.logit_rows, width, &mut out);
                vec![out]
            }
            Op::ArgMax => vec![best(inputs[0], self.cols(node, 0))],
            Op::LinearArgMax(part) => {
                let logits = self.linear(part, inputs[0]);
                let best = best(&logits, self.graph.vocab_size);
                vec![logits, best]
            }
            // `forward` computes it, since it has the requested rows.
            Op::RowStatus => Vec::new(),
            Op::Custom(index) => {
                let width = self.cols(node, 0);
                let call = CustomCall::new(rows.tokens, rows.positions.first().copied().unwrap_or(0), width);
                let mut out = inputs[0].to_vec();
                if self.graph.customs[*index].op.run(&call, inputs[0], &mut out).is_err() {
                    out.copy_from_slice(inputs[0]);
                }
                vec![out]
            }
            Op::AllReduce | Op::AllGather => panic!("a reference model is one rank"),
            Op::AddRmsNorm { norm, to } => {
                let sum = map(inputs[0], |out| reference::add(inputs[0], inputs[1], out));
                let normed = self.norm(norm, &sum);
                vec![sum, cast(*to, &normed, self.cols(node, 0))]
            }
            Op::NormCast { norm, to } => vec![cast(*to, &self.norm(norm, inputs[0]), self.cols(node, 0))],
            Op::QkNormRope { norm, head_dim, style } => {
                vec![self.rope(node, inputs, *head_dim, *style, Some(norm))]
            }
            Op::RopeKvWrite { layer, head_dim, style, norm } => {
                let k = self.rope(node, inputs, *head_dim, *style, norm.as_ref());
                self.store(*layer, &k, inputs[2]);
                vec![Vec::new()]
            }
            Op::ActMul(kind) => vec![act_mul(*kind, inputs[0], inputs[1])],
            Op::LinearMulti(parts) => parts.iter().map(|part| self.linear(part, inputs[0])).collect(),
            Op::SwigluLinear { activation, part, to } => {
                let product = act_mul(*activation, inputs[0], inputs[1]);
                vec![self.linear(part, &cast(*to, &product, self.cols(node, 0)))]
            }
        }
    }

    fn embed(&self, table: WeightId, tokens: &[u32]) -> Vec<f32> {
        let width = self.graph.weight(table).shape[1];
        let mut out = vec![0.0; tokens.len() * width];
        let mut row_of = |row: usize, out: &mut [f32]| out.copy_from_slice(&self.weight(table)[row * width..][..width]);
        reference::embed(tokens, width, &mut row_of, &mut out);
        out
    }

    fn norm(&self, norm: &NormSpec, x: &[f32]) -> Vec<f32> {
        map(x, |out| reference::rms_norm(x, self.weight(norm.weight), norm.eps, out))
    }

    fn linear(&self, part: &LinearPart, x: &[f32]) -> Vec<f32> {
        let [n, k] = [0, 1].map(|dim| self.graph.weight(part.weight).shape[dim]);
        let mut out = vec![0.0; x.len() / k * n];
        reference::linear(x, self.weight(part.weight), part.bias.map(|bias| self.weight(bias)), k, n, &mut out);
        out
    }

    /// Normalizes (if `norm` is given) and rotates the first input head by head; the second input holds the angles.
    fn rope(
        &self,
        node: &Node,
        inputs: &[&[f32]],
        head_dim: usize,
        style: RopeStyle,
        norm: Option<&NormSpec>,
    ) -> Vec<f32> {
        let (heads, pairs) = (self.cols(node, 0) / head_dim, self.cols(node, 1) / 2);
        let mut out = norm.map_or_else(|| inputs[0].to_vec(), |norm| self.norm(norm, inputs[0]));
        let (cos, sin): (Vec<&[f32]>, Vec<&[f32]>) =
            inputs[1].chunks_exact(2 * pairs).map(|row| row.split_at(pairs)).unzip();
        reference::rope(&mut out, heads, head_dim, style, pairs, &cos.concat(), &sin.concat());
        out
    }

    fn store(&mut self, layer: usize, k: &[f32], v: &[f32]) {
        let round = |dtype: DType, x: &[f32]| x.iter().map(|&x| reference::round_to(dtype, x)).collect();
        let stored = |x: &[f32]| -> Vec<f32> {
            match self.stored_as {
                KvDType::F32 => x.to_vec(),
                KvDType::F16 => round(DType::F16, x),
                KvDType::BF16 => round(DType::BF16, x),
                KvDType::I8 => map(x, |out| reference::quantize_heads(x, self.head_dim, out)),
            }
        };
        let (k, v) = (stored(k), stored(v));
        let (keys, values) = &mut self.stored[layer];
        keys.extend(k);
        values.extend(v);
    }

    fn attention(&self, shape: &AttentionShape, q: &[f32]) -> Vec<f32> {
        let AttentionShape { layer, heads, kv_heads, head_dim, scale, window, .. } = *shape;
        let params = AttentionParams { heads, kv_heads, head_dim, scale, window, softcap: None };
        let (k, v) = &self.stored[layer];
        map(q, |out| reference::attention(&params, q, k, v, out))
    }
}

/// Returns a new matrix of the size of `x`, filled by `body`.
fn map(x: &[f32], body: impl FnOnce(&mut [f32])) -> Vec<f32> {
    let mut out = vec![0.0; x.len()];
    body(&mut out);
    out
}

fn activation(kind: ActivationKind, x: &[f32]) -> Vec<f32> {
    let kind = match kind {
        ActivationKind::Silu => Activation::Silu,
        ActivationKind::GeluTanh => Activation::GeluTanh,
    };
    map(x, |out| reference::activation(kind, x, out))
}

fn act_mul(kind: ActivationKind, gate: &[f32], up: &[f32]) -> Vec<f32> {
    let act = activation(kind, gate);
    map(gate, |out| reference::mul(&act, up, out))
}

fn cast(to: ActivationType, x: &[f32], width: usize) -> Vec<f32> {
    let round = |dtype: DType| x.iter().map(|&x| reference::round_to(dtype, x)).collect();
    match to {
        ActivationType::F32 => x.to_vec(),
        ActivationType::BF16 => round(DType::BF16),
        ActivationType::F16 => round(DType::F16),
        ActivationType::Int8 => map(x, |out| reference::quantize(x, width, out)),
    }
}

/// Argmax ids, as bits: all values of the reference model are stored as floats.
fn best(logits: &[f32], vocab: usize) -> Vec<f32> {
    let id = |row: &[f32]| match reference::row_status(row) {
        RowStatus::Ok => to_u32(reference::argmax(row)),
        _ => NO_TOKEN,
    };
    logits.chunks_exact(vocab).map(|row| f32::from_bits(id(row))).collect()
}
