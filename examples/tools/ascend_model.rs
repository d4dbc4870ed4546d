//! Models the decode time of LLaMA-7B on an Ascend 910B, or of Llama2-70B on eight, with the simulator's cost model.
//!
//! ```sh
//! cargo run -p ascend-llm-tools --features ascend --bin ascend_model
//! cargo run -p ascend-llm-tools --features ascend --bin ascend_model -- --batch 32 --context 512 --depth 1
//! cargo run --release -p ascend-llm-tools --features ascend --bin ascend_model -- --model llama2-70b --cards 8
//! cargo run -p ascend-llm-tools --features ascend --bin ascend_model -- --weights w4a16
//! ```
//! The table has the time of a step with and without captured graphs, at each fusion level, and its lower bound: the time to
//! read the weights and the KV cache. No number is computed and no model file is read: the simulator checks each call and
//! adds up its cost, device memory is address space only, and all weights share one range of zeros. All times are modeled
//! with the rates in the second line of the output.

use std::collections::{BTreeMap, VecDeque};
use std::io::Write as _;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use ascend_llm::device::ascend::{Activations, AscendDevice, AscendOptions, WeightForm, WeightTiles};
use ascend_llm::device::{Device, OwnedProgram, OwnedWeights};
use ascend_llm::graph::passes::shard;
use ascend_llm::graph::{
    Bucket, CompileOptions, CostRates, Graph, Numerics, OverflowPolicy, Plan, TpRank, Weight, WeightRole, compile,
};
use ascend_llm::kv_cache::{BlockId, KvGeometry};
use ascend_llm::model::{AttentionConfig, MlpConfig, ModelConfig, config_from_hub, decoder_graph};
use ascend_llm::runner::{
    BatchId, DeferredToken, ForwardInput, ModelExecutor as _, ModelRunner, Programs, RunnerShape,
};
use ascend_llm::weights::{DType, TensorView, WeightSource};
use ascend_llm_tools::terminal::{self, Result};
use ascend_sim::Simulator;
use clap::{Parser, ValueEnum};
use memmap2::MmapMut;

/// Shape of a model. The weights are bf16: the device supports packed heads without groups in this type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Shape {
    #[value(name = "llama-7b")]
    Llama7b,
    #[value(name = "llama2-70b")]
    Llama2_70b,
}

impl Shape {
    /// The model's `config.json`.
    const fn config(self) -> &'static str {
        match self {
            Self::Llama7b => LLAMA_7B,
            Self::Llama2_70b => LLAMA2_70B,
        }
    }
}

const LLAMA_7B: &str = r#"{
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "torch_dtype": "bfloat16",
    "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 32, "vocab_size": 32000, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "tie_word_embeddings": false
}"#;

const LLAMA2_70B: &str = r#"{
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "torch_dtype": "bfloat16",
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "tie_word_embeddings": false
}"#;

/// Times of host calls, in ns. See the cost model in `docs/ascend.md`.
const HOST_RATES: [&str; 4] = ["query_ns", "launch_ns", "replay_ns", "update_ns"];
/// Start times of a task on the device, in ns.
const DEVICE_TIMES: [&str; 3] = ["task_ns", "graph_task_ns", "link_ns"];
/// Rates of the device, except for its memory bandwidth.
const DEVICE_RATES: [&str; 4] = ["cube_tflops", "vector_gflops", "pcie_gb_per_s", "link_gb_per_s"];
const BANDWIDTH: &str = "hbm_gb_per_s";
/// A rate at which work takes no time.
const AT_ONCE: i64 = 1 << 40;
/// Unmeasured steps; the first one captures the graph.
const WARM_UP: usize = 4;

/// Models the time of decode steps of a large model on simulated Ascend cards.
#[derive(Debug, Parser)]
struct Args {
    /// The model's shape.
    #[arg(long, value_enum, default_value = "llama-7b")]
    model: Shape,
    /// Number of cards; the model is sharded over them.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    cards: u32,
    /// Number of sequences in a step.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=64))]
    batch: u32,
    /// Tokens of each sequence.
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..=2048))]
    context: u32,
    /// Number of measured steps.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..))]
    steps: u32,
    /// Steps in flight: 2 is the engine's default on this device, 1 waits for each step before the next one.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=8))]
    depth: u32,
    /// Memory bandwidth of a card, in GB/s.
    #[arg(long, default_value_t = 850, value_parser = clap::value_parser!(i64).range(1..))]
    bandwidth: i64,
    /// Factor on the time of host calls.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(i64).range(1..=1000))]
    host_factor: i64,
    /// Form of the weight matrices; activations are bf16.
    #[arg(long, value_enum, default_value_t = Weights::Bf16)]
    weights: Weights,
    /// Stores 16-bit matrices in tiles.
    #[arg(long)]
    tiles: bool,
}

