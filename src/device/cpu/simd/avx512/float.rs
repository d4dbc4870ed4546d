//! Products of float activations with weights of any format, in AVX-512. Lanes are output columns; activations are
//! broadcast; K is traversed in order.
//!
//! bfloat16 activations are converted to f32 in the copy of a tile. One or two rows read float weights as stored, four
//! panels in parallel. More rows, and quantized weights, first convert a piece of K of some panels to f32 in a buffer
//! on the stack, then all rows pass over it (12 × 2: 24 accumulators, 2 weights and 1 activation in registers); between
//! pieces the sums are kept in `out`. All variants perform the same additions in the same order.

#![allow(unsafe_code)]
// Loops over `r` and `p` index several register arrays at once and must unroll completely.
#![allow(clippy::needless_range_loop)]
// The intrinsics are too many to import by name.
#![allow(clippy::wildcard_imports)]

use super::unpack::{minimum, scale, words};
use crate::device::cpu::kernels::float_rows::{Activation, FloatRows};
use crate::device::cpu::kernels::q8_rows::BLOCK;
use crate::device::cpu::memory::Tile;
use crate::device::cpu::simd::float_tiles::{AllBodies, Bodies, Job, Kernels, Widen, multiply};
use crate::device::cpu::simd::formats::{Format, with_format};
use crate::device::cpu::weights::pack::{PANEL, PackedMatrix};
use crate::weights::DType;
use std::arch::x86_64::*;
use std::ops::Range;

/// Number of panels that one row processes in parallel, which hides the latency of the FMA.
const WIDE: usize = 4;

/// Storage of the 16 weights of a k.
trait Load {
    /// # Safety
    /// `panel` contains `k`; the caller enables AVX-512 F.
    unsafe fn load(panel: *const u8, k: usize) -> __m512;
}

struct F32;
struct F16;
struct Bf16;

impl Load for F32 {
    #[inline(always)]
    unsafe fn load(panel: *const u8, k: usize) -> __m512 {
        // SAFETY: the caller guarantees that the pointers are valid for these accesses and enables the instruction set.
        unsafe { _mm512_loadu_ps(panel.add(k * PANEL * 4).cast()) }
    }
}

impl Load for F16 {
    #[inline(always)]
    unsafe fn load(panel: *const u8, k: usize) -> __m512 {
        // SAFETY: the caller guarantees that the pointers are valid for these accesses and enables the instruction set.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(panel.add(k * PANEL * 2).cast())) }
    }
}

impl Load for Bf16 {
    #[inline(always)]
    unsafe fn load(panel: *const u8, k: usize) -> __m512 {
        // SAFETY: the caller guarantees that the pointers are valid for these accesses and enables the instruction set.
        unsafe {
            let pairs = _mm512_loadu_si512(panel.add(k / 2 * PANEL * 4).cast());
            _mm512_castsi512_ps(if k.is_multiple_of(2) {
                _mm512_slli_epi32::<16>(pairs)
            } else {
                _mm512_and_si512(pairs, _mm512_set1_epi32(0xffff_0000_u32.cast_signed()))
            })
        }
    }
}

/// Multiplies all rows of `x` by `panels` of `w`. Shapes were checked by the caller.
pub(crate) fn matmul<T: Activation>(
    x: FloatRows<'_, T>,
    w: &PackedMatrix,
    bias: Option<&[f32]>,
    panels: Range<usize>,
    out: &mut Tile<'_, f32>,
) {
    let (row, widen): (Option<Bodies>, Widen) = match w.dtype() {
        DType::F32 => (Some(row::<F32>()), widen_floats::<F32>),
        DType::F16 => (Some(row::<F16>()), widen_floats::<F16>),
        DType::BF16 => (Some(row::<Bf16>()), widen_floats::<Bf16>),
        quantized => (None, with_format!(quantized, widen_quantized::<_>())),
    };
    // SAFETY: the micro-kernels match the type of the weights; `assert_available` was called for the instruction set.
    unsafe { multiply(&Kernels { bodies: BODIES, row, widen }, x, w, bias, panels, out) }
}

