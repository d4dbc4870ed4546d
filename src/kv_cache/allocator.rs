//! The pool of KV blocks: who holds which block, and what may be taken next.
//!
//! Every block of the pool is in exactly one state:
//!
//! ```text
//!   free ──take──► live (held by 1..n sequences) ──last release──► cached (idle, findable)   if it was published
//!     ▲                     ▲        │                               │      │
//!     └──last release───────┼────────┘ (never published)             │      │
//!     └──evicted, oldest first, when nothing is free ────────────────┼──────┘
//!                           └──────────────── prefix hit ────────────┘
//! ```
//!
//! free + live + cached = capacity; a block's count equals the tables that name it; a table names a block once. Calls
//! that fail change nothing. Taking and giving back blocks never allocates once a table is
//! [reserved](BlockAllocator::reserve_table). No null block: the whole pool can be asked for by one sequence.

use crate::num::to_u32;
use std::sync::Arc;

use super::lru::LruList;
use super::prefix::{BlockContent, BlockRef, Lookup, PrefixHasher, PrefixHit, PrefixIndex};
use super::{BlockId, IdMap, SeqId};

/// Why a call on the pool was refused. The pool is then as it was before.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BlockError {
    /// No such sequence holds blocks (never admitted, or released before).
    #[error("sequence {0:?} holds no blocks: it was never admitted or has been released already")]
    UnknownSeq(SeqId),
    /// The sequence holds blocks already.
    #[error("sequence {0:?} holds blocks already: release it first or grow it")]
    SeqExists(SeqId),
    /// Not enough blocks.
    #[error("{needed_blocks} blocks needed, {available_blocks} available")]
    NoSpace {
        /// Blocks the call would have taken.
        needed_blocks: u32,
        /// Blocks that could be had: free and idle cached ones.
        available_blocks: u32,
    },
    /// The hit names a block whose content has gone since the look-up.
    #[error("the prefix hit is stale: block {0:?} holds something else by now, look up again")]
    StaleHit(BlockId),
    /// The hit covers more than the sequence asks room for.
    #[error("the prefix hit covers {hit_tokens} tokens, room was asked for {tokens}")]
    HitTooLong {
        /// Tokens of the hit.
        hit_tokens: u32,
        /// Tokens asked for.
        tokens: u32,
    },
}

/// Gauges and counters of a pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct BlockStats {
    /// Blocks in the pool.
    pub capacity_blocks: u32,
    /// Blocks that hold nothing.
    pub free_blocks: u32,
    /// Blocks held by sequences. 0 when nothing runs, whatever the prefix cache keeps.
    pub live_blocks: u32,
    /// Blocks held by nobody that the prefix cache keeps until the room is needed.
    pub cached_blocks: u32,
    /// Tokens that admitted sequences looked up.
    pub queried_tokens: u64,
    /// Of those, tokens found.
    pub hit_tokens: u64,
    /// Cached blocks given up for room.
    pub evicted_blocks: u64,
}

/// How far a sequence's blocks have been offered to the prefix cache.
#[derive(Clone, Copy, Debug)]
struct Chain {
    /// Leading blocks that are in the index, or whose content is there in another block.
    blocks: u32,
    /// Key and place of the last of them.
    key: u128,
    parent: BlockRef,
    /// A foreign content sits on the next key: nothing below it can be found, so nothing more is offered.
    broken: bool,
}

#[derive(Clone, Debug)]
struct SeqBlocks {
    table: Vec<BlockId>,
    chain: Chain,
    salt: Arc<[u8]>,
}

