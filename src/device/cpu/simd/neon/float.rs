//! Products of float activations with weights of any format, in NEON. Lanes are output columns, four registers per
//! panel; activations are broadcast; K is traversed in order.
//!
//! One or two rows read float weights as stored, four panels in parallel. More rows, and quantized weights, use weights
//! converted to f32 piece by piece; tall tiles are 8 rows × half a panel (16 accumulators, 2 weights and 8 activations
//! in registers), because an activation is multiplied from the lane where it was loaded together with the three after
//! it. The additions are those of the AVX-512 kernels, in the same order. There is no kernel for `bfdot` and `bfmmla`:
//! they round activations to bf16 and add pairs of products with a rounding of their own before adding to the sum.

#![allow(unsafe_code)]
// Loops over `r`, `v` and `p` index several register arrays at once and must unroll completely.
#![allow(clippy::needless_range_loop)]
// The intrinsics are too many to import by name.
#![allow(clippy::wildcard_imports)]

use super::asm::{prefetch, widen_f16};
use super::unpack::{QUARTER, minimum, over_part, scale, word};
use crate::device::cpu::kernels::float_rows::{Activation, FloatRows};
use crate::device::cpu::kernels::q8_rows::BLOCK;
use crate::device::cpu::memory::Tile;
use crate::device::cpu::simd::float_tiles::{AllBodies, Bodies, Job, Kernels, Widen, multiply};
use crate::device::cpu::simd::formats::{Format, with_format};
use crate::device::cpu::weights::pack::{PANEL, PackedMatrix};
use crate::weights::DType;
use std::arch::aarch64::*;
use std::ops::Range;

/// Number of panels that one row processes in parallel, which hides the latency of the FMA.
const WIDE: usize = 4;
/// Number of registers per panel.
const WHOLE: usize = PANEL / QUARTER;

/// Storage of the 16 weights of a k.
trait Load {
    /// Loads four of them, starting at a column.
    ///
    /// # Safety
    /// `panel` contains `k`; `column` is a multiple of 4 below 16.
    unsafe fn load(panel: *const u8, k: usize, column: usize) -> float32x4_t;
}

struct F32;
struct F16;
struct Bf16;

impl Load for F32 {
    #[inline(always)]
    unsafe fn load(panel: *const u8, k: usize, column: usize) -> float32x4_t {
        // SAFETY: the caller guarantees that the pointers are valid for these accesses and enables the instruction set.
        unsafe { vld1q_f32(panel.add((k * PANEL + column) * 4).cast()) }
    }
}

impl Load for F16 {
    #[inline(always)]
    unsafe fn load(panel: *const u8, k: usize, column: usize) -> float32x4_t {
        // SAFETY: the caller guarantees that the pointers are valid for these accesses and enables the instruction set.
        unsafe { widen_f16(vld1_u16(panel.add((k * PANEL + column) * 2).cast())) }
    }
}

