/* The kernel shim: one flat function an operation over the two-phase calls of aclnn.
 *
 * A function describes its operands, runs phase 1 and gives back an op: an executor with everything it holds. ascend_launch_op
 * runs phase 2. An op is launched once, or, after ascend_make_repeatable, as often as wanted with other addresses. All
 * functions need a current context on the thread; none keeps state of its own. Every error names the call that failed. */
#ifndef ASCEND_SHIM_H
#define ASCEND_SHIM_H

#include "functions.h"

enum {
    ASCEND_MAX_RANK = 8,
    /* Codes of the shim itself; those of the libraries are positive. */
    ASCEND_NO_SYMBOL = -1,
    ASCEND_NO_DESCRIPTOR = -2,
    ASCEND_MISUSE = -3,
};

/* A tensor in device memory. Strides and offset count elements. A storage shape differs from the view's where the view is
 * a part or a transposition of it, or where the format has tiles. */
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

/* Result of a call: 0 or a code, and the name of the function it comes from. */
typedef struct {
    int32_t code;
    const char *call;
} ascend_status;

/* Functions resolved by the loader; absent ones are null. */
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

/* The table is filled entry by entry: the name of entry i (null beyond the last), and its address. */
size_t ascend_table_bytes(void);
const char *ascend_symbol_name(size_t i);
void ascend_table_set(struct ascend_table *table, size_t i, void *address);

/* Life of an op. Operands are numbered in the order of the function's tensor arguments, absent ones included. */
uint64_t ascend_workspace_bytes(const ascend_op *op);
ascend_status ascend_make_repeatable(ascend_op *op);
ascend_status ascend_rebind(ascend_op *op, uint32_t operand, void *data);
ascend_status ascend_launch_op(ascend_op *op, void *workspace, uint64_t workspace_bytes, aclrtStream stream);
void ascend_free_op(ascend_op *op);

/* ---- Dense layers. T tokens, H hidden, N outputs, K inputs, V ids, D elements a head. ---- */

/* out[T,N] = x[T,K] . weight[N,K]^T (+ bias[N]). The weight is given by rows; its format may be ND or NZ. */
ascend_status ascend_linear(const struct ascend_table *t, const ascend_tensor *x, const ascend_tensor *weight,
                            const ascend_tensor *bias, const ascend_tensor *out, ascend_op **op);
/* Brings weight[N,K] into tiles, in place; its buffer has ascend_nz_elements elements. Slow: once, at load. */
ascend_status ascend_tile_weight(const struct ascend_table *t, const ascend_tensor *weight, ascend_op **op);
ascend_status ascend_nz_elements(const struct ascend_table *t, int64_t rows, int64_t cols, int32_t dtype,
                                 uint64_t *elements);
/* out = x / rms(x) * gamma; rstd f32, one value a row, shape of x with the normed dimensions 1. */
ascend_status ascend_rms_norm(const struct ascend_table *t, const ascend_tensor *x, const ascend_tensor *gamma,
                              double epsilon, const ascend_tensor *out, const ascend_tensor *rstd, ascend_op **op);
/* sum = a + b; out = norm(sum) * gamma. */
ascend_status ascend_add_rms_norm(const struct ascend_table *t, const ascend_tensor *a, const ascend_tensor *b,
                                  const ascend_tensor *gamma, double epsilon, const ascend_tensor *out,
                                  const ascend_tensor *rstd, const ascend_tensor *sum, ascend_op **op);
/* x[T,heads,D] rotated by cos, sin[T,1,D]; out is another buffer. interleaved: pairs (2i, 2i+1) instead of halves. */
ascend_status ascend_rope(const struct ascend_table *t, const ascend_tensor *x, const ascend_tensor *cos,
                          const ascend_tensor *sin, int32_t interleaved, const ascend_tensor *out, ascend_op **op);
