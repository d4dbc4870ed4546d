//! Where the time goes: runs a prefill and some decode steps on the CPU and prints the time of each operation, its share,
//! its arithmetic and its traffic, and how much that is of what the machine can do.
//!
//! ```sh
//! cargo run --release -p ascend-llm-tools --bin profile -- --model MODEL.gguf --trace trace.json
//! ```
//! The trace opens in `chrome://tracing` and in Perfetto. Rates are those of the cost model (see `graph::Cost`): operations
//! and bytes that the plan asks for, whatever caches make of them. MFU and MBU are shares of the peaks in the first line: of
//! arithmetic, f32 and int8 each at its own, and of reading from memory. What stays in caches from step to step (the rows of
//! a prefill, all of a small model) may so exceed 100 % of memory.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use ascend_llm::device::cpu::{CpuDevice, CpuOptions};
use ascend_llm::device::{Device as _, PeakRates};
use ascend_llm::engine::{CacheBudget, EngineConfig};
use ascend_llm::graph::{Plan, compile};
use ascend_llm::kv_cache::BlockId;
use ascend_llm::runner::{ForwardInput, ForwardOutput, ModelExecutor as _, ModelRunner};
use clap::Parser;
use serde_json::{Value, json};

mod compile_args;
#[path = "../terminal/mod.rs"]
mod terminal;
use compile_args::CompileArgs;
use terminal::op_table::{OpTable, Rates};
use terminal::{ModelArgs, Result};

/// Times each operation of a prefill and of decode steps.
#[derive(Debug, Parser)]
struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Tokens of the prefill step.
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..))]
    prefill: u32,
    /// Decode steps after it.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    decode: u32,
    #[command(flatten)]
    compile: CompileArgs,
    /// Writes a trace there.
    #[arg(long)]
    trace: Option<PathBuf>,
}

fn main() -> ExitCode {
    terminal::finish(run(&Args::parse()))
}

fn run(args: &Args) -> Result<()> {
    if args.model.device != "cpu" {
        return Err(format!("--device {}: only the cpu times its steps", args.model.device).into());
    }
    let (model, graph) = args.model.graph()?;
    let tokens = args.prefill.checked_add(args.decode).filter(|&all| all as usize <= model.max_position_embeddings);
    let tokens = tokens.ok_or_else(|| {
        let (prefill, decode, longest) = (args.prefill, args.decode, model.max_position_embeddings);
        format!("--prefill {prefill} --decode {decode}: expected at most the model's {longest} tokens together")
    })?;
    let mut options = CpuOptions::default();
    (options.threads, options.isa, options.profile) = (args.model.threads, args.model.isa()?, true);
    let device = Arc::new(CpuDevice::new(options)?);

    let compile_options = args.compile.options()?;
    let numerics = args.model.numerics();
    let block_size = u32::try_from(device.caps().default_block_size)?;
    let blocks = tokens.div_ceil(block_size);
    let mut config = EngineConfig::default();
    config.numerics = numerics;
    config.compile = compile_options.clone();
    config.max_num_seqs = 1;
    config.max_num_batched_tokens = args.prefill;
    config.max_model_len = Some(tokens);
    config.block_size = Some(block_size);
    config.kv_cache = CacheBudget::Blocks(blocks);
    let runner = args.model.load_runner(config, device.clone())?;
    // The same plan that the runner has on the device.
    let plan = compile(&graph, device.caps().target, numerics, &compile_options, runner.shape().bucket)?;
    let kv_element_bytes = args.model.kv_element_bytes();

    let table: Vec<BlockId> = (0..blocks).map(BlockId).collect();
    let peaks = device.telemetry().and_then(ascend_llm::device::Telemetry::peak_rates);
    let mut profiled =
        Profiled { device, peaks, runner, plan, table, block_size, kv_element_bytes, events: Vec::new() };
    let (mut prefill, mut decode) = (OpTable::default(), OpTable::default());
    let vocab = u32::try_from(model.vocab_size)?;
    let prompt: Vec<u32> = (0..args.prefill).map(|at| at.wrapping_mul(7919).wrapping_add(17) % vocab).collect();
    // The first launches bring memory in and wake the team: not counted.
    profiled.step(&prompt, args.prefill, &mut OpTable::default())?;
    profiled.step(&prompt[..1], 1, &mut OpTable::default())?;
    profiled.events.clear();

    let mut next = profiled.step(&prompt, args.prefill, &mut prefill)?;
    for at in 1..=args.decode {
        next = profiled.step(&[next], args.prefill + at, &mut decode)?;
    }
    println!("{}, {} steps a launch", profiled.device.caps().description, profiled.plan.steps.len());
    if let Some(peaks) = peaks {
        let giga = |per_s: u64| per_s as f64 / 1e9;
        let (f32s, int8s, bytes) = (peaks.f32_flops_per_s, peaks.int8_ops_per_s, peaks.read_bytes_per_s);
        println!("peaks: f32 {:.0} GFLOP/s, int8 {:.0} GOP/s, read {:.1} GB/s", giga(f32s), giga(int8s), giga(bytes));
    }
    println!("\n{}", prefill.text(&format!("prefill of {} tokens", args.prefill), peaks.as_ref()));
    print!("{}", decode.text(&format!("decode after {} tokens", args.prefill), peaks.as_ref()));
    if let Some(path) = &args.trace {
        let trace = json!({ "displayTimeUnit": "ms", "traceEvents": profiled.events });
        std::fs::write(path, trace.to_string()).map_err(|error| format!("{}: {error}", path.display()))?;
    }
    Ok(())
}

struct Profiled {
    device: Arc<CpuDevice>,
    peaks: Option<PeakRates>,
    runner: ModelRunner,
    plan: Plan,
    table: Vec<BlockId>,
    block_size: u32,
    kv_element_bytes: u64,
    events: Vec<Value>,
}

impl Profiled {
    /// Runs one step of a sequence that then has `kv_len` tokens; gives its most likely next token.
    fn step(&mut self, tokens: &[u32], kv_len: u32, sums: &mut OpTable) -> Result<u32> {
        let rows = u32::try_from(tokens.len())?;
        let input = ForwardInput::new(
            tokens.to_vec(),
            vec![rows],
            vec![kv_len],
            self.table[..kv_len.div_ceil(self.block_size) as usize].to_vec(),
        )
        .with_logit_rows(vec![rows - 1]);
        let ForwardOutput { logits, input, .. } = self.runner.forward(input)?;
        let best = logits.argmax.first().map_or(0, |&id| id as usize);
        let times = self.device.take_profile(self.runner.program());
        let costs = self.plan.batch_costs(&input.q_lens, &input.kv_lens, 1, self.kv_element_bytes);
        sums.add_launch(times.iter().map(|time| (time.op, time.total_us, costs[time.step])));
        for time in &times {
            let cost = costs[time.step];
            let rates = Rates::of(&cost, time.total_us, self.peaks.as_ref());
            self.events.push(json!({
                "name": time.op, "ph": "X", "pid": 1, "tid": 1, "ts": time.last_start_us, "dur": time.total_us,
                "args": {
                    "step": time.step, "layer": time.layer, "rows": rows, "kv_len": kv_len,
                    "flops": cost.flops, "int8_flops": cost.int8_flops, "bytes": cost.bytes(),
                    "gflops_per_s": rates.gflops_per_s, "gbytes_per_s": rates.gbytes_per_s,
                    "mfu": rates.mfu, "mbu": rates.mbu,
                },
            }));
        }
        Ok(u32::try_from(best)?)
    }
}
