//! What a caller may ask of the compiler, and what it may answer.
//!
//! [`CompileOptions::opt_level`] sets the single knobs; a knob that is given wins over it. Nothing is ignored: an unknown
//! key, a value out of range, or a promise that this version cannot keep is refused with the reason.

pub(super) mod parse;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::AttentionSchedules;

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

/// What activations are rounded to where they enter a product with weights. Sums, norms, rotation, softmax and logits are
/// f32 in all of them; what keys and values are stored in is `kv_dtype`'s business.
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
    /// int8 in blocks of 32 in front of integer weights; bfloat16 in front of bf16 weights where the device multiplies these
    /// faster than f32; f32 in front of all others.
    Mix,
}

/// What happens to a row with a value that is too large for the type it is stored in. Devices that clamp make
/// such a value the largest there is and count it in every policy; on others it becomes infinite. A row whose logits or last
/// sums are not finite is never sampled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum OverflowPolicy {
    /// The request ends with a typed error, for stored keys and values as well.
    Error,
    /// The clamped value is used.
    Clamp,
    /// From its first bad row on the sequence runs with f32 activations; the type of its keys and values stays, and these
    /// are clamped. Rows that are not finite then end the request with a typed error.
    #[default]
    RetryF32,
}

impl OverflowPolicy {
    /// As files spell it.
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
/// All of them give the same bits.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct CompileOptions {
    /// Preset over the other options, 0 to 3; `None` = 2.
    #[serde(deserialize_with = "parse::opt_level", skip_serializing_if = "Option::is_none")]
    pub opt_level: Option<u8>,
    /// Fusion by pattern; `None` = what `opt_level` says. Each level has those below it:
    ///
    /// - 0: one operation a node.
    /// - 1: add + norm inside a layer, head norm + rope, rope + KV write, activation · up.
    /// - 2: shared-input projections, gated MLP + down projection, norm + quantize.
    /// - 3: a layer's last add + the next layer's first norm (the last layer's add stays alone: only the wanted rows of its
    ///   sum are normed); the arg-max in the output projection; attention's loop orders by length.
    ///
    /// Files may also say `fusion_level` or `enable_fusion`, and `"none"` for 0 and `"all"` for 3.
    #[serde(
        alias = "fusion_level",
        alias = "enable_fusion",
        deserialize_with = "parse::fusion",
        skip_serializing_if = "Option::is_none"
    )]
    pub fusion: Option<u8>,
    /// Whether values that are never alive together may share bytes of the arena; `None` = what `opt_level` says. Off, every
    /// value has its own room: what to try when an answer looks clobbered.
    #[serde(deserialize_with = "parse::memory_reuse", skip_serializing_if = "Option::is_none")]
    pub memory_reuse: Option<bool>,
    /// Most operations that run side by side, 1 to 4; `None` = what `opt_level` says. Operations with no path between them
    /// go on different lanes: streams where a device has them, one barrier for several on the CPU.
    #[serde(deserialize_with = "parse::parallel_ops", skip_serializing_if = "Option::is_none")]
    pub parallel_ops: Option<u8>,
    /// What activations are rounded to; `None` = `f32` with numerics `exact`, `mix` with `fast`. Numerics `exact` takes
    /// `f32` only.
    #[serde(deserialize_with = "parse::precision", skip_serializing_if = "Option::is_none")]
    pub precision: Option<Precision>,
    /// Exceptions by projection: `q_proj`, `layers.3.mlp.down_proj`, `lm_head`. A name that is no projection's is refused.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub precision_overrides: BTreeMap<String, Precision>,
    /// What happens to a row that overflows the type it is stored in; `None` = the best the device has: `retry_f32` where it
    /// runs plans with f32 activations, else `error`. A policy that the device cannot honour is refused.
    #[serde(deserialize_with = "parse::overflow", skip_serializing_if = "Option::is_none")]
    pub overflow: Option<OverflowPolicy>,
    /// Visible lengths up to which attention walks a row at once, and in two passes; in force at fusion level 3.
    pub attention: AttentionSchedules,
    /// Numbers of rows that plans are made for, ascending; the largest step gets one in any case. `None` = what the device
    /// wants: one plan for all where shapes are free, a ladder (1, 2, 4, 8, 16, then each 8 up to 64, then doubling) where
    /// they are not. A batch runs in the smallest that holds its rows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_buckets: Option<Vec<u32>>,
}

impl CompileOptions {
    /// Highest fusion level implemented.
    pub const MAX_FUSION: u8 = 3;
    /// Highest preset.
    pub const MAX_OPT_LEVEL: u8 = 3;
    /// The preset of options that name none.
    pub const DEFAULT_OPT_LEVEL: u8 = 2;

    /// Most operations that can run side by side.
    pub const MAX_PARALLEL_OPS: u8 = 4;
    /// Most plans for numbers of rows.
    pub const MAX_BUCKETS: usize = 64;

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

    /// Operations side by side: what the knob says, else the preset.
    pub fn resolved_parallel_ops(&self) -> u8 {
        self.parallel_ops.unwrap_or(if self.resolved_opt_level() >= 3 { Self::MAX_PARALLEL_OPS } else { 1 })
    }

    /// The precision in force where no exception says otherwise.
    pub fn resolved_precision(&self, numerics: Numerics) -> Precision {
        self.precision.unwrap_or(match numerics {
            Numerics::Exact => Precision::F32,
            Numerics::Fast => Precision::Mix,
        })
    }

    /// The overflow policy in force; none given is `retry_f32`, unless whoever knows the device has settled it.
    pub fn resolved_overflow(&self) -> OverflowPolicy {
        self.overflow.unwrap_or_default()
    }

    /// The same options with f32 activations everywhere: what sequences that overflowed go on with.
    #[must_use]
    pub fn with_f32_activations(&self) -> Self {
        Self { precision: Some(Precision::F32), precision_overrides: BTreeMap::new(), ..self.clone() }
    }

    /// Refuses values out of range, and narrow activations with numerics `exact`.
    ///
    /// # Errors
    /// [`CompileError::Option`] names the option, its value and what would be right.
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
                return refuse("token_buckets", format!("{buckets:?}"), "1 to 64 numbers of rows, ascending from 1 on");
            }
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
    /// The model cannot be cut into so many ranks.
    #[error("cannot cut the model into {ranks} ranks: {what}")]
    Shard {
        /// How many.
        ranks: u32,
        /// What cannot be cut.
        what: String,
    },
    /// A custom operation refuses the model, or has no place in it.
    #[error("custom operation {name}: {reason}")]
    Custom {
        /// Its name.
        name: String,
        /// Why.
        reason: String,
    },
    /// The graph or plan breaks one of its own rules.
    #[error("invalid plan: {0}")]
    Invalid(String),
    /// The device failed while it prepared the program.
    #[error("the device failed while loading: {reason}")]
    Device {
        /// Its own words.
        reason: String,
    },
    /// No room for the program's own buffers.
    #[error("no memory for the program: {0}")]
    Memory(ArenaTooLarge),
}

/// An arena, or other room of a program, that does not fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an arena of {bytes} bytes cannot be allocated, {free_bytes} are free")]
pub struct ArenaTooLarge {
    /// Its size.
    pub bytes: u64,
    /// Bytes free, as far as known.
    pub free_bytes: u64,
}
