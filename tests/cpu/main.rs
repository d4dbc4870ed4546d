//! Tests of the CPU device: kernels against their definitions, and the contract of a device.

#[path = "../common/mod.rs"]
mod common;

mod attention;
mod caps;
mod contract;
mod matmul;
mod poisoned_arena;
mod ranks;
mod reference;
mod row_functions;
