//! Products of int8 activations with quantized weights, in NEON. Lanes are output columns; activations are broadcast.
//!
//! A tile is R rows × V registers of a panel, 4 columns each. With the dot-product instruction, a register of 4 columns
//! × 4 k is added to 4 sums at once. Without it, products are added in 16 bits, in two registers per 4 columns. These
//! sums wrap, so they must fit: 8 words of weights of up to 6 bits do, and 2 words of 8 bits. The integer sums of a
//! 32-block are exact in any order; the float additions of one output value are those of the AVX-512 kernels.
//!
//! There is no kernel for `smmla`: it multiplies pairs of rows with pairs of columns over 8 k, so operands would have
//! to be stored in that order, or rearranged in each tile.

#![allow(unsafe_code)]
// Loops over `r` and `v` index several register arrays at once and must unroll completely.
#![allow(clippy::needless_range_loop)]
// The intrinsics are too many to import by name.
#![allow(clippy::wildcard_imports)]

use super::asm::{chained, dot, prefetch};
use super::unpack::{QUARTER, minimum, over_part, scale, word};
use crate::device::cpu::kernels::q8_rows::{BLOCK, QuantRows, RECORD_BYTES};
use crate::device::cpu::memory::Tile;
use crate::device::cpu::simd::formats::{Format, with_format};
use crate::device::cpu::simd::int_tiles::{Body, GROUP, Job, all};
use crate::device::cpu::weights::pack::{PANEL, PackedMatrix};
use std::arch::aarch64::*;
use std::ops::Range;

/// Prefetch distance of the weights, in rows that prefetch for the others.
const AHEAD_BYTES: usize = 4096;
/// Number of registers per panel.
const WHOLE: usize = PANEL / QUARTER;
/// Number of rows of a tile from which on converting weights to signed bytes in registers is cheaper than correcting
/// the sums for the offset.
const TALL_FROM_ROWS: usize = 4;

/// Multiplies all rows of `x` by `panels` of `w`, with widening multiplications. Shapes were checked by the caller.
pub(crate) fn matmul(
    x: QuantRows<'_>,
    w: &PackedMatrix,
    bias: Option<&[f32]>,
    panels: Range<usize>,
    out: &mut Tile<'_, f32>,
) {
    let Some(job) = Job::new(x, w, bias, &panels, out, skip(x, w)) else { return };
    // SAFETY: `job` covers `x.rows()` rows and `panels.len()` panels.
    unsafe { with_format!(w.dtype(), widening_bodies::<_>(job, x.rows(), panels.len())) }
}

/// Multiplies with dot products; otherwise as [`matmul`].
pub(crate) fn matmul_dot(
    x: QuantRows<'_>,
    w: &PackedMatrix,
    bias: Option<&[f32]>,
    panels: Range<usize>,
    out: &mut Tile<'_, f32>,
) {
    let Some(job) = Job::new(x, w, bias, &panels, out, skip(x, w)) else { return };
    // SAFETY: as above; `assert_available` was called for the instruction set.
    unsafe { with_format!(w.dtype(), dot_bodies::<_>(job, x.rows(), panels.len())) }
}

/// Tall tiles process pieces of a group's panels in parallel; few rows read panel after panel.
fn skip(x: QuantRows<'_>, w: &PackedMatrix) -> usize {
    if x.rows() < TALL_FROM_ROWS { 0 } else { (GROUP - 1) * w.panel_bytes() }
}

// Each micro-kernel is compiled for every format: few of them keep the build short.

unsafe fn widening_bodies<F: Format>(job: Job, rows: usize, panels: usize) {
    // A sum takes two registers: 6 rows need 12 of them, 6 f32 sums and 6 activations.
    unsafe fn tall<F: Format>(job: Job) {
        // SAFETY: the caller guarantees that the job covers the tile and that the machine has the instructions.
        unsafe { parts::<F, Widening, 6, 1>(job, tall::<F>) }
    }
    unsafe fn single<F: Format>(job: Job) {
        // SAFETY: the caller guarantees that the job covers the tile and that the machine has the instructions.
        unsafe { parts::<F, Widening, 1, WHOLE>(job, single::<F>) }
    }
    let bodies: [(usize, usize, Body, Body); 2] = [(6, 1, tall::<F>, tall::<F>), (1, 1, single::<F>, single::<F>)];
    // SAFETY: the caller guarantees that the job covers the tile and that the machine has the instructions.
    unsafe { all::<F>(&bodies, job, rows, panels) }
}

