//! A simulated `AscendCL`: the C interface of the runtime, the operations, the collectives and the management library
//! of an Ascend 910B, over host memory, with the documented rules and with injected faults.
//!
//! The shared library built from this crate replaces the vendor's four: a program opens it by path. Streams are
//! threads, so work runs late and in any legal order. The host cannot access device memory, which is poisoned when it
//! is allocated and when it is freed. Calls that the documents forbid are refused. Misuse that the real runtime would
//! accept (a slot written twice, an id out of range) produces garbage and a complaint that a test can read.
//!
//! This Rust library is the remote control: [`Simulator`] finds the shared library in the directory of the test binary,
//! configures it, injects faults, and reads the log. It shares only the file name with the shared library.
//!
//! The simulator has not been compared with a device: its behavior follows the documentation, its times follow a simple
//! model.

mod codes;
mod control;
mod executor;
mod exports;
mod ffi;
mod operands;
mod ops;
mod random;
mod registry;
mod remote;
mod runtime;
mod settings;
mod strip_symbols;
mod tensor;

pub use remote::{Clock, Simulator};
