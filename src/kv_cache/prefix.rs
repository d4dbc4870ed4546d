//! Index of the prefix cache: maps chained content keys to blocks.
//!
//! The content of a block is a chain: (model fingerprint, salt), then the tokens of block 0, of block 1, and so on. Its
//! key is a 128-bit digest, chained block by block and equal on every run and platform. The key only finds a candidate.
//! A hit also needs equal tokens, the same parent entry that the walk came from and, at the root, an equal salt. So a
//! key collision costs a cache miss and never returns other content.
//!
//! Invariants: a key maps to at most one block. A block has at most one key. A block that leaves the index also removes
//! its key. The index reserves memory for the whole pool when it is created and allocates none later.

use crate::num::to_u32;
use std::sync::Arc;

use super::{BlockId, IdMap};

/// Function that digests one block's tokens under the key of its parent.
pub type BlockHashFn = fn(parent: u128, tokens: &[u32]) -> u128;

/// Computes the chained keys of the prefix cache.
#[derive(Clone, Copy, Debug)]
pub struct PrefixHasher {
    fingerprint: u128,
    digest: BlockHashFn,
}

impl PrefixHasher {
    /// Creates the hasher of one model.
    ///
    /// `fingerprint` identifies the weights, the numerics and everything else that changes keys and values.
    pub fn new(fingerprint: u128) -> Self {
        Self { fingerprint, digest: digest_tokens }
    }

    /// Creates a hasher with another digest function, for tests that need collisions.
    pub fn with_digest(fingerprint: u128, digest: BlockHashFn) -> Self {
        Self { fingerprint, digest }
    }

    /// Returns the root key of all sequences with this salt (tenant, adapter): the parent key of block 0.
    pub fn root(&self, salt: &[u8]) -> u128 {
        digest_bytes(self.fingerprint, salt)
    }

    /// Returns the key of a block with these `tokens` whose parent block has the key `parent`.
    pub fn child(&self, parent: u128, tokens: &[u32]) -> u128 {
        (self.digest)(parent, tokens)
    }
}

/// Result of [`BlockAllocator::lookup`](super::BlockAllocator::lookup): full blocks from the start of a prompt.
#[derive(Clone, Debug, Default)]
pub struct PrefixHit {
    pub(super) links: Vec<BlockRef>,
    pub(super) salt: Vec<u8>,
    pub(super) queried_tokens: u32,
    pub(super) tokens: u32,
    pub(super) key: u128,
}

impl PrefixHit {
    /// Creates an empty hit without a lookup. The sequence's computed blocks are still published under `salt`.
    pub fn miss(salt: &[u8]) -> Self {
        Self { salt: salt.to_vec(), ..Self::default() }
    }

    /// Resets the hit to [`PrefixHit::miss`] and keeps its memory.
    pub fn reset(&mut self, salt: &[u8]) {
        self.links.clear();
        self.salt.clear();
        self.salt.extend_from_slice(salt);
        self.queried_tokens = 0;
        self.tokens = 0;
        self.key = 0;
    }

    /// Reserves capacity for a hit of `blocks` blocks and a salt of `salt_bytes` bytes.
    pub fn reserve(&mut self, blocks: usize, salt_bytes: usize) {
        self.links.reserve(blocks.saturating_sub(self.links.len()));
        self.salt.reserve(salt_bytes.saturating_sub(self.salt.len()));
    }

    /// Returns the number of cached tokens, which need not be computed: a multiple of the block size.
    pub fn tokens(&self) -> u32 {
        self.tokens
    }

    /// Iterates over the blocks of the hit, in the order of the prompt.
    pub fn blocks(&self) -> impl ExactSizeIterator<Item = BlockId> + '_ {
        self.links.iter().map(|link| link.block)
    }
}

/// Reference to one content in one block. Content numbers are never reused, so a reference becomes stale as soon as its
/// content leaves the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BlockRef {
    pub(super) block: BlockId,
    content: u64,
}

impl BlockRef {
    /// The parent of block 0 of every sequence.
    pub(super) const ROOT: Self = Self { block: BlockId(u32::MAX), content: 0 };
}

/// Content to look up or insert: a block's tokens and their position in the chain.
#[derive(Clone, Copy, Debug)]
pub(super) struct BlockContent<'a> {
    pub(super) key: u128,
    pub(super) parent: BlockRef,
    pub(super) salt: &'a Arc<[u8]>,
    pub(super) tokens: &'a [u32],
}

/// Result of a lookup of a key in the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lookup {
    Nothing,
    /// The index contains this content.
    Same(BlockRef),
    /// The index contains other content with this key. `orphan`: its parent has left the index, so no walk can reach
    /// it.
    Other {
        block: BlockId,
        orphan: bool,
    },
}

#[derive(Clone, Debug)]
struct Entry {
    key: u128,
    /// 0 if the block is not in the index.
    content: u64,
    parent: BlockRef,
    /// Salt of a block 0; `None` for later blocks, which their parent identifies.
    salt: Option<Arc<[u8]>>,
}

