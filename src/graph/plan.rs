//! The plan: a straight list of steps with every operand placed. What devices execute, and what people read.

use std::fmt::Write as _;

use super::check::{counts, fits};
use super::passes::{FusionReport, fuse, select_quantised};
use super::place::{lives, lower_bound_bytes, place, place_apart};
use super::{
    Bucket, CompileError, CompileOptions, Elem, Graph, Io, Numerics, Op, RopeFrequencies, Rows, Weight, row_bytes,
};
use crate::graph::Value;

/// What the compiler must know of the device it compiles for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    /// Alignment of arena values in bytes, a power of two of at least 64.
    pub alignment: usize,
    /// Whether linear operations over integer weights may take int8 activations.
    pub int8_activations: bool,
}

/// Where a value lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Operand {
    /// In the arena, at this byte offset.
    Arena {
        /// Bytes from the arena's start.
        offset: usize,
    },
    /// In a buffer bound at launch.
    Io(Io),
    /// Nowhere: it only orders steps.
    Effect,
}

/// A value with its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanValue {
    /// Name in dumps.
    pub name: String,
    /// Symbolic rows.
    pub rows: Rows,
    /// Elements a row.
    pub cols: usize,
    /// Element type.
    pub elem: Elem,
    /// Where it lives.
    pub operand: Operand,
}

impl PlanValue {
    /// Bytes at the bucket's upper bound.
    pub const fn bytes(&self, bucket: &Bucket) -> usize {
        bucket.rows(self.rows) * self.row_bytes()
    }

    /// Bytes from one row to the next.
    pub const fn row_bytes(&self) -> usize {
        row_bytes(self.elem, self.cols)
    }
}

/// One step; indices point into [`Plan::values`].
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// The operation.
    pub op: Op,
    /// Values read.
    pub inputs: Vec<usize>,
    /// Values written.
    pub outputs: Vec<usize>,
    /// Room the operation needs for itself.
    pub scratch: Option<usize>,
    /// Layer it belongs to.
    pub layer: Option<u32>,
    /// Whether it must wait for all steps before it (else it may run beside those since the last wait).
    pub waits: bool,
}

/// A compiled graph for one bucket.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Values with their places.
    pub values: Vec<PlanValue>,
    /// Steps in order.
    pub steps: Vec<Step>,
    /// Weights, as the graph numbers them.
    pub weights: Vec<Weight>,
    /// Rotary tables, as the graph numbers them.
    pub ropes: Vec<RopeFrequencies>,
    /// Upper bounds the arena is placed for.
    pub bucket: Bucket,
    /// Size of the arena.
    pub arena_bytes: usize,
    /// Largest sum of bytes alive at one step: the least any arena could be.
    pub arena_bound_bytes: usize,
    /// Alignment of arena values.
    pub alignment: usize,
    /// Fusion level it was compiled with.
    pub fusion: u8,
    /// Whether values that are never alive together may share bytes of the arena.
    pub memory_reuse: bool,
    /// How often each fusion rule fired.
    pub fused: FusionReport,
    /// Width of a row of logits.
    pub vocab_size: usize,
}

/// Compiles a graph: quantise-select, fusion, placement. Pure; the same arguments give the same plan.
pub fn compile(
    graph: &Graph,
    target: Target,
    numerics: Numerics,
    options: &CompileOptions,
    bucket: Bucket,
) -> Result<Plan, CompileError> {
    options.validate(numerics)?;
    let (fusion, memory_reuse) = (options.resolved_fusion(), options.resolved_memory_reuse());
    if !target.alignment.is_power_of_two() || target.alignment < 64 {
        return Err(CompileError::Invalid(format!("alignment {} is no power of two of at least 64", target.alignment)));
    }
    let quantised;
    let graph = if numerics == Numerics::Fast && target.int8_activations {
        quantised = select_quantised(graph);
        &quantised
    } else {
        graph
    };
    let (graph, fused) = fuse(graph, fusion);

    let mut plan = Plan {
        values: graph.values.iter().map(unplaced).collect(),
        steps: Vec::with_capacity(graph.nodes.len()),
        weights: graph.weights.clone(),
        ropes: graph.ropes.clone(),
        bucket,
        arena_bytes: 0,
        arena_bound_bytes: 0,
        alignment: target.alignment,
        fusion,
        memory_reuse,
        fused,
        vocab_size: graph.vocab_size,
    };
    for node in &graph.nodes {
        let scratch = scratch_of(&graph, node).map(|value| {
            plan.values.push(unplaced(&value));
            plan.values.len() - 1
        });
        if node.op == Op::RowStatus {
            // What row status reads is what leaves the plan.
            plan.values[node.inputs[0].0 as usize].operand = Operand::Io(Io::Logits);
        }
        let index = |ids: &[super::ValueId]| ids.iter().map(|id| id.0 as usize).collect();
        plan.steps.push(Step {
            op: node.op.clone(),
            inputs: index(&node.inputs),
            outputs: index(&node.outputs),
            scratch,
            layer: node.layer,
            waits: true,
        });
    }
    if !counts(&bucket) {
        return Err(CompileError::Invalid(format!("{bucket:?} counts beyond 32 bits")));
    }
    if let Some(value) = plan.values.iter().find(|value| !fits(value, &bucket)) {
        let (rows, cols) = (bucket.rows(value.rows), value.cols);
        return Err(CompileError::Invalid(format!("{} of {rows} rows of {cols} is too large", value.name)));
    }
    plan.arena_bound_bytes = lower_bound_bytes(&plan.values, &plan.steps, &bucket, target.alignment);
    let place = if memory_reuse { place } else { place_apart };
    plan.arena_bytes = place(&mut plan.values, &plan.steps, &bucket, target.alignment);
    plan.drop_needless_waits();
    if cfg!(debug_assertions) {
        plan.check()?;
    }
    Ok(plan)
}

