/* The kernel shim: one flat function per operation, over the two-phase calls of aclnn.
 *
 * Such a function describes its operands, runs phase 1 and returns an op: an executor and all objects that it refers to.
 * ascend_launch_op runs phase 2. An op can be launched once; after ascend_make_repeatable it can be launched any number of
 * times, with other addresses. All functions require a current context on the thread and keep no global state. Each error
 * contains the name of the failed call. */
#ifndef ASCEND_SHIM_H
#define ASCEND_SHIM_H

#include "functions.h"

enum {
    ASCEND_MAX_RANK = 8,
    /* Codes of the shim itself; codes of the libraries are positive. */
    ASCEND_NO_SYMBOL = -1,
    ASCEND_NO_DESCRIPTOR = -2,
    ASCEND_MISUSE = -3,
};

/* Tensor in device memory. Strides and offset count elements. The storage shape differs from the view's shape if the
 * view is a part or a transposition of the storage, or if the format is tiled. */
typedef struct {
    void *data;
    int32_t dtype;
    int32_t format;
    uint32_t rank;
    uint32_t storage_rank;
    int64_t dims[ASCEND_MAX_RANK];
    int64_t strides[ASCEND_MAX_RANK];
    int64_t storage_dims[ASCEND_MAX_RANK];
    int64_t offset;
} ascend_tensor;

/* Result of a call: 0 or an error code, and the name of the function that returned it. */
typedef struct {
    int32_t code;
    const char *call;
} ascend_status;

/* Functions that the loader has resolved; null for absent ones. */
struct ascend_table {
#define FIELD(result, name, parameters) result(*name) parameters;
    ASCEND_BASE_FUNCTIONS(FIELD)
    ASCEND_QUERIES(FIELD)
#undef FIELD
#define FIELD(name) ascend_launch name;
    ASCEND_LAUNCHES(FIELD)
#undef FIELD
};

typedef struct ascend_op ascend_op;

/* Size of the table, name of entry i (null beyond the last one), and setter of its address: the caller fills the
 * table entry by entry. */
size_t ascend_table_bytes(void);
const char *ascend_symbol_name(size_t i);
void ascend_table_set(struct ascend_table *table, size_t i, void *address);

/* Operations on an op. Operands are numbered in the order of the tensor arguments of the function that created the
 * op, absent ones included. */
uint64_t ascend_workspace_bytes(const ascend_op *op);
ascend_status ascend_make_repeatable(ascend_op *op);
ascend_status ascend_rebind(ascend_op *op, uint32_t operand, void *data);
ascend_status ascend_launch_op(ascend_op *op, void *workspace, uint64_t workspace_bytes, aclrtStream stream);
void ascend_free_op(ascend_op *op);

/* ---- Dense layers. T tokens, H hidden elements, N outputs, K inputs, D elements per head. ---- */

/* out[T,N] = x[T,K] . weight[N,K]^T (+ bias[N]). The format of the weight is ND (row-major) or NZ (tiled). */
ascend_status ascend_linear(const struct ascend_table *t, const ascend_tensor *x, const ascend_tensor *weight,
                            const ascend_tensor *bias, const ascend_tensor *out, ascend_op **op);
/* Converts weight[N,K] to the tiled layout, in place; its buffer must have ascend_nz_elements elements. Slow: run it
 * once per weight, at load. */
ascend_status ascend_tile_weight(const struct ascend_table *t, const ascend_tensor *weight, ascend_op **op);
ascend_status ascend_nz_elements(const struct ascend_table *t, int64_t rows, int64_t cols, int32_t dtype,
                                 uint64_t *elements);
/* out = x / rms(x) * gamma; rstd is f32 with one value per row: the shape of x with the normalized dimensions 1. */
ascend_status ascend_rms_norm(const struct ascend_table *t, const ascend_tensor *x, const ascend_tensor *gamma,
                              double epsilon, const ascend_tensor *out, const ascend_tensor *rstd, ascend_op **op);
/* sum = a + b; out = sum / rms(sum) * gamma. */
ascend_status ascend_add_rms_norm(const struct ascend_table *t, const ascend_tensor *a, const ascend_tensor *b,
                                  const ascend_tensor *gamma, double epsilon, const ascend_tensor *out,
                                  const ascend_tensor *rstd, const ascend_tensor *sum, ascend_op **op);