/* out[T,n] = silu(x[T,:n]) * x[T,n:], x contiguous. */
ascend_status ascend_swiglu(const struct ascend_table *t, const ascend_tensor *x, const ascend_tensor *out, ascend_op **op);
ascend_status ascend_silu(const struct ascend_table *t, const ascend_tensor *x, const ascend_tensor *out, ascend_op **op);
/* The tanh approximation. */
ascend_status ascend_gelu(const struct ascend_table *t, const ascend_tensor *x, const ascend_tensor *out, ascend_op **op);
ascend_status ascend_tanh(const struct ascend_table *t, const ascend_tensor *x, const ascend_tensor *out, ascend_op **op);
ascend_status ascend_add(const struct ascend_table *t, const ascend_tensor *a, const ascend_tensor *b,
                         const ascend_tensor *out, ascend_op **op);
ascend_status ascend_mul(const struct ascend_table *t, const ascend_tensor *a, const ascend_tensor *b,
                         const ascend_tensor *out, ascend_op **op);
/* out = x * factor. */
ascend_status ascend_scale(const struct ascend_table *t, const ascend_tensor *x, float factor, const ascend_tensor *out,
                           ascend_op **op);
/* out[T,H] = table[ids[T]]. Ids are not checked by the operation. */
ascend_status ascend_embedding(const struct ascend_table *t, const ascend_tensor *table, const ascend_tensor *ids,
                               const ascend_tensor *out, ascend_op **op);
/* out[R,...] = x[rows[R],...]. */
ascend_status ascend_gather_rows(const struct ascend_table *t, const ascend_tensor *x, const ascend_tensor *rows,
                                 const ascend_tensor *out, ascend_op **op);
/* dst = src, strided and broadcast as the views say. */
ascend_status ascend_copy(const struct ascend_table *t, const ascend_tensor *dst, const ascend_tensor *src, ascend_op **op);
/* out = x in out's type. */
ascend_status ascend_cast(const struct ascend_table *t, const ascend_tensor *x, const ascend_tensor *out, ascend_op **op);

/* ---- Keys, values, attention. ---- */

/* key_cache, value_cache[blocks,block,heads,D] at slots[T] = key, value[T,heads,D]. Slots are unique and in range. Needs
 * CANN 8.3; before that ascend_scatter_rows, once a cache. */
ascend_status ascend_kv_scatter(const struct ascend_table *t, const ascend_tensor *key, const ascend_tensor *value,
                                const ascend_tensor *slots, const ascend_tensor *key_cache,
                                const ascend_tensor *value_cache, ascend_op **op);
/* cache[rows,H] at indices[T,1] = updates[T,H]. */
ascend_status ascend_scatter_rows(const struct ascend_table *t, const ascend_tensor *cache, const ascend_tensor *indices,
                                  const ascend_tensor *updates, ascend_op **op);

typedef struct {
    /* "TND", "BSND" or "BSH". */
    const char *layout;
    /* TND: sums of the query lengths up to each sequence; else null. */
    const int64_t *query_ends;
    /* Keys of each sequence; a length of 0 is not allowed. */
    const int64_t *kv_lens;
    uint64_t seqs;
    int64_t heads;
    int64_t kv_heads;
    double scale;
    /* 0 no mask, 3 causal, 4 band of pre_tokens + next_tokens. */
    int64_t sparse_mode;
    int64_t pre_tokens;
    int64_t next_tokens;
    int64_t inner_precise;
    /* Tokens a block; 0 without a block table. */
    int64_t block_size;
} ascend_attention_shape;

/* out = softmax(query . key^T * scale + mask) . value over each sequence's stored keys. The lengths are read here, in
 * phase 1, on the host. mask[2048,2048] bool, 1 above the diagonal, or null; block_table[>= seqs, blocks] int32. */
ascend_status ascend_attention(const struct ascend_table *t, const ascend_tensor *query, const ascend_tensor *key_cache,
                               const ascend_tensor *value_cache, const ascend_tensor *mask,
                               const ascend_tensor *block_table, const ascend_tensor *out,
                               const ascend_attention_shape *shape, ascend_op **op);

