//! Vectors of sixteen f32 lanes: one set of operations with four implementations, AVX-512, AVX2, NEON and plain arrays.
//!
//! Kernels are written once over [`SimdVector`], so the fast paths and the reference perform the same operations in the
//! same order by construction. Tests only have to show that each operation has the same bits in all implementations
//! (NaN payloads excepted). Multiply-adds are fused in all of them. A value of a lane type proves that the machine has
//! the instructions, so the operations are safe; attention and norms contain no other unsafe code than these
//! implementations.

#![allow(unsafe_code)]

use crate::device::cpu::Isa;

/// Number of lanes of a vector, and of tokens of an attention tile.
pub const LANES: usize = 16;

/// Largest finite f16; stores to f16 saturate at it.
pub const F16_MAX: f32 = 65504.0;

/// Operations on 16 f32 lanes.
#[allow(missing_docs)]
pub trait SimdVector: Copy {
    /// A vector of 16 lanes.
    type F32: Copy;
    /// Whether the path has 32 vector registers, so that blocking over many vectors pays off.
    const HAS_32_REGISTERS: bool;
    /// Without 32 registers: whether the accumulators of one row over four vectors still fit, which hides more of a
    /// multiply-add's latency than a single vector.
    const HOLDS_FOUR_ACCUMULATORS: bool = false;

