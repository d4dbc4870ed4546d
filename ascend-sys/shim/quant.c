/* Activation quantization, and products with quantized weights. */
#include "op.h"

ascend_status ascend_dynamic_quant(const struct ascend_table *t, const ascend_tensor *x, const ascend_tensor *y,
                                   const ascend_tensor *scale, ascend_op **op)
{
    ascend_op *o = ascend_begin(t);
    aclTensor *x_ = ascend_input(o, 0, x);
    aclTensor *y_ = ascend_output(o, 0, y);
    aclTensor *scale_ = ascend_output(o, 1, scale);
    ASCEND_QUERY(o, aclnnDynamicQuant, x_, NULL, y_, scale_);
    return ascend_finish(o, op);
}

ascend_status ascend_quant_linear(const struct ascend_table *t, const ascend_tensor *x, const ascend_tensor *weight,
                                  const ascend_tensor *weight_scale, const ascend_tensor *row_scale,
                                  const ascend_tensor *bias, const ascend_tensor *out, ascend_op **op)
{
    ascend_op *o = ascend_begin(t);
    aclTensor *x_ = ascend_input(o, 0, x);
    aclTensor *weight_ = ascend_input(o, 1, weight);
    aclTensor *weight_scale_ = ascend_input(o, 2, weight_scale);
    aclTensor *row_scale_ = ascend_input(o, 4, row_scale);
    aclTensor *bias_ = ascend_input(o, 5, bias);
    aclTensor *out_ = ascend_output(o, 0, out);
    ASCEND_QUERY(o, aclnnQuantMatmulV4, x_, weight_, weight_scale_, NULL, row_scale_, bias_, false, true, out_);
    return ascend_finish(o, op);
}

ascend_status ascend_weight_quant_linear(const struct ascend_table *t, const ascend_tensor *x,
                                         const ascend_tensor *weight, const ascend_tensor *scale,
                                         const ascend_tensor *offset, const ascend_tensor *bias, int32_t group,
                                         const ascend_tensor *out, ascend_op **op)
{
    ascend_op *o = ascend_begin(t);
    ascend_tensor seen = group ? *weight : ascend_transposed(weight);
    aclTensor *x_ = ascend_input(o, 0, x);
    aclTensor *weight_ = ascend_input(o, 1, &seen);
    aclTensor *scale_ = ascend_input(o, 2, scale);
    aclTensor *offset_ = ascend_input(o, 3, offset);
    aclTensor *bias_ = ascend_input(o, 6, bias);
    aclTensor *out_ = ascend_output(o, 0, out);
    ASCEND_QUERY(o, aclnnWeightQuantBatchMatmulV2, x_, weight_, scale_, offset_, NULL, NULL, bias_, group, out_);
    return ascend_finish(o, op);
}
