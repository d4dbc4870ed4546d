//! The sizes that a runner is built for.

use crate::graph::Bucket;
use crate::settings::with_methods;

/// Sizes that fix a runner's buffers.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct RunnerShape {
    /// Upper bounds of one batch.
    pub bucket: Bucket,
    /// Most sequences a batch has.
    pub max_seqs: usize,
    /// Most blocks a sequence has.
    pub max_blocks_per_seq: usize,
    /// Tokens a block.
    pub block_size: usize,
    /// Blocks in the pool.
    pub pool_blocks: usize,
    /// Width of a row of logits.
    pub vocab_size: usize,
    /// Most batches in flight, at least 1; each has buffers of its own.
    pub max_in_flight: usize,
}

impl RunnerShape {
    /// A runner for batches up to `bucket`, with one batch in flight.
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
