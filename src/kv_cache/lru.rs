//! LRU list of idle cached blocks: no sequence holds them, and the prefix index still contains them.
//!
//! A doubly linked list threaded through the pool. Each operation on one block (insert, remove, pop the oldest) runs in
//! constant time, and no call allocates memory. The list contains a block at most once.

use super::BlockId;
use crate::num::to_u32;

const NONE: u32 = u32::MAX;

/// Idle cached blocks in least-recently-used order.
#[derive(Clone, Debug)]
pub(super) struct LruList {
    /// `(previous, next)` of each block. The last element is the anchor of the ring: its `next` is the oldest block.
    links: Vec<(u32, u32)>,
    len: u32,
}

impl LruList {
    pub(super) fn new(blocks: u32) -> Self {
        let mut links = vec![(NONE, NONE); blocks as usize + 1];
        links[blocks as usize] = (blocks, blocks);
        Self { links, len: 0 }
    }

    pub(super) fn len(&self) -> u32 {
        self.len
    }

    pub(super) fn contains(&self, block: BlockId) -> bool {
        self.links[block.0 as usize].1 != NONE
    }

    pub(super) fn push_newest(&mut self, block: BlockId) {
        debug_assert!(!self.contains(block));
        let anchor = self.anchor();
        let newest = self.links[anchor as usize].0;
        self.links[block.0 as usize] = (newest, anchor);
        self.links[newest as usize].1 = block.0;
        self.links[anchor as usize].0 = block.0;
        self.len += 1;
    }

    pub(super) fn remove(&mut self, block: BlockId) {
        debug_assert!(self.contains(block));
        let (previous, next) = self.links[block.0 as usize];
        self.links[previous as usize].1 = next;
        self.links[next as usize].0 = previous;
        self.links[block.0 as usize] = (NONE, NONE);
        self.len -= 1;
    }

    pub(super) fn pop_oldest(&mut self) -> Option<BlockId> {
        let oldest = self.iter().next()?;
        self.remove(oldest);
        Some(oldest)
    }

    /// Iterates over the blocks, oldest first.
    pub(super) fn iter(&self) -> impl Iterator<Item = BlockId> + '_ {
        let anchor = self.anchor();
        let mut at = anchor;
        std::iter::from_fn(move || {
            at = self.links[at as usize].1;
            (at != anchor).then_some(BlockId(at))
        })
    }

    fn anchor(&self) -> u32 {
        to_u32(self.links.len() - 1)
    }
}
