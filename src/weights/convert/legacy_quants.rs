//! Blocks of 32 elements: `Q4_0`, `Q4_1`, `Q5_0`, `Q5_1`, `Q8_0`.
//!
//! Layout (source: `ggml-common.h`): the scale `d` in f16; for the `_1` formats the minimum `m` in f16; for the
//! five-bit formats a u32 with the fifth bit of each element; then the low bits, with element `j` in the low half and
//! element `j + 16` in the high half of byte `j`; for `Q8_0` one signed byte per element.

#![forbid(unsafe_code)]

use half::f16;

use super::{QuantGroup, half_at, set_half};

const LEN: usize = 32;

pub(super) fn q4_0_to_f32(block: &[u8; 18], out: &mut [f32; LEN]) {
    let d = half_at(block, 0);
    for (j, byte) in block[2..].iter().enumerate() {
        out[j] = f32::from((byte & 0xf) as i8 - 8) * d;
        out[j + 16] = f32::from((byte >> 4) as i8 - 8) * d;
    }
}

pub(super) fn q4_1_to_f32(block: &[u8; 20], out: &mut [f32; LEN]) {
    let (d, m) = (half_at(block, 0), half_at(block, 2));
    for (j, byte) in block[4..].iter().enumerate() {
        out[j] = f32::from(byte & 0xf) * d + m;
        out[j + 16] = f32::from(byte >> 4) * d + m;
    }
}

pub(super) fn q5_0_to_f32(block: &[u8; 22], out: &mut [f32; LEN]) {
    let d = half_at(block, 0);
    five_bits(&block[2..], |j, q| out[j] = f32::from(q as i8 - 16) * d);
}

pub(super) fn q5_1_to_f32(block: &[u8; 24], out: &mut [f32; LEN]) {
    let (d, m) = (half_at(block, 0), half_at(block, 2));
    five_bits(&block[4..], |j, q| out[j] = f32::from(q) * d + m);
}

pub(super) fn q8_0_to_f32(block: &[u8; 34], out: &mut [f32; LEN]) {
    let d = half_at(block, 0);
    for (out, byte) in out.iter_mut().zip(&block[2..]) {
        *out = f32::from(*byte as i8) * d;
    }
}

pub(super) fn q4_0_group(block: &[u8; 18]) -> QuantGroup {
    QuantGroup { quants: nibbles(&block[2..], 8), scales: [half_at(block, 0); 2], min: 0.0 }
}

pub(super) fn q4_1_group(block: &[u8; 20]) -> QuantGroup {
    QuantGroup { quants: nibbles(&block[4..], 0), scales: [half_at(block, 0); 2], min: half_at(block, 2) }
}

pub(super) fn q5_0_group(block: &[u8; 22]) -> QuantGroup {
    let mut quants = [0; LEN];
    five_bits(&block[2..], |j, q| quants[j] = q as i8 - 16);
    QuantGroup { quants, scales: [half_at(block, 0); 2], min: 0.0 }
}

pub(super) fn q5_1_group(block: &[u8; 24]) -> QuantGroup {
    let mut quants = [0; LEN];
    five_bits(&block[4..], |j, q| quants[j] = q as i8);
    QuantGroup { quants, scales: [half_at(block, 0); 2], min: half_at(block, 2) }
}

pub(super) fn q8_0_group(block: &[u8; 34]) -> QuantGroup {
    let mut quants = [0; LEN];
    quants.iter_mut().zip(&block[2..]).for_each(|(quant, byte)| *quant = *byte as i8);
    QuantGroup { quants, scales: [half_at(block, 0); 2], min: 0.0 }
}

/// Returns the four-bit integers minus `offset`.
fn nibbles(low_bits: &[u8], offset: i8) -> [i8; LEN] {
    let mut quants = [0; LEN];
    for (j, byte) in low_bits.iter().enumerate() {
        quants[j] = (byte & 0xf) as i8 - offset;
        quants[j + 16] = (byte >> 4) as i8 - offset;
    }
    quants
}

