//! Fuses operations by pattern. Each rule matches a producer and its only reader (or the readers of one value), so a
//! fused graph computes exactly the operations of the original, with the same order of additions.

use super::OpSet;
use crate::graph::{ActivationType, AttentionSchedules, Graph, Node, Op, ValueId};
use crate::num::to_u32;

/// Number of matches of each rule.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
#[non_exhaustive]
pub struct FusionReport {
    pub add_rms_norm: u32,
    pub add_rms_norm_across: u32,
    pub qk_norm_rope: u32,
    pub rope_kv_write: u32,
    pub act_mul: u32,
    pub linear_multi: u32,
    pub swiglu_linear: u32,
    pub norm_cast: u32,
    pub linear_arg_max: u32,
    pub attention_schedules: u32,
}

/// Applies the rules of the level and of all lower levels whose fused operations the device supports.
pub fn fuse(graph: &Graph, level: u8, ops: OpSet, schedules: AttentionSchedules) -> (Graph, FusionReport) {
    let mut rewriter = Rewriter::new(graph, ops);
    let mut report = FusionReport::default();
    if level >= 1 {
        report.add_rms_norm = rewriter.each_pair(add_rms_norm);
        if level >= 3 {
            // Before `norm_cast`, which builds on it.
            report.add_rms_norm_across = rewriter.each_pair(add_rms_norm_across);
        }
        report.qk_norm_rope = rewriter.each_pair(qk_norm_rope);
        report.rope_kv_write = rewriter.each_pair(rope_kv_write);
        report.act_mul = rewriter.each_pair(act_mul);
    }
    if level >= 2 {
        report.norm_cast = rewriter.each_pair(norm_cast);
        report.linear_multi = rewriter.linear_multi();
        report.swiglu_linear = rewriter.swiglu_linear();
    }
    if level >= 3 {
        report.linear_arg_max = rewriter.each_pair(linear_argmax);
        report.attention_schedules = rewriter.schedule_attention(schedules);
    }
    (rewriter.finish(), report)
}

/// The nodes of a graph; a node that was merged into another leaves a hole.
struct Rewriter {
    graph: Graph,
    nodes: Vec<Option<Node>>,
    /// Node that writes each value.
    writer: Vec<Option<usize>>,
    uses: Vec<u32>,
    ops: OpSet,
}

/// Place of the fused node of a pair: that of the producer if the reader's other inputs are already computed there.
enum Placed {
    AtProducer(Node),
    AtReader(Node),
}

impl Rewriter {
    fn new(graph: &Graph, ops: OpSet) -> Self {
        let mut rewriter = Self {
            uses: graph.use_counts(),
            writer: Vec::new(),
            nodes: graph.nodes.iter().cloned().map(Some).collect(),
            graph: graph.clone(),
            ops,
        };
        rewriter.index_writers();
        rewriter
    }

    fn index_writers(&mut self) {
        self.writer = vec![None; self.graph.values.len()];
        for (index, node) in self.nodes.iter().enumerate() {
            for output in node.iter().flat_map(|node| &node.outputs) {
                self.writer[output.0 as usize] = Some(index);
            }
        }
    }

    fn writer_of(&self, value: ValueId) -> Option<(usize, &Node)> {
        let index = self.writer[value.0 as usize]?;
        self.nodes[index].as_ref().map(|node| (index, node))
    }

    fn only_use(&self, value: ValueId) -> bool {
        self.uses[value.0 as usize] == 1
    }

    /// Passes each (producer, reader) pair to a rule; a fused node takes the place that the rule returns.
    fn each_pair(&mut self, rule: fn(&Self, &Node, &Node, ValueId) -> Option<Placed>) -> u32 {
        let mut fired = 0;
        for reader_index in 0..self.nodes.len() {
            let Some(reader) = self.nodes[reader_index].clone() else { continue };
            for &input in &reader.inputs {
                let Some((producer_index, producer)) = self.writer_of(input) else { continue };
                let Some(placed) = rule(self, producer, &reader, input) else { continue };
                let (index, node, hole) = match placed {
                    Placed::AtProducer(node) => (producer_index, node, reader_index),
                    Placed::AtReader(node) => (reader_index, node, producer_index),
                };
                if !self.ops.contains(node.op.name()) {
                    continue;
                }
                self.nodes[hole] = None;
                self.nodes[index] = Some(node);
                self.index_writers();
                fired += 1;
                break;
            }
        }
        fired
    }

