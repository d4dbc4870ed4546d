/* Building blocks of the operations: an op under construction, its operands, and phase 1. Private to the shim. */
#ifndef ASCEND_OP_H
#define ASCEND_OP_H

#include "shim.h"

enum { MAX_OPERANDS = 12, MAX_ARRAYS = 2, MAX_SCALARS = 2 };

/* Tensor argument, or list of one tensor. index is its position among the operation's inputs or outputs. */
struct operand {
    aclTensor *tensor;
    aclTensorList *list;
    size_t index;
    bool is_output;
};

struct ascend_op {
    const struct ascend_table *table;
    aclOpExecutor *executor;
    ascend_launch launch;
    const char *launch_name;
    uint64_t workspace_bytes;
    bool is_repeatable;
    ascend_status status;
    uint32_t operand_count;
    uint32_t array_count;
    uint32_t scalar_count;
    struct operand operands[MAX_OPERANDS];
    aclIntArray *arrays[MAX_ARRAYS];
    aclScalar *scalars[MAX_SCALARS];
};

/* Creates an op; returns null if out of memory. Once status contains a failure, the functions below do nothing. */
ascend_op *ascend_begin(const struct ascend_table *table);
aclTensor *ascend_input(ascend_op *op, size_t index, const ascend_tensor *tensor);
aclTensor *ascend_output(ascend_op *op, size_t index, const ascend_tensor *tensor);
aclTensorList *ascend_input_list(ascend_op *op, size_t index, const ascend_tensor *tensor);
aclTensorList *ascend_output_list(ascend_op *op, size_t index, const ascend_tensor *tensor);
aclIntArray *ascend_int_array(ascend_op *op, const int64_t *values, uint64_t count);
aclScalar *ascend_scalar(ascend_op *op, float value);
/* Returns a transposed view of a matrix: [R,C] as [C,R]. */
ascend_tensor ascend_transposed(const ascend_tensor *matrix);
/* Passes the op to the caller; after a failure, frees it and returns the status. */
ascend_status ascend_finish(ascend_op *op, ascend_op **out);

void ascend_fail(ascend_op *op, int32_t code, const char *call);

/* Runs phase 1 of an operation; fails with ASCEND_NO_SYMBOL if the libraries lack it. */
#define ASCEND_QUERY(op, name, ...)                                                                                    \
    do {                                                                                                               \
        if (!(op) || (op)->status.code)                                                                                \
            break;                                                                                                     \
        if (!(op)->table->name##GetWorkspaceSize || !(op)->table->name) {                                              \
            ascend_fail((op), ASCEND_NO_SYMBOL, #name);                                                                \
            break;                                                                                                     \
        }                                                                                                              \
        (op)->launch = (op)->table->name;                                                                              \
        (op)->launch_name = #name;                                                                                     \
        int32_t code =                                                                                                 \
            (op)->table->name##GetWorkspaceSize(__VA_ARGS__, &(op)->workspace_bytes, &(op)->executor);                 \
        if (code)                                                                                                      \
            ascend_fail((op), code, #name "GetWorkspaceSize");                                                         \
    } while (0)

#endif
