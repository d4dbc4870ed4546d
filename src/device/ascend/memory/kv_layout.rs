//! Layout of keys and values in a pool: for each layer the keys of all blocks, then the values of all blocks, each
//! block `[tokens, heads · head_dim]`, as the attention and scatter operations require.

#![forbid(unsafe_code)]

use ascend_sys::ElemType;

use crate::device::KvLayout;
use crate::graph::TpRank;
use crate::kv_cache::{KvDType, KvGeometry};

/// Number of blocks after those of the caller; padding rows write to them.
pub(crate) const RESERVED_BLOCKS: u64 = 1;

/// Keys and values of one card: its shard of the heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KvShard {
    pub geometry: KvGeometry,
}

impl KvShard {
    /// Shard of a rank's card.
    pub(crate) fn for_rank(all: KvGeometry, rank: TpRank) -> Self {
        Self { geometry: KvGeometry { kv_heads: rank.share(all.kv_heads).len(), ..all } }
    }

    /// The largest shard over `cards` cards: the size of a block on each card. A card with a smaller shard could hold
    /// more blocks than its callers use.
    pub(crate) fn largest(all: KvGeometry, cards: u32) -> Self {
        Self::for_rank(all, TpRank { index: cards.saturating_sub(1), of: cards.max(1) })
    }

    pub(crate) const fn elem(&self) -> ElemType {
        match self.geometry.dtype {
            KvDType::BF16 => ElemType::BF16,
            _ => ElemType::F16,
        }
    }

    /// Number of elements of a token's keys in one layer.
    pub(crate) const fn row(&self) -> usize {
        self.geometry.kv_heads * self.geometry.head_dim
    }

    /// Bytes of a block's keys in one layer.
    pub(crate) const fn block_bytes(&self) -> usize {
        self.geometry.block_size * self.row() * 2
    }

    /// Number of blocks of a pool, including reserved ones.
    pub(crate) fn blocks(&self, pool_bytes: u64) -> usize {
        usize::try_from(pool_bytes).unwrap_or(usize::MAX) / self.geometry.bytes_per_block()
    }

    /// Byte offset in a pool of a layer's keys (`side` 0) or values (1).
    pub(crate) const fn offset(&self, layer: usize, side: usize, blocks: usize) -> usize {
        (2 * layer + side) * blocks * self.block_bytes()
    }
}

/// Layout of a block over `cards` cards: its bytes on each card.
pub(crate) fn describe(all: KvGeometry, cards: u32) -> KvLayout {
    let KvGeometry { layers, kv_heads, head_dim, block_size, dtype } = all;
    let cut = if cards > 1 { format!("-c{cards}") } else { String::new() };
    KvLayout {
        id: format!("ascend-BnBsH-{dtype:?}-l{layers}-h{kv_heads}-d{head_dim}-b{block_size}{cut}"),
        bytes_per_block: KvShard::largest(all, cards).geometry.bytes_per_block() as u64,
        alignment: super::ALIGNMENT as u64,
        reserved_blocks: RESERVED_BLOCKS,
    }
}
