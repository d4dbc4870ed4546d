//! RMS norms of rows.
//!
//! The mean square has one order of additions on every path: 64 partial sums (four vectors of 16 lanes; vector `i` of
//! the row is added to sum `i mod 4`), then `(s0 + s1) + (s2 + s3)`, then the lanes by halving. Results are therefore
//! bit-equal on every path.

#![forbid(unsafe_code)]

use crate::device::cpu::Isa;
use crate::device::cpu::simd::map::padded;
use crate::device::cpu::simd::vector::{Kernel, SimdVector, dispatch};

/// Computes `Σ x²` in the order documented for the module.
#[inline(always)]
fn sum_squares<L: SimdVector>(l: L, x: &[f32]) -> f32 {
    let mut sums = [l.splat(0.0); 4];
    let (groups, rest) = x.as_chunks::<64>();
    for group in groups {
        for (sum, chunk) in sums.iter_mut().zip(group.as_chunks::<16>().0) {
            let v = l.load(chunk);
            *sum = l.fma(v, v, *sum);
        }
    }
    for (sum, chunk) in sums.iter_mut().zip(rest.chunks(16)) {
        let v = l.load(&padded(chunk));
        *sum = l.fma(v, v, *sum);
    }
    l.sum(l.add(l.add(sums[0], sums[1]), l.add(sums[2], sums[3])))
}

#[inline(always)]
fn inverse_rms<L: SimdVector>(l: L, x: &[f32], eps: f32) -> f32 {
    1.0 / (sum_squares(l, x) / x.len() as f32 + eps).sqrt()
}

/// `out = x / rms(x) · weight`, `rms(x) = √(mean(x²) + eps)`.
pub fn rms_norm_row(isa: Isa, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    struct Body<'a>(&'a [f32], &'a [f32], f32, &'a mut [f32]);
    impl Kernel for Body<'_> {
        type Output = ();
        #[inline(always)]
        fn run<L: SimdVector>(self, l: L) {
            let scale = inverse_rms(l, self.0, self.2);
            for ((y, x), w) in self.3.iter_mut().zip(self.0).zip(self.1) {
                *y = x * scale * w;
            }
        }
    }
    debug_assert!(x.len() == weight.len() && x.len() == out.len(), "rows of one operation have one length");
    dispatch(isa, Body(x, weight, eps, out));
}

/// Computes `residual += x; out = rms_norm(residual)`, bit-equal to the two separate steps.
pub fn add_rms_norm_row(isa: Isa, residual: &mut [f32], x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    struct Body<'a>(&'a mut [f32], &'a [f32], &'a [f32], f32, &'a mut [f32]);
    impl Kernel for Body<'_> {
        type Output = ();
        #[inline(always)]
        fn run<L: SimdVector>(self, l: L) {
            for (y, x) in self.0.iter_mut().zip(self.1) {
                *y += x;
            }
            let scale = inverse_rms(l, self.0, self.3);
            for ((y, x), w) in self.4.iter_mut().zip(self.0.iter()).zip(self.2) {
                *y = x * scale * w;
            }
        }
    }
    debug_assert!(
        x.len() == residual.len() && x.len() == weight.len() && x.len() == out.len(),
        "rows of one operation have one length"
    );
    dispatch(isa, Body(residual, x, weight, eps, out));
}

/// Normalizes each head of a row separately, in place, with the same `weight` (one head wide).
pub fn qk_norm_row(isa: Isa, row: &mut [f32], weight: &[f32], eps: f32) {
    struct Body<'a>(&'a mut [f32], &'a [f32], f32);
    impl Kernel for Body<'_> {
        type Output = ();
        #[inline(always)]
        fn run<L: SimdVector>(self, l: L) {
            for head in self.0.chunks_exact_mut(self.1.len()) {
                let scale = inverse_rms(l, head, self.2);
                for (y, w) in head.iter_mut().zip(self.1) {
                    *y = *y * scale * w;
                }
            }
        }
    }
    debug_assert!(row.len().is_multiple_of(weight.len()), "a row is whole heads");
    dispatch(isa, Body(row, weight, eps));
}
