//! Descriptions that an engine returns: its model, device, limits, health, loading progress and steps.

use serde::Serialize;

use crate::graph::{Cost, Numerics, OverflowPolicy, Plan};
use crate::kv_cache::{KvDType, KvGeometry};
use crate::model::Architecture;
use crate::version::{COMMIT, VERSION};
use crate::weights::DType;

/// Progress of loading a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LoadProgress {
    /// Number of bytes of weights read so far.
    pub done_bytes: u64,
    /// Number of bytes to read: the size of all weights times the number of ranks.
    ///
    /// Each rank reads all weights and keeps its shard.
    pub total_bytes: u64,
    /// Number of buckets that have run their warm-up step, if the engine is warmed up.
    pub warm_buckets: u32,
    /// Number of buckets to warm up.
    pub total_buckets: u32,
}

/// Description of the model, the device and the sizes in force.
///
/// Fields that only a builder can fill are `None`, 0 or empty for an [`EngineCore`](super::EngineCore) that was
/// assembled from parts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct EngineInfo {
    /// Version of this crate.
    pub version: &'static str,
    /// Commit that the crate was built from: 12 digits, then `-dirty` if files differed from it. `None` if unknown.
    pub commit: Option<&'static str>,
    /// Architecture of the model.
    pub architecture: Option<Architecture>,
    /// Number of parameters of the model.
    pub parameters: u64,
    /// Data type in which most elements of the model's matrices are stored.
    pub weight_dtype: Option<DType>,
    /// Size of the model's vocabulary.
    pub vocab_size: u32,
    /// Maximum length of a sequence, prompt and output together.
    pub max_model_len: u32,
    /// Short name of the device (`cpu`, `ascend`).
    pub device: Option<&'static str>,
    /// Description of the device for humans: processor, instruction set, threads.
    pub device_description: String,
    /// Notes of the engine: changes to what the configuration requests, with the reasons.
    ///
    /// They contain parts of the model that were left out, and sizes that were reduced because the device ran out of
    /// memory.
    ///
    /// [`Engine::device_notes`](super::Engine::device_notes) returns the notes of the device.
    pub notes: Vec<String>,
    /// Arithmetic of the device.
    pub numerics: Option<Numerics>,
    /// Number of tokens per KV block.
    pub block_size: u32,
    /// Data type of stored keys and values.
    pub kv_dtype: Option<KvDType>,
    /// Policy for rows that overflow.
    pub overflow: Option<OverflowPolicy>,
    /// Number of blocks in the KV pool.
    pub pool_blocks: u32,
    /// Number of tokens that fit in the KV pool.
    pub pool_tokens: u64,
    /// Size of the KV pool in bytes, on each card if the device has several cards.
    pub pool_bytes: u64,
    /// Total size of the arenas of all plans, in bytes.
    pub arena_bytes: u64,
    /// Number of steps of the plan for the largest batches; a batch needs one launch per step.
    pub plan_steps: u32,
    /// Number of groups of steps that may run in parallel; a batch passes one barrier per group.
    pub plan_groups: u32,
    /// Cost of one decode token of a sequence of `max_model_len` tokens.
    pub decode_cost: Cost,
    /// Cost of a step of `max_num_batched_tokens` prompt tokens, in the fewest sequences that hold them.
    pub prefill_cost: Cost,
    /// Plans of all buckets, by ascending number of rows.
    pub buckets: Vec<BucketInfo>,
}

impl EngineInfo {
    /// Returns the description of an engine that was assembled from parts.
    pub(super) fn without_device(vocab_size: u32, max_model_len: u32, block_size: u32, pool_blocks: u32) -> Self {
        Self {
            version: VERSION,
            commit: COMMIT,
            vocab_size,
            max_model_len,
            block_size,
            pool_blocks,
            pool_tokens: u64::from(pool_blocks) * u64::from(block_size),
            ..Self::default()
        }
    }
}

/// Bucket: the plan for batches of `fewest_rows` to `rows` rows.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct BucketInfo {
    /// Maximum number of rows. A device with fixed shapes pads every batch to this number.
    pub rows: u32,
    /// Minimum number of rows: one more than `rows` of the next smaller bucket.
    pub fewest_rows: u32,
    /// Number of steps of the plans of all ranks.
    pub launches: u32,
    /// Number of groups of steps that may run in parallel.
    pub groups: u32,
    /// Total size of the arenas of all ranks, in bytes.
    pub arena_bytes: u64,
    /// Cost of `rows` prompt tokens, in the fewest sequences that hold them.
    pub cost: Cost,
    /// Cost of `fewest_rows` prompt tokens. A device with fixed shapes pads them to `rows` rows: the difference to
    /// `cost` is the cost of the padding.
    pub fewest_rows_cost: Cost,
}

/// Computes the cost of a step of `rows` prompt tokens, in the fewest sequences that hold them.
///
/// All rows belong to prefills that start at position 0.
pub(super) fn prompt_cost(plan: &Plan, rows: u32, max_model_len: u32, geometry: &KvGeometry) -> Cost {
    let mut lens = Vec::new();
    let mut left = rows;
    while left > 0 && max_model_len > 0 && lens.len() < plan.bucket.seqs {
        lens.push(left.min(max_model_len));
        left -= left.min(max_model_len);
    }
    let costs = plan.batch_costs(&lens, &lens, lens.len() as u64, geometry.dtype.bytes() as u64);
    costs.into_iter().sum()
}

/// Properties of the model that an engine needs in addition to its [`ModelExecutor`](crate::runner::ModelExecutor).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ModelLimits {
    /// Size of the model's vocabulary.
    pub vocab_size: u32,
    /// Maximum length of a sequence that the model supports.
    pub max_model_len: u32,
    /// Ids that end a sequence, unless a request sets `ignore_eos`.
    pub eos_ids: Vec<u32>,
    /// Fingerprint of the model and of everything else that changes the content of a KV block.
    ///
    /// Keys of the prefix cache begin with it.
    pub fingerprint: u128,
    /// Maximum number of logit rows per step. A chunk that requests more is split over several steps.
    pub max_logit_rows: u32,
}

impl ModelLimits {
    /// Creates the limits of a model without end-of-sequence ids, whose runner supports any number of logit rows.
    #[must_use]
    pub fn new(vocab_size: u32, max_model_len: u32) -> Self {
        Self { vocab_size, max_model_len, eos_ids: Vec::new(), fingerprint: 0, max_logit_rows: u32::MAX }
    }
}

/// Availability of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Health {
    /// The engine is running and accepts requests.
    Ready,
    /// The engine is running but accepts no requests now: the queue is full, or the engine is shutting down.
    NotAccepting,
    /// The engine was shut down.
    Stopped,
    /// The engine failed and no longer runs.
    Failed,
}

/// Summary of one step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct StepReport {
    /// Number of sequences with rows in the step; 0 if there was nothing to compute.
    pub sequences: u32,
    /// Number of computed rows.
    pub rows: u32,
    /// Number of sampled tokens.
    pub sampled_tokens: u32,
    /// Number of choices that ended on the results of this step.
    pub finished: u32,
    /// Number of preempted sequences: their blocks were freed, and they will be computed again.
    pub preempted: u32,
}