    /// Merges projections of one layer that read the same value into one node at the place of the first.
    fn linear_multi(&mut self) -> u32 {
        let mut fired = 0;
        if !self.ops.contains("linear_multi") {
            return 0;
        }
        for first in 0..self.nodes.len() {
            let Some(Node { op: Op::Linear(_), inputs, layer, .. }) = &self.nodes[first] else { continue };
            let (x, layer) = (inputs[0], *layer);
            let same: Vec<usize> = (first..self.nodes.len())
                .filter(|&index| {
                    matches!(&self.nodes[index], Some(Node { op: Op::Linear(_), inputs, layer: other, .. })
                        if inputs[0] == x && *other == layer)
                })
                .collect();
            if same.len() < 2 {
                continue;
            }
            let (mut parts, mut outputs) = (Vec::new(), Vec::new());
            for &index in &same {
                if let Some(Node { op: Op::Linear(part), outputs: written, .. }) = self.nodes[index].take() {
                    parts.push(part);
                    outputs.extend(written);
                }
            }
            self.nodes[first] = Some(Node { op: Op::LinearMulti(parts), inputs: vec![x], outputs, layer });
            self.index_writers();
            fired += 1;
        }
        fired
    }

    /// Fuses act(gate) · up, with an optional rounding, and the down projection.
    fn swiglu_linear(&mut self) -> u32 {
        let mut fired = 0;
        if !self.ops.contains("swiglu_linear") {
            return 0;
        }
        for index in 0..self.nodes.len() {
            let Some(Node { op: Op::Linear(part), inputs, outputs, layer }) = self.nodes[index].clone() else {
                continue;
            };
            let mut x = inputs[0];
            let mut holes = Vec::new();
            let to = if let Some((at, Node { op: Op::Cast(to), inputs, .. })) = self.writer_of(x)
                && self.only_use(x)
            {
                holes.push(at);
                x = inputs[0];
                *to
            } else {
                ActivationType::F32
            };
            let Some((at, Node { op: Op::ActMul(kind), inputs: gate_up, .. })) = self.writer_of(x) else { continue };
            if !self.only_use(x) {
                continue;
            }
            let op = Op::SwigluLinear { activation: *kind, part, to };
            let node = Node { op, inputs: gate_up.clone(), outputs, layer };
            holes.push(at);
            for hole in holes {
                self.nodes[hole] = None;
            }
            self.nodes[index] = Some(node);
            self.index_writers();
            fired += 1;
        }
        fired
    }

    /// Sets the loop orders by length on all attention nodes.
    fn schedule_attention(&mut self, schedules: AttentionSchedules) -> u32 {
        let mut fired = 0;
        for node in self.nodes.iter_mut().flatten() {
            if let Op::Attention(shape) = &mut node.op {
                shape.schedules = Some(schedules);
                fired += 1;
            }
        }
        fired
    }

    /// Removes holes and values without a writer, and renumbers the rest.
    fn finish(self) -> Graph {
        let nodes: Vec<Node> = self.nodes.into_iter().flatten().collect();
        let mut kept = vec![None; self.graph.values.len()];
        let mut values = Vec::new();
        for id in nodes.iter().flat_map(|node| node.inputs.iter().chain(&node.outputs)) {
            kept[id.0 as usize].get_or_insert_with(|| {
                values.push(self.graph.values[id.0 as usize].clone());
                ValueId(to_u32(values.len() - 1))
            });
        }
        let renumber = |ids: &[ValueId]| ids.iter().filter_map(|id| kept[id.0 as usize]).collect::<Vec<_>>();
        let nodes = nodes
            .into_iter()
            .map(|node| Node { inputs: renumber(&node.inputs), outputs: renumber(&node.outputs), ..node })
            .collect();
        Graph { values, nodes, ..self.graph }
    }
}

/// Fuses x + d and the norm of the sum, both in one layer.
fn add_rms_norm(_: &Rewriter, add: &Node, norm: &Node, _: ValueId) -> Option<Placed> {
    if add.layer == norm.layer { add_then_norm(add, norm) } else { None }
}

