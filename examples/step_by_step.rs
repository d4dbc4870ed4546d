//! Drives an [`EngineCore`] step by step, without a thread: `cargo run --release --example step_by_step`.
//!
//! Four requests share an engine whose steps hold at most two sequences and 16 token rows. The table shows chunked prefill
//! (the `rows` of steps 1 and 2), continuous batching (a waiting request starts when another one finishes), and the queue
//! after each step.

use ascend_llm::engine::{EngineConfig, EngineCore, Request, RequestError, RequestHandle, StepReport, SubmitError};
use ascend_llm::{Engine, SamplingParams};

/// Prompts with the number of tokens to generate.
const REQUESTS: [(&str, u32); 4] = [
    ("Once upon a time", 16),
    ("One day, a little girl named Lily went to the park with her mom and her big red ball. She wanted to", 7),
    ("The duck", 10),
    ("Tom found a box under the bed. He opened the box and", 12),
];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/models/fable-f16.gguf");
    let config = EngineConfig::default().with_max_num_seqs(2).with_max_num_batched_tokens(16);
    let mut core = Engine::builder(model).config(config).build_core()?;

    // The caller decides when requests arrive: the last one comes after five steps.
    let [now @ .., late] = REQUESTS;
    let mut requests = now.into_iter().map(|request| submit(&mut core, request)).collect::<Result<Vec<_>, _>>()?;
    println!("step   rows  sequences  sampled  finished | running  waiting  free blocks | new text");
    for step in 1.. {
        let report = core.step()?;
        print_step(step, report, &core, &mut requests)?;
        if step == 5 {
            requests.push(submit(&mut core, late)?);
        }
        if core.is_idle() {
            break;
        }
    }
    for request in &requests {
        println!("\n{}{}", request.prompt, request.text);
    }
    Ok(())
}

/// A request with the text received so far.
struct Running {
    prompt: &'static str,
    handle: RequestHandle,
    text: String,
}

fn submit(core: &mut EngineCore, (prompt, tokens): (&'static str, u32)) -> Result<Running, SubmitError> {
    let params = SamplingParams::greedy().with_max_tokens(tokens);
    let handle = core.submit(Request::text(prompt).with_sampling(params))?;
    Ok(Running { prompt, handle, text: String::new() })
}

/// Prints what a step did, the engine's state after it, and the text that each request received.
fn print_step(step: u32, report: StepReport, core: &EngineCore, requests: &mut [Running]) -> Result<(), RequestError> {
    let StepReport { rows, sequences, sampled_tokens, finished, .. } = report;
    let stats = core.stats();
    let (running, waiting, free) = (stats.running, stats.waiting, stats.free_blocks);
    print!("{step:>4}  {rows:>5}  {sequences:>9}  {sampled_tokens:>7}  {finished:>8} |");
    print!(" {running:>7}  {waiting:>7}  {free:>11} |");
    for (index, request) in requests.iter_mut().enumerate() {
        // A step publishes its text before it returns, so this loop does not wait.
        while let Some(delta) = request.handle.try_recv()? {
            print!(" {index}:{:?}", delta.text);
            request.text.push_str(&delta.text);
        }
    }
    println!();
    Ok(())
}
