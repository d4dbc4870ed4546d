//! Products of int8 activations with quantized weights, in AVX2. Lanes are output columns; activations are broadcast.
//!
//! A tile is R rows × H halves of a panel, 8 columns each. `vpmaddubsw` adds two products of an unsigned and a signed
//! byte in 16 bits, and saturates. Weights of up to 6 bits stay far from that limit, so the sums of a few words fit in
//! 16 bits. 8-bit weights could reach 255 · 127 · 2; therefore their magnitude is multiplied with the activation, which
//! takes over their sign: 128 · 127 · 2 fits. Words that are added together are in registers at the same time, so a row
//! needs no accumulator between them. All integer sums are exact; the float additions of one output value are those of
//! the AVX-512 kernels.

#![allow(unsafe_code)]
// Loops over `r` and `h` index several register arrays at once and must unroll completely.
#![allow(clippy::needless_range_loop)]
// The intrinsics are too many to import by name.
#![allow(clippy::wildcard_imports)]

use super::unpack::{HALF, load_columns, minimum, scale, store_columns, word};
use crate::device::cpu::kernels::q8_rows::{BLOCK, QuantRows, RECORD_BYTES};
use crate::device::cpu::memory::Tile;
use crate::device::cpu::simd::formats::{Format, with_format};
use crate::device::cpu::simd::int_tiles::{Body, Job, all};
use crate::device::cpu::weights::pack::{PANEL, PackedMatrix};
use std::arch::asm;
use std::arch::x86_64::*;
use std::ops::Range;

/// Prefetch distance of the weights, in rows that prefetch for the others.
const AHEAD_BYTES: usize = 4096;
/// Number of rows of the tall tile.
const TALL: usize = 8;

/// Multiplies all rows of `x` by `panels` of `w`. Shapes were checked by the caller.
pub(crate) fn matmul(
    x: QuantRows<'_>,
    w: &PackedMatrix,
    bias: Option<&[f32]>,
    panels: Range<usize>,
    out: &mut Tile<'_, f32>,
) {
    let Some(job) = Job::new(x, w, bias, &panels, out, 0) else { return };
    // SAFETY: `job` covers `x.rows()` rows and `panels.len()` panels; `assert_available` was called for the instruction set.
    unsafe { with_format!(w.dtype(), all_formats::<_>(job, x.rows(), panels.len())) }
}

unsafe fn all_formats<F: Format>(job: Job, rows: usize, panels: usize) {
    // Each micro-kernel is compiled for every format: two of them keep the build short.
    let bodies: [(usize, usize, Body, Body); 2] = [(TALL, 1, tall::<F>, tall::<F>), (1, 1, single::<F>, single::<F>)];
    // SAFETY: the caller guarantees that the job covers the tile and that the machine has the instructions.
    unsafe { all::<F>(&bodies, job, rows, panels) }
}

/// Many rows: first one half of the panel, then the other.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn tall<F: Format>(job: Job) {
    for first in (0..job.cols.min(PANEL)).step_by(HALF) {
        // SAFETY: the caller guarantees that the job covers the tile and that the machine has the instructions.
        unsafe { tile::<F, TALL, 1>(job, first) }
    }
}

/// One row: both halves at once, in memory order.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn single<F: Format>(job: Job) {
    // SAFETY: the caller guarantees that the job covers the tile and that the machine has the instructions.
    unsafe { tile::<F, 1, 2>(job, 0) }
}

/// Sums of a word's products in 32 bits, for each half of a panel.
type Sums<const R: usize, const H: usize> = [[__m256i; H]; R];

