//! Quantization of activations in AVX-512, bit-equal to the reference in
//! [`q8_rows`](crate::device::cpu::kernels::q8_rows).

#![allow(unsafe_code)]
// The intrinsics are too many to import by name.
#![allow(clippy::wildcard_imports)]

use crate::device::cpu::kernels::q8_rows::{BLOCK, RECORD_BYTES, TINY};
use std::arch::x86_64::*;

/// Quantizes `blocks` blocks of 32.
///
/// # Safety
/// - the machine has AVX-512 F, BW, DQ and VL
/// - `x` is valid for `32 * blocks` reads, `quants` for `32 * blocks` and `records` for `16 * blocks` writes
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(crate) unsafe fn blocks(x: *const f32, blocks: usize, quants: *mut u8, records: *mut u8) {
    let magnitude = _mm512_set1_epi32(0x7fff_ffff);
    for block in 0..blocks {
        // SAFETY: `block` < `blocks`, so the reads are within the range that the caller guarantees.
        let (lo, hi) = unsafe { (_mm512_loadu_ps(x.add(block * BLOCK)), _mm512_loadu_ps(x.add(block * BLOCK + 16))) };
        let abs = |v| _mm512_and_si512(_mm512_castps_si512(v), magnitude);
        let amax = f32::from_bits(_mm512_reduce_max_epi32(_mm512_max_epi32(abs(lo), abs(hi))).cast_unsigned());
        let (scale, inverse) = if !amax.is_finite() {
            (f32::NAN, 0.0)
        } else if amax < TINY {
            (0.0, 0.0)
        } else {
            (amax / 127.0, 127.0 / amax)
        };
        let int = |v| {
            // Masked instead of multiplied by 0, which would keep NaN.
            let keep = if inverse > 0.0 { 0xffff } else { 0 };
            _mm512_maskz_cvtps_epi32(keep, _mm512_mul_ps(v, _mm512_set1_ps(inverse)))
        };
        let (lo, hi) = (int(lo), int(hi));
        // SAFETY: the 32 bytes of this block are within the range that the caller guarantees.
        unsafe {
            let at = quants.add(block * BLOCK);
            _mm_storeu_si128(at.cast(), _mm512_cvtepi32_epi8(lo));
            _mm_storeu_si128(at.add(16).cast(), _mm512_cvtepi32_epi8(hi));
        }
        let first = _mm512_reduce_add_epi32(lo);
        let all = first + _mm512_reduce_add_epi32(hi);
        let record: [u32; 4] =
            [scale.to_bits(), (-all).cast_unsigned(), (-first).cast_unsigned(), (scale * all as f32).to_bits()];
        // SAFETY: the 16 bytes of this block's record are within the range that the caller guarantees.
        unsafe { records.add(block * RECORD_BYTES).cast::<[u32; 4]>().write_unaligned(record) };
    }
}
