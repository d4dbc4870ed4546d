//! Reads quantized panels in AVX-512, for both matmul kernels.
//!
//! A word is a register of 16 columns × 4 consecutive k, unsigned bytes. Everything here is inlined into functions that
//! enable the features; the branches are on constants.

#![allow(unsafe_code)]
// The intrinsics are too many to import by name.
#![allow(clippy::wildcard_imports)]

use crate::device::cpu::simd::formats::Format;
use crate::device::cpu::weights::pack::PANEL;
use std::arch::x86_64::*;

/// Loads words `I` (k = 4·I..) and `I + 4` (k = 16 + 4·I..) of a 32-block.
///
/// # Safety
/// `group` is valid for `F::SCHEME.group_bytes()` reads; the caller enables AVX-512 F and BW.
#[inline(always)]
pub(crate) unsafe fn words<F: Format, const I: usize>(group: *const u8) -> (__m512i, __m512i) {
    // SAFETY: every offset is below the group's size.
    unsafe {
        let load = |at: usize| _mm512_loadu_si512(group.add(at).cast());
        if F::SCHEME.bits == 8 {
            return (load(64 * I), load(64 * (I + 4)));
        }
        let nibbles = load(64 * I);
        let low_bits = _mm512_set1_epi8(15);
        let lo = _mm512_and_si512(nibbles, low_bits);
        let hi = _mm512_and_si512(_mm512_srli_epi16::<4>(nibbles), low_bits);
        // `low | (shifted & mask)`: the mask clears bits that a shift carries over from the neighboring byte.
        let join = |low, shifted, mask| _mm512_ternarylogic_epi32::<0xf8>(low, shifted, _mm512_set1_epi8(mask));
        match F::SCHEME.bits {
            5 => {
                let plane = load(256);
                let (at_lo, at_hi) = match I {
                    0 => (_mm512_slli_epi16::<4>(plane), plane),
                    1 => (_mm512_slli_epi16::<3>(plane), _mm512_srli_epi16::<1>(plane)),
                    2 => (_mm512_slli_epi16::<2>(plane), _mm512_srli_epi16::<2>(plane)),
                    _ => (_mm512_slli_epi16::<1>(plane), _mm512_srli_epi16::<3>(plane)),
                };
                (join(lo, at_lo, 0x10), join(hi, at_hi, 0x10))
            }
            6 => {
                let shifted = |pairs| match I {
                    0 => _mm512_slli_epi16::<4>(pairs),
                    1 => _mm512_slli_epi16::<2>(pairs),
                    2 => pairs,
                    _ => _mm512_srli_epi16::<2>(pairs),
                };
                (join(lo, shifted(load(256)), 0x30), join(hi, shifted(load(320)), 0x30))
            }
            _ => (lo, hi),
        }
    }
}

/// Loads the scales of 16 columns for half `part` of 32-block `sub`. In formats without halves both are equal.
///
/// # Safety
/// `unit` is valid for `F::SCHEME.unit_bytes()` reads; the caller enables AVX-512 F and BW.
#[inline(always)]
pub(crate) unsafe fn scale<F: Format>(unit: *const u8, sub: usize, part: usize) -> __m512 {
    let scheme = F::SCHEME;
    // SAFETY: the offsets lie within the unit.
    unsafe {
        let scale = halves(unit.add(scheme.scales_at()));
        let at = |i: usize| _mm_loadu_si128(unit.add(scheme.sub_scales_at() + i * PANEL).cast());
        match scheme.sub_scales {
            0 => scale,
            1 => _mm512_mul_ps(scale, _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(at(sub)))),
            _ => _mm512_mul_ps(scale, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(at(2 * sub + part)))),
        }
    }
}

/// Loads the minima of 16 columns for 32-block `sub`: `value = scale · q + min`. Only for formats that have them.
///
/// # Safety
/// As [`scale`].
#[inline(always)]
pub(crate) unsafe fn minimum<F: Format>(unit: *const u8, sub: usize) -> __m512 {
    let scheme = F::SCHEME;
    // SAFETY: the offsets lie within the unit of a format with minima.
    unsafe {
        let min = halves(unit.add(scheme.minima_at()));
        if scheme.sub_scales == 0 {
            return min;
        }
        let steps = _mm_loadu_si128(unit.add(scheme.sub_minima_at() + sub * PANEL).cast());
        let min = _mm512_mul_ps(min, _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(steps)));
        _mm512_xor_ps(min, _mm512_set1_ps(-0.0))
    }
}

/// Loads 16 f16 as f32.
#[inline(always)]
unsafe fn halves(at: *const u8) -> __m512 {
    // SAFETY: the caller guarantees 32 readable bytes.
    unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(at.cast())) }
}