fn unplaced(value: &Value) -> PlanValue {
    let operand = if value.elem == Elem::Effect { Operand::Effect } else { Operand::Arena { offset: 0 } };
    PlanValue { name: value.name.clone(), rows: value.rows, cols: value.cols, elem: value.elem, operand }
}

/// Room for the activated product that a fused MLP keeps to itself.
fn scratch_of(graph: &Graph, node: &super::Node) -> Option<Value> {
    let Op::SwigluLinear { quantise, .. } = node.op else { return None };
    let gate = graph.value(node.inputs[0]);
    Some(Value {
        name: format!("scratch.{}", graph.value(node.outputs[0]).name),
        rows: gate.rows,
        cols: gate.cols,
        elem: if quantise { Elem::Q8 } else { Elem::F32 },
    })
}

impl Plan {
    /// First and last step that touches each value; none for a value that no step touches.
    pub(crate) fn lives(&self) -> Vec<Option<(usize, usize)>> {
        let lives = lives(self.values.len(), &self.steps);
        lives.into_iter().map(|life| life.map(|life| (life.first, life.last))).collect()
    }

    /// A step waits only if it conflicts with one since the last wait.
    fn drop_needless_waits(&mut self) {
        let mut stretch_start = 0;
        for at in 0..self.steps.len() {
            let waits = (stretch_start..at).any(|earlier| self.conflict(earlier, at));
            if waits {
                stretch_start = at;
            }
            self.steps[at].waits = waits;
        }
    }

    /// The plan as text: one header, one line a step. `|` marks steps that wait for all before them.
    pub fn dump(&self) -> String {
        let mut text = String::new();
        let _ = writeln!(
            text,
            "plan fusion={}{} tokens<={} logit_rows<={} steps={} waits={} arena_bytes={} bound_bytes={}",
            self.fusion,
            if self.memory_reuse { "" } else { " reuse=off" },
            self.bucket.tokens,
            self.bucket.logit_rows,
            self.steps.len(),
            self.steps.iter().filter(|step| step.waits).count(),
            self.arena_bytes,
            self.arena_bound_bytes
        );
        for (at, step) in self.steps.iter().enumerate() {
            let mut arguments: Vec<String> = step.inputs.iter().map(|&v| self.dump_value(v)).collect();
            for weight in step.op.weights() {
                let weight = &self.weights[weight.0 as usize];
                let shape = weight.shape.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
                arguments.push(format!("%{}[{shape}]{}", weight.name, weight.dtype));
            }
            if let Some(scratch) = step.scratch {
                arguments.push(format!("scratch {}", self.dump_value(scratch)));
            }
            let outputs = step.outputs.iter().map(|&v| self.dump_value(v)).collect::<Vec<_>>().join(", ");
            let head = if outputs.is_empty() { String::new() } else { format!("{outputs} = ") };
            let wait = if step.waits { '|' } else { ' ' };
            let _ = writeln!(text, "{at:4} {wait} {head}{}({})", step.op, arguments.join(", "));
        }
        text
    }

    fn dump_value(&self, v: usize) -> String {
        let value = &self.values[v];
        let rows = match value.rows {
            Rows::Tokens => "tokens",
            Rows::LogitRows => "logit_rows",
        };
        let elem = match value.elem {
            Elem::F32 => "f32",
            Elem::Q8 => "q8",
            Elem::Effect => return value.name.clone(),
        };
        let place = match value.operand {
            Operand::Arena { offset } => format!("@{offset}"),
            Operand::Io(io) => format!("@{io:?}"),
            Operand::Effect => String::new(),
        };
        format!("{}[{rows},{}]{elem}{place}", value.name, value.cols)
    }
}
