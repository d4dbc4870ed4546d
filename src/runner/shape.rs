//! The sizes that a runner is built for.

use crate::graph::Bucket;

/// Sizes that fix a runner's buffers.
#[derive(Clone, Copy, Debug)]
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
