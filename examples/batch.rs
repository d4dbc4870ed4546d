//! Answers a file of prompts, one prompt a line, and prints JSON lines in input order.
//!
//! ```sh
//! cargo run --release --example batch -- prompts.txt > answers.jsonl
//! ```
//! All prompts are submitted at once. A prompt that fails has an `error` in its line, and the exit code is 1. A summary
//! goes to stderr.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use ascend_llm::engine::{EngineConfig, GenerateError, Output, Request, RequestHandle};
use ascend_llm::sampler::SamplingParams;
use ascend_llm::text::ChatMessage;
use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;

mod terminal;
use terminal::{ModelArgs, Result};

/// Answers a file of prompts and prints JSON lines in input order.
#[derive(Debug, Parser)]
struct Args {
    /// File with one prompt a line; empty lines are skipped.
    prompts: PathBuf,
    #[command(flatten)]
    model: ModelArgs,
    /// Renders each prompt with the model's chat template.
    #[arg(long)]
    chat: bool,
    /// Maximum number of tokens to generate for each prompt.
    #[arg(long, default_value_t = 64)]
    max_tokens: u32,
    /// Sampling temperature; 0 is greedy.
    #[arg(long, default_value_t = 0.0)]
    temperature: f32,
    /// Seed of the sampler; the same seed repeats the answers.
    #[arg(long)]
    seed: Option<u64>,
    /// Maximum number of requests that run at once.
    #[arg(long, default_value_t = 64)]
    max_num_seqs: u32,
}

fn main() -> ExitCode {
    terminal::finish(run(&Args::parse()))
}

fn run(args: &Args) -> Result<()> {
    let text = std::fs::read_to_string(&args.prompts)
        .map_err(|error| format!("cannot read {}: {error}", args.prompts.display()))?;
    let prompts: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();

    let mut config = EngineConfig::default().with_max_num_seqs(args.max_num_seqs);
    config.max_queue = u32::try_from(prompts.len().max(1))?;
    let engine = args.model.builder(config, args.model.device()?).build()?;

    let mut params = SamplingParams::default().with_max_tokens(args.max_tokens);
    (params.temperature, params.seed) = (args.temperature, args.seed);

    let start = Instant::now();
    let request = |&prompt: &&str| {
        let request = if args.chat { Request::chat([ChatMessage::user(prompt)]) } else { Request::text(prompt) };
        engine.submit(request.with_sampling(params.clone()))
    };
    let handles: Vec<_> = prompts.iter().map(request).collect();

    let bar = ProgressBar::new(prompts.len() as u64)
        .with_style(ProgressStyle::with_template("{bar:40} {pos}/{len} prompts, {elapsed}, {eta} left")?);
    let mut out = std::io::stdout().lock();
    let (mut failed, mut tokens) = (0, 0);
    for (index, (prompt, handle)) in prompts.iter().zip(handles).enumerate() {
        let line = match handle.map_err(GenerateError::from).and_then(answer) {
            Ok(output) => {
                tokens += u64::from(output.usage.generated_tokens);
                line(index, prompt, &output)
            }
            Err(error) => {
                failed += 1;
                json!({ "index": index, "prompt": prompt, "error": terminal::chain(&error) })
            }
        };
        bar.suspend(|| writeln!(out, "{line}"))?;
        bar.inc(1);
    }
    bar.finish_and_clear();
    let seconds = start.elapsed().as_secs_f64();
    eprintln!(
        "{} prompts, {failed} failed, {tokens} tokens generated in {seconds:.2} s, {:.0} tokens/s",
        prompts.len(),
        tokens as f64 / seconds,
    );
    if failed > 0 { Err(format!("{failed} of {} prompts failed", prompts.len()).into()) } else { Ok(()) }
}

/// Waits for the whole answer.
fn answer(handle: RequestHandle) -> std::result::Result<Output, GenerateError> {
    Ok(handle.collect_output()?)
}

/// JSON line of an answer.
fn line(index: usize, prompt: &str, output: &Output) -> serde_json::Value {
    let choice = &output.choices[0];
    json!({
        "index": index,
        "prompt": prompt,
        "text": choice.text,
        "finish_reason": choice.finish_reason.as_str(),
        "prompt_tokens": output.usage.prompt_tokens,
        "cached_tokens": output.usage.cached_tokens,
        "generated_tokens": output.usage.generated_tokens,
    })
}
