//! Compile options, and the errors of the compiler.
//!
//! [`CompileOptions::opt_level`] is a preset for the other options; an option that is set overrides it. Nothing is
//! ignored: an unknown key, a value out of range, or a setting that this version does not support is refused with the
//! reason.

pub(super) mod parse;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::AttentionSchedules;

/// Numerical fidelity of a device's computation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Numerics {
    /// f32 activations and f32 KV cache. Golden tests use it.
    Exact,
    /// int8 activations for integer weights and 16-bit KV cache: within a bound on perplexity, and as deterministic as
    /// `Exact`.
    #[default]
    Fast,
}

/// Type that activations are rounded to before a product with weights. Sums, norms, rotation, softmax and logits are
/// always f32; `kv_dtype` determines the type of keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Precision {
    /// f32 throughout.
    F32,
    /// bfloat16: 8 bits of precision, the range of f32.
    BF16,
    /// Half precision: 11 bits, at most 65,504 (see [`OverflowPolicy`]).
    F16,
    /// int8 in blocks of 32 before integer weights; bfloat16 before bf16 weights if the device multiplies bfloat16
    /// faster than f32; f32 before all others.
    Mix,
}

/// Policy for a row with a value that is too large for its type. Devices that saturate replace such a value by the
/// largest one of the type and count it under every policy; on others it becomes infinite. A row whose logits or final
/// hidden state are not finite is never sampled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum OverflowPolicy {
    /// The request ends with a typed error, also for stored keys and values.
    Error,
    /// The clamped value is used.
    Clamp,
    /// From its first overflowing row on, the sequence runs with f32 activations. The type of its keys and values does
    /// not change, so these are clamped. Rows that are not finite even then end the request with a typed error.
    #[default]
    RetryF32,
}

impl OverflowPolicy {
    /// Name used in files.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Clamp => "clamp",
            Self::RetryF32 => "retry_f32",
        }
    }
}

/// Options of the graph compiler. Start from `default()` and assign fields.
///
/// | `opt_level` | fusion | memory reuse | parallel operations |
/// |---|---|---|---|
/// | 0 | 0 | off | 1 |
/// | 1 | 1 | on | 1 |
/// | 2 (default) | 2 | on | 1 |
/// | 3 | 3 | on | 4 |
///
/// All levels give the same bits.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct CompileOptions {
    /// Preset for the other options, 0 to 3; `None` = 2.
    #[serde(deserialize_with = "parse::opt_level", skip_serializing_if = "Option::is_none")]
    pub opt_level: Option<u8>,
    /// Fusion level; `None` = that of `opt_level`. Each level includes those below it:
    ///
    /// - 0: one operation per node.
    /// - 1: add + norm inside a layer, head norm + rope, rope + KV write, activation · up.
    /// - 2: shared-input projections, gated MLP + down projection, norm + quantize.
    /// - 3: a layer's last add + the next layer's first norm (except after the last layer, where only the requested
    ///   rows of the
    ///   sum are normed); the argmax in the output projection; attention's loop orders by length.
    ///
    /// Files may also use the names `fusion_level` or `enable_fusion`, and `"none"` for 0 and `"all"` for 3.
    #[serde(
        alias = "fusion_level",
        alias = "enable_fusion",
        deserialize_with = "parse::fusion",
        skip_serializing_if = "Option::is_none"
    )]
    pub fusion: Option<u8>,
    /// Whether values that are never alive at the same time may share bytes of the arena; `None` = that of `opt_level`.
    /// If off, each value has its own bytes, which helps to find a wrong overlap.
    #[serde(deserialize_with = "parse::memory_reuse", skip_serializing_if = "Option::is_none")]
    pub memory_reuse: Option<bool>,
    /// Maximum number of operations that run concurrently, 1 to 4; `None` = that of `opt_level`. Independent operations
    /// go to different streams: streams of the device if it has them, one barrier for several operations on the CPU.
    #[serde(deserialize_with = "parse::parallel_ops", skip_serializing_if = "Option::is_none")]
    pub parallel_ops: Option<u8>,
    /// Type that activations are rounded to; `None` = `f32` with numerics `exact`, `mix` with `fast`. Numerics `exact`
    /// accepts `f32` only.
    #[serde(deserialize_with = "parse::precision", skip_serializing_if = "Option::is_none")]
    pub precision: Option<Precision>,
    /// Exceptions by projection: `q_proj`, `layers.3.mlp.down_proj`, `lm_head`. An unknown name is refused.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub precision_overrides: BTreeMap<String, Precision>,
    /// Policy for a row that overflows its type; `None` = the preferred one of the device: `retry_f32` if it runs plans
    /// with f32 activations, else `error`. A policy that the device does not support is refused.
    #[serde(deserialize_with = "parse::overflow", skip_serializing_if = "Option::is_none")]
    pub overflow: Option<OverflowPolicy>,
    /// Visible lengths up to which attention uses the full and the partial loop order; used at fusion level 3.
    pub attention: AttentionSchedules,
    /// Row counts of the compiled plans, ascending; a plan for the largest step is always added. `None` = the device's
    /// preference: one plan if shapes are dynamic, else 1, 2, 4, 8, 16, then steps of 8 up to 64, then powers of two. A
    /// batch runs in the smallest plan that has its number of rows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_buckets: Option<Vec<u32>>,
}

impl CompileOptions {
    /// Highest fusion level implemented.
    pub const MAX_FUSION: u8 = 3;
    /// Highest preset.
    pub const MAX_OPT_LEVEL: u8 = 3;
    /// Preset used by default.
    pub const DEFAULT_OPT_LEVEL: u8 = 2;