/// Micro-kernels over weights converted to f32.
const BODIES: &AllBodies = &[
    (12, (2, tile::<F32, 12, 2>, tile::<F32, 12, 1>)),
    (6, (2, tile::<F32, 6, 2>, tile::<F32, 6, 1>)),
    (3, (2, tile::<F32, 3, 2>, tile::<F32, 3, 1>)),
    (2, (WIDE, tile::<F32, 2, WIDE>, tile::<F32, 2, 1>)),
    (1, (WIDE, tile::<F32, 1, WIDE>, tile::<F32, 1, 1>)),
];

/// Micro-kernels of one row over weights as stored.
fn row<L: Load>() -> Bodies {
    (WIDE, tile::<L, 1, WIDE>, tile::<L, 1, 1>)
}

fn widen_quantized<F: Format>() -> Widen {
    widen_blocks::<F>
}

/// Multiplies R rows by P panels over a piece of K.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn tile<L: Load, const R: usize, const P: usize>(job: Job) {
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
        let x: *const f32 = job.x.cast();
        // In pairs, so that a loader knows at compile time which of the two it loads.
        for even in (0..job.depth).step_by(2) {
            for k in [even, even + 1] {
                if k == job.depth {
                    break;
                }
                if !job.ahead.is_null() {
                    for p in 0..P {
                        let address = job.ahead.wrapping_add(p * job.ahead_panel + k * job.ahead_step);
                        _mm_prefetch::<_MM_HINT_T0>(address.cast());
                    }
                }
                let mut w = [_mm512_setzero_ps(); P];
                for p in 0..P {
                    w[p] = L::load(job.w.add(p * job.w_stride), k);
                }
                for r in 0..R {
                    let x = _mm512_set1_ps(*x.byte_add(r * job.x_stride).add(k));
                    for p in 0..P {
                        sums[p][r] = _mm512_fmadd_ps(x, w[p], sums[p][r]);
                    }
                }
            }
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

/// Converts a range of K of a float panel to f32.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn widen_floats<L: Load>(panel: *const u8, ks: Range<usize>, values: *mut f32) {
    for (i, k) in ks.enumerate() {
        // SAFETY: the caller guarantees that `ks` lie in the panel and that `values` has space for 16 values per k.
        unsafe { _mm512_storeu_ps(values.add(i * PANEL), L::load(panel, k)) };
    }
}

/// Dequantizes whole blocks of a quantized panel to exactly the values that dequantizing the source gives.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn widen_blocks<F: Format>(panel: *const u8, ks: Range<usize>, values: *mut f32) {
    for (i, block) in (ks.start / BLOCK..ks.end / BLOCK).enumerate() {
        // SAFETY: the caller guarantees that the blocks lie in the panel and that `values` has space for 16 values per
        // k.
        unsafe {
            let (unit, sub) = (panel.add(block / F::SCHEME.subs * F::SCHEME.unit_bytes()), block % F::SCHEME.subs);
            let group = unit.add(sub * F::SCHEME.group_bytes());
            let scales = [scale::<F>(unit, sub, 0), scale::<F>(unit, sub, 1)];
            let min = if F::SCHEME.minima { minimum::<F>(unit, sub) } else { _mm512_setzero_ps() };
            let values = values.add(i * BLOCK * PANEL);
            let pairs = [words::<F, 0>(group), words::<F, 1>(group), words::<F, 2>(group), words::<F, 3>(group)];
            for (word, (lo, hi)) in pairs.into_iter().enumerate() {
                for (part, bytes) in [lo, hi].into_iter().enumerate() {
                    let shifted = [
                        bytes,
                        _mm512_srli_epi32::<8>(bytes),
                        _mm512_srli_epi32::<16>(bytes),
                        _mm512_srli_epi32::<24>(bytes),
                    ];
                    for (j, shifted) in shifted.into_iter().enumerate() {
                        let stored = _mm512_and_si512(shifted, _mm512_set1_epi32(255));
                        let q = _mm512_sub_epi32(stored, _mm512_set1_epi32(F::SCHEME.offset.into()));
                        let mut value = _mm512_mul_ps(_mm512_cvtepi32_ps(q), scales[part]);
                        if F::SCHEME.minima {
                            value = _mm512_add_ps(value, min);
                        }
                        _mm512_storeu_ps(values.add((16 * part + 4 * word + j) * PANEL), value);
                    }
                }
            }
        }
    }
}