/// Fuses a layer's last x + d and the next layer's norm of the sum. If that norm does not cover all rows (the last
/// layer's sum is gathered first), there is no fusion.
fn add_rms_norm_across(_: &Rewriter, add: &Node, norm: &Node, _: ValueId) -> Option<Placed> {
    if add.layer? + 1 == norm.layer? { add_then_norm(add, norm) } else { None }
}

/// One node at the place of the sum, which stays readable: the norm reads no value that is written in between.
fn add_then_norm(add: &Node, norm: &Node) -> Option<Placed> {
    let (Op::Add, Op::RmsNorm(spec)) = (&add.op, &norm.op) else { return None };
    add.layer?;
    Some(Placed::AtProducer(Node {
        op: Op::AddRmsNorm { norm: *spec, to: ActivationType::F32 },
        inputs: add.inputs.clone(),
        outputs: vec![add.outputs[0], norm.outputs[0]],
        layer: add.layer,
    }))
}

fn qk_norm_rope(rewriter: &Rewriter, norm: &Node, rope: &Node, between: ValueId) -> Option<Placed> {
    let (Op::RmsNorm(spec), Op::Rope { head_dim, style }) = (&norm.op, &rope.op) else { return None };
    if !rewriter.only_use(between) || rope.inputs[0] != between || spec.group != *head_dim {
        return None;
    }
    Some(Placed::AtReader(Node {
        op: Op::QkNormRope { norm: *spec, head_dim: *head_dim, style: *style },
        inputs: vec![norm.inputs[0], rope.inputs[1]],
        outputs: rope.outputs.clone(),
        layer: rope.layer,
    }))
}

fn rope_kv_write(rewriter: &Rewriter, rope: &Node, write: &Node, between: ValueId) -> Option<Placed> {
    let Op::KvWrite { layer } = write.op else { return None };
    let (norm, head_dim, style) = match rope.op {
        Op::Rope { head_dim, style } => (None, head_dim, style),
        Op::QkNormRope { norm, head_dim, style } => (Some(norm), head_dim, style),
        _ => return None,
    };
    if !rewriter.only_use(between) || write.inputs[0] != between {
        return None;
    }
    Some(Placed::AtReader(Node {
        op: Op::RopeKvWrite { layer, head_dim, style, norm },
        inputs: vec![rope.inputs[0], rope.inputs[1], write.inputs[1]],
        outputs: write.outputs.clone(),
        layer: write.layer,
    }))
}

fn act_mul(rewriter: &Rewriter, act: &Node, mul: &Node, between: ValueId) -> Option<Placed> {
    let (Op::Activation(kind), Op::Mul) = (&act.op, &mul.op) else { return None };
    if !rewriter.only_use(between) || mul.inputs[0] != between {
        return None;
    }
    Some(Placed::AtReader(Node {
        op: Op::ActMul(*kind),
        inputs: vec![act.inputs[0], mul.inputs[1]],
        outputs: mul.outputs.clone(),
        layer: mul.layer,
    }))
}

fn norm_cast(rewriter: &Rewriter, norm: &Node, cast: &Node, between: ValueId) -> Option<Placed> {
    let Op::Cast(to) = cast.op else { return None };
    if !rewriter.only_use(between) {
        return None;
    }
    let (op, outputs) = match &norm.op {
        Op::RmsNorm(spec) => (Op::NormCast { norm: *spec, to }, cast.outputs.clone()),
        Op::AddRmsNorm { norm: spec, to: ActivationType::F32 } if norm.outputs[1] == between => {
            (Op::AddRmsNorm { norm: *spec, to }, vec![norm.outputs[0], cast.outputs[0]])
        }
        _ => return None,
    };
    Some(Placed::AtProducer(Node { op, inputs: norm.inputs.clone(), outputs, layer: norm.layer }))
}

fn linear_argmax(rewriter: &Rewriter, linear: &Node, best: &Node, between: ValueId) -> Option<Placed> {
    let (Op::Linear(part), Op::ArgMax) = (&linear.op, &best.op) else { return None };
    if !rewriter.only_use(between) {
        return None;
    }
    Some(Placed::AtReader(Node {
        op: Op::LinearArgMax(*part),
        inputs: linear.inputs.clone(),
        outputs: vec![between, best.outputs[0]],
        layer: best.layer,
    }))
}
