//! Quantization of f32 rows to int8 blocks.

use crate::device::cpu::kernels::q8_rows::{BLOCK, QuantLayout, RECORD_BYTES, TINY};
use crate::device::cpu::{Isa, simd};

/// Quantizes one row. `x` has `layout.k()` values; `out` has `layout.row_bytes()` bytes, all of which are written.
pub fn quantize_row(isa: Isa, layout: QuantLayout, x: &[f32], out: &mut [u8]) {
    assert!(x.len() == layout.k() && out.len() == layout.row_bytes(), "a row of {} values", layout.k());
    let (quants, records) = out.split_at_mut(layout.records_at());
    let full = layout.k() / BLOCK;
    let done = simd::quantize_blocks(isa, &x[..full * BLOCK], quants, records);
    for block in done..layout.blocks() {
        let values = &x[block * BLOCK..layout.k().min((block + 1) * BLOCK)];
        let mut padded = [0.0; BLOCK];
        padded[..values.len()].copy_from_slice(values);
        let (ints, record) = quantize_block(&padded);
        quants[block * BLOCK..][..BLOCK].copy_from_slice(bytemuck::cast_slice(&ints));
        records[block * RECORD_BYTES..][..RECORD_BYTES].copy_from_slice(&record);
    }
    quants[layout.blocks() * BLOCK..].fill(0);
    records[layout.blocks() * RECORD_BYTES..].fill(0);
}

/// Quantizes consecutive rows.
pub fn quantize_rows(isa: Isa, layout: QuantLayout, x: &[f32], out: &mut [u8]) {
    for (x, out) in x.chunks_exact(layout.k()).zip(out.chunks_exact_mut(layout.row_bytes())) {
        quantize_row(isa, layout, x, out);
    }
}

/// Reference implementation: quantizes one block and computes its record.
#[allow(clippy::cast_possible_truncation)] // within ±127 by construction
fn quantize_block(x: &[f32; BLOCK]) -> ([i8; BLOCK], [u8; RECORD_BYTES]) {
    // Compared as integers, absolute values have the order of the floats, and NaN is above infinity.
    let amax = f32::from_bits(x.iter().fold(0, |max, x| (x.to_bits() & 0x7fff_ffff).max(max)));
    let (scale, inverse) = if !amax.is_finite() {
        (f32::NAN, 0.0)
    } else if amax < TINY {
        (0.0, 0.0)
    } else {
        (amax / 127.0, 127.0 / amax)
    };
    let mut ints = [0; BLOCK];
    if inverse > 0.0 {
        for (int, x) in ints.iter_mut().zip(x) {
            *int = (x * inverse).round_ties_even() as i8;
        }
    }
    let sum = |ints: &[i8]| ints.iter().map(|&q| i32::from(q)).sum::<i32>();
    let (all, first) = (sum(&ints), sum(&ints[..BLOCK / 2]));
    let mut record = [0; RECORD_BYTES];
    record[..4].copy_from_slice(&scale.to_ne_bytes());
    record[4..8].copy_from_slice(&(-all).to_ne_bytes());
    record[8..12].copy_from_slice(&(-first).to_ne_bytes());
    record[12..].copy_from_slice(&(scale * all as f32).to_ne_bytes());
    (ints, record)
}
