//! Sampling one token from one row of logits, by method and vocabulary size.
//!
//! `elem/s` are logits. Vocabularies: `SmolLM2` and Llama 2 have about 49 and 32 thousand tokens, Qwen 2 and 3 about
//! 152 thousand. Logits are normal with deviation 2.5: a top-p of 0.9 then keeps some thousands of tokens, as with a
//! model at high temperature.

use std::hint::black_box;

use ascend_llm::runner::LogitRows;
use ascend_llm::sampler::{SampleRow, Sampler, SamplingParams};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};

use ascend_llm_benches::Noise;

const VOCABULARIES: [u32; 2] = [49_152, 151_936];
/// Tokens before the sampled one; penalties process all of them.
const PROMPT_TOKENS: usize = 512;
const OUTPUT_TOKENS: usize = 128;

fn params(change: impl FnOnce(&mut SamplingParams)) -> SamplingParams {
    let mut params = SamplingParams::default();
    change(&mut params);
    params
}

fn cases() -> [(&'static str, SamplingParams); 7] {
    [
        ("greedy", SamplingParams::greedy()),
        ("temperature", params(|_| ())),
        ("top_k_50", params(|p| p.top_k = 50)),
        ("top_p_0.9", params(|p| p.top_p = 0.9)),
        (
            "top_k_50_top_p_0.9",
            params(|p| {
                p.top_k = 50;
                p.top_p = 0.9;
            }),
        ),
        (
            "penalties",
            params(|p| {
                p.temperature = 0.0;
                p.repetition_penalty = 1.1;
                p.presence_penalty = 0.5;
                p.frequency_penalty = 0.5;
            }),
        ),
        (
            "greedy_logprobs_5",
            params(|p| {
                p.temperature = 0.0;
                p.logprobs = Some(5);
            }),
        ),
    ]
}

fn sample(c: &mut Criterion) {
    let mut group = c.benchmark_group("sampler");
    for vocab in VOCABULARIES {
        let mut noise = Noise(1);
        let logits: Vec<f32> = (0..vocab).map(|_| 2.5 * noise.normal()).collect();
        let (prompt, output) = (noise.ids(PROMPT_TOKENS, vocab), noise.ids(OUTPUT_TOKENS, vocab));
        let rows = LogitRows::new(&logits, logits.len(), &[0]);
        let mut sampler = Sampler::new(logits.len());
        let mut answers = Vec::new();
        group.throughput(Throughput::Elements(u64::from(vocab)));
        for (name, params) in &cases() {
            group.bench_function(BenchmarkId::new(*name, vocab), |b| {
                let mut seed = 0;
                b.iter(|| {
                    // A new seed per sample, so that branch prediction does not learn one outcome.
                    seed += 1;
                    let row = SampleRow::new(0, params, &prompt, &output).with_eos_ids(&[0]).with_seed(seed);
                    sampler.sample(rows, black_box(&[row]), &mut answers);
                    assert!(answers[0].is_ok(), "{:?}", answers[0]);
                });
            });
        }
    }
    group.finish();
}

criterion_group!(name = benches; config = ascend_llm_benches::criterion(); targets = sample);
criterion_main!(benches);
