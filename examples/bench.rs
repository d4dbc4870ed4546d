//! Measures the usual scenarios: prefill of 512 tokens, decode after 32 and after 1,024, batches, load time, memory.
//!
//! ```sh
//! cargo run --release --example bench -- --model MODEL.gguf --threads 2 --json
//! ```
//! With `--json` each figure is one line with the fields `peer, model, dtype, scen, metric, value, round, ts`. Scenarios:
//! `ppN` prefill of N tokens; `tg@P` decode after P tokens of context; `bgBxP+G` decode of B sequences at once, and
//! `bgppBxP` their prefill; `first_token_warm` from opening the file to the first of 32 prompt tokens' answer.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use ascend_llm::engine::{Engine, EngineConfig, Request};
use ascend_llm::sampler::SamplingParams;
use clap::Parser;
use serde_json::json;

mod terminal;
use terminal::{ModelArgs, Result, peak_memory_bytes};

/// Measures prefill, decode, batches, load time and memory.
#[derive(Debug, Parser)]
struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Which: load, pp, tg, bg.
    #[arg(long, value_delimiter = ',', default_value = "load,pp,tg,bg")]
    what: Vec<String>,
    /// Batches as BxP+G: sequences x prompt tokens + generated tokens.
    #[arg(long, value_delimiter = ',', default_value = "8x128+64,32x128+64,64x64+32")]
    batches: Vec<String>,
    /// Tokens generated where one sequence decodes.
    #[arg(long, default_value_t = 128)]
    generate: u32,
    /// Runs of each scenario; every one is printed.
    #[arg(long, default_value_t = 3)]
    reps: u32,
    /// JSON lines instead of a table.
    #[arg(long)]
    json: bool,
    /// Label of the round, copied into each line.
    #[arg(long, default_value_t = 0)]
    round: u32,
}

fn main() -> ExitCode {
    terminal::finish(run(&Args::parse()))
}

struct Report<'a> {
    args: &'a Args,
    model: String,
    dtype: String,
}

impl Report<'_> {
    fn emit(&self, scenario: &str, metric: &str, value: f64) {
        if self.args.json {
            let ts = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |t| t.as_secs());
            let line = json!({
                "peer": "ascend-llm", "model": self.model, "dtype": self.dtype, "scen": scenario, "metric": metric,
                "value": (value * 1e4).round() / 1e4, "round": self.args.round, "ts": ts,
            });
            println!("{line}");
        } else {
            println!("{:>12} {:>8} {scenario:<20} {value:>12.2} {metric}", self.model, self.dtype);
        }
    }
}

fn run(args: &Args) -> Result<()> {
    for what in &args.what {
        if !["load", "pp", "tg", "bg"].contains(&what.as_str()) {
            return Err(format!("--what {what}: expected load, pp, tg or bg").into());
        }
    }
    let batches = args.batches.iter().map(|text| parse_batch(text)).collect::<Result<Vec<_>>>()?;
    let path: PathBuf = args.model.path();
    let wants = |what: &str| args.what.iter().any(|w| w == what);

    let start = Instant::now();
    let engine = args.model.load(config(args, &batches))?;
    let info = engine.info();
    let stem = path.file_stem().map_or("model".into(), |stem| stem.to_string_lossy().into_owned());
    let report = Report { args, model: stem, dtype: info.weight_dtype.clone() };
    let vocab = info.vocab_size;
    let (longest, longest_batch) = (info.max_model_len, info.pool_tokens);

    if wants("load") {
        decode(&engine, &[prompt(1, 32.min(longest - 1), vocab)], 1)?;
        report.emit("first_token_warm", "s", start.elapsed().as_secs_f64());
        emit_peak(&report, "rss_load_32tok");
    }
    let mut seed = 100;
    let mut prompts = |batch: u32, tokens: u32| {
        seed += batch;
        (0..batch).map(|i| prompt(seed + i, tokens, vocab)).collect::<Vec<_>>()
    };
    if wants("pp") && longest > 512 {
        for rep in 0..=args.reps {
            let run = decode(&engine, &prompts(1, 512), 1)?;
            if rep > 0 {
                report.emit("pp512", "tok/s", 512.0 / run.prefill_s);
            }
        }
        emit_peak(&report, "rss_pp512");
    }
    if wants("tg") {
        for context in [32, 1024] {
            if context + args.generate > longest {
                continue;
            }
            for rep in 0..=args.reps {
                let run = decode(&engine, &prompts(1, context), args.generate)?;
                if rep > 0 {
                    report.emit(&format!("tg@{context}"), "tok/s", f64::from(args.generate - 1) / run.decode_s);
                }
            }
        }
    }
    if wants("bg") {
        for &(batch, tokens, generate) in &batches {
            if tokens + generate > longest || u64::from(batch * (tokens + generate + 16)) > longest_batch {
                continue;
            }
            for _ in 0..args.reps {
                let run = decode(&engine, &prompts(batch, tokens), generate)?;
                let scenario = format!("bg{batch}x{tokens}+{generate}");
                report.emit(&scenario, "tok/s", f64::from(batch * (generate - 1)) / run.decode_s);
                report.emit(&format!("bgpp{batch}x{tokens}"), "tok/s", f64::from(batch * tokens) / run.prefill_s);
            }
            emit_peak(&report, &format!("rss_bg{batch}x{tokens}+{generate}"));
        }
    }
    Ok(())
}