/// Calls `each` with the index and the five bits of every element.
fn five_bits(rest: &[u8], mut each: impl FnMut(usize, u8)) {
    let high = u32::from_le_bytes([rest[0], rest[1], rest[2], rest[3]]);
    let fifth = |j: usize| if high >> j & 1 == 1 { 0x10 } else { 0_u8 };
    for (j, byte) in rest[4..].iter().enumerate() {
        each(j, byte & 0xf | fifth(j));
        each(j + 16, byte >> 4 | fifth(j + 16));
    }
}

pub(super) fn q4_0_from_f32(src: &[f32; LEN]) -> [u8; 18] {
    let mut block = [0; 18];
    let d = extreme(src) / -8.0;
    set_half(&mut block, 0, f16::from_f32(d));
    let inverse = inverse(d);
    for j in 0..16 {
        let quant = |x: f32| step(x * inverse + 8.5, 15);
        block[2 + j] = quant(src[j]) | quant(src[j + 16]) << 4;
    }
    block
}

pub(super) fn q4_1_from_f32(src: &[f32; LEN]) -> [u8; 20] {
    let mut block = [0; 20];
    let (min, max) = range(src);
    let d = (max - min) / 15.0;
    set_half(&mut block, 0, f16::from_f32(d));
    set_half(&mut block, 2, f16::from_f32(min));
    let inverse = inverse(d);
    for j in 0..16 {
        let quant = |x: f32| step((x - min) * inverse + 0.5, 15);
        block[4 + j] = quant(src[j]) | quant(src[j + 16]) << 4;
    }
    block
}

pub(super) fn q5_0_from_f32(src: &[f32; LEN]) -> [u8; 22] {
    let mut block = [0; 22];
    let d = extreme(src) / -16.0;
    set_half(&mut block, 0, f16::from_f32(d));
    let inverse = inverse(d);
    set_five_bits(&mut block[2..], |j| step(src[j] * inverse + 16.5, 31));
    block
}

pub(super) fn q5_1_from_f32(src: &[f32; LEN]) -> [u8; 24] {
    let mut block = [0; 24];
    let (min, max) = range(src);
    let d = (max - min) / 31.0;
    set_half(&mut block, 0, f16::from_f32(d));
    set_half(&mut block, 2, f16::from_f32(min));
    let inverse = inverse(d);
    set_five_bits(&mut block[4..], |j| step((src[j] - min) * inverse + 0.5, 31));
    block
}

pub(super) fn q8_0_from_f32(src: &[f32; LEN]) -> [u8; 34] {
    let mut block = [0; 34];
    let d = extreme(src).abs() / 127.0;
    set_half(&mut block, 0, f16::from_f32(d));
    let inverse = inverse(d);
    for (byte, x) in block[2..].iter_mut().zip(src) {
        #[allow(clippy::cast_possible_truncation)] // |x * inverse| is at most 127, and NaN casts to 0
        let quant = (x * inverse).round() as i8;
        *byte = quant as u8;
    }
    block
}

fn set_five_bits(rest: &mut [u8], quant: impl Fn(usize) -> u8) {
    let mut high = 0_u32;
    for j in 0..16 {
        let (a, b) = (quant(j), quant(j + 16));
        rest[4 + j] = a & 0xf | (b & 0xf) << 4;
        high |= u32::from(a >> 4) << j | u32::from(b >> 4) << (j + 16);
    }
    rest[..4].copy_from_slice(&high.to_le_bytes());
}

/// Returns the first value of largest magnitude, with its sign; 0 for an empty slice.
fn extreme(src: &[f32]) -> f32 {
    src.iter().fold(0.0, |extreme: f32, x| if x.abs() > extreme.abs() { *x } else { extreme })
}

fn range(src: &[f32]) -> (f32, f32) {
    src.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(min, max), x| (min.min(*x), max.max(*x)))
}

fn inverse(d: f32) -> f32 {
    if d == 0.0 { 0.0 } else { 1.0 / d }
}

/// Truncates to 0..=max, as GGML's casts do for values in range; NaN becomes 0.
fn step(x: f32, max: u8) -> u8 {
    #[allow(clippy::cast_possible_truncation)] // the format's quantizer rounds by truncation
    let truncated = x as u8;
    truncated.min(max)
}
