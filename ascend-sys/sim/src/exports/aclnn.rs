//! `libopapi`: both phases of each operation.

#![allow(unsafe_code, non_snake_case)]

use crate::codes::{Done, OP_INVALID, rule};
use crate::executor::{self, Prepared};
use crate::ffi::{Out, Text, plain};
use crate::ops::{attention, elementwise, index, matmul, moe, norm, quant, reduce, rope};
use crate::registry::Handle;
use crate::tensor::{Elem, absent, ints, optional, scalar, single, tensor};

/// `_Bool` as passed over the C interface.
type Bool = u8;

macro_rules! op {
    ($query:ident, $launch:ident, ($($arg:ident: $ty:ty),* $(,)?), $prepare:expr) => {
        #[unsafe(no_mangle)]
        pub extern "C" fn $query($($arg: $ty,)* workspace_bytes: Out<u64>, executor: Out<Handle>) -> i32 {
            let prepare = || -> Done<Prepared> { $prepare };
            executor::query(stringify!($query), stringify!($launch), workspace_bytes, executor, prepare)
        }

        #[unsafe(no_mangle)]
        pub extern "C" fn $launch(workspace: usize, workspace_bytes: u64, executor: Handle, stream: Handle) -> i32 {
            executor::launch(stringify!($launch), workspace, workspace_bytes, executor, stream)
        }
    };
}

op!(aclnnEmbeddingGetWorkspaceSize, aclnnEmbedding, (weight: Handle, indices: Handle, out: Handle),
    index::embedding(&tensor(weight, "weight")?, &tensor(indices, "indices")?, &tensor(out, "out")?));

op!(aclnnIndexSelectGetWorkspaceSize, aclnnIndexSelect, (x: Handle, dim: i64, index: Handle, out: Handle),
    index::index_select(&tensor(x, "self")?, dim, &tensor(index, "index")?, &tensor(out, "out")?));

op!(aclnnRmsNormGetWorkspaceSize, aclnnRmsNorm,
    (x: Handle, gamma: Handle, epsilon: f64, y: Handle, rstd: Handle),
    norm::rms_norm(&tensor(x, "x")?, &tensor(gamma, "gamma")?, epsilon, &tensor(y, "y")?, &tensor(rstd, "rstd")?));

op!(aclnnAddRmsNormGetWorkspaceSize, aclnnAddRmsNorm,
    (x1: Handle, x2: Handle, gamma: Handle, epsilon: f64, y: Handle, rstd: Handle, sum: Handle),
    norm::add_rms_norm(&tensor(x1, "x1")?, &tensor(x2, "x2")?, &tensor(gamma, "gamma")?, epsilon,
        &tensor(y, "y")?, &tensor(rstd, "rstd")?, &tensor(sum, "x")?));

op!(aclnnMmGetWorkspaceSize, aclnnMm, (x: Handle, weight: Handle, out: Handle, cube_math_type: i8),
    matmul::mm(&tensor(x, "self")?, &tensor(weight, "mat2")?, None, &tensor(out, "out")?, cube_math_type));

op!(aclnnAddmmGetWorkspaceSize, aclnnAddmm,
(bias: Handle, x: Handle, weight: Handle, beta: Handle, alpha: Handle, out: Handle, cube_math_type: i8), {
    let factors = (scalar(beta, "beta")?, scalar(alpha, "alpha")?);
    rule!(factors == (1.0, 1.0), OP_INVALID, "beta and alpha are {factors:?}; 1 is supported here");
    let bias = tensor(bias, "self")?;
    matmul::mm(&tensor(x, "mat1")?, &tensor(weight, "mat2")?, Some(&bias), &tensor(out, "out")?, cube_math_type)
});

op!(aclnnMatmulWeightNzGetWorkspaceSize, aclnnMatmulWeightNz,
    (x: Handle, weight: Handle, out: Handle, cube_math_type: i8),
    matmul::mm_tiled(&tensor(x, "self")?, &tensor(weight, "mat2")?, &tensor(out, "out")?, cube_math_type));

