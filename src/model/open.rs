//! Opens a model's files; tensors have their hub names in every form.

use std::path::Path;

use super::gguf_conventions;
use crate::weights::{self, ModelFiles, WeightError};

/// Opens a model's files: [`weights::open`] with the GGUF conventions of the supported families.
///
/// # Errors
/// A [`WeightError`] with the file or folder and the reason.
pub fn open(path: impl AsRef<Path>) -> Result<ModelFiles, WeightError> {
    weights::open(path, gguf_conventions)
}
