//! Configuration of an engine: limits, memory budget, scheduling.
//!
//! [`EngineConfig`] is plain data that is checked once, when the engine is built. Every field has an effect. A value
//! out of range is an error; no value is clamped. An unknown key in a configuration file is an error too.

use crate::num::to_u32;
use serde::{Deserialize, Serialize};

use crate::graph::{CompileError, CompileOptions, Numerics};
use crate::kv_cache::KvDType;
use crate::sampler::ParamError;
use crate::scheduler::SchedulePolicy;
use crate::settings::{deserialize_settings, with_methods};

/// Maximum number of in-flight steps. The second step hides the host's work; the third also hides its variance. Further
/// steps would only add wasted rows.
pub(crate) const MAX_PIPELINE_DEPTH: u32 = 3;

/// Memory budget of the KV cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum CacheBudget {
    /// This number of blocks.
    Blocks(u32),
    /// As many whole blocks as fit in this number of bytes.
    Bytes(u64),
    /// As much as the free memory allows, at most `max_num_seqs` sequences of `max_model_len` tokens.
    ///
    /// A device that shares the host's memory uses at most a quarter of the host's available memory. A device with
    /// memory of its own uses the memory that weights and programs leave free, minus a tenth of the memory that was
    /// free at the start. If the device then runs out of memory, the pool gets half as many blocks, or fewer.
    #[default]
    Auto,
}

/// Configuration of an engine; start from `default()` and set fields.
///
/// The keys in JSON are the names of the fields. Absent fields keep their defaults, and unknown keys are errors.
///
/// ```
/// # use ascend_llm::EngineConfig;
/// let config = EngineConfig::default().with_max_num_seqs(32).with_max_model_len(4096);
/// let same: EngineConfig = serde_json::from_str(r#"{"max_num_seqs": 32, "max_model_len": 4096}"#).unwrap();
/// assert_eq!(config, same);
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct EngineConfig {
    /// Token budget of a step: maximum number of rows, prefill and decode together.
    ///
    /// If a device with memory of its own runs out of memory while the model is loaded, the engine may halve this
    /// value. It then adds a note to [`EngineInfo::notes`](super::EngineInfo::notes).
    pub max_num_batched_tokens: u32,
    /// Maximum number of sequences in a step; a request of `n` choices counts as `n` sequences.
    pub max_num_seqs: u32,
    /// Maximum length of a sequence, prompt and output together; `None` = the model's own limit.
    pub max_model_len: Option<u32>,
    /// Number of tokens per KV block, a multiple of 16; `None` = the device's default.
    pub block_size: Option<u32>,
    /// Memory budget of the KV cache.
    pub kv_cache: CacheBudget,
    /// Data type of stored keys and values.
    ///
    /// `None` = the device's choice for the model's weights, otherwise the type of `numerics`: `f32` for `exact`, `f16`
    /// for `fast`. Types other than `f32` require the numerics `fast`. `i8` needs about half of the memory of `f16` and
    /// is never the default.
    pub kv_dtype: Option<KvDType>,
    /// Arithmetic of the device. Both modes are batch-invariant: results do not depend on the other sequences of a
    /// batch.
    pub numerics: Numerics,
    /// Options of the graph compiler.
    pub compile: CompileOptions,
    /// Number of ranks that the model is sharded over (tensor parallelism).
    ///
    /// A device of several cards requires exactly the number of cards that it was opened with. On the CPU, one thread
    /// pool computes all ranks. Outputs are the same in all runs with the same number of ranks, and within rounding of
    /// the outputs with any other number.
    pub tensor_parallel_size: u32,
    /// Whether the prefix cache is enabled: it keeps computed prompts and shares them among requests.
    pub prefix_caching: bool,
    /// Order in which waiting requests are scheduled.
    pub policy: SchedulePolicy,
    /// Maximum number of requests that wait for their first step; more are rejected with `SubmitError::QueueFull`.
    pub max_queue: u32,
    /// Maximum number of log-probabilities per token that a request may ask for.
    pub max_logprobs: u32,
    /// Seed from which the seeds of requests without their own seed are derived.
    pub seed: u64,
    /// Maximum number of in-flight steps, 1 to 3; `None` = the device's default (1 on the CPU).
    ///
    /// With 1, each step ends before the next one is planned. With a larger number (async scheduling), the next steps
    /// are planned and launched while one is running. The tokens of greedy requests are then deferred tokens, which the
    /// device copies from step to step. When a request stops, at most `pipeline_depth - 1` of its rows are wasted. The
    /// outputs are the same. On a device that computes inline, such as the CPU, a larger number only changes the order
    /// of the work.
    pub pipeline_depth: Option<u32>,
    /// Number of threads of the CPU device; `None` = the number of cores that this process may use.
    pub threads: Option<usize>,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            // vLLM's defaults for online serving: 2048 rows keep a mixed step short, and 256 sequences fill a step with
            // decodes.
            max_num_batched_tokens: 2048,
            max_num_seqs: 256,
            max_model_len: None,
            block_size: None,
            kv_cache: CacheBudget::Auto,
            kv_dtype: None,
            numerics: Numerics::Fast,
            compile: CompileOptions::default(),
            tensor_parallel_size: 1,
            prefix_caching: true,
            policy: SchedulePolicy::Fcfs,
            // Four full batches: in a longer queue, a request would wait longer than it runs.
            max_queue: 1024,
            // vLLM's default.
            max_logprobs: 20,
            seed: 0,
            pipeline_depth: None,
            threads: None,
        }
    }
}

