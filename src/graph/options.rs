//! What a caller may ask of the compiler, and what it may answer.

use serde::{Deserialize, Serialize};

/// How faithfully a device computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Numerics {
    /// f32 activations and f32 KV; sums always in f32. What golden tests use.
    Exact,
    /// int8 activations for integer weights and 16-bit KV: held to a bound on perplexity, and to the same determinism.
    #[default]
    Fast,
}

/// Options of the graph compiler. Unknown keys are refused, as are values that do not act.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct CompileOptions {
    /// Fusion by pattern: 0 one operation a node; 1 add + norm inside a layer, head norm + rope, rope + KV write,
    /// activation · up; 2 also shared-input projections, gated MLP + down projection, norm + quantise.
    #[serde(alias = "fusion_level")]
    pub fusion: u8,
}

impl Default for CompileOptions {
    fn default() -> Self {
        Self { fusion: 2 }
    }
}

impl CompileOptions {
    /// Highest fusion level implemented.
    pub const MAX_FUSION: u8 = 2;

    /// Refuses values that do nothing.
    pub fn validate(&self) -> Result<(), CompileError> {
        if self.fusion > Self::MAX_FUSION {
            return Err(CompileError::Option {
                option: "fusion",
                value: self.fusion.to_string(),
                expected: "a level from 0 to 2",
            });
        }
        Ok(())
    }
}

/// Why a graph could not become a plan or a program.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CompileError {
    /// An option outside what is implemented.
    #[error("compile option {option}: got {value}, expected {expected}")]
    Option {
        /// The option.
        option: &'static str,
        /// What was given.
        value: String,
        /// What would be right.
        expected: &'static str,
    },
    /// The device cannot run an operation.
    #[error("the device cannot run {op}: {reason}")]
    Unsupported {
        /// The operation.
        op: &'static str,
        /// Why not.
        reason: String,
    },
    /// The graph or plan breaks one of its own rules.
    #[error("invalid plan: {0}")]
    Invalid(String),
    /// No room for the program's own buffers.
    #[error("no memory for the program")]
    Memory(#[source] ArenaTooLarge),
}

/// An arena that does not fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an arena of {bytes} bytes cannot be allocated")]
pub struct ArenaTooLarge {
    /// Its size.
    pub bytes: u64,
}
