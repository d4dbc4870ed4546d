//! Products of bfloat16 activations with bfloat16 weights, in AVX-512 BF16. Lanes are output columns; pairs of
//! activations are broadcast; pairs of K are traversed in order.
//!
//! `vdpbf16ps` adds the products of a pair to an f32 sum: the second of the pair first, each sum rounded to nearest
//! even, with numbers below 2^-126 treated as zero, whatever the machine's modes (Intel SDM, VDPBF16PS). It has the
//! rate of an f32 multiply-add on Zen 4, and half of it on Sapphire and Emerald Rapids, where f32 over converted
//! weights is faster.
//!
//! Tiles and traversal are those of f32 rows; weights need no conversion.

#![allow(unsafe_code)]
// Loops over `r` and `p` index several register arrays at once and must unroll completely.
#![allow(clippy::needless_range_loop)]
// The intrinsics are too many to import by name.
#![allow(clippy::wildcard_imports)]

use crate::device::cpu::kernels::float_rows::FloatRows;
use crate::device::cpu::memory::Tile;
use crate::device::cpu::simd::float_tiles::{AllBodies, Bodies, Job, PIECES_FROM_ROWS, as_stored, halves};
use crate::device::cpu::weights::pack::{PANEL, PackedMatrix};
use std::arch::x86_64::*;
use std::ops::Range;

/// Micro-kernels over pieces.
const BODIES: &AllBodies = &[
    (12, (2, tile::<12, 2>, tile::<12, 1>)),
    (6, (2, tile::<6, 2>, tile::<6, 1>)),
    (3, (2, tile::<3, 2>, tile::<3, 1>)),
    (1, ROW),
];

/// Micro-kernels of one row.
const ROW: Bodies = (4, tile::<1, 4>, tile::<1, 1>);

/// Multiplies all rows of `x` by `panels` of `w`. Shapes and types were checked by the caller.
pub(crate) fn matmul(
    x: FloatRows<'_, u16>,
    w: &PackedMatrix,
    bias: Option<&[f32]>,
    panels: Range<usize>,
    out: &mut Tile<'_, f32>,
) {
    let rows = x.rows();
    let Some(job) = Job::new(x, w, bias, &panels, out).map(Job::pairs) else { return };
    // SAFETY: `job` covers all rows and the panels; `assert_available` was called for the instruction set.
    unsafe {
        if rows < PIECES_FROM_ROWS {
            as_stored(ROW, job, rows, panels.len());
        } else {
            halves(BODIES, job, rows, panels.len());
        }
    }
}

/// Multiplies R rows by P panels over a piece of K that begins with a whole pair.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn tile<const R: usize, const P: usize>(job: Job) {
    // SAFETY: the job covers R rows, P panels and `depth` of K; masks stay within its columns. Prefetches never fault.
    unsafe {
        let mask = |p: usize| u16::MAX >> (PANEL - PANEL.min(job.cols - p * PANEL));
        let mut sums = [[_mm512_setzero_ps(); R]; P];
        if !job.start {
            for p in 0..P {
                for r in 0..R {
                    sums[p][r] = _mm512_maskz_loadu_ps(mask(p), job.out.add(r * job.stride + p * PANEL));
                }
            }
        }
        for pair in 0..job.depth / 2 {
            if !job.ahead.is_null() {
                for p in 0..P {
                    let address = job.ahead.wrapping_add(p * job.ahead_panel + pair * 2 * job.ahead_step);
                    _mm_prefetch::<_MM_HINT_T1>(address.cast());
                }
            }
            add_pair(&job, pair, &mut sums, |x| x.cast::<i32>().read_unaligned());
        }
        if !job.depth.is_multiple_of(2) {
            add_pair(&job, job.depth / 2, &mut sums, |x| x.cast::<u16>().read_unaligned().into());
        }
        for p in 0..P {
            let bias = if job.bias.is_null() {
                _mm512_setzero_ps()
            } else {
                _mm512_maskz_loadu_ps(mask(p), job.bias.add(p * PANEL))
            };
            for r in 0..R {
                let sum = if job.bias.is_null() { sums[p][r] } else { _mm512_add_ps(sums[p][r], bias) };
                _mm512_mask_storeu_ps(job.out.add(r * job.stride + p * PANEL), mask(p), sum);
            }
        }
    }
}

/// Adds one pair of K for all rows and panels; `read` loads a row's activations.
#[inline(always)]
unsafe fn add_pair<const R: usize, const P: usize>(
    job: &Job,
    pair: usize,
    sums: &mut [[__m512; R]; P],
    read: impl Fn(*const u8) -> i32,
) {
    // SAFETY: the caller guarantees that the job covers the tile and that the machine has the instructions.
    unsafe {
        let mut w = [_mm512_setzero_si512(); P];
        for p in 0..P {
            w[p] = _mm512_loadu_si512(job.w.add(p * job.w_stride + pair * PANEL * 4).cast());
        }
        for r in 0..R {
            let x = _mm512_set1_epi32(read(job.x.add(r * job.x_stride + 4 * pair)));
            for p in 0..P {
                sums[p][r] = _mm512_dpbf16_ps(sums[p][r], as_pairs(x), as_pairs(w[p]));
            }
        }
    }
}

#[inline(always)]
fn as_pairs(v: __m512i) -> __m512bh {
    // SAFETY: both types are 64 bytes and valid for any bits.
    unsafe { std::mem::transmute(v) }
}
