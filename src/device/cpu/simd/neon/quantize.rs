//! Quantization of activations in NEON, bit-equal to the reference in
//! [`q8_rows`](crate::device::cpu::kernels::q8_rows).

#![allow(unsafe_code)]
// The intrinsics are too many to import by name.
#![allow(clippy::wildcard_imports)]

use crate::device::cpu::kernels::q8_rows::{BLOCK, RECORD_BYTES, TINY};
use std::arch::aarch64::*;

/// Quantizes `blocks` blocks of 32.
///
/// # Safety
/// - the machine has NEON
/// - `x` is valid for `32 * blocks` reads, `quants` for `32 * blocks` and `records` for `16 * blocks` writes.
#[target_feature(enable = "neon")]
pub(crate) unsafe fn blocks(x: *const f32, blocks: usize, quants: *mut u8, records: *mut u8) {
    for block in 0..blocks {
        // SAFETY: `block` < `blocks`, so the reads are within the range that the caller guarantees.
        let values: [float32x4_t; 8] = std::array::from_fn(|i| unsafe { vld1q_f32(x.add(block * BLOCK + 4 * i)) });
        let mut largest = vdupq_n_u32(0);
        for value in values {
            largest = vmaxq_u32(largest, vandq_u32(vreinterpretq_u32_f32(value), vdupq_n_u32(0x7fff_ffff)));
        }
        let amax = f32::from_bits(vmaxvq_u32(largest));
        let (scale, inverse) = if !amax.is_finite() {
            (f32::NAN, 0.0)
        } else if amax < TINY {
            (0.0, 0.0)
        } else {
            (amax / 127.0, 127.0 / amax)
        };
        let mut ints = [vdupq_n_s32(0); 8];
        // Skipped instead of multiplied by 0, which would keep NaN.
        if inverse > 0.0 {
            for (int, value) in ints.iter_mut().zip(values) {
                *int = vcvtnq_s32_f32(vmulq_n_f32(value, inverse));
            }
        }
        let sixteen = |i: usize| {
            let [low, high] = [i, i + 2].map(|i| vmovn_s16(vcombine_s16(vmovn_s32(ints[i]), vmovn_s32(ints[i + 1]))));
            vcombine_s8(low, high)
        };
        let bytes = [sixteen(0), sixteen(4)];
        // SAFETY: the 32 bytes of this block are within the range that the caller guarantees.
        unsafe {
            vst1q_s8(quants.add(block * BLOCK).cast(), bytes[0]);
            vst1q_s8(quants.add(block * BLOCK + 16).cast(), bytes[1]);
        }
        let [first, second] = bytes.map(|bytes| i32::from(vaddlvq_s8(bytes)));
        let all = first + second;
        let record: [u32; 4] =
            [scale.to_bits(), (-all).cast_unsigned(), (-first).cast_unsigned(), (scale * all as f32).to_bits()];
        // SAFETY: the 16 bytes of this block's record are within the range that the caller guarantees.
        unsafe { records.add(block * RECORD_BYTES).cast::<[u32; 4]>().write_unaligned(record) };
    }
}
