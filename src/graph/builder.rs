//! Builds graphs node by node; the only place that invents value names.

use super::{
    AttentionShape, Elem, Graph, LinearPart, Node, NormSpec, Op, RegisteredOp, RopeFrequencies, RopeStyle, RowDim,
    Value, ValueId, Weight, WeightId, WeightRole,
};
use crate::num::to_u32;

/// Appends operations to a graph in topological order.
#[derive(Debug, Default)]
pub struct GraphBuilder {
    graph: Graph,
    layer: Option<u32>,
}

impl GraphBuilder {
    /// Creates an empty graph.
    pub fn new() -> Self {
        Self::default()
    }

    /// Assigns the following nodes to this layer, or to none.
    pub fn set_layer(&mut self, layer: Option<u32>) {
        self.layer = layer;
    }

    /// Declares a weight; a second declaration of the same name returns the same weight.
    pub fn weight(&mut self, weight: Weight) -> WeightId {
        let known = self.graph.weights.iter().position(|w| w.name == weight.name);
        let index = known.unwrap_or_else(|| {
            self.graph.weights.push(weight);
            self.graph.weights.len() - 1
        });
        WeightId(to_u32(index))
    }

    /// Returns the weight with this id.
    pub fn weight_of(&self, id: WeightId) -> &Weight {
        self.graph.weight(id)
    }

    fn cols(&self, id: ValueId) -> usize {
        self.graph.value(id).cols
    }

    fn rows(&self, id: ValueId) -> RowDim {
        self.graph.value(id).rows
    }

    fn push(&mut self, op: Op, inputs: Vec<ValueId>, tag: &str, rows: RowDim, cols: usize, elem: Elem) -> ValueId {
        let id = ValueId(to_u32(self.graph.values.len()));
        let name = match self.layer {
            Some(layer) => format!("{tag}.{layer}"),
            None => tag.to_owned(),
        };
        debug_assert!(self.graph.values.iter().all(|value| value.name != name), "two values are named {name}");
        self.graph.values.push(Value { name, rows, cols, elem });
        self.graph.nodes.push(Node { op, inputs, outputs: vec![id], layer: self.layer });
        id
    }

    /// Gathers rows of an embedding table for the batch's tokens.
    pub fn embed(&mut self, table: WeightId, tag: &str) -> ValueId {
        let weight = &mut self.graph.weights[table.0 as usize];
        weight.role = WeightRole::Table;
        let hidden = weight.shape[1];
        self.push(Op::Embed { table, first_id: 0 }, vec![], tag, RowDim::Tokens, hidden, Elem::F32)
    }

    /// Computes cosines and sines for the batch's positions: `2 × pairs` columns.
    pub fn rope_angles(&mut self, rope: RopeFrequencies, tag: &str) -> ValueId {
        let cols = 2 * rope.inv_freq.len();
        let index = self.graph.ropes.len();
        self.graph.ropes.push(rope);
        self.push(Op::RopeAngles { rope: index }, vec![], tag, RowDim::Tokens, cols, Elem::F32)
    }

    /// Computes the RMS norm over groups of each row.
    pub fn rms_norm(&mut self, x: ValueId, norm: NormSpec, tag: &str) -> ValueId {
        self.push(Op::RmsNorm(norm), vec![x], tag, self.rows(x), self.cols(x), Elem::F32)
    }

    /// Computes x · Wᵀ + b.
    pub fn linear(&mut self, x: ValueId, part: LinearPart, tag: &str) -> ValueId {
        let n = self.graph.weight(part.weight).shape[0];
        self.push(Op::Linear(part), vec![x], tag, self.rows(x), n, Elem::F32)
    }

    /// Computes a + b.
    pub fn add(&mut self, a: ValueId, b: ValueId, tag: &str) -> ValueId {
        self.push(Op::Add, vec![a, b], tag, self.rows(a), self.cols(a), Elem::F32)
    }

    /// Computes a · b.
    pub fn mul(&mut self, a: ValueId, b: ValueId, tag: &str) -> ValueId {
        self.push(Op::Mul, vec![a, b], tag, self.rows(a), self.cols(a), Elem::F32)
    }

    /// Computes act(x).
    pub fn activation(&mut self, x: ValueId, kind: super::ActivationKind, tag: &str) -> ValueId {
        self.push(Op::Activation(kind), vec![x], tag, self.rows(x), self.cols(x), Elem::F32)
    }

    /// Computes x · factor.
    pub fn scale(&mut self, x: ValueId, factor: f32, tag: &str) -> ValueId {
        self.push(Op::Scale(factor), vec![x], tag, self.rows(x), self.cols(x), Elem::F32)
    }

    /// Rotates each head of x.
    pub fn rope(&mut self, x: ValueId, angles: ValueId, head_dim: usize, style: RopeStyle, tag: &str) -> ValueId {
        self.push(Op::Rope { head_dim, style }, vec![x, angles], tag, self.rows(x), self.cols(x), Elem::F32)
    }

    /// Stores the keys and values of the rows; the effect orders attention after it.
    pub fn kv_write(&mut self, k: ValueId, v: ValueId, layer: usize, tag: &str) -> ValueId {
        self.push(Op::KvWrite { layer }, vec![k, v], tag, RowDim::Tokens, 0, Elem::Effect)
    }

    /// Computes attention of the rows' queries over the stored keys and values.
    pub fn attention(&mut self, q: ValueId, stored: ValueId, shape: AttentionShape, tag: &str) -> ValueId {
        self.push(Op::Attention(shape), vec![q, stored], tag, RowDim::Tokens, self.cols(q), Elem::F32)
    }

    /// Gathers the rows whose logits are requested.
    pub fn gather_rows(&mut self, x: ValueId, tag: &str) -> ValueId {
        self.push(Op::GatherRows, vec![x], tag, RowDim::LogitRows, self.cols(x), Elem::F32)
    }

    /// Applies the user's operation to x.
    pub fn custom(&mut self, x: ValueId, op: RegisteredOp, tag: &str) -> ValueId {
        self.graph.customs.push(op);
        let index = self.graph.customs.len() - 1;
        self.push(Op::Custom(index), vec![x], tag, self.rows(x), self.cols(x), Elem::F32)
    }

    /// Completes the graph. Its outputs are `logits`, the argmax of each of their rows, and a status for each row of
    /// the batch, computed from `last`, the final hidden state.
    pub fn finish(mut self, last: ValueId, logits: ValueId) -> Graph {
        self.graph.vocab_size = self.cols(logits);
        let best = self.push(Op::ArgMax, vec![logits], "best", RowDim::LogitRows, 1, Elem::U32);
        self.graph.nodes.push(Node { op: Op::RowStatus, inputs: vec![last, best], outputs: vec![], layer: None });
        self.graph
    }
}