op!(aclnnTransMatmulWeightGetWorkspaceSize, aclnnTransMatmulWeight, (weight: Handle),
    matmul::tile(&tensor(weight, "mmWeightRef")?));

op!(aclnnRotaryPositionEmbeddingGetWorkspaceSize, aclnnRotaryPositionEmbedding,
    (x: Handle, cos: Handle, sin: Handle, mode: i64, out: Handle),
    rope::rotate(&tensor(x, "x")?, &tensor(cos, "cos")?, &tensor(sin, "sin")?, mode, &tensor(out, "out")?));

op!(aclnnScatterPaKvCacheGetWorkspaceSize, aclnnScatterPaKvCache,
(key: Handle, key_cache: Handle, slots: Handle, value: Handle, value_cache: Handle, compress_lens: Handle,
 compress_offsets: Handle, seq_lens: Handle, cache_mode: Text, scatter_mode: Text, strides: Handle,
 offsets: Handle), {
    for (handle, what) in [(compress_lens, "compressLens"), (compress_offsets, "compressSeqOffset"),
                           (seq_lens, "seqLens"), (strides, "strides"), (offsets, "offsets")] {
        absent(handle, what)?;
    }
    index::scatter_pa(&tensor(key, "key")?, &tensor(key_cache, "keyCacheRef")?, &tensor(slots, "slotMapping")?,
        &tensor(value, "value")?, &tensor(value_cache, "valueCacheRef")?, cache_mode.get().as_deref(),
        scatter_mode.get().as_deref())
});

op!(aclnnScatterNdUpdateGetWorkspaceSize, aclnnScatterNdUpdate, (cache: Handle, indices: Handle, updates: Handle),
    index::scatter_nd(&tensor(cache, "varRef")?, &tensor(indices, "indices")?, &tensor(updates, "updates")?));

macro_rules! attention_op {
    ($query_fn:ident, $launch:ident, ($($rope:ident),*)) => {
        op!($query_fn, $launch,
            (query: Handle, key: Handle, value: Handle, pse_shift: Handle, mask: Handle, query_lens: Handle,
             kv_lens: Handle, deq_scale1: Handle, quant_scale1: Handle, deq_scale2: Handle, quant_scale2: Handle,
             quant_offset2: Handle, antiquant_scale: Handle, antiquant_offset: Handle, block_table: Handle,
             query_padding: Handle, kv_padding: Handle, key_antiquant_scale: Handle, key_antiquant_offset: Handle,
             value_antiquant_scale: Handle, value_antiquant_offset: Handle, key_prefix: Handle, value_prefix: Handle,
             prefix_len: Handle, $($rope: Handle,)* heads: i64, scale: f64, pre_tokens: i64, next_tokens: i64,
             layout: Text, kv_heads: i64, sparse_mode: i64, inner_precise: i64, block_size: i64, antiquant_mode: i64,
             softmax_lse_flag: Bool, key_antiquant_mode: i64, value_antiquant_mode: i64, out: Handle,
             softmax_lse: Handle), {
                for (handle, what) in [
                    (pse_shift, "pseShift"), (deq_scale1, "deqScale1"), (quant_scale1, "quantScale1"),
                    (deq_scale2, "deqScale2"), (quant_scale2, "quantScale2"), (quant_offset2, "quantOffset2"),
                    (antiquant_scale, "antiquantScale"), (antiquant_offset, "antiquantOffset"),
                    (query_padding, "queryPaddingSize"), (kv_padding, "kvPaddingSize"),
                    (key_antiquant_scale, "keyAntiquantScale"), (key_antiquant_offset, "keyAntiquantOffset"),
                    (value_antiquant_scale, "valueAntiquantScale"), (value_antiquant_offset, "valueAntiquantOffset"),
                    (key_prefix, "keySharedPrefix"), (value_prefix, "valueSharedPrefix"),
                    (prefix_len, "actualSharedPrefixLen"), $(($rope, stringify!($rope)),)* (softmax_lse, "softmaxLse"),
                ] {
                    absent(handle, what)?;
                }
                let modes = (antiquant_mode, key_antiquant_mode, value_antiquant_mode, softmax_lse_flag);
                rule!(modes == (0, 0, 0, 0), OP_INVALID, "antiquant modes and softmaxLseFlag must be 0 here: {modes:?}");
                attention::attention(attention::Call {
                    query: tensor(query, "query")?,
                    key: single(key, "key")?,
                    value: single(value, "value")?,
                    mask: optional(mask, "attenMask")?,
                    query_lens: ints(query_lens)?,
                    kv_lens: ints(kv_lens)?,
                    table: optional(block_table, "blockTable")?,
                    heads,
                    kv_heads,
                    scale,
                    pre_tokens,
                    next_tokens,
                    layout: layout.get().unwrap_or_default(),
                    sparse_mode,
                    inner_precise,
                    block_size,
                    out: tensor(out, "attentionOut")?,
                })
            });
    };
}

