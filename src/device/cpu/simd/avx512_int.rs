//! int8 activations × quantised weights with AVX-512: lanes are output columns, activations are broadcast.
//!
//! A tile is R rows × P panels with R·P int32 and R·P f32 accumulators in registers; at each word all rows come before the
//! next word, so that no dot product waits for the one before it. Large batches take 12 × 1 (24 accumulators, 4 registers
//! left for words), one row takes 1 × 4 (four independent chains hide the latency; memory is the limit). The additions of
//! one output value are the same in every tile.

#![allow(unsafe_code)]

use super::super::arena::Tile;
use super::super::matmul::columns_of;
use super::super::pack::{PANEL, PackedMatrix};
use super::super::quant::{BLOCK, QuantRows, RECORD_BYTES};
use super::avx512_words::{Format, minimum, scale, with_format, words};
use std::arch::x86_64::*;
use std::ops::Range;

/// How far ahead of its use a weight is asked for when few rows pass over it: 4 KiB a panel stream, 16 KiB in all, covers
/// about 100 ns at 30 GB/s and four streams.
const AHEAD_BYTES: usize = 4096;
/// From this many rows on the arithmetic takes longer than the memory, and prefetches would only be in the way.
const PREFETCH_BELOW_ROWS: usize = 8;

/// `acc + Σ of 4 bytes of w · x` for each lane: unsigned weights, signed activations.
trait Dot {
    /// # Safety
    /// `x` is valid for 4 reads; the caller enables the instruction set.
    unsafe fn dot(acc: __m512i, w: __m512i, x: *const u8) -> __m512i;
}

struct Vnni;

impl Dot for Vnni {
    #[inline(always)]
    unsafe fn dot(acc: __m512i, w: __m512i, x: *const u8) -> __m512i {
        // SAFETY: the caller's.
        unsafe { _mm512_dpbusd_epi32(acc, w, _mm512_set1_epi32(x.cast::<i32>().read_unaligned())) }
    }
}

/// Without VNNI: even and odd bytes as 16-bit integers. (`vpmaddubsw` would saturate: 255 · 127 · 2 > 32,767.)
struct Widened;

impl Dot for Widened {
    #[inline(always)]
    unsafe fn dot(acc: __m512i, w: __m512i, x: *const u8) -> __m512i {
        // SAFETY: the caller's.
        unsafe {
            let x = _mm512_set1_epi32(x.cast::<i32>().read_unaligned());
            let (x_even, x_odd) = (_mm512_srai_epi16::<8>(_mm512_slli_epi16::<8>(x)), _mm512_srai_epi16::<8>(x));
            let w_even = _mm512_and_si512(w, _mm512_set1_epi16(0xff));
            let w_odd = _mm512_srli_epi16::<8>(w);
            let acc = _mm512_add_epi32(acc, _mm512_madd_epi16(w_even, x_even));
            _mm512_add_epi32(acc, _mm512_madd_epi16(w_odd, x_odd))
        }
    }
}

/// What a tile works on. Pointers are to the tile's first row and panel.
#[derive(Clone, Copy)]
struct Job {
    x: *const u8,
    row_bytes: usize,
    records_at: usize,
    panel: *const u8,
    panel_bytes: usize,
    out: *mut f32,
    stride: usize,
    /// Output columns from the tile's first on.
    cols: usize,
    /// Null, or the tile's first bias.
    bias: *const f32,
}

