//! A simulated `AscendCL`: the C interface of the runtime, the operations, the collectives and the card's own figures of an
//! Ascend 910B, over host memory, with the documented rules and with faults on demand.
//!
//! The shared library built from this crate stands in for the vendor's four: a program opens it by path. Streams are
//! threads, so work runs late and in any legal order; device memory cannot be reached by the host and is poisoned when it
//! is given out and given back; what the documents forbid is refused. What the real runtime would let pass although it is
//! wrong (a slot written twice, an id out of range) gives garbage and a complaint that a test can read.
//!
//! This Rust library is the remote control: [`Simulator`] finds the shared library beside the test binary, sets it up,
//! demands faults, and reads the log. It shares nothing with the shared library but the file's name.
//!
//! Nothing here has been compared with a device: behaviour follows the documentation, times follow a simple model.

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
