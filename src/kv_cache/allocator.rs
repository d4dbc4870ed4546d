//! Allocator of the pool of KV blocks: block tables, reference counts, copy on write, prefix cache.
//!
//! Each block of the pool is in exactly one state:
//!
//! ```text
//!   free ──alloc─► live (held by 1..n sequences) ──last release──► cached (idle, in the index)   if it was published
//!     ▲                     ▲        │                               │      │
//!     └──last release───────┼────────┘ (never published)             │      │
//!     └──evicted, oldest first, when no block is free ───────────────┼──────┘
//!                           └──────────────── prefix hit ────────────┘
//! ```
//!
//! Invariants: free + live + cached = capacity. The reference count of a block equals the number of block tables that
//! contain it. A block table contains a block at most once. A call that fails changes nothing.
//!
//! Allocating and releasing blocks allocates no memory once a block table is [reserved](BlockAllocator::reserve_table).
//! The pool has no null block: one sequence can use the whole pool.

use crate::num::to_u32;
use std::sync::Arc;

use super::lru::LruList;
use super::prefix::{BlockContent, BlockRef, Lookup, PrefixHasher, PrefixHit, PrefixIndex};
use super::{BlockId, IdMap, SeqId};

/// Reason why a call on the pool failed. The failed call changed nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BlockError {
    /// The sequence holds no blocks: it was never admitted, or it has been released.
    #[error("sequence {0:?} holds no blocks: it was never admitted or has been released already")]
    UnknownSeq(SeqId),
    /// The sequence already holds blocks.
    #[error("sequence {0:?} already holds blocks: release it first or grow it")]
    SeqExists(SeqId),
    /// The pool has too few available blocks.
    #[error("the call needs {needed_blocks} blocks, but only {available_blocks} are available")]
    NoSpace {
        /// Number of blocks that the call needs.
        needed_blocks: u32,
        /// Number of available blocks: free and idle cached ones.
        available_blocks: u32,
    },
    /// The prefix hit contains a block whose content has changed since the lookup.
    #[error("the prefix hit is stale: the content of block {0:?} has changed, look up again")]
    StaleHit(BlockId),
    /// The prefix hit covers more tokens than the admission requests.
    #[error("the prefix hit covers {hit_tokens} tokens, expected at most the {tokens} tokens of the admission")]
    HitTooLong {
        /// Number of tokens of the hit.
        hit_tokens: u32,
        /// Number of requested tokens.
        tokens: u32,
    },
}

/// Gauges and counters of a pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct BlockStats {
    /// Number of blocks in the pool.
    pub capacity_blocks: u32,
    /// Number of free blocks.
    pub free_blocks: u32,
    /// Number of blocks held by sequences; 0 while no sequence is running, however many blocks the prefix cache keeps.
    pub live_blocks: u32,
    /// Number of idle blocks: no sequence holds them, and the prefix cache keeps them until they are evicted.
    pub cached_blocks: u32,
    /// Number of tokens of all prefix lookups of admitted sequences.
    pub queried_tokens: u64,
    /// Number of those tokens that the prefix cache contained.
    pub hit_tokens: u64,
    /// Number of cached blocks that were evicted.
    pub evicted_blocks: u64,
}

/// Progress of a sequence in publishing its blocks to the prefix cache.
#[derive(Clone, Copy, Debug)]
struct Chain {
    /// Number of leading blocks that are in the index, or whose content is in the index in another block.
    blocks: u32,
    /// Key of the last of them; `parent` is its entry.
    key: u128,
    parent: BlockRef,
    /// Other content has the key of the next block (a collision): no later block could be found, so none is published.
    broken: bool,
}

#[derive(Clone, Debug)]
struct SeqBlocks {
    table: Vec<BlockId>,
    chain: Chain,
    salt: Arc<[u8]>,
}

/// Allocator of one pool of KV blocks, with reference counts, copy on write and prefix cache.
#[derive(Clone, Debug)]
pub struct BlockAllocator {
    block_size: u32,
    /// Reference count of each block: number of block tables that contain it.
    refs: Vec<u32>,
    /// Stack of free blocks: the block freed last is allocated next, while it is still in a processor cache.
    free: Vec<BlockId>,
    idle: LruList,
    index: Option<PrefixIndex>,
    seqs: IdMap<SeqId, SeqBlocks>,
    no_salt: Arc<[u8]>,
    queried_tokens: u64,
    hit_tokens: u64,
    evicted_blocks: u64,
}