fn emit_peak(report: &Report<'_>, scenario: &str) {
    if let Some(bytes) = peak_memory_bytes() {
        report.emit(scenario, "MiB", bytes as f64 / f64::from(1 << 20));
    }
}

fn config(args: &Args, batches: &[(u32, u32, u32)]) -> EngineConfig {
    let mut config = EngineConfig::default();
    config.threads = args.model.threads;
    // Each prompt is new, and a hit would measure something else.
    config.prefix_caching = false;
    config.max_num_seqs = batches.iter().map(|b| b.0).max().unwrap_or(1).max(1);
    config.max_queue = config.max_num_seqs;
    config
}

fn parse_batch(text: &str) -> Result<(u32, u32, u32)> {
    let parse = || {
        let (batch, rest) = text.split_once('x')?;
        let (tokens, generate) = rest.split_once('+')?;
        let numbers = (batch.parse().ok()?, tokens.parse().ok()?, generate.parse().ok()?);
        (numbers.0 >= 1 && numbers.1 >= 1 && numbers.2 >= 2).then_some(numbers)
    };
    parse().ok_or_else(|| format!("--batches {text}: expected BxP+G with B, P ≥ 1 and G ≥ 2, as in 8x128+64").into())
}

/// `n` token ids, different for each seed, none special in a vocabulary of the usual kind.
fn prompt(seed: u32, n: u32, vocab: u32) -> Vec<u32> {
    let low = (vocab / 8).min(1000);
    let mut x = seed.wrapping_mul(7919).wrapping_add(17);
    (0..n)
        .map(|_| {
            x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            low + (x >> 8) % (vocab - 2 * low)
        })
        .collect()
}

struct Run {
    /// From submission until every sequence has its first token.
    prefill_s: f64,
    /// From there until the last token of the last sequence.
    decode_s: f64,
}

/// Runs sequences side by side, each for exactly `generate` tokens.
fn decode(engine: &Engine, prompts: &[Vec<u32>], generate: u32) -> Result<Run> {
    let mut params = SamplingParams::greedy();
    params.max_tokens = Some(generate);
    params.ignore_eos = true;
    let start = Instant::now();
    let handles = prompts
        .iter()
        .map(|prompt| engine.submit(Request::tokens(prompt.clone()).sampling(params.clone())))
        .collect::<std::result::Result<Vec<_>, _>>()?;
    let outputs =
        handles.into_iter().map(|handle| handle.collect_output()).collect::<std::result::Result<Vec<_>, _>>()?;
    let total_s = start.elapsed().as_secs_f64();
    let first = outputs.iter().filter_map(|output| output.usage.time_to_first_token).max();
    let prefill_s = first.map_or(total_s, |t| t.as_secs_f64());
    for output in &outputs {
        let got = output.choices[0].token_ids.len();
        if got != generate as usize {
            return Err(format!("a sequence gave {got} tokens instead of {generate}").into());
        }
    }
    Ok(Run { prefill_s, decode_s: total_s - prefill_s })
}
