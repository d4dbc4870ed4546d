//! Profiler: runs a prefill step and decode steps on the CPU and prints the time, arithmetic, memory traffic and
//! utilization of each operation.
//!
//! ```sh
//! cargo run --release -p ascend-llm-tools --bin profile -- --model MODEL.gguf --trace trace.json
//! ```
//! The trace opens in `chrome://tracing` and in Perfetto. Operations and bytes come from the plan's cost model (see
//! `graph::Cost`), which ignores caches. MFU and MBU are shares of the peaks at the head of the output: MFU of the
//! arithmetic rates, f32 and int8 each at its own peak, MBU of the memory's read bandwidth. Data that stays in a cache
//! between steps (the rows of a prefill, a small model) can bring MBU above 100 %.

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use ascend_llm::device::cpu::{CpuDevice, CpuOptions};
use ascend_llm::device::{Device as _, PeakRates};
use ascend_llm::engine::{CacheBudget, EngineConfig};
use ascend_llm::graph::{Plan, compile};
use ascend_llm::kv_cache::BlockId;
use ascend_llm::runner::{ForwardInput, ForwardOutput, ModelExecutor as _, ModelRunner};
use ascend_llm_tools::compile_args::CompileArgs;
use ascend_llm_tools::op_table::{OpTable, Rates};
use ascend_llm_tools::terminal::{self, ModelArgs, Result};
use ascend_llm_tools::{graph, kv_element_bytes};
use clap::Parser;
use serde_json::{Value, json};

/// Times each operation of a prefill step and of decode steps.
#[derive(Debug, Parser)]
struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Tokens of the prefill step.
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..))]
    prefill: u32,
    /// Number of decode steps after it.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    decode: u32,
    #[command(flatten)]
    compile: CompileArgs,
    /// Writes a trace in the Trace Event format (JSON).
    #[arg(long)]
    trace: Option<PathBuf>,
}

fn main() -> ExitCode {
    terminal::finish(run(&Args::parse()))
}

fn run(args: &Args) -> Result<()> {
    if !args.model.is_cpu() {
        return Err("--device: expected cpu, the only device that times its steps".into());
    }
    let (model, graph) = graph(&args.model.path())?;
    let tokens = args.prefill.checked_add(args.decode).filter(|&all| all as usize <= model.max_position_embeddings);
    let tokens = tokens.ok_or_else(|| {
        let (prefill, decode, longest) = (args.prefill, args.decode, model.max_position_embeddings);
        format!(
            "--prefill {prefill} --decode {decode}: expected at most {longest} tokens in total, the model's context"
        )
    })?;
    let mut options = CpuOptions::default();
    (options.threads, options.isa, options.profile) = (args.model.threads, args.model.isa, true);
    let device = Arc::new(CpuDevice::new(options)?);

    let compile_options = args.compile.options()?;
    let numerics = args.model.numerics.unwrap_or_default();
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
    let runner = args.model.builder(config, device.clone()).build_runner()?;
    // The plan that the runner loaded on the device.
    let plan = compile(&graph, device.caps().target, numerics, &compile_options, runner.shape().bucket)?;
    let kv_element_bytes = kv_element_bytes(&args.model);

    let table: Vec<BlockId> = (0..blocks).map(BlockId).collect();
    let peaks = device.telemetry().and_then(ascend_llm::device::Telemetry::peak_rates);
    let mut profiled =
        Profiled { device, peaks, runner, plan, table, block_size, kv_element_bytes, events: Vec::new() };
    let (mut prefill, mut decode) = (OpTable::default(), OpTable::default());
    let vocab = u32::try_from(model.vocab_size)?;
    let prompt: Vec<u32> = (0..args.prefill).map(|at| at.wrapping_mul(7919).wrapping_add(17) % vocab).collect();
    // The first launches touch the memory and start the thread pool, so they are not counted.
    profiled.step(&prompt, args.prefill, &mut OpTable::default())?;
    profiled.step(&prompt[..1], 1, &mut OpTable::default())?;
    profiled.events.clear();

    let mut next = profiled.step(&prompt, args.prefill, &mut prefill)?;
    for at in 1..=args.decode {
        next = profiled.step(&[next], args.prefill + at, &mut decode)?;
    }
    let mut text = format!("{}, {} steps per launch\n", profiled.device.caps().description, profiled.plan.steps.len());
    if let Some(peaks) = peaks {
        let rates = [peaks.f32_flops_per_s, peaks.int8_ops_per_s, peaks.read_bytes_per_s];
        let [flops, int8_ops, bytes] = rates.map(|per_s| per_s as f64 / 1e9);
        writeln!(text, "peaks: f32 {flops:.0} GFLOP/s, int8 {int8_ops:.0} GOP/s, read {bytes:.1} GB/s")?;
    }
    writeln!(text, "\n{}", prefill.text(&format!("prefill of {} tokens", args.prefill), peaks.as_ref()))?;
    text.push_str(&decode.text(&format!("decode after {} tokens", args.prefill), peaks.as_ref()));
    std::io::stdout().write_all(text.as_bytes())?;
    if let Some(path) = &args.trace {
        let trace = json!({ "displayTimeUnit": "ms", "traceEvents": profiled.events });
        std::fs::write(path, trace.to_string()).map_err(|error| format!("cannot write {}: {error}", path.display()))?;
    }
    Ok(())
}

/// A model on a device that times its steps.
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
    /// Runs a step of a sequence, which has `kv_len` tokens after it, and returns the argmax of its last row.
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
        let next = logits.argmax.first().map_or(0, |&id| id);
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
        Ok(next)
    }
}
