//! Products of int8 activations with quantized weights, in AVX-512 VNNI. Lanes are output columns; activations are
//! broadcast.
//!
//! A tile is R rows × P panels with R·P int32 and R·P f32 accumulators in registers. For each word all rows are
//! processed before the next word, so that no dot product waits for the previous one. Large batches use 12 × 1 (24
//! accumulators, 4 registers left for words). One row processes panel after panel, because it is bound by memory, and a
//! single long stream has the highest bandwidth. The additions of one output value are the same in every tile.

#![allow(unsafe_code)]
// Loops over `r` and `p` index several register arrays at once and must unroll completely.
#![allow(clippy::needless_range_loop)]
// The intrinsics are too many to import by name.
#![allow(clippy::wildcard_imports)]

use super::unpack::{minimum, scale, words};
use crate::device::cpu::kernels::q8_rows::{BLOCK, QuantRows, RECORD_BYTES};
use crate::device::cpu::memory::Tile;
use crate::device::cpu::simd::formats::{Format, with_format};
use crate::device::cpu::simd::int_tiles::{Body, GROUP, Job, all};
use crate::device::cpu::weights::pack::{PANEL, PackedMatrix};
use std::arch::asm;
use std::arch::x86_64::*;
use std::ops::Range;

/// Prefetch distance of the weights, in rows that prefetch for the others.
const AHEAD_BYTES: usize = 4096;
/// `acc + Σ of 4 bytes of w · x` for each lane: unsigned weights, signed activations. Dot products stay in program
/// order: the compiler would rather chain one row's eight dot products, each waiting for the one before.
///
/// # Safety
/// `x` is valid for 4 reads; the caller enables AVX-512 VNNI.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
unsafe fn dot(acc: __m512i, w: __m512i, x: *const u8) -> __m512i {
    // SAFETY: the caller guarantees 4 readable bytes and the instructions; the assembly is empty and only fixes the
    // place of the sum in program order.
    unsafe {
        let mut sum = _mm512_dpbusd_epi32(acc, w, _mm512_set1_epi32(x.cast::<i32>().read_unaligned()));
        asm!("/* {0} */", inout(zmm_reg) sum, options(nomem, nostack, preserves_flags));
        sum
    }
}

/// Multiplies all rows of `x` by `panels` of `w`. Shapes were checked by the caller.
pub(crate) fn matmul(
    x: QuantRows<'_>,
    w: &PackedMatrix,
    bias: Option<&[f32]>,
    panels: Range<usize>,
    out: &mut Tile<'_, f32>,
) {
    // Tall tiles process pieces of a group's panels in parallel; few rows read panel after panel.
    let skip = if x.rows() < 4 { 0 } else { (GROUP - 1) * w.panel_bytes() };
    let Some(job) = Job::new(x, w, bias, &panels, out, skip) else { return };
    // SAFETY: `job` covers `x.rows()` rows and `panels.len()` panels; `assert_available` was called for the instruction set.
    unsafe { with_format!(w.dtype(), all_formats::<_>(job, x.rows(), panels.len())) }
}

unsafe fn all_formats<F: Format>(job: Job, rows: usize, panels: usize) {
    // Each micro-kernel is compiled for every format: few of them keep the build short.
    let bodies: [(usize, usize, Body, Body); 3] = [
        (12, 1, tile::<F, 12, 1>, tile::<F, 12, 1>),
        (4, 2, tile::<F, 4, 2>, tile::<F, 4, 1>),
        (1, 1, tile::<F, 1, 1>, tile::<F, 1, 1>),
    ];
    // SAFETY: the caller guarantees that the job covers the tile and that the machine has the instructions.
    unsafe { all::<F>(&bodies, job, rows, panels) }
}

