//! Tensor parallelism: shards a decoder into one graph per rank, with collectives where results are combined.
//!
//! ```text
//! embed ─ sum │ norm ─ q k v ─ attention ─ o ─ sum │ + │ norm ─ gate up ─ act·up ─ down ─ sum │ + │ … │ lm_head ─ gather
//! vocabulary  │        heads of the rank           │   │        part of the width             │       vocabulary
//! ```
//! The layout is Megatron's (Shoeybi et al. 2019): products of whole rows keep a part of their outputs, products of
//! partial rows keep the matching columns, and their results are summed over the ranks. Shards may differ by one unit:
//! a KV head with its query heads, a block of the down projection's storage format, a token id. With more ranks than KV
//! heads, several ranks hold each KV head.

use crate::num::to_u32;
use std::ops::Range;

use crate::graph::{
    AttentionShape, CompileError, Graph, LinearPart, Node, Op, RowDim, TpRank, Value, ValueId, WeightId, WeightSlice,
};

/// Returns the shard of `graph` that this rank computes; with one rank, the graph itself.
///
/// # Errors
/// [`CompileError::Shard`] if heads or widths cannot be distributed over this number of ranks, and for graphs with
/// custom operations.
pub fn shard(graph: &Graph, rank: TpRank) -> Result<Graph, CompileError> {
    if rank.of == 0 || rank.index >= rank.of {
        return Err(refused(rank, format!("rank {} of {}", rank.index, rank.of)));
    }
    if rank.of == 1 {
        return Ok(graph.clone());
    }
    if let Some(custom) = graph.customs.first() {
        return Err(refused(rank, format!("custom operation {} runs on one rank only", custom.op.name())));
    }
    let mut cutter = Cutter {
        source: graph,
        rank,
        out: Graph { nodes: Vec::new(), rank, ..graph.clone() },
        is_part: vec![false; graph.values.len()],
        now: (0..graph.values.len()).map(|value| ValueId(to_u32(value))).collect(),
    };
    for node in &graph.nodes {
        cutter.node(node)?;
    }
    Ok(cutter.out)
}

fn refused(rank: TpRank, what: String) -> CompileError {
    CompileError::Shard { ranks: rank.of, what }
}

/// Query heads and KV heads of the rank.
fn heads_of(shape: &AttentionShape, rank: TpRank) -> Result<(Range<usize>, Range<usize>), CompileError> {
    let (ranks, group) = (rank.of as usize, shape.heads / shape.kv_heads.max(1));
    if ranks <= shape.kv_heads {
        let kv = rank.share(shape.kv_heads);
        return Ok((kv.start * group..kv.end * group, kv));
    }
    let sharers = ranks / shape.kv_heads;
    if !ranks.is_multiple_of(shape.kv_heads) || !group.is_multiple_of(sharers) {
        let (heads, kv_heads) = (shape.heads, shape.kv_heads);
        return Err(refused(
            rank,
            format!("{heads} query heads over {kv_heads} KV heads cannot be sharded: each rank needs whole groups"),
        ));
    }
    let kv = rank.index as usize / sharers;
    Ok((rank.share(shape.heads), kv..kv + 1))
}

struct Cutter<'a> {
    source: &'a Graph,
    rank: TpRank,
    out: Graph,
    /// Whether the rank holds only some columns of each value.
    is_part: Vec<bool>,
    /// For each value of the source graph, the value that replaces it for readers of the whole row.
    now: Vec<ValueId>,
}

