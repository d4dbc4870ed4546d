//! Streams one answer to the terminal: a story from the small model that comes with the crate, or an answer from any model.
//!
//! ```sh
//! cargo run --release --example generate
//! cargo run --release --example generate -- --model MODEL.gguf --chat "What is the capital of France?" --temperature 0
//! ```

use std::io::Write as _;
use std::process::ExitCode;
use std::time::Instant;

use ascend_llm::engine::{EngineConfig, Request};
use ascend_llm::graph::Numerics;
use ascend_llm::kv_cache::KvDType;
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
    /// A question. It goes through the chat template of the model.
    #[arg(long)]
    chat: Option<String>,
    /// Maximum number of tokens to generate.
    #[arg(long, default_value_t = 256)]
    max_tokens: u32,
    /// Sampling temperature. 0 always chooses the most likely token.
    #[arg(long, default_value_t = 0.0)]
    temperature: f32,
    /// Samples among the most likely tokens whose probabilities add up to this.
    #[arg(long, default_value_t = 1.0)]
    top_p: f32,
    /// Samples among this many of the most likely tokens. 0 and -1 turn the limit off.
    #[arg(long, default_value_t = 0, allow_negative_numbers = true)]
    top_k: i32,
    /// Seed: equal seeds give equal answers.
    #[arg(long)]
    seed: Option<u64>,
}

fn main() -> ExitCode {
    terminal::finish(run(&Args::parse()))
}

fn run(args: &Args) -> Result<()> {
    let mut config = EngineConfig::default();
    config.max_num_seqs = 1;
    // For one answer that a person reads, the model's own words come before speed: int8 activations move a logit by some
    // tenths, which can change a word. `--numerics fast` shows the speed.
    if args.model.is_cpu() && args.model.numerics.is_none() {
        if args.model.kv_dtype() == Some(KvDType::I8) {
            eprintln!("numerics: fast, since exact numerics have no i8 keys and values");
            config.numerics = Numerics::Fast;
        } else {
            config.numerics = Numerics::Exact;
        }
    }
    config.threads = args.model.threads;
    let engine = args.model.load(config)?;
    for note in engine.info().notes.iter().chain(&engine.device_notes()) {
        eprintln!("{}: {note}", args.model.device);
    }

    let mut params = SamplingParams::default();
    params.temperature = args.temperature;
    params.top_p = args.top_p;
    params.top_k = args.top_k;
    params.seed = args.seed;
    params.max_tokens = Some(args.max_tokens);

    let request = if let Some(question) = &args.chat {
        Request::chat(vec![ChatMessage::new("user", question)])
    } else {
        Request::text(&args.prompt)
    };
    let start = Instant::now();
    let handle = engine.submit(request.with_sampling(params))?;
    let prompt_tokens = handle.prompt_token_ids().len();
    let mut out = std::io::stdout().lock();
    if args.chat.is_none() {
        out.write_all(args.prompt.as_bytes())?;
    }
    // A delta can hold several tokens. The decode rate counts the tokens after the first delta.
    let (mut generated, mut at_first, mut first) = (0, 0, None);
    for delta in handle {
        let delta = delta?;
        if !delta.token_ids.is_empty() {
            generated += delta.token_ids.len();
            if first.is_none() {
                (first, at_first) = (Some(start.elapsed()), generated);
            }
        }
        out.write_all(delta.text.as_bytes())?;
        out.flush()?;
    }
    let total = start.elapsed();
    let first = first.unwrap_or(total);
    let decode = total.checked_sub(first).unwrap().as_secs_f64();
    writeln!(
        out,
        "\n\n[prompt {prompt_tokens} tokens, generated {generated} tokens, time to first token {:.1} ms, prefill {:.0} tokens/s, \
         decode {}, peak memory {}]",
        first.as_secs_f64() * 1e3,
        prompt_tokens as f64 / first.as_secs_f64(),
        match generated - at_first {
            0 => "not measured".to_owned(),
            n => format!("{:.0} tokens/s", n as f64 / decode),
        },
        match peak_memory_bytes() {
            Some(bytes) => format!("{:.0} MiB", bytes as f64 / f64::from(1 << 20)),
            None => "unknown".to_owned(),
        },
    )?;
    Ok(())
}
