//! The CPU device: runs plans on a fixed team of threads.
//!
//! Reading order: [`CpuDevice`] (buffers, weights, programs), `program` (the steps of a plan on the team), then the kernels:
//! `matmul` over `pack`ed panels, `attention` over the `kv` pool, and the row functions (`norm`, `rope`, `activation`,
//! `quant`). `pool` is the team, `arena` the memory that its members share; `simd` holds the instruction sets. `reference`
//! defines every operation in plain Rust.
//!
//! Promise: a row's bits depend on its own sequence only, whatever the batch, the chunks, the blocks and the threads.

#[doc(hidden)]
pub mod activation;
#[doc(hidden)]
pub mod arena;
#[doc(hidden)]
pub mod arg_max;
#[doc(hidden)]
pub mod attention;
#[doc(hidden)]
pub mod cast;
mod device;
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
mod peaks;
#[doc(hidden)]
pub mod pool;
mod profile;
mod program;
#[doc(hidden)]
pub mod quant;
mod rapl;
#[doc(hidden)]
pub mod reference;
#[doc(hidden)]
pub mod reference_model;
#[doc(hidden)]
pub mod rope;
#[doc(hidden)]
pub mod simd;
mod weight_set;

pub use device::{CpuDevice, CpuOptions};
pub use profile::StepTime;
#[doc(hidden)]
pub use program::Poison;
pub use simd::Isa;
