//! Activation addition with custom operations: a direction found in the model's hidden states steers its story.
//!
//! One operation reads the rows behind a layer while the model reads two phrases; a second one adds the difference to each
//! row of another prompt (Turner et al., "Activation Addition", 2023).
//!
//! ```sh
//! cargo run --release --example custom_op
//! cargo run --release --example custom_op -- -0.8     # the other way
//! ```

use std::error::Error;
use std::sync::{Arc, Mutex};

use ascend_llm::graph::{CustomCall, CustomOp, CustomOpError, CustomSite};
use ascend_llm::{Engine, EngineConfig, Request, SamplingParams};

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/models/fable-f16.gguf");
/// The operations run on the rows that leave this layer.
const SITE: CustomSite = CustomSite::AfterLayer(0);

/// Keeps the last row of the latest call and changes nothing: `out` starts as a copy of `x`.
#[derive(Debug, Default)]
struct Probe(Mutex<Vec<f32>>);

impl CustomOp for Probe {
    fn name(&self) -> &'static str {
        "probe"
    }

    fn run(&self, call: &CustomCall<'_>, x: &[f32], _out: &mut [f32]) -> Result<(), CustomOpError> {
        let last = x.chunks_exact(call.width).next_back().unwrap_or_default();
        *self.0.lock().map_err(|_| CustomOpError("a call has panicked".to_owned()))? = last.to_vec();
        Ok(())
    }
}

/// Adds a direction to each row.
#[derive(Debug)]
struct Steer(Vec<f32>);

impl CustomOp for Steer {
    fn name(&self) -> &'static str {
        "steer"
    }

    fn check(&self, width: usize) -> Result<(), CustomOpError> {
        let got = self.0.len();
        if got == width { Ok(()) } else { Err(CustomOpError(format!("a direction of {got}, expected {width}"))) }
    }

    fn run(&self, call: &CustomCall<'_>, _x: &[f32], out: &mut [f32]) -> Result<(), CustomOpError> {
        for row in out.chunks_exact_mut(call.width) {
            row.iter_mut().zip(&self.0).for_each(|(x, direction)| *x += direction);
        }
        Ok(())
    }
}

fn engine(op: Arc<dyn CustomOp>) -> Result<Engine, Box<dyn Error>> {
    let mut config = EngineConfig::default();
    // The probe must see the rows of each phrase, cached or not.
    config.prefix_caching = false;
    Ok(Engine::builder(MODEL).config(config).custom_op(SITE, op).build()?)
}

fn generate(engine: &Engine, prompt: &str, max_tokens: u32) -> Result<String, Box<dyn Error>> {
    let request = Request::text(prompt).with_sampling(SamplingParams::greedy().with_max_tokens(max_tokens));
    Ok(engine.submit(request)?.collect_output()?.choices[0].text.clone())
}

fn main() -> Result<(), Box<dyn Error>> {
    let prompt = "One day a little animal went to the";
    let scale: f32 = std::env::args().nth(1).map_or(Ok(0.8), |scale| scale.parse())?;
    let probe = Arc::new(Probe::default());
    let probing = engine(Arc::clone(&probe) as Arc<dyn CustomOp>)?;
    let hidden = |phrase: &str| -> Result<Vec<f32>, Box<dyn Error>> {
        generate(&probing, phrase, 1)?;
        Ok(probe.0.lock().map_err(|_| "a call has panicked")?.clone())
    };
    let (duck, dog) = (hidden("The duck")?, hidden("The dog")?);
    let direction: Vec<f32> = duck.iter().zip(&dog).map(|(duck, dog)| scale * (duck - dog)).collect();
    let norm = direction.iter().map(|x| x * x).sum::<f32>().sqrt();
    println!("direction from \"The dog\" to \"The duck\": {} numbers, norm {norm:.2}\n", direction.len());

    println!("unsteered: {prompt}{}\n", generate(&probing, prompt, 40)?);
    println!("steered:   {prompt}{}", generate(&engine(Arc::new(Steer(direction)))?, prompt, 40)?);
    Ok(())
}
