//! Exponential of the CPU kernels: one polynomial, evaluated by the same operations in every lane and on every path.
//!
//! Error: at most 2 ulp for results in the normal range; for subnormal results, one rounding to the smallest step.
//! `exp(-inf)` is 0, results above the largest f32 are infinite, NaN stays NaN.

#![forbid(unsafe_code)]

use crate::device::cpu::Isa;
use crate::device::cpu::simd::map::{Map, map_in_place};
use crate::device::cpu::simd::vector::{Kernel, SimdVector, dispatch};

// exp(-110) rounds to 0 and exp(100) to infinity, so clamping there changes no result and keeps exponents in range.
const LOWEST: f32 = -110.0;
const HIGHEST: f32 = 100.0;
// 1.5 * 2^23: adding it rounds to the nearest integer.
const ROUNDER: f32 = 12_582_912.0;
// ln 2 in two parts (Cody and Waite): the first has few bits, so its product with an integer is exact.
const LN2_HIGH: f32 = 355.0 / 512.0;
const LN2_LOW: f32 = -2.121_944_4e-4;
// (exp(r) - 1 - r) / r² on |r| <= ln(2) / 2, as in Cephes' expf; highest power first.
const POLYNOMIAL: [f32; 6] = [1.987_569_1e-4, 1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5];

/// `exp` of each lane.
#[inline(always)]
pub fn exp<L: SimdVector>(l: L, x: L::F32) -> L::F32 {
    // The bounds are the first operands of `max` and `min`, so that NaN passes through.
    let x = l.min(l.splat(HIGHEST), l.max(l.splat(LOWEST), x));
    let n = l.sub(l.fma(x, l.splat(std::f32::consts::LOG2_E), l.splat(ROUNDER)), l.splat(ROUNDER));
    let r = l.fma(n, l.splat(-LN2_HIGH), x);
    let r = l.fma(n, l.splat(-LN2_LOW), r);
    let mut p = l.splat(POLYNOMIAL[0]);
    for c in &POLYNOMIAL[1..] {
        p = l.fma(p, r, l.splat(*c));
    }
    let p = l.fma(p, l.mul(r, r), r);
    l.scale_pow2(l.add(p, l.splat(1.0)), n)
}

/// `tanh` of each lane: `1 - 2 / (exp(2x) + 1)`, absolute error below 3e-7.
#[inline(always)]
pub fn tanh<L: SimdVector>(l: L, x: L::F32) -> L::F32 {
    let e = exp(l, l.add(x, x));
    l.sub(l.splat(1.0), l.div(l.splat(2.0), l.add(e, l.splat(1.0))))
}

/// `exp` of each element, in place.
pub fn exp_row(isa: Isa, row: &mut [f32]) {
    struct Exp;
    impl Map for Exp {
        #[inline(always)]
        fn map<L: SimdVector>(&self, l: L, x: L::F32) -> L::F32 {
            exp(l, x)
        }
    }
    struct Body<'a>(&'a mut [f32]);
    impl Kernel for Body<'_> {
        type Output = ();
        #[inline(always)]
        fn run<L: SimdVector>(self, l: L) {
            map_in_place(l, self.0, &Exp);
        }
    }
    dispatch(isa, Body(row));
}
