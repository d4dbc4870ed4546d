//! Operations that a user adds to a model: steering, probing, adapters of their own.
//!
//! An operation is called for one sequence at a time with that sequence's rows on the host, and what it does can reach no
//! other sequence. The plan is cut there: everything before has ended, nothing behind has begun. If it fails or panics,
//! the rows go on as they came in, their status says [`CustomOpFailed`](super::RowStatus::CustomOpFailed), and the engine
//! ends that request with a typed error.

use std::fmt;
use std::sync::Arc;

/// Why a custom operation failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct CustomOpError(pub String);

/// The rows of one call.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct CustomCall<'a> {
    /// Token id of each row.
    pub tokens: &'a [u32],
    /// Position of the first row in its sequence; the others follow.
    pub first_position: u32,
    /// Elements a row: the model's hidden size.
    pub width: usize,
}

impl<'a> CustomCall<'a> {
    /// A call over the rows of these tokens.
    pub const fn new(tokens: &'a [u32], first_position: u32, width: usize) -> Self {
        Self { tokens, first_position, width }
    }
}

/// An operation that a user adds to a model.
///
/// A prompt may come in several calls, cut where the scheduler likes: an operation whose result for a row depends on other
/// rows of the call gives answers that depend on it. Calls are made on the thread that launches the step.
pub trait CustomOp: Send + Sync + fmt::Debug {
    /// Name in dumps and errors.
    fn name(&self) -> &str;

    /// Whether it can work on rows of this width; asked once, when the plan is compiled.
    ///
    /// # Errors
    /// Why not; building the engine fails with it and the operation's name.
    fn check(&self, width: usize) -> Result<(), CustomOpError> {
        let _ = width;
        Ok(())
    }

    /// Computes `out` from `x`, each `tokens.len() × width` in row-major order. `out` comes in as a copy of `x`.
    ///
    /// # Errors
    /// Why these rows could not be computed; only their request ends.
    fn run(&self, call: &CustomCall<'_>, x: &[f32], out: &mut [f32]) -> Result<(), CustomOpError>;
}

/// Where in a model an operation stands: on the rows that flow from layer to layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum CustomSite {
    /// Behind the embedding, before the first layer.
    AfterEmbedding,
    /// Behind this layer, counted from 0.
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

/// An operation with its place.
#[derive(Clone, Debug)]
pub struct RegisteredOp {
    /// Where it stands; several of one place run in the order in which they were registered.
    pub site: CustomSite,
    /// What it does.
    pub op: Arc<dyn CustomOp>,
}

/// The same place and the very same operation.
impl PartialEq for RegisteredOp {
    fn eq(&self, other: &Self) -> bool {
        self.site == other.site && Arc::ptr_eq(&self.op, &other.op)
    }
}
