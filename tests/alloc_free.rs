//! Tests that a steady decode step of the whole engine on the CPU device allocates no memory on any thread.
//!
//! A step is steady if no request is admitted, ends, is preempted or is read during it. `prompt_logprobs` are exempt,
//! because they only occur in the steps of a prompt; `logprobs` reuse the lists of the step before, and are counted
//! here too. The sequences together use all other features of a request: filters, penalties, bias, masks, bad words,
//! stop strings that hold text back, minimum lengths, two choices. This file contains only one test, so that the
//! allocations of other tests are not counted.
#![cfg(feature = "text")]

#[path = "common/counting_allocator.rs"]
mod counting_allocator;

mod common;

use std::cell::Cell;
use std::path::Path;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use ascend_llm::engine::{CacheBudget, EngineConfig, EngineCore, Request};
use ascend_llm::graph::Numerics;
use ascend_llm::sampler::SamplingParams;
use common::fable::{assert_at_rest, core, drain, float, plain_config, quantized};

/// Threads are numbered in the order of their first allocation; the first one is the test runner's thread.
const THREADS: usize = 64;
static NEXT_THREAD: AtomicUsize = AtomicUsize::new(0);
static ALLOCATIONS: [AtomicU64; THREADS] = [const { AtomicU64::new(0) }; THREADS];

thread_local! {
    static THREAD: Cell<Option<usize>> = const { Cell::new(None) };
}

fn count() {
    // Thread-locals may already be destroyed while a thread ends.
    let _ = THREAD.try_with(|thread| {
        let id = thread.get().unwrap_or_else(|| {
            let id = NEXT_THREAD.fetch_add(1, Ordering::Relaxed).min(THREADS - 1);
            thread.set(Some(id));
            id
        });
        ALLOCATIONS[id].fetch_add(1, Ordering::Relaxed);
    });
}

/// Returns the number of allocations of all threads except the test runner's, unless that thread runs the test itself.
fn allocations() -> u64 {
    let runs_the_test = THREAD.get() == Some(0);
    let first = usize::from(!runs_the_test);
    ALLOCATIONS[first..].iter().map(|count| count.load(Ordering::Relaxed)).sum()
}

/// Parameters of a choice that runs to its maximum length: end-of-sequence ids are ignored.
fn params(seed: u64, max_tokens: u32) -> SamplingParams {
    let mut params = SamplingParams::default();
    (params.seed, params.max_tokens, params.ignore_eos) = (Some(seed), Some(max_tokens), true);
    params
}

/// Parameters of eight choices, which sample in different ways.
fn mixed(max_tokens: u32) -> Vec<SamplingParams> {
    let all = |change: fn(&mut SamplingParams)| {
        let mut params = params(7, max_tokens);
        change(&mut params);
        params
    };
    vec![
        all(|p| p.temperature = 0.0),
        all(|p| (p.top_k, p.top_p, p.min_p) = (40, 0.9, 0.02)),
        all(|p| (p.repetition_penalty, p.presence_penalty, p.frequency_penalty) = (1.1, 0.2, 0.1)),
        all(|p| (p.logit_bias, p.min_tokens) = (vec![(5, 1.5), (9, -3.0)], 100)),
        all(|p| p.allowed_token_ids = Some((3..700).collect())),
        all(|p| p.stop = vec![" the end of all the world".to_owned(), ". . . . .".to_owned()]),
        all(|p| (p.n, p.bad_words) = (2, vec!["little".to_owned(), "was a".to_owned()])),
    ]
}

fn steady_allocations(core: &mut EngineCore, label: &str, steps: u32) -> u64 {
    let mut total = 0;
    for step in 0..steps {
        let before = allocations();
        let report = core.step().unwrap();
        let allocated = allocations() - before;
        assert!(report.rows == report.sequences && report.sequences > 0, "{label}, step {step}: {report:?}");
        assert!(report.finished == 0 && report.preempted == 0, "{label}, step {step}: {report:?}");
        if allocated > 0 {
            println!("{label}: step {step} allocates {allocated} times");
        }
        total += allocated;
    }
    total
}