/* Rotates x[T,heads,D] by cos and sin[T,1,D]; out must be another buffer. If interleaved is not 0, elements 2i and
 * 2i+1 form a pair, otherwise elements i and i+D/2. */
ascend_status ascend_rope(const struct ascend_table *t, const ascend_tensor *x, const ascend_tensor *cos,
                          const ascend_tensor *sin, int32_t interleaved, const ascend_tensor *out, ascend_op **op);
/* out[T,n] = silu(x[T,:n]) * x[T,n:]; x must be contiguous. */
ascend_status ascend_swiglu(const struct ascend_table *t, const ascend_tensor *x, const ascend_tensor *out, ascend_op **op);
ascend_status ascend_silu(const struct ascend_table *t, const ascend_tensor *x, const ascend_tensor *out, ascend_op **op);
/* The tanh approximation of GELU. */
ascend_status ascend_gelu(const struct ascend_table *t, const ascend_tensor *x, const ascend_tensor *out, ascend_op **op);
ascend_status ascend_tanh(const struct ascend_table *t, const ascend_tensor *x, const ascend_tensor *out, ascend_op **op);
ascend_status ascend_add(const struct ascend_table *t, const ascend_tensor *a, const ascend_tensor *b,
                         const ascend_tensor *out, ascend_op **op);
ascend_status ascend_mul(const struct ascend_table *t, const ascend_tensor *a, const ascend_tensor *b,
                         const ascend_tensor *out, ascend_op **op);
/* out = x * factor. */
ascend_status ascend_scale(const struct ascend_table *t, const ascend_tensor *x, float factor, const ascend_tensor *out,
                           ascend_op **op);
/* out[T,H] = table[ids[T]]. The operation does not check the ids. */
ascend_status ascend_embedding(const struct ascend_table *t, const ascend_tensor *table, const ascend_tensor *ids,
                               const ascend_tensor *out, ascend_op **op);
/* out[R,...] = x[rows[R],...]. */
ascend_status ascend_gather_rows(const struct ascend_table *t, const ascend_tensor *x, const ascend_tensor *rows,
                                 const ascend_tensor *out, ascend_op **op);
/* dst = src; strides and broadcasting are those of the views. */
ascend_status ascend_copy(const struct ascend_table *t, const ascend_tensor *dst, const ascend_tensor *src, ascend_op **op);
/* Converts x to the type of out. */
ascend_status ascend_cast(const struct ascend_table *t, const ascend_tensor *x, const ascend_tensor *out, ascend_op **op);

/* ---- Keys, values, attention. ---- */

/* Writes key and value[T,heads,D] to slots[T] of key_cache and value_cache[blocks,block,heads,D]. Slots must be
 * unique and in range. Requires CANN 8.3; before that, use ascend_scatter_rows for each cache. */
ascend_status ascend_kv_scatter(const struct ascend_table *t, const ascend_tensor *key, const ascend_tensor *value,
                                const ascend_tensor *slots, const ascend_tensor *key_cache,
                                const ascend_tensor *value_cache, ascend_op **op);
/* Writes updates[T,H] to the rows indices[T,1] of cache[rows,H]. */
ascend_status ascend_scatter_rows(const struct ascend_table *t, const ascend_tensor *cache, const ascend_tensor *indices,
                                  const ascend_tensor *updates, ascend_op **op);

typedef struct {
    /* "TND", "BSND" or "BSH". */
    const char *layout;
    /* TND: the cumulative query lengths, one per sequence, its own included; otherwise null. */
    const int64_t *query_ends;
    /* Number of keys of each sequence, at least 1. */
    const int64_t *kv_lens;
    uint64_t seqs;
    int64_t heads;
    int64_t kv_heads;
    double scale;
    /* 0: no mask; 3: causal; 4: band of pre_tokens + next_tokens. */
    int64_t sparse_mode;
    int64_t pre_tokens;
    int64_t next_tokens;
    int64_t inner_precise;
    /* Tokens per block; 0 without a block table. */
    int64_t block_size;
} ascend_attention_shape;

/* out = softmax(query . key^T * scale + mask) . value over the cached keys of each sequence. Phase 1 reads the
 * lengths on the host, during this call. mask: bool [2048,2048], 1 above the diagonal, or null; block_table: int32
 * [>= seqs, blocks]. */
