//! The engine without a thread: the host calls each step, reads what the step did, and sends a request in between.
//!
//! ```sh
//! cargo run --release --example step_by_step
//! ```

use ascend_llm::{Engine, EngineConfig, EngineCore, Request, RequestHandle, SamplingParams};

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/models/fable-f16.gguf");

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut config = EngineConfig::default();
    // Small limits, so that prompts arrive in chunks and a request has to wait.
    (config.max_num_seqs, config.max_num_batched_tokens) = (2, 8);
    let mut core = Engine::builder(MODEL).config(config).build_core()?;

    let prompts = ["Once upon a time there was a duck who", "The little dog", "One day a bird"];
    let mut readers = vec![Reader::submit(&core, prompts[0])?, Reader::submit(&core, prompts[1])?];
    println!("step  sequences  rows  sampled  finished | running  waiting  free blocks");
    for step in 1.. {
        if step == 4 {
            // Requests may come at any time; this one joins the running batch as soon as a sequence ends.
            readers.push(Reader::submit(&core, prompts[2])?);
        }
        let report = core.step()?;
        let stats = core.stats();
        println!(
            "{step:>4} {:>10} {:>5} {:>8} {:>9} | {:>7} {:>8} {:>12}",
            report.sequences,
            report.rows,
            report.sampled_tokens,
            report.finished,
            stats.running,
            stats.waiting,
            stats.free_blocks
        );
        for reader in &mut readers {
            reader.read()?;
        }
        if core.is_idle() {
            break;
        }
    }
    for (prompt, reader) in prompts.iter().zip(&readers) {
        println!("\n{prompt}{}", reader.text);
    }
    Ok(())
}

/// A request with the text that has arrived so far.
struct Reader {
    handle: RequestHandle,
    text: String,
}

impl Reader {
    fn submit(core: &EngineCore, prompt: &str) -> Result<Self, Box<dyn std::error::Error>> {
        let request = Request::text(prompt).with_sampling(SamplingParams::greedy().with_max_tokens(12));
        Ok(Self { handle: core.submit(request)?, text: String::new() })
    }

    fn read(&mut self) -> Result<(), Box<dyn std::error::Error>> {
        while let Some(delta) = self.handle.try_recv()? {
            self.text.push_str(&delta.text);
        }
        Ok(())
    }
}
