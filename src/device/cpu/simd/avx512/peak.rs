//! Independent dot products, to measure their peak rate.

#![allow(unsafe_code)]

use std::arch::x86_64::{
    __m512bh, _mm512_dpbf16_ps, _mm512_dpbusd_epi32, _mm512_fmadd_ps, _mm512_reduce_add_epi32, _mm512_reduce_add_ps,
    _mm512_set1_epi16, _mm512_set1_epi32, _mm512_set1_ps,
};
use std::hint::black_box;
use std::time::{Duration, Instant};

/// Number of chains: enough to hide the latency, few enough to leave registers for the factors.
const CHAINS: usize = 12;

/// Returns the number of operations: a product and a sum for each of 64 bytes.
#[target_feature(enable = "avx512f,avx512vnni")]
pub(crate) fn dot_chains(rounds: u64) -> u64 {
    let mut sums = [_mm512_set1_epi32(0); CHAINS];
    for sum in &mut sums {
        // Start values differ; otherwise the compiler would merge the twelve chains into one.
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

/// Whether dot products of bfloat16 pairs are faster than f32 multiply-adds: twice as fast on Zen 4, half as fast on
/// Sapphire and Emerald Rapids. Compares the best of many short, alternating runs of both, some 50 µs in total, so that
/// other programs on the machine cannot reverse the result.
#[target_feature(enable = "avx512f,avx512bf16")]
pub(crate) fn pairs_beat_f32() -> bool {
    const RUNS: usize = 24;
    const ROUNDS: usize = 128;
    let [mut pairs, mut f32s] = [Duration::MAX; 2];
    for _ in 0..RUNS {
        let start = Instant::now();
        pair_chains(ROUNDS);
        let between = Instant::now();
        fma_chains(ROUNDS);
        pairs = pairs.min(between - start);
        f32s = f32s.min(between.elapsed());
    }
    // Twice the products in less than one and a half times the time: the gain must justify the rounding.
    pairs.as_nanos() * 2 < f32s.as_nanos() * 3
}

#[target_feature(enable = "avx512f,avx512bf16")]
fn pair_chains(rounds: usize) {
    // SAFETY: both types are 64 bytes and valid for any bits.
    let ones: __m512bh = unsafe { std::mem::transmute(_mm512_set1_epi16(black_box(0x3f80))) };
    let mut sums = [_mm512_set1_ps(0.0); CHAINS];
    for sum in &mut sums {
        *sum = _mm512_set1_ps(black_box(0.0));
    }
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = _mm512_dpbf16_ps(*sum, ones, ones);
        }
    }
    for sum in sums {
        black_box(_mm512_reduce_add_ps(sum));
    }
}

#[target_feature(enable = "avx512f")]
fn fma_chains(rounds: usize) {
    let ones = _mm512_set1_ps(black_box(1.0));
    let mut sums = [_mm512_set1_ps(0.0); CHAINS];
    for sum in &mut sums {
        *sum = _mm512_set1_ps(black_box(0.0));
    }
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = _mm512_fmadd_ps(ones, ones, *sum);
        }
    }
    for sum in sums {
        black_box(_mm512_reduce_add_ps(sum));
    }
}
