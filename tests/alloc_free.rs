//! A steady decode step of the whole engine on the CPU device allocates nothing, on any of its threads.
//!
//! Steady: nothing is admitted, ends, is preempted or read in the step. Exempt are log-probabilities (`prompt_logprobs`
//! only ever belong to a prompt's steps; `logprobs` take their lists over from the step before, and are counted here too).
//! Everything else a request may ask for is on in one sequence or another: filters, penalties, bias, masks, bad words,
//! stop strings that hold text back, minimum lengths, two choices. One test in this file, so that no other test's
//! allocations are counted.
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

/// Threads are numbered in the order of their first allocation; the test runner's own is the first of all.
const THREADS: usize = 64;
static NEXT_THREAD: AtomicUsize = AtomicUsize::new(0);
static ALLOCATIONS: [AtomicU64; THREADS] = [const { AtomicU64::new(0) }; THREADS];

thread_local! {
    static THREAD: Cell<Option<usize>> = const { Cell::new(None) };
}

fn count() {
    // Thread-locals may be gone while a thread ends.
    let _ = THREAD.try_with(|thread| {
        let id = thread.get().unwrap_or_else(|| {
            let id = NEXT_THREAD.fetch_add(1, Ordering::Relaxed).min(THREADS - 1);
            thread.set(Some(id));
            id
        });
        ALLOCATIONS[id].fetch_add(1, Ordering::Relaxed);
    });
}

/// Allocations of all threads except the test runner's, unless that one runs the test itself.
fn allocations() -> u64 {
    let runs_the_test = THREAD.get() == Some(0);
    let first = usize::from(!runs_the_test);
    ALLOCATIONS[first..].iter().map(|count| count.load(Ordering::Relaxed)).sum()
}

/// Never ends before its length: end-of-sequence ids are ignored.
fn params(seed: u64, max_tokens: u32) -> SamplingParams {
    let mut params = SamplingParams::default();
    (params.seed, params.max_tokens, params.ignore_eos) = (Some(seed), Some(max_tokens), true);
    params
}

/// Eight choices that sample in eight ways.
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

/// Eight short prompts, then `steps` tokens of each.
fn crowd(model: &Path, config: EngineConfig, label: &str) -> u64 {
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

/// One sequence through the end of attention's first segment (256 tokens), where a team starts to share its segments.
fn alone(model: &Path, config: EngineConfig, label: &str) -> u64 {
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

/// The lists of log-probabilities go from step to step.
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
    assert!(allocations() > before, "the counter is blind");

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
        total += crowd(&model, config.clone(), &format!("{label}, crowd"));
        total += alone(&model, config, &format!("{label}, alone"));
    }
    for depth in [2, 3] {
        let mut config = config(2);
        (config.pipeline_depth, config.prefix_caching) = (Some(depth), depth == 2);
        let label = format!("{depth} steps in flight");
        total += crowd(&quantized(), config.clone(), &format!("{label}, crowd"));
        total += alone(&quantized(), config.clone(), &format!("{label}, alone"));
        let mut greedy = params(3, 300);
        greedy.temperature = 0.0;
        total += one(&quantized(), config, greedy, &format!("{label}, greedy"));
    }
    total += with_logprobs(&quantized(), config(1), "log-probabilities");
    assert_eq!(total, 0, "steady steps allocate; see above where");
}
