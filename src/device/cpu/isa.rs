//! Instruction-set paths and their detection on this machine.

#![forbid(unsafe_code)]

use std::sync::OnceLock;

/// An instruction-set path. Results are bit-equal within one path, but not promised to be equal across paths.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Isa {
    /// Portable Rust.
    Plain,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ and VL; int8 dot products use AVX2.
    Avx512,
    /// AVX-512 with VNNI: int8 dot products in one instruction.
    Avx512Vnni,
    /// AVX-512 with VNNI and BF16: also dot products of bfloat16 pairs.
    Avx512Bf16,
    /// NEON, the baseline of aarch64; int8 products by widening multiplications.
    Neon,
    /// NEON with int8 dot products in one instruction (`sdot`).
    NeonDot,
}

impl Isa {
    /// Paths that this machine supports, slowest first.
    pub fn available() -> &'static [Self] {
        static AVAILABLE: OnceLock<Vec<Isa>> = OnceLock::new();
        AVAILABLE.get_or_init(|| {
            #[allow(unused_mut)] // on other architectures
            let mut isas = vec![Self::Plain];
            #[cfg(target_arch = "x86_64")]
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c") {
                isas.push(Self::Avx2);
                if is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                {
                    isas.push(Self::Avx512);
                    if is_x86_feature_detected!("avx512vnni") {
                        isas.push(Self::Avx512Vnni);
                        if is_x86_feature_detected!("avx512bf16") {
                            isas.push(Self::Avx512Bf16);
                        }
                    }
                }
            }
            // The kernels read packed panels and rows in little-endian order.
            #[cfg(all(target_arch = "aarch64", target_endian = "little"))]
            if std::arch::is_aarch64_feature_detected!("neon") {
                isas.push(Self::Neon);
                if std::arch::is_aarch64_feature_detected!("dotprod") {
                    isas.push(Self::NeonDot);
                }
            }
            isas
        })
    }

    /// Name used in settings, logs and plans.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Avx512Vnni => "avx512_vnni",
            Self::Avx512Bf16 => "avx512_bf16",
            Self::Neon => "neon",
            Self::NeonDot => "neon_dot",
        }
    }

    /// Whether this machine supports the path.
    pub fn is_available(self) -> bool {
        Self::available().contains(&self)
    }

    /// # Panics
    /// If this machine does not support the path: running its kernels would be undefined behavior.
    pub(crate) fn assert_available(self) {
        assert!(Self::available().contains(&self), "this machine does not support {}", self.name());
    }
}
