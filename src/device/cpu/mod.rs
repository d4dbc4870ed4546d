//! The CPU device.

pub mod activation;
pub mod attention;
pub mod exp;
pub mod isa;
pub mod kv;
pub mod norm;
pub mod reference;
pub mod rope;

/// The instruction-set paths: the only place of this room's unsafe intrinsics.
pub mod simd {
    pub mod lanes;
}

pub use isa::Isa;
