//! Kernels for AVX2 with FMA and F16C.

pub(super) mod float;
pub(super) mod int;
pub(super) mod peak;
pub(super) mod quantize;
pub(super) mod unpack;
pub(super) mod vector;
