//! The operations: each describes its operands, runs the library's first phase and gives back an [`Op`].
//!
//! T tokens, H hidden elements, N outputs, K inputs, D elements a head. All need their context current on the thread.
//! Shapes and types are checked by the library: a refusal is an error of kind
//! [`Refused`](crate::AscendErrorKind::Refused), an operation it lacks one of kind
//! [`Unsupported`](crate::AscendErrorKind::Unsupported); in both cases nothing has run.

#![allow(unsafe_code)]

pub(super) mod attention;
pub(super) mod shim;

use crate::error::AscendError;
use crate::ffi::loader::Library;
use crate::ffi::shim_ffi::{
    ascend_add, ascend_add_rms_norm, ascend_all, ascend_argmax, ascend_cast, ascend_copy, ascend_dynamic_quant,
    ascend_embedding, ascend_gather_rows, ascend_gelu, ascend_is_finite, ascend_kv_scatter, ascend_linear,
    ascend_moe_combine, ascend_moe_gate, ascend_moe_linear, ascend_moe_route, ascend_mul, ascend_nz_elements,
    ascend_quant_linear, ascend_rms_norm, ascend_rope, ascend_scale, ascend_scatter_rows, ascend_silu, ascend_softmax,
    ascend_swiglu, ascend_tanh, ascend_tile_weight, ascend_topk, ascend_weight_quant_linear,
};
use crate::ops::shim::{Op, RawOp, Status, Table, check};
use crate::runtime::Runtime;
use crate::tensor::{ElemType, TensorDesc};
use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

/// The operations that the libraries have.
#[derive(Clone, Debug)]
pub struct Ops {
    table: Arc<Table>,
    runtime: Runtime,
}

impl Ops {
    /// Looks all operations up. None of them is required here: making an op that is missing is the error.
    pub fn load(library: &Library, runtime: &Runtime) -> Self {
        Self { table: Arc::new(Table::load(library)), runtime: runtime.clone() }
    }

    /// Symbols that the libraries lack.
    pub fn missing(&self) -> &[&'static str] {
        self.table.missing()
    }

    /// Whether the libraries have an operation, named as in C (`aclnnMm`).
    pub fn has(&self, name: &str) -> bool {
        !self.missing().iter().any(|missing| missing.strip_suffix("GetWorkspaceSize").unwrap_or(missing) == name)
    }

    /// # Safety
    /// `make` calls a function of the shim that makes an op, with the table and place it is given.
    pub(crate) unsafe fn make(
        &self,
        make: impl FnOnce(*const c_void, *mut *mut RawOp) -> Status,
    ) -> Result<Op, AscendError> {
        // SAFETY: the caller's promise.
        unsafe { Op::make(&self.table, &self.runtime, make) }
    }

    /// Elements of the buffer of a tiled weight `[rows, cols]`.
    pub fn tiled_elements(&self, rows: usize, cols: usize, elem: ElemType) -> Result<usize, AscendError> {
        let mut elements = 0;
        // SAFETY: this table and a place for a number.
        let status = unsafe {
            ascend_nz_elements(self.table.as_ptr(), rows as i64, cols as i64, elem.code(), &raw mut elements)
        };
        check(&self.runtime, status)?;
        Ok(usize::try_from(elements).unwrap_or(usize::MAX))
    }

    /// `out[T,N] = x[T,K] · weight[N,K]ᵀ + bias[N]`. The weight is given by rows, plain or tiled; tiled ones take
    /// no bias.
    pub fn linear(
        &self,
        x: &TensorDesc,
        weight: &TensorDesc,
        bias: Option<&TensorDesc>,
        out: &TensorDesc,
    ) -> Result<Op, AscendError> {
        // SAFETY: this table, descriptions that are alive, and a place for the op.
        unsafe { self.make(|table, op| ascend_linear(table, x, weight, optional(bias), out, op)) }
    }

    /// Brings a weight `[N,K]` into tiles, in place, in a buffer of [`Ops::tiled_elements`] elements. Slow: once,
    /// at load.
    pub fn tile_weight(&self, weight: &TensorDesc) -> Result<Op, AscendError> {
        // SAFETY: this table, descriptions that are alive, and a place for the op.
        unsafe { self.make(|table, op| ascend_tile_weight(table, weight, op)) }
    }

