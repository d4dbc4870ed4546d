//! Argmax of a row; also detects elements that are not finite.

#![forbid(unsafe_code)]

use crate::device::cpu::Isa;
use crate::device::cpu::simd::map::padded;
use crate::device::cpu::simd::vector::{Kernel, SimdVector, dispatch};
use crate::graph::NO_TOKEN;

/// Largest element of a segment of a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Argmax {
    /// Index of the largest element; the lowest index wins a tie. [`NO_TOKEN`] if an element is not finite.
    pub id: u32,
    /// Value of the largest element.
    pub value: f32,
}

impl Argmax {
    /// Argmax of an empty segment.
    pub const NONE: Self = Self { id: 0, value: f32::NEG_INFINITY };

    /// Combines this segment's result with the result of a later segment.
    #[must_use]
    pub fn then(self, next: Self) -> Self {
        let next_wins = self.id != NO_TOKEN && (next.id == NO_TOKEN || next.value > self.value);
        if next_wins { next } else { self }
    }
}

/// Returns the argmax of a segment that begins at element `first` of its row.
pub fn argmax_row(isa: Isa, x: &[f32], first: usize) -> Argmax {
    struct Body<'a>(&'a [f32]);
    impl Kernel for Body<'_> {
        /// The maximum, and a sum that is zero exactly if all elements are finite.
        type Output = (f32, f32);
        #[inline(always)]
        fn run<L: SimdVector>(self, l: L) -> (f32, f32) {
            let mut largest = [l.splat(f32::NEG_INFINITY); 4];
            let mut zeros = [l.splat(0.0); 4];
            let (groups, rest) = self.0.as_chunks::<64>();
            for group in groups {
                for (i, chunk) in group.as_chunks::<16>().0.iter().enumerate() {
                    let v = l.load(chunk);
                    largest[i] = l.max(v, largest[i]);
                    // Zero times an infinity or a NaN is NaN, which persists in the sum.
                    zeros[i] = l.fma(v, l.splat(0.0), zeros[i]);
                }
            }
            let (mut most, mut zero) = (f32::NEG_INFINITY, 0.0);
            for x in rest {
                most = if *x > most { *x } else { most };
                zero += *x * 0.0;
            }
            let all = l.max(l.max(largest[0], largest[1]), l.max(largest[2], largest[3]));
            let sum = l.add(l.add(zeros[0], zeros[1]), l.add(zeros[2], zeros[3]));
            (l.max_lane(all).max(most), l.sum(sum) + zero)
        }
    }
    if x.is_empty() {
        return Argmax::NONE;
    }
    let (value, zero) = dispatch(isa, Body(x));
    if zero != 0.0 {
        return Argmax { id: NO_TOKEN, value };
    }
    let index = x.iter().position(|x| *x == value).unwrap_or(0);
    Argmax { id: u32::try_from(first + index).unwrap_or(NO_TOKEN), value }
}

/// Whether every element is finite.
pub fn is_finite(isa: Isa, x: &[f32]) -> bool {
    struct Body<'a>(&'a [f32]);
    impl Kernel for Body<'_> {
        type Output = f32;
        #[inline(always)]
        fn run<L: SimdVector>(self, l: L) -> f32 {
            let mut zeros = l.splat(0.0);
            let (chunks, rest) = self.0.as_chunks::<16>();
            for chunk in chunks {
                zeros = l.fma(l.load(chunk), l.splat(0.0), zeros);
            }
            l.sum(l.fma(l.load(&padded(rest)), l.splat(0.0), zeros))
        }
    }
    dispatch(isa, Body(x)) == 0.0
}
