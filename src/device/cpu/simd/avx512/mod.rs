//! Kernels for AVX-512, with and without VNNI and BF16.

pub(super) mod bf16;
pub(super) mod float;
pub(super) mod int;
pub(super) mod peak;
pub(super) mod quantize;
pub(super) mod unpack;
