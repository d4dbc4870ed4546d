//! A hash map for keys that are ids or digests already: one multiplication, the same on every run and platform.
//!
//! The standard map's random keys would cost a draw from the system and make memory layout differ between runs. Nothing
//! in this crate depends on the order in which such a map is walked.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// Map over integer keys with a fixed hash.
pub(crate) type IdMap<K, V> = HashMap<K, V, BuildHasherDefault<IdHasher>>;

/// Folds integers by multiplication with an odd constant (2^64 divided by the golden ratio), which spreads consecutive
/// ids over the high bits that the table reads.
#[derive(Clone, Debug, Default)]
pub(crate) struct IdHasher(u64);

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

impl Hasher for IdHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }

    fn write_u32(&mut self, value: u32) {
        self.write_u64(u64::from(value));
    }

    fn write_u64(&mut self, value: u64) {
        let mixed = (self.0 ^ value).wrapping_mul(GOLDEN);
        self.0 = mixed ^ (mixed >> 32);
    }

    fn write_u128(&mut self, value: u128) {
        self.write_u64((value >> 64) as u64);
        self.write_u64(low_half(value));
    }
}

#[allow(clippy::cast_possible_truncation, reason = "the low half is what is asked for")]
const fn low_half(value: u128) -> u64 {
    value as u64
}
