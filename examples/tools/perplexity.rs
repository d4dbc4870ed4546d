//! Perplexity of a model on a text: how well the model predicts each next token.
//!
//! ```sh
//! cargo run --release -p ascend-llm-tools --bin perplexity -- --model MODEL.gguf --text tests/data/ppl_opticks.txt
//! ```
//! The text may be longer than the model's context: it is evaluated in windows, as in the
//! [Transformers guide](https://huggingface.co/docs/transformers/perplexity). Without `--stride` the windows are disjoint
//! chunks, and every token but the first of each window is scored. With `--stride S` a window starts `S` tokens after the
//! previous one (sliding window), and only its tokens that no window has scored are scored: each of these has at least
//! `window - S` tokens of context. A smaller stride gives a lower perplexity and takes more time.
//!
//! Each window is the text's own tokens; no BOS token is added after the first window. `llama-perplexity` differs: it
//! starts each chunk with BOS and scores the second half of each chunk.

use std::path::PathBuf;
use std::process::ExitCode;

use ascend_llm::engine::{EngineConfig, Request};
use ascend_llm::sampler::SamplingParams;
use ascend_llm::text::Vocabulary as _;
use ascend_llm_tools::terminal::{self, ModelArgs, Result, label};
use ascend_llm_tools::tokenizer;
use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};

/// Number of windows in a batch.
const BATCH: u32 = 4;

/// Measures the perplexity of a model on a text.
#[derive(Debug, Parser)]
struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Text file.
    #[arg(long)]
    text: PathBuf,
    /// Maximum number of tokens to read from the text; 0 reads the whole text.
    #[arg(long, default_value_t = 2000)]
    tokens: usize,
    /// Tokens of a window, less than the model's context [default: 512, or the context if it is shorter].
    #[arg(long)]
    window: Option<usize>,
    /// Tokens from the start of a window to the start of the next one [default: the window, so that windows are disjoint].
    #[arg(long)]
    stride: Option<usize>,
}

fn main() -> ExitCode {
    terminal::finish(run(&Args::parse()))
}

fn run(args: &Args) -> Result<()> {
    let text =
        std::fs::read_to_string(&args.text).map_err(|error| format!("cannot read {}: {error}", args.text.display()))?;
    let mut ids = tokenizer(&args.model.path())?.encode(&text, true)?;
    if args.tokens > 0 {
        ids.truncate(args.tokens);
    }
    if ids.len() < 2 {
        return Err(format!("{}: expected at least 2 tokens, got {}", args.text.display(), ids.len()).into());
    }
    // Cached rows have no logits.
    let config = EngineConfig::default().with_max_num_seqs(BATCH).with_prefix_caching(false);
    let engine = args.model.builder(config, args.model.device()?).build()?;

    // A request generates at least one token, which takes a position of the context.
    let longest = engine.info().max_model_len as usize - 1;
    let window = args.window.unwrap_or(longest.min(512));
    if !(2..=longest).contains(&window) {
        return Err(format!("--window {window}: expected 2 to {longest}, one less than the model's context").into());
    }
    let stride = args.stride.unwrap_or(window);
    if !(1..=window).contains(&stride) {
        return Err(format!("--stride {stride}: expected 1 to the window's {window}").into());
    }

    let windows = windows(ids.len(), window, stride);
    let bar = ProgressBar::new(windows.len() as u64)
        .with_style(ProgressStyle::with_template("{bar:40} {pos}/{len} windows, {eta} left")?);
    let mut params = SamplingParams::greedy().with_max_tokens(1);
    params.prompt_logprobs = Some(0);
    let mut scores: Vec<f64> = Vec::with_capacity(ids.len());
    for batch in windows.chunks(BATCH as usize) {
        let submit = |window: &Window| {
            engine.submit(Request::tokens(&ids[window.start..window.end]).with_sampling(params.clone()))
        };
        let handles: std::result::Result<Vec<_>, _> = batch.iter().map(submit).collect();
        for (window, handle) in batch.iter().zip(handles?) {
            let output = handle.collect_output()?;
            let logprobs = output.prompt_logprobs.ok_or("the engine returned no log-probabilities of the prompt")?;
            // Entry 0 belongs to the second token of the window.
            let scored = logprobs.iter().skip(window.score_from - window.start - 1);
            scores.extend(scored.map(|at| -f64::from(at.chosen.logprob)));
            bar.inc(1);
        }
    }
    bar.finish_and_clear();

    let (mean, error) = mean_and_error(&scores);
    println!(
        "perplexity {:.3} ± {:.3} (mean negative log-likelihood {mean:.5} over {} of {} tokens)",
        mean.exp(),
        mean.exp() * error,
        scores.len(),
        ids.len(),
    );
    let kind = if stride == window {
        format!("disjoint windows of {window} tokens")
    } else {
        format!("sliding windows of {window} tokens with a stride of {stride}")
    };
    let (numerics, kv_dtype) = (label(&engine.info().numerics), label(&engine.info().kv_dtype));
    println!("{} {kind}; {numerics} numerics, KV cache in {kv_dtype}", windows.len());
    Ok(())
}

/// A window of the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Window {
    /// Its first token.
    start: usize,
    /// The token after its last one.
    end: usize,
    /// Its first token that is scored.
    score_from: usize,
}

/// Splits a text into windows that score each token at most once.
///
/// The first token of a window has no context, so it is scored only if an earlier window contains it.
fn windows(tokens: usize, window: usize, stride: usize) -> Vec<Window> {
    let mut windows: Vec<Window> = Vec::new();
    for start in (0..tokens).step_by(stride) {
        let end = tokens.min(start + window);
        let score_from = windows.last().map_or(0, |last| last.end).max(start + 1);
        if score_from < end {
            windows.push(Window { start, end, score_from });
        }
    }
    windows
}

/// Mean of the scores and its standard error, under the assumption that the scores are independent.
fn mean_and_error(scores: &[f64]) -> (f64, f64) {
    let count = scores.len() as f64;
    let mean = scores.iter().sum::<f64>() / count;
    let variance = scores.iter().map(|score| (score - mean).powi(2)).sum::<f64>() / (count - 1.0).max(1.0);
    (mean, (variance / count).sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spans(tokens: usize, window: usize, stride: usize) -> Vec<(usize, usize, usize)> {
        windows(tokens, window, stride).iter().map(|w| (w.start, w.end, w.score_from)).collect()
    }

    #[test]
    fn disjoint_windows_score_all_tokens_but_their_first() {
        assert_eq!(spans(10, 4, 4), [(0, 4, 1), (4, 8, 5), (8, 10, 9)]);
        // The last window would hold one token, which has no context.
        assert_eq!(spans(9, 4, 4), [(0, 4, 1), (4, 8, 5)]);
    }

    #[test]
    fn sliding_windows_score_each_token_once() {
        assert_eq!(spans(10, 4, 2), [(0, 4, 1), (2, 6, 4), (4, 8, 6), (6, 10, 8)]);
        assert_eq!(spans(3, 4, 2), [(0, 3, 1)]);
    }
}
