//! One decode step of the whole engine: schedule, run the model, sample, publish, commit, with the small story model.
//!
//! `elem/s` are tokens. The model is tiny, so this shows the overhead of the engine and its launches. The handles are
//! never read: their deltas are merged.

use std::cell::RefCell;

use ascend_llm::engine::{CacheBudget, Engine, EngineConfig, EngineCore, Request, RequestHandle};
use ascend_llm::sampler::SamplingParams;
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};

use ascend_llm_benches::{Noise, bench_aging};

const PROMPT_TOKENS: u32 = 16;
/// Number of steps for which every sequence decodes: slightly less than the model's 512 positions allow.
const LIFE: u32 = 480;
const BLOCK_SIZE: u32 = 32;

fn core(seqs: u32) -> EngineCore {
    let mut config = EngineConfig::default();
    config.max_num_seqs = seqs;
    config.prefix_caching = false;
    config.block_size = Some(BLOCK_SIZE);
    // One share more than the sequences need, for the watermark that delays admissions.
    config.kv_cache = CacheBudget::Blocks(seqs * (512 / BLOCK_SIZE + 1));
    let model = ascend_llm_benches::story_model();
    Engine::builder(model).config(config).build_core().expect("the story model")
}

/// Ends running requests and adds `seqs` new ones, computing their prompts.
fn refill(core: &mut EngineCore, handles: &mut Vec<RequestHandle>, seqs: u32) {
    handles.clear();
    let mut noise = Noise(1);
    let mut params = SamplingParams::greedy();
    params.max_tokens = Some(LIFE + 2);
    params.ignore_eos = true;
    for _ in 0..seqs {
        let prompt = noise.ids(PROMPT_TOKENS as usize, core.info().vocab_size);
        handles.push(core.submit(Request::tokens(prompt).with_sampling(params.clone())).expect("a request"));
    }
    let report = core.step().expect("a step");
    assert_eq!(report.sampled_tokens, seqs, "every sequence has its first token");
}

fn decode(c: &mut Criterion) {
    let mut group = c.benchmark_group("step/fable-f16/decode");
    for seqs in [1, 8, 32] {
        // Shared by the two closures below, which never run at the same time.
        let core = RefCell::new(core(seqs));
        let mut handles = Vec::new();
        group.throughput(Throughput::Elements(u64::from(seqs)));
        group.bench_function(BenchmarkId::from_parameter(seqs), |b| {
            bench_aging(
                b,
                u64::from(LIFE),
                || refill(&mut core.borrow_mut(), &mut handles, seqs),
                |()| {
                    let report = core.borrow_mut().step().expect("a step");
                    assert_eq!(report.sampled_tokens, seqs);
                },
            );
        });
    }
    group.finish();
}

criterion_group!(name = benches; config = ascend_llm_benches::criterion(); targets = decode);
criterion_main!(benches);
