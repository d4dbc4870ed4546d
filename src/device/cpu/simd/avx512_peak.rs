//! int8 dot products that wait for nothing, to measure how fast they can be.

#![forbid(unsafe_code)]

use std::arch::x86_64::{_mm512_dpbusd_epi32, _mm512_reduce_add_epi32, _mm512_set1_epi32};
use std::hint::black_box;

/// Chains that hide each other's latency, and leave registers for the factors.
const CHAINS: usize = 12;

/// Gives the operations: a product and a sum for each of 64 bytes.
#[target_feature(enable = "avx512f,avx512vnni")]
pub(super) fn dot_chains(rounds: u64) -> u64 {
    let mut sums = [_mm512_set1_epi32(0); CHAINS];
    for sum in &mut sums {
        // Different starts, or the compiler would see one chain twelve times.
        *sum = _mm512_set1_epi32(black_box(1));
    }
    let (w, x) = (_mm512_set1_epi32(black_box(0x0101_0101)), _mm512_set1_epi32(black_box(0x01ff_01ff)));
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = _mm512_dpbusd_epi32(*sum, w, x);
        }
    }
    for sum in sums {
        black_box(_mm512_reduce_add_epi32(sum));
    }
    rounds * (CHAINS * 64 * 2) as u64
}
