//! Independent int8 products, to measure their peak rate.

#![forbid(unsafe_code)]

use super::asm::dot;
use std::arch::aarch64::{
    int8x16_t, int16x8_t, vaddvq_s16, vaddvq_s32, vdupq_n_s8, vdupq_n_s16, vdupq_n_s32, vget_low_s8, vmlal_high_s8,
    vmlal_s8, vreinterpretq_s8_s16,
};
use std::hint::black_box;

/// Number of chains: enough to hide the latency, few enough to leave registers for the factors.
const CHAINS: usize = 16;

/// Runs dot products. Returns the number of operations: a product and a sum for each of 16 bytes.
#[target_feature(enable = "neon,dotprod")]
pub(crate) fn dot_chains(rounds: u64) -> u64 {
    let mut sums = [vdupq_n_s32(0); CHAINS];
    for sum in &mut sums {
        // Start values differ; otherwise the compiler would merge the sixteen chains into one.
        *sum = vdupq_n_s32(black_box(1));
    }
    let (w, x) = (vdupq_n_s8(black_box(1)), vdupq_n_s8(black_box(-1)));
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = dot::<0>(*sum, w, x);
        }
    }
    for sum in sums {
        black_box(vaddvq_s32(sum));
    }
    rounds * (CHAINS * 16 * 2) as u64
}

/// Runs widening multiply-adds, as the kernels for up to 6 bits mostly do. Returns the number of operations: a product
/// and a sum for each of 8 bytes.
#[target_feature(enable = "neon")]
pub(crate) fn widening_chains(rounds: u64) -> u64 {
    let mut sums = [vdupq_n_s16(0); CHAINS];
    for sum in &mut sums {
        *sum = vdupq_n_s16(black_box(1));
    }
    let x = vdupq_n_s8(black_box(1));
    for _ in 0..rounds {
        for pair in sums.as_chunks_mut::<2>().0 {
            *pair = round(*pair, x);
        }
    }
    for sum in sums {
        black_box(vaddvq_s16(sum));
    }
    rounds * (CHAINS * 8 * 2) as u64
}

/// The sums also serve as the weights, so that no product can be reused in the next round.
#[inline]
#[target_feature(enable = "neon")]
fn round([a, b]: [int16x8_t; 2], x: int8x16_t) -> [int16x8_t; 2] {
    let low = vget_low_s8(vreinterpretq_s8_s16(a));
    [vmlal_s8(a, low, vget_low_s8(x)), vmlal_high_s8(b, vreinterpretq_s8_s16(b), x)]
}
