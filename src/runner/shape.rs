//! Shape of a runner: the sizes for which its buffers are allocated.

use crate::graph::Bucket;
use crate::settings::with_methods;

/// Sizes of a runner, which determine the sizes of its buffers.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct RunnerShape {
    /// Upper bounds of one batch.
    pub bucket: Bucket,
    /// Maximum number of sequences per batch.
    pub max_seqs: usize,
    /// Maximum number of blocks per sequence.
    pub max_blocks_per_seq: usize,
    /// Number of tokens per block.
    pub block_size: usize,
    /// Number of blocks in the pool.
    pub pool_blocks: usize,
    /// Width of a logit row: the size of the model's vocabulary.
    pub vocab_size: usize,
    /// Maximum number of in-flight batches, at least 1; each has buffers of its own.
    pub max_in_flight: usize,
}

impl RunnerShape {
    /// Creates the shape of a runner for batches up to `bucket`, with one in-flight batch.
    pub fn new(bucket: Bucket, block_size: usize, pool_blocks: usize, vocab_size: usize) -> Self {
        Self {
            bucket,
            max_seqs: bucket.seqs,
            max_blocks_per_seq: bucket.kv_tokens.div_ceil(block_size.max(1)).min(pool_blocks),
            block_size,
            pool_blocks,
            vocab_size,
            max_in_flight: 1,
        }
    }

    with_methods! {
        value {
            max_in_flight with_max_in_flight: usize,
        }
    }
}
