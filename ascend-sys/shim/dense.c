/* Operations of a dense decoder. */
#include "op.h"

/* KEEP_TYPES (cubeMathType): a product computes in the types of its operands. */
enum { KEEP_TYPES = 0, FRACTAL_NZ = 29, GELU_TANH = 1 };

/* The library recognizes a transposed view of a row-major weight as a transposition, so it copies nothing. */
ascend_status ascend_linear(const struct ascend_table *t, const ascend_tensor *x, const ascend_tensor *weight,
                            const ascend_tensor *bias, const ascend_tensor *out, ascend_op **op)
{
    ascend_op *o = ascend_begin(t);
    ascend_tensor turned = ascend_transposed(weight);
    aclTensor *x_ = ascend_input(o, bias ? 1 : 0, x);
    aclTensor *weight_ = ascend_input(o, bias ? 2 : 1, &turned);
    aclTensor *bias_ = ascend_input(o, 0, bias);
    aclTensor *out_ = ascend_output(o, 0, out);
    if (bias) {
        aclScalar *one = ascend_scalar(o, 1.0f);
        ASCEND_QUERY(o, aclnnAddmm, bias_, x_, weight_, one, one, out_, KEEP_TYPES);
    } else if (weight->format == FRACTAL_NZ && t->aclnnMatmulWeightNz) {
        ASCEND_QUERY(o, aclnnMatmulWeightNz, x_, weight_, out_, KEEP_TYPES);
    } else {
        ASCEND_QUERY(o, aclnnMm, x_, weight_, out_, KEEP_TYPES);
    }
    return ascend_finish(o, op);
}

ascend_status ascend_tile_weight(const struct ascend_table *t, const ascend_tensor *weight, ascend_op **op)
{
    ascend_op *o = ascend_begin(t);
    aclTensor *weight_ = ascend_input(o, 0, weight);
    ASCEND_QUERY(o, aclnnTransMatmulWeight, weight_);
    return ascend_finish(o, op);
}

ascend_status ascend_nz_elements(const struct ascend_table *t, int64_t rows, int64_t cols, int32_t dtype,
                                 uint64_t *elements)
{
    const char *call = "aclnnCalculateMatmulWeightSizeV2";
    int64_t shape[] = {rows, cols};
    if (!t->aclnnCalculateMatmulWeightSizeV2 || !t->aclCreateIntArray || !t->aclDestroyIntArray)
        return (ascend_status){ASCEND_NO_SYMBOL, call};
    aclIntArray *array = t->aclCreateIntArray(shape, 2);
    if (!array)
        return (ascend_status){ASCEND_NO_DESCRIPTOR, "aclCreateIntArray"};
    int32_t code = t->aclnnCalculateMatmulWeightSizeV2(array, dtype, elements);
    t->aclDestroyIntArray(array);
    return (ascend_status){code, call};
}

ascend_status ascend_rms_norm(const struct ascend_table *t, const ascend_tensor *x, const ascend_tensor *gamma,
                              double epsilon, const ascend_tensor *out, const ascend_tensor *rstd, ascend_op **op)
{
    ascend_op *o = ascend_begin(t);
    aclTensor *x_ = ascend_input(o, 0, x);
    aclTensor *gamma_ = ascend_input(o, 1, gamma);
    aclTensor *out_ = ascend_output(o, 0, out);
    aclTensor *rstd_ = ascend_output(o, 1, rstd);
    ASCEND_QUERY(o, aclnnRmsNorm, x_, gamma_, epsilon, out_, rstd_);
    return ascend_finish(o, op);
}

ascend_status ascend_add_rms_norm(const struct ascend_table *t, const ascend_tensor *a, const ascend_tensor *b,
                                  const ascend_tensor *gamma, double epsilon, const ascend_tensor *out,
                                  const ascend_tensor *rstd, const ascend_tensor *sum, ascend_op **op)
{
    ascend_op *o = ascend_begin(t);
    aclTensor *a_ = ascend_input(o, 0, a);
    aclTensor *b_ = ascend_input(o, 1, b);
    aclTensor *gamma_ = ascend_input(o, 2, gamma);
    aclTensor *out_ = ascend_output(o, 0, out);
    aclTensor *rstd_ = ascend_output(o, 1, rstd);
    aclTensor *sum_ = ascend_output(o, 2, sum);
    ASCEND_QUERY(o, aclnnAddRmsNorm, a_, b_, gamma_, epsilon, out_, rstd_, sum_);
    return ascend_finish(o, op);
}

ascend_status ascend_rope(const struct ascend_table *t, const ascend_tensor *x, const ascend_tensor *cos,
                          const ascend_tensor *sin, int32_t interleaved, const ascend_tensor *out, ascend_op **op)
{
    ascend_op *o = ascend_begin(t);
    aclTensor *x_ = ascend_input(o, 0, x);
    aclTensor *cos_ = ascend_input(o, 1, cos);
    aclTensor *sin_ = ascend_input(o, 2, sin);
    aclTensor *out_ = ascend_output(o, 0, out);
    ASCEND_QUERY(o, aclnnRotaryPositionEmbedding, x_, cos_, sin_, interleaved ? 1 : 0, out_);
    return ascend_finish(o, op);
}

