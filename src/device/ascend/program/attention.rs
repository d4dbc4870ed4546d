//! Attention over the KV pool: the form of the operation that supports a model's heads, and its arguments for a batch.

#![forbid(unsafe_code)]

use ascend_sys::{AscendError, AscendErrorKind, Attention, Mask, Op, Ops, QueryLayout, TensorDesc};

use crate::device::ascend::memory::TypedAddress;
use crate::device::ascend::memory::constants::Constants;
use crate::device::ascend::memory::kv_layout::KvShard;
use crate::graph::AttentionShape;

/// Lengths of a batch in the form of the operation.
#[derive(Debug, Default)]
pub(crate) struct Lengths {
    /// Cumulative number of rows of the sequences.
    pub ends: Vec<i64>,
    /// Number of stored tokens of each sequence.
    pub keys: Vec<i64>,
}

impl Lengths {
    pub(crate) fn with_capacity(seqs: usize) -> Self {
        Self { ends: Vec::with_capacity(seqs), keys: Vec::with_capacity(seqs) }
    }

    /// Sets the lengths of a batch, padded to `seqs` with sequences of one row and one key.
    pub(crate) fn fill(&mut self, q_lens: &[u32], kv_lens: &[u32], seqs: usize) {
        self.ends.clear();
        self.keys.clear();
        let mut end = 0;
        for q in q_lens {
            end += i64::from(*q);
            self.ends.push(end);
        }
        self.keys.extend(kv_lens.iter().map(|&kv| i64::from(kv)));
        while self.ends.len() < seqs {
            end += 1;
            self.ends.push(end);
            self.keys.push(1);
        }
    }

    /// Whether every sequence has one row.
    fn is_single(&self) -> bool {
        self.ends.last().is_none_or(|&rows| rows == self.ends.len() as i64)
    }
}

/// Layout of the queries in the attention operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AttentionLayout {
    /// All sequences in one call, with any lengths.
    Packed,
    /// One call for all sequences if each has one row, else one call per sequence.
    Padded,
}

/// One layer's attention with all its operands.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layer<'a> {
    pub ops: &'a Ops,
    pub constants: &'a Constants,
    pub shape: &'a AttentionShape,
    pub layout: AttentionLayout,
    pub block_size: usize,
    /// Keys and values of all blocks.
    pub caches: [TensorDesc; 2],
    pub query: TypedAddress,
    pub out: TypedAddress,
    pub table: TypedAddress,
    pub table_cols: usize,
}

impl Layer<'_> {
    /// Issues the calls for a batch.
    pub(crate) fn each(
        &self,
        lengths: &Lengths,
        run: &mut dyn FnMut(Op) -> Result<(), AscendError>,
    ) -> Result<(), AscendError> {
        let AttentionShape { heads, head_dim, .. } = *self.shape;
        let seqs = lengths.keys.len();
        let rows = usize::try_from(lengths.ends.last().copied().unwrap_or(0)).unwrap_or(0);
        let table = self.table.tensor(&[seqs, self.table_cols]);
        if self.layout == AttentionLayout::Packed {
            return run(self.build(
                QueryLayout::Packed,
                &[rows, heads, head_dim],
                0,
                table,
                &lengths.ends,
                &lengths.keys,
            )?);
        }
        if lengths.is_single() {
            return run(self.build(QueryLayout::Padded, &[seqs, 1, heads, head_dim], 0, table, &[], &lengths.keys)?);
        }
        let mut first = 0;
        for (at, keys) in lengths.keys.iter().enumerate() {
            let end = usize::try_from(lengths.ends[at]).unwrap_or(0);
            let table = self.table.from(at * self.table_cols).tensor(&[1, self.table_cols]);
            let dims = [1, end - first, heads, head_dim];
            run(self.build(QueryLayout::Padded, &dims, first, table, &[], std::slice::from_ref(keys))?)?;
            first = end;
        }
        Ok(())
    }

    fn build(
        &self,
        layout: QueryLayout,
        dims: &[usize],
        first_row: usize,
        table: TensorDesc,
        query_ends: &[i64],
        kv_lens: &[i64],
    ) -> Result<Op, AscendError> {
        let AttentionShape { heads, kv_heads, head_dim, scale, window, .. } = *self.shape;
        let from = first_row * heads * head_dim;
        let mask = window.map_or(Mask::Causal, Mask::Window);
        let shape = Attention {
            layout,
            query_ends,
            kv_lens,
            heads,
            kv_heads,
            scale: f64::from(scale),
            mask,
            block_size: self.block_size,
        };
        let [keys, values] = &self.caches;
        let (query, out) = (self.query.from(from).tensor(dims), self.out.from(from).tensor(dims));
        self.ops.attention(&query, keys, values, Some(&self.constants.mask()), &table, &out, &shape)
    }
}

/// Finds the layout that supports a layer's heads, by building the operation for two rows of a sequence.
///
/// # Errors
/// The error of the last layout tried.
pub(crate) fn probe(
    ops: &Ops,
    constants: &Constants,
    shape: &AttentionShape,
    cache: &KvShard,
    query: TypedAddress,
    table: TypedAddress,
) -> Result<AttentionLayout, AscendError> {
    let keys = query.tensor(&[2, cache.geometry.block_size, cache.row()]);
    let lengths = Lengths { ends: vec![2], keys: vec![2] };
    let mut refusal = None;
    for form in [AttentionLayout::Packed, AttentionLayout::Padded] {
        let layer = Layer {
            ops,
            constants,
            shape,
            layout: form,
            block_size: cache.geometry.block_size,
            caches: [keys, keys],
            query,
            out: query.from(2 * shape.heads * shape.head_dim),
            table,
            table_cols: 8,
        };
        match layer.each(&lengths, &mut |_| Ok(())) {
            Ok(()) => return Ok(form),
            Err(error) if matches!(error.kind, AscendErrorKind::Refused | AscendErrorKind::Unsupported) => {
                refusal = Some(error);
            }
            Err(error) => return Err(error),
        }
    }
    Err(refusal.unwrap_or_else(|| unreachable!("two attention layouts were requested")))
}
