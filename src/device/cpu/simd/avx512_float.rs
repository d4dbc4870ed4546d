//! f32 activations × any weight with AVX-512: lanes are output columns, activations are broadcast, K is walked in order.
//!
//! One or two rows read float weights as stored, four panels side by side. More rows, and quantised weights, first widen a
//! piece of K of some panels into a buffer on the stack, then all rows pass over it (12 × 2: 24 accumulators, 2 weights and
//! 1 activation in registers); between pieces the sums wait in `out`. All give the same additions in the same order.

#![allow(unsafe_code)]
// Loops over r and p run through several register arrays at once and must unroll completely.
#![allow(clippy::needless_range_loop)]
// One name for each instruction would fill a page.
#![allow(clippy::wildcard_imports)]

use super::super::arena::Tile;
use super::super::matmul::{FloatRows, columns_of};
use super::super::pack::{PANEL, PackedMatrix};
use super::super::quant::BLOCK;
use super::avx512_words::{Format, minimum, scale, with_format, words};
use crate::weights::DType;
use std::arch::x86_64::*;
use std::mem::MaybeUninit;
use std::ops::Range;

/// Panels that one row passes over side by side: their chains hide the latency of the FMA.
const WIDE: usize = 4;
/// Panels widened together. Copying the activations of a tile is shared by all of them.
const GROUP: usize = 8;
/// K of a piece: a tile's activations (6 KiB) and two panels (16 KiB) stay in the first-level cache.
const PIECE: usize = 128;
/// From this many rows on, float weights are widened once for all of them.
const BUFFER_FROM_ROWS: usize = 3;
/// How far ahead of its use a weight is asked for when it is read as stored.
const AHEAD_BYTES: usize = 4096;
/// Rows of the tallest tile.
const TALL: usize = 12;
/// Values from a row to the next in a copied tile: not a power of two, so that rows do not meet in one set of the cache,
/// as those of a matrix do when K is a multiple of 1,024.
const COPY_STRIDE: usize = PIECE + 16;

/// Widened weights: 64 KiB, in the second-level cache. Not initialised: a piece is written before it is read.
#[repr(align(64))]
struct Widened(MaybeUninit<[f32; GROUP * PIECE * PANEL]>);

/// Activations of a tile, likewise.
#[repr(align(64))]
struct Copied(MaybeUninit<[f32; TALL * COPY_STRIDE]>);

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
    /// Null, or what is to be asked for ahead of time: addresses for the first panel, bytes to the next panel and k.
    ahead: *const u8,
    ahead_panel: usize,
    ahead_step: usize,
}

