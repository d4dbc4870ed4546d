//! Vectors of sixteen f32 lanes in four NEON registers.

#![allow(unsafe_code)]
// The intrinsics are too many to import by name.
#![allow(clippy::wildcard_imports)]

use super::asm::{narrow_f16, prefetch_second_level, widen_f16};
use crate::device::cpu::simd::vector::{F16_MAX, SimdVector};
use std::arch::aarch64::*;

/// Sixteen lanes in four registers. A value proves that the machine has the instructions.
#[derive(Clone, Copy, Debug)]
pub struct Neon(());

impl Neon {
    /// Returns the lanes if this machine has the instructions.
    #[inline]
    pub fn detect() -> Option<Self> {
        std::arch::is_aarch64_feature_detected!("neon").then_some(Self(()))
    }
}

type Four = [float32x4_t; 4];

macro_rules! vector {
    ($($body:tt)*) => {
        // SAFETY: a `Neon` is created by `detect` only, and vectors need a `Neon`, so NEON is present; pointers come
        // from array references and stay within them, and the accesses need no alignment.
        unsafe { $($body)* }
    };
}

/// Evaluates an expression for each of four registers; written out, because a closure might not be inlined.
macro_rules! four {
    ($i:ident => $body:expr) => {
        [
            {
                let $i = 0;
                $body
            },
            {
                let $i = 1;
                $body
            },
            {
                let $i = 2;
                $body
            },
            {
                let $i = 3;
                $body
            },
        ]
    };
}

/// `if a > b { a } else { b }`: the NEON maximum instruction treats NaN and zeros differently.
#[inline(always)]
fn larger(a: float32x4_t, b: float32x4_t) -> float32x4_t {
    vector! { vbslq_f32(vcgtq_f32(a, b), a, b) }
}

#[inline(always)]
fn smaller(a: float32x4_t, b: float32x4_t) -> float32x4_t {
    vector! { vbslq_f32(vcltq_f32(a, b), a, b) }
}

/// Rounds each f32 to its upper half, to nearest even; NaN becomes quiet.
#[inline(always)]
fn bf16_bits(value: float32x4_t) -> uint16x4_t {
    vector! {
        let bits = vreinterpretq_u32_f32(value);
        let upper = vshrq_n_u32::<16>(bits);
        let odd = vandq_u32(upper, vdupq_n_u32(1));
        let rounded = vshrq_n_u32::<16>(vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff))));
        let quiet = vorrq_u32(upper, vdupq_n_u32(0x40));
        vmovn_u32(vbslq_u32(vceqq_f32(value, value), rounded, quiet))
    }
}

/// Multiplies by two exact powers of two: the first product is exact for any `a` near 1, so only the second one rounds,
/// including into the subnormals.
#[inline(always)]
fn scale_pow2(a: float32x4_t, n: float32x4_t) -> float32x4_t {
    vector! {
        let n = vcvtq_s32_f32(n);
        let first = vshrq_n_s32::<1>(n);
        let second = vsubq_s32(n, first);
        let [first, second] = [first, second]
            .map(|power| vreinterpretq_f32_s32(vshlq_n_s32::<23>(vaddq_s32(power, vdupq_n_s32(127)))));
        vmulq_f32(vmulq_f32(a, first), second)
    }
}

impl SimdVector for Neon {
    type F32 = Four;
    // NEON has 32 registers, but a vector takes four of them.
    const HAS_32_REGISTERS: bool = false;
    const HOLDS_FOUR_ACCUMULATORS: bool = true;