/// Bookkeeping of one pool of KV blocks, with reference counts, copy on write and prefix cache.
#[derive(Clone, Debug)]
pub struct BlockAllocator {
    block_size: u32,
    /// Tables that name a block.
    refs: Vec<u32>,
    /// Taken from the end, so that a block just given back is taken next while it is warm.
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
    /// A pool of `blocks` blocks of `block_size` tokens, without prefix cache.
    ///
    /// # Panics
    /// If `block_size` is 0 or the pool holds more than `u32::MAX` tokens; both are settled when an engine is built.
    pub fn new(blocks: u32, block_size: u32) -> Self {
        assert!(block_size > 0, "block_size is 0, at least 1 token is needed");
        assert!(blocks.checked_mul(block_size).is_some(), "{blocks} blocks of {block_size} tokens exceed u32");
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

    /// Turns the prefix cache on. `fingerprint` names the model and all else that changes what a block holds.
    #[must_use]
    pub fn with_prefix_cache(self, fingerprint: u128) -> Self {
        self.with_prefix_keyer(PrefixHasher::new(fingerprint))
    }

    /// Turns the prefix cache on with keys made by `keyer`.
    #[must_use]
    pub fn with_prefix_keyer(mut self, keyer: PrefixHasher) -> Self {
        self.index = Some(PrefixIndex::new(keyer, self.refs.len(), self.block_size as usize));
        self
    }

    /// Tokens a block.
    pub fn block_size(&self) -> u32 {
        self.block_size
    }

    /// Blocks in the pool, all of them usable.
    pub fn capacity(&self) -> u32 {
        to_u32(self.refs.len())
    }

    /// Blocks that can be had: free ones and idle cached ones.
    pub fn available(&self) -> u32 {
        to_u32(self.free.len()) + self.idle.len()
    }

    /// Blocks that hold `tokens` tokens.
    pub fn blocks_for(&self, tokens: u32) -> u32 {
        tokens.div_ceil(self.block_size)
    }

    /// Leading whole blocks of `tokens` that are cached under `salt`. The last token is never part of it: it has to be
    /// computed for its logits.
    pub fn lookup(&self, tokens: &[u32], salt: &[u8]) -> PrefixHit {
        let mut hit = PrefixHit::default();
        self.lookup_into(tokens, salt, &mut hit);
        hit
    }

    /// [`lookup`](Self::lookup) into a hit whose memory is used again.
    pub fn lookup_into(&self, tokens: &[u32], salt: &[u8], hit: &mut PrefixHit) {
        match &self.index {
            Some(index) => index.walk(tokens, salt, hit),
            None => hit.reset(salt),
        }
    }

    /// Blocks an admission with this hit would take from [`available`](Self::available): new ones, and those of the hit
    /// that are idle now.
    pub fn admission_blocks(&self, hit: &PrefixHit, tokens: u32) -> u32 {
        let idle = to_u32(hit.blocks().filter(|&block| self.idle.contains(block)).count());
        self.blocks_for(tokens).saturating_sub(to_u32(hit.links.len())) + idle
    }

    /// Gives a new sequence the hit's blocks and room for `tokens` tokens in all.
    pub fn admit(&mut self, seq: SeqId, hit: &PrefixHit, tokens: u32) -> Result<(), BlockError> {
        if self.seqs.contains_key(&seq) {
            return Err(BlockError::SeqExists(seq));
        }
        let total = self.blocks_for(tokens);
        let hits = to_u32(hit.links.len());
        if hits > total {
            return Err(BlockError::HitTooLong { hit_tokens: hit.tokens, tokens });
        }
        let alive = |link: &&BlockRef| !self.index.as_ref().is_some_and(|index| index.is_alive(**link));
        if let Some(stale) = hit.links.iter().find(alive) {
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
            table.push(self.take());
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

    /// Makes room in the sequence's table, so that growing it up to `tokens` tokens allocates nothing.
    pub fn reserve_table(&mut self, seq: SeqId, tokens: u32) -> Result<(), BlockError> {
        let blocks = self.blocks_for(tokens).min(self.capacity()) as usize;
        let table = &mut self.seqs.get_mut(&seq).ok_or(BlockError::UnknownSeq(seq))?.table;
        table.reserve_exact(blocks.saturating_sub(table.len()));
        Ok(())
    }

    /// Gives the sequence room for `tokens` tokens in all; all or nothing.
    pub fn grow(&mut self, seq: SeqId, tokens: u32) -> Result<(), BlockError> {
        // No row is written below the room itself, hence nothing is copied.
        self.prepare_rows(seq, u32::MAX, tokens, &mut Vec::new())
    }

    /// Makes every block from the one with token `from_token` on the sequence's own. `copies` receives `(from, to)` where
    /// earlier tokens have to be carried over before the next write.
    pub fn make_writable(
        &mut self,
        seq: SeqId,
        from_token: u32,
        copies: &mut Vec<(BlockId, BlockId)>,
    ) -> Result<(), BlockError> {
        let capacity = to_u32(self.table(seq).len()) * self.block_size;
        self.prepare_rows(seq, from_token, capacity, copies)
    }

    /// Before rows `from_token..tokens` are written: grows the sequence to `tokens` and makes those rows' blocks its own, in
    /// one all-or-nothing call.
    pub fn prepare_rows(
        &mut self,
        seq: SeqId,
        from_token: u32,
        tokens: u32,
        copies: &mut Vec<(BlockId, BlockId)>,
    ) -> Result<(), BlockError> {
        let table = &self.seqs.get(&seq).ok_or(BlockError::UnknownSeq(seq))?.table;
        let wanted = self.blocks_for(tokens) as usize;
        let first = (from_token / self.block_size) as usize;
        let written = first.min(table.len())..wanted.clamp(first.min(table.len()), table.len());
        let shared = table[written.clone()].iter().filter(|block| self.refs[block.0 as usize] > 1).count();
        self.require(to_u32(shared + wanted.saturating_sub(table.len())))?;

        for at in written {
            let old = self.seqs[&seq].table[at];
            let carries_rows = at == first && !from_token.is_multiple_of(self.block_size);
            if self.refs[old.0 as usize] > 1 {
                let new = self.take();
                self.refs[old.0 as usize] -= 1;
                if carries_rows {
                    copies.push((old, new));
                }
                self.rewrite(seq, at, new);
            } else if self.index.as_ref().is_some_and(|index| index.contains(old)) {
                // The content that made it findable is about to be overwritten.
                self.unpublish(old);
                self.rewrite(seq, at, old);
            }
        }
        while self.table(seq).len() < wanted {
            let new = self.take();
            self.seqs.entry(seq).and_modify(|held| held.table.push(new));
        }
        Ok(())
    }

    /// Offers what the sequence has computed: `tokens` are its tokens from the start whose keys and values are written. Full
    /// blocks become findable; where the content is known already, the block that had it first stays the one to find.
    pub fn publish(&mut self, seq: SeqId, tokens: &[u32]) {
        let (Some(index), Some(held)) = (&mut self.index, self.seqs.get_mut(&seq)) else { return };
        let full = (tokens.len() / self.block_size as usize).min(held.table.len());
        if full <= held.chain.blocks as usize || held.chain.broken {
            return;
        }
        if !index.is_alive(held.chain.parent) {
            // The block that stood for our last one is gone: start over and offer our own copies.
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
                    // After starting over, our own block may still stand under a parent that has gone.
                    index.remove(own);
                    index.insert(own, &content)
                }
            };
            held.chain = Chain { blocks: to_u32(at) + 1, key, parent: link, broken: false };
        }
    }

    /// Lets `child` share all blocks of `parent`. Whoever writes first copies, see
    /// [`make_writable`](Self::make_writable).
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

    /// Takes the sequence's blocks back. Published ones stay findable until their room is needed.
    pub fn release(&mut self, seq: SeqId) -> Result<(), BlockError> {
        let held = self.seqs.remove(&seq).ok_or(BlockError::UnknownSeq(seq))?;
        // From the end, so that a chain's tail grows old before the head it hangs on.
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

    /// The sequence's blocks in order; empty for a sequence that holds none.
    pub fn table(&self, seq: SeqId) -> &[BlockId] {
        self.seqs.get(&seq).map_or(&[], |held| &held.table)
    }

    /// Gauges and counters.
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

    /// Every invariant named at the head of this file; the error says which one broke.
    pub fn check(&self) -> Result<(), String> {
        let mut counted = vec![0u32; self.refs.len()];
        for (seq, held) in &self.seqs {
            let mut seen = held.table.clone();
            seen.sort_unstable();
            if seen.windows(2).any(|pair| pair[0] == pair[1]) {
                return Err(format!("{seq:?} names a block twice: {:?}", held.table));
            }
            for block in seen {
                counted[block.0 as usize] += 1;
            }
        }
        if counted != self.refs {
            return Err(format!("counts are {:?}, the tables name {counted:?}", self.refs));
        }
        let mut states = counted.iter().map(|&refs| u32::from(refs > 0)).collect::<Vec<_>>();
        for block in self.free.iter().copied().chain(self.idle.iter()) {
            states[block.0 as usize] += 1;
        }
        if let Some(block) = states.iter().position(|&states| states != 1) {
            return Err(format!("block {block} is in {} states of free, live, cached", states[block]));
        }
        if self.idle.iter().count() != self.idle.len() as usize {
            return Err(format!("{} idle blocks are linked, {} counted", self.idle.iter().count(), self.idle.len()));
        }
        let Some(index) = &self.index else {
            return if self.idle.len() == 0 { Ok(()) } else { Err("idle blocks without a prefix cache".into()) };
        };
        if let Some(block) = self.free.iter().find(|&&block| index.contains(block)) {
            return Err(format!("free block {block:?} is still findable"));
        }
        if let Some(block) = self.idle.iter().find(|&block| !index.contains(block)) {
            return Err(format!("idle block {block:?} cannot be found"));
        }
        if index.len() > self.refs.len() {
            return Err(format!("{} contents in {} blocks", index.len(), self.refs.len()));
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

    /// One block, held once. The caller has made sure that one is available.
    fn take(&mut self) -> BlockId {
        let block = self.free.pop().unwrap_or_else(|| {
            let oldest = self.idle.pop_oldest().expect("availability was checked before");
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

    /// Puts `block` into the table at `at`. What was offered from there on is void.
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