/// Forms of weight matrices, each with the storage format of its model file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Weights {
    /// bf16, from a bf16 file.
    Bf16,
    /// int8 in groups, from `Q8_0`.
    W8a16,
    /// int4 in groups, from `Q4_0`.
    W4a16,
    /// int8 in rows, from `Q8_0`; activations are quantized to int8 before each product.
    W8a8,
}

impl Weights {
    const fn dtype(self) -> DType {
        match self {
            Self::Bf16 => DType::BF16,
            Self::W8a16 | Self::W8a8 => DType::Q8_0,
            Self::W4a16 => DType::Q4_0,
        }
    }

    /// Size of an element in half bits, with the scales of groups and without those of rows.
    const fn half_bits(self) -> usize {
        match self {
            Self::Bf16 => 32,
            Self::W8a16 => 17,
            Self::W4a16 => 9,
            Self::W8a8 => 16,
        }
    }

    /// Bytes of the matrices, which a step reads once.
    fn bytes(self, weights: &[Weight]) -> u64 {
        let matrices = weights.iter().filter(|weight| weight.role == WeightRole::Matrix);
        let elements: usize = matrices.map(|weight| weight.shape.iter().product::<usize>()).sum();
        (elements * self.half_bits() / 16) as u64
    }
}

fn main() -> ExitCode {
    terminal::finish(run(&Args::parse()))
}

fn run(args: &Args) -> Result<()> {
    let config = config_from_hub(args.model.config().as_bytes())?;
    let source = Zeros::new(&config, args.weights.dtype())?;
    let graph = decoder_graph(&config, &source)?;
    let ranks = (0..args.cards).map(|index| shard(&graph, TpRank { index, of: args.cards }));
    let graphs = ranks.collect::<std::result::Result<Vec<_>, _>>()?;
    let sim = Simulator::beside_this_binary()?;
    sim.reset();
    sim.set("compute", 0);
    sim.set("hbm_bytes", 64 << 30);
    sim.set("devices", args.cards.into());
    let rates = own_rates(&sim);
    set_rates(&sim, &rates, args, Time::Both);

    let mut out = std::io::stdout().lock();
    let (mut has_title, mut notes) = (false, Vec::new());
    for capture in [false, true] {
        let mut options = AscendOptions::default();
        options.cards = (0..args.cards).collect();
        (options.library, options.capture) = (Some(sim.path().to_owned()), capture);
        options.activations = Activations::BF16;
        options.weights = if args.weights == Weights::W8a8 { WeightForm::Dynamic } else { WeightForm::WeightOnly };
        options.tiles = if args.tiles { WeightTiles::Always } else { WeightTiles::default() };
        let device: Arc<dyn Device> = AscendDevice::open(options)?;
        let upload =
            |graph: &Graph| OwnedWeights::upload(&device, &source, &graph.weights, graph.rank.index).map(Arc::new);
        let weights = graphs.iter().map(upload).collect::<std::result::Result<Vec<_>, _>>()?;
        for fusion in 0..=CompileOptions::MAX_FUSION {
            let mut decoding = Decoding::new(args, &config, &graphs, &device, &weights, fusion)?;
            if !has_title {
                write!(out, "{}", title(args, &rates, &config, &device, &decoding))?;
                has_title = true;
            }
            writeln!(out, "{}", decoding.line(&sim, &rates, args, if capture { "captured" } else { "eager" })?)?;
        }
        notes.extend(device.telemetry().map(ascend_llm::device::Telemetry::notes).unwrap_or_default());
    }
    writeln!(
        out,
        "\nmade: operations whose first phase the host runs; launches: operations, copies, events and graphs queued on streams\n\
         host ms: step time if the device takes no time; device ms: step time if the host takes no time"
    )?;
    for note in notes {
        writeln!(out, "note: {note}")?;
    }
    for complaint in sim.complaints() {
        writeln!(out, "complaint: {complaint}")?;
    }
    Ok(())
}