    /// `out = x / rms(x) · gamma`. `rstd` is f32 scratch: one value a row, its shape that of x with the normed
    /// dimension 1.
    pub fn rms_norm(
        &self,
        x: &TensorDesc,
        gamma: &TensorDesc,
        epsilon: f64,
        out: &TensorDesc,
        rstd: &TensorDesc,
    ) -> Result<Op, AscendError> {
        // SAFETY: this table, descriptions that are alive, and a place for the op.
        unsafe { self.make(|table, op| ascend_rms_norm(table, x, gamma, epsilon, out, rstd, op)) }
    }

    /// `sum = a + b`, `out = sum / rms(sum) · gamma`. One type throughout.
    #[allow(clippy::too_many_arguments)]
    pub fn add_rms_norm(
        &self,
        a: &TensorDesc,
        b: &TensorDesc,
        gamma: &TensorDesc,
        epsilon: f64,
        out: &TensorDesc,
        rstd: &TensorDesc,
        sum: &TensorDesc,
    ) -> Result<Op, AscendError> {
        // SAFETY: this table, descriptions that are alive, and a place for the op.
        unsafe { self.make(|table, op| ascend_add_rms_norm(table, a, b, gamma, epsilon, out, rstd, sum, op)) }
    }

    /// `x[T,heads,D]` rotated by `cos` and `sin[T,1,D]`. `interleaved` 1 pairs elements 2i and 2i+1, 0 i and i+D/2.
    /// `out` is another buffer; D is at most 1,024.
    pub fn rope(
        &self,
        x: &TensorDesc,
        cos: &TensorDesc,
        sin: &TensorDesc,
        is_interleaved: bool,
        out: &TensorDesc,
    ) -> Result<Op, AscendError> {
        // SAFETY: this table, descriptions that are alive, and a place for the op.
        unsafe { self.make(|table, op| ascend_rope(table, x, cos, sin, i32::from(is_interleaved), out, op)) }
    }

    /// `out[T,n] = silu(x[T,..n]) · x[T,n..]`, x without gaps.
    pub fn swiglu(&self, x: &TensorDesc, out: &TensorDesc) -> Result<Op, AscendError> {
        // SAFETY: this table, descriptions that are alive, and a place for the op.
        unsafe { self.make(|table, op| ascend_swiglu(table, x, out, op)) }
    }

    /// `x · sigmoid(x)`.
    pub fn silu(&self, x: &TensorDesc, out: &TensorDesc) -> Result<Op, AscendError> {
        // SAFETY: this table, descriptions that are alive, and a place for the op.
        unsafe { self.make(|table, op| ascend_silu(table, x, out, op)) }
    }

    /// The tanh approximation of GELU.
    pub fn gelu(&self, x: &TensorDesc, out: &TensorDesc) -> Result<Op, AscendError> {
        // SAFETY: this table, descriptions that are alive, and a place for the op.
        unsafe { self.make(|table, op| ascend_gelu(table, x, out, op)) }
    }

    /// `tanh(x)`.
    pub fn tanh(&self, x: &TensorDesc, out: &TensorDesc) -> Result<Op, AscendError> {
        // SAFETY: this table, descriptions that are alive, and a place for the op.
        unsafe { self.make(|table, op| ascend_tanh(table, x, out, op)) }
    }

    /// `a + b`.
    pub fn add(&self, a: &TensorDesc, b: &TensorDesc, out: &TensorDesc) -> Result<Op, AscendError> {
        // SAFETY: this table, descriptions that are alive, and a place for the op.
        unsafe { self.make(|table, op| ascend_add(table, a, b, out, op)) }
    }

    /// `a · b`.
    pub fn mul(&self, a: &TensorDesc, b: &TensorDesc, out: &TensorDesc) -> Result<Op, AscendError> {
        // SAFETY: this table, descriptions that are alive, and a place for the op.
        unsafe { self.make(|table, op| ascend_mul(table, a, b, out, op)) }
    }

    /// `x · factor`.
    pub fn scale(&self, x: &TensorDesc, factor: f32, out: &TensorDesc) -> Result<Op, AscendError> {
        // SAFETY: this table, descriptions that are alive, and a place for the op.
        unsafe { self.make(|table, op| ascend_scale(table, x, factor, out, op)) }
    }

