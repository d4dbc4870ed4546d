//! Facts about an engine: model, device and limits, health, and the report of a step.

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
    /// Bytes of weights read so far.
    pub done_bytes: u64,
    /// Bytes of all weights, once for each rank: each rank reads all weights and keeps its shard.
    pub total_bytes: u64,
    /// Buckets that have run their warm-up step.
    pub warm_buckets: u32,
    /// Buckets to run during warm-up.
    pub total_buckets: u32,
}

/// The model, the device and the sizes in force.
///
/// For an [`EngineCore`](super::EngineCore) made of parts, facts that only a builder knows are `None`, 0 or empty.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct EngineInfo {
    /// Version of this crate.
    pub version: &'static str,
    /// Commit of the crate: 12 digits, then `-dirty` if files differed from it. `None` if unknown.
    pub commit: Option<&'static str>,
    /// Family of the model.
    pub architecture: Option<Architecture>,
    /// Parameters of the model.
    pub parameters: u64,
    /// Type that most elements of its matrices are stored in.
    pub weight_dtype: Option<DType>,
    /// Number of token ids of the model.
    pub vocab_size: u32,
    /// Longest sequence, prompt and output together.
    pub max_model_len: u32,
    /// Short name of the device (`cpu`, `ascend`).
    pub device: Option<&'static str>,
    /// Description of the device for people: processor, instruction set, threads.
    pub device_description: String,
    /// Sizes that are smaller than configured because the device ran out of memory, with the reason. The device's own
    /// notes are in [`Engine::device_notes`](super::Engine::device_notes).
    pub notes: Vec<String>,
    /// Arithmetic of the device.
    pub numerics: Option<Numerics>,
    /// Tokens a KV block.
    pub block_size: u32,
    /// Type of stored keys and values.
    pub kv_dtype: Option<KvDType>,
    /// Policy for rows that overflow.
    pub overflow: Option<OverflowPolicy>,
    /// Blocks in the KV pool.
    pub pool_blocks: u32,
    /// Tokens the KV pool holds.
    pub pool_tokens: u64,
    /// Bytes of the KV pool, on each card if the device has several.
    pub pool_bytes: u64,
    /// Bytes of all plans' arenas.
    pub arena_bytes: u64,
    /// Number of steps of the plan for the largest batches, which is the number of launches per batch.
    pub plan_steps: u32,
    /// Number of groups of steps that may run concurrently, which is the number of barriers per batch.
    pub plan_groups: u32,
    /// Cost of one token of one sequence of `max_model_len` tokens.
    pub decode_cost: Cost,
    /// Cost of `max_num_batched_tokens` prompt tokens in one step, in as few sequences as possible.
    pub prefill_cost: Cost,
    /// The plans by the rows they are made for, ascending.
    pub buckets: Vec<BucketInfo>,
}

impl EngineInfo {
    /// Facts of an engine that was made of parts.
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

/// The plan for batches of some numbers of rows.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct BucketInfo {
    /// Maximum number of rows. A device with fixed shapes computes this many for each batch.
    pub rows: u32,
    /// Smallest number of rows that uses this bucket: one more than the bucket before it holds.
    pub fewest_rows: u32,
    /// Steps, of all ranks.
    pub launches: u32,
    /// Groups of steps that may run side by side.
    pub groups: u32,
    /// Bytes of the arenas of all ranks.
    pub arena_bytes: u64,
    /// Cost of `rows` prompt tokens, in as few sequences as possible.
    pub cost: Cost,
    /// Cost of `fewest_rows` prompt tokens. On a device with fixed shapes, the difference to `cost` is the cost of
    /// padding.
    pub fewest_rows_cost: Cost,
}

/// Cost of a step that has only prompt rows, each prompt from its beginning, in as few sequences as possible.
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

/// Facts about the model of a [`ModelExecutor`](crate::runner::ModelExecutor) that the engine needs.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ModelLimits {
    /// Number of token ids of the model.
    pub vocab_size: u32,
    /// Maximum length of a sequence in tokens.
    pub max_model_len: u32,
    /// Ids that end a sequence unless a request sets `ignore_eos`.
    pub eos_ids: Vec<u32>,
    /// Fingerprint of the model and of everything else that determines the contents of a KV block. It is part of each
    /// key of the prefix cache.
    pub fingerprint: u128,
    /// Maximum number of rows of logits in one step; a prompt that needs more is split over several steps.
    pub max_logit_rows: u32,
}

impl ModelLimits {
    /// Limits of a model without end-of-sequence ids, with no limit on the rows of logits.
    #[must_use]
    pub fn new(vocab_size: u32, max_model_len: u32) -> Self {
        Self { vocab_size, max_model_len, eos_ids: Vec::new(), fingerprint: 0, max_logit_rows: u32::MAX }
    }
}

/// Whether an engine runs and accepts requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Health {
    /// The engine runs and accepts requests.
    Ready,
    /// The engine runs but accepts no requests at the moment: the queue is full, or it is shutting down.
    NotAccepting,
    /// It was shut down.
    Stopped,
    /// It failed and does not run any more.
    Failed,
}

/// Report of one step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct StepReport {
    /// Sequences that had rows in the step; 0 if there was nothing to compute.
    pub sequences: u32,
    /// Rows computed.
    pub rows: u32,
    /// Sampled tokens.
    pub sampled_tokens: u32,
    /// Choices that ended on the step's own results.
    pub finished: u32,
    /// Sequences that lost their blocks and will be computed again.
    pub preempted: u32,
}
