//! Reads quantized panels in NEON, for both matmul kernels.
//!
//! A word is a register of 4 columns × 4 consecutive k, unsigned bytes. That is a quarter of what a panel stores
//! together, so pointers to quants, scales and minima refer to 4 of the 16 columns. Everything here is inlined; the
//! branches are on constants.

#![allow(unsafe_code)]
// The intrinsics are too many to import by name.
#![allow(clippy::wildcard_imports)]

use super::asm::widen_f16;
use crate::device::cpu::simd::formats::Format;
use crate::device::cpu::weights::pack::PANEL;
use std::arch::aarch64::*;

/// Number of columns in a register.
pub(crate) const QUARTER: usize = 4;

/// Loads word `index` (k = 4·index..) of a 32-block.
///
/// # Safety
/// `group` points to the quants of a block, at the quarter's first word.
#[inline(always)]
pub(crate) unsafe fn word<F: Format>(group: *const u8, index: usize) -> uint8x16_t {
    // SAFETY: every offset is below the group's size, counted from the quarter's first word.
    unsafe {
        let load = |at: usize| vld1q_u8(group.add(at));
        if F::SCHEME.bits == 8 {
            return load(64 * index);
        }
        let nibbles = load(64 * (index % 4));
        let low = if index < 4 { vandq_u8(nibbles, vdupq_n_u8(15)) } else { vshrq_n_u8::<4>(nibbles) };
        match F::SCHEME.bits {
            5 => {
                let plane = load(256);
                let bit = match index {
                    0 => vshlq_n_u8::<4>(plane),
                    1 => vshlq_n_u8::<3>(plane),
                    2 => vshlq_n_u8::<2>(plane),
                    3 => vshlq_n_u8::<1>(plane),
                    4 => plane,
                    5 => vshrq_n_u8::<1>(plane),
                    6 => vshrq_n_u8::<2>(plane),
                    _ => vshrq_n_u8::<3>(plane),
                };
                vorrq_u8(low, vandq_u8(bit, vdupq_n_u8(0x10)))
            }
            6 => {
                let pairs = load(256 + 64 * (index / 4));
                let pair = match index % 4 {
                    0 => vshlq_n_u8::<4>(pairs),
                    1 => vshlq_n_u8::<2>(pairs),
                    2 => pairs,
                    _ => vshrq_n_u8::<2>(pairs),
                };
                vorrq_u8(low, vandq_u8(pair, vdupq_n_u8(0x30)))
            }
            _ => low,
        }
    }
}

/// Loads the scales of 4 columns, starting at column `first`, for half `part` of 32-block `sub`. In formats without
/// halves both are equal.
///
/// # Safety
/// `unit` is valid for `F::SCHEME.unit_bytes()` reads, `first` is 0, 4, 8 or 12.
#[inline(always)]
pub(crate) unsafe fn scale<F: Format>(unit: *const u8, first: usize, sub: usize, part: usize) -> float32x4_t {
    let scheme = F::SCHEME;
    // SAFETY: the offsets lie within the unit.
    unsafe {
        let scale = halves(unit.add(scheme.scales_at() + 2 * first));
        let at = |i: usize| four_bytes(unit.add(scheme.sub_scales_at() + i * PANEL + first));
        match scheme.sub_scales {
            0 => scale,
            1 => vmulq_f32(scale, unsigned(at(sub))),
            _ => vmulq_f32(scale, signed(at(2 * sub + part))),
        }
    }
}

/// Loads the minima of 4 columns for 32-block `sub`: `value = scale · q + min`. Only for formats that have them.
///
/// # Safety
/// As [`scale`].
#[inline(always)]
pub(crate) unsafe fn minimum<F: Format>(unit: *const u8, first: usize, sub: usize) -> float32x4_t {
    let scheme = F::SCHEME;
    // SAFETY: the offsets lie within the unit of a format with minima.
    unsafe {
        let min = halves(unit.add(scheme.minima_at() + 2 * first));
        if scheme.sub_scales == 0 {
            return min;
        }
        let steps = four_bytes(unit.add(scheme.sub_minima_at() + sub * PANEL + first));
        vnegq_f32(vmulq_f32(min, unsigned(steps)))
    }
}

/// Loads 4 f16 as f32.
#[inline(always)]
unsafe fn halves(at: *const u8) -> float32x4_t {
    // SAFETY: the caller guarantees 8 readable bytes.
    unsafe { widen_f16(vld1_u16(at.cast())) }
}

/// Loads 4 bytes into the lower half of a register.
#[inline(always)]
unsafe fn four_bytes(at: *const u8) -> uint8x8_t {
    // SAFETY: the caller guarantees 4 readable bytes.
    unsafe { vreinterpret_u8_u32(vdup_n_u32(at.cast::<u32>().read_unaligned())) }
}

#[inline(always)]
fn unsigned(bytes: uint8x8_t) -> float32x4_t {
    // SAFETY: every aarch64 machine has NEON.
    unsafe { vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(bytes)))) }
}

#[inline(always)]
fn signed(bytes: uint8x8_t) -> float32x4_t {
    // SAFETY: as above.
    unsafe { vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(bytes))))) }
}

/// Runs a tile whose last panel is incomplete on local arrays in which all columns exist, and copies the existing
/// columns back. Tiles load and store whole registers only: the compiler does not unroll loops over cases, so the sums
/// would otherwise not stay in registers.
///
/// # Safety
/// `out` is valid for R rows of `cols` values, `stride` apart, and `bias` is null or valid for `cols`; there are at
/// most `P * PANEL` columns. `body` receives the first row, the distance from row to row and the first bias, and stays
/// within R rows of `P * PANEL` values.
#[inline(never)]
pub(crate) unsafe fn over_part<const R: usize, const P: usize>(
    (out, stride, cols): (*mut f32, usize, usize),
    bias: *const f32,
    body: impl FnOnce(*mut f32, usize, *const f32),
) {
    let mut scratch = [[[0.0f32; PANEL]; P]; R];
    let mut all_bias = [[0.0f32; PANEL]; P];
    // SAFETY: the caller guarantees `cols` columns in R rows, and the local arrays have P · PANEL columns per row.
    unsafe {
        for (r, row) in scratch.iter_mut().enumerate() {
            std::ptr::copy_nonoverlapping(out.add(r * stride), row.as_mut_ptr().cast(), cols);
        }
        if !bias.is_null() {
            std::ptr::copy_nonoverlapping(bias, all_bias.as_mut_ptr().cast(), cols);
        }
        body(scratch.as_mut_ptr().cast(), P * PANEL, if bias.is_null() { bias } else { all_bias.as_ptr().cast() });
        for (r, row) in scratch.iter().enumerate() {
            std::ptr::copy_nonoverlapping(row.as_ptr().cast(), out.add(r * stride), cols);
        }
    }
}
