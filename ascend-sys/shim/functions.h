/* Prototypes of the functions that the shim calls, as all versions of CANN from 8.0 to 9.2 declare them.
 *
 * Each list is an X macro with entries X(result, name, (parameters)). It defines the table of pointers, the names that the
 * loader looks up, and the comparison with the vendor's headers. */
#ifndef ASCEND_FUNCTIONS_H
#define ASCEND_FUNCTIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifndef ASCEND_VENDOR_HEADERS
typedef struct aclTensor aclTensor;
typedef struct aclTensorList aclTensorList;
typedef struct aclIntArray aclIntArray;
typedef struct aclScalar aclScalar;
typedef struct aclOpExecutor aclOpExecutor;
typedef int32_t aclnnStatus;
typedef int aclDataType;
typedef int aclFormat;
typedef void *aclrtStream;
#endif

/* Descriptors and executors. */
#define ASCEND_BASE_FUNCTIONS(X)                                                                                    \
    X(aclTensor *, aclCreateTensor,                                                                                 \
      (const int64_t *viewDims, uint64_t viewDimsNum, aclDataType dataType, const int64_t *stride,                  \
       int64_t offset, aclFormat format, const int64_t *storageDims, uint64_t storageDimsNum, void *tensorData))    \
    X(aclnnStatus, aclDestroyTensor,                                                                                \
      (const aclTensor *tensor))                                                                                    \
    X(aclScalar *, aclCreateScalar,                                                                                 \
      (void *value, aclDataType dataType))                                                                          \
    X(aclnnStatus, aclDestroyScalar,                                                                                \
      (const aclScalar *scalar))                                                                                    \
    X(aclIntArray *, aclCreateIntArray,                                                                             \
      (const int64_t *value, uint64_t size))                                                                        \
    X(aclnnStatus, aclDestroyIntArray,                                                                              \
      (const aclIntArray *array))                                                                                   \
    X(aclTensorList *, aclCreateTensorList,                                                                         \
      (const aclTensor *const *value, uint64_t size))                                                               \
    X(aclnnStatus, aclDestroyTensorList,                                                                            \
      (const aclTensorList *array))                                                                                 \
    X(aclnnStatus, aclDestroyAclOpExecutor,                                                                         \
      (aclOpExecutor *executor))                                                                                    \
    X(aclnnStatus, aclSetAclOpExecutorRepeatable,                                                                   \
      (aclOpExecutor *executor))                                                                                    \
    X(aclnnStatus, aclSetInputTensorAddr,                                                                           \
      (aclOpExecutor *executor, const size_t index, aclTensor *tensor, void *addr))                                 \
    X(aclnnStatus, aclSetOutputTensorAddr,                                                                          \
      (aclOpExecutor *executor, const size_t index, aclTensor *tensor, void *addr))                                 \
    X(aclnnStatus, aclSetDynamicInputTensorAddr,                                                                    \
      (aclOpExecutor *executor, size_t irIndex, const size_t relativeIndex, aclTensorList *tensors, void *addr))

