//! Builds an engine from a path.
//!
//! The builder reads the model, fits it to the device and the memory budget, compiles it, and uploads its weights.

pub(super) mod memory_fit;
pub(super) mod programs;
pub(super) mod text_assets;
pub(super) mod warm_up;

use crate::engine::info::prompt_cost;
use crate::engine::request::encoding::PromptEncoder;
use crate::engine::{EngineInfo, LoadProgress};
use crate::num::to_u32;
use crate::sampler::ParamError;
use crate::version::{COMMIT, VERSION};
use crate::weights::DType;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::config::EngineConfig;
use super::core::EngineCore;
use super::error::BuildError;
use super::info::ModelLimits;
use super::step::stop::default_stop_ids;
use super::{Clock, Engine, SystemClock};
use crate::device::cpu::{CpuDevice, CpuOptions};
use crate::device::{Device, KvLayout, OwnedWeights};
use crate::graph::{CostShape, CustomOp, CustomSite, Graph, Numerics, RegisteredOp, Weight};
use crate::kv_cache::{KvDType, KvGeometry};
use crate::model::{self, ModelConfig, config_from_gguf, config_from_hub, decoder_graph_with};
use crate::runner::ModelRunner;
use crate::text::{ChatRenderer, Vocabulary};
use crate::weights::{ModelFiles, ModelKind, TensorView, WeightError, WeightSource};
use memory_fit::{FittedModel, MemoryFit};
use programs::{resolve_overflow, shard_graphs, stored_heads};
use text_assets::{TextAssets, TextOverrides};
use warm_up::warm_up;

type OnProgress = dyn Fn(LoadProgress) + Send + Sync;

/// Builder of an [`Engine`] from a model on disk.
#[must_use = "call build()"]
pub struct EngineBuilder {
    model: PathBuf,
    config: EngineConfig,
    device: Option<Arc<dyn Device>>,
    text: TextOverrides,
    clock: Arc<dyn Clock>,
    custom_ops: Vec<RegisteredOp>,
    on_progress: Option<Arc<OnProgress>>,
    warm_up: Option<Duration>,
}

impl std::fmt::Debug for EngineBuilder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EngineBuilder")
            .field("model", &self.model)
            .field("config", &self.config)
            .field("device", &self.device)
            .finish_non_exhaustive()
    }
}

impl Engine {
    /// Starts building an engine from a folder (`config.json` and safetensors) or a `.gguf` file.
    pub fn builder(model: impl AsRef<Path>) -> EngineBuilder {
        EngineBuilder {
            model: model.as_ref().to_owned(),
            config: EngineConfig::default(),
            device: None,
            text: TextOverrides::default(),
            clock: Arc::new(SystemClock::default()),
            custom_ops: Vec::new(),
            on_progress: None,
            warm_up: None,
        }
    }
}

impl EngineBuilder {
    /// Sets the configuration.
    pub fn config(mut self, config: EngineConfig) -> Self {
        self.config = config;
        self
    }

    /// Uses this device instead of creating a CPU device.
    pub fn device(mut self, device: Arc<dyn Device>) -> Self {
        self.device = Some(device);
        self
    }

    /// Uses this vocabulary instead of the model's own.
    pub fn vocabulary(mut self, vocabulary: Arc<dyn Vocabulary>) -> Self {
        self.text.vocabulary = Some(vocabulary);
        self
    }

    /// Renders chats with this Jinja template instead of the model's own.
    #[cfg(feature = "text")]
    pub fn chat_template(mut self, source: impl Into<String>) -> Self {
        self.text.chat_template = Some(source.into());
        self
    }

    /// Renders chats with this renderer instead of a template.
    pub fn chat_renderer(mut self, renderer: Arc<dyn ChatRenderer>) -> Self {
        self.text.chat_renderer = Some(renderer);
        self
    }

    /// Adds a custom operation to the model.
    ///
    /// Operations at the same site run in the order in which they were added.
    pub fn custom_op(mut self, site: CustomSite, op: Arc<dyn CustomOp>) -> Self {
        self.custom_ops.push(RegisteredOp { site, op });
        self
    }

