//! The model as data: a graph of operations, pure passes over it, and the plan that a device executes.
//!
//! ```text
//! model ─► Graph ─ shard(rank) ─ precision ─ fuse(level) ─ legalize ─► Graph ─ streams ─ memory ─► Plan ─ Device::load ─► program
//! ```
//! Nothing here computes values of the model, uses a device or reads a file: each function is a pure function of its
//! arguments, and graphs and plans have a text form that tests compare.

#![forbid(unsafe_code)]

mod attention_schedule;
mod builder;
mod compile;
mod custom;
mod op;
mod op_signature;
mod options;
pub mod passes;
mod plan;

pub use attention_schedule::{AttentionSchedules, LoopOrder};
pub use builder::GraphBuilder;
pub use compile::compile;
pub use custom::{CustomCall, CustomOp, CustomOpError, CustomSite, RegisteredOp};
pub use op::{ActivationKind, ActivationType, AttentionShape, LinearPart, NormSpec, Op, RopeStyle};
pub use options::{ArenaTooLarge, CompileError, CompileOptions, Numerics, OverflowPolicy, Precision};
pub use plan::bucket::{Bucket, QUANT_BLOCK, QUANT_RECORD_BYTES, row_bytes};
pub use plan::cost::{Cost, CostShape, OpCost, attended_tokens, shown_tokens};
pub use plan::cost_rates::CostRates;
pub use plan::{Operand, Plan, PlanValue, Step, Target};

use crate::settings::with_methods;
use crate::weights::DType;

/// Argmax id of a row with a logit that is not finite; no vocabulary contains this id.
pub const NO_TOKEN: u32 = u32::MAX;

/// Status of a row: whether its results may be used. Plans write one status per row of the batch. Of several problems,
/// the one with the largest number is reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
#[non_exhaustive]
pub enum RowStatus {
    /// All values are finite and were stored unchanged.
    Ok = 0,
    /// A value was too large for its storage type and was clamped.
    Overflow = 1,
    /// A value of the last layer or a logit is infinite or NaN.
    NonFinite = 2,
    /// A custom operation failed for this row's sequence.
    CustomOpFailed = 3,
}

impl RowStatus {
    /// Decodes a status; an unknown byte decodes to the most severe status.
    pub const fn from_byte(byte: u8) -> Self {
        match byte {
            0 => Self::Ok,
            1 => Self::Overflow,
            2 => Self::NonFinite,
            _ => Self::CustomOpFailed,
        }
    }
}

/// A value of the graph: written by exactly one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ValueId(pub u32);

/// A weight tensor of the graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WeightId(pub u32);

/// The symbolic number of rows of a value: known only when a batch is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RowDim {
    /// One row per token of the batch.
    Tokens,
    /// One row per requested row of logits.
    LogitRows,
}

/// Type of the elements of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Elem {
    /// 32-bit floats.
    F32,
    /// bfloat16.
    BF16,
    /// Rows quantized to int8 in blocks of 32, with a scale and a sum per block.
    Q8,
    /// 32-bit unsigned integers.
    U32,
    /// No bytes: orders the write of a layer's keys and values before their reads.
    Effect,
}

/// An input or output buffer of the plan, bound at launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Io {
    /// `u32` token id of each row.
    TokenIds,
    /// `u32` position of each row in its sequence.
    Positions,
    /// `u32` block ids, one row of `table_stride` entries per sequence.
    BlockTables,
    /// `u32` rows whose logits are requested.
    LogitRows,
    /// `f32` logits, `logit_rows × vocab`.
    Logits,
    /// `u32` argmax id of each row of logits.
    ArgMax,
    /// `u8` [`RowStatus`] of each row of the batch.
    RowStatus,
    /// The pool of KV blocks.
    KvPool,
}

/// Shape and meaning of a value.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Value {
    /// Short name for dumps, unique in the graph.
    pub name: String,
    /// Symbolic number of rows.
    pub rows: RowDim,
    /// Elements per row.
    pub cols: usize,
    /// Element type.
    pub elem: Elem,
}

impl Value {
    /// Creates a value.
    pub fn new(name: impl Into<String>, rows: RowDim, cols: usize, elem: Elem) -> Self {
        Self { name: name.into(), rows, cols, elem }
    }
}

/// How a weight is used, which determines its layout on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum WeightRole {
    /// `[n, k]`, multiplied by rows of length `k`.
    Matrix,
    /// `[n, k]`, an embedding table, gathered by rows. With tied embeddings it is also multiplied by rows of length
    /// `k`.
    Table,
    /// A vector used element by element, stored in f32.
    Vector,
}

impl WeightRole {
    /// Whether the weight has two dimensions and may be multiplied by rows.
    pub const fn is_matrix(self) -> bool {
        matches!(self, Self::Matrix | Self::Table)
    }
}

/// A weight tensor of the graph, with the shape and type it has in its file.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Weight {
    /// Name in the weight source.
    pub name: String,
    /// `[n, k]` or `[len]`.
    pub shape: Vec<usize>,
    /// Storage type.
    pub dtype: DType,
    /// How the weight is used.
    pub role: WeightRole,
    /// Slice of the source's tensor that has the shape `shape`; `None` is the whole tensor.
    pub slice: Option<WeightSlice>,
}

impl Weight {
    /// A weight that is a whole tensor of the source.
    pub fn new(name: impl Into<String>, shape: Vec<usize>, dtype: DType, role: WeightRole) -> Self {
        Self { name: name.into(), shape, dtype, role, slice: None }
    }

    with_methods! {
        option { slice with_slice: WeightSlice }
    }
}

/// A range along one dimension of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WeightSlice {
    /// Dimension that is sliced: 0 for rows, 1 for columns.
    pub dim: usize,
    /// First index of the range.
    pub start: usize,
    /// Length of the dimension in the source.
    pub of: usize,
}

