//! What an engine says of itself: what it runs and on what, its limits, its health, and what a step did.

use serde::Serialize;

use crate::graph::{Cost, Numerics, OverflowPolicy, Plan};
use crate::kv_cache::{KvDType, KvGeometry};
use crate::model::Architecture;
use crate::version::{COMMIT, VERSION};
use crate::weights::DType;

/// How far loading has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LoadProgress {
    /// Bytes of weights read so far.
    pub done_bytes: u64,
    /// Bytes of all weights, as often as there are ranks: each reads all and keeps its part.
    pub total_bytes: u64,
    /// Buckets of rows that have run a step, if the engine is warmed up.
    pub warm_buckets: u32,
    /// Buckets that are to run one.
    pub total_buckets: u32,
}

/// The model, the device and the sizes in force.
///
/// Facts that only a builder knows are `None`, 0 or empty for an [`EngineCore`](super::EngineCore) made of parts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct EngineInfo {
    /// Version of this crate.
    pub version: &'static str,
    /// Commit the crate was built from: 12 digits, then `-dirty` if files differed from it. `None` if unknown.
    pub commit: Option<&'static str>,
    /// Family of the model.
    pub architecture: Option<Architecture>,
    /// Parameters of the model.
    pub parameters: u64,
    /// Type that most elements of its matrices are stored in.
    pub weight_dtype: Option<DType>,
    /// Ids the model knows.
    pub vocab_size: u32,
    /// Longest sequence, prompt and output together.
    pub max_model_len: u32,
    /// Short name of the device (`cpu`, `ascend`).
    pub device: Option<&'static str>,
    /// Description of the device for people: processor, instruction set, threads.
    pub device_description: String,
    /// What was made smaller than the configuration asked for because the device ran out of memory, and why. The device's own
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
    /// Steps of the plan for the largest batches: as many launches a batch.
    pub plan_steps: u32,
    /// Groups of steps that may run side by side: as many barriers a batch meets.
    pub plan_groups: u32,
    /// Cost of one token of one sequence of `max_model_len` tokens.
    pub decode_cost: Cost,
    /// Cost of `max_num_batched_tokens` prompt tokens in one step, of as few sequences as hold that many.
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
    /// Most rows it takes. A device with fixed shapes computes as many for every batch.
    pub rows: u32,
    /// Fewest rows it is used for: one more than the bucket before it takes.
    pub fewest_rows: u32,
    /// Steps, of all ranks.
    pub launches: u32,
    /// Groups of steps that may run side by side.
    pub groups: u32,
    /// Bytes of the arenas of all ranks.
    pub arena_bytes: u64,
    /// `rows` prompt tokens, of as few sequences as hold that many.
    pub cost: Cost,
    /// `fewest_rows` prompt tokens: what a device with fixed shapes adds to them by padding is the difference to `cost`.
    pub fewest_rows_cost: Cost,
}

/// What a step costs that has only rows of prompts in it, each from its beginning, of as few sequences as hold that many.
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

/// What the engine must know of the model behind its [`ModelExecutor`](crate::runner::ModelExecutor).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ModelLimits {
    /// Ids the model knows.
    pub vocab_size: u32,
    /// Longest sequence the model takes.
    pub max_model_len: u32,
    /// Ids that end a sequence unless a request says `ignore_eos`.
    pub eos_ids: Vec<u32>,
    /// Names the model and all else that changes what a KV block holds; keys of the prefix cache begin with it.
    pub fingerprint: u128,
    /// Most rows of logits that the model may be asked for at once; what wants more is cut into several steps.
    pub max_logit_rows: u32,
}

impl ModelLimits {
    /// Limits of a model without end-of-sequence ids, whose runner has room for any number of logits.
    #[must_use]
    pub fn new(vocab_size: u32, max_model_len: u32) -> Self {
        Self { vocab_size, max_model_len, eos_ids: Vec::new(), fingerprint: 0, max_logit_rows: u32::MAX }
    }
}

/// Whether an engine runs and takes requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Health {
    /// It runs and takes requests.
    Ready,
    /// It runs, but takes no request just now: the queue is full, or it is shutting down.
    NotAccepting,
    /// It was shut down.
    Stopped,
    /// It failed and does not run any more.
    Failed,
}

/// What one step did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct StepReport {
    /// Sequences that had rows in the step; 0 if there was nothing to compute.
    pub sequences: u32,
    /// Rows computed.
    pub rows: u32,
    /// Tokens drawn.
    pub sampled_tokens: u32,
    /// Choices that ended on the step's own results.
    pub finished: u32,
    /// Sequences that lost their blocks and will be computed again.
    pub preempted: u32,
}