    /// Uses this clock instead of the system's monotonic clock.
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = clock;
        self
    }

    /// Warms up the device: runs a decode step of each bucket before the builder returns the engine.
    ///
    /// The builder runs the buckets in ascending order until `budget` is spent, measured with the builder's clock. The
    /// work that a device does once for each bucket is then done; the Ascend device captures a graph. The first batch
    /// in a remaining bucket does this work; without `warm_up`, that holds for all buckets.
    ///
    /// This method has no effect on a device without fixed shapes, which needs no warm-up, and for a model with custom
    /// operations, because they would receive rows that belong to no request.
    pub fn warm_up(mut self, budget: Duration) -> Self {
        self.warm_up = Some(budget);
        self
    }

    /// Calls `report` on the building thread after each packed tensor and each warmed-up bucket.
    pub fn on_progress(mut self, report: impl Fn(LoadProgress) + Send + Sync + 'static) -> Self {
        self.on_progress = Some(Arc::new(report));
        self
    }

    /// Builds the engine and starts its thread.
    ///
    /// # Errors
    /// [`BuildError`] if the configuration or the model is invalid, the model does not fit in memory, the device fails,
    /// or the operating system cannot start the thread.
    pub fn build(self) -> Result<Engine, BuildError> {
        Engine::spawn(self.build_core()?)
    }

    /// Builds the same engine without a thread: the caller drives [`EngineCore::step`].
    ///
    /// # Errors
    /// [`BuildError`] if the configuration or the model is invalid, the model does not fit in memory, or the device
    /// fails.
    pub fn build_core(self) -> Result<EngineCore, BuildError> {
        let clock = Arc::clone(&self.clock);
        let EngineParts { config, device, runner, limits, text, info } = self.assemble()?;
        let encoder = PromptEncoder::new(text.vocabulary, text.chat);
        EngineCore::assemble(config, Box::new(runner), limits, encoder, clock, Some((device, info)))
    }

    /// Builds only the model on its device, for hosts with a loop of their own.
    ///
    /// Such a host manages block tables and samples tokens itself.
    ///
    /// # Errors
    /// The same as [`build_core`](Self::build_core).
    pub fn build_runner(self) -> Result<ModelRunner, BuildError> {
        Ok(self.assemble()?.runner)
    }

    fn assemble(self) -> Result<EngineParts, BuildError> {
        let mut config = self.config;
        config.validate()?;
        let files = model::open(&self.model)?;
        let model = read_config(&files)?;
        let text = TextAssets::read(&files, self.text)?;
        let graph = decoder_graph_with(&model, files.source.as_ref(), &self.custom_ops)?;

        let device = if let Some(device) = self.device {
            device
        } else {
            let options = CpuOptions { threads: config.threads, ..CpuOptions::default() };
            Arc::new(CpuDevice::new(options)?)
        };
        config.pipeline_depth.get_or_insert(device.caps().default_pipeline_depth);
        let max_model_len = config.resolve_max_model_len(to_u32(model.max_position_embeddings))?;
        let ranks = resolve_ranks(&config, device.as_ref())?;
        let overflow = resolve_overflow(&mut config.compile, device.caps())?;
        let graphs = shard_graphs(&graph, ranks)?;
        let geometry = resolve_geometry(&mut config, &model, &graph, stored_heads(&graphs), device.as_ref())?;
        let layout = device.kv_layout(&geometry)?;
        let fitting = MemoryFit {
            device: &device,
            graphs: &graphs,
            geometry,
            layout: &layout,
            max_model_len,
            vocab_size: graph.vocab_size,
            weight_bytes: weight_bytes(files.source.as_ref(), &graph),
        };
        // Compile before the upload, so that a model that cannot be compiled is not uploaded.
        let plans = fitting.compile(&config)?;
        let source =
            ProgressSource::new(files.source.as_ref(), fitting.weight_bytes, ranks, self.on_progress.as_deref());
        let upload =
            |graph: &Graph| OwnedWeights::upload(&device, &source, &graph.weights, graph.rank.index).map(Arc::new);
        let weights = graphs.iter().map(upload).collect::<Result<Vec<_>, _>>()?;
        let FittedModel { config, plans, pool_blocks, mut runner, mut notes } = fitting.fit(config, plans, &weights)?;
        let can_warm_up = device.caps().static_shapes && self.custom_ops.is_empty();
        if let Some(budget) = self.warm_up.filter(|_| can_warm_up) {
            let most = config.max_num_seqs.min(pool_blocks);
            let buckets: Vec<u32> = plans.rows().filter(|rows| *rows <= most).collect();
            let report = |warm_buckets| source.warmed(warm_buckets, to_u32(buckets.len()));
            warm_up(&mut runner, &buckets, self.clock.as_ref(), budget, report)?;
        }

        let mut limits = ModelLimits::new(to_u32(graph.vocab_size), max_model_len);
        limits.eos_ids = default_stop_ids(&text.generation_eos_ids, &model.eos_ids, &text.tokenizer_eos_ids);
        limits.fingerprint = fingerprint(&graph, &layout, &config);
        limits.max_logit_rows = config.max_num_seqs;
        notes.extend(text.note.clone());
        let info = EngineInfo {
            version: VERSION,
            commit: COMMIT,
            architecture: Some(model.architecture),
            parameters: model.parameters(),
            weight_dtype: main_dtype(&graph),
            vocab_size: limits.vocab_size,
            max_model_len,
            device: Some(device.caps().name),
            device_description: device.caps().description.clone(),
            numerics: Some(config.numerics),
            notes,
            block_size: to_u32(geometry.block_size),
            kv_dtype: Some(geometry.dtype),
            overflow: Some(overflow),
            pool_blocks,
            pool_tokens: u64::from(pool_blocks) * geometry.block_size as u64,
            pool_bytes: u64::from(pool_blocks) * layout.bytes_per_block,
            arena_bytes: plans.arena_bytes(),
            ..plans.main().map_or_else(EngineInfo::default, |plan| EngineInfo {
                plan_steps: to_u32(plan.steps.len()),
                plan_groups: to_u32(plan.groups().len()),
                decode_cost: plan.cost(&CostShape::decode(max_model_len, geometry.dtype.bytes() as u64)),
                prefill_cost: prompt_cost(plan, config.max_num_batched_tokens, max_model_len, &geometry),
                buckets: plans.bucket_infos(max_model_len, &geometry),
                ..EngineInfo::default()
            })
        };
        Ok(EngineParts { config, device, runner, limits, text, info })
    }
}

