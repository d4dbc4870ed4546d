//! Bucket: the largest batch that a plan supports.

use crate::graph::{Elem, RowDim, Value};

/// Upper bounds of a launch. The arena offsets are valid for any batch within them. Devices with dynamic shapes run the
/// actual sizes; the plan itself adds no padding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Bucket {
    /// Largest number of rows of a batch.
    pub tokens: usize,
    /// Largest number of rows of logits of a batch.
    pub logit_rows: usize,
    /// Largest number of sequences of a batch.
    pub seqs: usize,
    /// Largest number of tokens of a sequence.
    pub kv_tokens: usize,
}

impl Bucket {
    /// Largest number of rows of a value.
    pub const fn rows(&self, rows: RowDim) -> usize {
        match rows {
            RowDim::Tokens => self.tokens,
            RowDim::LogitRows => self.logit_rows,
        }
    }

    /// Largest size of a value in bytes.
    pub const fn bytes(&self, value: &Value) -> usize {
        self.rows(value.rows) * row_bytes(value.elem, value.cols)
    }
}

/// Number of elements per int8 activation block.
pub const QUANT_BLOCK: usize = 32;
/// Bytes of a block's record, which holds a scale and sums, in addition to the quants.
pub const QUANT_RECORD_BYTES: usize = 16;

const fn align_up(n: usize, to: usize) -> usize {
    n.div_ceil(to) * to
}

/// Bytes of a row. An int8 row holds `cols` quants, then one record per block. Each part is padded to 64 bytes, and a
/// row is an odd number of these units, so that the rows of a tile do not map to the same cache set.
pub const fn row_bytes(elem: Elem, cols: usize) -> usize {
    match elem {
        Elem::F32 | Elem::U32 => cols * 4,
        Elem::BF16 => cols * 2,
        Elem::Q8 => (align_up(cols, 64) + align_up(cols.div_ceil(QUANT_BLOCK) * QUANT_RECORD_BYTES, 64)) | 64,
        Elem::Effect => 0,
    }
}
