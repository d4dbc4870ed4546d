//! Rotary position embedding of rows.
//!
//! A pair `(a, b)` becomes `(a·cos − b·sin, b·cos + a·sin)`. On every path the second product is fused into the sum.
//! Elements after the rotary width stay unchanged.

#![forbid(unsafe_code)]

use crate::device::cpu::Isa;
use crate::device::cpu::simd::vector::{Kernel, SimdVector, dispatch};
use crate::graph::RopeStyle;

/// Computes cosines and sines of one position: `cos[i] = cos(position · inv_freq[i]) · attention_factor`.
///
/// The angle is rounded to f32 before the cosine is computed, as in Transformers; `position` must be below 2^24 to be
/// exact.
#[allow(clippy::cast_possible_truncation)]
pub fn rope_angles(inv_freq: &[f32], position: u32, attention_factor: f32, cos: &mut [f32], sin: &mut [f32]) {
    debug_assert!(cos.len() == inv_freq.len() && sin.len() == inv_freq.len(), "one cosine and sine a frequency");
    for ((f, c), s) in inv_freq.iter().zip(cos).zip(sin) {
        let (sine, cosine) = f64::from(position as f32 * f).sin_cos();
        *c = cosine as f32 * attention_factor;
        *s = sine as f32 * attention_factor;
    }
}

/// Rotates every head of `row` in place. The rotary width is `2 · cos.len()`, at most `head_dim`.
pub fn rope_row(isa: Isa, row: &mut [f32], head_dim: usize, style: RopeStyle, cos: &[f32], sin: &[f32]) {
    struct Body<'a> {
        row: &'a mut [f32],
        head_dim: usize,
        style: RopeStyle,
        cos: &'a [f32],
        sin: &'a [f32],
    }
    impl Kernel for Body<'_> {
        type Output = ();
        #[inline(always)]
        fn run<L: SimdVector>(self, _: L) {
            let pairs = self.cos.len();
            let sin = &self.sin[..pairs];
            for head in self.row.chunks_exact_mut(self.head_dim) {
                match self.style {
                    RopeStyle::Half => {
                        let (first, second) = head[..2 * pairs].split_at_mut(pairs);
                        for i in 0..pairs {
                            (first[i], second[i]) = rotate(first[i], second[i], self.cos[i], sin[i]);
                        }
                    }
                    RopeStyle::Interleaved => {
                        for (i, pair) in head[..2 * pairs].as_chunks_mut::<2>().0.iter_mut().enumerate() {
                            (pair[0], pair[1]) = rotate(pair[0], pair[1], self.cos[i], sin[i]);
                        }
                    }
                }
            }
        }
    }
    debug_assert!(2 * cos.len() <= head_dim && cos.len() == sin.len(), "rotary width is within the head");
    debug_assert!(row.len().is_multiple_of(head_dim), "a row is whole heads");
    dispatch(isa, Body { row, head_dim, style, cos, sin });
}

#[inline(always)]
fn rotate(a: f32, b: f32, cos: f32, sin: f32) -> (f32, f32) {
    ((-b).mul_add(sin, a * cos), a.mul_add(sin, b * cos))
}