/// Map from key to block, with the data that verifies a hit.
#[derive(Clone, Debug)]
pub(super) struct PrefixIndex {
    keyer: PrefixHasher,
    block_size: usize,
    by_key: IdMap<u128, BlockId>,
    entries: Vec<Entry>,
    /// `block_size` tokens per block; valid while the block is in the index.
    tokens: Vec<u32>,
    last_content: u64,
}

impl PrefixIndex {
    pub(super) fn new(keyer: PrefixHasher, blocks: usize, block_size: usize) -> Self {
        let mut by_key = IdMap::default();
        // Twice the maximum number of entries: below half full, the table cleans up removed entries in place.
        by_key.reserve(2 * blocks);
        let absent = Entry { key: 0, content: 0, parent: BlockRef::ROOT, salt: None };
        Self {
            keyer,
            block_size,
            by_key,
            entries: vec![absent; blocks],
            tokens: vec![0; blocks * block_size],
            last_content: 0,
        }
    }

    pub(super) fn keyer(&self) -> &PrefixHasher {
        &self.keyer
    }

    pub(super) fn len(&self) -> usize {
        self.by_key.len()
    }

    pub(super) fn contains(&self, block: BlockId) -> bool {
        self.entries[block.0 as usize].content != 0
    }

    /// Whether the block of the link still has the same content.
    pub(super) fn is_alive(&self, link: BlockRef) -> bool {
        link == BlockRef::ROOT
            || self.entries.get(link.block.0 as usize).is_some_and(|entry| entry.content == link.content)
    }

    /// Walks from the root over the leading full blocks of `tokens` that are in the index, without the last token.
    pub(super) fn walk(&self, tokens: &[u32], salt: &[u8], hit: &mut PrefixHit) {
        hit.reset(salt);
        hit.queried_tokens = to_u32(tokens.len());
        hit.key = self.keyer.root(salt);
        let mut parent = BlockRef::ROOT;
        for chunk in tokens[..tokens.len().saturating_sub(1)].chunks_exact(self.block_size) {
            let key = self.keyer.child(hit.key, chunk);
            let Some(link) = self.by_key.get(&key).and_then(|&block| self.same(block, parent, salt, chunk)) else {
                return;
            };
            hit.links.push(link);
            hit.key = key;
            hit.tokens += to_u32(chunk.len());
            parent = link;
        }
    }

    pub(super) fn find(&self, content: &BlockContent<'_>) -> Lookup {
        let Some(&block) = self.by_key.get(&content.key) else { return Lookup::Nothing };
        match self.same(block, content.parent, content.salt, content.tokens) {
            Some(link) => Lookup::Same(link),
            None => Lookup::Other { block, orphan: !self.is_alive(self.entries[block.0 as usize].parent) },
        }
    }

    /// Inserts `block`. Its key must be unused and the block must not be in the index.
    pub(super) fn insert(&mut self, block: BlockId, content: &BlockContent<'_>) -> BlockRef {
        debug_assert!(!self.contains(block) && !self.by_key.contains_key(&content.key));
        self.last_content += 1;
        let at = block.0 as usize;
        self.entries[at] = Entry {
            key: content.key,
            content: self.last_content,
            parent: content.parent,
            salt: (content.parent == BlockRef::ROOT).then(|| Arc::clone(content.salt)),
        };
        self.tokens[at * self.block_size..][..self.block_size].copy_from_slice(content.tokens);
        self.by_key.insert(content.key, block);
        BlockRef { block, content: self.last_content }
    }

    /// Removes a block if the index contains it.
    pub(super) fn remove(&mut self, block: BlockId) {
        let entry = &mut self.entries[block.0 as usize];
        if entry.content != 0 {
            entry.content = 0;
            entry.salt = None;
            self.by_key.remove(&entry.key);
        }
    }

    fn same(&self, block: BlockId, parent: BlockRef, salt: &[u8], tokens: &[u32]) -> Option<BlockRef> {
        let at = block.0 as usize;
        let entry = &self.entries[at];
        let equal = entry.parent == parent
            && self.tokens[at * self.block_size..][..self.block_size] == *tokens
            && (parent != BlockRef::ROOT || entry.salt.as_deref() == Some(salt));
        equal.then_some(BlockRef { block, content: entry.content })
    }

    /// Checks every invariant of the index.
    pub(super) fn check(&self) -> Result<(), String> {
        let mut present = 0;
        for (at, entry) in self.entries.iter().enumerate() {
            if entry.content == 0 {
                continue;
            }
            present += 1;
            if self.by_key.get(&entry.key) != Some(&BlockId(to_u32(at))) {
                return Err(format!("block {at} is published, but its key maps to another block"));
            }
            if (entry.parent == BlockRef::ROOT) != entry.salt.is_some() {
                return Err(format!("block {at} must have a salt exactly if its parent is the root"));
            }
        }
        if present == self.by_key.len() {
            Ok(())
        } else {
            Err(format!("{present} blocks are published, but the index has {} keys", self.by_key.len()))
        }
    }
}

/// SipHash-2-4 with 128-bit output. Its key is the parent's digest, which chains the blocks without extra input; all
/// output bits are of good quality.
struct Sip([u64; 4]);