    /// `out[T,H] = weight[ids[T]]`. Ids too large give garbage: check them before.
    pub fn embedding(&self, weight: &TensorDesc, ids: &TensorDesc, out: &TensorDesc) -> Result<Op, AscendError> {
        // SAFETY: this table, descriptions that are alive, and a place for the op.
        unsafe { self.make(|table, op| ascend_embedding(table, weight, ids, out, op)) }
    }

    /// `out[R,H] = x[rows[R]]`.
    pub fn gather_rows(&self, x: &TensorDesc, rows: &TensorDesc, out: &TensorDesc) -> Result<Op, AscendError> {
        // SAFETY: this table, descriptions that are alive, and a place for the op.
        unsafe { self.make(|table, op| ascend_gather_rows(table, x, rows, out, op)) }
    }

    /// `dst = src`, strided and broadcast as the views say.
    pub fn copy(&self, dst: &TensorDesc, src: &TensorDesc) -> Result<Op, AscendError> {
        // SAFETY: this table, descriptions that are alive, and a place for the op.
        unsafe { self.make(|table, op| ascend_copy(table, dst, src, op)) }
    }

    /// `x` in the type of `out`.
    pub fn cast(&self, x: &TensorDesc, out: &TensorDesc) -> Result<Op, AscendError> {
        // SAFETY: this table, descriptions that are alive, and a place for the op.
        unsafe { self.make(|table, op| ascend_cast(table, x, out, op)) }
    }

    /// Writes `key` and `value[T,heads,D]` to `slots[T]` of the caches `[blocks,block,heads,D]`. Slots are unique
    /// and in range. Needs CANN 8.3.
    pub fn kv_scatter(
        &self,
        key: &TensorDesc,
        value: &TensorDesc,
        slots: &TensorDesc,
        key_cache: &TensorDesc,
        value_cache: &TensorDesc,
    ) -> Result<Op, AscendError> {
        // SAFETY: this table, descriptions that are alive, and a place for the op.
        unsafe { self.make(|table, op| ascend_kv_scatter(table, key, value, slots, key_cache, value_cache, op)) }
    }

    /// `cache[rows,H]` at `indices[T,1]` becomes `updates[T,H]`: what there is before CANN 8.3.
    pub fn scatter_rows(
        &self,
        cache: &TensorDesc,
        indices: &TensorDesc,
        updates: &TensorDesc,
    ) -> Result<Op, AscendError> {
        // SAFETY: this table, descriptions that are alive, and a place for the op.
        unsafe { self.make(|table, op| ascend_scatter_rows(table, cache, indices, updates, op)) }
    }

    /// `y` int8 and `scale` f32 of each row of f16 or bf16 `x`: `x ≈ y · scale`.
    pub fn dynamic_quant(&self, x: &TensorDesc, y: &TensorDesc, scale: &TensorDesc) -> Result<Op, AscendError> {
        // SAFETY: this table, descriptions that are alive, and a place for the op.
        unsafe { self.make(|table, op| ascend_dynamic_quant(table, x, y, scale, op)) }
    }

    /// `out[T,N] = (x · weightᵀ) · weight_scale[N] · row_scale[T]`, x int8 `[T,K]`, weight int8 `[N,K]`.
    pub fn quant_linear(
        &self,
        x: &TensorDesc,
        weight: &TensorDesc,
        weight_scale: &TensorDesc,
        row_scale: &TensorDesc,
        bias: Option<&TensorDesc>,
        out: &TensorDesc,
    ) -> Result<Op, AscendError> {
        // SAFETY: this table, descriptions that are alive, and a place for the op.
        unsafe {
            self.make(|table, op| {
                ascend_quant_linear(table, x, weight, weight_scale, row_scale, optional(bias), out, op)
            })
        }
    }

    /// `out[T,N] = x · ((weight + offset) · scale)`. Group 0: weight `[N,K]`, scale `[N]`; else weight `[K,N]`,
    /// scale `[K/group,N]`. K and N at most 65,535; int4 may be carried as int32, eight a word.
    #[allow(clippy::too_many_arguments)]
    pub fn weight_quant_linear(
        &self,
        x: &TensorDesc,
        weight: &TensorDesc,
        scale: &TensorDesc,
        offset: Option<&TensorDesc>,
        bias: Option<&TensorDesc>,
        group: i32,
        out: &TensorDesc,
    ) -> Result<Op, AscendError> {
        // SAFETY: this table, descriptions that are alive, and a place for the op.
        unsafe {
            self.make(|table, op| {
                ascend_weight_quant_linear(table, x, weight, scale, optional(offset), optional(bias), group, out, op)
            })
        }
    }

