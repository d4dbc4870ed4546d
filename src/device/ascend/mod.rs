//! The Ascend NPU, as far as it goes: finds AscendCL on this machine and says what is missing.
//!
//! There is no device here yet. [`probe`] loads the runtime and asks it for its version, so that a program can tell its
//! user whether the machine is ready; it never falls back to another device.

#![forbid(unsafe_code)]

use std::path::Path;

pub use ascend_sys::{AscendError, Library, LoadError, Runtime};

/// Loads AscendCL from `path` (the library or a folder that holds it), or from where CANN puts it.
///
/// # Errors
/// [`LoadError`] names every place that was tried, or the function that the library lacks.
pub fn probe(path: Option<&Path>) -> Result<Runtime, LoadError> {
    Runtime::load(&Library::open(path)?)
}
