//! What decoding a model of the size of LLaMA-7B would take on an Ascend 910B, or Llama2-70B on eight, by the simulator's cost
//! model: time a step with and without captured graphs, at each level of fusion, beside the time that reading weights and
//! keys takes alone.
//!
//! ```sh
//! cargo run -p ascend-llm-tools --features ascend --bin ascend_model
//! cargo run -p ascend-llm-tools --features ascend --bin ascend_model -- --batch 32 --context 512 --depth 1
//! cargo run --release -p ascend-llm-tools --features ascend --bin ascend_model -- --model llama2-70b --cards 8
//! cargo run -p ascend-llm-tools --features ascend --bin ascend_model -- --weights w4a16
//! ```
//! Nothing is computed and no file is read: the simulator checks each call and adds up its cost, memory is address space, and
//! the weights are one stretch of zeros. All times are modelled, with the rates in the second line of the output.

use std::collections::{BTreeMap, VecDeque};
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
use ascend_sim::Simulator;
use clap::{Parser, ValueEnum};
use memmap2::MmapMut;

#[path = "../terminal/mod.rs"]
mod terminal;
use terminal::Result;

/// A shape of a model, with bf16 weights: heads without groups are taken packed in that type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Shape {
    #[value(name = "llama-7b")]
    Llama7b,
    #[value(name = "llama2-70b")]
    Llama2_70b,
}

impl Shape {
    /// As the hub describes it.
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

/// What the host's calls take, in ns. See the cost model in `docs/ascend.md`.
const HOST_RATES: [&str; 4] = ["query_ns", "launch_ns", "replay_ns", "update_ns"];
/// What a task takes to begin on the device, in ns.
const DEVICE_TIMES: [&str; 3] = ["task_ns", "graph_task_ns", "link_ns"];
/// How fast the device is, beside its memory.
const DEVICE_RATES: [&str; 4] = ["cube_tflops", "vector_gflops", "pcie_gb_per_s", "link_gb_per_s"];
const BANDWIDTH: &str = "hbm_gb_per_s";
/// As a rate: what is done so fast takes no time.
const AT_ONCE: i64 = 1 << 40;
/// Steps before those that are counted: the first one captures.
const WARM_UP: usize = 4;

/// Models decode steps of a large model on simulated Ascend cards.
#[derive(Debug, Parser)]
struct Args {
    /// The model's shape.
    #[arg(long, value_enum, default_value = "llama-7b")]
    model: Shape,
    /// Cards it is cut for.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    cards: u32,
    /// Sequences of a step.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=64))]
    batch: u32,
    /// Tokens each sequence has.
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..=2048))]
    context: u32,
    /// Steps that are counted.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..))]
    steps: u32,
    /// Steps in flight: 2 as the engine has them on this device, 1 to wait for each before the next.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=8))]
    depth: u32,
    /// Bandwidth of the device's memory in GB/s.
    #[arg(long, default_value_t = 850, value_parser = clap::value_parser!(i64).range(1..))]
    bandwidth: i64,
    /// How many times as long the host's calls take.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(i64).range(1..=1000))]
    host_factor: i64,
    /// What matrices are held in; activations are bf16.
    #[arg(long, value_enum, default_value_t = Weights::Bf16)]
    weights: Weights,
    /// Whether matrices of 16 bits are kept in tiles.
    #[arg(long)]
    tiles: bool,
}

