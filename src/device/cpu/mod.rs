//! The CPU device: runs plans on a fixed pool of threads.
//!
//! Reading order: [`CpuDevice`] (buffers, weights, programs), `executor` (the steps of a plan on the thread pool), then
//! `kernels`: `matmul` over packed panels (`weights`), `attention` over the KV pool (`kv_cache`), and the row kernels
//! (`norm`, `rope`, `activation`, `quantize`). `thread_pool` runs a closure on all workers, `memory` splits the arena
//! into disjoint ranges, `simd` holds the instruction sets, and `measure` profiles and measures rates. `reference`
//! defines every operation in plain Rust.
//!
//! Guarantee: a row's bits depend only on its own sequence, whatever the batch, the chunks, the blocks and the number
//! of threads.

mod device;
mod executor;
mod isa;
mod measure;

/// Declares modules that are public only for tests and benches outside the crate.
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
