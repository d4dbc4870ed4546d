//! Products of activation rows with packed weights: `out[r][n] = Σ_k x[r][k] · w[n][k] + bias[n]`.
//!
//! Each output value has one accumulator that traverses K in order, whatever the number of rows, the tile, the range of
//! panels or the thread: a row's result is bit-equal in any batch (rule R1). This holds per instruction set: the plain
//! implementations here are the reference, the fast ones fuse multiply and add, and the two agree within `k · 2^-23` of
//! `Σ |x·w|`. Integer parts are exact in both. These kernels do not allocate.

#![forbid(unsafe_code)]

use super::q8_rows::{BLOCK, QuantRows};
use crate::device::cpu::kernels::float_rows::{FloatRows, columns_of};
use crate::device::cpu::memory::Tile;
use crate::device::cpu::weights::pack::{ColumnBlock, PANEL, PackedMatrix, Scheme, column_block, float_at};
use crate::device::cpu::{Isa, simd};
use std::ops::Range;

/// Multiplies f32 rows by `panels` of a weight of any format. `bias` has all `n` values; `out` has one row per row of
/// `x` and exactly the columns of the panels. Weights are dequantized to f32; sums are f32.
pub fn matmul_f32(
    isa: Isa,
    x: FloatRows<'_>,
    w: &PackedMatrix,
    bias: Option<&[f32]>,
    panels: Range<usize>,
    out: &mut Tile<'_, f32>,
) {
    check(w, bias, &panels, x.rows(), x.k(), out);
    if !simd::matmul_f32(isa, x, w, bias, panels.clone(), out) {
        plain(|row, k, values| values.copy_from_slice(&x.row(row)[k]), w, bias, panels, out);
    }
}

/// Multiplies rows of bfloat16 bits; otherwise as [`matmul_f32`]. Sums are f32. With bf16 weights, and on an
/// instruction set that has a dot product of bf16 pairs, one instruction adds `k` and `k + 1` and treats numbers below
/// 2^-126 as zero; in all other cases the result is that of [`matmul_f32`] over the same values.
pub fn matmul_bf16(
    isa: Isa,
    x: FloatRows<'_, u16>,
    w: &PackedMatrix,
    bias: Option<&[f32]>,
    panels: Range<usize>,
    out: &mut Tile<'_, f32>,
) {
    check(w, bias, &panels, x.rows(), x.k(), out);
    if !simd::matmul_bf16(isa, x, w, bias, panels.clone(), out) {
        let widen = |row, k: Range<usize>, values: &mut [f32]| {
            for (value, &bits) in values.iter_mut().zip(&x.row(row)[k]) {
                *value = f32::from_bits(u32::from(bits) << 16);
            }
        };
        plain(widen, w, bias, panels, out);
    }
}

/// Multiplies int8 rows by `panels` of a quantized weight. `bias` and `out` as in [`matmul_f32`]. The products of a
/// block of 32 are summed exactly, then scaled and added in block order.
///
/// # Panics
/// If the weight is a float type.
pub fn matmul_q8(
    isa: Isa,
    x: QuantRows<'_>,
    w: &PackedMatrix,
    bias: Option<&[f32]>,
    panels: Range<usize>,
    out: &mut Tile<'_, f32>,
) {
    assert!(w.dtype().is_quantized(), "int8 activations need a quantized weight, not {}", w.dtype());
    check(w, bias, &panels, x.rows(), x.layout().k(), out);
    if !simd::matmul_q8(isa, x, w, bias, panels.clone(), out) {
        plain_q8(x, w, bias, panels, out);
    }
}

/// Checks the bounds that the unsafe bodies rely on.
fn check(w: &PackedMatrix, bias: Option<&[f32]>, panels: &Range<usize>, rows: usize, k: usize, out: &Tile<'_, f32>) {
    assert_eq!(k, w.k(), "input features of the weight and of the rows");
    assert!(panels.start <= panels.end && panels.end <= w.panels(), "panels {panels:?} of {}", w.panels());
    assert!(bias.is_none_or(|bias| bias.len() == w.n()), "a bias of {} values", w.n());
    assert!(out.rows() == rows && out.cols() == columns_of(w, panels).len(), "the tile covers rows and panels");
}