impl Cutter<'_> {
    fn node(&mut self, node: &Node) -> Result<(), CompileError> {
        let mut cut = Node { inputs: node.inputs.iter().map(|id| self.now[id.0 as usize]).collect(), ..node.clone() };
        let from_part = node.inputs.iter().any(|id| self.is_part[id.0 as usize]);
        let mut collective = None;
        match &mut cut.op {
            Op::Embed { table, first_id } => {
                let rows = self.rank.share(self.source.weight(*table).shape[0]);
                *first_id = to_u32(rows.start);
                self.slice(*table, 0, rows)?;
                collective = Some(Op::AllReduce);
            }
            Op::Linear(part) if from_part => {
                self.columns_of(node, part)?;
                collective = Some(Op::AllReduce);
            }
            Op::Linear(part) => {
                let rows = self.rows_of(node, part)?;
                self.slice(part.weight, 0, rows.clone())?;
                if let Some(bias) = part.bias {
                    self.slice(bias, 0, rows.clone())?;
                }
                self.narrow(node.outputs[0], rows.len());
                collective = node.layer.is_none().then_some(Op::AllGather);
            }
            Op::Attention(shape) => {
                let (heads, kv_heads) = heads_of(shape, self.rank)?;
                (shape.heads, shape.kv_heads) = (heads.len(), kv_heads.len());
                self.narrow(node.outputs[0], shape.heads * shape.head_dim);
            }
            _ => {
                if from_part && let (Some(&from), Some(&to)) = (node.inputs.first(), node.outputs.first()) {
                    let cols = if self.out.value(to).cols == 0 { 0 } else { self.out.value(from).cols };
                    self.narrow(to, cols);
                }
            }
        }
        self.out.nodes.push(cut);
        if let Some(op) = collective {
            self.append_collective(op, node);
        }
        Ok(())
    }

    /// Records the number of columns of a value that the rank holds.
    fn narrow(&mut self, value: ValueId, cols: usize) {
        self.out.values[value.0 as usize].cols = cols;
        self.is_part[value.0 as usize] = true;
    }

    /// Appends a collective over the result of `node`; later readers get the result of the collective.
    fn append_collective(&mut self, op: Op, node: &Node) {
        let part = node.outputs[0];
        let whole = self.source.value(part);
        let tag = if op == Op::AllReduce { "sum" } else { "all" };
        let id = ValueId(to_u32(self.out.values.len()));
        self.out.values.push(Value { name: format!("{}.{tag}", whole.name), ..whole.clone() });
        self.out.nodes.push(Node { op, inputs: vec![part], outputs: vec![id], layer: node.layer });
        self.is_part[part.0 as usize] = false;
        self.now[part.0 as usize] = id;
    }

    /// Keeps a range of a weight along one dimension. All uses of a weight must keep the same range.
    fn slice(&mut self, id: WeightId, dim: usize, range: Range<usize>) -> Result<(), CompileError> {
        let of = self.source.weight(id).shape[dim];
        let weight = &mut self.out.weights[id.0 as usize];
        let slice = WeightSlice { dim, start: range.start, of };
        if weight.slice.is_some_and(|known| known != slice || weight.shape[dim] != range.len()) {
            return Err(refused(self.rank, format!("{} is used in two ways", weight.name)));
        }
        if range.is_empty() {
            return Err(refused(
                self.rank,
                format!("{} has {of} elements along dimension {dim}, too few for all ranks", weight.name),
            ));
        }
        weight.slice = Some(slice);
        weight.shape[dim] = range.len();
        Ok(())
    }

    /// Outputs that the rank keeps of a product of whole rows.
    fn rows_of(&self, node: &Node, part: &LinearPart) -> Result<Range<usize>, CompileError> {
        let n = self.source.weight(part.weight).shape[0];
        if node.layer.is_none() {
            return Ok(self.rank.share(n));
        }
        match self.meaning(node.outputs[0]) {
            Some(Meaning::Queries(shape)) => {
                let heads = heads_of(shape, self.rank)?.0;
                Ok(heads.start * shape.head_dim..heads.end * shape.head_dim)
            }
            Some(Meaning::Stored) => {
                let shape = self.attention(node.layer).ok_or_else(|| self.unknown(node))?;
                let heads = heads_of(shape, self.rank)?.1;
                Ok(heads.start * shape.head_dim..heads.end * shape.head_dim)
            }
            Some(Meaning::ReadBy(weight)) => Ok(self.blocks_of(weight)),
            None => Err(self.unknown(node)),
        }
    }

    /// The rank's share of a weight's columns, in whole blocks of its storage format.
    fn blocks_of(&self, weight: WeightId) -> Range<usize> {
        let weight = self.source.weight(weight);
        let (k, block) = (weight.shape[1], weight.dtype.block_len().max(1));
        let blocks = self.rank.share(k.div_ceil(block));
        blocks.start * block..(blocks.end * block).min(k)
    }

    /// Keeps the columns of a weight that correspond to the rank's inputs. Rank 0 adds the bias.
    fn columns_of(&mut self, node: &Node, part: &mut LinearPart) -> Result<(), CompileError> {
        let range = match self.source.writer(node.inputs[0]).map(|writer| &writer.op) {
            Some(Op::Attention(shape)) => {
                let heads = heads_of(shape, self.rank)?.0;
                heads.start * shape.head_dim..heads.end * shape.head_dim
            }
            _ => self.blocks_of(part.weight),
        };
        let weight = self.source.weight(part.weight);
        let block = weight.dtype.block_len().max(1);
        let whole = |end: usize| end == weight.shape[1] || end.is_multiple_of(block);
        if !whole(range.start) || !whole(range.end) {
            let (name, dtype) = (&weight.name, weight.dtype);
            let what = format!("columns {range:?} of {name} are not whole blocks of {dtype} ({block} elements each)");
            return Err(refused(self.rank, what));
        }
        if self.rank.index > 0 {
            part.bias = None;
        }
        self.slice(part.weight, 1, range)
    }

    fn unknown(&self, node: &Node) -> CompileError {
        refused(self.rank, format!("what {} is for", self.source.value(node.outputs[0]).name))
    }

    fn attention(&self, layer: Option<u32>) -> Option<&AttentionShape> {
        self.source.nodes.iter().filter(|node| node.layer == layer).find_map(|node| match &node.op {
            Op::Attention(shape) => Some(shape),
            _ => None,
        })
    }

    /// Meaning of a value, if it is the output of a product.
    fn meaning(&self, value: ValueId) -> Option<Meaning<'_>> {
        let mut readers = self.source.nodes.iter().filter(|node| node.inputs.contains(&value));
        readers.find_map(|node| match &node.op {
            Op::Attention(shape) => Some(Meaning::Queries(shape)),
            Op::KvWrite { .. } => Some(Meaning::Stored),
            Op::Linear(part) => Some(Meaning::ReadBy(part.weight)),
            _ => {
                let out = node.outputs.first().filter(|&&out| self.source.value(out).rows == RowDim::Tokens)?;
                self.meaning(*out)
            }
        })
    }
}

enum Meaning<'a> {
    Queries(&'a AttentionShape),
    Stored,
    ReadBy(WeightId),
}
