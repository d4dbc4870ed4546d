/* Writes to the paged KV cache, and attention over it. */
#include "op.h"

ascend_status ascend_kv_scatter(const struct ascend_table *t, const ascend_tensor *key, const ascend_tensor *value,
                                const ascend_tensor *slots, const ascend_tensor *key_cache,
                                const ascend_tensor *value_cache, ascend_op **op)
{
    ascend_op *o = ascend_begin(t);
    aclTensor *key_ = ascend_input(o, 0, key);
    aclTensor *value_ = ascend_input(o, 3, value);
    aclTensor *slots_ = ascend_input(o, 2, slots);
    aclTensor *key_cache_ = ascend_input(o, 1, key_cache);
    aclTensor *value_cache_ = ascend_input(o, 4, value_cache);
    /* The attributes have the type char *, but the function only reads them. */
    ASCEND_QUERY(o, aclnnScatterPaKvCache, key_, key_cache_, slots_, value_, value_cache_, NULL, NULL, NULL,
                 (char *)"Norm", (char *)"None", NULL, NULL);
    return ascend_finish(o, op);
}

ascend_status ascend_scatter_rows(const struct ascend_table *t, const ascend_tensor *cache, const ascend_tensor *indices,
                                  const ascend_tensor *updates, ascend_op **op)
{
    ascend_op *o = ascend_begin(t);
    aclTensor *cache_ = ascend_input(o, 0, cache);
    aclTensor *indices_ = ascend_input(o, 1, indices);
    aclTensor *updates_ = ascend_input(o, 2, updates);
    ASCEND_QUERY(o, aclnnScatterNdUpdate, cache_, indices_, updates_);
    return ascend_finish(o, op);
}

/* Uses V3, whose signature is stable from CANN 8.1 on, or else V2, which older versions have. They differ in three tensors
 * that only MLA uses. */
ascend_status ascend_attention(const struct ascend_table *t, const ascend_tensor *query, const ascend_tensor *key_cache,
                               const ascend_tensor *value_cache, const ascend_tensor *mask,
                               const ascend_tensor *block_table, const ascend_tensor *out,
                               const ascend_attention_shape *s, ascend_op **op)
{
    ascend_op *o = ascend_begin(t);
    aclTensor *query_ = ascend_input(o, 0, query);
    aclTensorList *key_ = ascend_input_list(o, 1, key_cache);
    aclTensorList *value_ = ascend_input_list(o, 2, value_cache);
    aclTensor *mask_ = ascend_input(o, 4, mask);
    aclTensor *table_ = ascend_input(o, 14, block_table);
    aclTensor *out_ = ascend_output(o, 0, out);
    aclIntArray *query_ends = ascend_int_array(o, s->query_ends, s->seqs);
    aclIntArray *kv_lens = ascend_int_array(o, s->kv_lens, s->seqs);
    char *layout = (char *)s->layout;
    if (t->aclnnFusedInferAttentionScoreV3)
        ASCEND_QUERY(o, aclnnFusedInferAttentionScoreV3, query_, key_, value_, NULL, mask_, query_ends, kv_lens, NULL, NULL,
                     NULL, NULL, NULL, NULL, NULL, table_, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
                     NULL, NULL, s->heads, s->scale, s->pre_tokens, s->next_tokens, layout, s->kv_heads, s->sparse_mode,
                     s->inner_precise, s->block_size, 0, false, 0, 0, out_, NULL);
    else
        ASCEND_QUERY(o, aclnnFusedInferAttentionScoreV2, query_, key_, value_, NULL, mask_, query_ends, kv_lens, NULL, NULL,
                     NULL, NULL, NULL, NULL, NULL, table_, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, s->heads,
                     s->scale, s->pre_tokens, s->next_tokens, layout, s->kv_heads, s->sparse_mode, s->inner_precise,
                     s->block_size, 0, false, 0, 0, out_, NULL);
    return ascend_finish(o, op);
}