/// Parts that an engine is assembled from.
struct EngineParts {
    config: EngineConfig,
    device: Arc<dyn Device>,
    runner: ModelRunner,
    limits: ModelLimits,
    text: TextAssets,
    info: EngineInfo,
}

/// Returns the data type in which most elements of the matrices are stored.
fn main_dtype(graph: &Graph) -> Option<DType> {
    let matrices = || graph.weights.iter().filter(|weight| weight.role.is_matrix());
    let elements = |weight: &Weight| weight.shape.iter().product::<usize>();
    matrices()
        .map(|weight| weight.dtype)
        .max_by_key(|dtype| matrices().filter(|weight| weight.dtype == *dtype).map(elements).sum::<usize>())
}

fn read_config(files: &ModelFiles) -> Result<ModelConfig, BuildError> {
    match &files.kind {
        ModelKind::Gguf(file) => Ok(config_from_gguf(file)?),
        ModelKind::Folder(folder) => {
            let path = folder.join("config.json");
            let json = std::fs::read(&path).map_err(|error| WeightError::Io { path, error })?;
            Ok(config_from_hub(&json)?)
        }
    }
}

fn resolve_geometry(
    config: &mut EngineConfig,
    model: &ModelConfig,
    graph: &Graph,
    kv_heads: usize,
    device: &dyn Device,
) -> Result<KvGeometry, BuildError> {
    let caps = device.caps();
    if config.numerics == Numerics::Exact && !caps.retry_f32 {
        let expected = format!("`fast`, because device {} has no plans with f32 activations", caps.name);
        return Err(ParamError::new("numerics", "exact", expected).into());
    }
    let block_size = config.block_size.map_or(caps.default_block_size, |size| size as usize);
    if !block_size.is_multiple_of(caps.block_size_step) || block_size > caps.max_block_size {
        let expected =
            format!("a multiple of {} up to {} on device {}", caps.block_size_step, caps.max_block_size, caps.name);
        return Err(ParamError::new("block_size", block_size, expected).into());
    }
    let of_numerics = || match config.numerics {
        Numerics::Exact => KvDType::F32,
        Numerics::Fast => KvDType::F16,
    };
    let dtype = config.kv_dtype.or_else(|| device.kv_dtype(&graph.weights)).unwrap_or_else(of_numerics);
    if !caps.kv_dtypes.contains(&dtype) {
        let expected = format!("one of {:?} on device {}", caps.kv_dtypes, caps.name);
        return Err(ParamError::new("kv_dtype", format!("{dtype:?}"), expected).into());
    }
    config.block_size = Some(to_u32(block_size));
    config.kv_dtype = Some(dtype);
    Ok(KvGeometry { layers: model.layers.len(), kv_heads, head_dim: model.head_dim(), block_size, dtype })
}

