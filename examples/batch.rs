//! Answers a file of prompts, one per line. The requests run together; the answers are JSON lines in input order.
//!
//! ```sh
//! cargo run --release --example batch -- prompts.txt > answers.jsonl
//! ```

use std::io::{IsTerminal as _, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use ascend_llm::engine::{EngineConfig, Request, SubmitError};
use ascend_llm::sampler::SamplingParams;
use ascend_llm::text::ChatMessage;
use clap::Parser;
use serde_json::json;

mod terminal;
use terminal::{ModelArgs, Result};

/// Answers each line of a file. The answers are JSON lines in input order; the exit code is 1 if a line failed.
#[derive(Debug, Parser)]
struct Args {
    /// File with one prompt per line. Empty lines are skipped.
    prompts: PathBuf,
    #[command(flatten)]
    model: ModelArgs,
    /// Sends each line through the chat template of the model.
    #[arg(long)]
    chat: bool,
    /// Maximum number of tokens to generate for each prompt.
    #[arg(long, default_value_t = 64)]
    max_tokens: u32,
    /// Sampling temperature. 0 always chooses the most likely token.
    #[arg(long, default_value_t = 0.0)]
    temperature: f32,
    /// Seed: equal seeds give equal answers.
    #[arg(long)]
    seed: Option<u64>,
    /// Maximum number of requests that run at the same time.
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

    // A refused prompt has its error in its line; the others run.
    let start = Instant::now();
    let mut handles = Vec::with_capacity(prompts.len());
    for prompt in &prompts {
        let request =
            if args.chat { Request::chat(vec![ChatMessage::new("user", *prompt)]) } else { Request::text(*prompt) };
        handles.push(engine.submit(request.with_sampling(params.clone())));
    }

    let show_progress = std::io::stderr().is_terminal();
    let (mut failed, mut prompt_tokens, mut generated_tokens) = (0_usize, 0_u64, 0_u64);
    let mut out = std::io::stdout().lock();
    for (index, (prompt, handle)) in prompts.iter().zip(handles).enumerate() {
        let answer: std::result::Result<_, SubmitError> = handle;
        let line = match answer.map(ascend_llm::engine::RequestHandle::collect_output) {
            Ok(Ok(output)) => {
                let choice = &output.choices[0];
                prompt_tokens += u64::from(output.usage.prompt_tokens);
                generated_tokens += u64::from(output.usage.generated_tokens);
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
        failed += usize::from(line.get("error").is_some());
        writeln!(out, "{line}")?;
        if show_progress {
            eprint!("\r{} of {} prompts", index + 1, prompts.len());
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    let summary = format!(
        "{} prompts ({failed} failed), {prompt_tokens} prompt tokens, {generated_tokens} generated tokens in {seconds:.2} s: \
         {:.0} generated tokens/s",
        prompts.len(),
        generated_tokens as f64 / seconds
    );
    eprintln!("{}{summary}", if show_progress { "\r\x1b[K" } else { "" });
    if failed > 0 {
        return Err(format!("{failed} of {} prompts failed; their lines hold the reasons", prompts.len()).into());
    }
    Ok(())
}
