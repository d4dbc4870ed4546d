//! Errors of a model's configuration and tensors.

use super::Architecture;
use crate::graph::CustomSite;
use crate::weights::WeightError;

/// Error of a model's configuration or of its tensors.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The architecture is not supported.
    #[error("model architecture {name:?} is not supported; expected one of {}", supported())]
    UnsupportedArchitecture {
        /// Name of the architecture in the model's files.
        name: String,
    },
    /// A feature that would change the model's results is not supported.
    #[error("{field} = {value} is not supported; {expected}")]
    UnsupportedFeature {
        /// Field of the configuration.
        field: String,
        /// Its value.
        value: String,
        /// Description of the supported values.
        expected: String,
    },
    /// A field has an invalid value.
    #[error("{field} = {value} is invalid; expected {expected}")]
    InvalidField {
        /// Field of the configuration.
        field: String,
        /// Its value.
        value: String,
        /// Description of the valid values.
        expected: String,
    },
    /// A required field is missing.
    #[error("{field} is missing")]
    MissingField {
        /// Field of the configuration.
        field: String,
    },
    /// The configuration is not valid JSON.
    #[error("{file} is not valid JSON: {reason}")]
    Json {
        /// Name of the file.
        file: String,
        /// Error message of the parser.
        reason: String,
    },
    /// The model's files do not contain a required tensor.
    #[error("tensor {name} is missing")]
    MissingTensor {
        /// Name of the tensor.
        name: String,
    },
    /// The model's files contain a required tensor, but it cannot be used.
    #[error("tensor {name} cannot be used: {reason}")]
    UnusableTensor {
        /// Name of the tensor.
        name: String,
        /// Error message of the weight source.
        reason: String,
    },
    /// The model has no layer after which the custom operation could run.
    #[error("custom operation {name} cannot run {site}: the model has layers 0 to {}", .layers.saturating_sub(1))]
    Custom {
        /// Name of the operation.
        name: String,
        /// Requested site of the operation.
        site: CustomSite,
        /// Number of layers of the model.
        layers: usize,
    },
    /// The shape of a tensor differs from the one that the configuration requires.
    #[error("tensor {name} has shape {got:?}, expected {expected:?}")]
    TensorShape {
        /// Name of the tensor.
        name: String,
        /// Shape in the file.
        got: Vec<usize>,
        /// Shape that the configuration requires.
        expected: Vec<usize>,
    },
}

impl ModelError {
    /// Converts the error of a weight source that could not return a tensor.
    pub(super) fn from_tensor(name: &str, error: &WeightError) -> Self {
        match error {
            WeightError::MissingTensor { .. } => Self::MissingTensor { name: name.to_owned() },
            other => Self::UnusableTensor { name: name.to_owned(), reason: other.to_string() },
        }
    }
}

/// Returns the names of all supported families.
fn supported() -> String {
    Architecture::ALL.iter().map(|architecture| architecture.name()).collect::<Vec<_>>().join(", ")
}

pub(super) fn invalid(field: &str, value: impl ToString, expected: &str) -> ModelError {
    ModelError::InvalidField { field: field.into(), value: value.to_string(), expected: expected.into() }
}

pub(super) fn unsupported(field: &str, value: impl ToString, expected: &str) -> ModelError {
    ModelError::UnsupportedFeature { field: field.into(), value: value.to_string(), expected: expected.into() }
}