/* ---- Quantized products. ---- */

/* y int8[T,K] and scale f32[T], symmetric a row. */
ascend_status ascend_dynamic_quant(const struct ascend_table *t, const ascend_tensor *x, const ascend_tensor *y,
                                   const ascend_tensor *scale, ascend_op **op);
/* out[T,N] = (x int8[T,K] . weight int8[N,K]^T) * weight_scale[N] * row_scale[T] (+ bias). */
ascend_status ascend_quant_linear(const struct ascend_table *t, const ascend_tensor *x, const ascend_tensor *weight,
                                  const ascend_tensor *weight_scale, const ascend_tensor *row_scale,
                                  const ascend_tensor *bias, const ascend_tensor *out, ascend_op **op);
/* out[T,N] = x[T,K] . ((weight + offset) * scale) (+ bias). group 0: weight[N,K] by rows, scale[N]; else weight[K,N],
 * scale[K/group,N]. int4 weights may be carried as int32, eight a word. K and N up to 65,535. */
ascend_status ascend_weight_quant_linear(const struct ascend_table *t, const ascend_tensor *x,
                                         const ascend_tensor *weight, const ascend_tensor *scale,
                                         const ascend_tensor *offset, const ascend_tensor *bias, int32_t group,
                                         const ascend_tensor *out, ascend_op **op);

/* ---- Sampling and checks. ---- */

/* out[rows] = place of the largest of each row, int32 or int64. */
ascend_status ascend_argmax(const struct ascend_table *t, const ascend_tensor *x, const ascend_tensor *out, ascend_op **op);
/* The k largest of each row, descending, and their places (int64). */
ascend_status ascend_topk(const struct ascend_table *t, const ascend_tensor *x, int64_t k, const ascend_tensor *values,
                          const ascend_tensor *indices, ascend_op **op);
ascend_status ascend_softmax(const struct ascend_table *t, const ascend_tensor *x, const ascend_tensor *out, ascend_op **op);
/* out bool, 1 where x is finite. */
ascend_status ascend_is_finite(const struct ascend_table *t, const ascend_tensor *x, const ascend_tensor *out, ascend_op **op);
/* out[rows] bool = whether all of a row are 1. */
ascend_status ascend_all(const struct ascend_table *t, const ascend_tensor *x, const ascend_tensor *out, ascend_op **op);

/* ---- Experts. E experts, k a token. ---- */

/* weights[T,k] and experts int32[T,k] of logits[T,E]; renorm 1: the k weights add up to 1. row_index int32[T,k] is unused. */
ascend_status ascend_moe_gate(const struct ascend_table *t, const ascend_tensor *logits, int64_t k, int64_t renorm,
                              const ascend_tensor *weights, const ascend_tensor *experts, ascend_op **op);
/* Rows of x sorted by expert, where each row went (int32[T*k]), tokens of each expert (int32[E]). */
ascend_status ascend_moe_route(const struct ascend_table *t, const ascend_tensor *x, const ascend_tensor *experts,
                               int64_t expert_count, const ascend_tensor *expanded, const ascend_tensor *row_index,
                               const ascend_tensor *counts, ascend_op **op);
/* out[R,N] = rows of expert e . weight[E,K,N][e], counts int64[E]. */
ascend_status ascend_moe_linear(const struct ascend_table *t, const ascend_tensor *x, const ascend_tensor *weight,
                                const ascend_tensor *counts, const ascend_tensor *out, ascend_op **op);
/* out[T,H] = sum over the token's k rows, weighted. */
ascend_status ascend_moe_combine(const struct ascend_table *t, const ascend_tensor *expanded,
                                 const ascend_tensor *row_index, const ascend_tensor *weights,
                                 const ascend_tensor *experts, const ascend_tensor *out, ascend_op **op);

#endif