unsafe fn dot_bodies<F: Format>(job: Job, rows: usize, panels: usize) {
    // 8 rows need 8 sums, 8 f32 sums and 8 activations.
    #[target_feature(enable = "neon,dotprod")]
    unsafe fn tall<F: Format>(job: Job) {
        // SAFETY: the caller guarantees that the job covers the tile and that the machine has the instructions.
        unsafe { parts::<F, DotProduct, 8, 1>(job, tall::<F>) }
    }
    #[target_feature(enable = "neon,dotprod")]
    unsafe fn low<F: Format>(job: Job) {
        // SAFETY: the caller guarantees that the job covers the tile and that the machine has the instructions.
        unsafe { parts::<F, DotProduct, 4, 2>(job, low::<F>) }
    }
    #[target_feature(enable = "neon,dotprod")]
    unsafe fn single<F: Format>(job: Job) {
        // SAFETY: the caller guarantees that the job covers the tile and that the machine has the instructions.
        unsafe { parts::<F, DotProduct, 1, WHOLE>(job, single::<F>) }
    }
    let bodies: [(usize, usize, Body, Body); 3] =
        [(8, 1, tall::<F>, tall::<F>), (4, 1, low::<F>, low::<F>), (1, 1, single::<F>, single::<F>)];
    // SAFETY: the caller guarantees that the job covers the tile and that the machine has the instructions.
    unsafe { all::<F>(&bodies, job, rows, panels) }
}

/// Multiplication and summation of words: the exact part of a 32-block.
trait Products {
    /// Sums of 4 columns, not yet reduced.
    type Sums: Copy;
    fn zero() -> Self::Sums;
    /// Adds words I and I + 1 of a half block, for all rows; lane I of a row's `x` belongs to word I.
    ///
    /// # Safety
    /// The machine has the instructions of the products.
    unsafe fn two<F: Format, const R: usize, const V: usize, const I: i32, const NEXT: i32>(
        sums: &mut [[Self::Sums; V]; R],
        w: &[[int8x16_t; V]; 2],
        x: &[int8x16_t; R],
    );
    /// Reduces the sums to one per column.
    fn total<F: Format>(sums: Self::Sums) -> int32x4_t;
}

struct DotProduct;

impl Products for DotProduct {
    type Sums = int32x4_t;

    #[inline(always)]
    fn zero() -> int32x4_t {
        // SAFETY: every aarch64 machine has NEON.
        unsafe { vdupq_n_s32(0) }
    }

    #[inline(always)]
    unsafe fn two<F: Format, const R: usize, const V: usize, const I: i32, const NEXT: i32>(
        sums: &mut [[int32x4_t; V]; R],
        w: &[[int8x16_t; V]; 2],
        x: &[int8x16_t; R],
    ) {
        for r in 0..R {
            for v in 0..V {
                // SAFETY: the caller guarantees that the pointers are valid for these accesses and enables the instruction set.
                sums[r][v] = unsafe { dot::<I>(sums[r][v], w[0][v], x[r]) };
            }
        }
        for r in 0..R {
            for v in 0..V {
                // SAFETY: the caller guarantees that the pointers are valid for these accesses and enables the instruction set.
                sums[r][v] = unsafe { dot::<NEXT>(sums[r][v], w[1][v], x[r]) };
            }
        }
    }

    #[inline(always)]
    fn total<F: Format>(sums: int32x4_t) -> int32x4_t {
        sums
    }
}

struct Widening;

impl Products for Widening {
    /// Two registers of two columns each. A column is two lanes of 32 bits, or four lanes of 16 bits with weights of up
    /// to 6 bits.
    type Sums = [int32x4_t; 2];

    #[inline(always)]
    fn zero() -> [int32x4_t; 2] {
        // SAFETY: every aarch64 machine has NEON.
        unsafe { [vdupq_n_s32(0); 2] }
    }

