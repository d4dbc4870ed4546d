//! A model driven without the engine: one sequence with its own blocks, which returns the logits of each batch.

#![allow(clippy::cast_possible_truncation)]

use ascend_llm::engine::{EngineBuilder, EngineConfig};
use ascend_llm::kv_cache::BlockId;
use ascend_llm::runner::{ForwardInput, LogitRows, ModelExecutor as _, ModelRunner};

/// Runner with one sequence.
pub struct Model {
    runner: ModelRunner,
    input: ForwardInput,
    len: usize,
}

/// Returns a configuration with small limits that fit all test models.
pub fn small_config() -> EngineConfig {
    let mut config = EngineConfig::default();
    config.max_num_batched_tokens = 1024;
    config.max_num_seqs = 512;
    config.kv_cache = ascend_llm::engine::CacheBudget::Blocks(64);
    config
}

impl Model {
    pub fn new(builder: EngineBuilder) -> Self {
        Self { runner: builder.build_runner().expect("the model builds"), input: ForwardInput::default(), len: 0 }
    }

    /// Discards the sequence.
    pub fn restart(&mut self) {
        self.len = 0;
    }

    /// Appends tokens, and returns the logits of the last `rows` of them.
    pub fn forward(&mut self, tokens: &[u32], rows: usize) -> Vec<Vec<f32>> {
        let (logits, status) = self.forward_unchecked(tokens, rows);
        assert!(status.iter().all(|status| *status == 0), "a row is not finite: {status:?}");
        logits
    }

    /// Does the same as [`forward`](Self::forward), but returns the rows' status instead of checking it.
    pub fn forward_unchecked(&mut self, tokens: &[u32], rows: usize) -> (Vec<Vec<f32>>, Vec<u8>) {
        self.len += tokens.len();
        let block_size = self.runner.shape().block_size;
        let mut input = std::mem::take(&mut self.input);
        input.clear();
        input.tokens.extend_from_slice(tokens);
        input.q_lens.push(tokens.len() as u32);
        input.kv_lens.push(self.len as u32);
        input.tables.extend((0..self.len.div_ceil(block_size)).map(|block| BlockId(block as u32)));
        input.logit_rows.extend((tokens.len() - rows..tokens.len()).map(|row| row as u32));
        let out = self.runner.forward(input).expect("the batch runs");
        let LogitRows { logits, vocab, status, .. } = out.logits;
        self.input = out.input;
        (logits.chunks(vocab).map(<[f32]>::to_vec).collect(), status.to_vec())
    }

    /// Returns the greedy continuation of a prompt.
    pub fn greedy(&mut self, prompt: &[u32], tokens: usize) -> Vec<u32> {
        self.restart();
        let mut logits = self.forward(prompt, 1).remove(0);
        let mut answer = Vec::new();
        while answer.len() < tokens {
            let next = argmax(&logits);
            answer.push(next);
            if answer.len() < tokens {
                logits = self.forward(&[next], 1).remove(0);
            }
        }
        answer
    }
}

/// Returns the lowest id with the largest logit.
pub fn argmax(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (id, logit) in logits.iter().enumerate() {
        if *logit > logits[best] {
            best = id;
        }
    }
    best as u32
}

/// Returns the natural logarithm of the softmax at `id`.
pub fn log_softmax_at(logits: &[f32], id: u32) -> f64 {
    let max = logits.iter().copied().fold(f32::MIN, f32::max);
    let sum: f64 = logits.iter().map(|l| f64::from(l - max).exp()).sum();
    f64::from(logits[id as usize] - max) - sum.ln()
}
