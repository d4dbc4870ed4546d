//! Streams one answer to the terminal: a story from the bundled model, or the answer of a model of your own.
//!
//! ```sh
//! cargo run --release --example generate
//! cargo run --release --example generate -- --model MODEL.gguf --chat "What is the capital of France?" --temperature 0
//! ```
//! Numerics on a CPU are `exact`, and `fast` with `--kv-dtype f16`, `bf16` or `i8`, which `exact` does not support.

use std::io::Write as _;
use std::process::ExitCode;
use std::time::Instant;

use ascend_llm::engine::{EngineConfig, Request};
use ascend_llm::sampler::SamplingParams;
use ascend_llm::text::ChatMessage;
use clap::Parser;

mod terminal;
use terminal::{ModelArgs, Result, peak_memory_bytes};

/// Streams one answer to the terminal.
#[derive(Debug, Parser)]
struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Text to continue.
    #[arg(long, default_value = "Once upon a time", conflicts_with = "chat")]
    prompt: String,
    /// Question to answer, rendered with the model's chat template.
    #[arg(long)]
    chat: Option<String>,
    /// Maximum number of tokens to generate.
    #[arg(long, default_value_t = 256)]
    max_tokens: u32,
    /// Sampling temperature; 0 is greedy.
    #[arg(long, default_value_t = 0.0)]
    temperature: f32,
    /// Samples from the most likely tokens whose probabilities add up to this value.
    #[arg(long, default_value_t = 1.0)]
    top_p: f32,
    /// Samples from this many of the most likely tokens; 0 and -1 disable the limit.
    #[arg(long, default_value_t = 0, allow_negative_numbers = true)]
    top_k: i32,
    /// Seed of the sampler; the same seed repeats the answer.
    #[arg(long)]
    seed: Option<u64>,
}

fn main() -> ExitCode {
    terminal::finish(run(&Args::parse()))
}

fn run(args: &Args) -> Result<()> {
    let config = EngineConfig::default().with_max_num_seqs(1).with_numerics(args.model.numerics_for_reading());
    let engine = args.model.builder(config, args.model.device()?).build()?;
    for note in engine.info().notes.iter().chain(&engine.device_notes()) {
        eprintln!("note: {note}");
    }

    let mut params = SamplingParams::default().with_max_tokens(args.max_tokens);
    (params.temperature, params.top_p, params.top_k) = (args.temperature, args.top_p, args.top_k);
    params.seed = args.seed;

    let request = match &args.chat {
        Some(question) => Request::chat([ChatMessage::user(question)]),
        None => Request::text(&args.prompt),
    };
    let start = Instant::now();
    let handle = engine.submit(request.with_sampling(params))?;
    let prompt_tokens = handle.prompt_token_ids().len();
    let mut out = std::io::stdout().lock();
    if args.chat.is_none() {
        out.write_all(args.prompt.as_bytes())?;
    }
    // The first delta may hold several tokens. The decode rate counts the tokens after that delta.
    let (mut generated, mut in_first, mut first) = (0, 0, None);
    for delta in handle {
        let delta = delta?;
        generated += delta.token_ids.len();
        if first.is_none() && generated > 0 {
            (first, in_first) = (Some(start.elapsed()), generated);
        }
        out.write_all(delta.text.as_bytes())?;
        out.flush()?;
    }
    let total = start.elapsed();
    let first = first.unwrap_or(total);
    let decode = match generated - in_first {
        0 => "not measured".to_owned(),
        tokens => format!("{:.0} tokens/s", tokens as f64 / total.saturating_sub(first).as_secs_f64()),
    };
    let memory = match peak_memory_bytes() {
        Some(bytes) => format!("{:.0} MiB", bytes as f64 / f64::from(1 << 20)),
        None => "unknown".to_owned(),
    };
    writeln!(
        out,
        "\n\n[prompt {prompt_tokens} tokens, generated {generated} tokens, time to first token {:.1} ms, \
         prefill {:.0} tokens/s, decode {decode}, peak memory {memory}]",
        first.as_secs_f64() * 1e3,
        prompt_tokens as f64 / first.as_secs_f64(),
    )?;
    Ok(())
}
