//! A file of prompts, one a line, all submitted at once; JSON lines come out in input order.
//!
//! ```sh
//! cargo run --release --example batch -- prompts.txt > answers.jsonl
//! ```

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use ascend_llm::engine::{EngineConfig, Request, SubmitError};
use ascend_llm::sampler::SamplingParams;
use ascend_llm::text::ChatMessage;
use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;

mod terminal;
use terminal::{ModelArgs, Result};

/// Answers every line of a file; JSON lines come out in input order.
#[derive(Debug, Parser)]
struct Args {
    /// One prompt a line; empty lines are passed over.
    prompts: PathBuf,
    #[command(flatten)]
    model: ModelArgs,
    /// Puts each line to the model through its chat template.
    #[arg(long)]
    chat: bool,
    /// Most tokens to generate for each prompt.
    #[arg(long, default_value_t = 64)]
    max_tokens: u32,
    /// 0 takes the most likely token each time.
    #[arg(long, default_value_t = 0.0)]
    temperature: f32,
    /// Makes sampled answers repeatable.
    #[arg(long)]
    seed: Option<u64>,
    /// Most requests that run at once.
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

    let mut config = EngineConfig::default();
    config.max_num_seqs = args.max_num_seqs;
    config.max_queue = u32::try_from(prompts.len().max(1))?;
    config.threads = args.model.threads;
    let engine = args.model.load(config)?;

    let mut params = SamplingParams::default();
    params.temperature = args.temperature;
    params.seed = args.seed;
    params.max_tokens = Some(args.max_tokens);

    // A prompt that is refused has its error in its line; the others run.
    let mut handles = Vec::with_capacity(prompts.len());
    for prompt in &prompts {
        let request =
            if args.chat { Request::chat(vec![ChatMessage::new("user", *prompt)]) } else { Request::text(*prompt) };
        handles.push(engine.submit(request.with_sampling(params.clone())));
    }

    let bar = ProgressBar::new(prompts.len() as u64)
        .with_style(ProgressStyle::with_template("{bar:40} {pos}/{len} prompts, {elapsed}, {eta} left")?);
    let mut out = std::io::stdout().lock();
    for (index, (prompt, handle)) in prompts.iter().zip(handles).enumerate() {
        let answer: std::result::Result<_, SubmitError> = handle;
        let line = match answer.map(ascend_llm::engine::RequestHandle::collect_output) {
            Ok(Ok(output)) => {
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
            Ok(Err(error)) => json!({ "index": index, "prompt": prompt, "error": terminal::chain(&error) }),
            Err(error) => json!({ "index": index, "prompt": prompt, "error": terminal::chain(&error) }),
        };
        writeln!(out, "{line}")?;
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(())
}
