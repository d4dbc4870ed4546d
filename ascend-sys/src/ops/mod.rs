//! The operations: each method describes its operands, runs phase 1 of the library's call and returns an [`Op`].
//!
//! Dimensions of shapes: T tokens, H hidden elements, N outputs, K inputs, D elements per head. The context must be
//! current on the calling thread. The library checks shapes and types: if it does not support them, the error is of kind
//! [`Refused`](crate::AscendErrorKind::Refused); if it lacks the operation, the error is of kind
//! [`Unsupported`](crate::AscendErrorKind::Unsupported). In both cases nothing has run.

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

/// Table of the operations that the libraries contain.
#[derive(Clone, Debug)]
pub struct Ops {
    table: Arc<Table>,
    runtime: Runtime,
}

impl Ops {
    /// Looks up all operations.
    ///
    /// A missing operation is not an error here: its method returns the error.
    pub fn load(library: &Library, runtime: &Runtime) -> Self {
        Self { table: Arc::new(Table::load(library)), runtime: runtime.clone() }
    }

    /// Returns the C functions that the libraries lack.
    pub fn missing(&self) -> &[&'static str] {
        self.table.missing()
    }

    /// Returns whether the libraries have an operation, given its C name (e.g. `aclnnMm`).
    pub fn has(&self, name: &str) -> bool {
        !self.missing().iter().any(|missing| missing.strip_suffix("GetWorkspaceSize").unwrap_or(missing) == name)
    }

    /// Creates an op by calling a function of the shim.
    ///
    /// # Safety
    /// `make` must call a function of the shim that creates an op, with the table and the output pointer that it
    /// receives.
    pub(crate) unsafe fn make(
        &self,
        make: impl FnOnce(*const c_void, *mut *mut RawOp) -> Status,
    ) -> Result<Op, AscendError> {
        // SAFETY: `make` calls a function of the shim with the given arguments, as the caller guarantees.
        unsafe { Op::make(&self.table, &self.runtime, make) }
    }

    /// Returns the number of elements of the buffer for a tiled weight `[rows, cols]`.
    ///
    /// # Errors
    /// [`AscendError`] of kind `Unsupported` if the libraries lack `aclnnCalculateMatmulWeightSizeV2`; with the code of
    /// the call if it fails.
    pub fn tiled_elements(&self, rows: usize, cols: usize, elem: ElemType) -> Result<usize, AscendError> {
        let mut elements = 0;
        // SAFETY: The table has all entries that the shim expects.
        // SAFETY: `elements` is a local variable; the call only writes to it.
        let status = unsafe {
            ascend_nz_elements(self.table.as_ptr(), rows as i64, cols as i64, elem.code(), &raw mut elements)
        };
        check(&self.runtime, status)?;
        Ok(usize::try_from(elements).unwrap_or(usize::MAX))
    }

    /// Computes `out[T,N] = x[T,K] · weight[N,K]ᵀ + bias[N]`.
    ///
    /// The weight is row-major or tiled. A tiled weight must not have a bias.
    ///
    /// # Errors
    /// [`AscendError`] of kind `Refused` if the operation does not support the shapes or types; of kind `Unsupported`
    /// if the libraries lack `aclnnAddmm` (with bias) or `aclnnMm` (without).
    pub fn linear(
        &self,
        x: &TensorDesc,
        weight: &TensorDesc,
        bias: Option<&TensorDesc>,
        out: &TensorDesc,
    ) -> Result<Op, AscendError> {
        // SAFETY: The closure passes `table` and `op` to a function of the shim that creates an op.
        // SAFETY: The tensor descriptions are borrowed, hence alive during the call.
        unsafe { self.make(|table, op| ascend_linear(table, x, weight, optional(bias), out, op)) }
    }

    /// Converts a weight `[N,K]` to the tiled layout, in place.
    ///
    /// The buffer must have [`Ops::tiled_elements`] elements. The operation is slow: run it once per weight, at load.
    ///
    /// # Errors
    /// [`AscendError`] of kind `Refused` if the operation does not support the shapes or types; of kind `Unsupported`
    /// if the libraries lack `aclnnTransMatmulWeight`.
    pub fn tile_weight(&self, weight: &TensorDesc) -> Result<Op, AscendError> {
        // SAFETY: The closure passes `table` and `op` to a function of the shim that creates an op.
        // SAFETY: The tensor descriptions are borrowed, hence alive during the call.
        unsafe { self.make(|table, op| ascend_tile_weight(table, weight, op)) }
    }

