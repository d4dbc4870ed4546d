#include "op.h"

#include <stdlib.h>
#include <string.h>

/* The only value of aclDataType that this file uses. */
enum { ACL_FLOAT = 0 };

static const ascend_status OK = {0, ""};

ascend_op *ascend_begin(const struct ascend_table *table)
{
    ascend_op *op = calloc(1, sizeof *op);
    if (op) {
        op->table = table;
        op->status = OK;
    }
    return op;
}

void ascend_fail(ascend_op *op, int32_t code, const char *call)
{
    if (op && !op->status.code)
        op->status = (ascend_status){code, call};
}

static aclTensor *describe(ascend_op *op, const ascend_tensor *tensor)
{
    if (op->status.code)
        return NULL;
    if (!op->table->aclCreateTensor) {
        ascend_fail(op, ASCEND_NO_SYMBOL, "aclCreateTensor");
        return NULL;
    }
    if (tensor->rank > ASCEND_MAX_RANK || tensor->storage_rank > ASCEND_MAX_RANK) {
        ascend_fail(op, ASCEND_MISUSE, "aclCreateTensor");
        return NULL;
    }
    aclTensor *made = op->table->aclCreateTensor(tensor->dims, tensor->rank, tensor->dtype, tensor->strides, tensor->offset,
                                                 tensor->format, tensor->storage_dims, tensor->storage_rank, tensor->data);
    if (!made)
        ascend_fail(op, ASCEND_NO_DESCRIPTOR, "aclCreateTensor");
    return made;
}

static struct operand *operand(ascend_op *op, size_t index, bool is_output)
{
    if (op->operand_count == MAX_OPERANDS) {
        ascend_fail(op, ASCEND_MISUSE, "operand");
        return NULL;
    }
    struct operand *slot = &op->operands[op->operand_count++];
    slot->index = index;
    slot->is_output = is_output;
    return slot;
}

/* An absent tensor keeps its number, so that the numbers of the other operands do not depend on it. */
static aclTensor *one(ascend_op *op, size_t index, bool is_output, const ascend_tensor *tensor)
{
    struct operand *slot = op ? operand(op, index, is_output) : NULL;
    if (!slot || !tensor)
        return NULL;
    slot->tensor = describe(op, tensor);
    return slot->tensor;
}

static aclTensorList *list(ascend_op *op, size_t index, bool is_output, const ascend_tensor *tensor)
{
    struct operand *slot = op ? operand(op, index, is_output) : NULL;
    if (!slot || !tensor)
        return NULL;
    if (!op->table->aclCreateTensorList) {
        ascend_fail(op, ASCEND_NO_SYMBOL, "aclCreateTensorList");
        return NULL;
    }
    const aclTensor *member = describe(op, tensor);
    if (!member)
        return NULL;
    slot->list = op->table->aclCreateTensorList(&member, 1);
    if (!slot->list) {
        op->table->aclDestroyTensor(member);
        ascend_fail(op, ASCEND_NO_DESCRIPTOR, "aclCreateTensorList");
    }
    return slot->list;
}

aclTensor *ascend_input(ascend_op *op, size_t index, const ascend_tensor *tensor)
{
    return one(op, index, false, tensor);
}

aclTensor *ascend_output(ascend_op *op, size_t index, const ascend_tensor *tensor)
{
    return one(op, index, true, tensor);
}

aclTensorList *ascend_input_list(ascend_op *op, size_t index, const ascend_tensor *tensor)
{
    return list(op, index, false, tensor);
}

aclTensorList *ascend_output_list(ascend_op *op, size_t index, const ascend_tensor *tensor)
{
    return list(op, index, true, tensor);
}

aclIntArray *ascend_int_array(ascend_op *op, const int64_t *values, uint64_t count)
{
    if (!op || op->status.code || !values)
        return NULL;
    if (!op->table->aclCreateIntArray || op->array_count == MAX_ARRAYS) {
        ascend_fail(op, ASCEND_NO_SYMBOL, "aclCreateIntArray");
        return NULL;
    }
    aclIntArray *array = op->table->aclCreateIntArray(values, count);
    if (!array)
        ascend_fail(op, ASCEND_NO_DESCRIPTOR, "aclCreateIntArray");
    else
        op->arrays[op->array_count++] = array;
    return array;
}

/* Scalars are f32: a kernel that computes in f32 reads no wider scalar. */
aclScalar *ascend_scalar(ascend_op *op, float value)
{
    if (!op || op->status.code)
        return NULL;
    if (!op->table->aclCreateScalar || op->scalar_count == MAX_SCALARS) {
        ascend_fail(op, ASCEND_NO_SYMBOL, "aclCreateScalar");
        return NULL;
    }
    aclScalar *scalar = op->table->aclCreateScalar(&value, ACL_FLOAT);
    if (!scalar)
        ascend_fail(op, ASCEND_NO_DESCRIPTOR, "aclCreateScalar");
    else
        op->scalars[op->scalar_count++] = scalar;
    return scalar;
}

