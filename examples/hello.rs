//! A story from the small model that comes with the crate: `cargo run --release --example hello`.

use ascend_llm::{Engine, Request, SamplingParams};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let engine = Engine::builder(concat!(env!("CARGO_MANIFEST_DIR"), "/examples/models/fable-f16.gguf")).build()?;
    let request = Request::text("Once upon a time").with_sampling(SamplingParams::greedy().with_max_tokens(120));
    for delta in engine.submit(request)? {
        print!("{}", delta?.text);
    }
    println!();
    Ok(())
}