impl EngineConfig {
    with_methods! {
        value {
            max_num_batched_tokens with_max_num_batched_tokens: u32,
            max_num_seqs with_max_num_seqs: u32,
            kv_cache with_kv_cache: CacheBudget,
            numerics with_numerics: Numerics,
            compile with_compile: CompileOptions,
            tensor_parallel_size with_tensor_parallel_size: u32,
            prefix_caching with_prefix_caching: bool,
            policy with_policy: SchedulePolicy,
            max_queue with_max_queue: u32,
            max_logprobs with_max_logprobs: u32,
            seed with_seed: u64,
        }
        option {
            max_model_len with_max_model_len: u32,
            block_size with_block_size: u32,
            kv_dtype with_kv_dtype: KvDType,
            pipeline_depth with_pipeline_depth: u32,
            threads with_threads: usize,
        }
    }

    /// Sets an unset `max_model_len` to `longest`, the model's own limit, and returns the value in force.
    ///
    /// # Errors
    /// [`ParamError`] if `max_model_len` is not in `2..=longest`.
    pub(super) fn resolve_max_model_len(&mut self, longest: u32) -> Result<u32, ParamError> {
        let len = *self.max_model_len.get_or_insert(longest);
        if !(2..=longest).contains(&len) {
            let expected = format!("a value in 2..={longest}; {longest} is the model's own limit");
            return Err(ParamError::new("max_model_len", len, expected));
        }
        Ok(len)
    }

    /// Checks every field that can be checked without a model.
    ///
    /// # Errors
    /// [`ParamError`] for the first field that is out of range or contradicts another field.
    pub fn validate(&self) -> Result<(), ParamError> {
        at_least("max_num_seqs", self.max_num_seqs, 1)?;
        if self.max_num_batched_tokens < self.max_num_seqs {
            return Err(ParamError::new(
                "max_num_batched_tokens",
                self.max_num_batched_tokens,
                format!(
                    "at least max_num_seqs ({}), so that each step has a row for every sequence",
                    self.max_num_seqs
                ),
            ));
        }
        if let Some(len) = self.max_model_len {
            at_least("max_model_len", len, 2)?;
        }
        if let Some(size) = self.block_size
            && (size == 0 || size % 16 != 0)
        {
            return Err(ParamError::new("block_size", size, "a multiple of 16".to_owned()));
        }
        match self.kv_cache {
            CacheBudget::Blocks(blocks) => at_least("kv_cache.blocks", blocks, 1)?,
            CacheBudget::Bytes(0) => return Err(ParamError::new("kv_cache.bytes", 0, "at least one block".to_owned())),
            CacheBudget::Bytes(_) | CacheBudget::Auto => {}
        }
        if self.numerics == Numerics::Exact
            && let Some(dtype) = self.kv_dtype
            && dtype != KvDType::F32
        {
            return Err(ParamError::new("kv_dtype", format!("{dtype:?}"), "F32 with numerics `exact`".to_owned()));
        }
        self.compile.validate(self.numerics).map_err(|error| from_compile_error(&error))?;
        at_least("tensor_parallel_size", self.tensor_parallel_size, 1)?;
        at_least("max_queue", self.max_queue, 1)?;
        if let Some(depth) = self.pipeline_depth
            && !(1..=MAX_PIPELINE_DEPTH).contains(&depth)
        {
            return Err(ParamError::new("pipeline_depth", depth, format!("1..={MAX_PIPELINE_DEPTH}")));
        }
        if let Some(threads) = self.threads {
            at_least("threads", to_u32(threads), 1)?;
        }
        Ok(())
    }
}

deserialize_settings!(EngineConfig {
    max_num_batched_tokens,
    max_num_seqs,
    max_model_len,
    block_size,
    kv_cache,
    kv_dtype,
    numerics,
    compile,
    tensor_parallel_size,
    prefix_caching,
    policy,
    max_queue,
    max_logprobs,
    seed,
    pipeline_depth,
    threads,
});

fn at_least(field: &'static str, value: u32, least: u32) -> Result<(), ParamError> {
    if value < least { Err(ParamError::new(field, value, format!("at least {least}"))) } else { Ok(()) }
}