/// Returns the number of ranks, after checking that the device supports it.
fn resolve_ranks(config: &EngineConfig, device: &dyn Device) -> Result<u32, BuildError> {
    let (ranks, caps) = (config.tensor_parallel_size, device.caps());
    let expected = if caps.cards > 1 && ranks != caps.cards {
        format!("{} on device {}, which was opened with that many cards: {}", caps.cards, caps.name, caps.description)
    } else if ranks > caps.max_ranks {
        format!("at most {} on device {}", caps.max_ranks, caps.name)
    } else {
        return Ok(ranks);
    };
    Err(ParamError::new("tensor_parallel_size", ranks, expected).into())
}

/// Returns a fingerprint of everything that changes the content of a KV block of this engine.
fn fingerprint(graph: &Graph, layout: &KvLayout, config: &EngineConfig) -> u128 {
    let half = |salt: u64| {
        let mut hasher = DefaultHasher::new();
        salt.hash(&mut hasher);
        layout.id.hash(&mut hasher);
        let compile = &config.compile;
        let arithmetic = (config.numerics, compile.resolved_precision(config.numerics), &compile.precision_overrides);
        format!("{arithmetic:?} {} {:?}", config.tensor_parallel_size, compile.resolved_overflow()).hash(&mut hasher);
        for custom in &graph.customs {
            format!("{} {}", custom.site, custom.op.name()).hash(&mut hasher);
        }
        for weight in &graph.weights {
            (&weight.name, &weight.shape, weight.dtype).hash(&mut hasher);
        }
        u128::from(hasher.finish())
    };
    half(1) << 64 | half(2)
}

/// Returns the size of all weights of a graph in bytes, as their files hold them.
fn weight_bytes(source: &dyn WeightSource, graph: &Graph) -> u64 {
    let bytes = |weight: &Weight| source.tensor(&weight.name).map_or(0, |tensor| tensor.data.len() as u64);
    graph.weights.iter().map(bytes).sum()
}

/// Weight source that reports the progress of its reader: a tensor counts when the reader releases it.
struct ProgressSource<'a> {
    source: &'a dyn WeightSource,
    report: Option<&'a OnProgress>,
    total_bytes: u64,
    done_bytes: AtomicU64,
}

impl<'a> ProgressSource<'a> {
    /// Creates a source that `ranks` ranks read. Each rank reads all tensors and keeps its shard.
    fn new(source: &'a dyn WeightSource, weight_bytes: u64, ranks: u32, report: Option<&'a OnProgress>) -> Self {
        Self { source, report, total_bytes: u64::from(ranks) * weight_bytes, done_bytes: AtomicU64::new(0) }
    }

    /// Reports the number of warmed-up buckets, once all weights are packed.
    fn warmed(&self, warm_buckets: u32, total_buckets: u32) {
        let done_bytes = self.done_bytes.load(Ordering::Relaxed);
        if let Some(report) = self.report {
            report(LoadProgress { done_bytes, total_bytes: self.total_bytes, warm_buckets, total_buckets });
        }
    }
}

impl std::fmt::Debug for ProgressSource<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.source.fmt(f)
    }
}

impl WeightSource for ProgressSource<'_> {
    fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        self.source.tensor(name)
    }

    fn names(&self) -> Vec<String> {
        self.source.names()
    }

    fn release(&self, name: &str) {
        let bytes = self.source.tensor(name).map_or(0, |tensor| tensor.data.len() as u64);
        self.source.release(name);
        let done_bytes = self.done_bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        if let Some(report) = self.report {
            report(LoadProgress { done_bytes, total_bytes: self.total_bytes, warm_buckets: 0, total_buckets: 0 });
        }
    }
}
