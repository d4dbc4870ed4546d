//! What a caller may ask of the compiler, and what it may answer.
//!
//! [`CompileOptions::opt_level`] sets the single knobs; a knob that is given wins over it. Nothing is ignored: an unknown
//! key, a value out of range, or a promise that this version cannot keep is refused with the reason.

use serde::{Deserialize, Serialize};

use super::option_values;

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

/// Types that values are stored in, by the name the option `precision` gives them. [`Numerics`] decides; this can only
/// state what is expected of it. `f16` and `bf16` activations are not implemented.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Precision {
    /// f32 throughout: [`Numerics::Exact`].
    F32,
    /// Narrow storage with sums, norms, softmax and logits in f32: [`Numerics::Fast`].
    Mix,
}

/// Options of the graph compiler. Start from `default()` and assign fields.
///
/// | `opt_level` | fusion | memory reuse |
/// |---|---|---|
/// | 0 | 0 | off |
/// | 1 | 1 | on |
/// | 2 (default) | 2 | on |
/// | 3 | 3 | on |
///
/// All of them give the same bits.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct CompileOptions {
    /// Preset over the other options, 0 to 3; `None` = 2.
    #[serde(deserialize_with = "option_values::opt_level", skip_serializing_if = "Option::is_none")]
    pub opt_level: Option<u8>,
    /// Fusion by pattern; `None` = what `opt_level` says. Each level has those below it:
    ///
    /// - 0: one operation a node.
    /// - 1: add + norm inside a layer, head norm + rope, rope + KV write, activation · up.
    /// - 2: shared-input projections, gated MLP + down projection, norm + quantise.
    /// - 3: a layer's last add + the next layer's first norm. The last layer's add stays alone: only the wanted rows of its
    ///   sum are normed. An arg-max inside the output projection and attention schedules by length, which others count
    ///   under this level, are not implemented.
    ///
    /// Files may also say `fusion_level` or `enable_fusion`, and `"none"` for 0 and `"all"` for 3.
    #[serde(
        alias = "fusion_level",
        alias = "enable_fusion",
        deserialize_with = "option_values::fusion",
        skip_serializing_if = "Option::is_none"
    )]
    pub fusion: Option<u8>,
    /// Whether values that are never alive together may share bytes of the arena; `None` = what `opt_level` says. Off, every
    /// value has its own room: what to try when an answer looks clobbered.
    #[serde(deserialize_with = "option_values::memory_reuse", skip_serializing_if = "Option::is_none")]
    pub memory_reuse: Option<bool>,
    /// Independent branches that run side by side. Lanes are not implemented: only 1 (or `None`) is accepted.
    #[serde(deserialize_with = "option_values::parallel_ops", skip_serializing_if = "Option::is_none")]
    pub parallel_ops: Option<u8>,
    /// What the numerics are expected to be; refused where they are not. `None` = whatever they are.
    #[serde(deserialize_with = "option_values::precision", skip_serializing_if = "Option::is_none")]
    pub precision: Option<Precision>,
}

impl CompileOptions {
    /// Highest fusion level implemented.
    pub const MAX_FUSION: u8 = 3;
    /// Highest preset.
    pub const MAX_OPT_LEVEL: u8 = 3;
    /// The preset of options that name none.
    pub const DEFAULT_OPT_LEVEL: u8 = 2;

    /// A preset with no knob of its own.
    pub fn preset(opt_level: u8) -> Self {
        Self { opt_level: Some(opt_level), ..Self::default() }
    }

    /// The preset in force.
    pub fn resolved_opt_level(&self) -> u8 {
        self.opt_level.unwrap_or(Self::DEFAULT_OPT_LEVEL)
    }

    /// The fusion level in force: the knob's, else the preset's.
    pub fn resolved_fusion(&self) -> u8 {
        // The presets of fusion are numbered as its levels.
        self.fusion.unwrap_or_else(|| self.resolved_opt_level())
    }

    /// Whether the arena is shared over time: what the knob says, else the preset.
    pub fn resolved_memory_reuse(&self) -> bool {
        self.memory_reuse.unwrap_or_else(|| self.resolved_opt_level() > 0)
    }

    /// Refuses values out of range, what is not implemented, and a precision that `numerics` does not give.
    ///
    /// # Errors
    /// [`CompileError::Option`] names the option, its value and what would be right.
    pub fn validate(&self, numerics: Numerics) -> Result<(), CompileError> {
        option_values::check("opt_level", self.opt_level)?;
        option_values::check("fusion", self.fusion)?;
        option_values::check("parallel_ops", self.parallel_ops)?;
        let expected = match (self.precision, numerics) {
            (Some(Precision::F32), Numerics::Fast) => "mix, or numerics `exact`",
            (Some(Precision::Mix), Numerics::Exact) => "f32, or numerics `fast`",
            _ => return Ok(()),
        };
        let value = if self.precision == Some(Precision::F32) { "f32" } else { "mix" };
        Err(CompileError::Option { option: "precision", value: value.to_owned(), expected })
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
