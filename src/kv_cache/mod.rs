//! The KV cache as bookkeeping: geometry of blocks, block allocator, prefix cache. Pure: no device, no I/O.

#![forbid(unsafe_code)]

mod allocator;
mod geometry;
mod lru;
mod prefix;

pub use allocator::{BlockAllocator, BlockError, BlockStats};
pub use geometry::{KvDType, KvGeometry};
pub use prefix::{BlockHashFn, PrefixHasher, PrefixHit};

/// Map over ids and digests. A fixed hash gives the same memory layout in every run; random keys would not.
pub(crate) type IdMap<K, V> = rustc_hash::FxHashMap<K, V>;

/// One sequence the engine is generating (a request with `n` choices has `n` of them).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SeqId(pub u64);

/// One physical KV block, an index into the device's pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(pub u32);