/// Forms of the matrices, each with the file's format it is made from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Weights {
    /// A bf16 file.
    Bf16,
    /// `Q8_0`, held in groups of int8.
    W8a16,
    /// `Q4_0`, held in groups of int4.
    W4a16,
    /// `Q8_0`, held in rows of int8; activations are rounded to int8 before each product.
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

    /// Halves of bits an element, scales included but those of whole rows.
    const fn half_bits(self) -> usize {
        match self {
            Self::Bf16 => 32,
            Self::W8a16 => 17,
            Self::W4a16 => 9,
            Self::W8a8 => 16,
        }
    }

    /// Bytes that a step reads of a model's matrices.
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
                print!("{}", title(args, &rates, &config, &device, &decoding));
                has_title = true;
            }
            println!("{}", decoding.line(&sim, &rates, args, if capture { "captured" } else { "eager" })?);
        }
        notes.extend(device.telemetry().map(ascend_llm::device::Telemetry::notes).unwrap_or_default());
    }
    println!(
        "\nmade: operations whose first phase the host runs; launches: operations, copies, events and graphs it hands to streams\n\
         host: the same with a device that takes no time; device: with a host that takes none"
    );
    for note in notes {
        println!("note: {note}");
    }
    for complaint in sim.complaints() {
        println!("complaint: {complaint}");
    }
    Ok(())
}

/// Whose time passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Time {
    Both,
    /// The device takes none.
    Host,
    /// The host takes none.
    Device,
}

/// The rates that the simulator starts with, by name.
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
        "modelled: {:.2} G parameters, matrices in {}, batch {}, {} tokens of context each, {} steps in flight, on {}\n\
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

/// A model on a device, and the batch it decodes again and again.
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
        // With more ranks than KV heads a head is held by several.
        let kv_heads = config.kv_heads().max(graphs.len());
        let (layers, head_dim) = (config.layers.len(), config.head_dim());
        let dtype = device.kv_dtype(&graphs[0].weights).ok_or("the device names no type of keys and values")?;
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

    /// Launches a step that takes its tokens from the one before, and waits for the oldest if enough are in flight then.
    fn step(&mut self) -> Result<()> {
        self.input.deferred.clear();
        if let Some(&ticket) = self.in_flight.back() {
            self.input.deferred.extend(self.input.logit_rows.iter().map(|&row| DeferredToken {
                row,
                batch_id: ticket,
                logit_row: row,
            }));
        }
        let launched = self.runner.launch(self.input.clone())?;
        self.in_flight.push_back(launched);
        if self.in_flight.len() >= self.depth { self.collect() } else { Ok(()) }
    }

    fn collect(&mut self) -> Result<()> {
        if let Some(ticket) = self.in_flight.pop_front() {
            let forwarded = self.runner.collect(ticket, &[])?;
            if let Some(bad) = forwarded.outcomes.first() {
                return Err(format!("a sequence ended: {bad:?}").into());
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

    /// Modelled time from the end of one step to the end of the next.
    fn step_time(&mut self, sim: &Simulator, rates: &Rates, args: &Args, time: Time) -> Result<Duration> {
        set_rates(sim, rates, args, time);
        for _ in 0..WARM_UP {
            self.step()?;
        }
        // The card's thread has come to the end of a step here, and all that was launched has been issued.
        let before = sim.clock().host;
        for _ in 0..args.steps {
            self.step()?;
        }
        let all = sim.clock().host.saturating_sub(before);
        self.drain()?;
        set_rates(sim, rates, args, Time::Both);
        Ok(all / args.steps)
    }

    /// What the host does for one step.
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

/// Calls that take time of the host.
#[derive(Clone, Copy, Debug, Default)]
struct Calls {
    /// Operations whose first phase was run.
    made: usize,
    /// What was handed to a stream: operations, collectives, copies, events, graphs, updates of their tasks.
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

/// How long the memories of all cards together take to give so many bytes.
fn ms_of(bytes: u64, args: &Args) -> f64 {
    bytes as f64 / args.bandwidth as f64 / 1e6 / f64::from(args.cards)
}

/// All tensors of a model, which share one stretch of zeros.
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
                return Err("a layer of a kind that this example does not know".into());
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
        // Pages that are never written are zeros that take no memory.
        Ok(Self { dtype, shapes, bytes: MmapMut::map_anon(longest)? })
    }

    /// Vectors are never in blocks.
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