ascend_tensor ascend_transposed(const ascend_tensor *matrix)
{
    ascend_tensor turned = *matrix;
    if (matrix->rank >= 2) {
        uint32_t a = matrix->rank - 2, b = matrix->rank - 1;
        turned.dims[a] = matrix->dims[b];
        turned.dims[b] = matrix->dims[a];
        turned.strides[a] = matrix->strides[b];
        turned.strides[b] = matrix->strides[a];
    }
    return turned;
}

ascend_status ascend_finish(ascend_op *op, ascend_op **out)
{
    *out = NULL;
    if (!op)
        return (ascend_status){ASCEND_NO_DESCRIPTOR, "calloc"};
    if (op->status.code) {
        ascend_status status = op->status;
        ascend_free_op(op);
        return status;
    }
    *out = op;
    return OK;
}

uint64_t ascend_workspace_bytes(const ascend_op *op)
{
    return op->workspace_bytes;
}

ascend_status ascend_make_repeatable(ascend_op *op)
{
    if (op->is_repeatable)
        return OK;
    if (!op->executor)
        return (ascend_status){ASCEND_MISUSE, "aclSetAclOpExecutorRepeatable"};
    if (!op->table->aclSetAclOpExecutorRepeatable)
        return (ascend_status){ASCEND_NO_SYMBOL, "aclSetAclOpExecutorRepeatable"};
    int32_t code = op->table->aclSetAclOpExecutorRepeatable(op->executor);
    if (code)
        return (ascend_status){code, "aclSetAclOpExecutorRepeatable"};
    op->is_repeatable = true;
    return OK;
}

ascend_status ascend_rebind(ascend_op *op, uint32_t number, void *data)
{
    const struct ascend_table *t = op->table;
    if (!op->is_repeatable || number >= op->operand_count)
        return (ascend_status){ASCEND_MISUSE, "ascend_rebind"};
    struct operand *slot = &op->operands[number];
    const char *call;
    int32_t code = ASCEND_NO_SYMBOL;
    if (slot->list) {
        call = "aclSetDynamicInputTensorAddr";
        if (slot->is_output)
            code = ASCEND_MISUSE;
        else if (t->aclSetDynamicInputTensorAddr)
            code = t->aclSetDynamicInputTensorAddr(op->executor, slot->index, 0, slot->list, data);
    } else if (!slot->tensor) {
        call = "ascend_rebind";
        code = ASCEND_MISUSE;
    } else if (slot->is_output) {
        call = "aclSetOutputTensorAddr";
        if (t->aclSetOutputTensorAddr)
            code = t->aclSetOutputTensorAddr(op->executor, slot->index, slot->tensor, data);
    } else {
        call = "aclSetInputTensorAddr";
        if (t->aclSetInputTensorAddr)
            code = t->aclSetInputTensorAddr(op->executor, slot->index, slot->tensor, data);
    }
    return code ? (ascend_status){code, call} : OK;
}

ascend_status ascend_launch_op(ascend_op *op, void *workspace, uint64_t workspace_bytes, aclrtStream stream)
{
    if (!op->executor || workspace_bytes < op->workspace_bytes)
        return (ascend_status){ASCEND_MISUSE, op->launch_name};
    aclOpExecutor *executor = op->executor;
    if (!op->is_repeatable)
        op->executor = NULL; /* Phase 2 frees the executor, even if it fails. */
    int32_t code = op->launch(op->workspace_bytes ? workspace : NULL, op->workspace_bytes, executor, stream);
    return code ? (ascend_status){code, op->launch_name} : OK;
}

/* The executor is destroyed first, because a repeatable one refers to the descriptors. A function of the table created each
 * object, and the same library contains the function that destroys it. */
void ascend_free_op(ascend_op *op)
{
    if (!op)
        return;
    const struct ascend_table *t = op->table;
    if (op->executor && t->aclDestroyAclOpExecutor)
        t->aclDestroyAclOpExecutor(op->executor);
    for (uint32_t i = 0; i < op->operand_count; i++) {
        if (op->operands[i].tensor && t->aclDestroyTensor)
            t->aclDestroyTensor(op->operands[i].tensor);
        if (op->operands[i].list && t->aclDestroyTensorList)
            t->aclDestroyTensorList(op->operands[i].list);
    }
    for (uint32_t i = 0; i < op->array_count; i++)
        if (t->aclDestroyIntArray)
            t->aclDestroyIntArray(op->arrays[i]);
    for (uint32_t i = 0; i < op->scalar_count; i++)
        if (t->aclDestroyScalar)
            t->aclDestroyScalar(op->scalars[i]);
    free(op);
}

static const char *const NAMES[] = {
#define NAME(result, name, parameters) #name,
    ASCEND_BASE_FUNCTIONS(NAME) ASCEND_QUERIES(NAME)
#undef NAME
#define NAME(name) #name,
        ASCEND_LAUNCHES(NAME)
#undef NAME
};

_Static_assert(sizeof(struct ascend_table) == sizeof NAMES, "the table has exactly one address per name");

size_t ascend_table_bytes(void)
{
    return sizeof(struct ascend_table);
}

const char *ascend_symbol_name(size_t i)
{
    return i < sizeof NAMES / sizeof NAMES[0] ? NAMES[i] : NULL;
}

void ascend_table_set(struct ascend_table *table, size_t i, void *address)
{
    memcpy((char *)table + i * sizeof address, &address, sizeof address);
}
