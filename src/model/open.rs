//! From a path to a model's files, by the hub's tensor names in every form.

use std::path::Path;

use super::gguf_conventions;
use crate::weights::{self, ModelFiles, WeightError};

/// Opens a model's files: [`weights::open`] with what the families know of their GGUF files.
///
/// # Errors
/// [`WeightError`] names the file or folder and what is wrong with it.
pub fn open(path: impl AsRef<Path>) -> Result<ModelFiles, WeightError> {
    weights::open(path, gguf_conventions)
}