/* Phase 1 of each operation: checks the operands, computes the tiling and returns the size of the workspace. */
#define ASCEND_QUERIES(X)                                                                                           \
    X(aclnnStatus, aclnnEmbeddingGetWorkspaceSize,                                                                  \
      (const aclTensor *weight, const aclTensor *indices, const aclTensor *out, uint64_t *workspaceSize,            \
       aclOpExecutor **executor))                                                                                   \
    X(aclnnStatus, aclnnIndexSelectGetWorkspaceSize,                                                                \
      (const aclTensor *self, int64_t dim, const aclTensor *index, aclTensor *out, uint64_t *workspaceSize,         \
       aclOpExecutor **executor))                                                                                   \
    X(aclnnStatus, aclnnRmsNormGetWorkspaceSize,                                                                    \
      (const aclTensor *x, const aclTensor *gamma, double epsilon, const aclTensor *yOut,                           \
       const aclTensor *rstdOut, uint64_t *workspaceSize, aclOpExecutor **executor))                                \
    X(aclnnStatus, aclnnAddRmsNormGetWorkspaceSize,                                                                 \
      (const aclTensor *x1, const aclTensor *x2, const aclTensor *gamma, double epsilon, const aclTensor *yOut,     \
       const aclTensor *rstdOut, const aclTensor *xOut, uint64_t *workspaceSize, aclOpExecutor **executor))         \
    X(aclnnStatus, aclnnMmGetWorkspaceSize,                                                                         \
      (const aclTensor *self, const aclTensor *mat2, aclTensor *out, int8_t cubeMathType,                           \
       uint64_t *workspaceSize, aclOpExecutor **executor))                                                          \
    X(aclnnStatus, aclnnAddmmGetWorkspaceSize,                                                                      \
      (const aclTensor *self, const aclTensor *mat1, const aclTensor *mat2, const aclScalar *beta,                  \
       const aclScalar *alpha, aclTensor *out, int8_t cubeMathType, uint64_t *workspaceSize,                        \
       aclOpExecutor **executor))                                                                                   \
    X(aclnnStatus, aclnnMatmulWeightNzGetWorkspaceSize,                                                             \
      (const aclTensor *self, const aclTensor *mat2, aclTensor *out, int8_t cubeMathType,                           \
       uint64_t *workspaceSize, aclOpExecutor **executor))                                                          \
    X(aclnnStatus, aclnnTransMatmulWeightGetWorkspaceSize,                                                          \
      (aclTensor *mmWeightRef, uint64_t *workspaceSize, aclOpExecutor **executor))                                  \
    X(aclnnStatus, aclnnRotaryPositionEmbeddingGetWorkspaceSize,                                                    \
      (const aclTensor *x, const aclTensor *cos, const aclTensor *sin, int64_t mode, aclTensor *out,                \
       uint64_t *workspaceSize, aclOpExecutor **executor))                                                          \
    X(aclnnStatus, aclnnScatterPaKvCacheGetWorkspaceSize,                                                           \
      (const aclTensor *key, aclTensor *keyCacheRef, const aclTensor *slotMapping, const aclTensor *value,          \
       aclTensor *valueCacheRef, const aclTensor *compressLensOptional,                                             \
       const aclTensor *compressSeqOffsetOptional, const aclTensor *seqLensOptional, char *cacheModeOptional,       \
       char *scatterModeOptional, const aclIntArray *stridesOptional, const aclIntArray *offsetsOptional,           \
       uint64_t *workspaceSize, aclOpExecutor **executor))                                                          \
    X(aclnnStatus, aclnnScatterNdUpdateGetWorkspaceSize,                                                            \
      (aclTensor *varRef, const aclTensor *indices, const aclTensor *updates, uint64_t *workspaceSize,              \
       aclOpExecutor **executor))                                                                                   \
    X(aclnnStatus, aclnnFusedInferAttentionScoreV3GetWorkspaceSize,                                                 \
      (const aclTensor *query, const aclTensorList *key, const aclTensorList *value,                                \
       const aclTensor *pseShiftOptional, const aclTensor *attenMaskOptional,                                       \
       const aclIntArray *actualSeqLengthsOptional, const aclIntArray *actualSeqLengthsKvOptional,                  \
       const aclTensor *deqScale1Optional, const aclTensor *quantScale1Optional,                                    \
       const aclTensor *deqScale2Optional, const aclTensor *quantScale2Optional,                                    \
       const aclTensor *quantOffset2Optional, const aclTensor *antiquantScaleOptional,                              \
       const aclTensor *antiquantOffsetOptional, const aclTensor *blockTableOptional,                               \
       const aclTensor *queryPaddingSizeOptional, const aclTensor *kvPaddingSizeOptional,                           \
       const aclTensor *keyAntiquantScaleOptional, const aclTensor *keyAntiquantOffsetOptional,                     \
       const aclTensor *valueAntiquantScaleOptional, const aclTensor *valueAntiquantOffsetOptional,                 \
       const aclTensor *keySharedPrefixOptional, const aclTensor *valueSharedPrefixOptional,                        \
       const aclIntArray *actualSharedPrefixLenOptional, const aclTensor *queryRopeOptional,                        \
       const aclTensor *keyRopeOptional, const aclTensor *keyRopeAntiquantScaleOptional, int64_t numHeads,          \
       double scaleValue, int64_t preTokens, int64_t nextTokens, char *inputLayout, int64_t numKeyValueHeads,       \
       int64_t sparseMode, int64_t innerPrecise, int64_t blockSize, int64_t antiquantMode, bool softmaxLseFlag,     \
       int64_t keyAntiquantMode, int64_t valueAntiquantMode, const aclTensor *attentionOut,                         \
       const aclTensor *softmaxLse, uint64_t *workspaceSize, aclOpExecutor **executor))                             \
    X(aclnnStatus, aclnnFusedInferAttentionScoreV2GetWorkspaceSize,                                                 \
      (const aclTensor *query, const aclTensorList *key, const aclTensorList *value,                                \
       const aclTensor *pseShiftOptional, const aclTensor *attenMaskOptional,                                       \
       const aclIntArray *actualSeqLengthsOptional, const aclIntArray *actualSeqLengthsKvOptional,                  \
       const aclTensor *deqScale1Optional, const aclTensor *quantScale1Optional,                                    \
       const aclTensor *deqScale2Optional, const aclTensor *quantScale2Optional,                                    \
       const aclTensor *quantOffset2Optional, const aclTensor *antiquantScaleOptional,                              \
       const aclTensor *antiquantOffsetOptional, const aclTensor *blockTableOptional,                               \
       const aclTensor *queryPaddingSizeOptional, const aclTensor *kvPaddingSizeOptional,                           \
       const aclTensor *keyAntiquantScaleOptional, const aclTensor *keyAntiquantOffsetOptional,                     \
       const aclTensor *valueAntiquantScaleOptional, const aclTensor *valueAntiquantOffsetOptional,                 \
       const aclTensor *keySharedPrefixOptional, const aclTensor *valueSharedPrefixOptional,                        \
       const aclIntArray *actualSharedPrefixLenOptional, int64_t numHeads, double scaleValue, int64_t preTokens,    \
       int64_t nextTokens, char *inputLayout, int64_t numKeyValueHeads, int64_t sparseMode,                         \
       int64_t innerPrecise, int64_t blockSize, int64_t antiquantMode, bool softmaxLseFlag,                         \
       int64_t keyAntiquantMode, int64_t valueAntiquantMode, const aclTensor *attentionOut,                         \
       const aclTensor *softmaxLse, uint64_t *workspaceSize, aclOpExecutor **executor))                             \
    X(aclnnStatus, aclnnSwiGluGetWorkspaceSize,                                                                     \
      (const aclTensor *x, int64_t dim, const aclTensor *out, uint64_t *workspaceSize,                              \
       aclOpExecutor **executor))                                                                                   \
    X(aclnnStatus, aclnnSiluGetWorkspaceSize,                                                                       \
      (const aclTensor *self, aclTensor *out, uint64_t *workspaceSize, aclOpExecutor **executor))                   \
    X(aclnnStatus, aclnnGeluV2GetWorkspaceSize,                                                                     \
      (const aclTensor *x, int64_t approximate, aclTensor *y, uint64_t *workspaceSize,                              \
       aclOpExecutor **executor))                                                                                   \
    X(aclnnStatus, aclnnTanhGetWorkspaceSize,                                                                       \
      (const aclTensor *self, aclTensor *out, uint64_t *workspaceSize, aclOpExecutor **executor))                   \
    X(aclnnStatus, aclnnAddGetWorkspaceSize,                                                                        \
      (const aclTensor *self, const aclTensor *other, const aclScalar *alpha, aclTensor *out,                       \
       uint64_t *workspaceSize, aclOpExecutor **executor))                                                          \
    X(aclnnStatus, aclnnMulGetWorkspaceSize,                                                                        \
      (const aclTensor *self, const aclTensor *other, aclTensor *out, uint64_t *workspaceSize,                      \
       aclOpExecutor **executor))                                                                                   \
    X(aclnnStatus, aclnnMulsGetWorkspaceSize,                                                                       \
      (const aclTensor *self, const aclScalar *other, aclTensor *out, uint64_t *workspaceSize,                      \
       aclOpExecutor **executor))                                                                                   \
    X(aclnnStatus, aclnnCastGetWorkspaceSize,                                                                       \
      (const aclTensor *self, const aclDataType dtype, aclTensor *out, uint64_t *workspaceSize,                     \
       aclOpExecutor **executor))                                                                                   \
    X(aclnnStatus, aclnnInplaceCopyGetWorkspaceSize,                                                                \
      (aclTensor *selfRef, const aclTensor *src, uint64_t *workspaceSize, aclOpExecutor **executor))                \
    X(aclnnStatus, aclnnArgMaxGetWorkspaceSize,                                                                     \
      (const aclTensor *self, int64_t dim, bool keepdim, aclTensor *out, uint64_t *workspaceSize,                   \
       aclOpExecutor **executor))                                                                                   \
    X(aclnnStatus, aclnnTopkGetWorkspaceSize,                                                                       \
      (const aclTensor *self, int64_t k, int64_t dim, bool largest, bool sorted, aclTensor *valuesOut,              \
       aclTensor *indicesOut, uint64_t *workspaceSize, aclOpExecutor **executor))                                   \
    X(aclnnStatus, aclnnSoftmaxGetWorkspaceSize,                                                                    \
      (const aclTensor *self, int64_t dim, aclTensor *out, uint64_t *workspaceSize, aclOpExecutor **executor))      \
    X(aclnnStatus, aclnnIsFiniteGetWorkspaceSize,                                                                   \
      (const aclTensor *self, aclTensor *out, uint64_t *workspaceSize, aclOpExecutor **executor))                   \
    X(aclnnStatus, aclnnAllGetWorkspaceSize,                                                                        \
      (const aclTensor *self, const aclIntArray *dim, bool keepdim, aclTensor *out, uint64_t *workspaceSize,        \
       aclOpExecutor **executor))                                                                                   \
    X(aclnnStatus, aclnnDynamicQuantGetWorkspaceSize,                                                               \
      (const aclTensor *x, const aclTensor *smoothScalesOptional, const aclTensor *yOut,                            \
       const aclTensor *scaleOut, uint64_t *workspaceSize, aclOpExecutor **executor))                               \
    X(aclnnStatus, aclnnQuantMatmulV4GetWorkspaceSize,                                                              \
      (const aclTensor *x1, const aclTensor *x2, const aclTensor *scale, const aclTensor *offset,                   \
       const aclTensor *pertokenScaleOptional, const aclTensor *bias, bool transposeX1, bool transposeX2,           \
       const aclTensor *out, uint64_t *workspaceSize, aclOpExecutor **executor))                                    \
    X(aclnnStatus, aclnnWeightQuantBatchMatmulV2GetWorkspaceSize,                                                   \
      (const aclTensor *x, const aclTensor *weight, const aclTensor *antiquantScale,                                \
       const aclTensor *antiquantOffsetOptional, const aclTensor *quantScaleOptional,                               \
       const aclTensor *quantOffsetOptional, const aclTensor *biasOptional, int antiquantGroupSize,                 \
       const aclTensor *y, uint64_t *workspaceSize, aclOpExecutor **executor))                                      \
    X(aclnnStatus, aclnnMoeGatingTopKSoftmaxV2GetWorkspaceSize,                                                     \
      (const aclTensor *x, const aclTensor *finishedOptional, int64_t k, int64_t renorm,                            \
       bool outputSoftmaxResultFlag, const aclTensor *yOut, const aclTensor *expertIdxOut,                          \
       const aclTensor *softmaxResultOutOptional, uint64_t *workspaceSize, aclOpExecutor **executor))               \
    X(aclnnStatus, aclnnMoeInitRoutingV2GetWorkspaceSize,                                                           \
      (const aclTensor *x, const aclTensor *expertIdx, int64_t activeNumOptional,                                   \
       int64_t expertCapacityOptional, int64_t expertNumOptional, int64_t dropPadModeOptional,                      \
       int64_t expertTokensCountOrCumsumFlagOptional, bool expertTokensBeforeCapacityFlagOptional,                  \
       const aclTensor *expandedXOut, const aclTensor *expandedRowIdxOut,                                           \
       const aclTensor *expertTokensCountOrCumsumOutOptional,                                                       \
       const aclTensor *expertTokensBeforeCapacityOutOptional, uint64_t *workspaceSize,                             \
       aclOpExecutor **executor))                                                                                   \
    X(aclnnStatus, aclnnGroupedMatmulV4GetWorkspaceSize,                                                            \
      (const aclTensorList *x, const aclTensorList *weight, const aclTensorList *biasOptional,                      \
       const aclTensorList *scaleOptional, const aclTensorList *offsetOptional,                                     \
       const aclTensorList *antiquantScaleOptional, const aclTensorList *antiquantOffsetOptional,                   \
       const aclTensorList *perTokenScaleOptional, const aclTensor *groupListOptional,                              \
       const aclTensorList *activationInputOptional, const aclTensorList *activationQuantScaleOptional,             \
       const aclTensorList *activationQuantOffsetOptional, int64_t splitItem, int64_t groupType,                    \
       int64_t groupListType, int64_t actType, aclTensorList *out, aclTensorList *activationFeatureOutOptional,     \
       aclTensorList *dynQuantScaleOutOptional, uint64_t *workspaceSize, aclOpExecutor **executor))                 \
    X(aclnnStatus, aclnnMoeFinalizeRoutingV2GetWorkspaceSize,                                                       \
      (const aclTensor *expandedX, const aclTensor *expandedRowIdx, const aclTensor *x1Optional,                    \
       const aclTensor *x2Optional, const aclTensor *biasOptional, const aclTensor *scalesOptional,                 \
       const aclTensor *expertIdxOptional, int64_t dropPadMode, const aclTensor *out, uint64_t *workspaceSize,      \
       aclOpExecutor **executor))                                                                                   \
    X(aclnnStatus, aclnnCalculateMatmulWeightSizeV2,                                                                \
      (const aclIntArray *tensorShape, aclDataType dataType, uint64_t *weightTensorSize))

