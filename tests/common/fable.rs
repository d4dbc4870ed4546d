//! Engines for the story model, and random requests for it.
//!
//! All random values come from fixed seeds, which the tests' messages contain, so that a failure can be reproduced.

#![allow(dead_code)] // each test binary uses only a part
#![allow(clippy::cast_possible_truncation, reason = "the numbers of a test are small")]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use ascend_llm::device::cpu::{CpuDevice, CpuOptions};
use ascend_llm::engine::{
    CacheBudget, Engine, EngineBuilder, EngineConfig, EngineCore, FinishReason, Logprobs, Output, Request,
    RequestHandle,
};
use ascend_llm::sampler::{LogprobsMode, SamplingParams};
use ascend_llm::text::{Tokenizer, Vocabulary as _};

/// Vocabulary size of the story model.
pub const VOCAB: u32 = 768;

fn data(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(path)
}

/// Returns the path of the story model with float weights.
pub fn float() -> PathBuf {
    data("fable")
}

/// Returns the path of the story model with integer weights.
pub fn quantized() -> PathBuf {
    data("fable/gguf/fable-q8_0.gguf")
}

/// Returns the path of the story model with integer weights and offsets (`Q4_1`).
pub fn quantized_with_offsets() -> PathBuf {
    data("fable/gguf/fable-Q4_1.gguf")
}

/// Returns a configuration for one request at a time, without features that could affect the output.
pub fn plain_config() -> EngineConfig {
    let mut config = EngineConfig::default();
    config.max_num_batched_tokens = 512;
    config.max_num_seqs = 4;
    config.kv_cache = CacheBudget::Blocks(128);
    config.prefix_caching = false;
    config.threads = Some(1);
    config
}

pub fn builder(model: &Path, config: EngineConfig) -> EngineBuilder {
    Engine::builder(model).config(config)
}

pub fn core(model: &Path, config: EngineConfig) -> EngineCore {
    builder(model, config).build_core().unwrap()
}

pub fn device(options: impl FnOnce(&mut CpuOptions)) -> Arc<CpuDevice> {
    let mut all = CpuOptions::default();
    options(&mut all);
    Arc::new(CpuDevice::new(all).unwrap())
}

/// Runs steps until no work is left, then checks every invariant, and that every block is free or cached.
pub fn drain(core: &mut EngineCore) {
    for _ in 0..100_000 {
        if core.is_idle() {
            assert_at_rest(core);
            return;
        }
        core.step().unwrap();
        core.check().unwrap();
    }
    panic!("the engine does not become idle");
}

pub fn assert_at_rest(core: &EngineCore) {
    core.check().unwrap();
    let stats = core.stats();
    assert_eq!((stats.queued_requests, stats.running, stats.waiting, stats.live_blocks), (0, 0, 0, 0), "{stats:?}");
    assert_eq!(stats.free_blocks + stats.cached_blocks, u64::from(core.info().pool_blocks), "{stats:?}");
}

pub fn finish(core: &mut EngineCore, handle: RequestHandle) -> Output {
    drain(core);
    handle.collect_output().unwrap()
}

/// Runs a request in a batch of its own, in a new engine.
pub fn alone(model: &Path, config: &EngineConfig, request: Request) -> Seen {
    let mut core = core(model, config.clone());
    let handle = core.submit(request).unwrap();
    Seen::of(&finish(&mut core, handle))
}

/// Token, bits of its log-probability, rank, and (id, bits of the log-probability) of the top tokens.
type LogprobBits = (u32, u32, u32, Vec<(u32, u32)>);

fn bits(logprobs: &Logprobs) -> Vec<LogprobBits> {
    let one = |at: ascend_llm::engine::LogprobsAt<'_>| {
        let top = at.top.iter().map(|top| (top.token, top.logprob.to_bits())).collect();
        (at.chosen.token, at.chosen.logprob.to_bits(), at.rank, top)
    };
    logprobs.iter().map(one).collect()
}

/// All parts of an output that must not depend on the rest of the batch; floats as their bits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    pub choices: Vec<SeenChoice>,
    pub prompt_logprobs: Option<Vec<LogprobBits>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SeenChoice {
    pub ids: Vec<u32>,
    pub text: String,
    pub logprobs: Option<Vec<LogprobBits>>,
    pub finish: FinishReason,
}

impl Seen {
    pub fn of(output: &Output) -> Self {
        let choice = |choice: &ascend_llm::engine::Choice| SeenChoice {
            ids: choice.token_ids.clone(),
            text: choice.text.clone(),
            logprobs: choice.logprobs.as_ref().map(bits),
            finish: choice.finish_reason.clone(),
        };
        Self {
            choices: output.choices.iter().map(choice).collect(),
            prompt_logprobs: output.prompt_logprobs.as_ref().map(bits),
        }
    }

    /// Returns whether `part`, an output of an aborted request, is a prefix of this one.
    pub fn begins_with(&self, part: &Self) -> bool {
        self.choices.len() == part.choices.len()
            && self.choices.iter().zip(&part.choices).all(|(full, part)| {
                let logprobs = match (&full.logprobs, &part.logprobs) {
                    (Some(full), Some(part)) => full.starts_with(part),
                    (_, part) => part.is_none(),
                };
                let is_equal = part.finish == full.finish && part == full;
                let is_prefix = part.finish == FinishReason::Cancelled && full.ids.starts_with(&part.ids);
                logprobs && (is_equal || is_prefix)
            })
    }
}