impl BlockAllocator {
    /// Creates a pool of `blocks` blocks of `block_size` tokens, without prefix cache.
    ///
    /// # Panics
    /// If `block_size` is 0 or the pool holds more than `u32::MAX` tokens. The engine checks both when it is built.
    pub fn new(blocks: u32, block_size: u32) -> Self {
        assert!(block_size > 0, "block_size is 0, expected at least 1 token");
        assert!(
            blocks.checked_mul(block_size).is_some(),
            "{blocks} blocks of {block_size} tokens hold more than u32::MAX tokens"
        );
        Self {
            block_size,
            refs: vec![0; blocks as usize],
            free: (0..blocks).rev().map(BlockId).collect(),
            idle: LruList::new(blocks),
            index: None,
            seqs: IdMap::default(),
            no_salt: Arc::from([].as_slice()),
            queried_tokens: 0,
            hit_tokens: 0,
            evicted_blocks: 0,
        }
    }

    /// Enables the prefix cache. `fingerprint` identifies the model and everything else that changes the content of a
    /// block.
    #[must_use]
    pub fn with_prefix_cache(self, fingerprint: u128) -> Self {
        self.with_prefix_keyer(PrefixHasher::new(fingerprint))
    }

    /// Enables the prefix cache with keys computed by `keyer`.
    #[must_use]
    pub fn with_prefix_keyer(mut self, keyer: PrefixHasher) -> Self {
        self.index = Some(PrefixIndex::new(keyer, self.refs.len(), self.block_size as usize));
        self
    }

    /// Returns the number of tokens per block.
    pub fn block_size(&self) -> u32 {
        self.block_size
    }

    /// Returns the number of blocks in the pool; all of them are usable.
    pub fn capacity(&self) -> u32 {
        to_u32(self.refs.len())
    }

    /// Returns the number of available blocks: free and idle cached ones.
    pub fn available(&self) -> u32 {
        to_u32(self.free.len()) + self.idle.len()
    }

    /// Returns the number of blocks that hold `tokens` tokens.
    pub fn blocks_for(&self, tokens: u32) -> u32 {
        tokens.div_ceil(self.block_size)
    }

    /// Looks up the leading full blocks of `tokens` that are cached under `salt`.
    ///
    /// The hit never contains the last token, which has to be computed for its logits.
    pub fn lookup(&self, tokens: &[u32], salt: &[u8]) -> PrefixHit {
        let mut hit = PrefixHit::default();
        self.lookup_into(tokens, salt, &mut hit);
        hit
    }

    /// Does the same as [`lookup`](Self::lookup), but reuses the memory of `hit`.
    pub fn lookup_into(&self, tokens: &[u32], salt: &[u8], hit: &mut PrefixHit) {
        match &self.index {
            Some(index) => index.walk(tokens, salt, hit),
            None => hit.reset(salt),
        }
    }

    /// Returns the number of [available](Self::available) blocks that an admission with this hit uses.
    ///
    /// These are new blocks, and blocks of the hit that are idle now.
    pub fn admission_blocks(&self, hit: &PrefixHit, tokens: u32) -> u32 {
        let idle = to_u32(hit.blocks().filter(|&block| self.idle.contains(block)).count());
        self.blocks_for(tokens).saturating_sub(to_u32(hit.links.len())) + idle
    }