/// Multiplies R rows by P panels.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn tile<F: Format, const R: usize, const P: usize>(job: Job) {
    let scheme = F::SCHEME;
    let unit_bytes = scheme.unit_bytes();
    // SAFETY: the job covers R rows and P panels of whole units; offsets below stay within a row, a record or a unit.
    // Prefetches never fault.
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
        let (mut x, mut record) = (job.x, job.record);
        let mut at = 0;
        while at < job.piece_bytes {
            let unit = job.w.add(at);
            let skip = if at + AHEAD_BYTES < job.left { 0 } else { job.skip };
            for sub in 0..scheme.subs {
                if job.ahead {
                    // Each 32-block prefetches its share of a unit: a burst would fill the miss queue and stall.
                    let share = unit_bytes / scheme.subs;
                    for p in 0..P {
                        let ahead = unit.wrapping_add(p * job.panel_bytes + AHEAD_BYTES + skip + sub * share);
                        for line in 0..share.div_ceil(64) {
                            let line = ahead.wrapping_add(64 * line).cast();
                            // The L1 cache has fewer miss slots than memory could serve. At half the bytes per product
                            // they suffice, and lines are closer when they are needed.
                            if scheme.bits == 8 {
                                _mm_prefetch::<_MM_HINT_T1>(line);
                            } else {
                                _mm_prefetch::<_MM_HINT_T0>(line);
                            }
                        }
                    }
                }
                let mut lo = [[_mm512_setzero_si512(); R]; P];
                let mut hi = [[_mm512_setzero_si512(); R]; P];
                if scheme.offset != 0 {
                    for r in 0..R {
                        let sum = |i: usize| {
                            let sum = record.add(r * job.row_bytes + 4 * i).cast::<i32>().read_unaligned();
                            _mm512_set1_epi32(sum)
                        };
                        if scheme.sub_scales == 2 {
                            let (all, first) = (sum(1), sum(2));
                            let start = (times::<F>(first), times::<F>(_mm512_sub_epi32(all, first)));
                            for p in 0..P {
                                (lo[p][r], hi[p][r]) = start;
                            }
                        } else {
                            let start = times::<F>(sum(1));
                            for lo in &mut lo {
                                lo[r] = start;
                            }
                        }
                    }
                }
                let group = unit.add(sub * scheme.group_bytes());
                word_pair::<F, R, P, 0>(&job, group, x, &mut lo, &mut hi);
                word_pair::<F, R, P, 1>(&job, group, x, &mut lo, &mut hi);
                word_pair::<F, R, P, 2>(&job, group, x, &mut lo, &mut hi);
                word_pair::<F, R, P, 3>(&job, group, x, &mut lo, &mut hi);
                for p in 0..P {
                    let unit = unit.add(p * job.panel_bytes);
                    let scale_lo = scale::<F>(unit, sub, 0);
                    let float = |r: usize, i: usize| {
                        _mm512_set1_ps(record.add(r * job.row_bytes + 4 * i).cast::<f32>().read_unaligned())
                    };
                    for r in 0..R {
                        let by = _mm512_mul_ps(scale_lo, float(r, 0));
                        sums[p][r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(lo[p][r]), by, sums[p][r]);
                    }
                    if scheme.sub_scales == 2 {
                        let scale_hi = scale::<F>(unit, sub, 1);
                        for r in 0..R {
                            let by = _mm512_mul_ps(scale_hi, float(r, 0));
                            sums[p][r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(hi[p][r]), by, sums[p][r]);
                        }
                    }
                    if scheme.minima {
                        let min = minimum::<F>(unit, sub);
                        for r in 0..R {
                            sums[p][r] = _mm512_fmadd_ps(min, float(r, 3), sums[p][r]);
                        }
                    }
                }
                x = x.add(BLOCK);
                record = record.add(RECORD_BYTES);
            }
            at += unit_bytes;
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

/// Sums words I and I + 4 of the block, all rows and panels of a word before the next word. If halves have scales of
/// their own, the second word is added to `hi`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
unsafe fn word_pair<F: Format, const R: usize, const P: usize, const I: usize>(
    job: &Job,
    group: *const u8,
    x: *const u8,
    lo: &mut [[__m512i; R]; P],
    hi: &mut [[__m512i; R]; P],
) {
    // SAFETY: the caller guarantees that the job covers the tile and that the machine has the instructions.
    unsafe {
        let mut second = [_mm512_setzero_si512(); P];
        for p in 0..P {
            let (first, later) = words::<F, I>(group.add(p * job.panel_bytes));
            second[p] = later;
            for r in 0..R {
                lo[p][r] = dot(lo[p][r], first, x.add(r * job.row_bytes + 4 * I));
            }
        }
        for p in 0..P {
            for r in 0..R {
                let x = x.add(r * job.row_bytes + 16 + 4 * I);
                if F::SCHEME.sub_scales == 2 {
                    hi[p][r] = dot(hi[p][r], second[p], x);
                } else {
                    lo[p][r] = dot(lo[p][r], second[p], x);
                }
            }
        }
    }
}

/// Multiplies by the format's offset, a power of two.
#[inline(always)]
unsafe fn times<F: Format>(v: __m512i) -> __m512i {
    // SAFETY: the caller enables AVX-512 F.
    unsafe {
        match F::SCHEME.offset {
            8 => _mm512_slli_epi32::<3>(v),
            16 => _mm512_slli_epi32::<4>(v),
            32 => _mm512_slli_epi32::<5>(v),
            _ => _mm512_slli_epi32::<7>(v),
        }
    }
}