    #[inline(always)]
    unsafe fn two<F: Format, const R: usize, const V: usize, const I: i32, const NEXT: i32>(
        sums: &mut [[[int32x4_t; 2]; V]; R],
        w: &[[int8x16_t; V]; 2],
        x: &[int8x16_t; R],
    ) {
        // SAFETY: every aarch64 machine has NEON.
        unsafe {
            for r in 0..R {
                let words = vreinterpretq_s32_s8(x[r]);
                let first = vreinterpretq_s8_s32(vdupq_laneq_s32::<I>(words));
                let second = vreinterpretq_s8_s32(vdupq_laneq_s32::<NEXT>(words));
                for v in 0..V {
                    let [low, high] = &mut sums[r][v];
                    if F::SCHEME.bits == 8 {
                        // Two products reach 2 · 128 · 127 = 32,512.
                        let products = vmull_s8(vget_low_s8(w[0][v]), vget_low_s8(first));
                        *low = vpadalq_s16(*low, vmlal_s8(products, vget_low_s8(w[1][v]), vget_low_s8(second)));
                        let products = vmull_high_s8(w[0][v], first);
                        *high = vpadalq_s16(*high, vmlal_high_s8(products, w[1][v], second));
                    } else {
                        // Eight products of 5-bit weights reach 8 · 31 · 127 = 31,496; four of 6-bit weights, whose
                        // halves of a block are summed separately, reach 4 · 63 · 127 = 32,004.
                        let [mut first_two, mut last_two] = [*low, *high].map(|sums| vreinterpretq_s16_s32(sums));
                        first_two = chained(vmlal_s8(first_two, vget_low_s8(w[0][v]), vget_low_s8(first)));
                        first_two = chained(vmlal_s8(first_two, vget_low_s8(w[1][v]), vget_low_s8(second)));
                        last_two = chained(vmlal_high_s8(last_two, w[0][v], first));
                        last_two = chained(vmlal_high_s8(last_two, w[1][v], second));
                        [*low, *high] = [first_two, last_two].map(|sums| vreinterpretq_s32_s16(sums));
                    }
                }
            }
        }
    }

    #[inline(always)]
    fn total<F: Format>([low, high]: [int32x4_t; 2]) -> int32x4_t {
        // SAFETY: as above.
        unsafe {
            if F::SCHEME.bits == 8 {
                return vpaddq_s32(low, high);
            }
            vpaddq_s32(vpaddlq_s16(vreinterpretq_s16_s32(low)), vpaddlq_s16(vreinterpretq_s16_s32(high)))
        }
    }
}

/// Processes a whole panel, V registers at a time.
#[inline(always)]
unsafe fn parts<F: Format, D: Products, const R: usize, const V: usize>(job: Job, this: Body) {
    // SAFETY: the caller guarantees the job; `this` is the function that this one is inlined into.
    unsafe {
        if job.cols < PANEL {
            over_part::<R, 1>((job.out, job.stride, job.cols), job.bias, |out, stride, bias| {
                this(Job { out, stride, bias, cols: PANEL, ..job });
            });
            return;
        }
        for first in (0..PANEL).step_by(V * QUARTER) {
            tile::<F, D, R, V>(job, first);
        }
    }
}

/// Multiplies R rows by V registers of a panel, starting at column `first`. Inlined into functions that enable the
/// instruction set.
#[inline(always)]
unsafe fn tile<F: Format, D: Products, const R: usize, const V: usize>(job: Job, first: usize) {
    let scheme = F::SCHEME;
    let unit_bytes = scheme.unit_bytes();
    // SAFETY: the job covers R rows and all columns of a panel of whole units; offsets below stay within a row, a
    // record or a unit.
    unsafe {
        let at_column = |r: usize, v: usize| r * job.stride + first + v * QUARTER;
        let mut sums = [[vdupq_n_f32(0.0); V]; R];
        if !job.start {
            for r in 0..R {
                for v in 0..V {
                    sums[r][v] = vld1q_f32(job.out.add(at_column(r, v)));
                }
            }
        }
        let (mut x, mut record) = (job.x, job.record);
        let mut at = 0;
        while at < job.piece_bytes {
            let unit = job.w.add(at);
            let skip = if at + AHEAD_BYTES < job.left { 0 } else { job.skip };
            for sub in 0..scheme.subs {
                if first == 0 && job.ahead {
                    // Each 32-block prefetches its share of a unit: a burst would fill the miss queue and stall.
                    let share = unit_bytes / scheme.subs;
                    let ahead = unit.wrapping_add(AHEAD_BYTES + skip + sub * share);
                    for line in 0..share.div_ceil(64) {
                        prefetch(ahead.wrapping_add(64 * line));
                    }
                }
                let group = unit.add(sub * scheme.group_bytes() + 4 * first);
                let mut dots = [[D::zero(); V]; R];
                half::<F, D, R, V>(&job, group, 0, x, &mut dots);
                if scheme.sub_scales == 2 {
                    scaled::<F, D, R, V>(&job, unit, first, (sub, 0), record, &dots, &mut sums);
                    dots = [[D::zero(); V]; R];
                }
                half::<F, D, R, V>(&job, group, 4, x.add(16), &mut dots);
                scaled::<F, D, R, V>(&job, unit, first, (sub, 1), record, &dots, &mut sums);
                if scheme.minima {
                    for v in 0..V {
                        let min = minimum::<F>(unit, first + v * QUARTER, sub);
                        for r in 0..R {
                            let weighted = record.add(r * job.row_bytes + 12).cast::<f32>().read_unaligned();
                            sums[r][v] = vfmaq_n_f32(sums[r][v], min, weighted);
                        }
                    }
                }
                x = x.add(BLOCK);
                record = record.add(RECORD_BYTES);
            }
            at += unit_bytes;
        }
        if !job.bias.is_null() {
            for v in 0..V {
                let bias = vld1q_f32(job.bias.add(at_column(0, v)));
                for r in 0..R {
                    sums[r][v] = vaddq_f32(sums[r][v], bias);
                }
            }
        }
        for r in 0..R {
            for v in 0..V {
                vst1q_f32(job.out.add(at_column(r, v)), sums[r][v]);
            }
        }
    }
}