/// Which side of a step takes time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Time {
    Both,
    /// The host only.
    Host,
    /// The device only.
    Device,
}

/// Rates of the simulator by name.
type Rates = BTreeMap<&'static str, i64>;

fn own_rates(sim: &Simulator) -> Rates {
    let names = HOST_RATES.iter().chain(&DEVICE_TIMES).chain(&DEVICE_RATES);
    names.map(|name| (*name, sim.setting(name))).collect()
}

fn set_rates(sim: &Simulator, rates: &Rates, args: &Args, time: Time) {
    let (host, device) = (time != Time::Device, time != Time::Host);
    for name in HOST_RATES {
        sim.set(name, if host { args.host_factor * rates[name] } else { 0 });
    }
    for name in DEVICE_TIMES {
        sim.set(name, if device { rates[name] } else { 0 });
    }
    for (name, rate) in DEVICE_RATES.map(|name| (name, rates[name])).into_iter().chain([(BANDWIDTH, args.bandwidth)]) {
        sim.set(name, if device { rate } else { AT_ONCE });
    }
}

fn title(args: &Args, rates: &Rates, config: &ModelConfig, device: &Arc<dyn Device>, decoding: &Decoding) -> String {
    let host = HOST_RATES.map(|name| (name, args.host_factor * rates[name]));
    let own = DEVICE_TIMES.iter().chain(&DEVICE_RATES).map(|name| (*name, rates[name]));
    let rates: Vec<String> = host.into_iter().chain(own).map(|(name, value)| format!("{name} {value}")).collect();
    let cost = decoding.runner.cost(&decoding.input);
    let ms = |bytes| ms_of(bytes, args);
    let giga = |bytes: u64| bytes as f64 / 1e9 / f64::from(args.cards);
    let each = if args.cards > 1 { " on each card" } else { "" };
    format!(
        "modeled: {:.2} G parameters, matrices in {}, batch {}, {} tokens of context each, {} steps in flight, on {}\n\
         rates: {BANDWIDTH} {}, {}\n\
         bounds: weights {:.2} GB in {:.2} ms, keys and values {:.2} GB in {:.2} ms{each}, both {:.2} ms: {:.0} tokens/s\n\n\
         | mode | fusion | plan steps | made | launches | host ms | device ms | step ms | tokens/s | bound / step |\n\
         |---|---|---|---|---|---|---|---|---|---|\n",
        config.parameters() as f64 / 1e9,
        args.weights.to_possible_value().map_or(String::new(), |name| name.get_name().to_owned()),
        args.batch,
        args.context,
        args.depth,
        device.caps().description,
        args.bandwidth,
        rates.join(", "),
        giga(decoding.weight_bytes),
        ms(decoding.weight_bytes),
        giga(cost.kv_bytes),
        ms(cost.kv_bytes),
        ms(decoding.weight_bytes + cost.kv_bytes),
        1e3 * f64::from(args.batch) / ms(decoding.weight_bytes + cost.kv_bytes),
    )
}

/// A model on a device with the batch that each step decodes.
#[derive(Debug)]
struct Decoding {
    runner: ModelRunner,
    fusion: u8,
    weight_bytes: u64,
    plan_steps: usize,
    input: ForwardInput,
    in_flight: VecDeque<BatchId>,
    depth: usize,
}