impl Job {
    /// The same, some rows further down and panels further right.
    unsafe fn at(self, rows: usize, panels: usize) -> Self {
        // SAFETY: the caller stays within the rows and panels of the job.
        unsafe {
            Self {
                x: self.x.add(rows * self.x_stride),
                w: self.w.add(panels * self.w_stride),
                out: self.out.add(rows * self.stride + panels * PANEL),
                cols: self.cols - panels * PANEL,
                bias: if self.bias.is_null() { self.bias } else { self.bias.add(panels * PANEL) },
                ahead: if self.ahead.is_null() {
                    self.ahead
                } else {
                    self.ahead.wrapping_add(panels * self.ahead_panel)
                },
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
        ahead: std::ptr::null(),
        ahead_panel: w.panel_bytes(),
        ahead_step: w.panel_bytes() / w.k(),
    };
    let panels = panels.len();
    // SAFETY: `job` covers all rows and the panels; `assert_available` was called for the instruction set.
    unsafe {
        match w.dtype() {
            DType::F32 if rows < BUFFER_FROM_ROWS => as_stored::<F32>(job, rows, panels),
            DType::F16 if rows < BUFFER_FROM_ROWS => as_stored::<F16>(job, rows, panels),
            DType::BF16 if rows < BUFFER_FROM_ROWS => as_stored::<Bf16>(job, rows, panels),
            DType::F32 => widened(job, rows, panels, widen_floats::<F32>),
            DType::F16 => widened(job, rows, panels, widen_floats::<F16>),
            DType::BF16 => widened(job, rows, panels, widen_floats::<Bf16>),
            _ => with_format!(w.dtype(), quantised::<_>(job, rows, panels)),
        }
    }
}

unsafe fn quantised<F: Format>(job: Job, rows: usize, panels: usize) {
    // SAFETY: the caller's.
    unsafe { widened(job, rows, panels, widen_blocks::<F>) }
}

/// One row at a time over weights as they are stored, all of K at once.
unsafe fn as_stored<L: Load>(job: Job, rows: usize, panels: usize) {
    for first in (0..panels).step_by(WIDE) {
        for row in 0..rows {
            // SAFETY: within the rows and panels of the job.
            unsafe {
                let mut job = job.at(row, first);
                if row == 0 {
                    job.ahead = job.w.wrapping_add(AHEAD_BYTES);
                }
                over_panels(job, WIDE.min(panels - first), (WIDE, tile::<L, 1, WIDE>, tile::<L, 1, 1>));
            }
        }
    }
}

/// Widens a piece of K of a group of panels, then passes all rows over it.
unsafe fn widened(job: Job, rows: usize, panels: usize, widen: unsafe fn(*const u8, Range<usize>, *mut f32)) {
    let mut values = Widened(MaybeUninit::uninit());
    let mut copy = Copied(MaybeUninit::uninit());
    for first in (0..panels).step_by(GROUP) {
        let group = GROUP.min(panels - first);
        for k in (0..job.depth).step_by(PIECE) {
            let end = (k + PIECE).min(job.depth);
            // SAFETY: within the rows, panels and depth of the job; `GROUP` panels of `PIECE` fill the buffer exactly.
            unsafe {
                let source = job.at(0, first);
                for p in 0..group {
                    let panel = source.w.add(p * job.w_stride);
                    widen(panel, k..end, values.0.as_mut_ptr().cast::<f32>().add(p * PIECE * PANEL));
                }
                // The next piece of these panels, or the first of the next group.
                let next = if end < job.depth { end * job.ahead_step } else { group * job.w_stride };
                let piece = Job {
                    x: source.x.add(k),
                    w: values.0.as_ptr().cast(),
                    w_stride: PIECE * PANEL * 4,
                    depth: end - k,
                    start: k == 0,
                    bias: if end == job.depth { source.bias } else { std::ptr::null() },
                    ahead: source.w.wrapping_add(next),
                    ..source
                };
                all_rows(piece, rows, group, &mut copy);
            }
        }
    }
}

type Body = unsafe fn(Job);

/// All rows over a widened piece, the first of them asking for the next piece.
unsafe fn all_rows(mut job: Job, rows: usize, panels: usize, copy: &mut Copied) {
    let bodies: [(usize, (usize, Body, Body)); 5] = [
        (TALL, (2, tile::<F32, TALL, 2>, tile::<F32, TALL, 1>)),
        (6, (2, tile::<F32, 6, 2>, tile::<F32, 6, 1>)),
        (3, (2, tile::<F32, 3, 2>, tile::<F32, 3, 1>)),
        (2, (WIDE, tile::<F32, 2, WIDE>, tile::<F32, 2, 1>)),
        (1, (WIDE, tile::<F32, 1, WIDE>, tile::<F32, 1, 1>)),
    ];
    let mut row = 0;
    for (height, body) in bodies {
        while rows - row >= height {
            // SAFETY: rows and panels of the tile are within the job's; `height` rows of a piece fit the copy.
            unsafe {
                let mut tile = job.at(row, 0);
                if height > 3 {
                    for r in 0..height {
                        let to = copy.0.as_mut_ptr().cast::<f32>().add(r * COPY_STRIDE);
                        std::ptr::copy_nonoverlapping(tile.x.add(r * tile.x_stride), to, tile.depth);
                    }
                    (tile.x, tile.x_stride) = (copy.0.as_ptr().cast(), COPY_STRIDE);
                }
                over_panels(tile, panels, body);
            }
            row += height;
            job.ahead = std::ptr::null();
        }
    }
}

/// One tile of rows over some panels.
unsafe fn over_panels(job: Job, panels: usize, (width, wide, single): (usize, Body, Body)) {
    let mut panel = 0;
    // SAFETY: panels of the tile are within the job's.
    unsafe {
        while panels - panel >= width {
            wide(job.at(0, panel));
            panel += width;
        }
        while panel < panels {
            single(job.at(0, panel));
            panel += 1;
        }
    }
}

/// R rows × P panels over a piece of K.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn tile<L: Load, const R: usize, const P: usize>(job: Job) {
    // SAFETY: the job covers R rows, P panels and `depth` of K; masks keep to its columns. Prefetches read nothing.
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
        for k in 0..job.depth {
            if !job.ahead.is_null() {
                for p in 0..P {
                    let address = job.ahead.wrapping_add(p * job.ahead_panel + k * job.ahead_step);
                    _mm_prefetch::<_MM_HINT_T0>(address.cast());
                }
            }
            let mut w = [_mm512_setzero_ps(); P];
            for p in 0..P {
                w[p] = L::load(job.w.add(p * job.w_stride + k * PANEL * L::BYTES));
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