impl Job {
    /// The same tile, some rows further down and panels further right.
    unsafe fn at(self, rows: usize, panels: usize) -> Self {
        // SAFETY: the caller stays within the rows and panels of the job.
        unsafe {
            Self {
                x: self.x.add(rows * self.row_bytes),
                panel: self.panel.add(panels * self.panel_bytes),
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
    vnni: bool,
    x: QuantRows<'_>,
    w: &PackedMatrix,
    bias: Option<&[f32]>,
    panels: Range<usize>,
    out: &mut Tile<'_, f32>,
) {
    let columns = columns_of(w, &panels);
    if columns.is_empty() || x.rows() == 0 {
        return;
    }
    let job = Job {
        x: x.bytes().as_ptr(),
        row_bytes: x.layout().row_bytes(),
        records_at: x.layout().records_at(),
        panel: w.panel(panels.start).as_ptr(),
        panel_bytes: w.panel_bytes(),
        stride: out.stride(),
        out: out.as_mut_ptr(),
        cols: columns.len(),
        bias: bias.map_or(std::ptr::null(), |bias| bias[columns.start..].as_ptr()),
    };
    // SAFETY: `job` covers `x.rows()` rows and `panels.len()` panels; `assert_available` was called for the instruction set.
    unsafe {
        if vnni {
            with_format!(w.dtype(), all_vnni::<_>(job, x.rows(), panels.len()));
        } else {
            with_format!(w.dtype(), all_widened::<_>(job, x.rows(), panels.len()));
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn tile_vnni<F: Format, const R: usize, const P: usize>(job: Job) {
    // SAFETY: the caller's.
    unsafe { tile::<F, Vnni, R, P>(job) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn tile_widened<F: Format, const R: usize, const P: usize>(job: Job) {
    // SAFETY: the caller's.
    unsafe { tile::<F, Widened, R, P>(job) }
}

/// One tile's body.
type Body = unsafe fn(Job);

/// The bodies for some number of rows: over how many panels the wide one goes, the wide one, the one for a single panel.
type Bodies = [(usize, usize, Body, Body); 4];

unsafe fn all_vnni<F: Format>(job: Job, rows: usize, panels: usize) {
    let bodies: Bodies = [
        (12, 1, tile_vnni::<F, 12, 1>, tile_vnni::<F, 12, 1>),
        (4, 2, tile_vnni::<F, 4, 2>, tile_vnni::<F, 4, 1>),
        (2, 4, tile_vnni::<F, 2, 4>, tile_vnni::<F, 2, 1>),
        (1, 4, tile_vnni::<F, 1, 4>, tile_vnni::<F, 1, 1>),
    ];
    // SAFETY: the caller's.
    unsafe { all(&bodies, job, rows, panels) }
}

unsafe fn all_widened<F: Format>(job: Job, rows: usize, panels: usize) {
    let bodies: Bodies = [
        (8, 1, tile_widened::<F, 8, 1>, tile_widened::<F, 8, 1>),
        (4, 2, tile_widened::<F, 4, 2>, tile_widened::<F, 4, 1>),
        (2, 4, tile_widened::<F, 2, 4>, tile_widened::<F, 2, 1>),
        (1, 4, tile_widened::<F, 1, 4>, tile_widened::<F, 1, 1>),
    ];
    // SAFETY: the caller's.
    unsafe { all(&bodies, job, rows, panels) }
}

/// Four panels at a time, which stay in the second-level cache while all rows pass over them.
unsafe fn all(bodies: &Bodies, job: Job, rows: usize, panels: usize) {
    for first in (0..panels).step_by(4) {
        let group = 4.min(panels - first);
        let mut row = 0;
        for &(height, width, wide, single) in bodies {
            while rows - row >= height {
                let mut panel = 0;
                // SAFETY: rows and panels of the tile are within the job's.
                unsafe {
                    while group - panel >= width {
                        wide(job.at(row, first + panel));
                        panel += width;
                    }
                    while panel < group {
                        single(job.at(row, first + panel));
                        panel += 1;
                    }
                }
                row += height;
            }
        }
    }
}

/// R rows × P panels. Inlined into functions that enable the instruction set.
#[inline(always)]
unsafe fn tile<F: Format, D: Dot, const R: usize, const P: usize>(job: Job) {
    let scheme = F::SCHEME;
    let unit_bytes = scheme.unit_bytes();
    // SAFETY: the job covers R rows and P panels of whole units; offsets below stay within a row, a record or a unit.
    // Prefetched addresses are never read.
    unsafe {
        let mut sums = [[_mm512_setzero_ps(); R]; P];
        let (mut x, mut record) = (job.x, job.x.add(job.records_at));
        let mut at = 0;
        while at < job.panel_bytes {
            let unit = job.panel.add(at);
            if R < PREFETCH_BELOW_ROWS {
                // Beyond a panel's end its stream goes on in the next group of P panels.
                let next_group = if at + AHEAD_BYTES < job.panel_bytes { 0 } else { (P - 1) * job.panel_bytes };
                for p in 0..P {
                    let ahead = unit.wrapping_add(p * job.panel_bytes + AHEAD_BYTES + next_group);
                    for line in 0..unit_bytes.div_ceil(64) {
                        _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_add(64 * line).cast());
                    }
                }
            }
            for sub in 0..scheme.subs {
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
                word_pair::<F, D, R, P, 0>(&job, group, x, &mut lo, &mut hi);
                word_pair::<F, D, R, P, 1>(&job, group, x, &mut lo, &mut hi);
                word_pair::<F, D, R, P, 2>(&job, group, x, &mut lo, &mut hi);
                word_pair::<F, D, R, P, 3>(&job, group, x, &mut lo, &mut hi);
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
            let cols = PANEL.min(job.cols - p * PANEL);
            let mask = (0xffff_u32 >> (PANEL - cols)) as u16;
            let bias = if job.bias.is_null() {
                _mm512_setzero_ps()
            } else {
                _mm512_maskz_loadu_ps(mask, job.bias.add(p * PANEL))
            };
            for r in 0..R {
                let sum = if job.bias.is_null() { sums[p][r] } else { _mm512_add_ps(sums[p][r], bias) };
                _mm512_mask_storeu_ps(job.out.add(r * job.stride + p * PANEL), mask, sum);
            }
        }
    }
}

/// Words I and I + 4 of the block: all rows and panels of a word before the next. Where halves have scales of their own
/// the second word goes to `hi`.
#[inline(always)]
unsafe fn word_pair<F: Format, D: Dot, const R: usize, const P: usize, const I: usize>(
    job: &Job,
    group: *const u8,
    x: *const u8,
    lo: &mut [[__m512i; R]; P],
    hi: &mut [[__m512i; R]; P],
) {
    // SAFETY: the caller's.
    unsafe {
        let mut second = [_mm512_setzero_si512(); P];
        for p in 0..P {
            let (first, later) = words::<F, I>(group.add(p * job.panel_bytes));
            second[p] = later;
            for r in 0..R {
                lo[p][r] = D::dot(lo[p][r], first, x.add(r * job.row_bytes + 4 * I));
            }
        }
        for p in 0..P {
            for r in 0..R {
                let x = x.add(r * job.row_bytes + 16 + 4 * I);
                if F::SCHEME.sub_scales == 2 {
                    hi[p][r] = D::dot(hi[p][r], second[p], x);
                } else {
                    lo[p][r] = D::dot(lo[p][r], second[p], x);
                }
            }
        }
    }
}

/// Times the format's offset, a power of two.
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
