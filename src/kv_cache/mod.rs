//! Bookkeeping of the KV cache: geometry of blocks, block allocator, prefix cache.
//!
//! This module uses no device and performs no I/O.

#![forbid(unsafe_code)]

mod allocator;
mod geometry;
mod lru;
mod prefix;

pub use allocator::{BlockAllocator, BlockError, BlockStats};
pub use geometry::{KvDType, KvGeometry};
pub use prefix::{BlockHashFn, PrefixHasher, PrefixHit};

/// Map keyed by ids or digests. Its hash function is fixed, so every run has the same memory layout; random keys would
/// change it.
pub(crate) type IdMap<K, V> = rustc_hash::FxHashMap<K, V>;

/// Id of one sequence. A request with `n` choices has `n` sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SeqId(pub u64);

/// Id of one physical KV block: its index in the device's pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(pub u32);