impl Sip {
    fn new(key: u128) -> Self {
        let [k0, k1] = halves(key);
        Self([
            k0 ^ 0x736f_6d65_7073_6575,
            k1 ^ 0x646f_7261_6e64_6f6d ^ 0xee,
            k0 ^ 0x6c79_6765_6e65_7261,
            k1 ^ 0x7465_6462_7974_6573,
        ])
    }

    fn round(&mut self) {
        let [v0, v1, v2, v3] = &mut self.0;
        *v0 = v0.wrapping_add(*v1);
        *v1 = v1.rotate_left(13) ^ *v0;
        *v0 = v0.rotate_left(32);
        *v2 = v2.wrapping_add(*v3);
        *v3 = v3.rotate_left(16) ^ *v2;
        *v0 = v0.wrapping_add(*v3);
        *v3 = v3.rotate_left(21) ^ *v0;
        *v2 = v2.wrapping_add(*v1);
        *v1 = v1.rotate_left(17) ^ *v2;
        *v2 = v2.rotate_left(32);
    }

    fn word(&mut self, word: u64) {
        self.0[3] ^= word;
        self.round();
        self.round();
        self.0[0] ^= word;
    }

    /// Finishes the digest. `tail` contains the bytes after the last full word (at most 7), little endian.
    fn finish(mut self, tail: u64, total_bytes: usize) -> u128 {
        self.word(tail | ((total_bytes as u64 & 0xff) << 56));
        self.0[2] ^= 0xee;
        let low = self.squeeze();
        self.0[1] ^= 0xdd;
        let high = self.squeeze();
        (u128::from(high) << 64) | u128::from(low)
    }

    fn squeeze(&mut self) -> u64 {
        for _ in 0..4 {
            self.round();
        }
        self.0[0] ^ self.0[1] ^ self.0[2] ^ self.0[3]
    }
}

/// Splits a value into its low and high halves.
#[allow(clippy::cast_possible_truncation, reason = "splitting is the purpose")]
const fn halves(value: u128) -> [u64; 2] {
    [value as u64, (value >> 64) as u64]
}

fn digest_bytes(key: u128, bytes: &[u8]) -> u128 {
    let mut sip = Sip::new(key);
    let (words, tail) = bytes.as_chunks::<8>();
    for word in words {
        sip.word(u64::from_le_bytes(*word));
    }
    let mut last = [0; 8];
    last[..tail.len()].copy_from_slice(tail);
    sip.finish(u64::from_le_bytes(last), bytes.len())
}

/// Digests the tokens' little-endian bytes.
fn digest_tokens(key: u128, tokens: &[u32]) -> u128 {
    let mut sip = Sip::new(key);
    let (pairs, tail) = tokens.as_chunks::<2>();
    for &[low, high] in pairs {
        sip.word(u64::from(low) | (u64::from(high) << 32));
    }
    sip.finish(tail.first().map_or(0, |&token| u64::from(token)), 4 * tokens.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Key of the algorithm's published test vectors: bytes 00, 01, 02, … Their messages are the prefixes of the same
    /// bytes.
    const KEY: u128 = u128::from_le_bytes([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]);

    #[test]
    fn digest_is_siphash_2_4_128() {
        let empty = [0xa3, 0x81, 0x7f, 0x04, 0xba, 0x25, 0xa8, 0xe6, 0x6d, 0xf6, 0x72, 0x14, 0xc7, 0x55, 0x02, 0x93];
        let one = [0xda, 0x87, 0xc1, 0xd8, 0x6b, 0x99, 0xaf, 0x44, 0x34, 0x76, 0x59, 0x11, 0x9b, 0x22, 0xfc, 0x45];
        assert_eq!(digest_bytes(KEY, &[]).to_le_bytes(), empty);
        assert_eq!(digest_bytes(KEY, &[0]).to_le_bytes(), one);
    }

    #[test]
    fn tokens_are_digested_as_their_bytes() {
        for len in 0..9u32 {
            let tokens: Vec<u32> = (0..len).map(|i| i.wrapping_mul(0x9e37_79b1)).collect();
            let bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
            assert_eq!(digest_tokens(KEY, &tokens), digest_bytes(KEY, &bytes), "{len} tokens");
        }
    }

    #[test]
    fn every_part_of_the_chain_reaches_the_key() {
        let keyer = PrefixHasher::new(7);
        let key = keyer.child(keyer.root(b"a"), &[1, 2, 3, 4]);
        assert_eq!(key, PrefixHasher::new(7).child(keyer.root(b"a"), &[1, 2, 3, 4]));
        assert_ne!(key, PrefixHasher::new(8).child(PrefixHasher::new(8).root(b"a"), &[1, 2, 3, 4]));
        assert_ne!(key, keyer.child(keyer.root(b"b"), &[1, 2, 3, 4]));
        assert_ne!(key, keyer.child(keyer.root(b"a"), &[1, 2, 4, 3]));
        assert_ne!(key, keyer.child(key, &[1, 2, 3, 4]));
    }
}
