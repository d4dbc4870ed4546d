//! Vectors of sixteen f32 lanes in two AVX2 registers.

#![allow(unsafe_code)]

use crate::device::cpu::simd::vector::{F16_MAX, SimdVector};
use std::arch::x86_64::{
    __m256, __m256i, _CMP_UNORD_Q, _MM_FROUND_TO_NEAREST_INT, _MM_HINT_T1, _mm_add_ps, _mm_add_ss, _mm_cvtss_f32,
    _mm_loadl_epi64, _mm_loadu_si128, _mm_max_ps, _mm_max_ss, _mm_movehl_ps, _mm_prefetch, _mm_shuffle_ps,
    _mm_storeu_si128, _mm256_add_epi32, _mm256_add_ps, _mm256_and_si256, _mm256_blendv_epi8, _mm256_blendv_ps,
    _mm256_castps_si256, _mm256_castps256_ps128, _mm256_castsi256_ps, _mm256_cmp_ps, _mm256_cmpgt_epi32,
    _mm256_cvtepi8_epi32, _mm256_cvtepi32_ps, _mm256_cvtepu16_epi32, _mm256_cvtph_ps, _mm256_cvtps_ph,
    _mm256_cvttps_epi32, _mm256_div_ps, _mm256_extractf128_ps, _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_max_ps,
    _mm256_min_ps, _mm256_mul_ps, _mm256_or_si256, _mm256_packus_epi32, _mm256_permute4x64_epi64, _mm256_set1_epi32,
    _mm256_set1_ps, _mm256_setr_epi32, _mm256_slli_epi32, _mm256_srai_epi32, _mm256_srli_epi32, _mm256_storeu_ps,
    _mm256_storeu_si256, _mm256_sub_epi32, _mm256_sub_ps,
};

/// Sixteen lanes in two registers. A value proves that the machine has the instructions.
#[derive(Clone, Copy, Debug)]
pub struct Avx2(());

impl Avx2 {
    /// Returns the lanes if this machine has the instructions.
    #[inline]
    pub fn detect() -> Option<Self> {
        (std::arch::is_x86_feature_detected!("avx2")
            && std::arch::is_x86_feature_detected!("fma")
            && std::arch::is_x86_feature_detected!("f16c"))
        .then_some(Self(()))
    }
}

macro_rules! vector {
    ($($body:tt)*) => {
        // SAFETY: an `Avx2` is created by `detect` only, and vectors need an `Avx2`, so AVX2, FMA and F16C are present;
        // pointers come from array references and stay within them, and the accesses need no alignment.
        unsafe { $($body)* }
    };
}

/// Rounds eight f32 to their upper halves, to nearest even, in the lower half of each lane; NaN becomes quiet.
#[inline(always)]
fn bf16_bits(value: __m256) -> __m256i {
    vector! {
        let bits = _mm256_castps_si256(value);
        let upper = _mm256_srli_epi32::<16>(bits);
        let odd = _mm256_and_si256(upper, _mm256_set1_epi32(1));
        let bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
        let rounded = _mm256_srli_epi32::<16>(_mm256_add_epi32(bits, bias));
        let quiet = _mm256_or_si256(upper, _mm256_set1_epi32(0x40));
        let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(value, value));
        _mm256_blendv_epi8(rounded, quiet, nan)
    }
}

/// Multiplies by two exact powers of two: the first product is exact for any `a` near 1, so only the second one rounds,
/// including into the subnormals.
#[inline(always)]
fn scale_pow2(a: __m256, n: __m256) -> __m256 {
    vector! {
        let n = _mm256_cvttps_epi32(n);
        let first = _mm256_srai_epi32::<1>(n);
        let second = _mm256_sub_epi32(n, first);
        let ones = _mm256_set1_epi32(127);
        let first = _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(ones, first)));
        let second = _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(ones, second)));
        _mm256_mul_ps(_mm256_mul_ps(a, first), second)
    }
}

impl SimdVector for Avx2 {
    type F32 = [__m256; 2];
    const HAS_32_REGISTERS: bool = false;

