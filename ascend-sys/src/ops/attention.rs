//! Attention over the KV cache, and the parameters that the operation reads on the host.
//!
//! The operation reads lengths and scale when the op is created; to change them in a captured graph, create the op
//! again in a task update. The supported combinations depend on the library's version: probe each layout, head size and
//! type once with small tensors.

#![allow(unsafe_code)]

use crate::error::AscendError;
use crate::ffi::shim_ffi::{RawAttention, ascend_attention};
use crate::ops::shim::Op;
use crate::ops::{Ops, optional};
use crate::tensor::TensorDesc;
use std::ffi::CStr;
use std::ptr;

/// Number of rows and of columns of the causal mask, for sequences of any length.
pub const MASK_SIDE: usize = 2048;

/// Layout of the queries in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueryLayout {
    /// `[tokens, heads, D]`: sequences of any lengths, concatenated.
    Packed,
    /// `[sequences, tokens, heads, D]`: all sequences have the same number of tokens.
    Padded,
}

/// Keys to which a query attends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mask {
    /// All keys.
    Full,
    /// Keys up to and including the query's own position.
    Causal,
    /// Sliding window: that many keys up to and including the query's own position.
    Window(u32),
}

/// Host-side parameters of attention; the operation reads them when the op is created.
#[derive(Clone, Copy, Debug)]
pub struct Attention<'a> {
    /// Layout of queries and output.
    pub layout: QueryLayout,
    /// For [`QueryLayout::Packed`], the cumulative query lengths, one per sequence, its own included; otherwise empty.
    pub query_ends: &'a [i64],
    /// Number of keys in the cache for each sequence, at least 1.
    pub kv_lens: &'a [i64],
    /// Number of query heads.
    pub heads: usize,
    /// Number of KV heads; it divides `heads`.
    pub kv_heads: usize,
    /// Factor of the attention scores.
    pub scale: f64,
    /// Keys to which a query attends; all masks except [`Mask::Full`] require the mask tensor.
    pub mask: Mask,
    /// Number of tokens per block.
    pub block_size: usize,
}

impl Ops {
    /// Computes `softmax(query · keyᵀ · scale + mask) · value` over the cached keys and values of each sequence.
    ///
    /// - `mask`: bool `[MASK_SIDE, MASK_SIDE]`, 1 above the diagonal;
    /// - `block_table`: int32 `[sequences, blocks]`; the operation does not check the block ids;
    /// - `key_cache`, `value_cache`: `[blocks, block_size, kv_heads · D]`.
    ///
    /// Operands for [`Op::rebind`]: query, key cache, value cache, mask, block table, output.
    ///
    /// # Errors
    /// [`AscendError`] of kind [`Refused`](crate::AscendErrorKind::Refused) if the operation does not support the
    /// shapes, types or parameters; of kind [`Unsupported`](crate::AscendErrorKind::Unsupported) if the libraries lack
    /// the operation.
    ///
    /// # Panics
    /// If `shape.query_ends` is neither empty nor has one element per sequence.
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
        assert!(
            shape.query_ends.is_empty() || shape.query_ends.len() == shape.kv_lens.len(),
            "query_ends does not have one element per sequence"
        );
        // SAFETY: The closure passes `table` and `op` to a function of the shim that creates an op.
        // SAFETY: The tensor descriptions, the lengths and `raw` are borrowed, hence alive during the call.
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