/// Sums four words of a block, starting at word `from`, with the 16 activations of each row that belong to them.
#[inline(always)]
unsafe fn half<F: Format, D: Products, const R: usize, const V: usize>(
    job: &Job,
    group: *const u8,
    from: usize,
    x: *const u8,
    dots: &mut [[D::Sums; V]; R],
) {
    // SAFETY: the caller guarantees that the job covers the tile and that the machine has the instructions.
    unsafe {
        let mut activations = [vdupq_n_s8(0); R];
        for r in 0..R {
            activations[r] = vld1q_s8(x.add(r * job.row_bytes).cast());
        }
        D::two::<F, R, V, 0, 1>(dots, &two_words::<F, R, V>(group, from), &activations);
        D::two::<F, R, V, 2, 3>(dots, &two_words::<F, R, V>(group, from + 2), &activations);
    }
}

/// Loads words `index` and `index + 1` in the form in which a tile of R rows multiplies them.
#[inline(always)]
unsafe fn two_words<F: Format, const R: usize, const V: usize>(group: *const u8, index: usize) -> [[int8x16_t; V]; 2] {
    // SAFETY: the caller guarantees that the pointers are valid for these accesses and enables the instruction set.
    unsafe {
        let mut words = [[vdupq_n_s8(0); V]; 2];
        for i in 0..2 {
            for v in 0..V {
                let stored = word::<F>(group.add(16 * v), index + i);
                words[i][v] = match i8::try_from(F::SCHEME.offset) {
                    // Subtracting 128 from a byte flips its highest bit.
                    Err(_) => vreinterpretq_s8_u8(veorq_u8(stored, vdupq_n_u8(0x80))),
                    Ok(offset @ 1..) if R >= TALL_FROM_ROWS => {
                        vsubq_s8(vreinterpretq_s8_u8(stored), vdupq_n_s8(offset))
                    }
                    Ok(_) => vreinterpretq_s8_u8(stored),
                };
            }
        }
        words
    }
}

/// Scales the integer sums of a 32-block, or of its half `part` if halves have scales of their own, and adds them to
/// the rows' sums.
#[inline(always)]
unsafe fn scaled<F: Format, D: Products, const R: usize, const V: usize>(
    job: &Job,
    unit: *const u8,
    first: usize,
    (sub, part): (usize, usize),
    record: *const u8,
    dots: &[[D::Sums; V]; R],
    sums: &mut [[float32x4_t; V]; R],
) {
    // SAFETY: the caller guarantees that the pointers are valid for these accesses and enables the instruction set.
    unsafe {
        for v in 0..V {
            let scale = scale::<F>(unit, first + v * QUARTER, sub, part);
            for r in 0..R {
                let record = record.add(r * job.row_bytes);
                let total = D::total::<F>(dots[r][v]);
                let exact = match F::SCHEME.offset {
                    offset @ 1..128 if R < TALL_FROM_ROWS => {
                        vaddq_s32(total, vdupq_n_s32(i32::from(offset) * minus_sum::<F>(record, part)))
                    }
                    _ => total,
                };
                let by = vmulq_n_f32(scale, record.cast::<f32>().read_unaligned());
                sums[r][v] = vfmaq_f32(sums[r][v], vcvtq_f32_s32(exact), by);
            }
        }
    }
}

/// The negated sum of the activations of a 32-block, or of its half `part` if halves have scales of their own.
#[inline(always)]
unsafe fn minus_sum<F: Format>(record: *const u8, part: usize) -> i32 {
    // SAFETY: the caller guarantees that `record` points to a record.
    unsafe {
        let all = record.add(4).cast::<i32>().read_unaligned();
        let first = record.add(8).cast::<i32>().read_unaligned();
        match (F::SCHEME.sub_scales, part) {
            (2, 0) => first,
            (2, _) => all - first,
            _ => all,
        }
    }
}
