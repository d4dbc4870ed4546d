//! Reads quantized panels in AVX2, for both matmul kernels.
//!
//! A word is a register of 8 columns × 4 consecutive k, unsigned bytes. That is half of what a panel stores together,
//! so pointers to quants, scales and minima refer to the first or the second 8 columns. Everything here is inlined into
//! functions that enable the features; the branches are on constants.

#![allow(unsafe_code)]
// The intrinsics are too many to import by name.
#![allow(clippy::wildcard_imports)]

use crate::device::cpu::simd::formats::Format;
use crate::device::cpu::weights::pack::PANEL;
use std::arch::x86_64::*;

/// Number of columns in a register.
pub(crate) const HALF: usize = 8;

/// Loads word `index` (k = 4·index..) of a 32-block.
///
/// # Safety
/// `group` points to the quants of a block, at the half's first word; the caller enables AVX2.
#[inline(always)]
pub(crate) unsafe fn word<F: Format>(group: *const u8, index: usize) -> __m256i {
    // SAFETY: every offset is below the group's size, counted from the half's first word.
    unsafe {
        let load = |at: usize| _mm256_loadu_si256(group.add(at).cast());
        if F::SCHEME.bits == 8 {
            return load(64 * index);
        }
        let nibbles = load(64 * (index % 4));
        let shifted = if index < 4 { nibbles } else { _mm256_srli_epi16::<4>(nibbles) };
        let low = _mm256_and_si256(shifted, _mm256_set1_epi8(15));
        // The masks clear bits that a shift carries over from the neighboring byte.
        match F::SCHEME.bits {
            5 => {
                let plane = load(256);
                let bit = match index {
                    0 => _mm256_slli_epi16::<4>(plane),
                    1 => _mm256_slli_epi16::<3>(plane),
                    2 => _mm256_slli_epi16::<2>(plane),
                    3 => _mm256_slli_epi16::<1>(plane),
                    4 => plane,
                    5 => _mm256_srli_epi16::<1>(plane),
                    6 => _mm256_srli_epi16::<2>(plane),
                    _ => _mm256_srli_epi16::<3>(plane),
                };
                _mm256_or_si256(low, _mm256_and_si256(bit, _mm256_set1_epi8(0x10)))
            }
            6 => {
                let pairs = load(256 + 64 * (index / 4));
                let pair = match index % 4 {
                    0 => _mm256_slli_epi16::<4>(pairs),
                    1 => _mm256_slli_epi16::<2>(pairs),
                    2 => pairs,
                    _ => _mm256_srli_epi16::<2>(pairs),
                };
                _mm256_or_si256(low, _mm256_and_si256(pair, _mm256_set1_epi8(0x30)))
            }
            _ => low,
        }
    }
}

/// Loads the scales of 8 columns, starting at column `first`, for half `part` of 32-block `sub`. In formats without
/// halves both are equal.
///
/// # Safety
/// `unit` is valid for `F::SCHEME.unit_bytes()` reads, `first` is 0 or 8; the caller enables AVX2 and F16C.
#[inline(always)]
pub(crate) unsafe fn scale<F: Format>(unit: *const u8, first: usize, sub: usize, part: usize) -> __m256 {
    let scheme = F::SCHEME;
    // SAFETY: the offsets lie within the unit.
    unsafe {
        let scale = halves(unit.add(scheme.scales_at() + 2 * first));
        let at = |i: usize| _mm_loadl_epi64(unit.add(scheme.sub_scales_at() + i * PANEL + first).cast());
        match scheme.sub_scales {
            0 => scale,
            1 => _mm256_mul_ps(scale, _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(at(sub)))),
            _ => _mm256_mul_ps(scale, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(at(2 * sub + part)))),
        }
    }
}

/// Loads the minima of 8 columns for 32-block `sub`: `value = scale · q + min`. Only for formats that have them.
///
/// # Safety
/// As [`scale`].
#[inline(always)]
pub(crate) unsafe fn minimum<F: Format>(unit: *const u8, first: usize, sub: usize) -> __m256 {
    let scheme = F::SCHEME;
    // SAFETY: the offsets lie within the unit of a format with minima.
    unsafe {
        let min = halves(unit.add(scheme.minima_at() + 2 * first));
        if scheme.sub_scales == 0 {
            return min;
        }
        let steps = _mm_loadl_epi64(unit.add(scheme.sub_minima_at() + sub * PANEL + first).cast());
        let min = _mm256_mul_ps(min, _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(steps)));
        _mm256_xor_ps(min, _mm256_set1_ps(-0.0))
    }
}

/// Loads 8 f16 as f32.
#[inline(always)]
unsafe fn halves(at: *const u8) -> __m256 {
    // SAFETY: the caller guarantees 16 readable bytes.
    unsafe { _mm256_cvtph_ps(_mm_loadu_si128(at.cast())) }
}

/// Loads the first `cols` (at most 8) of 8 values; the others are 0.
///
/// # Safety
/// `from` is valid for `cols` reads; the caller enables AVX2.
#[inline(always)]
pub(crate) unsafe fn load_columns(from: *const f32, cols: usize) -> __m256 {
    // SAFETY: the caller guarantees `cols` reads, and the local array has 8 elements.
    unsafe {
        if cols >= HALF {
            return _mm256_loadu_ps(from);
        }
        let mut scratch = [0.0f32; HALF];
        std::ptr::copy_nonoverlapping(from, scratch.as_mut_ptr(), cols);
        _mm256_loadu_ps(scratch.as_ptr())
    }
}

/// Stores the first `cols` (at most 8) of 8 values.
///
/// # Safety
/// `to` is valid for `cols` writes; the caller enables AVX2.
#[inline(always)]
pub(crate) unsafe fn store_columns(to: *mut f32, cols: usize, values: __m256) {
    // SAFETY: the caller guarantees `cols` writes, and the local array has 8 elements.
    unsafe {
        if cols >= HALF {
            return _mm256_storeu_ps(to, values);
        }
        let mut scratch = [0.0f32; HALF];
        _mm256_storeu_ps(scratch.as_mut_ptr(), values);
        std::ptr::copy_nonoverlapping(scratch.as_ptr(), to, cols);
    }
}
