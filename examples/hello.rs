//! Prints a story from the small model that comes with the crate: `cargo run --release --example hello`.

use ascend_llm::{Engine, SamplingParams};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let engine = Engine::builder(concat!(env!("CARGO_MANIFEST_DIR"), "/examples/models/fable-f16.gguf")).build()?;
    let params = SamplingParams::greedy().with_max_tokens(200);
    println!("Once upon a time{}", engine.generate("Once upon a time", &params)?);
    Ok(())
}
