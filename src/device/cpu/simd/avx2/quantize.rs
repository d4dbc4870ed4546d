//! Quantization of activations in AVX2, bit-equal to the reference in
//! [`q8_rows`](crate::device::cpu::kernels::q8_rows).

#![allow(unsafe_code)]
// The intrinsics are too many to import by name.
#![allow(clippy::wildcard_imports)]

use crate::device::cpu::kernels::q8_rows::{BLOCK, RECORD_BYTES, TINY};
use std::arch::x86_64::*;

/// Quantizes `blocks` blocks of 32.
///
/// # Safety
/// - the machine has AVX2
/// - `x` is valid for `32 * blocks` reads, `quants` for `32 * blocks` and `records` for `16 * blocks` writes
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) unsafe fn blocks(x: *const f32, blocks: usize, quants: *mut u8, records: *mut u8) {
    let magnitude = _mm256_set1_epi32(0x7fff_ffff);
    for block in 0..blocks {
        // SAFETY: `block` < `blocks`, so the reads are within the range that the caller guarantees.
        let values = unsafe {
            let at = x.add(block * BLOCK);
            [_mm256_loadu_ps(at), _mm256_loadu_ps(at.add(8)), _mm256_loadu_ps(at.add(16)), _mm256_loadu_ps(at.add(24))]
        };
        let mut largest = _mm256_setzero_si256();
        for value in values {
            largest = _mm256_max_epi32(largest, _mm256_and_si256(_mm256_castps_si256(value), magnitude));
        }
        let amax = f32::from_bits(max_of(largest).cast_unsigned());
        let (scale, inverse) = if !amax.is_finite() {
            (f32::NAN, 0.0)
        } else if amax < TINY {
            (0.0, 0.0)
        } else {
            (amax / 127.0, 127.0 / amax)
        };
        let mut ints = [_mm256_setzero_si256(); 4];
        // Skipped instead of multiplied by 0, which would keep NaN.
        if inverse > 0.0 {
            let inverse = _mm256_set1_ps(inverse);
            for (int, value) in ints.iter_mut().zip(values) {
                *int = _mm256_cvtps_epi32(_mm256_mul_ps(value, inverse));
            }
        }
        // Packing works within the halves of a register: the block's eighths end up in the order 0 2 4 6 1 3 5 7.
        let bytes = _mm256_packs_epi16(_mm256_packs_epi32(ints[0], ints[1]), _mm256_packs_epi32(ints[2], ints[3]));
        let bytes = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
        // SAFETY: the 32 bytes of this block are within the range that the caller guarantees.
        unsafe { _mm256_storeu_si256(quants.add(block * BLOCK).cast(), bytes) };
        let first = sum_of(_mm256_add_epi32(ints[0], ints[1]));
        let all = first + sum_of(_mm256_add_epi32(ints[2], ints[3]));
        let record: [u32; 4] =
            [scale.to_bits(), (-all).cast_unsigned(), (-first).cast_unsigned(), (scale * all as f32).to_bits()];
        // SAFETY: the 16 bytes of this block's record are within the range that the caller guarantees.
        unsafe { records.add(block * RECORD_BYTES).cast::<[u32; 4]>().write_unaligned(record) };
    }
}

/// The largest of eight integers.
#[inline]
#[target_feature(enable = "avx2")]
fn max_of(v: __m256i) -> i32 {
    let four = _mm_max_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256::<1>(v));
    let two = _mm_max_epi32(four, _mm_shuffle_epi32::<0b11_10>(four));
    _mm_cvtsi128_si32(_mm_max_epi32(two, _mm_shuffle_epi32::<0b01>(two)))
}

/// The sum of eight integers.
#[inline]
#[target_feature(enable = "avx2")]
fn sum_of(v: __m256i) -> i32 {
    let four = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256::<1>(v));
    let two = _mm_add_epi32(four, _mm_shuffle_epi32::<0b11_10>(four));
    _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32::<0b01>(two)))
}