    /// Computes the RMS norm `out = x / rms(x) · gamma`.
    ///
    /// `rstd` is f32 scratch memory with one value per row; its shape is that of `x` with the normalized dimension 1.
    ///
    /// # Errors
    /// [`AscendError`] of kind `Refused` if the operation does not support the shapes or types; of kind `Unsupported`
    /// if the libraries lack `aclnnRmsNorm`.
    pub fn rms_norm(
        &self,
        x: &TensorDesc,
        gamma: &TensorDesc,
        epsilon: f64,
        out: &TensorDesc,
        rstd: &TensorDesc,
    ) -> Result<Op, AscendError> {
        // SAFETY: The closure passes `table` and `op` to a function of the shim that creates an op.
        // SAFETY: The tensor descriptions are borrowed, hence alive during the call.
        unsafe { self.make(|table, op| ascend_rms_norm(table, x, gamma, epsilon, out, rstd, op)) }
    }

    /// Computes `sum = a + b` and its RMS norm `out = sum / rms(sum) · gamma`.
    ///
    /// All tensors except the f32 scratch memory `rstd` have the same type.
    ///
    /// # Errors
    /// [`AscendError`] of kind `Refused` if the operation does not support the shapes or types; of kind `Unsupported`
    /// if the libraries lack `aclnnAddRmsNorm`.
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
        // SAFETY: The closure passes `table` and `op` to a function of the shim that creates an op.
        // SAFETY: The tensor descriptions are borrowed, hence alive during the call.
        unsafe { self.make(|table, op| ascend_add_rms_norm(table, a, b, gamma, epsilon, out, rstd, sum, op)) }
    }

    /// Rotates `x[T,heads,D]` by the rotary embedding `cos[T,1,D]` and `sin[T,1,D]`.
    ///
    /// If `is_interleaved` is true, elements 2i and 2i+1 form a pair, otherwise elements i and i+D/2. `out` must be
    /// another buffer than `x`; D is at most 1,024.
    ///
    /// # Errors
    /// [`AscendError`] of kind `Refused` if the operation does not support the shapes or types; of kind `Unsupported`
    /// if the libraries lack `aclnnRotaryPositionEmbedding`.
    pub fn rope(
        &self,
        x: &TensorDesc,
        cos: &TensorDesc,
        sin: &TensorDesc,
        is_interleaved: bool,
        out: &TensorDesc,
    ) -> Result<Op, AscendError> {
        // SAFETY: The closure passes `table` and `op` to a function of the shim that creates an op.
        // SAFETY: The tensor descriptions are borrowed, hence alive during the call.
        unsafe { self.make(|table, op| ascend_rope(table, x, cos, sin, i32::from(is_interleaved), out, op)) }
    }

    /// Computes `out[T,n] = silu(x[T,..n]) · x[T,n..]`; `x` must be contiguous.
    ///
    /// # Errors
    /// [`AscendError`] of kind `Refused` if the operation does not support the shapes or types; of kind `Unsupported`
    /// if the libraries lack `aclnnSwiGlu`.
    pub fn swiglu(&self, x: &TensorDesc, out: &TensorDesc) -> Result<Op, AscendError> {
        // SAFETY: The closure passes `table` and `op` to a function of the shim that creates an op.
        // SAFETY: The tensor descriptions are borrowed, hence alive during the call.
        unsafe { self.make(|table, op| ascend_swiglu(table, x, out, op)) }
    }

    /// Computes `out = x · sigmoid(x)`.
    ///
    /// # Errors
    /// [`AscendError`] of kind `Refused` if the operation does not support the shapes or types; of kind `Unsupported`
    /// if the libraries lack `aclnnSilu`.
    pub fn silu(&self, x: &TensorDesc, out: &TensorDesc) -> Result<Op, AscendError> {
        // SAFETY: The closure passes `table` and `op` to a function of the shim that creates an op.
        // SAFETY: The tensor descriptions are borrowed, hence alive during the call.
        unsafe { self.make(|table, op| ascend_silu(table, x, out, op)) }
    }

    /// Computes the tanh approximation of GELU.
    ///
    /// # Errors
    /// [`AscendError`] of kind `Refused` if the operation does not support the shapes or types; of kind `Unsupported`
    /// if the libraries lack `aclnnGeluV2`.
    pub fn gelu(&self, x: &TensorDesc, out: &TensorDesc) -> Result<Op, AscendError> {
        // SAFETY: The closure passes `table` and `op` to a function of the shim that creates an op.
        // SAFETY: The tensor descriptions are borrowed, hence alive during the call.
        unsafe { self.make(|table, op| ascend_gelu(table, x, out, op)) }
    }

    /// Computes `out = tanh(x)`.
    ///
    /// # Errors
    /// [`AscendError`] of kind `Refused` if the operation does not support the shapes or types; of kind `Unsupported`
    /// if the libraries lack `aclnnTanh`.
    pub fn tanh(&self, x: &TensorDesc, out: &TensorDesc) -> Result<Op, AscendError> {
        // SAFETY: The closure passes `table` and `op` to a function of the shim that creates an op.
        // SAFETY: The tensor descriptions are borrowed, hence alive during the call.
        unsafe { self.make(|table, op| ascend_tanh(table, x, out, op)) }
    }

    /// Computes `out = a + b`.
    ///
    /// # Errors
    /// [`AscendError`] of kind `Refused` if the operation does not support the shapes or types; of kind `Unsupported`
    /// if the libraries lack `aclnnAdd`.
    pub fn add(&self, a: &TensorDesc, b: &TensorDesc, out: &TensorDesc) -> Result<Op, AscendError> {
        // SAFETY: The closure passes `table` and `op` to a function of the shim that creates an op.
        // SAFETY: The tensor descriptions are borrowed, hence alive during the call.
        unsafe { self.make(|table, op| ascend_add(table, a, b, out, op)) }
    }

    /// Computes `out = a · b`, element by element.
    ///
    /// # Errors
    /// [`AscendError`] of kind `Refused` if the operation does not support the shapes or types; of kind `Unsupported`
    /// if the libraries lack `aclnnMul`.
    pub fn mul(&self, a: &TensorDesc, b: &TensorDesc, out: &TensorDesc) -> Result<Op, AscendError> {
        // SAFETY: The closure passes `table` and `op` to a function of the shim that creates an op.
        // SAFETY: The tensor descriptions are borrowed, hence alive during the call.
        unsafe { self.make(|table, op| ascend_mul(table, a, b, out, op)) }
    }

    /// Computes `out = x · factor`.
    ///
    /// # Errors
    /// [`AscendError`] of kind `Refused` if the operation does not support the shapes or types; of kind `Unsupported`
    /// if the libraries lack `aclnnMuls`.
    pub fn scale(&self, x: &TensorDesc, factor: f32, out: &TensorDesc) -> Result<Op, AscendError> {
        // SAFETY: The closure passes `table` and `op` to a function of the shim that creates an op.
        // SAFETY: The tensor descriptions are borrowed, hence alive during the call.
        unsafe { self.make(|table, op| ascend_scale(table, x, factor, out, op)) }
    }

    /// Gathers embeddings: `out[T,H] = weight[ids[T]]`.
    ///
    /// The operation does not check the ids: an id beyond the table yields undefined values.
    ///
    /// # Errors
    /// [`AscendError`] of kind `Refused` if the operation does not support the shapes or types; of kind `Unsupported`
    /// if the libraries lack `aclnnEmbedding`.
    pub fn embedding(&self, weight: &TensorDesc, ids: &TensorDesc, out: &TensorDesc) -> Result<Op, AscendError> {
        // SAFETY: The closure passes `table` and `op` to a function of the shim that creates an op.
        // SAFETY: The tensor descriptions are borrowed, hence alive during the call.
        unsafe { self.make(|table, op| ascend_embedding(table, weight, ids, out, op)) }
    }

    /// Gathers rows: `out[R,H] = x[rows[R]]`.
    ///
    /// # Errors
    /// [`AscendError`] of kind `Refused` if the operation does not support the shapes or types; of kind `Unsupported`
    /// if the libraries lack `aclnnIndexSelect`.
    pub fn gather_rows(&self, x: &TensorDesc, rows: &TensorDesc, out: &TensorDesc) -> Result<Op, AscendError> {
        // SAFETY: The closure passes `table` and `op` to a function of the shim that creates an op.
        // SAFETY: The tensor descriptions are borrowed, hence alive during the call.
        unsafe { self.make(|table, op| ascend_gather_rows(table, x, rows, out, op)) }
    }

    /// Copies `src` to `dst`; strides and broadcasting are those of the two views.
    ///
    /// # Errors
    /// [`AscendError`] of kind `Refused` if the operation does not support the shapes or types; of kind `Unsupported`
    /// if the libraries lack `aclnnInplaceCopy`.
    pub fn copy(&self, dst: &TensorDesc, src: &TensorDesc) -> Result<Op, AscendError> {
        // SAFETY: The closure passes `table` and `op` to a function of the shim that creates an op.
        // SAFETY: The tensor descriptions are borrowed, hence alive during the call.
        unsafe { self.make(|table, op| ascend_copy(table, dst, src, op)) }
    }

    /// Converts `x` to the type of `out`.
    ///
    /// # Errors
    /// [`AscendError`] of kind `Refused` if the operation does not support the shapes or types; of kind `Unsupported`
    /// if the libraries lack `aclnnCast`.
    pub fn cast(&self, x: &TensorDesc, out: &TensorDesc) -> Result<Op, AscendError> {
        // SAFETY: The closure passes `table` and `op` to a function of the shim that creates an op.
        // SAFETY: The tensor descriptions are borrowed, hence alive during the call.
        unsafe { self.make(|table, op| ascend_cast(table, x, out, op)) }
    }

    /// Writes `key` and `value`, `[T,heads,D]` each, to `slots[T]` of the caches `[blocks,block,heads,D]`.
    ///
    /// Slots must be unique and in range. Requires CANN 8.3.
    ///
    /// # Errors
    /// [`AscendError`] of kind `Refused` if the operation does not support the shapes or types; of kind `Unsupported`
    /// if the libraries lack `aclnnScatterPaKvCache`.
    pub fn kv_scatter(
        &self,
        key: &TensorDesc,
        value: &TensorDesc,
        slots: &TensorDesc,
        key_cache: &TensorDesc,
        value_cache: &TensorDesc,
    ) -> Result<Op, AscendError> {
        // SAFETY: The closure passes `table` and `op` to a function of the shim that creates an op.
        // SAFETY: The tensor descriptions are borrowed, hence alive during the call.
        unsafe { self.make(|table, op| ascend_kv_scatter(table, key, value, slots, key_cache, value_cache, op)) }
    }

    /// Writes `updates[T,H]` to the rows `indices[T,1]` of `cache[rows,H]`.
    ///
    /// Before CANN 8.3 this operation replaces [`Ops::kv_scatter`].
    ///
    /// # Errors
    /// [`AscendError`] of kind `Refused` if the operation does not support the shapes or types; of kind `Unsupported`
    /// if the libraries lack `aclnnScatterNdUpdate`.
    pub fn scatter_rows(
        &self,
        cache: &TensorDesc,
        indices: &TensorDesc,
        updates: &TensorDesc,
    ) -> Result<Op, AscendError> {
        // SAFETY: The closure passes `table` and `op` to a function of the shim that creates an op.
        // SAFETY: The tensor descriptions are borrowed, hence alive during the call.
        unsafe { self.make(|table, op| ascend_scatter_rows(table, cache, indices, updates, op)) }
    }

    /// Quantizes each row of `x` (f16 or bf16) to `y` (int8) and `scale` (f32), with `x ≈ y · scale`.
    ///
    /// # Errors
    /// [`AscendError`] of kind `Refused` if the operation does not support the shapes or types; of kind `Unsupported`
    /// if the libraries lack `aclnnDynamicQuant`.
    pub fn dynamic_quant(&self, x: &TensorDesc, y: &TensorDesc, scale: &TensorDesc) -> Result<Op, AscendError> {
        // SAFETY: The closure passes `table` and `op` to a function of the shim that creates an op.
        // SAFETY: The tensor descriptions are borrowed, hence alive during the call.
        unsafe { self.make(|table, op| ascend_dynamic_quant(table, x, y, scale, op)) }
    }

    /// Computes `out[T,N] = (x · weightᵀ) · weight_scale[N] · row_scale[T] + bias`.
    ///
    /// `x` is int8 `[T,K]`, and `weight` is int8 `[N,K]`.
    ///
    /// # Errors
    /// [`AscendError`] of kind `Refused` if the operation does not support the shapes or types; of kind `Unsupported`
    /// if the libraries lack `aclnnQuantMatmulV4`.
    pub fn quant_linear(
        &self,
        x: &TensorDesc,
        weight: &TensorDesc,
        weight_scale: &TensorDesc,
        row_scale: &TensorDesc,
        bias: Option<&TensorDesc>,
        out: &TensorDesc,
    ) -> Result<Op, AscendError> {
        // SAFETY: The closure passes `table` and `op` to a function of the shim that creates an op.
        // SAFETY: The tensor descriptions are borrowed, hence alive during the call.
        unsafe {
            self.make(|table, op| {
                ascend_quant_linear(table, x, weight, weight_scale, row_scale, optional(bias), out, op)
            })
        }
    }

    /// Computes `out[T,N] = x · ((weight + offset) · scale) + bias` with a quantized weight.
    ///
    /// If `group` is 0, the shapes are weight `[N,K]` and scale `[N]`; otherwise weight `[K,N]` and scale
    /// `[K/group,N]`. K and N are at most 65,535. An int4 weight may be passed as int32, with eight values per word.
    ///
    /// # Errors
    /// [`AscendError`] of kind `Refused` if the operation does not support the shapes or types; of kind `Unsupported`
    /// if the libraries lack `aclnnWeightQuantBatchMatmulV2`.
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
        // SAFETY: The closure passes `table` and `op` to a function of the shim that creates an op.
        // SAFETY: The tensor descriptions are borrowed, hence alive during the call.
        unsafe {
            self.make(|table, op| {
                ascend_weight_quant_linear(table, x, weight, scale, optional(offset), optional(bias), group, out, op)
            })
        }
    }

    /// Computes the argmax of each row, as int32 or int64.
    ///
    /// # Errors
    /// [`AscendError`] of kind `Refused` if the operation does not support the shapes or types; of kind `Unsupported`
    /// if the libraries lack `aclnnArgMax`.
    pub fn argmax(&self, x: &TensorDesc, out: &TensorDesc) -> Result<Op, AscendError> {
        // SAFETY: The closure passes `table` and `op` to a function of the shim that creates an op.
        // SAFETY: The tensor descriptions are borrowed, hence alive during the call.
        unsafe { self.make(|table, op| ascend_argmax(table, x, out, op)) }
    }

    /// Computes the `k` largest values of each row, in descending order, and their indices (int64).
    ///
    /// # Errors
    /// [`AscendError`] of kind `Refused` if the operation does not support the shapes or types; of kind `Unsupported`
    /// if the libraries lack `aclnnTopk`.
    pub fn topk(&self, x: &TensorDesc, k: i64, values: &TensorDesc, indices: &TensorDesc) -> Result<Op, AscendError> {
        // SAFETY: The closure passes `table` and `op` to a function of the shim that creates an op.
        // SAFETY: The tensor descriptions are borrowed, hence alive during the call.
        unsafe { self.make(|table, op| ascend_topk(table, x, k, values, indices, op)) }
    }

    /// Computes the softmax of each row.
    ///
    /// # Errors
    /// [`AscendError`] of kind `Refused` if the operation does not support the shapes or types; of kind `Unsupported`
    /// if the libraries lack `aclnnSoftmax`.
    pub fn softmax(&self, x: &TensorDesc, out: &TensorDesc) -> Result<Op, AscendError> {
        // SAFETY: The closure passes `table` and `op` to a function of the shim that creates an op.
        // SAFETY: The tensor descriptions are borrowed, hence alive during the call.
        unsafe { self.make(|table, op| ascend_softmax(table, x, out, op)) }
    }

    /// Computes for each element whether it is finite (bool).
    ///
    /// # Errors
    /// [`AscendError`] of kind `Refused` if the operation does not support the shapes or types; of kind `Unsupported`
    /// if the libraries lack `aclnnIsFinite`.
    pub fn is_finite(&self, x: &TensorDesc, out: &TensorDesc) -> Result<Op, AscendError> {
        // SAFETY: The closure passes `table` and `op` to a function of the shim that creates an op.
        // SAFETY: The tensor descriptions are borrowed, hence alive during the call.
        unsafe { self.make(|table, op| ascend_is_finite(table, x, out, op)) }
    }

    /// Computes for each row whether all its elements are true (bool).
    ///
    /// # Errors
    /// [`AscendError`] of kind `Refused` if the operation does not support the shapes or types; of kind `Unsupported`
    /// if the libraries lack `aclnnAll`.
    pub fn all(&self, x: &TensorDesc, out: &TensorDesc) -> Result<Op, AscendError> {
        // SAFETY: The closure passes `table` and `op` to a function of the shim that creates an op.
        // SAFETY: The tensor descriptions are borrowed, hence alive during the call.
        unsafe { self.make(|table, op| ascend_all(table, x, out, op)) }
    }

    /// Selects the experts of each token: `weights[T,k]` and `experts[T,k]` (int32) from `logits[T,E]`.
    ///
    /// If `is_renormed` is true, the top k are selected before the softmax, so that the weights add up to 1; otherwise
    /// after the softmax.
    ///
    /// # Errors
    /// [`AscendError`] of kind `Refused` if the operation does not support the shapes or types; of kind `Unsupported`
    /// if the libraries lack `aclnnMoeGatingTopKSoftmaxV2`.
    pub fn moe_gate(
        &self,
        logits: &TensorDesc,
        k: i64,
        is_renormed: bool,
        weights: &TensorDesc,
        experts: &TensorDesc,
    ) -> Result<Op, AscendError> {
        // SAFETY: The closure passes `table` and `op` to a function of the shim that creates an op.
        // SAFETY: The tensor descriptions are borrowed, hence alive during the call.
        unsafe {
            self.make(|table, op| ascend_moe_gate(table, logits, k, i64::from(is_renormed), weights, experts, op))
        }
    }

    /// Sorts the rows of `x` by expert.
    ///
    /// Outputs: `expanded[T·k,H]`, the sorted rows; `row_index[T·k]` (int32), the index of each row among the sorted
    /// ones; `counts[E]` (int32), the number of rows of each expert.
    ///
    /// # Errors
    /// [`AscendError`] of kind `Refused` if the operation does not support the shapes or types; of kind `Unsupported`
    /// if the libraries lack `aclnnMoeInitRoutingV2`.
    pub fn moe_route(
        &self,
        x: &TensorDesc,
        experts: &TensorDesc,
        expert_count: i64,
        expanded: &TensorDesc,
        row_index: &TensorDesc,
        counts: &TensorDesc,
    ) -> Result<Op, AscendError> {
        // SAFETY: The closure passes `table` and `op` to a function of the shim that creates an op.
        // SAFETY: The tensor descriptions are borrowed, hence alive during the call.
        unsafe {
            self.make(|table, op| ascend_moe_route(table, x, experts, expert_count, expanded, row_index, counts, op))
        }
    }

    /// Multiplies the rows of each expert e by `weight[E,K,N][e]`; `counts[E]` is int64.
    ///
    /// # Errors
    /// [`AscendError`] of kind `Refused` if the operation does not support the shapes or types; of kind `Unsupported`
    /// if the libraries lack `aclnnGroupedMatmulV4`.
    pub fn moe_linear(
        &self,
        x: &TensorDesc,
        weight: &TensorDesc,
        counts: &TensorDesc,
        out: &TensorDesc,
    ) -> Result<Op, AscendError> {
        // SAFETY: The closure passes `table` and `op` to a function of the shim that creates an op.
        // SAFETY: The tensor descriptions are borrowed, hence alive during the call.
        unsafe { self.make(|table, op| ascend_moe_linear(table, x, weight, counts, out, op)) }
    }

    /// Computes `out[T,H]`: for each token, the weighted sum of the rows of its experts.
    ///
    /// # Errors
    /// [`AscendError`] of kind `Refused` if the operation does not support the shapes or types; of kind `Unsupported`
    /// if the libraries lack `aclnnMoeFinalizeRoutingV2`.
    pub fn moe_combine(
        &self,
        expanded: &TensorDesc,
        row_index: &TensorDesc,
        weights: &TensorDesc,
        experts: &TensorDesc,
        out: &TensorDesc,
    ) -> Result<Op, AscendError> {
        // SAFETY: The closure passes `table` and `op` to a function of the shim that creates an op.
        // SAFETY: The tensor descriptions are borrowed, hence alive during the call.
        unsafe { self.make(|table, op| ascend_moe_combine(table, expanded, row_index, weights, experts, out, op)) }
    }
}

pub(crate) fn optional(tensor: Option<&TensorDesc>) -> *const TensorDesc {
    tensor.map_or(ptr::null(), ptr::from_ref)
}