    fn splat(self, value: f32) -> Self::F32;
    fn load(self, from: &[f32; 16]) -> Self::F32;
    fn store(self, value: Self::F32, to: &mut [f32; 16]);
    /// Loads little-endian f32.
    fn load_f32_bytes(self, from: &[u8; 64]) -> Self::F32;
    /// Loads little-endian IEEE half precision, converted exactly.
    fn load_f16_bytes(self, from: &[u8; 32]) -> Self::F32;
    /// Loads little-endian bfloat16, converted exactly.
    fn load_bf16_bytes(self, from: &[u8; 32]) -> Self::F32;
    /// Loads signed bytes, converted exactly.
    fn load_i8_bytes(self, from: &[u8; 16]) -> Self::F32;
    /// Rounds to nearest even after saturating at ±[`F16_MAX`]; NaN stays NaN.
    fn to_f16(self, value: Self::F32) -> [u16; 16];
    /// Rounds to nearest even; NaN stays NaN.
    fn to_bf16(self, value: Self::F32) -> [u16; 16];
    fn add(self, a: Self::F32, b: Self::F32) -> Self::F32;
    fn sub(self, a: Self::F32, b: Self::F32) -> Self::F32;
    fn mul(self, a: Self::F32, b: Self::F32) -> Self::F32;
    fn div(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// `a * b + c` with one rounding.
    fn fma(self, a: Self::F32, b: Self::F32, c: Self::F32) -> Self::F32;
    /// `if a > b { a } else { b }` per lane: `b` if either is NaN.
    fn max(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// `if a < b { a } else { b }` per lane: `b` if either is NaN.
    fn min(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// `a * 2^n` with one rounding; `n` holds integers in -250..=250.
    fn scale_pow2(self, a: Self::F32, n: Self::F32) -> Self::F32;
    /// Keeps lanes `lo..hi` (both ≤ 16) and sets the others to `other`.
    fn keep(self, a: Self::F32, lo: usize, hi: usize, other: f32) -> Self::F32;
    /// Sum of the lanes by halving: `i` and `i + 8`, then `i + 4`, `i + 2`, `i + 1`.
    fn sum(self, a: Self::F32) -> f32;
    /// Prefetches the cache line of byte `offset` of `bytes`, as a hint; any offset is allowed.
    fn prefetch(self, bytes: &[u8], offset: usize);
    /// Largest lane, by the same halving; NaN as in [`max`](Self::max).
    fn max_lane(self, a: Self::F32) -> f32;
}

/// A computation that is generic over the path's lanes.
pub trait Kernel {
    /// Return type of [`run`](Self::run).
    type Output;
    /// The computation; implementations mark it `#[inline(always)]` so that it is compiled with the path's target
    /// features.
    fn run<L: SimdVector>(self, lanes: L) -> Self::Output;
}

/// Runs `kernel` on the path `isa`. The plain implementation is also compiled with AVX2 and FMA and used where the
/// machine has them, because otherwise a fused multiply-add is a library call; the operations are the same.
#[inline]
pub fn dispatch<K: Kernel>(isa: Isa, kernel: K) -> K::Output {
    #[cfg(target_arch = "x86_64")]
    {
        if matches!(isa, Isa::Avx512 | Isa::Avx512Vnni | Isa::Avx512Bf16)
            && let Some(lanes) = Avx512::detect()
        {
            // SAFETY: `detect` has found every feature that the function enables.
            return unsafe { run_avx512(lanes, kernel) };
        }
        if isa == Isa::Avx2
            && let Some(lanes) = Avx2::detect()
        {
            // SAFETY: as above.
            return unsafe { run_avx2(lanes, kernel) };
        }
        if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma") {
            // SAFETY: both features have just been detected.
            return unsafe { run_plain_fma(kernel) };
        }
    }
    #[cfg(target_arch = "aarch64")]
    if matches!(isa, Isa::Neon | Isa::NeonDot)
        && let Some(lanes) = Neon::detect()
    {
        return kernel.run(lanes);
    }
    let _ = isa;
    kernel.run(Plain)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn run_avx512<K: Kernel>(lanes: Avx512, kernel: K) -> K::Output {
    kernel.run(lanes)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
fn run_avx2<K: Kernel>(lanes: Avx2, kernel: K) -> K::Output {
    kernel.run(lanes)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn run_plain_fma<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Plain)
}

/// Sixteen lanes as an array.
#[derive(Clone, Copy, Debug)]
pub struct Plain;

#[inline(always)]
fn map1(a: [f32; 16], f: impl Fn(f32) -> f32) -> [f32; 16] {
    let mut out = a;
    for x in &mut out {
        *x = f(*x);
    }
    out
}

#[inline(always)]
fn map2(a: [f32; 16], b: [f32; 16], f: impl Fn(f32, f32) -> f32) -> [f32; 16] {
    let mut out = a;
    for i in 0..16 {
        out[i] = f(a[i], b[i]);
    }
    out
}

#[inline(always)]
fn halve(a: [f32; 16], f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut a = a;
    let mut width = 8;
    while width > 0 {
        for i in 0..width {
            a[i] = f(a[i], a[i + width]);
        }
        width /= 2;
    }
    a[0]
}

#[inline(always)]
fn max_plain(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

#[inline(always)]
fn min_plain(a: f32, b: f32) -> f32 {
    if a < b { a } else { b }
}

/// Converts a half to f32 exactly, without branches: a multiplication rebases the exponent, which also normalizes
/// subnormals.
#[inline(always)]
fn widen_f16(bits: u32) -> f32 {
    let magnitude = (bits & 0x7fff) << 13;
    let rebased = (f32::from_bits(magnitude) * f32::from_bits(0x7780_0000)).to_bits();
    let special = u32::from(magnitude >= 0x0f80_0000).wrapping_neg() & 0x7f80_0000;
    f32::from_bits(rebased | special | ((bits & 0x8000) << 16))
}

/// Rounds an f32 to its upper half, to nearest even; NaN becomes quiet.
#[inline(always)]
#[allow(clippy::cast_possible_truncation)] // the upper half is what is wanted
fn f32_to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    let quiet = (bits >> 16) | 0x40;
    (if value.is_nan() { quiet } else { rounded }) as u16
}

impl SimdVector for Plain {
    type F32 = [f32; 16];
    const HAS_32_REGISTERS: bool = false;

    #[inline(always)]
    fn splat(self, value: f32) -> [f32; 16] {
        [value; 16]
    }
    #[inline(always)]
    fn load(self, from: &[f32; 16]) -> [f32; 16] {
        *from
    }
    #[inline(always)]
    fn store(self, value: [f32; 16], to: &mut [f32; 16]) {
        *to = value;
    }
    #[inline(always)]
    fn load_f32_bytes(self, from: &[u8; 64]) -> [f32; 16] {
        let mut out = [0.0; 16];
        for (x, b) in out.iter_mut().zip(from.as_chunks::<4>().0) {
            *x = f32::from_le_bytes(*b);
        }
        out
    }
    #[inline(always)]
    fn load_f16_bytes(self, from: &[u8; 32]) -> [f32; 16] {
        // Two loops, so that each is vectorized.
        let mut bits = [0; 16];
        for (x, b) in bits.iter_mut().zip(from.as_chunks::<2>().0) {
            *x = u32::from(u16::from_le_bytes(*b));
        }
        let mut out = [0.0; 16];
        for i in 0..16 {
            out[i] = widen_f16(bits[i]);
        }
        out
    }
    #[inline(always)]
    fn load_bf16_bytes(self, from: &[u8; 32]) -> [f32; 16] {
        let mut out = [0.0; 16];
        for (x, b) in out.iter_mut().zip(from.as_chunks::<2>().0) {
            *x = f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16);
        }
        out
    }
    #[inline(always)]
    fn load_i8_bytes(self, from: &[u8; 16]) -> [f32; 16] {
        let mut out = [0.0; 16];
        for (x, b) in out.iter_mut().zip(from) {
            *x = f32::from(b.cast_signed());
        }
        out
    }
    #[inline(always)]
    fn to_f16(self, value: [f32; 16]) -> [u16; 16] {
        let mut out = [0; 16];
        for i in 0..16 {
            let clamped = min_plain(F16_MAX, max_plain(-F16_MAX, value[i]));
            out[i] = half::f16::from_f32_const(clamped).to_bits();
        }
        out
    }
    #[inline(always)]
    fn to_bf16(self, value: [f32; 16]) -> [u16; 16] {
        let mut out = [0; 16];
        for i in 0..16 {
            out[i] = f32_to_bf16(value[i]);
        }
        out
    }
    #[inline(always)]
    fn add(self, a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        map2(a, b, |x, y| x + y)
    }
    #[inline(always)]
    fn sub(self, a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        map2(a, b, |x, y| x - y)
    }
    #[inline(always)]
    fn mul(self, a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        map2(a, b, |x, y| x * y)
    }
    #[inline(always)]
    fn div(self, a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        map2(a, b, |x, y| x / y)
    }
    #[inline(always)]
    fn fma(self, a: [f32; 16], b: [f32; 16], c: [f32; 16]) -> [f32; 16] {
        let mut out = c;
        for i in 0..16 {
            out[i] = a[i].mul_add(b[i], c[i]);
        }
        out
    }
    #[inline(always)]
    fn max(self, a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        map2(a, b, max_plain)
    }
    #[inline(always)]
    fn min(self, a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        map2(a, b, min_plain)
    }
    #[inline(always)]
    #[allow(clippy::cast_possible_truncation)]
    fn scale_pow2(self, a: [f32; 16], n: [f32; 16]) -> [f32; 16] {
        // Two exact powers of two: the first product is exact for any `a` near 1, so only the second one rounds,
        // including into the subnormals.
        let power = |n: i32| f32::from_bits(((127 + n) << 23) as u32);
        map2(a, n, |a, n| {
            let n = n as i32;
            let first = n >> 1;
            a * power(first) * power(n - first)
        })
    }
    #[inline(always)]
    fn keep(self, a: [f32; 16], lo: usize, hi: usize, other: f32) -> [f32; 16] {
        let mut out = a;
        for (i, x) in out.iter_mut().enumerate() {
            if i < lo || i >= hi {
                *x = other;
            }
        }
        out
    }
    #[inline(always)]
    fn sum(self, a: [f32; 16]) -> f32 {
        halve(map1(a, |x| x), |x, y| x + y)
    }
    #[inline(always)]
    fn prefetch(self, _: &[u8], _: usize) {}
    #[inline(always)]
    fn max_lane(self, a: [f32; 16]) -> f32 {
        halve(a, max_plain)
    }
}

#[cfg(target_arch = "x86_64")]
pub use super::avx2::vector::Avx2;
#[cfg(target_arch = "aarch64")]
pub use super::neon::vector::Neon;
#[cfg(target_arch = "x86_64")]
pub use x86::Avx512;

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{F16_MAX, SimdVector};
    use std::arch::x86_64::{
        __m256, __m512, _CMP_UNORD_Q, _MM_FROUND_NO_EXC, _MM_FROUND_TO_NEAREST_INT, _MM_HINT_T1, _mm_add_ps,
        _mm_add_ss, _mm_cvtss_f32, _mm_loadu_si128, _mm_max_ps, _mm_max_ss, _mm_movehl_ps, _mm_prefetch,
        _mm_shuffle_ps, _mm256_add_ps, _mm256_castps256_ps128, _mm256_extractf128_ps, _mm256_loadu_si256,
        _mm256_max_ps, _mm256_storeu_si256, _mm512_add_epi32, _mm512_add_ps, _mm512_and_si512, _mm512_castps_si512,
        _mm512_castps512_ps256, _mm512_castsi512_ps, _mm512_cmp_ps_mask, _mm512_cvtepi8_epi32, _mm512_cvtepi32_epi16,
        _mm512_cvtepi32_ps, _mm512_cvtepu16_epi32, _mm512_cvtph_ps, _mm512_cvtps_ph, _mm512_div_ps,
        _mm512_extractf32x8_ps, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_mask_mov_epi32, _mm512_mask_mov_ps,
        _mm512_max_ps, _mm512_min_ps, _mm512_mul_ps, _mm512_or_si512, _mm512_scalef_ps, _mm512_set1_epi32,
        _mm512_set1_ps, _mm512_slli_epi32, _mm512_srli_epi32, _mm512_storeu_ps, _mm512_sub_ps,
    };

    /// Sixteen lanes in one register. A value proves that the machine has the instructions.
    #[derive(Clone, Copy, Debug)]
    pub struct Avx512(());

    impl Avx512 {
        /// Returns the lanes if this machine has the instructions.
        #[inline]
        pub fn detect() -> Option<Self> {
            (std::arch::is_x86_feature_detected!("avx512f")
                && std::arch::is_x86_feature_detected!("avx512bw")
                && std::arch::is_x86_feature_detected!("avx512dq")
                && std::arch::is_x86_feature_detected!("avx512vl")
                && std::arch::is_x86_feature_detected!("avx2")
                && std::arch::is_x86_feature_detected!("fma"))
            .then_some(Self(()))
        }
    }

    macro_rules! vector {
        ($($body:tt)*) => {
            // SAFETY: an `Avx512` is created by `detect` only, and vectors need an `Avx512`, so AVX-512 F, BW, DQ, VL,
            // AVX2 and FMA are present; pointers come from array references of exactly the size read or written, and
            // the accesses need no alignment.
            unsafe { $($body)* }
        };
    }

    #[inline(always)]
    fn halves(a: __m512) -> (__m256, __m256) {
        vector! { (_mm512_castps512_ps256(a), _mm512_extractf32x8_ps::<1>(a)) }
    }

    impl SimdVector for Avx512 {
        type F32 = __m512;
        const HAS_32_REGISTERS: bool = true;

        #[inline(always)]
        fn splat(self, value: f32) -> __m512 {
            vector! { _mm512_set1_ps(value) }
        }
        #[inline(always)]
        fn load(self, from: &[f32; 16]) -> __m512 {
            vector! { _mm512_loadu_ps(from.as_ptr()) }
        }
        #[inline(always)]
        fn store(self, value: __m512, to: &mut [f32; 16]) {
            vector! { _mm512_storeu_ps(to.as_mut_ptr(), value) }
        }
        #[inline(always)]
        fn load_f32_bytes(self, from: &[u8; 64]) -> __m512 {
            vector! { _mm512_loadu_ps(from.as_ptr().cast()) }
        }
        #[inline(always)]
        fn load_f16_bytes(self, from: &[u8; 32]) -> __m512 {
            vector! { _mm512_cvtph_ps(_mm256_loadu_si256(from.as_ptr().cast())) }
        }
        #[inline(always)]
        fn load_bf16_bytes(self, from: &[u8; 32]) -> __m512 {
            vector! {
                let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.as_ptr().cast()));
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
            }
        }
        #[inline(always)]
        fn load_i8_bytes(self, from: &[u8; 16]) -> __m512 {
            vector! { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.as_ptr().cast()))) }
        }
        #[inline(always)]
        fn to_f16(self, value: __m512) -> [u16; 16] {
            let mut out = [0u16; 16];
            let clamped = self.min(self.splat(F16_MAX), self.max(self.splat(-F16_MAX), value));
            vector! {
                let narrow = _mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(clamped);
                _mm256_storeu_si256(out.as_mut_ptr().cast(), narrow);
            }
            out
        }
        #[inline(always)]
        fn to_bf16(self, value: __m512) -> [u16; 16] {
            let mut out = [0u16; 16];
            vector! {
                let bits = _mm512_castps_si512(value);
                let upper = _mm512_srli_epi32::<16>(bits);
                let odd = _mm512_and_si512(upper, _mm512_set1_epi32(1));
                let bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
                let rounded = _mm512_srli_epi32::<16>(_mm512_add_epi32(bits, bias));
                let quiet = _mm512_or_si512(upper, _mm512_set1_epi32(0x40));
                let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(value, value);
                let narrow = _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, nan, quiet));
                _mm256_storeu_si256(out.as_mut_ptr().cast(), narrow);
            }
            out
        }
        #[inline(always)]
        fn add(self, a: __m512, b: __m512) -> __m512 {
            vector! { _mm512_add_ps(a, b) }
        }
        #[inline(always)]
        fn sub(self, a: __m512, b: __m512) -> __m512 {
            vector! { _mm512_sub_ps(a, b) }
        }
        #[inline(always)]
        fn mul(self, a: __m512, b: __m512) -> __m512 {
            vector! { _mm512_mul_ps(a, b) }
        }
        #[inline(always)]
        fn div(self, a: __m512, b: __m512) -> __m512 {
            vector! { _mm512_div_ps(a, b) }
        }
        #[inline(always)]
        fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
            vector! { _mm512_fmadd_ps(a, b, c) }
        }
        #[inline(always)]
        fn max(self, a: __m512, b: __m512) -> __m512 {
            vector! { _mm512_max_ps(a, b) }
        }
        #[inline(always)]
        fn min(self, a: __m512, b: __m512) -> __m512 {
            vector! { _mm512_min_ps(a, b) }
        }
        #[inline(always)]
        fn scale_pow2(self, a: __m512, n: __m512) -> __m512 {
            vector! { _mm512_scalef_ps(a, n) }
        }
        #[inline(always)]
        #[allow(clippy::cast_possible_truncation)]
        fn keep(self, a: __m512, lo: usize, hi: usize, other: f32) -> __m512 {
            let kept = ((1u32 << hi) - 1) & !((1u32 << lo) - 1);
            vector! { _mm512_mask_mov_ps(_mm512_set1_ps(other), kept as u16, a) }
        }
        #[inline(always)]
        fn sum(self, a: __m512) -> f32 {
            let (low, high) = halves(a);
            vector! {
                let eight = _mm256_add_ps(low, high);
                let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
                let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
                _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
            }
        }
        #[inline(always)]
        fn prefetch(self, bytes: &[u8], offset: usize) {
            vector! { _mm_prefetch::<_MM_HINT_T1>(bytes.as_ptr().wrapping_add(offset).cast()) }
        }
        #[inline(always)]
        fn max_lane(self, a: __m512) -> f32 {
            let (low, high) = halves(a);
            vector! {
                let eight = _mm256_max_ps(low, high);
                let four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
                let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
                _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps::<1>(two, two)))
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::cast_possible_truncation)]
mod tests {
    use super::*;
    use half::{bf16, f16};

