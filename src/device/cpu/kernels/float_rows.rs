//! Rows of floats as products read them.

use crate::device::cpu::weights::pack::{PANEL, PackedMatrix};
use std::ops::Range;

/// Rows of activations, to read: `f32`, or `u16` with the bits of bfloat16.
#[derive(Clone, Copy, Debug)]
pub struct FloatRows<'a, T = f32> {
    data: &'a [T],
    k: usize,
    stride: usize,
}

/// What rows of floats consist of.
pub(crate) trait Activation: Copy {
    /// Bits of bfloat16; else f32.
    const IS_BF16: bool;
}

impl Activation for f32 {
    const IS_BF16: bool = false;
}

impl Activation for u16 {
    const IS_BF16: bool = true;
}

impl<'a, T> FloatRows<'a, T> {
    /// Rows of `k` values, `stride` apart.
    pub fn new(data: &'a [T], k: usize, stride: usize) -> Self {
        assert!(0 < k && k <= stride, "rows of {k} values, {stride} apart");
        Self { data, k, stride }
    }

    /// Rows that are wholly there.
    pub fn rows(&self) -> usize {
        (self.data.len() + self.stride - self.k) / self.stride
    }

    /// Values in a row.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Values from a row to the next.
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// One row.
    pub fn row(&self, row: usize) -> &'a [T] {
        &self.data[row * self.stride..][..self.k]
    }

    pub(crate) fn data(&self) -> &'a [T] {
        self.data
    }
}

/// The output columns of a range of panels: what the `out` of a product over them must cover.
pub fn columns_of(w: &PackedMatrix, panels: &Range<usize>) -> Range<usize> {
    (panels.start * PANEL).min(w.n())..(panels.end * PANEL).min(w.n())
}
