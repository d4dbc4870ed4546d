//! Rounds rows to a narrower float type and counts values out of range.

#![forbid(unsafe_code)]

use crate::device::cpu::Isa;
use crate::device::cpu::simd::map::padded;
use crate::device::cpu::simd::vector::{Kernel, SimdVector, dispatch};

/// Largest finite value of half precision.
pub const F16_MAX: f32 = 65_504.0;

/// Counts elements whose magnitude exceeds `limit`, infinities included; NaN does not count.
pub fn count_beyond(isa: Isa, x: &[f32], limit: f32) -> usize {
    struct Largest<'a>(&'a [f32]);
    impl Kernel for Largest<'_> {
        type Output = f32;
        #[inline(always)]
        fn run<L: SimdVector>(self, l: L) -> f32 {
            let (mut high, mut low) = (l.splat(0.0), l.splat(0.0));
            let (chunks, rest) = self.0.as_chunks::<16>();
            for chunk in chunks {
                // As the first operand of `max`, a NaN loses the comparison.
                high = l.max(l.load(chunk), high);
                low = l.min(l.load(chunk), low);
            }
            let rest = l.load(&padded(rest));
            let (high, low) = (l.max(rest, high), l.min(rest, low));
            l.max_lane(high).max(l.max_lane(l.sub(l.splat(0.0), low)))
        }
    }
    if dispatch(isa, Largest(x)) <= limit {
        return 0;
    }
    x.iter().filter(|x| x.abs() > limit).count()
}

/// `out = x` rounded to half precision, ties to even, saturating at ±65,504; NaN stays NaN.
pub fn round_f16_row(isa: Isa, x: &[f32], out: &mut [f32]) {
    struct Half;
    impl Round for Half {
        type Out = f32;
        #[inline(always)]
        fn round<L: SimdVector>(l: L, x: L::F32) -> [f32; 16] {
            let mut bytes = [0; 32];
            for (to, from) in bytes.as_chunks_mut().0.iter_mut().zip(l.to_f16(x)) {
                *to = from.to_le_bytes();
            }
            let mut rounded = [0.0; 16];
            l.store(l.load_f16_bytes(&bytes), &mut rounded);
            rounded
        }
    }
    dispatch(isa, Rounded::<Half>(x, out));
}

/// `out` = the bits of `x` rounded to bfloat16, ties to even; NaN stays NaN.
pub fn round_bf16_row(isa: Isa, x: &[f32], out: &mut [u16]) {
    struct Bf16;
    impl Round for Bf16 {
        type Out = u16;
        #[inline(always)]
        fn round<L: SimdVector>(l: L, x: L::F32) -> [u16; 16] {
            l.to_bf16(x)
        }
    }
    dispatch(isa, Rounded::<Bf16>(x, out));
}

/// Function of 16 values. A trait instead of a closure, because a closure is not compiled with the target features of
/// the kernel around it.
trait Round {
    type Out: Copy;
    fn round<L: SimdVector>(l: L, x: L::F32) -> [Self::Out; 16];
}

struct Rounded<'a, R: Round>(&'a [f32], &'a mut [R::Out]);

impl<R: Round> Kernel for Rounded<'_, R> {
    type Output = ();
    #[inline(always)]
    fn run<L: SimdVector>(self, l: L) {
        debug_assert_eq!(self.0.len(), self.1.len(), "rows of one operation have one length");
        let (x, rest) = self.0.as_chunks::<16>();
        let (out, out_rest) = self.1.as_chunks_mut::<16>();
        for (x, out) in x.iter().zip(out) {
            *out = R::round(l, l.load(x));
        }
        if !rest.is_empty() {
            out_rest.copy_from_slice(&R::round(l, l.load(&padded(rest)))[..rest.len()]);
        }
    }
}
