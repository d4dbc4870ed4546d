//! SIMD kernels and the dispatch among instruction sets.
//!
//! The functions here are safe: they check that the machine has the instructions, and that a slice covers every pointer
//! they pass on. If a path has no fast kernel they report it (`false`, or 0 blocks done) instead of falling back
//! themselves; the callers contain the reference implementations.

#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod float_tiles;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod formats;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod int_tiles;
pub(crate) mod map;
#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(test)]
pub(crate) mod testing;
pub mod vector;

use super::kernels::float_rows::{Activation, FloatRows};
use super::kernels::q8_rows::QuantRows;
use super::memory::Tile;
use super::weights::pack::PackedMatrix;
use crate::device::cpu::Isa;
use std::ops::Range;
use std::sync::OnceLock;

impl Isa {
    /// Returns the fastest path of this machine. It is the last of [`available`](Self::available), except that some
    /// processors execute dot products of bfloat16 pairs at half the rate of f32: their rate is measured once per
    /// process.
    pub fn detect() -> Self {
        static DETECTED: OnceLock<Isa> = OnceLock::new();
        *DETECTED.get_or_init(|| match Self::available() {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the machine has the features, since the path is available.
            [.., before, Self::Avx512Bf16] if !unsafe { avx512::peak::pairs_beat_f32() } => *before,
            isas => isas.last().copied().unwrap_or(Self::Plain),
        })
    }
}

/// Quantizes whole blocks; returns the number of blocks done.
pub(super) fn quantize_blocks(isa: Isa, x: &[f32], quants: &mut [u8], records: &mut [u8]) -> usize {
    isa.assert_available();
    let blocks = x.len() / super::kernels::q8_rows::BLOCK;
    assert!(
        quants.len() >= blocks * super::kernels::q8_rows::BLOCK
            && records.len() >= blocks * super::kernels::q8_rows::RECORD_BYTES
    );
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => {
            // SAFETY: the machine has the features, and the slices hold `blocks` blocks; both are asserted above.
            unsafe { avx2::quantize::blocks(x.as_ptr(), blocks, quants.as_mut_ptr(), records.as_mut_ptr()) };
            blocks
        }
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Avx512Vnni | Isa::Avx512Bf16 => {
            // SAFETY: as above.
            unsafe { avx512::quantize::blocks(x.as_ptr(), blocks, quants.as_mut_ptr(), records.as_mut_ptr()) };
            blocks
        }
        #[cfg(target_arch = "aarch64")]
        Isa::Neon | Isa::NeonDot => {
            // SAFETY: as above.
            unsafe { neon::quantize::blocks(x.as_ptr(), blocks, quants.as_mut_ptr(), records.as_mut_ptr()) };
            blocks
        }
        // The plain path, and paths of other architectures.
        _ => 0,
    }
}

/// Multiplies int8 rows. The caller has checked that the shapes agree (`matmul::check`). Returns whether `isa` has a
/// kernel for it.
pub(super) fn matmul_q8(
    isa: Isa,
    x: QuantRows<'_>,
    w: &PackedMatrix,
    bias: Option<&[f32]>,
    panels: Range<usize>,
    out: &mut Tile<'_, f32>,
) -> bool {
    isa.assert_available();
    match isa {
        #[cfg(target_arch = "x86_64")]
        // Without VNNI, AVX-512 is no faster at this than AVX2.
        Isa::Avx2 | Isa::Avx512 => {
            avx2::int::matmul(x, w, bias, panels, out);
            true
        }
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Vnni | Isa::Avx512Bf16 => {
            avx512::int::matmul(x, w, bias, panels, out);
            true
        }
        #[cfg(target_arch = "aarch64")]
        Isa::Neon => {
            neon::int::matmul(x, w, bias, panels, out);
            true
        }
        #[cfg(target_arch = "aarch64")]
        Isa::NeonDot => {
            neon::int::matmul_dot(x, w, bias, panels, out);
            true
        }
        _ => false,
    }
}

/// Multiplies f32 rows; otherwise as [`matmul_q8`].
pub(super) fn matmul_f32(
    isa: Isa,
    x: FloatRows<'_>,
    w: &PackedMatrix,
    bias: Option<&[f32]>,
    panels: Range<usize>,
    out: &mut Tile<'_, f32>,
) -> bool {
    matmul_floats(isa, x, w, bias, panels, out)
}

/// Multiplies rows of bfloat16 bits; otherwise as [`matmul_q8`].
pub(super) fn matmul_bf16(
    isa: Isa,
    x: FloatRows<'_, u16>,
    w: &PackedMatrix,
    bias: Option<&[f32]>,
    panels: Range<usize>,
    out: &mut Tile<'_, f32>,
) -> bool {
    #[cfg(target_arch = "x86_64")]
    if isa == Isa::Avx512Bf16 && w.dtype() == crate::weights::DType::BF16 {
        isa.assert_available();
        avx512::bf16::matmul(x, w, bias, panels, out);
        return true;
    }
    matmul_floats(isa, x, w, bias, panels, out)
}

fn matmul_floats<T: Activation>(
    isa: Isa,
    x: FloatRows<'_, T>,
    w: &PackedMatrix,
    bias: Option<&[f32]>,
    panels: Range<usize>,
    out: &mut Tile<'_, f32>,
) -> bool {
    isa.assert_available();
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => {
            avx2::float::matmul(x, w, bias, panels, out);
            true
        }
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Avx512Vnni | Isa::Avx512Bf16 => {
            avx512::float::matmul(x, w, bias, panels, out);
            true
        }
        #[cfg(target_arch = "aarch64")]
        Isa::Neon | Isa::NeonDot => {
            neon::float::matmul(x, w, bias, panels, out);
            true
        }
        _ => false,
    }
}

/// Runs `rounds` rounds of independent int8 dot products to measure their peak rate; returns the number of operations,
/// or `None` if `isa` has no instruction for them.
pub(super) fn int8_chains(isa: Isa, rounds: u64) -> Option<u64> {
    isa.assert_available();
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the machine has the features, asserted above.
        Isa::Avx2 | Isa::Avx512 => Some(unsafe { avx2::peak::dot_chains(rounds) }),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Isa::Avx512Vnni | Isa::Avx512Bf16 => Some(unsafe { avx512::peak::dot_chains(rounds) }),
        #[cfg(target_arch = "aarch64")]
        // SAFETY: as above.
        Isa::Neon => Some(unsafe { neon::peak::widening_chains(rounds) }),
        #[cfg(target_arch = "aarch64")]
        // SAFETY: as above.
        Isa::NeonDot => Some(unsafe { neon::peak::dot_chains(rounds) }),
        _ => {
            let _ = rounds;
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_is_always_there_and_detection_gives_one_that_is() {
        assert_eq!(Isa::available()[0], Isa::Plain);
        assert!(Isa::available().is_sorted() && Isa::available().contains(&Isa::detect()));
        assert_eq!(Isa::detect(), Isa::detect());
    }

    /// Other tests iterate over the available paths, so they would pass if NEON were missing.
    #[cfg(all(target_arch = "aarch64", target_endian = "little"))]
    #[test]
    fn neon_is_always_there_and_dot_products_are_where_the_machine_says_so() {
        let with_dot = std::arch::is_aarch64_feature_detected!("dotprod");
        assert_eq!(Isa::available()[1..], [Isa::Neon, Isa::NeonDot][..=usize::from(with_dot)]);
    }
}
