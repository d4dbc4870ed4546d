//! aarch64 instructions without an intrinsic that is stable in the oldest compiler this crate supports.
//!
//! If the compiler in use has the intrinsic as stable, the build script sets a cfg and the intrinsic replaces the
//! assembly, which lets the compiler schedule and combine the instruction.

#![allow(unsafe_code)]
#![allow(clippy::incompatible_msrv)] // the build script has asked the compiler

use std::arch::aarch64::{float32x4_t, int8x16_t, int16x8_t, int32x4_t, uint16x4_t};
use std::arch::asm;

/// Converts four f16 to f32, exactly; NaN becomes quiet.
#[cfg(neon_f16_intrinsics)]
#[inline(always)]
pub(crate) fn widen_f16(halves: uint16x4_t) -> float32x4_t {
    use std::arch::aarch64::{vcvt_f32_f16, vreinterpret_f16_u16};
    // SAFETY: every aarch64 machine has NEON.
    unsafe { vcvt_f32_f16(vreinterpret_f16_u16(halves)) }
}

/// Converts four f16 to f32, for older compilers.
#[cfg(not(neon_f16_intrinsics))]
#[inline(always)]
pub(crate) fn widen_f16(halves: uint16x4_t) -> float32x4_t {
    let wide;
    // SAFETY: every aarch64 machine has the instruction. It only changes its operand registers and floating-point
    // status flags (hence no `preserves_flags`).
    unsafe {
        asm!("fcvtl {0:v}.4s, {1:v}.4h", lateout(vreg) wide, in(vreg) halves, options(pure, nomem, nostack));
    };
    wide
}

/// Rounds four f32 to f16, to nearest even; NaN becomes quiet.
#[cfg(neon_f16_intrinsics)]
#[inline(always)]
pub(crate) fn narrow_f16(values: float32x4_t) -> uint16x4_t {
    use std::arch::aarch64::{vcvt_f16_f32, vreinterpret_u16_f16};
    // SAFETY: every aarch64 machine has NEON.
    unsafe { vreinterpret_u16_f16(vcvt_f16_f32(values)) }
}

/// Rounds four f32 to f16, for older compilers.
#[cfg(not(neon_f16_intrinsics))]
#[inline(always)]
pub(crate) fn narrow_f16(values: float32x4_t) -> uint16x4_t {
    let halves;
    // SAFETY: as in `widen_f16`.
    unsafe {
        asm!("fcvtn {0:v}.4h, {1:v}.4s", lateout(vreg) halves, in(vreg) values, options(pure, nomem, nostack));
    };
    halves
}

/// `sums + Σ of 4 bytes of w · x`, all signed, for each 32-bit lane of `w` and the four bytes at lane `LANE` of `x`.
#[cfg(neon_dot_intrinsic)]
#[inline]
#[target_feature(enable = "neon,dotprod")]
pub(crate) fn dot<const LANE: i32>(sums: int32x4_t, w: int8x16_t, x: int8x16_t) -> int32x4_t {
    std::arch::aarch64::vdotq_laneq_s32::<LANE>(sums, w, x)
}

/// Computes the dot products, for older compilers.
#[cfg(not(neon_dot_intrinsic))]
#[inline]
#[target_feature(enable = "neon,dotprod")]
pub(crate) fn dot<const LANE: i32>(mut sums: int32x4_t, w: int8x16_t, x: int8x16_t) -> int32x4_t {
    // SAFETY: the function enables the feature, and the instruction only changes its operand registers.
    unsafe {
        asm!(
            "sdot {0:v}.4s, {1:v}.16b, {2:v}.4b[{3}]",
            inout(vreg) sums,
            in(vreg) w,
            in(vreg) x,
            const LANE,
            options(pure, nomem, nostack, preserves_flags)
        );
    };
    sums
}

/// Returns `sums` unchanged and hides that from the compiler, which therefore leaves a chain of `smlal` as it is;
/// otherwise it would compute pairs of products, with one more addition for each.
#[inline(always)]
pub(crate) fn chained(mut sums: int16x8_t) -> int16x8_t {
    // SAFETY: the assembly contains no instruction.
    unsafe { asm!("/* {0:v} */", inout(vreg) sums, options(pure, nomem, nostack, preserves_flags)) };
    sums
}

/// Prefetches the cache line of an address into the L1 cache, as a hint; any address is allowed.
#[inline(always)]
#[allow(clippy::pointers_in_nomem_asm_block)] // what a hint reads cannot be seen
pub(crate) fn prefetch(address: *const u8) {
    // SAFETY: a prefetch never faults and has no effect visible to the program.
    unsafe { asm!("prfm pldl1keep, [{0}]", in(reg) address, options(nomem, nostack, preserves_flags)) };
}

/// Prefetches the cache line of an address into the L2 cache; otherwise as [`prefetch`].
#[inline(always)]
#[allow(clippy::pointers_in_nomem_asm_block)] // as above
pub(crate) fn prefetch_second_level(address: *const u8) {
    // SAFETY: as in `prefetch`.
    unsafe { asm!("prfm pldl2keep, [{0}]", in(reg) address, options(nomem, nostack, preserves_flags)) };
}
