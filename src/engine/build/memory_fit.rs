//! Fits a model into the memory of its device: plans, programs, the KV pool and the buffers of batches.
//!
//! If a device with memory of its own runs out of memory, the builder reduces one size and tries again. Each of these
//! sizes is reduced at most once, with a note in [`EngineInfo::notes`](crate::engine::EngineInfo::notes):
//! - the KV pool, if the configuration leaves its size open: half as many blocks, and at most half of the memory that
//!   was free;
//! - otherwise the largest batch: half of `max_num_batched_tokens`, but at least `max_num_seqs`. The configuration of
//!   the engine contains the number in force.
//!
//! The builder frees everything that was loaded before it tries again. It does not try again on a device that shares
//! the host's memory: there, the requested size is wrong, or other programs use the memory.

use crate::num::to_u32;
use crate::sampler::ParamError;
use std::sync::Arc;

use super::programs::Plans;
use crate::device::{Device, DeviceError, KvLayout, OwnedWeights, Telemetry};
use crate::engine::config::{CacheBudget, EngineConfig};
use crate::engine::error::BuildError;
use crate::graph::{Bucket, CompileError, Graph};
use crate::kv_cache::KvGeometry;
use crate::runner::{ModelRunner, RunnerShape};

/// Divisor for the default size of the KV cache on a device that shares the host's memory.
///
/// The cache uses at most the host's available memory divided by this number. The other programs of the host and the
/// page cache, which holds the model's file, need the rest.
const AUTO_CACHE_SHARE: u64 = 4;
/// Divisor for the memory that stays free on a device with memory of its own.
///
/// The reserve is the memory that was free at the start, divided by this number. The cache uses the rest of the memory
/// that weights and programs leave free. The reserve is for buffers of batches, captured graphs and later allocations of
/// programs.
const RESERVED_SHARE: u64 = 10;

/// Inputs of the fit that stay the same in all attempts.
#[derive(Debug)]
pub(crate) struct MemoryFit<'a> {
    pub device: &'a Arc<dyn Device>,
    pub graphs: &'a [Graph],
    pub geometry: KvGeometry,
    pub layout: &'a KvLayout,
    pub max_model_len: u32,
    pub vocab_size: usize,
    /// Size of the weights in bytes, as their files hold them.
    pub weight_bytes: u64,
}

/// Model that is loaded on its device.
#[derive(Debug)]
pub(crate) struct FittedModel {
    pub config: EngineConfig,
    pub plans: Plans,
    pub pool_blocks: u32,
    pub runner: ModelRunner,
    /// Reductions that were necessary, with their reasons.
    pub notes: Vec<String>,
}

