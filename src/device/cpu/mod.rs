//! The CPU device.

#[doc(hidden)]
pub mod activation;
#[doc(hidden)]
pub mod arena;
#[doc(hidden)]
pub mod attention;
#[doc(hidden)]
pub mod exp;
#[doc(hidden)]
pub mod kv;
#[doc(hidden)]
pub mod matmul;
#[doc(hidden)]
pub mod norm;
#[doc(hidden)]
pub mod pack;
#[doc(hidden)]
pub mod pool;
#[doc(hidden)]
pub mod quant;
#[doc(hidden)]
pub mod reference;
#[doc(hidden)]
pub mod rope;
#[doc(hidden)]
pub mod simd;

pub use simd::Isa;
