//! Kernels for NEON, with and without dot products.

pub(super) mod asm;
pub(super) mod float;
pub(super) mod int;
pub(super) mod peak;
pub(super) mod quantize;
pub(super) mod unpack;
pub(super) mod vector;
