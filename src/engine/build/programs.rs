//! Compiles a model's graph into the programs of a runner.
//!
//! Each bucket has one plan per rank. If these plans round activations and the overflow policy is `retry_f32`, each rank
//! has one further plan with f32 activations: the f32 fallback for sequences that overflow.
//!
//! A batch of `r` rows runs in the smallest bucket of at least `r` rows. A device with fixed shapes computes all rows
//! of the bucket; the padding rows belong to no sequence. Other devices compute `r` rows; they have one bucket unless
//! the configuration sets `token_buckets`.

use crate::num::to_u32;
use std::sync::Arc;

use crate::device::{Device, DeviceCaps, OwnedProgram, OwnedWeights};
use crate::engine::config::EngineConfig;
use crate::engine::error::BuildError;
use crate::engine::info::BucketInfo;
use crate::graph::passes::shard;
use crate::graph::{
    ActivationType, Bucket, CompileError, CompileOptions, CostRates, Graph, Op, OverflowPolicy, Plan, Precision,
    TpRank, compile,
};
use crate::kv_cache::KvGeometry;
use crate::runner::Programs;
use crate::sampler::ParamError;

/// Plans of a model: one per bucket and rank.
#[derive(Debug)]
pub(crate) struct Plans {
    pub by_bucket: Vec<Vec<Plan>>,
    f32: Option<Vec<Plan>>,
}

/// Shards the graph over all ranks.
pub(crate) fn shard_graphs(graph: &Graph, ranks: u32) -> Result<Vec<Graph>, CompileError> {
    (0..ranks).map(|index| shard(graph, TpRank { index, of: ranks })).collect()
}

/// Returns the number of KV heads that all ranks store together.
///
/// It is larger than the model's number of KV heads if several ranks store the same head.
pub(crate) fn stored_heads(graphs: &[Graph]) -> usize {
    let of_rank = |graph: &Graph| {
        graph.nodes.iter().find_map(|node| match &node.op {
            Op::Attention(shape) => Some(shape.kv_heads),
            _ => None,
        })
    };
    graphs.iter().filter_map(of_rank).sum()
}

/// Resolves the overflow policy: the configured one if the device supports it, or the device's best one.
pub(crate) fn resolve_overflow(options: &mut CompileOptions, caps: &DeviceCaps) -> Result<OverflowPolicy, ParamError> {
    let default = if caps.retry_f32 { OverflowPolicy::RetryF32 } else { OverflowPolicy::Error };
    let policy = *options.overflow.get_or_insert(default);
    let lacks = match policy {
        OverflowPolicy::Error => return Ok(policy),
        OverflowPolicy::Clamp if caps.clamps => return Ok(policy),
        OverflowPolicy::RetryF32 if caps.retry_f32 => return Ok(policy),
        OverflowPolicy::Clamp => "a value that is too large becomes infinite",
        OverflowPolicy::RetryF32 => "no plans with f32 activations are available",
    };
    let others = match policy {
        OverflowPolicy::Clamp if caps.retry_f32 => "`error` or `retry_f32`",
        OverflowPolicy::RetryF32 if caps.clamps => "`error` or `clamp`",
        _ => "`error`",
    };
    Err(ParamError::new("compile.overflow", policy.name(), format!("{others}: on device {} {lacks}", caps.name)))
}

impl Plans {
    /// Compiles the graphs of all ranks for every bucket up to `largest`.
    pub fn compile(
        graphs: &[Graph],
        config: &EngineConfig,
        device: &dyn Device,
        largest: Bucket,
    ) -> Result<Self, BuildError> {
        let (target, options) = (device.caps().target, &config.compile);
        let f32_asked = options.precision_overrides.values().chain(&options.precision).any(|p| *p == Precision::F32);
        if f32_asked && !device.caps().retry_f32 {
            let expected =
                format!("`mix`, `f16` or `bf16`, because device {} has no f32 activations", device.caps().name);
            return Err(ParamError::new("compile.precision", "f32", expected).into());
        }
        let of_ranks = |options: &CompileOptions, bucket: Bucket| {
            graphs
                .iter()
                .map(|graph| compile(graph, target, config.numerics, options, bucket))
                .collect::<Result<Vec<_>, _>>()
        };
        let buckets = buckets(options, device.caps().static_shapes, largest);
        let by_bucket = buckets.into_iter().map(|bucket| of_ranks(options, bucket)).collect::<Result<Vec<_>, _>>()?;
        let narrow = by_bucket.iter().flatten().any(rounds);
        let retries = narrow && options.resolved_overflow() == OverflowPolicy::RetryF32;
        let f32 = if retries { Some(of_ranks(&options.with_f32_activations(), largest)?) } else { None };
        Ok(Self { by_bucket, f32 })
    }

    /// Returns the plan of the first rank for the largest batches.
    pub fn main(&self) -> Option<&Plan> {
        self.by_bucket.last().and_then(|ranks| ranks.first())
    }