/* Phase 2 of each operation: queues it on a stream. */
#define ASCEND_LAUNCHES(X)                                                                                          \
    X(aclnnEmbedding)                                                                                                \
    X(aclnnIndexSelect)                                                                                              \
    X(aclnnRmsNorm)                                                                                                  \
    X(aclnnAddRmsNorm)                                                                                               \
    X(aclnnMm)                                                                                                       \
    X(aclnnAddmm)                                                                                                    \
    X(aclnnMatmulWeightNz)                                                                                           \
    X(aclnnTransMatmulWeight)                                                                                        \
    X(aclnnRotaryPositionEmbedding)                                                                                  \
    X(aclnnScatterPaKvCache)                                                                                         \
    X(aclnnScatterNdUpdate)                                                                                          \
    X(aclnnFusedInferAttentionScoreV3)                                                                               \
    X(aclnnFusedInferAttentionScoreV2)                                                                               \
    X(aclnnSwiGlu)                                                                                                   \
    X(aclnnSilu)                                                                                                     \
    X(aclnnGeluV2)                                                                                                   \
    X(aclnnTanh)                                                                                                     \
    X(aclnnAdd)                                                                                                      \
    X(aclnnMul)                                                                                                      \
    X(aclnnMuls)                                                                                                     \
    X(aclnnCast)                                                                                                     \
    X(aclnnInplaceCopy)                                                                                              \
    X(aclnnArgMax)                                                                                                   \
    X(aclnnTopk)                                                                                                     \
    X(aclnnSoftmax)                                                                                                  \
    X(aclnnIsFinite)                                                                                                 \
    X(aclnnAll)                                                                                                      \
    X(aclnnDynamicQuant)                                                                                             \
    X(aclnnQuantMatmulV4)                                                                                            \
    X(aclnnWeightQuantBatchMatmulV2)                                                                                 \
    X(aclnnMoeGatingTopKSoftmaxV2)                                                                                   \
    X(aclnnMoeInitRoutingV2)                                                                                         \
    X(aclnnGroupedMatmulV4)                                                                                          \
    X(aclnnMoeFinalizeRoutingV2)

typedef aclnnStatus (*ascend_launch)(void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, aclrtStream stream);

#endif
