//! Conversion of elements between storage types and f32.
//!
//! [`dequantize`] is bit-equal to GGML's `dequantize_row_*` (product first, then the sum, no fused multiply-add).
//! [`quantize`] rounds each block independently: the legacy formats like GGML's reference quantizer, the K-quants by
//! covering the range of each sub-block, without GGML's search for better scales. Both are reference implementations:
//! one block at a time, in order, without SIMD. Neither packs weights for a device.

#![forbid(unsafe_code)]

mod k_quants;
mod legacy_quants;

use half::{bf16, f16};

use super::DType;

/// Converts stored elements to f32.
///
/// # Panics
///
/// If `bytes` is not exactly `out.len()` elements of `dtype`. The tensors of a [`WeightSource`](super::WeightSource)
/// always match their shape.
pub fn dequantize(dtype: DType, bytes: &[u8], out: &mut [f32]) {
    assert_eq!(
        Some(bytes.len()),
        dtype.bytes_for(out.len()),
        "the number of bytes does not match {} elements of {dtype}",
        out.len()
    );
    match dtype {
        DType::F32 => each(bytes, out, f32::from_le_bytes),
        DType::F16 => each(bytes, out, |raw| f16::from_le_bytes(raw).to_f32()),
        DType::BF16 => each(bytes, out, |raw| bf16::from_le_bytes(raw).to_f32()),
        DType::Q4_0 => blocks(bytes, out, legacy_quants::q4_0_to_f32),
        DType::Q4_1 => blocks(bytes, out, legacy_quants::q4_1_to_f32),
        DType::Q5_0 => blocks(bytes, out, legacy_quants::q5_0_to_f32),
        DType::Q5_1 => blocks(bytes, out, legacy_quants::q5_1_to_f32),
        DType::Q8_0 => blocks(bytes, out, legacy_quants::q8_0_to_f32),
        DType::Q4_K => blocks(bytes, out, k_quants::q4_k_to_f32),
        DType::Q5_K => blocks(bytes, out, k_quants::q5_k_to_f32),
        DType::Q6_K => blocks(bytes, out, k_quants::q6_k_to_f32),
    }
}

/// Rounds floats to `dtype` and appends the bytes to `out`.
///
/// Values should be finite. Block formats store their scale in f16, so magnitudes beyond its range (65,504 times the
/// format's largest integer) become infinite.
///
/// # Panics
///
/// If `src` is not a whole number of blocks.
pub fn quantize(dtype: DType, src: &[f32], out: &mut Vec<u8>) {
    let bytes = dtype.bytes_for(src.len());
    assert!(bytes.is_some(), "{} elements are not a whole number of blocks of {dtype}", src.len());
    out.reserve(bytes.unwrap_or_default());
    match dtype {
        DType::F32 => out.extend(src.iter().flat_map(|x| x.to_le_bytes())),
        DType::F16 => out.extend(src.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes())),
        DType::BF16 => out.extend(src.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes())),
        DType::Q4_0 => pack(src, out, legacy_quants::q4_0_from_f32),
        DType::Q4_1 => pack(src, out, legacy_quants::q4_1_from_f32),
        DType::Q5_0 => pack(src, out, legacy_quants::q5_0_from_f32),
        DType::Q5_1 => pack(src, out, legacy_quants::q5_1_from_f32),
        DType::Q8_0 => pack(src, out, legacy_quants::q8_0_from_f32),
        DType::Q4_K => pack(src, out, k_quants::q4_k_from_f32),
        DType::Q5_K => pack(src, out, k_quants::q5_k_from_f32),
        DType::Q6_K => pack(src, out, k_quants::q6_k_from_f32),
    }
}

/// Group of 32 elements of a block format: `value = scales[i / 16] * quants[i] + min`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QuantGroup {
    /// Integers after subtraction of the format's offset; in formats with a minimum, integers of 4 and 5 bits are not
    /// negative.
    pub quants: [i8; 32],
    /// Scales of the first and the last 16 elements; they differ only in `Q6_K`.
    pub scales: [f32; 2],
    /// Minimum, which is added; 0 in formats without a minimum.
    pub min: f32,
}

/// Calls `each` with the groups of stored elements of a block format, in order.
///
/// Float formats have no groups, so `each` is not called for them.
///
/// # Panics
///
/// If `bytes` is not a whole number of blocks.
pub fn groups(dtype: DType, bytes: &[u8], mut each: impl FnMut(QuantGroup)) {
    assert!(
        bytes.len().is_multiple_of(dtype.block_bytes()),
        "{} bytes are not a whole number of blocks of {dtype}",
        bytes.len()
    );
    match dtype {
        DType::F32 | DType::F16 | DType::BF16 => {}
        DType::Q4_0 => bytes.as_chunks().0.iter().for_each(|block| each(legacy_quants::q4_0_group(block))),
        DType::Q4_1 => bytes.as_chunks().0.iter().for_each(|block| each(legacy_quants::q4_1_group(block))),
        DType::Q5_0 => bytes.as_chunks().0.iter().for_each(|block| each(legacy_quants::q5_0_group(block))),
        DType::Q5_1 => bytes.as_chunks().0.iter().for_each(|block| each(legacy_quants::q5_1_group(block))),
        DType::Q8_0 => bytes.as_chunks().0.iter().for_each(|block| each(legacy_quants::q8_0_group(block))),
        DType::Q4_K => bytes.as_chunks().0.iter().flat_map(k_quants::q4_k_groups).for_each(each),
        DType::Q5_K => bytes.as_chunks().0.iter().flat_map(k_quants::q5_k_groups).for_each(each),
        DType::Q6_K => bytes.as_chunks().0.iter().flat_map(k_quants::q6_k_groups).for_each(each),
    }
}

fn each<const N: usize>(bytes: &[u8], out: &mut [f32], read: impl Fn([u8; N]) -> f32) {
    let (raw, _) = bytes.as_chunks::<N>();
    for (raw, out) in raw.iter().zip(out) {
        *out = read(*raw);
    }
}

fn blocks<const B: usize, const N: usize>(bytes: &[u8], out: &mut [f32], expand: impl Fn(&[u8; B], &mut [f32; N])) {
    for (block, out) in bytes.as_chunks().0.iter().zip(out.as_chunks_mut().0) {
        expand(block, out);
    }
}

fn pack<const B: usize, const N: usize>(src: &[f32], out: &mut Vec<u8>, round: impl Fn(&[f32; N]) -> [u8; B]) {
    for block in src.as_chunks().0 {
        out.extend_from_slice(&round(block));
    }
}

/// Reads the f16 at byte `at` of a block.
fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// Writes an f16 at byte `at` of a block.
fn set_half(block: &mut [u8], at: usize, value: f16) {
    block[at..at + 2].copy_from_slice(&value.to_le_bytes());
}
