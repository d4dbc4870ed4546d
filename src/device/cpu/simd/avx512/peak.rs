//! Dot products that wait for nothing, to measure how fast they can be.

#![allow(unsafe_code)]

use std::arch::x86_64::{
    __m512bh, _mm512_dpbf16_ps, _mm512_dpbusd_epi32, _mm512_fmadd_ps, _mm512_reduce_add_epi32, _mm512_reduce_add_ps,
    _mm512_set1_epi16, _mm512_set1_epi32, _mm512_set1_ps,
};
use std::hint::black_box;
use std::time::{Duration, Instant};

/// Chains that hide each other's latency, and leave registers for the factors.
const CHAINS: usize = 12;

/// Gives the operations: a product and a sum for each of 64 bytes.
#[target_feature(enable = "avx512f,avx512vnni")]
pub(crate) fn dot_chains(rounds: u64) -> u64 {
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

/// Whether dot products of bfloat16 pairs do more than f32 multiply-adds in the same time: on Zen 4 twice as much, on
/// Sapphire and Emerald Rapids half. The best of many short runs of both in turn, some 50 microseconds in all, which other
/// programs on the machine cannot turn round.
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
    // Twice the products in less than one and a half times the time: it must be worth the rounding.
    pairs.as_nanos() * 2 < f32s.as_nanos() * 3
}

#[target_feature(enable = "avx512f,avx512bf16")]
fn pair_chains(rounds: usize) {
    // SAFETY: both are 64 bytes without further meaning.
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