/// Multiplies R rows by H halves of a panel, starting at column `first`. Inlined into functions that enable the
/// instruction set.
#[inline(always)]
unsafe fn tile<F: Format, const R: usize, const H: usize>(job: Job, first: usize) {
    let scheme = F::SCHEME;
    let unit_bytes = scheme.unit_bytes();
    // SAFETY: the job covers R rows and a panel of whole units; offsets below stay within a row, a record or a unit;
    // loads and stores of sums stay within the job's columns. Prefetches never fault.
    unsafe {
        let cols = |h: usize| job.cols.saturating_sub(first + h * HALF).min(HALF);
        let mut sums = [[_mm256_setzero_ps(); H]; R];
        if !job.start {
            for r in 0..R {
                for h in 0..H {
                    let at = job.out.wrapping_add(r * job.stride + first + h * HALF);
                    sums[r][h] = load_columns(at, cols(h));
                }
            }
        }
        let (mut x, mut record) = (job.x, job.record);
        let mut at = 0;
        while at < job.piece_bytes {
            let unit = job.w.add(at);
            for sub in 0..scheme.subs {
                if job.ahead {
                    // Each 32-block prefetches its share of a unit: a burst would fill the miss queue and stall.
                    let share = unit_bytes / scheme.subs;
                    let ahead = unit.wrapping_add(AHEAD_BYTES + sub * share);
                    for line in 0..share.div_ceil(64) {
                        _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_add(64 * line).cast());
                    }
                }
                let group = unit.add(sub * scheme.group_bytes() + 4 * first);
                let mut dots = [[_mm256_setzero_si256(); H]; R];
                lower::<F, R, H>(&job, group, x, &mut dots);
                if scheme.sub_scales == 2 {
                    scaled::<F, R, H>(&job, unit, first, (sub, 0), record, &dots, &mut sums);
                    dots = [[_mm256_setzero_si256(); H]; R];
                }
                upper::<F, R, H>(&job, group, x, &mut dots);
                scaled::<F, R, H>(&job, unit, first, (sub, 1), record, &dots, &mut sums);
                if scheme.minima {
                    for h in 0..H {
                        let min = minimum::<F>(unit, first + h * HALF, sub);
                        for r in 0..R {
                            let weighted = record.add(r * job.row_bytes + 12).cast::<f32>().read_unaligned();
                            sums[r][h] = _mm256_fmadd_ps(min, _mm256_set1_ps(weighted), sums[r][h]);
                        }
                    }
                }
                x = x.add(BLOCK);
                record = record.add(RECORD_BYTES);
            }
            at += unit_bytes;
        }
        for h in 0..H {
            let bias = if job.bias.is_null() {
                _mm256_setzero_ps()
            } else {
                load_columns(job.bias.wrapping_add(first + h * HALF), cols(h))
            };
            for r in 0..R {
                let sum = if job.bias.is_null() { sums[r][h] } else { _mm256_add_ps(sums[r][h], bias) };
                store_columns(job.out.wrapping_add(r * job.stride + first + h * HALF), cols(h), sum);
            }
        }
    }
}

/// Sums words 0 to 3 of a block, as many at a time as fit in 16 bits.
#[inline(always)]
unsafe fn lower<F: Format, const R: usize, const H: usize>(
    job: &Job,
    group: *const u8,
    x: *const u8,
    dots: &mut Sums<R, H>,
) {
    // SAFETY: the caller guarantees that the job covers the tile and that the machine has the instructions.
    unsafe {
        match F::SCHEME.bits {
            8 => {
                signed::<F, R, H, 0>(job, group, x, dots);
                signed::<F, R, H, 1>(job, group, x, dots);
                signed::<F, R, H, 2>(job, group, x, dots);
                signed::<F, R, H, 3>(job, group, x, dots);
            }
            6 => {
                two::<F, R, H, 0>(job, group, x, dots);
                two::<F, R, H, 2>(job, group, x, dots);
            }
            _ => four::<F, R, H, 0>(job, group, x, dots),
        }
    }
}

/// Sums words 4 to 7, in the same way.
#[inline(always)]
unsafe fn upper<F: Format, const R: usize, const H: usize>(
    job: &Job,
    group: *const u8,
    x: *const u8,
    dots: &mut Sums<R, H>,
) {
    // SAFETY: the caller guarantees that the job covers the tile and that the machine has the instructions.
    unsafe {
        match F::SCHEME.bits {
            8 => {
                signed::<F, R, H, 4>(job, group, x, dots);
                signed::<F, R, H, 5>(job, group, x, dots);
                signed::<F, R, H, 6>(job, group, x, dots);
                signed::<F, R, H, 7>(job, group, x, dots);
            }
            6 => {
                two::<F, R, H, 4>(job, group, x, dots);
                two::<F, R, H, 6>(job, group, x, dots);
            }
            _ => four::<F, R, H, 4>(job, group, x, dots),
        }
    }
}

/// Sums word I of 8-bit weights: two products reach 2 · 128 · 127 = 32,512, which fits in 16 bits; a third does not.
#[inline(always)]
unsafe fn signed<F: Format, const R: usize, const H: usize, const I: usize>(
    job: &Job,
    group: *const u8,
    x: *const u8,
    dots: &mut Sums<R, H>,
) {
    // SAFETY: the caller guarantees that the pointers are valid for these accesses and enables the instruction set.
    unsafe {
        for h in 0..H {
            // Stored with an offset of 128. As an unsigned byte, the magnitude of -128 is 128.
            let w = _mm256_xor_si256(word::<F>(group.add(32 * h), I), _mm256_set1_epi8(-128));
            let magnitude = _mm256_abs_epi8(w);
            for r in 0..R {
                let x = _mm256_sign_epi8(four_of(x.add(r * job.row_bytes + 4 * I)), w);
                add_pairs(&mut dots[r][h], _mm256_maddubs_epi16(magnitude, x));
            }
        }
    }
}

/// Sums words I and I + 1: four products of 6-bit weights reach 4 · 63 · 127 = 32,004.
#[inline(always)]
unsafe fn two<F: Format, const R: usize, const H: usize, const I: usize>(
    job: &Job,
    group: *const u8,
    x: *const u8,
    dots: &mut Sums<R, H>,
) {
    // SAFETY: the caller guarantees that the pointers are valid for these accesses and enables the instruction set.
    unsafe {
        for h in 0..H {
            let group = group.add(32 * h);
            let w = [word::<F>(group, I), word::<F>(group, I + 1)];
            for r in 0..R {
                let x = x.add(r * job.row_bytes + 4 * I);
                let first = _mm256_maddubs_epi16(w[0], four_of(x));
                let second = _mm256_maddubs_epi16(w[1], four_of(x.add(4)));
                add_pairs(&mut dots[r][h], _mm256_add_epi16(first, second));
            }
        }
    }
}

