//! Products of float activations with weights of any format, in AVX2. Lanes are output columns, two registers per
//! panel; activations are broadcast; K is traversed in order.
//!
//! One or two rows read float weights as stored, four panels in parallel. More rows, and quantized weights, use weights
//! converted to f32 piece by piece (6 × 1: 12 accumulators, 2 weights and 1 activation in registers). The additions are
//! those of the AVX-512 kernels, in the same order.

#![allow(unsafe_code)]
// Loops over `r` and `p` index several register arrays at once and must unroll completely.
#![allow(clippy::needless_range_loop)]
// The intrinsics are too many to import by name.
#![allow(clippy::wildcard_imports)]

use super::unpack::{HALF, load_columns, minimum, scale, store_columns, word};
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
    /// Loads half of them.
    ///
    /// # Safety
    /// `panel` contains `k`; the caller enables AVX2 and F16C.
    unsafe fn load(panel: *const u8, k: usize, half: usize) -> __m256;
}

struct F32;
struct F16;
struct Bf16;

impl Load for F32 {
    #[inline(always)]
    unsafe fn load(panel: *const u8, k: usize, half: usize) -> __m256 {
        // SAFETY: the caller guarantees that the pointers are valid for these accesses and enables the instruction set.
        unsafe { _mm256_loadu_ps(panel.add((k * PANEL + half * HALF) * 4).cast()) }
    }
}

impl Load for F16 {
    #[inline(always)]
    unsafe fn load(panel: *const u8, k: usize, half: usize) -> __m256 {
        // SAFETY: the caller guarantees that the pointers are valid for these accesses and enables the instruction set.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(panel.add((k * PANEL + half * HALF) * 2).cast())) }
    }
}

