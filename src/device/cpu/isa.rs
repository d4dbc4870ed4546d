//! Which instruction-set path a kernel takes. A path is chosen once, when the device is made: results are bit-equal
//! within a path, whoever shares the batch.

#![forbid(unsafe_code)]

/// An instruction-set path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// x86-64 with AVX-512 (F, BW, DQ, VL).
    Avx512,
    /// Portable Rust.
    Plain,
}

impl Isa {
    /// The fastest path of this machine.
    pub fn detect() -> Self {
        if super::simd::lanes::has_avx512() { Self::Avx512 } else { Self::Plain }
    }
}
