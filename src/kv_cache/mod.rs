//! The KV cache as bookkeeping: geometry of blocks, block allocator, prefix cache. Pure: no device, no I/O.

#![forbid(unsafe_code)]

mod allocator;
mod geometry;
pub(crate) mod id_map;
mod lru;
mod prefix;

pub use allocator::{BlockAllocator, BlockError, BlockStats};
pub use geometry::{KvDType, KvGeometry};
pub use prefix::{BlockHashFn, PrefixHasher, PrefixHit};

/// One sequence the engine is generating (a request with `n` choices has `n` of them).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SeqId(pub u64);

/// One physical KV block, an index into the device's pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(pub u32);
