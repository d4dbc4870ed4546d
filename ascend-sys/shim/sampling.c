/* Operations on logits: argmax, top k, softmax, and the check for non-finite values. */
#include "op.h"

ascend_status ascend_argmax(const struct ascend_table *t, const ascend_tensor *x, const ascend_tensor *out, ascend_op **op)
{
    ascend_op *o = ascend_begin(t);
    aclTensor *x_ = ascend_input(o, 0, x);
    aclTensor *out_ = ascend_output(o, 0, out);
    ASCEND_QUERY(o, aclnnArgMax, x_, -1, false, out_);
    return ascend_finish(o, op);
}

ascend_status ascend_topk(const struct ascend_table *t, const ascend_tensor *x, int64_t k, const ascend_tensor *values,
                          const ascend_tensor *indices, ascend_op **op)
{
    ascend_op *o = ascend_begin(t);
    aclTensor *x_ = ascend_input(o, 0, x);
    aclTensor *values_ = ascend_output(o, 0, values);
    aclTensor *indices_ = ascend_output(o, 1, indices);
    ASCEND_QUERY(o, aclnnTopk, x_, k, -1, true, true, values_, indices_);
    return ascend_finish(o, op);
}

ascend_status ascend_softmax(const struct ascend_table *t, const ascend_tensor *x, const ascend_tensor *out, ascend_op **op)
{
    ascend_op *o = ascend_begin(t);
    aclTensor *x_ = ascend_input(o, 0, x);
    aclTensor *out_ = ascend_output(o, 0, out);
    ASCEND_QUERY(o, aclnnSoftmax, x_, -1, out_);
    return ascend_finish(o, op);
}

ascend_status ascend_is_finite(const struct ascend_table *t, const ascend_tensor *x, const ascend_tensor *out, ascend_op **op)
{
    ascend_op *o = ascend_begin(t);
    aclTensor *x_ = ascend_input(o, 0, x);
    aclTensor *out_ = ascend_output(o, 0, out);
    ASCEND_QUERY(o, aclnnIsFinite, x_, out_);
    return ascend_finish(o, op);
}

ascend_status ascend_all(const struct ascend_table *t, const ascend_tensor *x, const ascend_tensor *out, ascend_op **op)
{
    ascend_op *o = ascend_begin(t);
    int64_t last = (int64_t)x->rank - 1;
    aclTensor *x_ = ascend_input(o, 0, x);
    aclIntArray *dims = ascend_int_array(o, &last, 1);
    aclTensor *out_ = ascend_output(o, 0, out);
    ASCEND_QUERY(o, aclnnAll, x_, dims, false, out_);
    return ascend_finish(o, op);
}