impl MemoryFit<'_> {
    /// Returns the bucket of the largest batch.
    pub fn bucket(&self, config: &EngineConfig) -> Bucket {
        Bucket {
            tokens: config.max_num_batched_tokens as usize,
            logit_rows: config.max_num_seqs as usize,
            seqs: config.max_num_seqs as usize,
            kv_tokens: self.max_model_len as usize,
        }
    }

    pub fn compile(&self, config: &EngineConfig) -> Result<Plans, BuildError> {
        Plans::compile(self.graphs, config, self.device.as_ref(), self.bucket(config))
    }

    /// Loads the plans compiled for `config`, and allocates the KV pool and the buffers.
    pub fn fit(
        &self,
        mut config: EngineConfig,
        mut plans: Plans,
        weights: &[Arc<OwnedWeights>],
    ) -> Result<FittedModel, BuildError> {
        let has_own_memory = !self.device.caps().unified_memory;
        let (mut may_halve, mut may_cut) = (has_own_memory, has_own_memory && config.kv_cache == CacheBudget::Auto);
        let mut most_blocks = u64::MAX;
        let mut notes = Vec::new();
        loop {
            let mut pool_blocks = 0;
            let error = match self.allocate(&config, &plans, weights, most_blocks, &mut pool_blocks) {
                Ok(runner) => {
                    config.kv_cache = CacheBudget::Blocks(pool_blocks);
                    return Ok(FittedModel { config, plans, pool_blocks, runner, notes });
                }
                Err(error) => error,
            };
            let rows = config.max_num_batched_tokens;
            let halved = (rows / 2).max(config.max_num_seqs);
            match error {
                BuildError::Device(DeviceError::OutOfMemory { kind: "device", free_bytes, asked_bytes }) if may_cut => {
                    may_cut = false;
                    let half_free = free_bytes / 2 / self.layout.bytes_per_block.max(1);
                    most_blocks = (u64::from(pool_blocks) / 2).min(half_free);
                    if most_blocks == 0 {
                        return Err(self.out_of_memory(free_bytes, &plans, asked_bytes));
                    }
                    notes.push(format!(
                        "the KV pool has {most_blocks} blocks instead of {pool_blocks}: the device ran out of memory, \
                         {asked_bytes} bytes were requested and {free_bytes} bytes were free"
                    ));
                }
                BuildError::Device(DeviceError::OutOfMemory { .. }) | BuildError::Compile(CompileError::Memory(_))
                    if may_halve && halved < rows =>
                {
                    may_halve = false;
                    let reason = match &error {
                        BuildError::Compile(CompileError::Memory(space)) => space.to_string(),
                        other => std::error::Error::source(other).map_or(String::new(), ToString::to_string),
                    };
                    notes.push(format!("max_num_batched_tokens is {halved} instead of {rows}: {reason}"));
                    config.max_num_batched_tokens = halved;
                    plans = self.compile(&config)?;
                }
                BuildError::Device(DeviceError::OutOfMemory { asked_bytes, free_bytes, .. })
                    if has_own_memory && asked_bytes == self.pool_bytes(pool_blocks) =>
                {
                    return Err(self.out_of_memory(free_bytes, &plans, asked_bytes));
                }
                other => return Err(other),
            }
        }
    }

    /// Loads the programs and allocates the buffers of a runner.
    ///
    /// The number of blocks depends on the memory that the programs leave free. `pool_blocks` receives it, also if the
    /// allocation then fails.
    fn allocate(
        &self,
        config: &EngineConfig,
        plans: &Plans,
        weights: &[Arc<OwnedWeights>],
        most_blocks: u64,
        pool_blocks: &mut u32,
    ) -> Result<ModelRunner, BuildError> {
        let programs = plans.load(self.device, weights, &self.geometry)?;
        *pool_blocks = self.pool_blocks(config, plans, most_blocks)?;
        let pool_blocks = *pool_blocks as usize;
        let block_size = self.geometry.block_size;
        let shape = RunnerShape::new(self.bucket(config), block_size, pool_blocks, self.vocab_size)
            .with_max_in_flight(config.pipeline_depth.unwrap_or(1) as usize);
        Ok(ModelRunner::new(Arc::clone(self.device), programs, self.layout.clone(), shape)?)
    }

    /// Returns the size in bytes of a pool as the runner allocates it.
    fn pool_bytes(&self, pool_blocks: u32) -> u64 {
        (u64::from(pool_blocks) + self.layout.reserved_blocks).saturating_mul(self.layout.bytes_per_block)
    }

    /// Returns the number of blocks that `kv_cache` and the device's memory allow.
    fn pool_blocks(&self, config: &EngineConfig, plans: &Plans, most_blocks: u64) -> Result<u32, BuildError> {
        let block_bytes = self.layout.bytes_per_block.max(1);
        let block_size = self.geometry.block_size as u64;
        let most_useful = u64::from(config.max_num_seqs) * u64::from(self.max_model_len).div_ceil(block_size);
        // Positions are 32-bit numbers.
        let most_countable = u64::from(u32::MAX) / block_size;
        let (blocks, budget_bytes) = match config.kv_cache {
            CacheBudget::Blocks(blocks) if u64::from(blocks) > most_countable => {
                let expected = format!("at most {most_countable} blocks of {block_size} tokens");
                return Err(ParamError::new("kv_cache.blocks", blocks, expected).into());
            }
            CacheBudget::Blocks(blocks) => (u64::from(blocks), u64::from(blocks) * block_bytes),
            CacheBudget::Bytes(bytes) => ((bytes / block_bytes).min(most_countable), bytes),
            CacheBudget::Auto => {
                let free = self.auto_bytes();
                let space = (free / block_bytes).saturating_sub(self.layout.reserved_blocks);
                (space.min(most_blocks).min(most_useful).min(most_countable), free)
            }
        };
        if blocks == 0 {
            return Err(self.out_of_memory(budget_bytes, plans, block_bytes));
        }
        Ok(to_u32(usize::try_from(blocks).unwrap_or(usize::MAX)))
    }

    /// Returns the maximum size of the KV cache in bytes if it is left open.
    ///
    /// Weights and programs are already loaded.
    fn auto_bytes(&self) -> u64 {
        let Some(memory_bytes) = self.device.caps().memory_bytes else { return u64::MAX };
        let left = self
            .device
            .telemetry()
            .and_then(Telemetry::free_bytes)
            .map(|free| free.saturating_sub(memory_bytes / RESERVED_SHARE));
        left.unwrap_or(memory_bytes / AUTO_CACHE_SHARE)
    }

    fn out_of_memory(&self, budget_bytes: u64, plans: &Plans, needed_bytes: u64) -> BuildError {
        let block_bytes = self.layout.bytes_per_block.max(1);
        let fitting_blocks = (budget_bytes / block_bytes).saturating_sub(self.layout.reserved_blocks);
        BuildError::CacheDoesNotFit {
            budget_bytes,
            // Bytes on each card: the shards of the ranks have nearly the same size.
            taken_bytes: (self.weight_bytes + plans.arena_bytes()) / u64::from(self.device.caps().cards.max(1)),
            block_bytes,
            needed_bytes,
            fitting_tokens: fitting_blocks * self.geometry.block_size as u64,
        }
    }
}
