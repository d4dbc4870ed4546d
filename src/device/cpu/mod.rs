//! The CPU device.

#[doc(hidden)]
pub mod arena;
#[doc(hidden)]
pub mod matmul;
#[doc(hidden)]
pub mod pack;
#[doc(hidden)]
pub mod pool;
#[doc(hidden)]
pub mod quant;
#[doc(hidden)]
pub mod simd;
