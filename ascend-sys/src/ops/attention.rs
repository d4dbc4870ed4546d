//! Attention over stored keys and values: what the operation must know on the host.
//!
//! Lengths and the scale are read when the op is made; a captured op is refreshed by making it again in a task update.
//! What a library accepts depends on its version: probe each layout, head size and type once with small tensors.

#![allow(unsafe_code)]

use crate::error::AscendError;
use crate::ffi::shim_ffi::{RawAttention, ascend_attention};
use crate::ops::shim::Op;
use crate::ops::{Ops, optional};
use crate::tensor::TensorDesc;
use std::ffi::CStr;
use std::ptr;

/// Rows and columns of the causal mask that attention takes for any length.
pub const MASK_SIDE: usize = 2048;

/// How queries lie in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueryLayout {
    /// `[tokens, heads, D]`: sequences one after the other, of any lengths.
    Packed,
    /// `[sequences, tokens, heads, D]`: all sequences bring the same number of tokens.
    Padded,
}

/// Which keys a query sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mask {
    /// All.
    Full,
    /// Those up to its own place.
    Causal,
    /// As many up to its own place, itself included.
    Window(u32),
}

/// What attention must know on the host. Lengths are read when the op is made.
#[derive(Clone, Copy, Debug)]
pub struct Attention<'a> {
    /// Layout of queries and output.
    pub layout: QueryLayout,
    /// Packed: sums of the query lengths up to and with each sequence. Else empty.
    pub query_ends: &'a [i64],
    /// Stored keys of each sequence, at least 1.
    pub kv_lens: &'a [i64],
    /// Query heads.
    pub heads: usize,
    /// Key heads; divides `heads`.
    pub kv_heads: usize,
    /// Factor on the scores.
    pub scale: f64,
    /// Which keys a query sees; all but [`Mask::Full`] take the mask tensor.
    pub mask: Mask,
    /// Tokens a block.
    pub block_size: usize,
}

impl Ops {
    /// `softmax(query · keyᵀ · scale + mask) · value` over each sequence's stored keys.
    ///
    /// `mask` is the causal matrix of [`MASK_SIDE`] squared, bool, 1 above the diagonal; `block_table` int32
    /// `[sequences, blocks]`, whose ids nobody checks; caches `[blocks, block, kv_heads · D]`. Operands for
    /// [`Op::rebind`]: query, key cache, value cache, mask, table, output.
    #[allow(clippy::too_many_arguments)]
    pub fn attention(
        &self,
        query: &TensorDesc,
        key_cache: &TensorDesc,
        value_cache: &TensorDesc,
        mask: Option<&TensorDesc>,
        block_table: &TensorDesc,
        out: &TensorDesc,
        shape: &Attention<'_>,
    ) -> Result<Op, AscendError> {
        let layout: &CStr = match shape.layout {
            QueryLayout::Packed => c"TND",
            QueryLayout::Padded => c"BSND",
        };
        const SEES_ALL: i64 = i32::MAX as i64;
        let (sparse_mode, pre_tokens, next_tokens) = match shape.mask {
            Mask::Full => (0, SEES_ALL, SEES_ALL),
            Mask::Causal => (3, SEES_ALL, SEES_ALL),
            Mask::Window(keys) => (4, i64::from(keys) - 1, 0),
        };
        let raw = RawAttention {
            layout: layout.as_ptr(),
            query_ends: if shape.query_ends.is_empty() { ptr::null() } else { shape.query_ends.as_ptr() },
            kv_lens: shape.kv_lens.as_ptr(),
            seqs: shape.kv_lens.len() as u64,
            heads: shape.heads as i64,
            kv_heads: shape.kv_heads as i64,
            scale: shape.scale,
            sparse_mode,
            pre_tokens,
            next_tokens,
            inner_precise: 0,
            block_size: shape.block_size as i64,
        };
        assert!(shape.query_ends.is_empty() || shape.query_ends.len() == shape.kv_lens.len(), "one length a sequence");
        // SAFETY: this table, descriptions and lengths that are alive, and a place for the op.
        unsafe {
            self.make(|table, op| {
                ascend_attention(
                    table,
                    query,
                    key_cache,
                    value_cache,
                    optional(mask),
                    block_table,
                    out,
                    &raw const raw,
                    op,
                )
            })
        }
    }
}
