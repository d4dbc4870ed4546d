//! Super-blocks of 256 elements: `Q4_K`, `Q5_K`, `Q6_K`.
//!
//! Layout (source: `ggml-common.h`). `Q4_K` and `Q5_K`: `d` and `dmin` in f16, twelve bytes with a six-bit scale and a
//! six-bit minimum for each of eight sub-blocks of 32, for `Q5_K` 32 bytes of fifth bits, then 128 bytes of low bits.
//! `Q6_K`: 128 bytes of low bits, 64 bytes of upper bits, sixteen signed scales for sub-blocks of 16, then `d`.

#![forbid(unsafe_code)]

use half::f16;

use super::{QuantGroup, half_at, set_half};

const LEN: usize = 256;

pub(super) fn q4_k_to_f32(block: &[u8; 144], out: &mut [f32; LEN]) {
    let (head, low) = block.split_at(16);
    for pair in 0..4 {
        let (d0, m0) = scale_and_min(head, 2 * pair);
        let (d1, m1) = scale_and_min(head, 2 * pair + 1);
        for l in 0..32 {
            let byte = low[32 * pair + l];
            out[64 * pair + l] = d0 * f32::from(byte & 0xf) - m0;
            out[64 * pair + 32 + l] = d1 * f32::from(byte >> 4) - m1;
        }
    }
}

pub(super) fn q5_k_to_f32(block: &[u8; 176], out: &mut [f32; LEN]) {
    let (head, rest) = block.split_at(16);
    let (high, low) = rest.split_at(32);
    for pair in 0..4 {
        let (d0, m0) = scale_and_min(head, 2 * pair);
        let (d1, m1) = scale_and_min(head, 2 * pair + 1);
        for l in 0..32 {
            let byte = low[32 * pair + l];
            let fifth = high[l] >> (2 * pair);
            out[64 * pair + l] = d0 * f32::from(byte & 0xf | (fifth & 1) << 4) - m0;
            out[64 * pair + 32 + l] = d1 * f32::from(byte >> 4 | (fifth >> 1 & 1) << 4) - m1;
        }
    }
}

pub(super) fn q6_k_to_f32(block: &[u8; 210], out: &mut [f32; LEN]) {
    let d = half_at(block, 208);
    for (element, out) in out.iter_mut().enumerate() {
        let scale = block[192 + element / 16] as i8;
        *out = d * f32::from(scale) * f32::from(q6_quant(block, element));
    }
}

pub(super) fn q4_k_groups(block: &[u8; 144]) -> [QuantGroup; 8] {
    let (head, low) = block.split_at(16);
    std::array::from_fn(|j| {
        let (scale, min) = scale_and_min(head, j);
        let low = &low[32 * (j / 2)..][..32];
        let quants = std::array::from_fn(|l| (low[l] >> (4 * (j % 2)) & 0xf) as i8);
        QuantGroup { quants, scales: [scale; 2], min: -min }
    })
}

pub(super) fn q5_k_groups(block: &[u8; 176]) -> [QuantGroup; 8] {
    let (head, rest) = block.split_at(16);
    let (high, low) = rest.split_at(32);
    std::array::from_fn(|j| {
        let (scale, min) = scale_and_min(head, j);
        let low = &low[32 * (j / 2)..][..32];
        let quants = std::array::from_fn(|l| (low[l] >> (4 * (j % 2)) & 0xf | (high[l] >> j & 1) << 4) as i8);
        QuantGroup { quants, scales: [scale; 2], min: -min }
    })
}

pub(super) fn q6_k_groups(block: &[u8; 210]) -> [QuantGroup; 8] {
    let d = half_at(block, 208);
    std::array::from_fn(|j| {
        let quants = std::array::from_fn(|l| q6_quant(block, 32 * j + l));
        QuantGroup { quants, scales: [0, 1].map(|half| d * f32::from(block[192 + 2 * j + half] as i8)), min: 0.0 }
    })
}

/// Returns an element of `Q6_K` after subtraction of the format's offset.
fn q6_quant(block: &[u8; 210], element: usize) -> i8 {
    let place = Q6Place::from_element(element);
    let low = block[place.low] >> place.low_shift & 0xf;
    let high = block[place.high] >> place.high_shift & 3;
    (low | high << 4) as i8 - 32
}

/// Returns `d * scale` and `dmin * min` of sub-block `j`, from the first 16 bytes of a block.
fn scale_and_min(head: &[u8], j: usize) -> (f32, f32) {
    let packed = &head[4..16];
    let (scale, min) = if j < 4 {
        (packed[j] & 63, packed[j + 4] & 63)
    } else {
        (packed[j + 4] & 0xf | packed[j - 4] >> 6 << 4, packed[j + 4] >> 4 | packed[j] >> 6 << 4)
    };
    (half_at(head, 0) * f32::from(scale), half_at(head, 2) * f32::from(min))
}

/// Position of the bits of one element of `Q6_K`.
///
/// Each half of 128 elements has 64 low bytes and 32 high bytes. High byte `l` contains bits of the four elements `l`,
/// `l + 32`, `l + 64`, `l + 96`.
struct Q6Place {
    low: usize,
    low_shift: usize,
    high: usize,
    high_shift: usize,
}

impl Q6Place {
    fn from_element(element: usize) -> Self {
        let (half, quarter, l) = (element / 128, element % 128 / 32, element % 32);
        Self {
            low: 64 * half + 32 * (quarter % 2) + l,
            low_shift: 4 * (quarter / 2),
            high: 128 + 32 * half + l,
            high_shift: 2 * quarter,
        }
    }
}