    /// Runs the kernel on every path of this machine, the plain implementation without FMA included, and asserts that
    /// all give the same bits.
    fn everywhere<K: Kernel<Output = Vec<u32>> + Clone>(kernel: K) -> Vec<u32> {
        let bare = kernel.clone().run(Plain);
        for isa in Isa::available() {
            assert!(dispatch(*isa, kernel.clone()) == bare, "{isa:?} has other bits");
        }
        bare
    }

    /// Bits of a value, with one pattern for all NaN: NaN payloads may differ between paths.
    fn bits(x: f32) -> u32 {
        if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() }
    }

    #[derive(Clone)]
    struct Widen;
    impl Kernel for Widen {
        type Output = Vec<u32>;
        #[inline(always)]
        fn run<L: SimdVector>(self, l: L) -> Vec<u32> {
            let mut out = vec![];
            for first in (0..=u16::MAX).step_by(16) {
                let mut bytes = [0; 32];
                for (i, pair) in bytes.as_chunks_mut::<2>().0.iter_mut().enumerate() {
                    *pair = (first + i as u16).to_le_bytes();
                }
                for wide in [l.load_f16_bytes(&bytes), l.load_bf16_bytes(&bytes)] {
                    let mut lanes = [0.0; 16];
                    l.store(wide, &mut lanes);
                    out.extend(lanes.map(bits));
                }
            }
            out
        }
    }

    #[test]
    fn every_half_widens_exactly() {
        let got = everywhere(Widen);
        for (i, pair) in got.as_chunks::<32>().0.iter().enumerate() {
            for lane in 0..16 {
                let stored = u16::try_from(i * 16 + lane).unwrap();
                assert_eq!(pair[lane], bits(f16::from_bits(stored).to_f32()), "f16 {stored:#x}");
                assert_eq!(pair[16 + lane], bits(bf16::from_bits(stored).to_f32()), "bf16 {stored:#x}");
            }
        }
    }

    #[derive(Clone)]
    struct WidenBytes;
    impl Kernel for WidenBytes {
        type Output = Vec<u32>;
        #[inline(always)]
        fn run<L: SimdVector>(self, l: L) -> Vec<u32> {
            let bytes: Vec<u8> = (0..=u8::MAX).collect();
            let mut out = vec![];
            for chunk in bytes.as_chunks().0 {
                let mut lanes = [0.0; 16];
                l.store(l.load_i8_bytes(chunk), &mut lanes);
                out.extend(lanes.map(bits));
            }
            out
        }
    }

    #[test]
    fn every_signed_byte_widens_exactly() {
        let want: Vec<u32> = (0..=u8::MAX).map(|byte| bits(f32::from(byte as i8))).collect();
        assert_eq!(everywhere(WidenBytes), want);
    }

    #[derive(Clone)]
    struct Narrow(Vec<[f32; 16]>);
    impl Kernel for Narrow {
        type Output = Vec<u32>;
        #[inline(always)]
        fn run<L: SimdVector>(self, l: L) -> Vec<u32> {
            let pairs = self.0.iter().flat_map(|x| {
                let x = l.load(x);
                l.to_f16(x).into_iter().zip(l.to_bf16(x))
            });
            pairs.map(|(a, b)| u32::from(a) << 16 | u32::from(b)).collect()
        }
    }

    #[test]
    fn narrowing_rounds_to_nearest_even() {
        // Every 65,521st pattern, and the neighborhood of the midpoints around each representable half.
        let spread = (0..u32::MAX / 65_521).map(|i| i * 65_521);
        let midpoints = (0..=u16::MAX).flat_map(|h| {
            let wide = f16::from_bits(h).to_f32().to_bits();
            let half_way = (u32::from(h) << 16) + 0x8000;
            [wide, wide + 0xfff, wide + 0x1000, wide + 0x1001, half_way - 1, half_way, half_way + 1]
        });
        let mut values: Vec<f32> = spread.chain(midpoints).map(f32::from_bits).filter(|x| !x.is_nan()).collect();
        values.truncate(values.len() / 16 * 16);
        let got = everywhere(Narrow(values.as_chunks().0.to_vec()));
        for (x, got) in values.iter().zip(got) {
            let want = f16::from_f32(x.clamp(-F16_MAX, F16_MAX)).to_bits();
            assert_eq!(got, u32::from(want) << 16 | u32::from(bf16::from_f32(*x).to_bits()), "{x:e}");
        }
        let nan = everywhere(Narrow(vec![[f32::NAN; 16]]))[0];
        assert!(f16::from_bits((nan >> 16) as u16).is_nan() && bf16::from_bits(nan as u16).is_nan());
    }

    #[derive(Clone)]
    struct Arithmetic([f32; 16], [f32; 16], usize, usize);
    impl Kernel for Arithmetic {
        type Output = Vec<u32>;
        #[inline(always)]
        fn run<L: SimdVector>(self, l: L) -> Vec<u32> {
            let (a, b) = (l.load(&self.0), l.load(&self.1));
            let vectors = [
                l.add(a, b),
                l.sub(a, b),
                l.mul(a, b),
                l.div(a, b),
                l.fma(a, b, a),
                l.max(a, b),
                l.min(a, b),
                l.keep(a, self.2, self.3, 7.0),
                crate::device::cpu::kernels::exp::exp(l, a),
                crate::device::cpu::kernels::exp::tanh(l, b),
            ];
            let mut out = vec![bits(l.sum(a)), bits(l.max_lane(b))];
            for vector in vectors {
                let mut lanes = [0.0; 16];
                l.store(vector, &mut lanes);
                out.extend(lanes.map(bits));
            }
            out
        }
    }

    proptest::proptest! {
        #[test]
        fn operations_are_the_same_on_every_path(
            a: [u32; 16], b in proptest::array::uniform16(-90.0f32..90.0), lo in 0usize..=16, len in 0usize..=16,
        ) {
            let (any, hi) = (a.map(f32::from_bits), (lo + len).min(16));
            everywhere(Arithmetic(any, b, lo, hi));
            everywhere(Arithmetic(b, any, lo, hi));
            let kept = everywhere(Arithmetic(b, b, lo, hi));
            for lane in 0..16 {
                let want = if (lo..hi).contains(&lane) { b[lane] } else { 7.0 };
                assert_eq!(kept[2 + 7 * 16 + lane], want.to_bits());
            }
        }
    }
}
