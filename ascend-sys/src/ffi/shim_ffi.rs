//! Functions of the kernel shim that create ops, as declared in `shim.h`.

#![allow(unsafe_code)]

use crate::ops::shim::{RawOp, Status};
use crate::tensor::TensorDesc;
use std::ffi::{c_char, c_void};

unsafe extern "C" {
    pub(crate) fn ascend_nz_elements(
        table: *const c_void,
        rows: i64,
        cols: i64,
        elem: i32,
        elements: *mut u64,
    ) -> Status;
    pub(crate) fn ascend_attention(
        table: *const c_void,
        query: *const TensorDesc,
        key_cache: *const TensorDesc,
        value_cache: *const TensorDesc,
        mask: *const TensorDesc,
        block_table: *const TensorDesc,
        out: *const TensorDesc,
        shape: *const RawAttention,
        op: *mut *mut RawOp,
    ) -> Status;
    pub(crate) fn ascend_linear(
        table: *const c_void,
        x: *const TensorDesc,
        weight: *const TensorDesc,
        bias: *const TensorDesc,
        out: *const TensorDesc,
        op: *mut *mut RawOp,
    ) -> Status;
    pub(crate) fn ascend_tile_weight(table: *const c_void, weight: *const TensorDesc, op: *mut *mut RawOp) -> Status;
    pub(crate) fn ascend_rms_norm(
        table: *const c_void,
        x: *const TensorDesc,
        gamma: *const TensorDesc,
        epsilon: f64,
        out: *const TensorDesc,
        rstd: *const TensorDesc,
        op: *mut *mut RawOp,
    ) -> Status;
    pub(crate) fn ascend_add_rms_norm(
        table: *const c_void,
        a: *const TensorDesc,
        b: *const TensorDesc,
        gamma: *const TensorDesc,
        epsilon: f64,
        out: *const TensorDesc,
        rstd: *const TensorDesc,
        sum: *const TensorDesc,
        op: *mut *mut RawOp,
    ) -> Status;
    pub(crate) fn ascend_rope(
        table: *const c_void,
        x: *const TensorDesc,
        cos: *const TensorDesc,
        sin: *const TensorDesc,
        interleaved: i32,
        out: *const TensorDesc,
        op: *mut *mut RawOp,
    ) -> Status;
    pub(crate) fn ascend_swiglu(
        table: *const c_void,
        x: *const TensorDesc,
        out: *const TensorDesc,
        op: *mut *mut RawOp,
    ) -> Status;
    pub(crate) fn ascend_silu(
        table: *const c_void,
        x: *const TensorDesc,
        out: *const TensorDesc,
        op: *mut *mut RawOp,
    ) -> Status;
    pub(crate) fn ascend_gelu(
        table: *const c_void,
        x: *const TensorDesc,
        out: *const TensorDesc,
        op: *mut *mut RawOp,
    ) -> Status;
    pub(crate) fn ascend_tanh(
        table: *const c_void,
        x: *const TensorDesc,
        out: *const TensorDesc,
        op: *mut *mut RawOp,
    ) -> Status;
    pub(crate) fn ascend_add(
        table: *const c_void,
        a: *const TensorDesc,
        b: *const TensorDesc,
        out: *const TensorDesc,
        op: *mut *mut RawOp,
    ) -> Status;
    pub(crate) fn ascend_mul(
        table: *const c_void,
        a: *const TensorDesc,
        b: *const TensorDesc,
        out: *const TensorDesc,
        op: *mut *mut RawOp,
    ) -> Status;
    pub(crate) fn ascend_scale(
        table: *const c_void,
        x: *const TensorDesc,
        factor: f32,
        out: *const TensorDesc,
        op: *mut *mut RawOp,
    ) -> Status;
    pub(crate) fn ascend_embedding(
        table: *const c_void,
        weight: *const TensorDesc,
        ids: *const TensorDesc,
        out: *const TensorDesc,
        op: *mut *mut RawOp,
    ) -> Status;
    pub(crate) fn ascend_gather_rows(
        table: *const c_void,
        x: *const TensorDesc,
        rows: *const TensorDesc,
        out: *const TensorDesc,
        op: *mut *mut RawOp,
    ) -> Status;
    pub(crate) fn ascend_copy(
        table: *const c_void,
        dst: *const TensorDesc,
        src: *const TensorDesc,
        op: *mut *mut RawOp,
    ) -> Status;
    pub(crate) fn ascend_cast(
        table: *const c_void,
        x: *const TensorDesc,
        out: *const TensorDesc,
        op: *mut *mut RawOp,
    ) -> Status;
    pub(crate) fn ascend_kv_scatter(
        table: *const c_void,
        key: *const TensorDesc,
        value: *const TensorDesc,
        slots: *const TensorDesc,
        key_cache: *const TensorDesc,
        value_cache: *const TensorDesc,
        op: *mut *mut RawOp,
    ) -> Status;
    pub(crate) fn ascend_scatter_rows(
        table: *const c_void,
        cache: *const TensorDesc,
        indices: *const TensorDesc,
        updates: *const TensorDesc,
        op: *mut *mut RawOp,
    ) -> Status;
    pub(crate) fn ascend_dynamic_quant(
        table: *const c_void,
        x: *const TensorDesc,
        y: *const TensorDesc,
        scale: *const TensorDesc,
        op: *mut *mut RawOp,
    ) -> Status;
    pub(crate) fn ascend_quant_linear(
        table: *const c_void,
        x: *const TensorDesc,
        weight: *const TensorDesc,
        weight_scale: *const TensorDesc,
        row_scale: *const TensorDesc,
        bias: *const TensorDesc,
        out: *const TensorDesc,
        op: *mut *mut RawOp,
    ) -> Status;
    pub(crate) fn ascend_weight_quant_linear(
        table: *const c_void,
        x: *const TensorDesc,
        weight: *const TensorDesc,
        scale: *const TensorDesc,
        offset: *const TensorDesc,
        bias: *const TensorDesc,
        group: i32,
        out: *const TensorDesc,
        op: *mut *mut RawOp,
    ) -> Status;
    pub(crate) fn ascend_argmax(
        table: *const c_void,
        x: *const TensorDesc,
        out: *const TensorDesc,
        op: *mut *mut RawOp,
    ) -> Status;
    pub(crate) fn ascend_topk(
        table: *const c_void,
        x: *const TensorDesc,
        k: i64,
        values: *const TensorDesc,
        indices: *const TensorDesc,
        op: *mut *mut RawOp,
    ) -> Status;
    pub(crate) fn ascend_softmax(
        table: *const c_void,
        x: *const TensorDesc,
        out: *const TensorDesc,
        op: *mut *mut RawOp,
    ) -> Status;
    pub(crate) fn ascend_is_finite(
        table: *const c_void,
        x: *const TensorDesc,
        out: *const TensorDesc,
        op: *mut *mut RawOp,
    ) -> Status;
    pub(crate) fn ascend_all(
        table: *const c_void,
        x: *const TensorDesc,
        out: *const TensorDesc,
        op: *mut *mut RawOp,
    ) -> Status;
    pub(crate) fn ascend_moe_gate(
        table: *const c_void,
        logits: *const TensorDesc,
        k: i64,
        renorm: i64,
        weights: *const TensorDesc,
        experts: *const TensorDesc,
        op: *mut *mut RawOp,
    ) -> Status;
    pub(crate) fn ascend_moe_route(
        table: *const c_void,
        x: *const TensorDesc,
        experts: *const TensorDesc,
        expert_count: i64,
        expanded: *const TensorDesc,
        row_index: *const TensorDesc,
        counts: *const TensorDesc,
        op: *mut *mut RawOp,
    ) -> Status;
    pub(crate) fn ascend_moe_linear(
        table: *const c_void,
        x: *const TensorDesc,
        weight: *const TensorDesc,
        counts: *const TensorDesc,
        out: *const TensorDesc,
        op: *mut *mut RawOp,
    ) -> Status;
    pub(crate) fn ascend_moe_combine(
        table: *const c_void,
        expanded: *const TensorDesc,
        row_index: *const TensorDesc,
        weights: *const TensorDesc,
        experts: *const TensorDesc,
        out: *const TensorDesc,
        op: *mut *mut RawOp,
    ) -> Status;
}

/// `ascend_attention_shape`.
#[repr(C)]
pub(crate) struct RawAttention {
    pub(crate) layout: *const c_char,
    pub(crate) query_ends: *const i64,
    pub(crate) kv_lens: *const i64,
    pub(crate) seqs: u64,
    pub(crate) heads: i64,
    pub(crate) kv_heads: i64,
    pub(crate) scale: f64,
    pub(crate) sparse_mode: i64,
    pub(crate) pre_tokens: i64,
    pub(crate) next_tokens: i64,
    pub(crate) inner_precise: i64,
    pub(crate) block_size: i64,
}