/// Sums words I to I + 3: eight products of 5-bit weights reach 8 · 31 · 127 = 31,496.
#[inline(always)]
unsafe fn four<F: Format, const R: usize, const H: usize, const I: usize>(
    job: &Job,
    group: *const u8,
    x: *const u8,
    dots: &mut Sums<R, H>,
) {
    // SAFETY: the caller guarantees that the pointers are valid for these accesses and enables the instruction set.
    unsafe {
        for h in 0..H {
            let group = group.add(32 * h);
            let w = [word::<F>(group, I), word::<F>(group, I + 1), word::<F>(group, I + 2), word::<F>(group, I + 3)];
            for r in 0..R {
                let x = x.add(r * job.row_bytes + 4 * I);
                let first = _mm256_maddubs_epi16(w[0], four_of(x));
                let second = _mm256_maddubs_epi16(w[1], four_of(x.add(4)));
                let third = _mm256_maddubs_epi16(w[2], four_of(x.add(8)));
                let fourth = _mm256_maddubs_epi16(w[3], four_of(x.add(12)));
                let both = [_mm256_add_epi16(first, second), _mm256_add_epi16(third, fourth)];
                add_pairs(&mut dots[r][h], _mm256_add_epi16(both[0], both[1]));
            }
        }
    }
}

/// Broadcasts four activations to every column.
#[inline(always)]
unsafe fn four_of(x: *const u8) -> __m256i {
    // SAFETY: the caller guarantees 4 readable bytes.
    unsafe { _mm256_set1_epi32(x.cast::<i32>().read_unaligned()) }
}

/// Adds the two 16-bit sums of each column.
#[inline(always)]
unsafe fn add_pairs(dots: &mut __m256i, pairs: __m256i) {
    // SAFETY: the caller enables AVX2.
    *dots = unsafe { hold(_mm256_add_epi32(*dots, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))) };
}

/// Returns `v` unchanged, but forces it into a register in program order. Without it the compiler reorders the integer
/// additions to process one row after another, with all words of a block in memory because they do not fit in
/// registers: 3 to 7 % slower.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn hold(mut v: __m256i) -> __m256i {
    // SAFETY: the assembly contains no instruction.
    unsafe { asm!("/* {0} */", inout(ymm_reg) v, options(nomem, nostack, preserves_flags)) };
    v
}

/// Scales the integer sums of a 32-block, or of its half `part` if halves have scales of their own, and adds them to
/// the rows' sums.
#[inline(always)]
unsafe fn scaled<F: Format, const R: usize, const H: usize>(
    job: &Job,
    unit: *const u8,
    first: usize,
    (sub, part): (usize, usize),
    record: *const u8,
    dots: &Sums<R, H>,
    sums: &mut [[__m256; H]; R],
) {
    // SAFETY: the caller guarantees that the pointers are valid for these accesses and enables the instruction set.
    unsafe {
        for h in 0..H {
            let scale = scale::<F>(unit, first + h * HALF, sub, part);
            for r in 0..R {
                let record = record.add(r * job.row_bytes);
                // 8-bit weights were multiplied with their true sign, all others in their stored form with the offset.
                let exact = match F::SCHEME.offset {
                    0 | 128 => dots[r][h],
                    offset => _mm256_add_epi32(dots[r][h], times(offset, minus_sum::<F>(record, part))),
                };
                let by = _mm256_mul_ps(scale, _mm256_set1_ps(record.cast::<f32>().read_unaligned()));
                sums[r][h] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(exact), by, sums[r][h]);
            }
        }
    }
}

/// The negated sum of the activations of a 32-block, or of its half `part` if halves have scales of their own.
#[inline(always)]
unsafe fn minus_sum<F: Format>(record: *const u8, part: usize) -> __m256i {
    // SAFETY: the caller guarantees that `record` points to a record.
    unsafe {
        let all = record.add(4).cast::<i32>().read_unaligned();
        let first = record.add(8).cast::<i32>().read_unaligned();
        match (F::SCHEME.sub_scales, part) {
            (2, 0) => _mm256_set1_epi32(first),
            (2, _) => _mm256_set1_epi32(all - first),
            _ => _mm256_set1_epi32(all),
        }
    }
}

/// Multiplies by a format's offset, a power of two.
#[inline(always)]
unsafe fn times(offset: i16, v: __m256i) -> __m256i {
    // SAFETY: the caller enables AVX2.
    unsafe {
        match offset {
            8 => _mm256_slli_epi32::<3>(v),
            16 => _mm256_slli_epi32::<4>(v),
            _ => _mm256_slli_epi32::<5>(v),
        }
    }
}