ascend_status ascend_swiglu(const struct ascend_table *t, const ascend_tensor *x, const ascend_tensor *out, ascend_op **op)
{
    ascend_op *o = ascend_begin(t);
    aclTensor *x_ = ascend_input(o, 0, x);
    aclTensor *out_ = ascend_output(o, 0, out);
    ASCEND_QUERY(o, aclnnSwiGlu, x_, -1, out_);
    return ascend_finish(o, op);
}

ascend_status ascend_silu(const struct ascend_table *t, const ascend_tensor *x, const ascend_tensor *out, ascend_op **op)
{
    ascend_op *o = ascend_begin(t);
    aclTensor *x_ = ascend_input(o, 0, x);
    aclTensor *out_ = ascend_output(o, 0, out);
    ASCEND_QUERY(o, aclnnSilu, x_, out_);
    return ascend_finish(o, op);
}

ascend_status ascend_gelu(const struct ascend_table *t, const ascend_tensor *x, const ascend_tensor *out, ascend_op **op)
{
    ascend_op *o = ascend_begin(t);
    aclTensor *x_ = ascend_input(o, 0, x);
    aclTensor *out_ = ascend_output(o, 0, out);
    ASCEND_QUERY(o, aclnnGeluV2, x_, GELU_TANH, out_);
    return ascend_finish(o, op);
}

ascend_status ascend_tanh(const struct ascend_table *t, const ascend_tensor *x, const ascend_tensor *out, ascend_op **op)
{
    ascend_op *o = ascend_begin(t);
    aclTensor *x_ = ascend_input(o, 0, x);
    aclTensor *out_ = ascend_output(o, 0, out);
    ASCEND_QUERY(o, aclnnTanh, x_, out_);
    return ascend_finish(o, op);
}

ascend_status ascend_add(const struct ascend_table *t, const ascend_tensor *a, const ascend_tensor *b,
                         const ascend_tensor *out, ascend_op **op)
{
    ascend_op *o = ascend_begin(t);
    aclTensor *a_ = ascend_input(o, 0, a);
    aclTensor *b_ = ascend_input(o, 1, b);
    aclTensor *out_ = ascend_output(o, 0, out);
    aclScalar *one = ascend_scalar(o, 1.0f);
    ASCEND_QUERY(o, aclnnAdd, a_, b_, one, out_);
    return ascend_finish(o, op);
}

ascend_status ascend_mul(const struct ascend_table *t, const ascend_tensor *a, const ascend_tensor *b,
                         const ascend_tensor *out, ascend_op **op)
{
    ascend_op *o = ascend_begin(t);
    aclTensor *a_ = ascend_input(o, 0, a);
    aclTensor *b_ = ascend_input(o, 1, b);
    aclTensor *out_ = ascend_output(o, 0, out);
    ASCEND_QUERY(o, aclnnMul, a_, b_, out_);
    return ascend_finish(o, op);
}

ascend_status ascend_scale(const struct ascend_table *t, const ascend_tensor *x, float factor, const ascend_tensor *out,
                           ascend_op **op)
{
    ascend_op *o = ascend_begin(t);
    aclTensor *x_ = ascend_input(o, 0, x);
    aclTensor *out_ = ascend_output(o, 0, out);
    aclScalar *factor_ = ascend_scalar(o, factor);
    ASCEND_QUERY(o, aclnnMuls, x_, factor_, out_);
    return ascend_finish(o, op);
}

ascend_status ascend_embedding(const struct ascend_table *t, const ascend_tensor *table, const ascend_tensor *ids,
                               const ascend_tensor *out, ascend_op **op)
{
    ascend_op *o = ascend_begin(t);
    aclTensor *table_ = ascend_input(o, 0, table);
    aclTensor *ids_ = ascend_input(o, 1, ids);
    aclTensor *out_ = ascend_output(o, 0, out);
    ASCEND_QUERY(o, aclnnEmbedding, table_, ids_, out_);
    return ascend_finish(o, op);
}

ascend_status ascend_gather_rows(const struct ascend_table *t, const ascend_tensor *x, const ascend_tensor *rows,
                                 const ascend_tensor *out, ascend_op **op)
{
    ascend_op *o = ascend_begin(t);
    aclTensor *x_ = ascend_input(o, 0, x);
    aclTensor *rows_ = ascend_input(o, 1, rows);
    aclTensor *out_ = ascend_output(o, 0, out);
    ASCEND_QUERY(o, aclnnIndexSelect, x_, 0, rows_, out_);
    return ascend_finish(o, op);
}

ascend_status ascend_copy(const struct ascend_table *t, const ascend_tensor *dst, const ascend_tensor *src, ascend_op **op)
{
    ascend_op *o = ascend_begin(t);
    aclTensor *dst_ = ascend_input(o, 0, dst);
    aclTensor *src_ = ascend_input(o, 1, src);
    ASCEND_QUERY(o, aclnnInplaceCopy, dst_, src_);
    return ascend_finish(o, op);
}

ascend_status ascend_cast(const struct ascend_table *t, const ascend_tensor *x, const ascend_tensor *out, ascend_op **op)
{
    ascend_op *o = ascend_begin(t);
    aclTensor *x_ = ascend_input(o, 0, x);
    aclTensor *out_ = ascend_output(o, 0, out);
    ASCEND_QUERY(o, aclnnCast, x_, out->dtype, out_);
    return ascend_finish(o, op);
}
