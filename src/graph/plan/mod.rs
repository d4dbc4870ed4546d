//! The plan: a list of steps with placed operands. Devices execute it, and its text form is readable.

pub(super) mod bucket;
pub(super) mod cost;
pub(super) mod cost_rates;
pub(super) mod happens_before;
pub(super) mod memory;
pub(super) mod streams;
pub(super) mod verify;

use std::fmt::Write as _;
use std::ops::Range;

use super::passes::{FusionReport, OpSet};
use super::{Bucket, Elem, Io, Op, OverflowPolicy, RegisteredOp, RopeFrequencies, RowDim, TpRank, Weight, row_bytes};
use happens_before::HappensBefore;
use memory::lifetimes;

/// Properties of the target device that the compiler uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Target {
    /// Alignment of arena values in bytes, a power of two of at least 64.
    pub alignment: usize,
    /// Whether linear operations over integer weights can read int8 activations.
    pub int8_activations: bool,
    /// Whether bf16 × bf16 products are faster than f32 products; `mix` then rounds to bf16 before bf16 weights.
    pub bf16_activations: bool,
    /// Operations that the device supports; fused operations that it lacks are not created.
    pub ops: OpSet,
    /// Whether the device's attention has special loop orders for short rows.
    pub attention_schedules: bool,
}

impl Target {
    /// A device that supports every operation.
    pub const fn new(alignment: usize) -> Self {
        Self { alignment, int8_activations: true, bf16_activations: false, ops: OpSet::ALL, attention_schedules: true }
    }
}

/// Location of a value.
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
    /// No storage: the value only orders steps.
    Effect,
}

/// A value and its location.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PlanValue {
    /// Name in dumps.
    pub name: String,
    /// Symbolic number of rows.
    pub rows: RowDim,
    /// Number of elements per row.
    pub cols: usize,
    /// Element type.
    pub elem: Elem,
    /// Location of the value.
    pub operand: Operand,
}

impl PlanValue {
    /// Bytes of the value in the largest batch.
    pub const fn bytes(&self, bucket: &Bucket) -> usize {
        bucket.rows(self.rows) * self.row_bytes()
    }

    /// Bytes from one row to the next.
    pub const fn row_bytes(&self) -> usize {
        row_bytes(self.elem, self.cols)
    }
}

/// One step of a plan; its operands are indices into [`Plan::values`].
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Step {
    /// The operation.
    pub op: Op,
    /// Values read.
    pub inputs: Vec<usize>,
    /// Values written.
    pub outputs: Vec<usize>,
    /// Scratch memory of the operation.
    pub scratch: Option<usize>,
    /// Layer of the step.
    pub layer: Option<u32>,
    /// Stream on which it runs, after all earlier steps of that stream.
    pub stream: u8,
    /// Steps of other streams that must have ended before it begins, ascending.
    pub waits_on: Vec<usize>,
}

/// A compiled graph for one bucket.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Plan {
    /// Values with their locations.
    pub values: Vec<PlanValue>,
    /// Steps in execution order.
    pub steps: Vec<Step>,
    /// Weights, in the order of the graph.
    pub weights: Vec<Weight>,
    /// Rotary tables, in the order of the graph.
    pub ropes: Vec<RopeFrequencies>,
    /// The largest batch that the plan supports.
    pub bucket: Bucket,
    /// Size of the arena.
    pub arena_bytes: usize,
    /// Largest sum of bytes alive at one step, a lower bound of the arena's size.
    pub arena_bound_bytes: usize,
    /// Alignment of arena values.
    pub alignment: usize,
    /// Fusion level that was applied.
    pub fusion: u8,
    /// Number of streams.
    pub streams: u8,
    /// Whether values that are never alive at the same time may share bytes of the arena.
    pub memory_reuse: bool,
    /// Number of matches of each fusion rule.
    pub fused: FusionReport,
    /// Number of logits per row.
    pub vocab_size: usize,
    /// Custom operations, indexed by `Op::Custom`.
    pub customs: Vec<RegisteredOp>,
    /// The shard of the model that the plan computes.
    pub rank: TpRank,
    /// Policy for rows that overflow.
    pub overflow: OverflowPolicy,
}

impl Plan {
    /// First and last step that uses each value; `None` for an unused value.
    pub(crate) fn lives(&self) -> Vec<Option<(usize, usize)>> {
        let lives = lifetimes(self.values.len(), &self.steps);
        lives.into_iter().map(|life| life.map(|life| (life.first, life.last))).collect()
    }

    /// Splits the plan into ranges of adjacent, independent steps. A device without streams may run each range between
    /// two barriers.
    pub fn groups(&self) -> Vec<Range<usize>> {
        let order = HappensBefore::from_steps(&self.steps);
        let mut groups: Vec<Range<usize>> = Vec::new();
        for at in 0..self.steps.len() {
            match groups.last_mut() {
                Some(group) if group.clone().all(|other| !order.are_ordered(other, at)) => group.end = at + 1,
                _ => groups.push(at..at + 1),
            }
        }
        groups
    }

    /// The plan as text: one header, then one line per step, with its stream and the awaited steps if there are several
    /// streams.
    pub fn dump(&self) -> String {
        let mut text = String::new();
        let _ = writeln!(
            text,
            "plan fusion={}{}{}{} tokens<={} logit_rows<={} steps={}{} arena_bytes={} bound_bytes={}",
            self.fusion,
            if self.streams > 1 { format!(" lanes={}", self.streams) } else { String::new() },
            if self.rank.of > 1 { format!(" rank={}/{}", self.rank.index, self.rank.of) } else { String::new() },
            if self.memory_reuse { "" } else { " reuse=off" },
            self.bucket.tokens,
            self.bucket.logit_rows,
            self.steps.len(),
            if self.streams > 1 { format!(" groups={}", self.groups().len()) } else { String::new() },
            self.arena_bytes,
            self.arena_bound_bytes
        );
        for (at, step) in self.steps.iter().enumerate() {
            let mut arguments: Vec<String> = step.inputs.iter().map(|&v| self.dump_value(v)).collect();
            for weight in step.op.weights() {
                let weight = &self.weights[weight.0 as usize];
                let shape = weight.shape.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
                let from = weight.slice.map_or(String::new(), |slice| format!(" from {} of {}", slice.start, slice.of));
                arguments.push(format!("%{}[{shape}{from}]{}", weight.name, weight.dtype));
            }
            if let Some(scratch) = step.scratch {
                arguments.push(format!("scratch {}", self.dump_value(scratch)));
            }
            let outputs = step.outputs.iter().map(|&v| self.dump_value(v)).collect::<Vec<_>>().join(", ");
            let head = if outputs.is_empty() { String::new() } else { format!("{outputs} = ") };
            let waits = step.waits_on.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
            let stream = match (self.streams, waits.as_str()) {
                (0 | 1, _) => String::new(),
                (_, "") => format!("[{}] ", step.stream),
                _ => format!("[{} after {waits}] ", step.stream),
            };
            let _ = writeln!(text, "{at:4} {stream}{head}{}({})", step.op, arguments.join(", "));
        }
        text
    }

    fn dump_value(&self, v: usize) -> String {
        let value = &self.values[v];
        let rows = match value.rows {
            RowDim::Tokens => "tokens",
            RowDim::LogitRows => "logit_rows",
        };
        let elem = match value.elem {
            Elem::F32 => "f32",
            Elem::BF16 => "bf16",
            Elem::Q8 => "q8",
            Elem::U32 => "u32",
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
