//! Why a model could not be understood.

use super::Architecture;
use crate::graph::CustomSite;
use crate::weights::WeightError;

/// Errors of a model's description or its tensors.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The architecture is not implemented.
    #[error("model architecture {name:?} is not supported; supported are {}", supported())]
    UnsupportedArchitecture {
        /// Its name in the model's own files.
        name: String,
    },
    /// A feature that would change the model's numbers is not implemented.
    #[error("{field} = {value} is not supported; {expected}")]
    UnsupportedFeature {
        /// Field of the description.
        field: String,
        /// Its value.
        value: String,
        /// The supported values.
        expected: String,
    },
    /// A field has a value that cannot be.
    #[error("{field} = {value} is invalid; expected {expected}")]
    InvalidField {
        /// Field of the description.
        field: String,
        /// Its value.
        value: String,
        /// The accepted values.
        expected: String,
    },
    /// A required field is absent.
    #[error("{field} is missing")]
    MissingField {
        /// Field of the description.
        field: String,
    },
    /// The description is not JSON.
    #[error("{file} is no valid JSON: {reason}")]
    Json {
        /// The file.
        file: String,
        /// Message of the parser.
        reason: String,
    },
    /// A tensor the model needs is not in its files.
    #[error("tensor {name} is missing")]
    MissingTensor {
        /// The tensor.
        name: String,
    },
    /// A tensor the model needs is there, but cannot be used.
    #[error("tensor {name} cannot be used: {reason}")]
    UnusableTensor {
        /// The tensor.
        name: String,
        /// The entry in its file.
        reason: String,
    },
    /// A custom operation has no place in the model.
    #[error("custom operation {name} cannot stand {site}: the model has layers 0 to {}", .layers.saturating_sub(1))]
    Custom {
        /// The operation.
        name: String,
        /// The requested site.
        site: CustomSite,
        /// Layers of the model.
        layers: usize,
    },
    /// The shape of a tensor differs from the description.
    #[error("tensor {name} has shape {got:?}, expected {expected:?}")]
    TensorShape {
        /// The tensor.
        name: String,
        /// Shape in the file.
        got: Vec<usize>,
        /// Shape by the description.
        expected: Vec<usize>,
    },
}

impl ModelError {
    /// Converts the error of a weight source.
    pub(super) fn from_tensor(name: &str, error: &WeightError) -> Self {
        match error {
            WeightError::MissingTensor { .. } => Self::MissingTensor { name: name.to_owned() },
            other => Self::UnusableTensor { name: name.to_owned(), reason: other.to_string() },
        }
    }
}

/// Names of all families.
fn supported() -> String {
    Architecture::ALL.iter().map(|architecture| architecture.name()).collect::<Vec<_>>().join(", ")
}

pub(super) fn invalid(field: &str, value: impl ToString, expected: &str) -> ModelError {
    ModelError::InvalidField { field: field.into(), value: value.to_string(), expected: expected.into() }
}

pub(super) fn unsupported(field: &str, value: impl ToString, expected: &str) -> ModelError {
    ModelError::UnsupportedFeature { field: field.into(), value: value.to_string(), expected: expected.into() }
}