/// Random numbers by splitmix64: small, and identical on all machines.
#[derive(Clone, Debug)]
pub struct Dice(u64);

impl Dice {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }

    /// Returns a number from `low` to `high`, both included.
    pub fn from(&mut self, low: u32, high: u32) -> u32 {
        low + (self.bits() % u64::from(high - low + 1)) as u32
    }

    /// Returns true with a probability of `percent`.
    pub fn chance(&mut self, percent: u32) -> bool {
        self.from(0, 99) < percent
    }

    /// Returns a number from `low` to `high` in steps of a hundredth.
    pub fn float(&mut self, low: f32, high: f32) -> f32 {
        low + (high - low) * self.from(0, 100) as f32 / 100.0
    }

    pub fn one_of<T: Clone>(&mut self, all: &[T]) -> T {
        all[self.from(0, all.len() as u32 - 1) as usize].clone()
    }
}

/// Generates prompts from a text, and random sampling parameters of all kinds.
#[derive(Debug)]
pub struct Author {
    dice: Dice,
    text: Vec<u32>,
    full_stop: u32,
    comma: u32,
}

impl Author {
    pub fn new(seed: u64) -> Self {
        let tokenizer = Tokenizer::from_json(&std::fs::read(data("fable/tokenizer.json")).unwrap(), None).unwrap();
        let story = "Once upon a time, there was a little girl named Lily. She loved to play in the park with her dog. \
                     One day, they saw a big red ball. \"Can we play?\" she asked. The dog was happy and ran fast. ";
        let mut text = tokenizer.encode(story, false).unwrap();
        text.extend(tokenizer.encode(&std::fs::read_to_string(data("ppl_opticks.txt")).unwrap(), false).unwrap());
        let id = |text: &str| tokenizer.encode(text, false).unwrap()[0];
        Self { dice: Dice::new(seed), text, full_stop: id("."), comma: id(",") }
    }

    pub fn dice(&mut self) -> &mut Dice {
        &mut self.dice
    }

    /// Returns a prompt; half of all prompts share their beginning with others, so that prefixes are shared.
    pub fn prompt(&mut self, len: u32) -> Vec<u32> {
        let len = len as usize;
        let start = if self.dice.chance(50) { 0 } else { self.dice.from(1, 2_000) as usize };
        let mut prompt = self.text[start..start + len].to_vec();
        if self.dice.chance(30) {
            // The last tokens differ from those of other prompts.
            let from = len - len.min(3);
            prompt[from..].fill_with(|| self.dice.from(3, VOCAB - 1));
        }
        prompt
    }

    /// Returns parameters with a seed, so that the order of requests does not matter.
    pub fn params(&mut self, most_tokens: u32) -> SamplingParams {
        let dice = &mut self.dice;
        let mut p = if dice.chance(35) { SamplingParams::greedy() } else { SamplingParams::default() };
        p.seed = Some(dice.bits());
        p.max_tokens = Some(dice.from(1, most_tokens));
        if !p.is_greedy() {
            p.temperature = dice.float(0.5, 1.5);
            p.top_k = if dice.chance(40) { dice.from(1, 60) as i32 } else { 0 };
            p.top_p = if dice.chance(40) { dice.float(0.3, 1.0) } else { 1.0 };
            p.min_p = if dice.chance(25) { dice.float(0.0, 0.3) } else { 0.0 };
            p.n = if dice.chance(20) { 2 } else { 1 };
        }
        if dice.chance(30) {
            p.repetition_penalty = dice.float(0.8, 1.6);
            p.presence_penalty = dice.float(-1.0, 1.0);
            p.frequency_penalty = dice.float(-0.5, 1.0);
        }
        if dice.chance(60) {
            p.logprobs = Some(dice.from(0, 5));
            p.logprobs_mode = if dice.chance(40) { LogprobsMode::Processed } else { LogprobsMode::Raw };
        }
        p.prompt_logprobs = dice.chance(12).then(|| dice.from(0, 3));
        p.min_tokens = if dice.chance(30) { dice.from(0, p.max_tokens.unwrap()) } else { 0 };
        if dice.chance(30) {
            p.stop = vec![dice.one_of(&[".", " the", "e", ", ", "\n\n"]).to_owned(), "nowhere to be found".to_owned()];
            p.include_stop_str_in_output = dice.chance(50);
        }
        if dice.chance(20) {
            p.stop_token_ids = vec![dice.one_of(&[self.full_stop, self.comma]), dice.from(3, VOCAB - 1)];
        }
        p.ignore_eos = dice.chance(30);
        if dice.chance(15) {
            p.logit_bias = vec![(self.full_stop, dice.float(-4.0, 4.0)), (dice.from(3, VOCAB - 1), 3.0)];
        }
        p.allowed_token_ids = dice.chance(8).then(|| (0..VOCAB).filter(|id| id % 3 != 1).collect());
        p.bad_words = if dice.chance(15) { vec!["the".to_owned(), "was a".to_owned()] } else { Vec::new() };
        p.skip_special_tokens = dice.chance(80);
        p
    }
}
