//! Configuration of an engine: memory, limits and scheduling, checked once when the engine is built.
//!
//! Each field has an effect. Unknown keys are refused when a configuration is read from a file, and values are not
//! clamped.

use crate::num::to_u32;
use serde::{Deserialize, Serialize};

use crate::graph::{CompileError, CompileOptions, Numerics};
use crate::kv_cache::KvDType;
use crate::sampler::ParamError;
use crate::scheduler::SchedulePolicy;
use crate::settings::{deserialize_settings, with_methods};

/// Maximum pipeline depth: the second step hides the host's work, and the third hides its variation; more would only
/// waste rows.
pub(crate) const MAX_PIPELINE_DEPTH: u32 = 3;

/// Memory for keys and values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum CacheBudget {
    /// That many blocks.
    Blocks(u32),
    /// As many whole blocks as fit into this number of bytes.
    Bytes(u64),
    /// At most the blocks that `max_num_seqs` sequences of `max_model_len` tokens can use.
    ///
    /// Limited to a quarter of the host's free memory or, on a device with memory of its own, to the memory that
    /// weights and programs leave, less a tenth of the whole. If that turns out too large, half as many blocks or
    /// fewer.
    #[default]
    Auto,
}

/// Configuration of an engine; start from `default()` and set fields.
///
/// JSON uses the names of the fields; absent fields keep their defaults and unknown keys are refused.
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
    /// Token budget: maximum number of rows in one step, prefill and decode together.
    ///
    /// A device that runs out of its own memory while the model is loaded uses half as many;
    /// [`EngineInfo::notes`](super::EngineInfo::notes) reports that.
    pub max_num_batched_tokens: u32,
    /// Most sequences in one step; a request of `n` choices counts `n`.
    pub max_num_seqs: u32,
    /// Maximum length of a sequence, prompt and output together; `None` = the limit of the model.
    pub max_model_len: Option<u32>,
    /// Tokens per KV block, a multiple of 16; `None` = the device's preference.
    pub block_size: Option<u32>,
    /// Memory for keys and values.
    pub kv_cache: CacheBudget,
    /// Type of stored keys and values; `None` = the type of `numerics`. Types other than `f32` require the numerics
    /// `fast`; `i8` needs about half the memory of `f16`.
    pub kv_dtype: Option<KvDType>,
    /// Arithmetic of the device. In both modes results do not depend on the other requests of a batch.
    pub numerics: Numerics,
    /// Options of the graph compiler.
    pub compile: CompileOptions,
    /// Number of tensor-parallel ranks.
    ///
    /// A device with several cards requires as many ranks as it has cards; on the CPU one thread pool computes all
    /// ranks. Results are bit-equal for equal numbers of ranks, and agree within rounding otherwise.
    pub tensor_parallel_size: u32,
    /// Whether computed prompts are cached and shared (prefix caching).
    pub prefix_caching: bool,
    /// Order in which waiting requests are admitted.
    pub policy: SchedulePolicy,
    /// Maximum number of queued requests; more are refused with `SubmitError::QueueFull`.
    pub max_queue: u32,
    /// Maximum number of log-probabilities per token that a request may ask for.
    pub max_logprobs: u32,
    /// Seed from which the seeds of requests without their own are derived.
    pub seed: u64,
    /// Maximum number of in-flight steps, 1 to 3; `None` = the device's preference (1 on the CPU).
    ///
    /// With 1, each step ends before the next is planned. With more, the next steps are planned and launched while one
    /// runs, the tokens of greedy requests go from step to step on the device, and up to `pipeline_depth - 1` rows of a
    /// request are wasted when it stops. Outputs are equal at each depth. On a device that computes inline, such as the
    /// CPU, a depth above 1 only changes the order of the work.
    pub pipeline_depth: Option<u32>,
    /// Threads of the CPU device; `None` = the processors that this process may use.
    pub threads: Option<usize>,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            // The defaults of vLLM for online serving: 2048 rows keep a mixed step short, 256 sequences fill it with
            // decode rows.
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
            // Four full batches: beyond that a request waits longer than it runs.
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

    /// Sets `max_model_len` to `longest`, the limit of the model, if it is open, and returns it.
    pub(super) fn resolve_max_model_len(&mut self, longest: u32) -> Result<u32, ParamError> {
        let len = *self.max_model_len.get_or_insert(longest);
        if !(2..=longest).contains(&len) {
            return Err(ParamError::new("max_model_len", len, format!("2..={longest}, the model's own limit")));
        }
        Ok(len)
    }

    /// Checks every field that can be checked without a model.
    pub fn validate(&self) -> Result<(), ParamError> {
        at_least("max_num_seqs", self.max_num_seqs, 1)?;
        if self.max_num_batched_tokens < self.max_num_seqs {
            return Err(ParamError::new(
                "max_num_batched_tokens",
                self.max_num_batched_tokens,
                format!("at least max_num_seqs ({}), so that every sequence gets a row a step", self.max_num_seqs),
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

/// A refused option of the compiler, as a field of this configuration.
fn from_compile_error(error: &CompileError) -> ParamError {
    let CompileError::Option { option, value, expected } = error else {
        return ParamError::new("compile", error, "options that can be compiled with".to_owned());
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