    /// Allocates the block table of a new sequence: the blocks of the hit, then new blocks, for `tokens` tokens in all.
    ///
    /// # Errors
    /// [`BlockError::SeqExists`] if the sequence already holds blocks; [`BlockError::HitTooLong`] if the hit covers
    /// more than `tokens` tokens; [`BlockError::StaleHit`] if a block of the hit has changed since the lookup;
    /// [`BlockError::NoSpace`] if the pool has too few available blocks.
    pub fn admit(&mut self, seq: SeqId, hit: &PrefixHit, tokens: u32) -> Result<(), BlockError> {
        if self.seqs.contains_key(&seq) {
            return Err(BlockError::SeqExists(seq));
        }
        let total = self.blocks_for(tokens);
        let hits = to_u32(hit.links.len());
        if hits > total {
            return Err(BlockError::HitTooLong { hit_tokens: hit.tokens, tokens });
        }
        let is_stale = |link: &&BlockRef| !self.index.as_ref().is_some_and(|index| index.is_alive(**link));
        if let Some(stale) = hit.links.iter().find(is_stale) {
            return Err(BlockError::StaleHit(stale.block));
        }
        self.require(self.admission_blocks(hit, tokens))?;

        let mut table = Vec::with_capacity(total as usize);
        for block in hit.blocks() {
            if self.idle.contains(block) {
                self.idle.remove(block);
            }
            self.refs[block.0 as usize] += 1;
            table.push(block);
        }
        for _ in hits..total {
            table.push(self.allocate());
        }
        self.queried_tokens += u64::from(hit.queried_tokens);
        self.hit_tokens += u64::from(hit.tokens);
        let salt = if hit.salt.is_empty() { Arc::clone(&self.no_salt) } else { Arc::from(hit.salt.as_slice()) };
        let chain = match (&self.index, hit.links.last()) {
            (Some(_), Some(&parent)) => Chain { blocks: hits, key: hit.key, parent, broken: false },
            (index, _) => root_chain(index.as_ref(), &salt),
        };
        self.seqs.insert(seq, SeqBlocks { table, chain, salt });
        Ok(())
    }

    /// Reserves capacity in the sequence's block table, so that growing it up to `tokens` tokens allocates no memory.
    ///
    /// # Errors
    /// [`BlockError::UnknownSeq`] if the sequence holds no blocks.
    pub fn reserve_table(&mut self, seq: SeqId, tokens: u32) -> Result<(), BlockError> {
        let blocks = self.blocks_for(tokens).min(self.capacity()) as usize;
        let table = &mut self.seqs.get_mut(&seq).ok_or(BlockError::UnknownSeq(seq))?.table;
        table.reserve_exact(blocks.saturating_sub(table.len()));
        Ok(())
    }

    /// Grows the sequence's block table to `tokens` tokens in all, or changes nothing.
    ///
    /// # Errors
    /// [`BlockError::UnknownSeq`] if the sequence holds no blocks; [`BlockError::NoSpace`] if the pool has too few
    /// available blocks.
    pub fn grow(&mut self, seq: SeqId, tokens: u32) -> Result<(), BlockError> {
        // The first row to write is beyond every block, so no block is copied.
        self.prepare_rows(seq, u32::MAX, tokens, &mut Vec::new())
    }

    /// Makes the sequence the only holder of every block from the one with token `from_token` on.
    ///
    /// For a shared block that contains rows before `from_token`, `copies` receives `(from, to)`: copy that block
    /// before the next write.
    ///
    /// # Errors
    /// [`BlockError::UnknownSeq`] if the sequence holds no blocks; [`BlockError::NoSpace`] if the pool has too few
    /// available blocks for the copies.
    pub fn make_writable(
        &mut self,
        seq: SeqId,
        from_token: u32,
        copies: &mut Vec<(BlockId, BlockId)>,
    ) -> Result<(), BlockError> {
        let capacity = to_u32(self.table(seq).len()) * self.block_size;
        self.prepare_rows(seq, from_token, capacity, copies)
    }

    /// Prepares blocks for writing rows `from_token..tokens`, or changes nothing.
    ///
    /// Grows the block table to `tokens` tokens, and makes the sequence the only holder of the blocks of those rows, as
    /// [`make_writable`](Self::make_writable) does. Call this method before the rows are written.
    ///
    /// # Errors
    /// [`BlockError::UnknownSeq`] if the sequence holds no blocks; [`BlockError::NoSpace`] if the pool has too few
    /// available blocks.
    pub fn prepare_rows(
        &mut self,
        seq: SeqId,
        from_token: u32,
        tokens: u32,
        copies: &mut Vec<(BlockId, BlockId)>,
    ) -> Result<(), BlockError> {
        let table = &self.seqs.get(&seq).ok_or(BlockError::UnknownSeq(seq))?.table;
        let needed = self.blocks_for(tokens) as usize;
        let first = (from_token / self.block_size) as usize;
        let written = first.min(table.len())..needed.clamp(first.min(table.len()), table.len());
        let shared = table[written.clone()].iter().filter(|block| self.refs[block.0 as usize] > 1).count();
        self.require(to_u32(shared + needed.saturating_sub(table.len())))?;

        for at in written {
            let old = self.seqs[&seq].table[at];
            let carries_rows = at == first && !from_token.is_multiple_of(self.block_size);
            if self.refs[old.0 as usize] > 1 {
                let new = self.allocate();
                self.refs[old.0 as usize] -= 1;
                if carries_rows {
                    copies.push((old, new));
                }
                self.rewrite(seq, at, new);
            } else if self.index.as_ref().is_some_and(|index| index.contains(old)) {
                // The rows of this block are about to be overwritten, so its index entry becomes invalid.
                self.unpublish(old);
                self.rewrite(seq, at, old);
            }
        }
        while self.table(seq).len() < needed {
            let new = self.allocate();
            self.seqs.entry(seq).and_modify(|held| held.table.push(new));
        }
        Ok(())
    }

