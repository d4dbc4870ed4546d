//! Element-wise row kernels: activations, gated activations, sums.
//!
//! Every kernel gives the same bits on every path and for every split of a row. Rows may have any length: the last
//! partial vector is padded with zeros, and the padding's results are dropped.

#![forbid(unsafe_code)]

use super::exp::exp;
use crate::device::cpu::Isa;
use crate::device::cpu::simd::map::{Map, Zip, map_in_place, zip};
use crate::device::cpu::simd::vector::{Kernel, SimdVector, dispatch};

/// `x / (1 + exp(-x))`.
#[inline(always)]
pub fn silu<L: SimdVector>(l: L, x: L::F32) -> L::F32 {
    l.div(x, l.add(l.splat(1.0), exp(l, l.sub(l.splat(0.0), x))))
}

/// `x/2 · (1 + tanh(√(2/π)(x + 0.044715 x³)))`, written as `x / (1 + exp(-2u))`, which has no cancellation.
#[inline(always)]
pub fn gelu_tanh<L: SimdVector>(l: L, x: L::F32) -> L::F32 {
    // -2 √(2/π), and that product times 0.044715.
    const LINEAR: f32 = -1.595_769;
    const CUBIC: f32 = -0.071_354_814;
    let slope = l.fma(l.mul(x, x), l.splat(CUBIC), l.splat(LINEAR));
    l.div(x, l.add(l.splat(1.0), exp(l, l.mul(x, slope))))
}

/// `max(x, 0)`; NaN stays NaN.
#[inline(always)]
pub fn relu<L: SimdVector>(l: L, x: L::F32) -> L::F32 {
    l.max(l.splat(0.0), x)
}

macro_rules! in_place {
    ($(#[$doc:meta])* $name:ident, $f:path) => {
        $(#[$doc])*
        pub fn $name(isa: Isa, row: &mut [f32]) {
            struct Function;
            impl Map for Function {
                #[inline(always)]
                fn map<L: SimdVector>(&self, l: L, x: L::F32) -> L::F32 {
                    $f(l, x)
                }
            }
            struct Body<'a>(&'a mut [f32]);
            impl Kernel for Body<'_> {
                type Output = ();
                #[inline(always)]
                fn run<L: SimdVector>(self, l: L) {
                    map_in_place(l, self.0, &Function);
                }
            }
            dispatch(isa, Body(row));
        }
    };
}

macro_rules! two_rows {
    ($(#[$doc:meta])* $name:ident, |$l:ident, $x:ident, $y:ident| $body:expr) => {
        $(#[$doc])*
        pub fn $name(isa: Isa, a: &[f32], b: &[f32], out: &mut [f32]) {
            struct Function;
            impl Zip for Function {
                #[inline(always)]
                fn zip<L: SimdVector>(&self, $l: L, $x: L::F32, $y: L::F32) -> L::F32 {
                    $body
                }
            }
            struct Body<'a>(&'a [f32], &'a [f32], &'a mut [f32]);
            impl Kernel for Body<'_> {
                type Output = ();
                #[inline(always)]
                fn run<L: SimdVector>(self, l: L) {
                    zip(l, self.0, self.1, self.2, &Function);
                }
            }
            dispatch(isa, Body(a, b, out));
        }
    };
}

in_place! {
    /// `silu` in place.
    silu_row, silu
}
in_place! {
    /// `gelu_tanh` in place.
    gelu_tanh_row, gelu_tanh
}
in_place! {
    /// `relu` in place.
    relu_row, relu
}
two_rows! {
    /// `out = silu(a) · b`: `a` is the gate, `b` the up projection.
    silu_mul_row, |l, x, y| l.mul(silu(l, x), y)
}
two_rows! {
    /// `out = gelu_tanh(a) · b`: `a` is the gate, `b` the up projection.
    gelu_tanh_mul_row, |l, x, y| l.mul(gelu_tanh(l, x), y)
}
two_rows! {
    /// `out = relu(a) · b`.
    relu_mul_row, |l, x, y| l.mul(relu(l, x), y)
}
two_rows! {
    /// `out = a · b`.
    mul_row, |l, x, y| l.mul(x, y)
}
two_rows! {
    /// `out = a + b`.
    sum_row, |l, x, y| l.add(x, y)
}

/// `row += x`.
pub fn add_row(isa: Isa, row: &mut [f32], x: &[f32]) {
    struct Body<'a>(&'a mut [f32], &'a [f32]);
    impl Kernel for Body<'_> {
        type Output = ();
        #[inline(always)]
        fn run<L: SimdVector>(self, _: L) {
            for (y, x) in self.0.iter_mut().zip(self.1) {
                *y += x;
            }
        }
    }
    debug_assert_eq!(row.len(), x.len(), "rows of one operation have one length");
    dispatch(isa, Body(row, x));
}

/// `row *= factor`.
pub fn scale_row(isa: Isa, row: &mut [f32], factor: f32) {
    struct Body<'a>(&'a mut [f32], f32);
    impl Kernel for Body<'_> {
        type Output = ();
        #[inline(always)]
        fn run<L: SimdVector>(self, _: L) {
            for y in self.0 {
                *y *= self.1;
            }
        }
    }
    dispatch(isa, Body(row, factor));
}

/// `row = cap · tanh(row / cap)`, Gemma's cap on logits.
pub fn softcap_row(isa: Isa, row: &mut [f32], cap: f32) {
    struct Softcap(f32);
    impl Map for Softcap {
        #[inline(always)]
        fn map<L: SimdVector>(&self, l: L, x: L::F32) -> L::F32 {
            l.mul(l.splat(self.0), super::exp::tanh(l, l.mul(x, l.splat(1.0 / self.0))))
        }
    }
    struct Body<'a>(&'a mut [f32], f32);
    impl Kernel for Body<'_> {
        type Output = ();
        #[inline(always)]
        fn run<L: SimdVector>(self, l: L) {
            map_in_place(l, self.0, &Softcap(self.1));
        }
    }
    dispatch(isa, Body(row, cap));
}