    /// Returns the numbers of rows of the buckets, ascending.
    pub fn rows(&self) -> impl Iterator<Item = u32> {
        self.by_bucket.iter().map(|ranks| to_u32(ranks[0].bucket.tokens))
    }

    /// Returns the total size of all arenas in bytes.
    pub fn arena_bytes(&self) -> u64 {
        self.by_bucket.iter().chain(&self.f32).flatten().map(|plan| plan.arena_bytes as u64).sum()
    }

    /// Loads all plans with the weights of the ranks.
    pub fn load(
        &self,
        device: &Arc<dyn Device>,
        weights: &[Arc<OwnedWeights>],
        kv: &KvGeometry,
    ) -> Result<Programs, CompileError> {
        let load = |plans: &Vec<Plan>| OwnedProgram::load(device, plans, weights, kv);
        let by_bucket = self.by_bucket.iter().map(|plans| Ok((plans[0].bucket, load(plans)?)));
        let rates = |plan| CostRates::new(plan, kv.dtype.bytes() as u64);
        Ok(Programs {
            rates: self.by_bucket.last().into_iter().flatten().map(rates).collect(),
            by_bucket: by_bucket.collect::<Result<_, CompileError>>()?,
            f32: self.f32.as_ref().map(load).transpose()?,
            custom_ops: self.main().is_some_and(|plan| plan.steps.iter().any(|step| matches!(step.op, Op::Custom(_)))),
        })
    }

    /// Returns size and cost of each bucket, for all ranks together.
    pub fn bucket_infos(&self, max_model_len: u32, kv: &KvGeometry) -> Vec<BucketInfo> {
        let mut before = 0;
        let info = |ranks: &Vec<Plan>| {
            let rows = to_u32(ranks[0].bucket.tokens);
            let cost =
                |rows| ranks.iter().map(|plan| crate::engine::info::prompt_cost(plan, rows, max_model_len, kv)).sum();
            let fewest_rows = before + 1;
            before = rows;
            BucketInfo {
                rows,
                fewest_rows,
                launches: to_u32(ranks.iter().map(|plan| plan.steps.len()).sum()),
                groups: to_u32(ranks[0].groups().len()),
                arena_bytes: ranks.iter().map(|plan| plan.arena_bytes as u64).sum(),
                cost: cost(rows),
                fewest_rows_cost: cost(fewest_rows),
            }
        };
        self.by_bucket.iter().map(info).collect()
    }
}

/// Returns whether a plan rounds activations in any step.
fn rounds(plan: &Plan) -> bool {
    plan.steps.iter().any(|step| match &step.op {
        Op::Cast(to) | Op::NormCast { to, .. } | Op::AddRmsNorm { to, .. } | Op::SwigluLinear { to, .. } => {
            *to != ActivationType::F32
        }
        _ => false,
    })
}

/// Returns the buckets in force, ascending; the last one is `largest`.
fn buckets(options: &CompileOptions, static_shapes: bool, largest: Bucket) -> Vec<Bucket> {
    let most = to_u32(largest.tokens);
    let rows = match &options.token_buckets {
        Some(rows) => rows.clone(),
        None if static_shapes => bucket_ladder(most),
        None => Vec::new(),
    };
    let smaller = rows.into_iter().filter(|&rows| rows < most).map(|rows| {
        let rows = rows as usize;
        Bucket { tokens: rows, logit_rows: largest.logit_rows.min(rows), seqs: largest.seqs.min(rows), ..largest }
    });
    smaller.chain([largest]).collect()
}

/// Returns the default buckets below `most`: 1, 2, 4, 8, 16, then every 8 up to 64, then doubling.
///
/// A decode batch of at most 64 rows gets at most 7 rows of padding. A larger batch is padded to less than twice its
/// size.
fn bucket_ladder(most: u32) -> Vec<u32> {
    let doubling = std::iter::successors(Some(128u32), |rows| rows.checked_mul(2));
    [1, 2, 4, 8].into_iter().chain((16..=64).step_by(8)).chain(doubling).take_while(|rows| *rows < most).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_ascend_to_the_largest() {
        assert!(bucket_ladder(1).is_empty());
        assert_eq!(bucket_ladder(40), [1, 2, 4, 8, 16, 24, 32]);
        assert_eq!(bucket_ladder(300), [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 128, 256]);
        let largest = Bucket { tokens: 64, logit_rows: 8, seqs: 8, kv_tokens: 100 };
        let rows = |options: &CompileOptions, fixed| {
            buckets(options, fixed, largest).iter().map(|bucket| (bucket.tokens, bucket.seqs)).collect::<Vec<_>>()
        };
        let mut options = CompileOptions::default();
        assert_eq!(rows(&options, false), [(64, 8)]);
        assert_eq!(rows(&options, true).len(), 11);
        options.token_buckets = Some(vec![4, 20, 64, 100]);
        assert_eq!(rows(&options, true), [(4, 4), (20, 8), (64, 8)]);
        assert_eq!(rows(&options, false), rows(&options, true));
    }
}