    /// Place of the largest of each row, int32 or int64.
    pub fn argmax(&self, x: &TensorDesc, out: &TensorDesc) -> Result<Op, AscendError> {
        // SAFETY: this table, descriptions that are alive, and a place for the op.
        unsafe { self.make(|table, op| ascend_argmax(table, x, out, op)) }
    }

    /// The k largest of each row, descending, and their places (int64).
    pub fn topk(&self, x: &TensorDesc, k: i64, values: &TensorDesc, indices: &TensorDesc) -> Result<Op, AscendError> {
        // SAFETY: this table, descriptions that are alive, and a place for the op.
        unsafe { self.make(|table, op| ascend_topk(table, x, k, values, indices, op)) }
    }

    /// Soft-max of each row.
    pub fn softmax(&self, x: &TensorDesc, out: &TensorDesc) -> Result<Op, AscendError> {
        // SAFETY: this table, descriptions that are alive, and a place for the op.
        unsafe { self.make(|table, op| ascend_softmax(table, x, out, op)) }
    }

    /// Bool: whether each element is finite.
    pub fn is_finite(&self, x: &TensorDesc, out: &TensorDesc) -> Result<Op, AscendError> {
        // SAFETY: this table, descriptions that are alive, and a place for the op.
        unsafe { self.make(|table, op| ascend_is_finite(table, x, out, op)) }
    }

    /// Bool: whether all of a row are true.
    pub fn all(&self, x: &TensorDesc, out: &TensorDesc) -> Result<Op, AscendError> {
        // SAFETY: this table, descriptions that are alive, and a place for the op.
        unsafe { self.make(|table, op| ascend_all(table, x, out, op)) }
    }

    /// `weights[T,k]` and `experts` int32 `[T,k]` of `logits[T,E]`; `renorm` 1: top-k first, then soft-max; 0: the
    /// other way round.
    pub fn moe_gate(
        &self,
        logits: &TensorDesc,
        k: i64,
        is_renormed: bool,
        weights: &TensorDesc,
        experts: &TensorDesc,
    ) -> Result<Op, AscendError> {
        // SAFETY: this table, descriptions that are alive, and a place for the op.
        unsafe {
            self.make(|table, op| ascend_moe_gate(table, logits, k, i64::from(is_renormed), weights, experts, op))
        }
    }

    /// Rows of x by expert `[T·k,H]`, where each went (int32 `[T·k]`), rows of each expert (int32 `[E]`).
    pub fn moe_route(
        &self,
        x: &TensorDesc,
        experts: &TensorDesc,
        expert_count: i64,
        expanded: &TensorDesc,
        row_index: &TensorDesc,
        counts: &TensorDesc,
    ) -> Result<Op, AscendError> {
        // SAFETY: this table, descriptions that are alive, and a place for the op.
        unsafe {
            self.make(|table, op| ascend_moe_route(table, x, experts, expert_count, expanded, row_index, counts, op))
        }
    }

    /// Rows of expert e times `weight[E,K,N][e]`; counts int64 `[E]`.
    pub fn moe_linear(
        &self,
        x: &TensorDesc,
        weight: &TensorDesc,
        counts: &TensorDesc,
        out: &TensorDesc,
    ) -> Result<Op, AscendError> {
        // SAFETY: this table, descriptions that are alive, and a place for the op.
        unsafe { self.make(|table, op| ascend_moe_linear(table, x, weight, counts, out, op)) }
    }

    /// `out[T,H]`: the weighted sum of each token's rows.
    pub fn moe_combine(
        &self,
        expanded: &TensorDesc,
        row_index: &TensorDesc,
        weights: &TensorDesc,
        experts: &TensorDesc,
        out: &TensorDesc,
    ) -> Result<Op, AscendError> {
        // SAFETY: this table, descriptions that are alive, and a place for the op.
        unsafe { self.make(|table, op| ascend_moe_combine(table, expanded, row_index, weights, experts, out, op)) }
    }
}

pub(crate) fn optional(tensor: Option<&TensorDesc>) -> *const TensorDesc {
    tensor.map_or(ptr::null(), ptr::from_ref)
}