    #[inline(always)]
    fn splat(self, value: f32) -> Four {
        vector! { [vdupq_n_f32(value); 4] }
    }
    #[inline(always)]
    fn load(self, from: &[f32; 16]) -> Four {
        vector! { four! { i => vld1q_f32(from.as_ptr().add(4 * i)) } }
    }
    #[inline(always)]
    fn store(self, value: Four, to: &mut [f32; 16]) {
        vector! { four! { i => vst1q_f32(to.as_mut_ptr().add(4 * i), value[i]) }; }
    }
    #[inline(always)]
    fn load_f32_bytes(self, from: &[u8; 64]) -> Four {
        vector! { four! { i => vld1q_f32(from.as_ptr().add(16 * i).cast()) } }
    }
    #[inline(always)]
    fn load_f16_bytes(self, from: &[u8; 32]) -> Four {
        vector! { four! { i => widen_f16(vld1_u16(from.as_ptr().add(8 * i).cast())) } }
    }
    #[inline(always)]
    fn load_bf16_bytes(self, from: &[u8; 32]) -> Four {
        vector! {
            four! { i => {
                let halves = vld1_u16(from.as_ptr().add(8 * i).cast());
                vreinterpretq_f32_u32(vshlq_n_u32::<16>(vmovl_u16(halves)))
            } }
        }
    }
    #[inline(always)]
    fn load_i8_bytes(self, from: &[u8; 16]) -> Four {
        vector! {
            let bytes = vld1q_s8(from.as_ptr().cast());
            let (low, high) = (vmovl_s8(vget_low_s8(bytes)), vmovl_high_s8(bytes));
            let wide =
                [vmovl_s16(vget_low_s16(low)), vmovl_high_s16(low), vmovl_s16(vget_low_s16(high)), vmovl_high_s16(high)];
            four! { i => vcvtq_f32_s32(wide[i]) }
        }
    }
    #[inline(always)]
    fn to_f16(self, value: Four) -> [u16; 16] {
        let mut out = [0u16; 16];
        let clamped = self.min(self.splat(F16_MAX), self.max(self.splat(-F16_MAX), value));
        vector! { four! { i => vst1_u16(out.as_mut_ptr().add(4 * i), narrow_f16(clamped[i])) }; }
        out
    }
    #[inline(always)]
    fn to_bf16(self, value: Four) -> [u16; 16] {
        let mut out = [0u16; 16];
        vector! { four! { i => vst1_u16(out.as_mut_ptr().add(4 * i), bf16_bits(value[i])) }; }
        out
    }
    #[inline(always)]
    fn add(self, a: Four, b: Four) -> Four {
        vector! { four! { i => vaddq_f32(a[i], b[i]) } }
    }
    #[inline(always)]
    fn sub(self, a: Four, b: Four) -> Four {
        vector! { four! { i => vsubq_f32(a[i], b[i]) } }
    }
    #[inline(always)]
    fn mul(self, a: Four, b: Four) -> Four {
        vector! { four! { i => vmulq_f32(a[i], b[i]) } }
    }
    #[inline(always)]
    fn div(self, a: Four, b: Four) -> Four {
        vector! { four! { i => vdivq_f32(a[i], b[i]) } }
    }
    #[inline(always)]
    fn fma(self, a: Four, b: Four, c: Four) -> Four {
        vector! { four! { i => vfmaq_f32(c[i], a[i], b[i]) } }
    }
    #[inline(always)]
    fn max(self, a: Four, b: Four) -> Four {
        four! { i => larger(a[i], b[i]) }
    }
    #[inline(always)]
    fn min(self, a: Four, b: Four) -> Four {
        four! { i => smaller(a[i], b[i]) }
    }
    #[inline(always)]
    fn scale_pow2(self, a: Four, n: Four) -> Four {
        four! { i => scale_pow2(a[i], n[i]) }
    }
    #[inline(always)]
    #[allow(clippy::cast_possible_truncation)] // at most 16
    fn keep(self, a: Four, lo: usize, hi: usize, other: f32) -> Four {
        const INDICES: [u32; 16] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];
        vector! {
            let (lo, hi, other) = (vdupq_n_u32(lo as u32), vdupq_n_u32(hi as u32), vdupq_n_f32(other));
            four! { i => {
                let lane = vld1q_u32(INDICES.as_ptr().add(4 * i));
                vbslq_f32(vandq_u32(vcgeq_u32(lane, lo), vcltq_u32(lane, hi)), a[i], other)
            } }
        }
    }
    #[inline(always)]
    fn sum(self, a: Four) -> f32 {
        vector! {
            let four = vaddq_f32(vaddq_f32(a[0], a[2]), vaddq_f32(a[1], a[3]));
            vpadds_f32(vadd_f32(vget_low_f32(four), vget_high_f32(four)))
        }
    }
    #[inline(always)]
    fn prefetch(self, bytes: &[u8], offset: usize) {
        prefetch_second_level(bytes.as_ptr().wrapping_add(offset));
    }
    #[inline(always)]
    fn max_lane(self, a: Four) -> f32 {
        vector! {
            let four = larger(larger(a[0], a[2]), larger(a[1], a[3]));
            let (low, high) = (vget_low_f32(four), vget_high_f32(four));
            let two = vbsl_f32(vcgt_f32(low, high), low, high);
            let (a, b) = (vget_lane_f32::<0>(two), vget_lane_f32::<1>(two));
            if a > b { a } else { b }
        }
    }
}
