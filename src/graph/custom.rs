//! Custom operations of the user: steering, probing, adapters.
//!
//! An operation is called for one sequence at a time with the rows of that sequence on the host, and cannot affect
//! other sequences. The plan is split there: all earlier steps have ended, and no later step has begun. If the
//! operation fails or panics, the rows continue unchanged, their status is
//! [`CustomOpFailed`](super::RowStatus::CustomOpFailed), and the engine ends that request with a typed error.

use std::fmt;
use std::sync::Arc;

/// Reason why a custom operation failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct CustomOpError(pub String);

/// The rows of one call of a custom operation.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct CustomCall<'a> {
    /// Token id of each row.
    pub tokens: &'a [u32],
    /// Position of the first row in its sequence; the others follow consecutively.
    pub first_position: u32,
    /// Number of elements per row: the model's hidden size.
    pub width: usize,
}

impl<'a> CustomCall<'a> {
    /// Creates a call over the rows of these tokens.
    pub const fn new(tokens: &'a [u32], first_position: u32, width: usize) -> Self {
        Self { tokens, first_position, width }
    }
}

/// An operation that a user adds to a model.
///
/// A prompt may arrive in several calls, split as the scheduler chooses: if an operation's result for a row depends on
/// other rows of the call, its output depends on that split. Calls run on the thread that launches the step.
pub trait CustomOp: Send + Sync + fmt::Debug {
    /// Name in dumps and errors.
    fn name(&self) -> &str;

    /// Checks whether the operation supports rows of this width; called once, when the plan is compiled.
    ///
    /// # Errors
    /// [`CustomOpError`] with the reason if it does not. Building the engine then fails with that reason and the
    /// operation's name.
    fn check(&self, width: usize) -> Result<(), CustomOpError> {
        let _ = width;
        Ok(())
    }

    /// Computes `out` from `x`, each `tokens.len() × width` in row-major order. `out` starts as a copy of `x`.
    ///
    /// # Errors
    /// [`CustomOpError`] with the reason if these rows cannot be computed. Only their request ends.
    fn run(&self, call: &CustomCall<'_>, x: &[f32], out: &mut [f32]) -> Result<(), CustomOpError>;
}

/// Position of an operation in the model, on the rows that flow from layer to layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum CustomSite {
    /// After the embedding, before the first layer.
    AfterEmbedding,
    /// After this layer, counted from 0.
    AfterLayer(u32),
}

impl fmt::Display for CustomSite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AfterEmbedding => f.write_str("after the embedding"),
            Self::AfterLayer(layer) => write!(f, "after layer {layer}"),
        }
    }
}

/// A custom operation and its position in the model.
#[derive(Clone, Debug)]
pub struct RegisteredOp {
    /// Its position. Several operations at one position run in the order of registration.
    pub site: CustomSite,
    /// The operation.
    pub op: Arc<dyn CustomOp>,
}

/// Equal if the position is equal and the operation is the same object.
impl PartialEq for RegisteredOp {
    fn eq(&self, other: &Self) -> bool {
        self.site == other.site && Arc::ptr_eq(&self.op, &other.op)
    }
}