impl Load for Bf16 {
    #[inline(always)]
    unsafe fn load(panel: *const u8, k: usize, column: usize) -> float32x4_t {
        // SAFETY: the caller guarantees that the pointers are valid for these accesses and enables the instruction set.
        unsafe {
            let pairs = vld1q_u32(panel.add((k / 2 * PANEL + column) * 4).cast());
            vreinterpretq_f32_u32(if k.is_multiple_of(2) {
                vshlq_n_u32::<16>(pairs)
            } else {
                vandq_u32(pairs, vdupq_n_u32(0xffff_0000))
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
    // SAFETY: the micro-kernels match the type of the weights; every aarch64 machine has NEON.
    unsafe { multiply(&Kernels { bodies: BODIES, row, widen }, x, w, bias, panels, out) }
}

/// Micro-kernels over weights converted to f32.
const BODIES: &AllBodies = &[
    (8, (1, halves::<8>, halves::<8>)),
    (4, (1, whole::<F32, 4, 1>, whole::<F32, 4, 1>)),
    (1, (WIDE, whole::<F32, 1, WIDE>, whole::<F32, 1, 1>)),
];

/// Micro-kernels of one row over weights as stored.
fn row<L: Load>() -> Bodies {
    (WIDE, whole::<L, 1, WIDE>, whole::<L, 1, 1>)
}

fn widen_quantized<F: Format>() -> Widen {
    widen_blocks::<F>
}

/// Many rows: first one half of the panel, then the other.
unsafe fn halves<const R: usize>(job: Job) {
    // SAFETY: the caller guarantees that the job covers the tile and that the machine has the instructions.
    unsafe {
        if job.cols < PANEL {
            over_part::<R, 1>((job.out, job.stride, job.cols), job.bias, |out, stride, bias| {
                halves::<R>(Job { out, stride, bias, cols: PANEL, ..job });
            });
            return;
        }
        for first in (0..PANEL).step_by(PANEL / 2) {
            tile::<F32, R, { WHOLE / 2 }, 1>(job, first);
        }
    }
}

/// Whole panels at once, in memory order.
unsafe fn whole<L: Load, const R: usize, const P: usize>(job: Job) {
    // SAFETY: the caller guarantees that the job covers the tile and that the machine has the instructions.
    unsafe {
        if job.cols < P * PANEL {
            over_part::<R, P>((job.out, job.stride, job.cols), job.bias, |out, stride, bias| {
                whole::<L, R, P>(Job { out, stride, bias, cols: P * PANEL, ..job });
            });
            return;
        }
        tile::<L, R, WHOLE, P>(job, 0);
    }
}

/// Accumulators of R rows × V registers, starting at column `first`, of each of P panels.
type Sums<const R: usize, const V: usize, const P: usize> = [[[float32x4_t; V]; R]; P];

/// Multiplies R rows by V registers of P panels, starting at column `first`, over a piece of K.
#[inline(always)]
unsafe fn tile<L: Load, const R: usize, const V: usize, const P: usize>(job: Job, first: usize) {
    // SAFETY: the job covers R rows, all columns of P panels and `depth` of K.
    unsafe {
        let at = |r: usize, p: usize, v: usize| r * job.stride + p * PANEL + first + v * QUARTER;
        let mut sums: Sums<R, V, P> = [[[vdupq_n_f32(0.0); V]; R]; P];
        if !job.start {
            for p in 0..P {
                for r in 0..R {
                    for v in 0..V {
                        sums[p][r][v] = vld1q_f32(job.out.add(at(r, p, v)));
                    }
                }
            }
        }
        let rows: *const f32 = job.x.cast();
        let mut k = 0;
        while k + 4 <= job.depth {
            ahead::<P>(&job, first, k..k + 4);
            let mut x = [vdupq_n_f32(0.0); R];
            for r in 0..R {
                x[r] = vld1q_f32(rows.byte_add(r * job.x_stride).add(k));
            }
            step::<L, R, V, P, 0>(&job, first, k, &x, &mut sums);
            step::<L, R, V, P, 1>(&job, first, k + 1, &x, &mut sums);
            step::<L, R, V, P, 2>(&job, first, k + 2, &x, &mut sums);
            step::<L, R, V, P, 3>(&job, first, k + 3, &x, &mut sums);
            k += 4;
        }
        while k < job.depth {
            ahead::<P>(&job, first, k..k + 1);
            let mut x = [vdupq_n_f32(0.0); R];
            for r in 0..R {
                x[r] = vdupq_n_f32(*rows.byte_add(r * job.x_stride).add(k));
            }
            step::<L, R, V, P, 0>(&job, first, k, &x, &mut sums);
            k += 1;
        }
        if !job.bias.is_null() {
            for p in 0..P {
                for v in 0..V {
                    let bias = vld1q_f32(job.bias.add(at(0, p, v)));
                    for r in 0..R {
                        sums[p][r][v] = vaddq_f32(sums[p][r][v], bias);
                    }
                }
            }
        }
        for p in 0..P {
            for r in 0..R {
                for v in 0..V {
                    vst1q_f32(job.out.add(at(r, p, v)), sums[p][r][v]);
                }
            }
        }
    }
}

/// Prefetches for some k. One branch for all of them: a branch between the multiplications of one k and the next would
/// make the compiler load the weights of both and spill them to memory.
#[inline(always)]
fn ahead<const P: usize>(job: &Job, first: usize, ks: Range<usize>) {
    if first == 0 && !job.ahead.is_null() {
        for k in ks {
            for p in 0..P {
                prefetch(job.ahead.wrapping_add(p * job.ahead_panel + k * job.ahead_step));
            }
        }
    }
}

/// Processes one k, whose activations are lane `LANE` of each row's `x`.
#[inline(always)]
unsafe fn step<L: Load, const R: usize, const V: usize, const P: usize, const LANE: i32>(
    job: &Job,
    first: usize,
    k: usize,
    x: &[float32x4_t; R],
    sums: &mut Sums<R, V, P>,
) {
    for p in 0..P {
        for v in 0..V {
            // SAFETY: the caller guarantees that `k` is below the depth.
            unsafe {
                let w = L::load(job.w.add(p * job.w_stride), k, first + v * QUARTER);
                for r in 0..R {
                    sums[p][r][v] = vfmaq_laneq_f32::<LANE>(sums[p][r][v], w, x[r]);
                }
            }
        }
    }
}

/// Converts a range of K of a float panel to f32.
unsafe fn widen_floats<L: Load>(panel: *const u8, ks: Range<usize>, values: *mut f32) {
    for (i, k) in ks.enumerate() {
        for column in (0..PANEL).step_by(QUARTER) {
            // SAFETY: the caller guarantees that `ks` lie in the panel and that `values` has space for 16 values per k.
            unsafe { vst1q_f32(values.add(i * PANEL + column), L::load(panel, k, column)) };
        }
    }
}

/// Dequantizes whole blocks of a quantized panel to exactly the values that dequantizing the source gives.
unsafe fn widen_blocks<F: Format>(panel: *const u8, ks: Range<usize>, values: *mut f32) {
    for (i, block) in (ks.start / BLOCK..ks.end / BLOCK).enumerate() {
        for first in (0..PANEL).step_by(QUARTER) {
            // SAFETY: the caller guarantees that the blocks lie in the panel and that `values` has space for 16 values
            // per k.
            unsafe {
                let (unit, sub) = (panel.add(block / F::SCHEME.subs * F::SCHEME.unit_bytes()), block % F::SCHEME.subs);
                let group = unit.add(sub * F::SCHEME.group_bytes() + 4 * first);
                let scales = [scale::<F>(unit, first, sub, 0), scale::<F>(unit, first, sub, 1)];
                let min = if F::SCHEME.minima { minimum::<F>(unit, first, sub) } else { vdupq_n_f32(0.0) };
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

/// Converts word I of a block: 4 columns of 4 k.
#[inline(always)]
unsafe fn widen_word<F: Format, const I: usize>(
    group: *const u8,
    scale: float32x4_t,
    min: float32x4_t,
    values: *mut f32,
) {
    // SAFETY: the caller guarantees that the pointers are valid for these accesses and enables the instruction set.
    unsafe {
        let bytes = vreinterpretq_u32_u8(word::<F>(group, I));
        let shifted = [bytes, vshrq_n_u32::<8>(bytes), vshrq_n_u32::<16>(bytes), vshrq_n_u32::<24>(bytes)];
        for (j, shifted) in shifted.into_iter().enumerate() {
            let stored = vreinterpretq_s32_u32(vandq_u32(shifted, vdupq_n_u32(255)));
            let q = vsubq_s32(stored, vdupq_n_s32(F::SCHEME.offset.into()));
            let mut value = vmulq_f32(vcvtq_f32_s32(q), scale);
            if F::SCHEME.minima {
                value = vaddq_f32(value, min);
            }
            vst1q_f32(values.add((4 * I + j) * PANEL), value);
        }
    }
}
