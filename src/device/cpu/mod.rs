//! The CPU device: runs plans on a fixed team of threads.
//!
//! Reading order: [`CpuDevice`] (buffers, weights, programs), `program` (the steps of a plan on the team), then the kernels:
//! `matmul` over `pack`ed panels, `attention` over the `kv` pool, and the row functions (`norm`, `rope`, `activation`,
//! `quant`). `pool` is the team, `arena` the memory that its members share; `simd` holds the instruction sets. `reference`
//! defines every operation in plain Rust.
//!
//! Promise: a row's bits depend on its own sequence only, whatever the batch, the chunks, the blocks and the threads.

mod device;
mod executor;
mod isa;
#[doc(hidden)]
pub mod kernels;
mod measure;
#[doc(hidden)]
pub mod memory;
#[doc(hidden)]
pub mod reference;
#[doc(hidden)]
pub mod simd;
#[doc(hidden)]
pub mod thread_pool;
#[doc(hidden)]
pub mod weights;

pub use device::{CpuDevice, CpuOptions};
#[doc(hidden)]
pub use executor::Poison;
pub use isa::Isa;
pub use measure::profile::StepTime;
