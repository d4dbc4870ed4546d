//! Perplexity of a model on a text: how well it foresees each next token, and what faster numerics cost.
//!
//! ```sh
//! cargo run --release --example perplexity -- --model MODEL.gguf --text tests/data/ppl_opticks.txt --numerics exact
//! ```
//! The text is cut into windows that know nothing of each other; the first token of a window is not scored.

use std::path::PathBuf;
use std::process::ExitCode;

use ascend_llm::engine::{EngineConfig, Request};
use ascend_llm::sampler::SamplingParams;
use clap::Parser;

#[path = "../terminal/mod.rs"]
mod terminal;
use terminal::{ModelArgs, Result};

/// Perplexity of a model on a text.
#[derive(Debug, Parser)]
struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// The text.
    #[arg(long)]
    text: PathBuf,
    /// Tokens of the text that are read.
    #[arg(long, default_value_t = 2000)]
    tokens: usize,
    /// Tokens of a window; the model must have room for one more.
    #[arg(long, default_value_t = 512)]
    window: usize,
}

fn main() -> ExitCode {
    terminal::finish(run(&Args::parse()))
}

fn run(args: &Args) -> Result<()> {
    let text =
        std::fs::read_to_string(&args.text).map_err(|error| format!("cannot read {}: {error}", args.text.display()))?;
    let mut config = EngineConfig::default();
    config.max_num_seqs = 4;
    config.prefix_caching = false;
    let engine = args.model.load(config)?;
    let mut params = SamplingParams::greedy();
    params.max_tokens = Some(1);

    // A request tells which ids the model's tokenizer made of its text; dropping the handle takes it back.
    let mut ids = engine.submit(Request::text(text).with_sampling(params.clone()))?.prompt_token_ids().to_vec();
    ids.truncate(args.tokens);
    if args.window < 2 || ids.len() < 2 {
        return Err("a window and the text must have at least 2 tokens".into());
    }
    params.prompt_logprobs = Some(0);
    let (mut nll, mut scored) = (0.0f64, 0usize);
    for window in ids.chunks(args.window) {
        let output = engine.submit(Request::tokens(window.to_vec()).with_sampling(params.clone()))?.collect_output()?;
        let Some(logprobs) = &output.prompt_logprobs else { continue };
        for at in logprobs.iter() {
            nll -= f64::from(at.chosen.logprob);
            scored += 1;
        }
    }
    let mean = nll / scored as f64;
    println!("perplexity {:.3} (mean negative log-likelihood {mean:.5} over {scored} tokens)", mean.exp());
    Ok(())
}
