//! Perplexity of a model on a text: how well it predicts each token from those before it.
//!
//! ```sh
//! cargo run --release -p ascend-llm-tools --bin perplexity -- --model MODEL.gguf --text tests/data/ppl_opticks.txt --numerics exact
//! ```
//! The text is split into windows that do not see each other, as `llama-perplexity` does. The first token of a window is not
//! scored. With `--stride S` windows overlap: each starts S tokens after the one before, and only tokens that no window has
//! scored yet count, so that each has more context (the sliding window of the Transformers documentation). The text may be
//! longer than the context of the model.

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
    /// File with the text.
    #[arg(long)]
    text: PathBuf,
    /// Number of tokens to score, from the start of the text. 0 scores the whole text.
    #[arg(long, default_value_t = 2000)]
    tokens: usize,
    /// Tokens of a window, at most the context of the model less one. Default: 512, or that limit if it is smaller.
    #[arg(long)]
    window: Option<usize>,
    /// Distance between the starts of windows. Default: the window, without overlap.
    #[arg(long)]
    stride: Option<usize>,
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

    let longest = engine.info().max_model_len as usize - 1;
    let window = args.window.unwrap_or_else(|| longest.min(512));
    let stride = args.stride.unwrap_or(window);
    if !(2..=longest).contains(&window) || !(1..=window).contains(&stride) {
        return Err(format!(
            "--window {window} --stride {stride}: expected 2 <= window <= {longest}, 1 <= stride <= window"
        )
        .into());
    }
    let mut ids = engine.tokenize(&text, true)?;
    if args.tokens > 0 {
        ids.truncate(args.tokens);
    }
    if ids.len() < 2 {
        return Err(format!("{}: expected a text of at least 2 tokens", args.text.display()).into());
    }
    params.prompt_logprobs = Some(0);
    let (mut nll, mut scored) = (0.0f64, 0usize);
    // Position of the first token that no window has scored.
    let mut next = 1;
    for start in (0..ids.len()).step_by(stride) {
        let end = ids.len().min(start + window);
        if stride == window {
            // Without overlap, the first token of a window has no context.
            next = next.max(start + 1);
        }
        if next >= end {
            break;
        }
        let request = Request::tokens(ids[start..end].to_vec()).with_sampling(params.clone());
        let output = engine.submit(request)?.collect_output()?;
        let logprobs =
            output.prompt_logprobs.as_ref().ok_or("the engine returned no log-probabilities of the prompt")?;
        // Entry 0 belongs to the second token of the window.
        for at in logprobs.iter().skip(next - start - 1) {
            nll -= f64::from(at.chosen.logprob);
            scored += 1;
        }
        next = end;
    }
    let mean = nll / scored as f64;
    println!(
        "perplexity {:.3} (mean negative log-likelihood {mean:.5} over {scored} tokens, windows of {window}, stride {stride})",
        mean.exp()
    );
    Ok(())
}