    /// Publishes the computed full blocks of a sequence to the prefix cache.
    ///
    /// `tokens` are the sequence's tokens from the start whose keys and values are written. If the index already
    /// contains the content of a block, the block that it contains stays the one that lookups find.
    pub fn publish(&mut self, seq: SeqId, tokens: &[u32]) {
        let (Some(index), Some(held)) = (&mut self.index, self.seqs.get_mut(&seq)) else { return };
        let full = (tokens.len() / self.block_size as usize).min(held.table.len());
        if full <= held.chain.blocks as usize || held.chain.broken {
            return;
        }
        if !index.is_alive(held.chain.parent) {
            // The block of the parent entry has left the index: start again from the root and publish the sequence's
            // own blocks.
            held.chain = root_chain(Some(index), &held.salt);
        }
        for at in held.chain.blocks as usize..full {
            let own = held.table[at];
            let tokens = &tokens[at * self.block_size as usize..][..self.block_size as usize];
            let key = index.keyer().child(held.chain.key, tokens);
            let content = BlockContent { key, parent: held.chain.parent, salt: &held.salt, tokens };
            let link = match index.find(&content) {
                Lookup::Same(link) => link,
                Lookup::Other { orphan: false, .. } => {
                    held.chain.broken = true;
                    return;
                }
                found => {
                    if let Lookup::Other { block, .. } = found {
                        index.remove(block);
                        if self.idle.contains(block) {
                            self.idle.remove(block);
                            self.free.push(block);
                        }
                    }
                    // After such a restart, the sequence's own block may still be in the index under a parent that has
                    // left it.
                    index.remove(own);
                    index.insert(own, &content)
                }
            };
            held.chain = Chain { blocks: to_u32(at) + 1, key, parent: link, broken: false };
        }
    }

    /// Makes `child` share all blocks of `parent`.
    ///
    /// The sequence that first writes to a shared block copies it; see [`make_writable`](Self::make_writable).
    ///
    /// # Errors
    /// [`BlockError::SeqExists`] if the child already holds blocks; [`BlockError::UnknownSeq`] if the parent holds no
    /// blocks.
    pub fn fork(&mut self, parent: SeqId, child: SeqId) -> Result<(), BlockError> {
        if self.seqs.contains_key(&child) {
            return Err(BlockError::SeqExists(child));
        }
        let held = self.seqs.get(&parent).ok_or(BlockError::UnknownSeq(parent))?.clone();
        for block in &held.table {
            self.refs[block.0 as usize] += 1;
        }
        self.seqs.insert(child, held);
        Ok(())
    }

    /// Releases the blocks of a sequence. Published blocks can be found until they are evicted.
    ///
    /// # Errors
    /// [`BlockError::UnknownSeq`] if the sequence holds no blocks.
    pub fn release(&mut self, seq: SeqId) -> Result<(), BlockError> {
        let held = self.seqs.remove(&seq).ok_or(BlockError::UnknownSeq(seq))?;
        // In reverse order, so that the tail of a chain is older, and is evicted earlier, than the blocks it depends
        // on.
        for &block in held.table.iter().rev() {
            let refs = &mut self.refs[block.0 as usize];
            *refs -= 1;
            if *refs == 0 {
                if self.index.as_ref().is_some_and(|index| index.contains(block)) {
                    self.idle.push_newest(block);
                } else {
                    self.free.push(block);
                }
            }
        }
        Ok(())
    }