pub(super) fn q4_k_from_f32(src: &[f32; LEN]) -> [u8; 144] {
    let mut block = [0; 144];
    let quants = set_scales_and_mins(&mut block, src, 15);
    for (i, byte) in block[16..].iter_mut().enumerate() {
        let first = i / 32 * 64 + i % 32;
        *byte = quants[first] | quants[first + 32] << 4;
    }
    block
}

pub(super) fn q5_k_from_f32(src: &[f32; LEN]) -> [u8; 176] {
    let mut block = [0; 176];
    let quants = set_scales_and_mins(&mut block, src, 31);
    for i in 0..128 {
        let first = i / 32 * 64 + i % 32;
        let (a, b) = (quants[first], quants[first + 32]);
        block[48 + i] = a & 0xf | (b & 0xf) << 4;
        block[16 + i % 32] |= (a >> 4 | b >> 4 << 1) << (2 * (i / 32));
    }
    block
}

/// Chooses `d`, `dmin`, scales and minima, and returns the integer of each element.
///
/// It writes them to the head of the block. They cover the range of every sub-block. The range includes zero, because a
/// minimum cannot be positive.
fn set_scales_and_mins(block: &mut [u8], src: &[f32; LEN], max_quant: u8) -> [u8; LEN] {
    let sub_blocks = src.as_chunks::<32>().0;
    let mut lows = [0.0_f32; 8];
    let mut steps = [0.0_f32; 8];
    for (j, values) in sub_blocks.iter().enumerate() {
        let (min, max) = values.iter().fold((0.0_f32, 0.0_f32), |(min, max), x| (min.min(*x), max.max(*x)));
        lows[j] = -min;
        steps[j] = (max - min) / f32::from(max_quant);
    }
    let largest = |values: &[f32]| values.iter().fold(0.0_f32, |largest, x| largest.max(*x));
    let min_unit = half_at_least(largest(&lows) / 63.0);
    let mins = lows.map(|low| ceil_units(low, min_unit.to_f32(), 63));
    // A minimum that was rounded up shifts the range down: increase the step so that it still reaches the maximum.
    for (j, values) in sub_blocks.iter().enumerate() {
        let max = largest(values);
        steps[j] = steps[j].max((max + min_unit.to_f32() * f32::from(mins[j])) / f32::from(max_quant));
    }
    let unit = half_at_least(largest(&steps) / 63.0);
    let scales = steps.map(|step| ceil_units(step, unit.to_f32(), 63));

    set_half(block, 0, unit);
    set_half(block, 2, min_unit);
    let packed = &mut block[4..16];
    for j in 0..4 {
        packed[j] = scales[j] | scales[j + 4] >> 4 << 6;
        packed[j + 4] = mins[j] | mins[j + 4] >> 4 << 6;
        packed[j + 8] = scales[j + 4] & 0xf | (mins[j + 4] & 0xf) << 4;
    }
    let mut quants = [0; LEN];
    for (j, values) in sub_blocks.iter().enumerate() {
        let (step, low) = scale_and_min(block, j);
        for (quant, x) in quants[32 * j..].iter_mut().zip(values) {
            *quant = if step > 0.0 { nearest((x + low) / step, 0.0, f32::from(max_quant)) as u8 } else { 0 };
        }
    }
    quants
}

pub(super) fn q6_k_from_f32(src: &[f32; LEN]) -> [u8; 210] {
    let mut block = [0; 210];
    let sub_blocks = src.as_chunks::<16>().0;
    // 31, not 32: the integers have the range -32..=31, and both ends must be covered.
    let mut steps = [0.0_f32; 16];
    for (step, values) in steps.iter_mut().zip(sub_blocks) {
        *step = values.iter().fold(0.0_f32, |largest, x| largest.max(x.abs())) / 31.0;
    }
    let unit = half_at_least(steps.iter().fold(0.0_f32, |largest, x| largest.max(*x)) / 127.0);
    set_half(&mut block, 208, unit);
    for (j, values) in sub_blocks.iter().enumerate() {
        let scale = ceil_units(steps[j], unit.to_f32(), 127);
        block[192 + j] = scale;
        let step = unit.to_f32() * f32::from(scale);
        for (i, x) in values.iter().enumerate() {
            let quant = if step > 0.0 { nearest(x / step, -32.0, 31.0) } else { 0 };
            let bits = (quant + 32) as u8;
            let place = Q6Place::from_element(16 * j + i);
            block[place.low] |= (bits & 0xf) << place.low_shift;
            block[place.high] |= bits >> 4 << place.high_shift;
        }
    }
    block
}

/// Returns the smallest f16 that is not below a non-negative value.
fn half_at_least(x: f32) -> f16 {
    let half = f16::from_f32(x);
    if half.to_f32() < x { f16::from_bits(half.to_bits() + 1) } else { half }
}

fn ceil_units(x: f32, unit: f32, max: u8) -> u8 {
    #[allow(clippy::cast_possible_truncation)] // clamped, and NaN casts to 0
    let units = if unit > 0.0 { (x / unit).ceil() as u8 } else { 0 };
    units.min(max)
}

fn nearest(x: f32, min: f32, max: f32) -> i8 {
    #[allow(clippy::cast_possible_truncation)] // clamped, and NaN casts to 0
    let quant = x.round().clamp(min, max) as i8;
    quant
}