impl Decoding {
    fn new(
        args: &Args,
        config: &ModelConfig,
        graphs: &[Graph],
        device: &Arc<dyn Device>,
        weights: &[Arc<OwnedWeights>],
        fusion: u8,
    ) -> Result<Self> {
        let (batch, caps) = (args.batch as usize, device.caps());
        let kv_tokens = config.max_position_embeddings;
        let bucket = Bucket { tokens: batch, logit_rows: batch, seqs: batch, kv_tokens };
        let mut options = CompileOptions::default();
        (options.fusion, options.overflow) = (Some(fusion), Some(OverflowPolicy::Error));
        let compiled = graphs.iter().map(|graph| compile(graph, caps.target, Numerics::Fast, &options, bucket));
        let plans = compiled.collect::<std::result::Result<Vec<Plan>, _>>()?;
        let block_size = caps.default_block_size;
        // With more ranks than KV heads, several ranks hold the same head.
        let kv_heads = config.kv_heads().max(graphs.len());
        let (layers, head_dim) = (config.layers.len(), config.head_dim());
        let dtype = device.kv_dtype(&graphs[0].weights).ok_or("the device reports no type for the KV cache")?;
        let geometry = KvGeometry::new(layers, kv_heads, head_dim, block_size, dtype);
        let layout = device.kv_layout(&geometry)?;
        let plan_steps = plans[0].steps.len();
        let rates = plans.iter().map(|plan| CostRates::new(plan, dtype.bytes() as u64)).collect();
        let program = OwnedProgram::load(device, &plans, weights, &geometry)?;
        let programs = Programs::new(vec![(bucket, program)], rates);
        let blocks = args.context.div_ceil(u32::try_from(block_size)?);
        let shape = RunnerShape::new(bucket, block_size, (args.batch * blocks) as usize, config.vocab_size)
            .with_max_in_flight(args.depth as usize);
        let input = ForwardInput::new(
            vec![1; batch],
            vec![1; batch],
            vec![args.context; batch],
            (0..args.batch * blocks).map(BlockId).collect(),
        )
        .with_logit_rows((0..args.batch).collect())
        .with_argmax_only(vec![true; batch]);
        let runner = ModelRunner::new(Arc::clone(device), programs, layout, shape)?;
        let weight_bytes = graphs.iter().map(|graph| args.weights.bytes(&graph.weights)).sum();
        let depth = args.depth as usize;
        Ok(Self { runner, fusion, weight_bytes, plan_steps, input, in_flight: VecDeque::new(), depth })
    }

    /// Launches a step whose tokens are those of the previous step, and collects the oldest step if `depth` are in flight.
    fn step(&mut self) -> Result<()> {
        self.input.deferred.clear();
        if let Some(&batch_id) = self.in_flight.back() {
            self.input.deferred.extend(self.input.logit_rows.iter().map(|&row| DeferredToken {
                row,
                batch_id,
                logit_row: row,
            }));
        }
        let launched = self.runner.launch(self.input.clone())?;
        self.in_flight.push_back(launched);
        if self.in_flight.len() >= self.depth { self.collect() } else { Ok(()) }
    }

    fn collect(&mut self) -> Result<()> {
        if let Some(batch_id) = self.in_flight.pop_front() {
            let forwarded = self.runner.collect(batch_id, &[])?;
            if let Some(bad) = forwarded.outcomes.first() {
                return Err(format!("a sequence failed: {bad:?}").into());
            }
        }
        Ok(())
    }

    fn drain(&mut self) -> Result<()> {
        while !self.in_flight.is_empty() {
            self.collect()?;
        }
        Ok(())
    }

    /// Modeled time from the end of one step to the end of the next one.
    fn step_time(&mut self, sim: &Simulator, rates: &Rates, args: &Args, time: Time) -> Result<Duration> {
        set_rates(sim, rates, args, time);
        for _ in 0..WARM_UP {
            self.step()?;
        }
        // The card's thread is at the end of a step here and has issued all launched work.
        let before = sim.clock().host;
        for _ in 0..args.steps {
            self.step()?;
        }
        let all = sim.clock().host.saturating_sub(before);
        self.drain()?;
        set_rates(sim, rates, args, Time::Both);
        Ok(all / args.steps)
    }

    /// Counts the host's calls in one step.
    fn calls(&mut self, sim: &Simulator) -> Result<Calls> {
        for _ in 0..WARM_UP {
            self.step()?;
        }
        sim.clear_log();
        sim.set("log", 1);
        self.step()?;
        sim.set("log", 0);
        self.drain()?;
        let mut calls = Calls::default();
        for line in sim.log() {
            calls.add(line.split_whitespace().next().unwrap_or_default());
        }
        Ok(calls)
    }