    #[inline(always)]
    fn splat(self, value: f32) -> [__m256; 2] {
        vector! { [_mm256_set1_ps(value); 2] }
    }
    #[inline(always)]
    fn load(self, from: &[f32; 16]) -> [__m256; 2] {
        vector! { [_mm256_loadu_ps(from.as_ptr()), _mm256_loadu_ps(from.as_ptr().add(8))] }
    }
    #[inline(always)]
    fn store(self, value: [__m256; 2], to: &mut [f32; 16]) {
        vector! {
            _mm256_storeu_ps(to.as_mut_ptr(), value[0]);
            _mm256_storeu_ps(to.as_mut_ptr().add(8), value[1]);
        }
    }
    #[inline(always)]
    fn load_f32_bytes(self, from: &[u8; 64]) -> [__m256; 2] {
        vector! { [_mm256_loadu_ps(from.as_ptr().cast()), _mm256_loadu_ps(from.as_ptr().add(32).cast())] }
    }
    #[inline(always)]
    fn load_f16_bytes(self, from: &[u8; 32]) -> [__m256; 2] {
        vector! {
            let (low, high) = (_mm_loadu_si128(from.as_ptr().cast()), _mm_loadu_si128(from.as_ptr().add(16).cast()));
            [_mm256_cvtph_ps(low), _mm256_cvtph_ps(high)]
        }
    }
    #[inline(always)]
    fn load_i8_bytes(self, from: &[u8; 16]) -> [__m256; 2] {
        vector! {
            let (low, high) = (_mm_loadl_epi64(from.as_ptr().cast()), _mm_loadl_epi64(from.as_ptr().add(8).cast()));
            [_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(low)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(high))]
        }
    }
    #[inline(always)]
    fn load_bf16_bytes(self, from: &[u8; 32]) -> [__m256; 2] {
        vector! {
            let (low, high) = (_mm_loadu_si128(from.as_ptr().cast()), _mm_loadu_si128(from.as_ptr().add(16).cast()));
            [
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(low))),
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(high))),
            ]
        }
    }
    #[inline(always)]
    fn to_f16(self, value: [__m256; 2]) -> [u16; 16] {
        let mut out = [0u16; 16];
        let clamped = self.min(self.splat(F16_MAX), self.max(self.splat(-F16_MAX), value));
        vector! {
            _mm_storeu_si128(out.as_mut_ptr().cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(clamped[0]));
            _mm_storeu_si128(out.as_mut_ptr().add(8).cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(clamped[1]));
        }
        out
    }
    #[inline(always)]
    fn to_bf16(self, value: [__m256; 2]) -> [u16; 16] {
        let mut out = [0u16; 16];
        vector! {
            // Packing works within the halves of a register, so the middle quarters are swapped afterwards.
            let packed = _mm256_packus_epi32(bf16_bits(value[0]), bf16_bits(value[1]));
            _mm256_storeu_si256(out.as_mut_ptr().cast(), _mm256_permute4x64_epi64::<0b11_01_10_00>(packed));
        }
        out
    }
    #[inline(always)]
    fn add(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        vector! { [_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])] }
    }
    #[inline(always)]
    fn sub(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        vector! { [_mm256_sub_ps(a[0], b[0]), _mm256_sub_ps(a[1], b[1])] }
    }
    #[inline(always)]
    fn mul(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        vector! { [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])] }
    }
    #[inline(always)]
    fn div(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        vector! { [_mm256_div_ps(a[0], b[0]), _mm256_div_ps(a[1], b[1])] }
    }
    #[inline(always)]
    fn fma(self, a: [__m256; 2], b: [__m256; 2], c: [__m256; 2]) -> [__m256; 2] {
        vector! { [_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])] }
    }
    #[inline(always)]
    fn max(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        vector! { [_mm256_max_ps(a[0], b[0]), _mm256_max_ps(a[1], b[1])] }
    }
    #[inline(always)]
    fn min(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        vector! { [_mm256_min_ps(a[0], b[0]), _mm256_min_ps(a[1], b[1])] }
    }
    #[inline(always)]
    fn scale_pow2(self, a: [__m256; 2], n: [__m256; 2]) -> [__m256; 2] {
        [scale_pow2(a[0], n[0]), scale_pow2(a[1], n[1])]
    }
    #[inline(always)]
    #[allow(clippy::cast_possible_truncation)] // at most 16
    fn keep(self, a: [__m256; 2], lo: usize, hi: usize, other: f32) -> [__m256; 2] {
        let mut out = a;
        vector! {
            let (before, behind, other) =
                (_mm256_set1_epi32(lo as i32 - 1), _mm256_set1_epi32(hi as i32), _mm256_set1_ps(other));
            let lanes = [_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)];
            for (value, lane) in out.iter_mut().zip(lanes) {
                let kept = _mm256_and_si256(_mm256_cmpgt_epi32(lane, before), _mm256_cmpgt_epi32(behind, lane));
                *value = _mm256_blendv_ps(other, *value, _mm256_castsi256_ps(kept));
            }
        }
        out
    }
    #[inline(always)]
    fn sum(self, a: [__m256; 2]) -> f32 {
        vector! {
            let eight = _mm256_add_ps(a[0], a[1]);
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
    fn max_lane(self, a: [__m256; 2]) -> f32 {
        vector! {
            let eight = _mm256_max_ps(a[0], a[1]);
            let four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps::<1>(two, two)))
        }
    }
}