    /// Returns the block table of a sequence; empty for a sequence that holds no blocks.
    pub fn table(&self, seq: SeqId) -> &[BlockId] {
        self.seqs.get(&seq).map_or(&[], |held| &held.table)
    }

    /// Returns the gauges and counters.
    pub fn stats(&self) -> BlockStats {
        BlockStats {
            capacity_blocks: self.capacity(),
            free_blocks: to_u32(self.free.len()),
            live_blocks: self.capacity() - self.available(),
            cached_blocks: self.idle.len(),
            queried_tokens: self.queried_tokens,
            hit_tokens: self.hit_tokens,
            evicted_blocks: self.evicted_blocks,
        }
    }

    /// Checks every invariant listed in the module documentation.
    ///
    /// # Errors
    /// A description of the first violated invariant.
    pub fn check(&self) -> Result<(), String> {
        let mut counted = vec![0u32; self.refs.len()];
        for (seq, held) in &self.seqs {
            let mut seen = held.table.clone();
            seen.sort_unstable();
            if seen.windows(2).any(|pair| pair[0] == pair[1]) {
                return Err(format!("the block table of {seq:?} contains a block twice: {:?}", held.table));
            }
            for block in seen {
                counted[block.0 as usize] += 1;
            }
        }
        if counted != self.refs {
            return Err(format!("reference counts are {:?}, expected {counted:?} by the block tables", self.refs));
        }
        let mut states = counted.iter().map(|&refs| u32::from(refs > 0)).collect::<Vec<_>>();
        for block in self.free.iter().copied().chain(self.idle.iter()) {
            states[block.0 as usize] += 1;
        }
        if let Some(block) = states.iter().position(|&states| states != 1) {
            return Err(format!(
                "block {block} is in {} of the states free, live and cached, expected 1",
                states[block]
            ));
        }
        if self.idle.iter().count() != self.idle.len() as usize {
            return Err(format!(
                "{} idle blocks are linked, but {} are counted",
                self.idle.iter().count(),
                self.idle.len()
            ));
        }
        let Some(index) = &self.index else {
            return if self.idle.len() == 0 {
                Ok(())
            } else {
                Err("idle blocks exist, but the prefix cache is disabled".into())
            };
        };
        if let Some(block) = self.free.iter().find(|&&block| index.contains(block)) {
            return Err(format!("free block {block:?} is still in the prefix index"));
        }
        if let Some(block) = self.idle.iter().find(|&block| !index.contains(block)) {
            return Err(format!("idle block {block:?} is not in the prefix index"));
        }
        if index.len() > self.refs.len() {
            return Err(format!("the prefix index has {} entries for {} blocks", index.len(), self.refs.len()));
        }
        index.check()
    }

    fn require(&self, needed_blocks: u32) -> Result<(), BlockError> {
        let available_blocks = self.available();
        if needed_blocks > available_blocks {
            return Err(BlockError::NoSpace { needed_blocks, available_blocks });
        }
        Ok(())
    }

    /// Allocates one block with a reference count of 1. The caller has checked that a block is available.
    fn allocate(&mut self) -> BlockId {
        let block = self.free.pop().unwrap_or_else(|| {
            let oldest = self.idle.pop_oldest().expect("the caller checked that a block is available");
            if let Some(index) = &mut self.index {
                index.remove(oldest);
            }
            self.evicted_blocks += 1;
            oldest
        });
        self.refs[block.0 as usize] = 1;
        block
    }

    fn unpublish(&mut self, block: BlockId) {
        if let Some(index) = &mut self.index {
            index.remove(block);
        }
    }

    /// Puts `block` into the block table at index `at`. Publishing restarts from the root if that block was published.
    fn rewrite(&mut self, seq: SeqId, at: usize, block: BlockId) {
        let index = self.index.as_ref();
        if let Some(held) = self.seqs.get_mut(&seq) {
            held.table[at] = block;
            if at < held.chain.blocks as usize || held.chain.broken {
                held.chain = root_chain(index, &held.salt);
            }
        }
    }
}

fn root_chain(index: Option<&PrefixIndex>, salt: &[u8]) -> Chain {
    let key = index.map_or(0, |index| index.keyer().root(salt));
    Chain { blocks: 0, key, parent: BlockRef::ROOT, broken: false }
}