ascend_status ascend_attention(const struct ascend_table *t, const ascend_tensor *query, const ascend_tensor *key_cache,
                               const ascend_tensor *value_cache, const ascend_tensor *mask,
                               const ascend_tensor *block_table, const ascend_tensor *out,
                               const ascend_attention_shape *shape, ascend_op **op);

/* ---- Quantized products. ---- */

/* Quantizes each row symmetrically: y int8[T,K] and scale f32[T]. */
ascend_status ascend_dynamic_quant(const struct ascend_table *t, const ascend_tensor *x, const ascend_tensor *y,
                                   const ascend_tensor *scale, ascend_op **op);
/* out[T,N] = (x int8[T,K] . weight int8[N,K]^T) * weight_scale[N] * row_scale[T] (+ bias). */
ascend_status ascend_quant_linear(const struct ascend_table *t, const ascend_tensor *x, const ascend_tensor *weight,
                                  const ascend_tensor *weight_scale, const ascend_tensor *row_scale,
                                  const ascend_tensor *bias, const ascend_tensor *out, ascend_op **op);
/* out[T,N] = x[T,K] . ((weight + offset) * scale) (+ bias). If group is 0: weight[N,K] row-major, scale[N]; otherwise
 * weight[K,N], scale[K/group,N]. An int4 weight may be passed as int32, with eight values per word. K and N are at most
 * 65,535. */
ascend_status ascend_weight_quant_linear(const struct ascend_table *t, const ascend_tensor *x,
                                         const ascend_tensor *weight, const ascend_tensor *scale,
                                         const ascend_tensor *offset, const ascend_tensor *bias, int32_t group,
                                         const ascend_tensor *out, ascend_op **op);

/* ---- Sampling and checks. ---- */

/* out[rows] = argmax of each row, int32 or int64. */
ascend_status ascend_argmax(const struct ascend_table *t, const ascend_tensor *x, const ascend_tensor *out, ascend_op **op);
/* The k largest values of each row, in descending order, and their indices (int64). */
ascend_status ascend_topk(const struct ascend_table *t, const ascend_tensor *x, int64_t k, const ascend_tensor *values,
                          const ascend_tensor *indices, ascend_op **op);
ascend_status ascend_softmax(const struct ascend_table *t, const ascend_tensor *x, const ascend_tensor *out, ascend_op **op);
/* out (bool) = whether each element of x is finite. */
ascend_status ascend_is_finite(const struct ascend_table *t, const ascend_tensor *x, const ascend_tensor *out, ascend_op **op);
/* out[rows] (bool) = whether all elements of a row are 1. */
ascend_status ascend_all(const struct ascend_table *t, const ascend_tensor *x, const ascend_tensor *out, ascend_op **op);

/* ---- Mixture of experts. E experts, k of them per token. ---- */

/* Selects weights[T,k] and experts (int32[T,k]) from logits[T,E]. If renorm is 1, the k weights add up to 1. The
 * operation's output row_index (int32[T,k]) is not used. */
ascend_status ascend_moe_gate(const struct ascend_table *t, const ascend_tensor *logits, int64_t k, int64_t renorm,
                              const ascend_tensor *weights, const ascend_tensor *experts, ascend_op **op);
/* expanded[T*k,H]: the rows of x, sorted by expert; row_index (int32[T*k]): the index of each row among the sorted
 * ones; counts (int32[E]): the number of tokens of each expert. */
ascend_status ascend_moe_route(const struct ascend_table *t, const ascend_tensor *x, const ascend_tensor *experts,
                               int64_t expert_count, const ascend_tensor *expanded, const ascend_tensor *row_index,
                               const ascend_tensor *counts, ascend_op **op);
/* out[R,N] = rows of expert e . weight[E,K,N][e]; counts (int64[E]) is the number of rows of each expert. */
ascend_status ascend_moe_linear(const struct ascend_table *t, const ascend_tensor *x, const ascend_tensor *weight,
                                const ascend_tensor *counts, const ascend_tensor *out, ascend_op **op);
/* out[T,H] = weighted sum of the k rows of each token. */
ascend_status ascend_moe_combine(const struct ascend_table *t, const ascend_tensor *expanded,
                                 const ascend_tensor *row_index, const ascend_tensor *weights,
                                 const ascend_tensor *experts, const ascend_tensor *out, ascend_op **op);

#endif
