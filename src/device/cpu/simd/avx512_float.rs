//! f32 activations × any weight with AVX-512: lanes are output columns, activations are broadcast, K is walked in order.
//!
//! Few rows read float weights as stored (1 or 2 rows × 4 panels). More rows, and quantised weights, first widen a piece
//! of K of a few panels into a buffer on the stack that fits the first-level cache, then all rows pass over it (12 × 2:
//! 24 accumulators, 2 weights, 1 activation in registers); between pieces the sums wait in `out`. Both give the same
//! additions in the same order.

#![allow(unsafe_code)]

use super::super::arena::Tile;
use super::super::matmul::{FloatRows, columns_of};
use super::super::pack::{PANEL, PackedMatrix};
use super::super::quant::BLOCK;
use super::avx512_words::{Format, minimum, scale, with_format, words};
use crate::weights::DType;
use std::arch::x86_64::*;
use std::ops::Range;

/// Values in the buffer: 16 KiB, a third to a half of a first-level cache.
const BUFFER: usize = 4096;
/// Panels that one row passes over side by side: their chains hide the latency of the FMA.
const WIDE: usize = 4;
/// From this many rows on, float weights are widened once for all of them.
const BUFFER_FROM_ROWS: usize = 3;
/// See `avx512_int`.
const AHEAD_BYTES: usize = 4096;

#[repr(align(64))]
struct Buffer([f32; BUFFER]);

/// How 16 weights are stored.
trait Load {
    const BYTES: usize;
    /// # Safety
    /// `at` is valid for `16 * BYTES` reads; the caller enables AVX-512 F.
    unsafe fn load(at: *const u8) -> __m512;
}

struct F32;
struct F16;
struct Bf16;

impl Load for F32 {
    const BYTES: usize = 4;
    #[inline(always)]
    unsafe fn load(at: *const u8) -> __m512 {
        // SAFETY: the caller's.
        unsafe { _mm512_loadu_ps(at.cast()) }
    }
}

impl Load for F16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn load(at: *const u8) -> __m512 {
        // SAFETY: the caller's.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(at.cast())) }
    }
}

impl Load for Bf16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn load(at: *const u8) -> __m512 {
        // SAFETY: the caller's.
        unsafe {
            let halves = _mm512_cvtepu16_epi32(_mm256_loadu_si256(at.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(halves))
        }
    }
}

/// What a tile works on: a piece of K, pointers to the tile's first row and panel.
#[derive(Clone, Copy)]
struct Job {
    x: *const f32,
    x_stride: usize,
    w: *const u8,
    /// Bytes from a panel to the next.
    w_stride: usize,
    depth: usize,
    out: *mut f32,
    stride: usize,
    /// Output columns from the tile's first on.
    cols: usize,
    /// Whether the sums start here, or go on from `out`.
    start: bool,
    /// Null, or the tile's first bias, if the sums end here.
    bias: *const f32,
}

impl Job {
    unsafe fn at(self, rows: usize, panels: usize) -> Self {
        // SAFETY: the caller stays within the rows and panels of the job.
        unsafe {
            Self {
                x: self.x.add(rows * self.x_stride),
                w: self.w.add(panels * self.w_stride),
                out: self.out.add(rows * self.stride + panels * PANEL),
                cols: self.cols - panels * PANEL,
                bias: if self.bias.is_null() { self.bias } else { self.bias.add(panels * PANEL) },
                ..self
            }
        }
    }
}

/// `panels` of `w` times all rows of `x`. Shapes were checked by the caller.
pub(super) fn matmul(
    x: FloatRows<'_>,
    w: &PackedMatrix,
    bias: Option<&[f32]>,
    panels: Range<usize>,
    out: &mut Tile<'_, f32>,
) {
    let columns = columns_of(w, &panels);
    let rows = x.rows();
    if columns.is_empty() || rows == 0 {
        return;
    }
    let job = Job {
        x: x.data().as_ptr(),
        x_stride: x.stride(),
        w: w.panel(panels.start).as_ptr(),
        w_stride: w.panel_bytes(),
        depth: w.k(),
        stride: out.stride(),
        out: out.as_mut_ptr(),
        cols: columns.len(),
        start: true,
        bias: bias.map_or(std::ptr::null(), |bias| bias[columns.start..].as_ptr()),
    };
    // SAFETY: `job` covers all rows and the panels; `assert_available` was called for the instruction set.
    unsafe {
        match w.dtype() {
            DType::F32 => direct::<F32>(job, rows, panels.len()),
            DType::F16 if rows < BUFFER_FROM_ROWS => direct::<F16>(job, rows, panels.len()),
            DType::BF16 if rows < BUFFER_FROM_ROWS => direct::<Bf16>(job, rows, panels.len()),
            DType::F16 => buffered(job, rows, panels.len(), widen_floats::<F16>),
            DType::BF16 => buffered(job, rows, panels.len(), widen_floats::<Bf16>),
            _ => with_format!(w.dtype(), quantised::<_>(job, rows, panels.len())),
        }
    }
}

unsafe fn quantised<F: Format>(job: Job, rows: usize, panels: usize) {
    // SAFETY: the caller's.
    unsafe { buffered(job, rows, panels, widen_blocks::<F>) }
}