/// Reference implementation. `x(row, k, values)` copies values of a row.
fn plain(
    x: impl Fn(usize, Range<usize>, &mut [f32]),
    w: &PackedMatrix,
    bias: Option<&[f32]>,
    panels: Range<usize>,
    out: &mut Tile<'_, f32>,
) {
    let columns = columns_of(w, &panels);
    for (panel, start) in panels.zip((0..columns.len()).step_by(PANEL)) {
        let width = PANEL.min(columns.len() - start);
        for k0 in (0..w.k()).step_by(BLOCK) {
            // 32 values of K for 16 columns, dequantized.
            let mut values = [[0.0; PANEL]; BLOCK];
            let depth = BLOCK.min(w.k() - k0);
            if Scheme::for_dtype(w.dtype()).is_some() {
                let blocks: [ColumnBlock; PANEL] =
                    std::array::from_fn(|column| column_block(w.dtype(), w.panel(panel), column, k0 / BLOCK));
                for (k, values) in values.iter_mut().enumerate() {
                    for (value, block) in values.iter_mut().zip(&blocks) {
                        *value = block.scale[k / 16] * f32::from(block.q[k]) + block.min;
                    }
                }
            } else {
                for (k, values) in values[..depth].iter_mut().enumerate() {
                    for (column, value) in values.iter_mut().enumerate() {
                        *value = float_at(w.dtype(), w.panel(panel), k0 + k, column);
                    }
                }
            }
            for row in 0..out.rows() {
                let mut given = [0.0; BLOCK];
                x(row, k0..k0 + depth, &mut given[..depth]);
                let sums = &mut out.row_mut(row)[start..start + width];
                if k0 == 0 {
                    sums.fill(0.0);
                }
                for (x, values) in given[..depth].iter().zip(&values) {
                    for (sum, value) in sums.iter_mut().zip(values) {
                        *sum += x * value;
                    }
                }
            }
        }
    }
    add_bias(bias, &columns, out);
}

fn plain_q8(x: QuantRows<'_>, w: &PackedMatrix, bias: Option<&[f32]>, panels: Range<usize>, out: &mut Tile<'_, f32>) {
    let columns = columns_of(w, &panels);
    let halves = Scheme::for_dtype(w.dtype()).is_some_and(|scheme| scheme.sub_scales == 2);
    let minima = Scheme::for_dtype(w.dtype()).is_some_and(|scheme| scheme.minima);
    for (panel, start) in panels.zip((0..columns.len()).step_by(PANEL)) {
        let width = PANEL.min(columns.len() - start);
        for block in 0..w.k() / BLOCK {
            let weights: [ColumnBlock; PANEL] =
                std::array::from_fn(|column| column_block(w.dtype(), w.panel(panel), column, block));
            for row in 0..out.rows() {
                let ints = &x.quants(row)[block * BLOCK..][..BLOCK];
                let (scale, _, _, weighted_sum) = x.record(row, block);
                let sums = &mut out.row_mut(row)[start..start + width];
                if block == 0 {
                    sums.fill(0.0);
                }
                for (sum, weights) in sums.iter_mut().zip(&weights) {
                    let dot = |range: Range<usize>| {
                        let pairs = ints[range.clone()].iter().zip(&weights.q[range]);
                        pairs.map(|(&x, &q)| i32::from(x) * i32::from(q)).sum::<i32>() as f32
                    };
                    if halves {
                        *sum += dot(0..16) * (weights.scale[0] * scale);
                        *sum += dot(16..32) * (weights.scale[1] * scale);
                    } else {
                        *sum += dot(0..32) * (weights.scale[0] * scale);
                    }
                    if minima {
                        *sum += weights.min * weighted_sum;
                    }
                }
            }
        }
    }
    add_bias(bias, &columns, out);
}

fn add_bias(bias: Option<&[f32]>, columns: &Range<usize>, out: &mut Tile<'_, f32>) {
    let Some(bias) = bias else { return };
    for row in 0..out.rows() {
        for (sum, bias) in out.row_mut(row).iter_mut().zip(&bias[columns.clone()]) {
            *sum += bias;
        }
    }
}
