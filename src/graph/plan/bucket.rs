//! Upper bounds a plan is placed for.

use crate::graph::{Elem, RowDim, Value};

/// Upper bounds of a launch: arena offsets hold for any batch inside them. Devices without static shapes run the actual
/// sizes; none is padded by the plan itself.
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

    /// Bytes a value takes at its largest.
    pub const fn bytes(&self, value: &Value) -> usize {
        self.rows(value.rows) * row_bytes(value.elem, value.cols)
    }
}

/// Elements of an int8 activation block.
pub const QUANT_BLOCK: usize = 32;
/// Bytes a device may keep for each such block beside the quants: scale and sums.
pub const QUANT_RECORD_BYTES: usize = 16;

const fn align_up(n: usize, to: usize) -> usize {
    n.div_ceil(to) * to
}

/// Bytes a row takes: int8 rows hold `cols` quants, then a record a block, each part padded to 64
/// bytes, an odd number of which makes a row: the rows of a tile must not meet in one set of a cache.
pub const fn row_bytes(elem: Elem, cols: usize) -> usize {
    match elem {
        Elem::F32 | Elem::U32 => cols * 4,
        Elem::BF16 => cols * 2,
        Elem::Q8 => (align_up(cols, 64) + align_up(cols.div_ceil(QUANT_BLOCK) * QUANT_RECORD_BYTES, 64)) | 64,
        Elem::Effect => 0,
    }
}