attention_op!(aclnnFusedInferAttentionScoreV2GetWorkspaceSize, aclnnFusedInferAttentionScoreV2, ());
attention_op!(
    aclnnFusedInferAttentionScoreV3GetWorkspaceSize,
    aclnnFusedInferAttentionScoreV3,
    (query_rope, key_rope, key_rope_antiquant_scale)
);

op!(aclnnSwiGluGetWorkspaceSize, aclnnSwiGlu, (x: Handle, dim: i64, out: Handle),
    elementwise::swiglu(&tensor(x, "x")?, dim, &tensor(out, "out")?));

op!(aclnnSiluGetWorkspaceSize, aclnnSilu, (x: Handle, out: Handle),
    elementwise::map(&tensor(x, "self")?, &tensor(out, "out")?, elementwise::silu));

op!(aclnnGeluV2GetWorkspaceSize, aclnnGeluV2, (x: Handle, approximate: i64, y: Handle), {
    rule!(approximate == 1, OP_INVALID, "approximate {approximate}; 1 (tanh) is supported here");
    elementwise::map(&tensor(x, "x")?, &tensor(y, "y")?, elementwise::gelu_tanh)
});

op!(aclnnTanhGetWorkspaceSize, aclnnTanh, (x: Handle, out: Handle),
    elementwise::map(&tensor(x, "self")?, &tensor(out, "out")?, f32::tanh));

op!(aclnnAddGetWorkspaceSize, aclnnAdd, (a: Handle, b: Handle, alpha: Handle, out: Handle), {
    let given = scalar(alpha, "alpha")?;
    #[allow(clippy::cast_possible_truncation)]
    let (alpha, times) = (given as f32, given as i64);
    elementwise::zip(&tensor(a, "self")?, &tensor(b, "other")?, &tensor(out, "out")?, move |a, b| a + alpha * b,
        move |a, b| a + times * b)
});

op!(aclnnMulGetWorkspaceSize, aclnnMul, (a: Handle, b: Handle, out: Handle),
    elementwise::zip(&tensor(a, "self")?, &tensor(b, "other")?, &tensor(out, "out")?, |a, b| a * b, |a, b| a * b));

op!(aclnnMulsGetWorkspaceSize, aclnnMuls, (x: Handle, other: Handle, out: Handle), {
    #[allow(clippy::cast_possible_truncation)]
    let factor = scalar(other, "other")? as f32;
    elementwise::map(&tensor(x, "self")?, &tensor(out, "out")?, move |v| v * factor)
});

op!(aclnnCastGetWorkspaceSize, aclnnCast, (x: Handle, dtype: i32, out: Handle),
    elementwise::cast(&tensor(x, "self")?, dtype, &tensor(out, "out")?));

