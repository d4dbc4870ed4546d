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
mod measure;

/// A module that only tests and benches outside the crate see.
macro_rules! internals {
    ($($name:ident),*) => {$(
        #[cfg(feature = "internals")]
        pub mod $name;
        #[cfg(not(feature = "internals"))]
        #[allow(dead_code, reason = "some kernels have no caller outside the tests yet")]
        mod $name;
    )*};
}

internals!(kernels, memory, simd, thread_pool, weights);

#[cfg(feature = "internals")]
pub mod reference;

pub use device::{CpuDevice, CpuOptions};
#[cfg(feature = "internals")]
pub use executor::Poison;
pub use isa::Isa;
pub use measure::profile::StepTime;