/// Tensor-parallel rank: the shard of the model that a graph computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TpRank {
    /// Index of the rank, starting at 0.
    pub index: u32,
    /// Number of ranks.
    pub of: u32,
}

impl Default for TpRank {
    fn default() -> Self {
        Self { index: 0, of: 1 }
    }
}

impl TpRank {
    /// The rank's share of `n` units; shares differ by at most one.
    pub fn share(self, n: usize) -> std::ops::Range<usize> {
        let (index, of) = (self.index as usize, self.of as usize);
        n * index / of..n * (index + 1) / of
    }
}

/// Rotary frequencies, shared by all layers with the same rotation.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct RopeFrequencies {
    /// Radians per position for each rotated pair.
    pub inv_freq: Vec<f32>,
    /// Factor of cosine and sine (yarn's attention factor; 1 otherwise).
    pub attention_factor: f32,
}

impl RopeFrequencies {
    /// Frequencies without a factor.
    pub const fn new(inv_freq: Vec<f32>) -> Self {
        Self { inv_freq, attention_factor: 1.0 }
    }

    with_methods! {
        value { attention_factor with_attention_factor: f32 }
    }
}

/// One operation with its operands.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Node {
    /// The operation with its weights and constants.
    pub op: Op,
    /// Values read, in the operation's order.
    pub inputs: Vec<ValueId>,
    /// Values written, in the operation's order.
    pub outputs: Vec<ValueId>,
    /// Layer of the operation; `None` before and after the layers.
    pub layer: Option<u32>,
}

impl Node {
    /// Creates a node of one layer, or of none.
    pub const fn new(op: Op, inputs: Vec<ValueId>, outputs: Vec<ValueId>, layer: Option<u32>) -> Self {
        Self { op, inputs, outputs, layer }
    }
}

/// A model's computation over one batch, in topological order.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Graph {
    /// All values, indexed by [`ValueId`].
    pub values: Vec<Value>,
    /// All weights, indexed by [`WeightId`].
    pub weights: Vec<Weight>,
    /// Rotary tables, indexed by [`Op::RopeAngles`].
    pub ropes: Vec<RopeFrequencies>,
    /// Nodes in topological order: each comes after the nodes whose results it reads.
    pub nodes: Vec<Node>,
    /// Number of logits per row.
    pub vocab_size: usize,
    /// Custom operations, indexed by [`Op::Custom`].
    pub customs: Vec<RegisteredOp>,
    /// The shard of the model that this graph computes.
    pub rank: TpRank,
}

impl Graph {
    /// Returns the value with this id.
    pub fn value(&self, id: ValueId) -> &Value {
        &self.values[id.0 as usize]
    }

    /// Returns the weight with this id.
    pub fn weight(&self, id: WeightId) -> &Weight {
        &self.weights[id.0 as usize]
    }

    /// Returns the node that writes a value.
    pub fn writer(&self, id: ValueId) -> Option<&Node> {
        self.nodes.iter().find(|node| node.outputs.contains(&id))
    }

    /// Number of nodes that read each value.
    pub fn use_counts(&self) -> Vec<u32> {
        let mut counts = vec![0; self.values.len()];
        for input in self.nodes.iter().flat_map(|node| &node.inputs) {
            counts[input.0 as usize] += 1;
        }
        counts
    }

    /// The graph as text, one line per node.
    pub fn dump(&self) -> String {
        use std::fmt::Write as _;
        let mut text = String::new();
        let _ = writeln!(
            text,
            "graph values={} weights={} nodes={} vocab={}",
            self.values.len(),
            self.weights.len(),
            self.nodes.len(),
            self.vocab_size
        );
        if self.rank.of > 1 {
            let _ = writeln!(text, "rank {} of {}", self.rank.index, self.rank.of);
        }
        for (index, node) in self.nodes.iter().enumerate() {
            let _ = writeln!(text, "{index:4} {}", self.dump_node(node));
        }
        text
    }

    fn dump_node(&self, node: &Node) -> String {
        let list = |ids: &[ValueId]| ids.iter().map(|id| self.dump_value(*id)).collect::<Vec<_>>().join(", ");
        let outputs = list(&node.outputs);
        let head = if outputs.is_empty() { String::new() } else { format!("{outputs} = ") };
        let weights = node.op.weights().iter().map(|w| self.dump_weight(*w)).collect::<Vec<_>>().join(", ");
        let mut arguments = node.inputs.iter().map(|id| self.value(*id).name.clone()).collect::<Vec<_>>();
        if !weights.is_empty() {
            arguments.push(weights);
        }
        format!("{head}{}({})", node.op, arguments.join(", "))
    }

    fn dump_value(&self, id: ValueId) -> String {
        let value = self.value(id);
        let rows = match value.rows {
            RowDim::Tokens => "tokens",
            RowDim::LogitRows => "logit_rows",
        };
        match value.elem {
            Elem::F32 => format!("{}[{rows},{}]f32", value.name, value.cols),
            Elem::BF16 => format!("{}[{rows},{}]bf16", value.name, value.cols),
            Elem::Q8 => format!("{}[{rows},{}]q8", value.name, value.cols),
            Elem::U32 => format!("{}[{rows},{}]u32", value.name, value.cols),
            Elem::Effect => value.name.clone(),
        }
    }

    fn dump_weight(&self, id: WeightId) -> String {
        let weight = self.weight(id);
        let shape = weight.shape.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
        let from = weight.slice.map_or(String::new(), |slice| format!(" from {} of {}", slice.start, slice.of));
        format!("%{}[{shape}{from}]{}", weight.name, weight.dtype)
    }
}