/// Reads weights as they are stored, K in pieces that fit the first-level cache while all rows pass over them.
unsafe fn direct<L: Load>(job: Job, rows: usize, panels: usize) {
    let width = if rows < BUFFER_FROM_ROWS { WIDE } else { 2 };
    let piece = if rows < BUFFER_FROM_ROWS { job.depth } else { BUFFER / (2 * PANEL) };
    for first in (0..panels).step_by(width) {
        let group = width.min(panels - first);
        for k in (0..job.depth).step_by(piece) {
            let depth = piece.min(job.depth - k);
            // SAFETY: within the rows, panels and depth of the job.
            unsafe {
                all_rows::<L>(
                    part(job.at(0, first), k, depth, job.w.add(first * job.w_stride + k * PANEL * L::BYTES)),
                    rows,
                    group,
                )
            }
        }
    }
}

/// Widens a piece of K of a group of panels, then passes all rows over it.
unsafe fn buffered(job: Job, rows: usize, panels: usize, widen: unsafe fn(*const u8, Range<usize>, *mut f32)) {
    let mut buffer = Buffer([0.0; BUFFER]);
    let width = if rows < BUFFER_FROM_ROWS { WIDE } else { 2 };
    let piece = BUFFER / (width * PANEL);
    for first in (0..panels).step_by(width) {
        let group = width.min(panels - first);
        for k in (0..job.depth).step_by(piece) {
            let depth = piece.min(job.depth - k);
            // SAFETY: within the rows, panels and depth of the job; `width` panels of `piece` fill the buffer exactly.
            unsafe {
                let values = buffer.0.as_mut_ptr();
                for p in 0..group {
                    widen(job.w.add((first + p) * job.w_stride), k..k + depth, values.add(p * piece * PANEL));
                }
                let mut piece_job = part(job.at(0, first), k, depth, values.cast());
                piece_job.w_stride = piece * PANEL * 4;
                all_rows::<F32>(piece_job, rows, group);
            }
        }
    }
}

/// A job's piece of K, from other bytes.
unsafe fn part(job: Job, k: usize, depth: usize, w: *const u8) -> Job {
    // SAFETY: the caller stays within the depth of the job.
    let x = unsafe { job.x.add(k) };
    let bias = if k + depth == job.depth { job.bias } else { std::ptr::null() };
    Job { x, w, depth, start: k == 0, bias, ..job }
}

/// All rows over a group of panels that are in cache (or, for few rows, on their way).
unsafe fn all_rows<L: Load>(job: Job, rows: usize, panels: usize) {
    type Body = unsafe fn(Job);
    let bodies: [(usize, usize, Body, Body); 5] = [
        (12, 2, tile::<L, 12, 2>, tile::<L, 12, 1>),
        (6, 2, tile::<L, 6, 2>, tile::<L, 6, 1>),
        (3, 2, tile::<L, 3, 2>, tile::<L, 3, 1>),
        (2, WIDE, tile::<L, 2, WIDE>, tile::<L, 2, 1>),
        (1, WIDE, tile::<L, 1, WIDE>, tile::<L, 1, 1>),
    ];
    let mut row = 0;
    for (height, width, wide, single) in bodies {
        while rows - row >= height {
            let mut panel = 0;
            // SAFETY: rows and panels of the tile are within the job's.
            unsafe {
                while panels - panel >= width {
                    wide(job.at(row, panel));
                    panel += width;
                }
                while panel < panels {
                    single(job.at(row, panel));
                    panel += 1;
                }
            }
            row += height;
        }
    }
}

/// R rows × P panels over a piece of K.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn tile<L: Load, const R: usize, const P: usize>(job: Job) {
    // SAFETY: the job covers R rows, P panels and `depth` of K; masks keep to its columns. Prefetches read nothing.
    unsafe {
        let mask = |p: usize| (0xffff_u32 >> (PANEL - PANEL.min(job.cols - p * PANEL))) as u16;
        let mut sums = [[_mm512_setzero_ps(); R]; P];
        if !job.start {
            for p in 0..P {
                for r in 0..R {
                    sums[p][r] = _mm512_maskz_loadu_ps(mask(p), job.out.add(r * job.stride + p * PANEL));
                }
            }
        }
        let panel_bytes = job.depth * PANEL * L::BYTES;
        for k in 0..job.depth {
            let at = k * PANEL * L::BYTES;
            let mut w = [_mm512_setzero_ps(); P];
            for p in 0..P {
                let word = job.w.add(p * job.w_stride + at);
                w[p] = L::load(word);
                if P == WIDE {
                    // Beyond a panel's end its stream goes on in the next group of P panels.
                    let next_group = if at + AHEAD_BYTES < panel_bytes { 0 } else { (P - 1) * job.w_stride };
                    _mm_prefetch::<_MM_HINT_T0>(word.wrapping_add(AHEAD_BYTES + next_group).cast());
                }
            }
            for r in 0..R {
                let x = _mm512_set1_ps(*job.x.add(r * job.x_stride + k));
                for p in 0..P {
                    sums[p][r] = _mm512_fmadd_ps(x, w[p], sums[p][r]);
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

/// Some k of a float panel as f32.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn widen_floats<L: Load>(panel: *const u8, ks: Range<usize>, values: *mut f32) {
    for (i, k) in ks.enumerate() {
        // SAFETY: the caller's: `ks` lie in the panel, and 16 values for each fit.
        unsafe { _mm512_storeu_ps(values.add(i * PANEL), L::load(panel.add(k * PANEL * L::BYTES))) };
    }
}

/// Some whole blocks of a quantised panel as f32: the values that dequantising the source gives.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn widen_blocks<F: Format>(panel: *const u8, ks: Range<usize>, values: *mut f32) {
    for (i, block) in (ks.start / BLOCK..ks.end / BLOCK).enumerate() {
        // SAFETY: the caller's: the blocks lie in the panel, and 16 values for each k fit.
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
                        let q = _mm512_sub_epi32(stored, _mm512_set1_epi32(F::SCHEME.offset));
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
