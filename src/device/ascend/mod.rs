//! The Ascend NPU as a [`Device`](crate::device::Device), with `AscendCL` loaded at run time.
//!
//! ```text
//! callers ── checked ──► queue of commands ──► the card's thread: owns the context, issues everything
//!                                                 H2D from pinned slots │ operations or a captured graph │ D2H to a readback
//! ```
//! [`AscendDevice::open`] reports what is missing and never falls back to the CPU. The layers of a plan run as
//! operations of the vendor's library at the rows of their bucket, with activations in 16 bits; decode steps are
//! captured into graphs if the runtime supports it ([`Telemetry::notes`](crate::device::Telemetry::notes) reports the
//! mode in force and the reason).
//!
//! Unsupported features are refused by name: f32 activations, int8 activations and keys, custom operations, f32 keys.

mod device;
mod error;
mod memory;
mod notes;
mod options;
mod program;
mod telemetry;
mod weights;
mod worker;

use std::path::Path;

pub use ascend_sys::{AscendError, Library, LoadError, Runtime};
pub use device::AscendDevice;
pub use options::{Activations, AscendOpenError, AscendOptions, WeightForm, WeightTiles};

/// Loads AscendCL from `path` (the library or its folder), or from the location of CANN.
///
/// # Errors
/// [`LoadError`] names every location that was tried, or the function that the library lacks.
pub fn probe(path: Option<&Path>) -> Result<Runtime, LoadError> {
    Runtime::load(&Library::open(path)?)
}