/// Converts an error of the compiler's options to an error of a field of this configuration.
fn from_compile_error(error: &CompileError) -> ParamError {
    let CompileError::Option { option, value, expected } = error else {
        return ParamError::new("compile", error, "valid compiler options".to_owned());
    };
    let field = match *option {
        "opt_level" => "compile.opt_level",
        "fusion" => "compile.fusion",
        "parallel_ops" => "compile.parallel_ops",
        "precision" => "compile.precision",
        "precision_overrides" => "compile.precision_overrides",
        "attention" => "compile.attention",
        "token_buckets" => "compile.token_buckets",
        other => other,
    };
    ParamError::new(field, value, (*expected).to_owned())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::graph::Precision;

    fn refused(change: impl FnOnce(&mut EngineConfig)) -> &'static str {
        let mut config = EngineConfig::default();
        change(&mut config);
        config.validate().expect_err("must be refused").field
    }

    #[test]
    fn defaults_are_valid_and_survive_serde() {
        let config = EngineConfig::default();
        config.validate().unwrap();
        let json = serde_json::to_string(&config).unwrap();
        assert_eq!(serde_json::from_str::<EngineConfig>(&json).unwrap(), config);
        assert_eq!(serde_json::from_str::<EngineConfig>("{}").unwrap(), config);
    }

    #[test]
    fn each_bad_field_is_named() {
        assert_eq!(refused(|c| c.max_num_seqs = 0), "max_num_seqs");
        assert_eq!(refused(|c| c.max_num_batched_tokens = 255), "max_num_batched_tokens");
        assert_eq!(refused(|c| c.max_model_len = Some(1)), "max_model_len");
        assert_eq!(refused(|c| c.block_size = Some(0)), "block_size");
        assert_eq!(refused(|c| c.block_size = Some(24)), "block_size");
        assert_eq!(refused(|c| c.kv_cache = CacheBudget::Blocks(0)), "kv_cache.blocks");
        assert_eq!(refused(|c| c.kv_cache = CacheBudget::Bytes(0)), "kv_cache.bytes");
        assert_eq!(refused(|c| c.compile.opt_level = Some(4)), "compile.opt_level");
        assert_eq!(refused(|c| c.compile.fusion = Some(4)), "compile.fusion");
        assert_eq!(refused(|c| c.compile.parallel_ops = Some(5)), "compile.parallel_ops");
        assert_eq!(refused(|c| c.compile.attention.full_max = 4096), "compile.attention");
        assert_eq!(refused(|c| c.compile.attention.partial_max = 1 << 20), "compile.attention");
        assert_eq!(refused(|c| c.compile.token_buckets = Some(vec![8, 8])), "compile.token_buckets");
        let exactly = |precision| refused(|c| (c.numerics, c.compile.precision) = (Numerics::Exact, Some(precision)));
        assert_eq!(exactly(Precision::BF16), "compile.precision");
        assert_eq!(exactly(Precision::Mix), "compile.precision");
        let narrow = BTreeMap::from([("q_proj".to_owned(), Precision::F16)]);
        let field = refused(|c| (c.numerics, c.compile.precision_overrides) = (Numerics::Exact, narrow));
        assert_eq!(field, "compile.precision_overrides");
        assert_eq!(refused(|c| c.tensor_parallel_size = 0), "tensor_parallel_size");
        assert_eq!(refused(|c| c.max_queue = 0), "max_queue");
        assert_eq!(refused(|c| c.pipeline_depth = Some(0)), "pipeline_depth");
        assert_eq!(refused(|c| c.pipeline_depth = Some(4)), "pipeline_depth");
        assert_eq!(refused(|c| c.threads = Some(0)), "threads");
        assert_eq!(
            refused(|c| {
                c.numerics = Numerics::Exact;
                c.kv_dtype = Some(KvDType::F16);
            }),
            "kv_dtype"
        );
        assert_eq!(refused(|c| (c.numerics, c.kv_dtype) = (Numerics::Exact, Some(KvDType::I8))), "kv_dtype");
    }

    #[test]
    fn types_of_keys_and_values_go_by_their_names() {
        let read = |name: &str| serde_json::from_str::<EngineConfig>(&format!(r#"{{"kv_dtype": "{name}"}}"#));
        for (name, dtype) in
            [("f32", KvDType::F32), ("f16", KvDType::F16), ("bf16", KvDType::BF16), ("i8", KvDType::I8)]
        {
            let config = read(name).unwrap();
            assert_eq!(config.kv_dtype, Some(dtype));
            config.validate().unwrap();
            assert_eq!(serde_json::to_value(&config).unwrap()["kv_dtype"], name);
        }
        assert_eq!(read("int8").unwrap().kv_dtype, Some(KvDType::I8));
        assert!(read("u8").is_err());
    }

    #[test]
    fn unknown_keys_are_refused() {
        let error = serde_json::from_str::<EngineConfig>(r#"{"max_num_seq": 4}"#).unwrap_err();
        assert!(error.to_string().contains("max_num_seq"), "{error}");
    }
}
