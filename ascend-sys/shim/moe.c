/* Mixture of experts: select the experts of each token, sort the rows by expert, multiply the rows of each expert, and
 * combine the rows of each token. Experts have no capacity limit, so no row is dropped. */
#include "op.h"

enum {
    NO_DROP = 0,
    COUNTS = 2,          /* the number of tokens of each expert, not cumulative */
    ROW_ORDER = 2,       /* row order that init routing V2 produces */
    SPLIT_ROWS = 0,      /* groupType: the rows of x are divided among the groups */
    ONE_OUTPUT = 3,      /* splitItem */
    GROUP_COUNTS = 1,    /* groupListType */
    NO_ACTIVATION = 0,
};

ascend_status ascend_moe_gate(const struct ascend_table *t, const ascend_tensor *logits, int64_t k, int64_t renorm,
                              const ascend_tensor *weights, const ascend_tensor *experts, ascend_op **op)
{
    ascend_op *o = ascend_begin(t);
    aclTensor *logits_ = ascend_input(o, 0, logits);
    aclTensor *weights_ = ascend_output(o, 0, weights);
    aclTensor *experts_ = ascend_output(o, 1, experts);
    ASCEND_QUERY(o, aclnnMoeGatingTopKSoftmaxV2, logits_, NULL, k, renorm, false, weights_, experts_, NULL);
    return ascend_finish(o, op);
}

ascend_status ascend_moe_route(const struct ascend_table *t, const ascend_tensor *x, const ascend_tensor *experts,
                               int64_t expert_count, const ascend_tensor *expanded, const ascend_tensor *row_index,
                               const ascend_tensor *counts, ascend_op **op)
{
    ascend_op *o = ascend_begin(t);
    aclTensor *x_ = ascend_input(o, 0, x);
    aclTensor *experts_ = ascend_input(o, 1, experts);
    aclTensor *expanded_ = ascend_output(o, 0, expanded);
    aclTensor *row_index_ = ascend_output(o, 1, row_index);
    aclTensor *counts_ = ascend_output(o, 2, counts);
    ASCEND_QUERY(o, aclnnMoeInitRoutingV2, x_, experts_, 0, 0, expert_count, NO_DROP, COUNTS, false, expanded_, row_index_,
                 counts_, NULL);
    return ascend_finish(o, op);
}

ascend_status ascend_moe_linear(const struct ascend_table *t, const ascend_tensor *x, const ascend_tensor *weight,
                                const ascend_tensor *counts, const ascend_tensor *out, ascend_op **op)
{
    ascend_op *o = ascend_begin(t);
    aclTensorList *x_ = ascend_input_list(o, 0, x);
    aclTensorList *weight_ = ascend_input_list(o, 1, weight);
    aclTensor *counts_ = ascend_input(o, 8, counts);
    aclTensorList *out_ = ascend_output_list(o, 0, out);
    ASCEND_QUERY(o, aclnnGroupedMatmulV4, x_, weight_, NULL, NULL, NULL, NULL, NULL, NULL, counts_, NULL, NULL, NULL,
                 ONE_OUTPUT, SPLIT_ROWS, GROUP_COUNTS, NO_ACTIVATION, out_, NULL, NULL);
    return ascend_finish(o, op);
}

ascend_status ascend_moe_combine(const struct ascend_table *t, const ascend_tensor *expanded,
                                 const ascend_tensor *row_index, const ascend_tensor *weights,
                                 const ascend_tensor *experts, const ascend_tensor *out, ascend_op **op)
{
    ascend_op *o = ascend_begin(t);
    aclTensor *expanded_ = ascend_input(o, 0, expanded);
    aclTensor *row_index_ = ascend_input(o, 1, row_index);
    aclTensor *weights_ = ascend_input(o, 5, weights);
    aclTensor *experts_ = ascend_input(o, 6, experts);
    aclTensor *out_ = ascend_output(o, 0, out);
    ASCEND_QUERY(o, aclnnMoeFinalizeRoutingV2, expanded_, row_index_, NULL, NULL, NULL, weights_, experts_, ROW_ORDER, out_);
    return ascend_finish(o, op);
}
