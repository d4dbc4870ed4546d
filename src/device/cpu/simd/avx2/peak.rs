//! Independent int8 dot products, to measure their peak rate.

#![forbid(unsafe_code)]

use std::arch::x86_64::{
    __m256i, _mm_cvtsi128_si32, _mm256_add_epi16, _mm256_castsi256_si128, _mm256_maddubs_epi16, _mm256_set1_epi8,
    _mm256_set1_epi32,
};
use std::hint::black_box;

/// Number of chains: enough to hide the latency, few enough to leave registers for the factors.
const CHAINS: usize = 12;

/// Returns the number of operations: a product and a sum for each of 32 bytes. Products are added in 16 bits, as the
/// kernels for 4-bit weights mostly do.
#[target_feature(enable = "avx2")]
pub(crate) fn dot_chains(rounds: u64) -> u64 {
    let mut sums = [_mm256_set1_epi32(0); CHAINS];
    for sum in &mut sums {
        // Start values differ; otherwise the compiler would merge the twelve chains into one.
        *sum = _mm256_set1_epi32(black_box(1));
    }
    let x = _mm256_set1_epi8(black_box(1));
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = round(*sum, x);
        }
    }
    for sum in sums {
        black_box(_mm_cvtsi128_si32(_mm256_castsi256_si128(sum)));
    }
    rounds * (CHAINS * 32 * 2) as u64
}

/// The sum also serves as the weights, so that no product can be reused in the next round.
#[inline]
#[target_feature(enable = "avx2")]
fn round(sum: __m256i, x: __m256i) -> __m256i {
    _mm256_add_epi16(sum, _mm256_maddubs_epi16(sum, x))
}
