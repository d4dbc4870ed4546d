//! Where the time goes: runs a prefill and some decode steps on the CPU and prints the time of each operation, its share,
//! its arithmetic and its traffic.
//!
//! ```sh
//! cargo run --release --example profile -- --model MODEL.gguf --trace trace.json
//! ```
//! The trace opens in `chrome://tracing` and in Perfetto. Rates are those of the cost model (see `graph::Cost`): operations
//! and bytes that the plan asks for, whatever caches make of them.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use ascend_llm::device::Device as _;
use ascend_llm::device::cpu::{CpuDevice, CpuOptions, StepTime};
use ascend_llm::engine::{CacheBudget, EngineConfig, Forward as _, ForwardInput, ModelRunner};
use ascend_llm::graph::{CompileOptions, Cost, Numerics, Plan, compile};
use ascend_llm::kv_cache::BlockId;
use clap::Parser;
use serde_json::{Value, json};

mod terminal;
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
    /// Fusion level; the default of the compiler if left out.
    #[arg(long)]
    fusion: Option<u8>,
    /// Writes a trace there.
    #[arg(long)]
    trace: Option<PathBuf>,
}

fn main() -> ExitCode {
    terminal::finish(run(&Args::parse()))
}

/// Times and costs of a kind of step, summed by operation.
#[derive(Debug, Default)]
struct Sums {
    launches: u32,
    ops: Vec<(&'static str, f64, Cost)>,
}

impl Sums {
    fn add(&mut self, times: &[StepTime], costs: &[Cost]) {
        self.launches += 1;
        for time in times {
            let cost = costs[time.step];
            if let Some((_, us, sum)) = self.ops.iter_mut().find(|(op, ..)| *op == time.op) {
                *us += time.total_us;
                *sum += cost;
            } else {
                self.ops.push((time.op, time.total_us, cost));
            }
        }
    }

    fn table(&self, title: &str) -> String {
        let all_us: f64 = self.ops.iter().map(|(_, us, _)| us).sum();
        let mut text = format!(
            "{title}: {} launches, {:.2} ms each\n{:<16} {:>12} {:>8} {:>10} {:>10}\n",
            self.launches,
            all_us / 1e3 / f64::from(self.launches.max(1)),
            "operation",
            "us a launch",
            "share",
            "GFLOP/s",
            "GB/s"
        );
        let mut line = |op: &str, us: f64, cost: Cost| {
            // Operations a microsecond are millions a second.
            let rate = |amount: u64| if us > 0.0 { amount as f64 / us / 1e3 } else { 0.0 };
            let (each, share) = (us / f64::from(self.launches.max(1)), 100.0 * us / all_us.max(f64::MIN_POSITIVE));
            let (flops, bytes) = (rate(cost.flops), rate(cost.bytes()));
            let _ = writeln!(text, "{op:<16} {each:>12.1} {share:>7.1}% {flops:>10.2} {bytes:>10.2}");
        };
        let mut ops = self.ops.clone();
        ops.sort_by(|a, b| b.1.total_cmp(&a.1));
        for (op, us, cost) in &ops {
            line(op, *us, *cost);
        }
        line("total", all_us, ops.iter().map(|(.., cost)| *cost).sum());
        text
    }
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
    options.threads = args.model.threads;
    options.profile = true;
    let device = Arc::new(CpuDevice::new(options)?);

    let mut compile_options = CompileOptions::default();
    compile_options.fusion = args.fusion;
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
    let kv_element_bytes = if numerics == Numerics::Exact { 4 } else { 2 };

    let table: Vec<BlockId> = (0..blocks).map(BlockId).collect();
    let mut profiled = Profiled { device, runner, plan, table, block_size, kv_element_bytes, events: Vec::new() };
    let (mut prefill, mut decode) = (Sums::default(), Sums::default());
    let vocab = u32::try_from(model.vocab_size)?;
    let prompt: Vec<u32> = (0..args.prefill).map(|at| at.wrapping_mul(7919).wrapping_add(17) % vocab).collect();
    // The first launches bring memory in and wake the team: not counted.
    profiled.step(&prompt, args.prefill, &mut Sums::default())?;
    profiled.step(&prompt[..1], 1, &mut Sums::default())?;
    profiled.events.clear();

    let mut next = profiled.step(&prompt, args.prefill, &mut prefill)?;
    for at in 1..=args.decode {
        next = profiled.step(&[next], args.prefill + at, &mut decode)?;
    }
    print!("{}, {} steps a launch\n\n", profiled.device.caps().description, profiled.plan.steps.len());
    println!("{}", prefill.table(&format!("prefill of {} tokens", args.prefill)));
    print!("{}", decode.table(&format!("decode after {} tokens", args.prefill)));
    if let Some(path) = &args.trace {
        let trace = json!({ "displayTimeUnit": "ms", "traceEvents": profiled.events });
        std::fs::write(path, trace.to_string()).map_err(|error| format!("{}: {error}", path.display()))?;
    }
    Ok(())
}

struct Profiled {
    device: Arc<CpuDevice>,
    runner: ModelRunner,
    plan: Plan,
    table: Vec<BlockId>,
    block_size: u32,
    kv_element_bytes: u64,
    events: Vec<Value>,
}

impl Profiled {
    /// Runs one step of a sequence that then has `kv_len` tokens; gives its most likely next token.
    fn step(&mut self, tokens: &[u32], kv_len: u32, sums: &mut Sums) -> Result<u32> {
        let rows = u32::try_from(tokens.len())?;
        let input = ForwardInput {
            tokens: tokens.to_vec(),
            q_lens: vec![rows],
            kv_lens: vec![kv_len],
            tables: self.table[..kv_len.div_ceil(self.block_size) as usize].to_vec(),
            logit_rows: vec![rows - 1],
            f32_from: Vec::new(),
        };
        let logits = self.runner.forward(&input)?.logits;
        let best = logits.best.first().map_or(0, |&id| id as usize);
        let times = self.device.take_profile(self.runner.program());
        let costs = self.plan.batch_costs(&input.q_lens, &input.kv_lens, 1, self.kv_element_bytes);
        sums.add(&times, &costs);
        for time in &times {
            let cost = costs[time.step];
            self.events.push(json!({
                "name": time.op, "ph": "X", "pid": 1, "tid": 1, "ts": time.last_start_us, "dur": time.total_us,
                "args": {
                    "step": time.step, "layer": time.layer, "rows": rows, "kv_len": kv_len,
                    "flops": cost.flops, "bytes": cost.bytes(),
                },
            }));
        }
        Ok(u32::try_from(best)?)
    }
}