    fn line(&mut self, sim: &Simulator, rates: &Rates, args: &Args, mode: &str) -> Result<String> {
        let step = self.step_time(sim, rates, args, Time::Both)?;
        let host = self.step_time(sim, rates, args, Time::Host)?;
        let device = self.step_time(sim, rates, args, Time::Device)?;
        let calls = self.calls(sim)?;
        let cost = self.runner.cost(&self.input);
        let bound_ms = ms_of(self.weight_bytes + cost.kv_bytes, args);
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        Ok(format!(
            "| {mode} | {} | {} | {} | {} | {:.2} | {:.2} | {:.2} | {:.0} | {:.0} % |",
            self.fusion,
            self.plan_steps,
            calls.made / args.cards as usize,
            calls.launches / args.cards as usize,
            ms(host),
            ms(device),
            ms(step),
            f64::from(args.batch) / step.as_secs_f64(),
            100.0 * bound_ms / ms(step),
        ))
    }
}

/// Number of host calls that take time.
#[derive(Clone, Copy, Debug, Default)]
struct Calls {
    /// First phases of operations.
    made: usize,
    /// Work queued on streams: operations, collectives, copies, events, graphs, updates of their tasks.
    launches: usize,
}

impl Calls {
    fn add(&mut self, function: &str) {
        const OTHERS: [&str; 7] = [
            "aclrtMemcpyAsync",
            "aclrtRecordEvent",
            "aclrtStreamWaitEvent",
            "aclrtResetEvent",
            "aclmdlRIExecuteAsync",
            "HcclAllReduce",
            "HcclAllGather",
        ];
        if function.starts_with("aclnn") && function.ends_with("GetWorkspaceSize") {
            self.made += 1;
        } else if function.starts_with("aclnn") || OTHERS.contains(&function) {
            self.launches += 1;
        }
    }
}

/// Time in ms to read `bytes` from the memories of all cards in parallel.
fn ms_of(bytes: u64, args: &Args) -> f64 {
    bytes as f64 / args.bandwidth as f64 / 1e6 / f64::from(args.cards)
}

/// Weight source whose tensors share one range of zeros.
#[derive(Debug)]
struct Zeros {
    dtype: DType,
    shapes: BTreeMap<String, Vec<usize>>,
    bytes: MmapMut,
}

impl Zeros {
    fn new(config: &ModelConfig, dtype: DType) -> Result<Self> {
        let (hidden, vocab) = (config.hidden_size, config.vocab_size);
        let mut shapes = BTreeMap::new();
        let mut add = |name: String, shape: &[usize]| drop(shapes.insert(format!("{name}.weight"), shape.to_vec()));
        add("model.embed_tokens".into(), &[vocab, hidden]);
        for (index, layer) in config.layers.iter().enumerate() {
            let (AttentionConfig::GroupedQuery(attention), MlpConfig::Gated(mlp)) = (&layer.attention, &layer.mlp)
            else {
                return Err("this tool supports layers of grouped-query attention and a gated MLP only".into());
            };
            let mlp = mlp.intermediate_size;
            let [queries, keys] = [attention.heads, attention.kv_heads].map(|heads| heads * attention.head_dim);
            for (name, shape) in [
                ("input_layernorm", &[hidden][..]),
                ("self_attn.q_proj", &[queries, hidden]),
                ("self_attn.k_proj", &[keys, hidden]),
                ("self_attn.v_proj", &[keys, hidden]),
                ("self_attn.o_proj", &[hidden, queries]),
                ("post_attention_layernorm", &[hidden]),
                ("mlp.gate_proj", &[mlp, hidden]),
                ("mlp.up_proj", &[mlp, hidden]),
                ("mlp.down_proj", &[hidden, mlp]),
            ] {
                add(format!("model.layers.{index}.{name}"), shape);
            }
        }
        add("model.norm".into(), &[hidden]);
        add("lm_head".into(), &[vocab, hidden]);
        let longest = shapes.values().map(|shape| 2 * shape.iter().product::<usize>()).max().unwrap_or(0);
        // Pages that are never written read as zeros and take no memory.
        Ok(Self { dtype, shapes, bytes: MmapMut::map_anon(longest)? })
    }

    /// Type of a tensor; vectors are not quantized.
    fn dtype_of(&self, shape: &[usize]) -> DType {
        if shape.len() == 2 { self.dtype } else { DType::BF16 }
    }
}

impl WeightSource for Zeros {
    fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        let shape = self.shapes.get(name)?;
        let dtype = self.dtype_of(shape);
        let data = &self.bytes[..dtype.bytes_for(shape.iter().product())?];
        Some(TensorView::new(dtype, shape, data))
    }

    fn names(&self) -> Vec<String> {
        self.shapes.keys().cloned().collect()
    }
}
