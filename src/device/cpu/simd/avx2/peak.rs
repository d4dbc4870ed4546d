//! int8 dot products that wait for nothing, to measure how fast they can be.

#![forbid(unsafe_code)]

use std::arch::x86_64::{
    __m256i, _mm_cvtsi128_si32, _mm256_add_epi16, _mm256_castsi256_si128, _mm256_maddubs_epi16, _mm256_set1_epi8,
    _mm256_set1_epi32,
};
use std::hint::black_box;

/// Chains that hide each other's latency, and leave registers for the factors.
const CHAINS: usize = 12;

/// Gives the operations: a product and a sum for each of 32 bytes. Products of few bits are added in 16 bits, as the bodies
/// for 4-bit weights do for the most part.
#[target_feature(enable = "avx2")]
pub(crate) fn dot_chains(rounds: u64) -> u64 {
    let mut sums = [_mm256_set1_epi32(0); CHAINS];
    for sum in &mut sums {
        // Different starts, or the compiler would see one chain twelve times.
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

/// The sum stands in for the weights as well, so that no product can be kept from one round to the next.
#[inline]
#[target_feature(enable = "avx2")]
fn round(sum: __m256i, x: __m256i) -> __m256i {
    _mm256_add_epi16(sum, _mm256_maddubs_epi16(sum, x))
}