    /// Largest number of concurrent operations.
    pub const MAX_PARALLEL_OPS: u8 = 4;
    /// Largest number of token buckets.
    pub const MAX_BUCKETS: usize = 64;

    /// Options of a preset, without overrides.
    pub fn preset(opt_level: u8) -> Self {
        Self { opt_level: Some(opt_level), ..Self::default() }
    }

    /// Preset in effect.
    pub fn resolved_opt_level(&self) -> u8 {
        self.opt_level.unwrap_or(Self::DEFAULT_OPT_LEVEL)
    }

    /// Fusion level in effect: the option, or else the preset.
    pub fn resolved_fusion(&self) -> u8 {
        // A preset's number is also its fusion level.
        self.fusion.unwrap_or_else(|| self.resolved_opt_level())
    }

    /// Memory reuse in effect: the option, or else the preset.
    pub fn resolved_memory_reuse(&self) -> bool {
        self.memory_reuse.unwrap_or_else(|| self.resolved_opt_level() > 0)
    }

    /// Number of concurrent operations in effect: the option, or else the preset.
    pub fn resolved_parallel_ops(&self) -> u8 {
        self.parallel_ops.unwrap_or(if self.resolved_opt_level() >= 3 { Self::MAX_PARALLEL_OPS } else { 1 })
    }

    /// Precision of projections without an exception.
    pub fn resolved_precision(&self, numerics: Numerics) -> Precision {
        self.precision.unwrap_or(match numerics {
            Numerics::Exact => Precision::F32,
            Numerics::Fast => Precision::Mix,
        })
    }

    /// Overflow policy in effect: the option, or else `retry_f32`, unless the builder has resolved it for the device.
    pub fn resolved_overflow(&self) -> OverflowPolicy {
        self.overflow.unwrap_or_default()
    }

    /// Copy of the options with f32 activations everywhere, for the f32 fallback plan.
    #[must_use]
    pub fn with_f32_activations(&self) -> Self {
        Self { precision: Some(Precision::F32), precision_overrides: BTreeMap::new(), ..self.clone() }
    }

    /// Checks the ranges, and refuses narrow activations with numerics `exact`.
    ///
    /// # Errors
    /// [`CompileError::Option`] names the option, its value and the accepted values.
    pub fn validate(&self, numerics: Numerics) -> Result<(), CompileError> {
        parse::check("opt_level", self.opt_level)?;
        parse::check("fusion", self.fusion)?;
        parse::check("parallel_ops", self.parallel_ops)?;
        let refuse = |option, value: String, expected| Err(CompileError::Option { option, value, expected });
        let narrow = |precision: &Precision| numerics == Numerics::Exact && *precision != Precision::F32;
        if let Some(precision) = self.precision.filter(narrow) {
            return refuse("precision", format!("{precision:?}").to_lowercase(), "f32, or numerics `fast`");
        }
        if let Some((name, precision)) = self.precision_overrides.iter().find(|(_, precision)| narrow(precision)) {
            let value = format!("{name}: {precision:?}").to_lowercase();
            return refuse("precision_overrides", value, "f32, or numerics `fast`");
        }
        let AttentionSchedules { full_max, partial_max } = self.attention;
        if full_max > partial_max {
            let value = format!("full_max {full_max} above partial_max {partial_max}");
            return refuse("attention", value, "full_max of at most partial_max");
        }
        if !self.attention.is_valid() {
            return refuse("attention", format!("partial_max {partial_max}"), "a partial_max of at most 65536 tokens");
        }
        if let Some(buckets) = &self.token_buckets {
            let ascending = buckets.first().is_some_and(|first| *first > 0) && buckets.is_sorted_by(|a, b| a < b);
            if !ascending || buckets.len() > Self::MAX_BUCKETS {
                return refuse("token_buckets", format!("{buckets:?}"), "1 to 64 row counts, ascending, at least 1");
            }
        }
        Ok(())
    }
}

/// Why a graph could not be compiled or loaded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CompileError {
    /// An option has an unsupported value.
    #[error("compile option {option}: got {value}, expected {expected}")]
    Option {
        /// Name of the option.
        option: &'static str,
        /// The given value.
        value: String,
        /// The accepted values.
        expected: &'static str,
    },
    /// The device cannot run an operation.
    #[error("the device cannot run {op}: {reason}")]
    Unsupported {
        /// Name of the operation.
        op: &'static str,
        /// Reason why it is not supported.
        reason: String,
    },
    /// The model cannot be sharded over this number of ranks.
    #[error("cannot shard the model over {ranks} ranks: {what}")]
    Shard {
        /// Number of ranks.
        ranks: u32,
        /// The part that cannot be sharded.
        what: String,
    },
    /// A custom operation does not support the model, or its position does not exist.
    #[error("custom operation {name}: {reason}")]
    Custom {
        /// Name of the operation.
        name: String,
        /// Reason why it is refused.
        reason: String,
    },
    /// The graph or plan violates an invariant.
    #[error("invalid plan: {0}")]
    Invalid(String),
    /// The device failed while it prepared the program.
    #[error("the device failed while loading: {reason}")]
    Device {
        /// The device's error message.
        reason: String,
    },
    /// The buffers of the program do not fit into memory.
    #[error("not enough memory for the program: {0}")]
    Memory(ArenaTooLarge),
}

/// An arena, or another buffer of a program, that does not fit into memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot allocate an arena of {bytes} bytes: {free_bytes} bytes are free")]
pub struct ArenaTooLarge {
    /// Size of the buffer.
    pub bytes: u64,
    /// Free memory in bytes; 0 if unknown.
    pub free_bytes: u64,
}