op!(aclnnInplaceCopyGetWorkspaceSize, aclnnInplaceCopy, (dst: Handle, src: Handle),
    elementwise::copy(&tensor(dst, "selfRef")?, &tensor(src, "src")?));

op!(aclnnArgMaxGetWorkspaceSize, aclnnArgMax, (x: Handle, dim: i64, keepdim: Bool, out: Handle),
    reduce::arg_max(&tensor(x, "self")?, dim, keepdim != 0, &tensor(out, "out")?));

op!(aclnnTopkGetWorkspaceSize, aclnnTopk,
    (x: Handle, k: i64, dim: i64, largest: Bool, sorted: Bool, values: Handle, indices: Handle),
    reduce::top_k(&tensor(x, "self")?, k, dim, largest != 0, sorted != 0, &tensor(values, "valuesOut")?,
        &tensor(indices, "indicesOut")?));

op!(aclnnSoftmaxGetWorkspaceSize, aclnnSoftmax, (x: Handle, dim: i64, out: Handle),
    reduce::softmax(&tensor(x, "self")?, dim, &tensor(out, "out")?));

op!(aclnnIsFiniteGetWorkspaceSize, aclnnIsFinite, (x: Handle, out: Handle),
    elementwise::is_finite(&tensor(x, "self")?, &tensor(out, "out")?));

op!(aclnnAllGetWorkspaceSize, aclnnAll, (x: Handle, dim: Handle, keepdim: Bool, out: Handle), {
    let dims = ints(dim)?.unwrap_or_default();
    reduce::all(&tensor(x, "self")?, &dims, keepdim != 0, &tensor(out, "out")?)
});

op!(aclnnDynamicQuantGetWorkspaceSize, aclnnDynamicQuant, (x: Handle, smooth: Handle, y: Handle, scale: Handle), {
    absent(smooth, "smoothScales")?;
    quant::dynamic_quant(&tensor(x, "x")?, &tensor(y, "yOut")?, &tensor(scale, "scaleOut")?)
});

op!(aclnnQuantMatmulV4GetWorkspaceSize, aclnnQuantMatmulV4,
(x1: Handle, x2: Handle, scale: Handle, offset: Handle, row_scale: Handle, bias: Handle, transpose_x1: Bool,
 transpose_x2: Bool, out: Handle), {
    absent(offset, "offset")?;
    rule!(transpose_x1 == 0, OP_INVALID, "transposeX1 is not supported here");
    quant::quant_matmul(&tensor(x1, "x1")?, &tensor(x2, "x2")?, &tensor(scale, "scale")?,
        optional(row_scale, "pertokenScale")?.as_ref(), optional(bias, "bias")?.as_ref(), transpose_x2 != 0,
        &tensor(out, "out")?)
});

op!(aclnnWeightQuantBatchMatmulV2GetWorkspaceSize, aclnnWeightQuantBatchMatmulV2,
(x: Handle, weight: Handle, scale: Handle, offset: Handle, quant_scale: Handle, quant_offset: Handle, bias: Handle,
 group: i32, y: Handle), {
    absent(quant_scale, "quantScale")?;
    absent(quant_offset, "quantOffset")?;
    quant::weight_quant_matmul(&tensor(x, "x")?, &tensor(weight, "weight")?, &tensor(scale, "antiquantScale")?,
        optional(offset, "antiquantOffset")?.as_ref(), optional(bias, "bias")?.as_ref(), group, &tensor(y, "y")?)
});

op!(aclnnMoeGatingTopKSoftmaxV2GetWorkspaceSize, aclnnMoeGatingTopKSoftmaxV2,
(x: Handle, finished: Handle, k: i64, renorm: i64, gives_softmax: Bool, y: Handle, experts: Handle,
 softmax: Handle), {
    absent(finished, "finished")?;
    absent(softmax, "softmaxResultOut")?;
    rule!(gives_softmax == 0, OP_INVALID, "outputSoftmaxResultFlag is not supported here");
    moe::gate(&tensor(x, "x")?, k, renorm, &tensor(y, "yOut")?, &tensor(experts, "expertIdxOut")?)
});

