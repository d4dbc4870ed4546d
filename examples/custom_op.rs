//! Adds an operation to a model and steers its stories with it: `cargo run --release --example custom_op`.
//!
//! The operation runs after a layer, on the hidden state of every token. First it records the mean hidden state of
//! sentences about rabbits and of sentences about ducks. Then it adds the difference of the two means to each hidden
//! state, and the story is about a duck. The method is activation addition (<https://arxiv.org/abs/2308.10248>).

use std::sync::{Arc, Mutex, PoisonError};

use ascend_llm::engine::EngineConfig;
use ascend_llm::graph::{CustomCall, CustomOp, CustomOpError, CustomSite};
use ascend_llm::{Engine, GenerateError, SamplingParams};

const RABBITS: [&str; 3] = ["The rabbit", "A rabbit hopped.", "The little rabbit ran."];
const DUCKS: [&str; 3] = ["The duck", "A duck swam.", "The little duck swam in the pond."];
const PROMPT: &str = "Once upon a time, there was a";

/// Mode of the operation: its work on each row.
#[derive(Debug)]
enum Mode {
    /// Adds it to a sum.
    Record { sum: Vec<f32>, rows: usize },
    /// Adds a vector to it.
    Add(Vec<f32>),
}

/// The custom operation.
#[derive(Debug)]
struct Steering(Mutex<Mode>);

impl Steering {
    /// Sets the mode and returns the previous one.
    fn replace(&self, mode: Mode) -> Mode {
        std::mem::replace(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner), mode)
    }
}

impl CustomOp for Steering {
    fn name(&self) -> &'static str {
        "steering"
    }

    /// `x` holds the rows of one sequence, one row of `call.width` elements for each token. `out` starts as a copy of `x`.
    fn run(&self, call: &CustomCall<'_>, x: &[f32], out: &mut [f32]) -> Result<(), CustomOpError> {
        match &mut *self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            Mode::Record { sum, rows } => {
                sum.resize(call.width, 0.0);
                for row in x.chunks_exact(call.width) {
                    sum.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
                }
                *rows += call.tokens.len();
            }
            Mode::Add(vector) => {
                for row in out.chunks_exact_mut(call.width) {
                    row.iter_mut().zip(&*vector).for_each(|(out, x)| *out += x);
                }
            }
        }
        Ok(())
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let steering = Arc::new(Steering(Mutex::new(Mode::Add(Vec::new()))));
    // The prefix cache would return keys and values of another mode.
    let config = EngineConfig::default().with_prefix_caching(false);
    let engine = Engine::builder(concat!(env!("CARGO_MANIFEST_DIR"), "/examples/models/fable-f16.gguf"))
        .config(config)
        .custom_op(CustomSite::AfterLayer(2), steering.clone())
        .build()?;

    let rabbits = mean(&engine, &steering, &RABBITS)?;
    let ducks = mean(&engine, &steering, &DUCKS)?;
    for strength in [0.0, 1.0, 4.0] {
        let vector = ducks.iter().zip(&rabbits).map(|(duck, rabbit)| strength * (duck - rabbit)).collect();
        steering.replace(Mode::Add(vector));
        let story = engine.generate(PROMPT, &SamplingParams::greedy().with_max_tokens(40))?;
        println!("strength {strength}: {PROMPT}{story}\n");
    }
    Ok(())
}

/// Mean hidden state over the tokens of some texts.
fn mean(engine: &Engine, steering: &Steering, texts: &[&str]) -> Result<Vec<f32>, GenerateError> {
    steering.replace(Mode::Record { sum: Vec::new(), rows: 0 });
    for &text in texts {
        // The first token needs the rows of the prompt only.
        engine.generate(text, &SamplingParams::greedy().with_max_tokens(1))?;
    }
    match steering.replace(Mode::Add(Vec::new())) {
        Mode::Record { sum, rows } => Ok(sum.iter().map(|sum| sum / rows as f32).collect()),
        Mode::Add(vector) => Ok(vector),
    }
}