fn config(threads: usize) -> EngineConfig {
    let mut config = plain_config();
    config.max_num_seqs = 8;
    config.threads = Some(threads);
    config.kv_cache = CacheBudget::Blocks(256);
    config
}

/// Counts the allocations of eight sequences with short prompts.
fn batch(model: &Path, config: EngineConfig, label: &str) -> u64 {
    let mut core = core(model, config);
    let handles: Vec<_> = (3..)
        .zip(mixed(300))
        .map(|(id, params)| core.submit(Request::tokens(vec![id; 2 + id as usize]).with_sampling(params)).unwrap())
        .collect();
    for _ in 0..8 {
        core.step().unwrap();
    }
    let total = steady_allocations(&mut core, label, 266);
    drop(handles);
    drain(&mut core);
    assert_at_rest(&core);
    total
}

/// Counts the allocations of one sequence that grows beyond attention's first segment (256 tokens).
///
/// From there on, the thread pool splits the segments among its workers.
fn single(model: &Path, config: EngineConfig, label: &str) -> u64 {
    one(model, config, params(3, 300), label)
}

fn one(model: &Path, config: EngineConfig, params: SamplingParams, label: &str) -> u64 {
    let mut core = core(model, config);
    let handle = core.submit(Request::tokens(vec![7; 200]).with_sampling(params)).unwrap();
    for _ in 0..5 {
        core.step().unwrap();
    }
    let total = steady_allocations(&mut core, label, 150);
    drop(handle);
    drain(&mut core);
    assert_at_rest(&core);
    total
}

/// Counts the allocations with log-probabilities: each step reuses the lists of the step before.
fn with_logprobs(model: &Path, config: EngineConfig, label: &str) -> u64 {
    let mut core = core(model, config);
    let mut params = params(3, 300);
    params.logprobs = Some(5);
    let handle = core.submit(Request::tokens(vec![7; 20]).with_sampling(params)).unwrap();
    for _ in 0..4 {
        core.step().unwrap();
    }
    let total = steady_allocations(&mut core, label, 200);
    drop(handle);
    core.step().unwrap();
    total
}

#[test]
fn steady_decode_steps_allocate_nothing() {
    let before = allocations();
    std::thread::scope(|scope| scope.spawn(|| drop(std::hint::black_box(vec![1u8; 100]))).join().unwrap());
    assert!(allocations() > before, "the counter does not count allocations");

    let mut total = 0;
    for (model, numerics, threads, prefix_caching, fusion) in [
        (float(), Numerics::Exact, 1, false, 2),
        (float(), Numerics::Fast, 2, true, 0),
        (quantized(), Numerics::Fast, 2, true, 2),
        (quantized(), Numerics::Fast, 1, false, 0),
    ] {
        let label = format!("{}, {numerics:?}, {threads} threads, fusion {fusion}", model.display());
        let mut config = config(threads);
        (config.numerics, config.prefix_caching, config.compile.fusion) = (numerics, prefix_caching, Some(fusion));
        total += batch(&model, config.clone(), &format!("{label}, batch"));
        total += single(&model, config, &format!("{label}, single sequence"));
    }
    for depth in [2, 3] {
        let mut config = config(2);
        (config.pipeline_depth, config.prefix_caching) = (Some(depth), depth == 2);
        let label = format!("{depth} in-flight steps");
        total += batch(&quantized(), config.clone(), &format!("{label}, batch"));
        total += single(&quantized(), config.clone(), &format!("{label}, single sequence"));
        let mut greedy = params(3, 300);
        greedy.temperature = 0.0;
        total += one(&quantized(), config, greedy, &format!("{label}, greedy"));
    }
    total += with_logprobs(&quantized(), config(1), "log-probabilities");
    assert_eq!(total, 0, "steady steps allocated memory; the output above lists them");
}