op!(aclnnMoeInitRoutingV2GetWorkspaceSize, aclnnMoeInitRoutingV2,
(x: Handle, experts: Handle, _active: i64, _capacity: i64, expert_count: i64, drop_pad_mode: i64, count_flag: i64,
 before_capacity: Bool, expanded: Handle, row_index: Handle, counts: Handle, before: Handle), {
    absent(before, "expertTokensBeforeCapacityOut")?;
    rule!(before_capacity == 0, OP_INVALID, "expertTokensBeforeCapacityFlag is not supported here");
    moe::route(&tensor(x, "x")?, &tensor(experts, "expertIdx")?, expert_count, drop_pad_mode, count_flag,
        &tensor(expanded, "expandedXOut")?, &tensor(row_index, "expandedRowIdxOut")?,
        &tensor(counts, "expertTokensCountOrCumsumOut")?)
});

op!(aclnnGroupedMatmulV4GetWorkspaceSize, aclnnGroupedMatmulV4,
(x: Handle, weight: Handle, bias: Handle, scale: Handle, offset: Handle, antiquant_scale: Handle,
 antiquant_offset: Handle, row_scale: Handle, groups: Handle, act_input: Handle, act_scale: Handle,
 act_offset: Handle, split_item: i64, group_type: i64, group_list_type: i64, act_type: i64, out: Handle,
 act_out: Handle, dyn_scale_out: Handle), {
    for (handle, what) in [(bias, "bias"), (scale, "scale"), (offset, "offset"),
        (antiquant_scale, "antiquantScale"), (antiquant_offset, "antiquantOffset"), (row_scale, "perTokenScale"),
        (act_input, "activationInput"), (act_scale, "activationQuantScale"),
        (act_offset, "activationQuantOffset"), (act_out, "activationFeatureOut"),
        (dyn_scale_out, "dynQuantScaleOut")] {
        absent(handle, what)?;
    }
    moe::grouped(&single(x, "x")?, &single(weight, "weight")?, &tensor(groups, "groupList")?, split_item, group_type,
        group_list_type, act_type, &single(out, "out")?)
});

op!(aclnnMoeFinalizeRoutingV2GetWorkspaceSize, aclnnMoeFinalizeRoutingV2,
(expanded: Handle, row_index: Handle, x1: Handle, x2: Handle, bias: Handle, scales: Handle, experts: Handle,
 drop_pad_mode: i64, out: Handle), {
    for (handle, what) in [(x1, "x1"), (x2, "x2"), (bias, "bias")] {
        absent(handle, what)?;
    }
    moe::combine(&tensor(expanded, "expandedX")?, &tensor(row_index, "expandedRowIdx")?, &tensor(scales, "scales")?,
        &tensor(experts, "expertIdx")?, drop_pad_mode, &tensor(out, "out")?)
});

#[unsafe(no_mangle)]
pub extern "C" fn aclnnCalculateMatmulWeightSizeV2(shape: Handle, dtype: i32, elements: Out<u64>) -> i32 {
    plain("aclnnCalculateMatmulWeightSizeV2", || {
        let shape = ints(shape)?.unwrap_or_default();
        let sides: Vec<usize> = shape.iter().filter_map(|&side| usize::try_from(side).ok()).collect();
        let (&[rows, cols], Some(elem)) = (&sides[..], Elem::from_code(dtype)) else {
            crate::codes::fail!(OP_INVALID, "shape {shape:?}, dtype {dtype}");
        };
        elements.put(matmul::tiled_elements(rows, cols, elem)? as u64)
    })
}