impl Load for Bf16 {
    #[inline(always)]
    unsafe fn load(panel: *const u8, k: usize, half: usize) -> __m256 {
        // SAFETY: the caller guarantees that the pointers are valid for these accesses and enables the instruction set.
        unsafe {
            let pairs = _mm256_loadu_si256(panel.add((k / 2 * PANEL + half * HALF) * 4).cast());
            _mm256_castsi256_ps(if k.is_multiple_of(2) {
                _mm256_slli_epi32::<16>(pairs)
            } else {
                _mm256_and_si256(pairs, _mm256_set1_epi32(0xffff_0000_u32.cast_signed()))
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
const BODIES: &AllBodies =
    &[(6, (1, tile::<F32, 6, 1>, tile::<F32, 6, 1>)), (1, (WIDE, tile::<F32, 1, WIDE>, tile::<F32, 1, 1>))];

/// Micro-kernels of one row over weights as stored.
fn row<L: Load>() -> Bodies {
    (WIDE, tile::<L, 1, WIDE>, tile::<L, 1, 1>)
}

fn widen_quantized<F: Format>() -> Widen {
    widen_blocks::<F>
}

/// Multiplies R rows by P panels over a piece of K.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn tile<L: Load, const R: usize, const P: usize>(job: Job) {
    // SAFETY: the job covers R rows, P panels and `depth` of K; loads and stores of sums stay within its columns.
    // Prefetches never fault.
    unsafe {
        // Number of columns in a half of a panel.
        let cols = |p: usize, half: usize| job.cols.saturating_sub(p * PANEL + half * HALF).min(HALF);
        let mut sums = [[[_mm256_setzero_ps(); 2]; R]; P];
        if !job.start {
            for p in 0..P {
                for r in 0..R {
                    let at = job.out.add(r * job.stride + p * PANEL);
                    sums[p][r] = [load_columns(at, cols(p, 0)), load_columns(at.wrapping_add(HALF), cols(p, 1))];
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
                for p in 0..P {
                    let panel = job.w.add(p * job.w_stride);
                    let w = [L::load(panel, k, 0), L::load(panel, k, 1)];
                    for r in 0..R {
                        let x = _mm256_set1_ps(*x.byte_add(r * job.x_stride).add(k));
                        sums[p][r][0] = _mm256_fmadd_ps(x, w[0], sums[p][r][0]);
                        sums[p][r][1] = _mm256_fmadd_ps(x, w[1], sums[p][r][1]);
                    }
                }
            }
        }
        for p in 0..P {
            for half in 0..2 {
                let bias = if job.bias.is_null() {
                    _mm256_setzero_ps()
                } else {
                    load_columns(job.bias.wrapping_add(p * PANEL + half * HALF), cols(p, half))
                };
                for r in 0..R {
                    let sum = sums[p][r][half];
                    let sum = if job.bias.is_null() { sum } else { _mm256_add_ps(sum, bias) };
                    let at = job.out.wrapping_add(r * job.stride + p * PANEL + half * HALF);
                    store_columns(at, cols(p, half), sum);
                }
            }
        }
    }
}

/// Converts a range of K of a float panel to f32.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn widen_floats<L: Load>(panel: *const u8, ks: Range<usize>, values: *mut f32) {
    for (i, k) in ks.enumerate() {
        // SAFETY: the caller guarantees that `ks` lie in the panel and that `values` has space for 16 values per k.
        unsafe {
            let to = values.add(i * PANEL);
            _mm256_storeu_ps(to, L::load(panel, k, 0));
            _mm256_storeu_ps(to.add(HALF), L::load(panel, k, 1));
        }
    }
}

/// Dequantizes whole blocks of a quantized panel to exactly the values that dequantizing the source gives.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn widen_blocks<F: Format>(panel: *const u8, ks: Range<usize>, values: *mut f32) {
    for (i, block) in (ks.start / BLOCK..ks.end / BLOCK).enumerate() {
        for first in [0, HALF] {
            // SAFETY: the caller guarantees that the blocks lie in the panel and that `values` has space for 16 values
            // per k.
            unsafe {
                let (unit, sub) = (panel.add(block / F::SCHEME.subs * F::SCHEME.unit_bytes()), block % F::SCHEME.subs);
                let group = unit.add(sub * F::SCHEME.group_bytes() + 4 * first);
                let scales = [scale::<F>(unit, first, sub, 0), scale::<F>(unit, first, sub, 1)];
                let min = if F::SCHEME.minima { minimum::<F>(unit, first, sub) } else { _mm256_setzero_ps() };
                let values = values.add(i * BLOCK * PANEL + first);
                widen_word::<F, 0>(group, scales[0], min, values);
                widen_word::<F, 1>(group, scales[0], min, values);
                widen_word::<F, 2>(group, scales[0], min, values);
                widen_word::<F, 3>(group, scales[0], min, values);
                widen_word::<F, 4>(group, scales[1], min, values);
                widen_word::<F, 5>(group, scales[1], min, values);
                widen_word::<F, 6>(group, scales[1], min, values);
                widen_word::<F, 7>(group, scales[1], min, values);
            }
        }
    }
}

/// Converts word I of a block: 8 columns of 4 k.
#[inline(always)]
unsafe fn widen_word<F: Format, const I: usize>(group: *const u8, scale: __m256, min: __m256, values: *mut f32) {
    // SAFETY: the caller guarantees that the pointers are valid for these accesses and enables the instruction set.
    unsafe {
        let bytes = word::<F>(group, I);
        let shifted =
            [bytes, _mm256_srli_epi32::<8>(bytes), _mm256_srli_epi32::<16>(bytes), _mm256_srli_epi32::<24>(bytes)];
        for (j, shifted) in shifted.into_iter().enumerate() {
            let stored = _mm256_and_si256(shifted, _mm256_set1_epi32(255));
            let q = _mm256_sub_epi32(stored, _mm256_set1_epi32(F::SCHEME.offset.into()));
            let mut value = _mm256_mul_ps(_mm256_cvtepi32_ps(q), scale);
            if F::SCHEME.minima {
                value = _mm256_add_ps(value, min);
            }
            _mm256_storeu_ps(values.add((4 * I + j) * PANEL), value);
        }
    }
}
