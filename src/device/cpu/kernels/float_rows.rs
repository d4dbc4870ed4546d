//! Float activation rows in the form that matrix products read.

use crate::device::cpu::weights::pack::{PANEL, PackedMatrix};
use std::ops::Range;

/// View of rows of activations: `f32`, or `u16` with the bits of bfloat16.
#[derive(Clone, Copy, Debug)]
pub struct FloatRows<'a, T = f32> {
    data: &'a [T],
    k: usize,
    stride: usize,
}

/// Element type of float rows.
pub(crate) trait Activation: Copy {
    /// True for bfloat16 bits, false for f32.
    const IS_BF16: bool;
}

impl Activation for f32 {
    const IS_BF16: bool = false;
}

impl Activation for u16 {
    const IS_BF16: bool = true;
}

impl<'a, T> FloatRows<'a, T> {
    /// Creates a view of rows of `k` values whose starts are `stride` elements apart.
    pub fn new(data: &'a [T], k: usize, stride: usize) -> Self {
        assert!(0 < k && k <= stride, "rows of {k} values, {stride} apart");
        Self { data, k, stride }
    }

    /// Number of complete rows.
    pub fn rows(&self) -> usize {
        (self.data.len() + self.stride - self.k) / self.stride
    }

    /// Number of values in a row.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Number of elements from one row to the next.
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

/// Output columns of a range of panels, which the `out` of a product over them must cover.
pub fn columns_of(w: &PackedMatrix, panels: &Range<usize>) -> Range<usize> {
    (panels.start * PANEL).min(w.n())..(panels.end * PANEL).min(w.n())
}
