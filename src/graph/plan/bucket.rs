//! Upper bounds a plan is placed for.

use crate::graph::{Elem, RowDim, Value};

/// Upper bounds of a launch: the arena offsets are valid for any batch inside them. Devices without static shapes run
/// the actual sizes; the plan itself adds no padding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Bucket {
    /// Most rows of a batch.
    pub tokens: usize,
    /// Most rows of logits of a batch.
    pub logit_rows: usize,
    /// Most sequences of a batch.
    pub seqs: usize,
    /// Most tokens a sequence has.
    pub kv_tokens: usize,
}

impl Bucket {
    /// Most rows a value can have.
    pub const fn rows(&self, rows: RowDim) -> usize {
        match rows {
            RowDim::Tokens => self.tokens,
            RowDim::LogitRows => self.logit_rows,
        }
    }

    /// Bytes of a value at its largest.
    pub const fn bytes(&self, value: &Value) -> usize {
        self.rows(value.rows) * row_bytes(value.elem, value.cols)
    }
}

/// Elements of an int8 activation block.
pub const QUANT_BLOCK: usize = 32;
/// Bytes that a device may store for each block in addition to the quants: scale and sums.
pub const QUANT_RECORD_BYTES: usize = 16;

const fn align_up(n: usize, to: usize) -> usize {
    n.div_ceil(to) * to
}

/// Bytes of a row. An int8 row holds `cols` quants, then one record per block; each part is padded to 64 bytes, and a
/// row is an odd number of these, so that the rows of a tile do not fall into the same set of a cache.
pub const fn row_bytes(elem: Elem, cols: usize) -> usize {
    match elem {
        Elem::F32 | Elem::U32 => cols * 4,
        Elem::BF16 => cols * 2,
        Elem::Q8 => (align_up(cols, 64) + align_up(cols.div_ceil(QUANT_BLOCK) * QUANT_RECORD_BYTES, 64)) | 64,
        Elem::Effect => 0,
    }
}
