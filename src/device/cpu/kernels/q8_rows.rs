//! Activation rows in int8: each block of 32 has a scale and the sums that integer kernels need.
//!
//! A row is self-contained bytes, so different workers can write rows and any worker can read them:
//!
//! ```text
//! | k × i8, padded to 64 | per 32-block: scale f32, -sum i32, -sum of the first 16 i32, scale·sum f32 | padded |
//! ```
//! `scale = amax / 127`, `q = round(x · 127 / amax)`, ties to even. The negated sums initialize the accumulators for
//! weights that are stored with an offset; `scale·sum` multiplies the minimum of formats that have one. A block that is
//! not finite gets scale NaN, so that every output that depends on it is NaN; a block whose amplitude is below 2^-119
//! counts as zero.

#![forbid(unsafe_code)]

use std::ops::Range;

/// Elements that share a scale.
pub const BLOCK: usize = 32;
/// Bytes of a block's record of scale and sums.
pub(crate) const RECORD_BYTES: usize = 16;
/// Below this amplitude (2^-119), `127 / amax` would overflow f32; such a block counts as zero.
pub(crate) const TINY: f32 = 1.504_632_8e-36;

/// Memory layout of a quantized row of `k` activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuantLayout {
    k: usize,
}

impl QuantLayout {
    /// Creates the layout of rows of `k` activations; an incomplete last block is padded with zeros.
    pub const fn new(k: usize) -> Self {
        Self { k }
    }

    /// Number of activations in a row.
    pub const fn k(self) -> usize {
        self.k
    }

    /// Number of blocks in a row.
    pub const fn blocks(self) -> usize {
        self.k.div_ceil(BLOCK)
    }

    /// Offset of the records.
    pub(crate) const fn records_at(self) -> usize {
        self.k.next_multiple_of(64)
    }

    /// Bytes of a row: an odd multiple of 64, so that the rows of a tile do not map to the same cache set.
    pub const fn row_bytes(self) -> usize {
        (self.records_at() + (self.blocks() * RECORD_BYTES).next_multiple_of(64)) | 64
    }
}

/// View of rows of quantized activations.
#[derive(Clone, Copy, Debug)]
pub struct QuantRows<'a> {
    layout: QuantLayout,
    bytes: &'a [u8],
}

impl<'a> QuantRows<'a> {
    /// Creates a view of the consecutive rows in `bytes`.
    pub fn new(layout: QuantLayout, bytes: &'a [u8]) -> Self {
        assert!(bytes.len().is_multiple_of(layout.row_bytes()), "whole rows of {} bytes", layout.row_bytes());
        Self { layout, bytes }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.bytes.len() / self.layout.row_bytes()
    }

    /// Layout of a row.
    pub fn layout(&self) -> QuantLayout {
        self.layout
    }

    /// Bytes of all rows.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// View of a range of the rows.
    #[must_use]
    pub fn slice(&self, rows: Range<usize>) -> Self {
        let row_bytes = self.layout.row_bytes();
        Self { layout: self.layout, bytes: &self.bytes[rows.start * row_bytes..rows.end * row_bytes] }
    }

    /// The int8 values of a row.
    pub fn quants(&self, row: usize) -> &'a [i8] {
        bytemuck::cast_slice(&self.bytes[row * self.layout.row_bytes()..][..self.layout.k])
    }

    /// Record of a block: scale, sum, sum of the first 16, scale·sum. The sums are not negated.
    pub(crate) fn record(&self, row: usize, block: usize) -> (f32, i32, i32, f32) {
        let at = row * self.layout.row_bytes() + self.layout.records_at() + block * RECORD_BYTES;
        let word = |i: usize| {
            let mut bytes = [0; 4];
            bytes.copy_from_slice(&self.bytes[at + 4 * i..][..4]);
            bytes
        };
        (
            f32::from_ne_bytes(word(0)),
            -i32::from_ne_bytes(word(1)),
            -i32::from_ne_bytes(word(2)),
            f32::from_ne_bytes(word(3)),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::Isa;
    use crate::device::cpu::kernels::quantize::quantize_row;
    use crate::device::cpu::simd::testing::Noise;

    fn rows(isa: Isa, x: &[f32]) -> Vec<u8> {
        let layout = QuantLayout::new(x.len());
        let mut out = vec![0xaa; layout.row_bytes()];
        quantize_row(isa, layout, x, &mut out);
        out
    }

    #[test]
    fn every_isa_writes_the_same_bytes() {
        let mut noise = Noise::new(1);
        for k in [1, 31, 32, 33, 64, 96, 576, 1000] {
            for case in 0..20 {
                let mut x = noise.floats(k, 10f32.powi(case - 10));
                match case {
                    3 => x.fill(0.0),
                    4 => x[k / 2] = f32::NAN,
                    5 => x[k - 1] = f32::NEG_INFINITY,
                    6 => x[0] = -1e-44,
                    // Ties: odd multiples of half a step.
                    7 => x
                        .iter_mut()
                        .enumerate()
                        .for_each(|(i, x)| *x = if i % 32 == 0 { 127.0 } else { i as f32 / 2.0 }),
                    _ => {}
                }
                let plain = rows(Isa::Plain, &x);
                for &isa in Isa::available() {
                    assert!(rows(isa, &x) == plain, "{isa:?} k {k} case {case}");
                }
            }
        }
    }

    #[test]
    fn values_come_back_within_half_a_step_and_records_describe_the_block() {
        let mut noise = Noise::new(2);
        let x = noise.floats(320, 3.0);
        let bytes = rows(Isa::detect(), &x);
        let row = QuantRows::new(QuantLayout::new(320), &bytes);
        for block in 0..10 {
            let (scale, sum, first, weighted) = row.record(0, block);
            let ints = &row.quants(0)[block * 32..][..32];
            assert_eq!(sum, ints.iter().map(|&q| i32::from(q)).sum::<i32>());
            assert_eq!(first, ints[..16].iter().map(|&q| i32::from(q)).sum::<i32>());
            assert_eq!(weighted, scale * sum as f32);
            assert!(ints.iter().any(|q| q.abs() == 127));
            for (&q, &x) in ints.iter().zip(&x[block * 32..]) {
                assert!((f32::from(q) * scale - x).abs() <= scale * 0.500_01);
            }
        }
    }

    #[test]
    fn what_is_not_finite_shows_in_the_scale() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = vec![1.0; 64];
            x[40] = bad;
            let bytes = rows(Isa::detect(), &x);
            let row = QuantRows::new(QuantLayout::new(64), &bytes);
            assert!(row.record(0, 0).0 == 1.0 / 127.0 && row.record(0, 1).0.is_nan() && row.record(0, 1).3.is_nan());
        }
    }
}
