//! Tests that the output of a request is bit-equal in any batch: real engine, real kernels, float and integer weights.
#![allow(clippy::cast_possible_truncation, reason = "the numbers of a test are small")]
#![cfg(feature = "text")]

use std::path::Path;

use crate::common::fable::{
    Author, Seen, alone, builder, core, drain, float, plain_config, quantized, quantized_with_offsets,
};
use ascend_llm::engine::{CacheBudget, EngineConfig, Request, RequestHandle};
use ascend_llm::graph::Numerics;
use ascend_llm::kv_cache::KvDType;
use ascend_llm::sampler::SamplingParams;

const REQUESTS: usize = 64;
/// A request of 400 + 40 tokens uses 28 blocks of 16; sixteen requests do not fit into the pool.
const POOL_BLOCKS: u32 = 30;

/// A request, its submission step, and the actions of its caller.
#[derive(Clone, Debug)]
struct Script {
    prompt: Vec<u32>,
    params: SamplingParams,
    submit_at: u32,
    leaves: Option<Leaves>,
}

/// How a caller abandons its request, and how many steps (or deltas) after submission.
#[derive(Clone, Copy, Debug)]
enum Leaves {
    Drops(u32),
    Cancels(u32),
}

impl Script {
    fn request(&self) -> Request {
        Request::tokens(self.prompt.clone()).with_sampling(self.params.clone())
    }
}

fn scripts(seed: u64) -> Vec<Script> {
    let mut author = Author::new(seed);
    (0..REQUESTS)
        .map(|index| {
            // Most prompts are short, some have the maximum length; the shortest and the longest always occur.
            let len = match index {
                0 => 1,
                1 => 400,
                _ => {
                    let most = author.dice().one_of(&[20, 60, 150, 400]);
                    author.dice().from(1, most)
                }
            };
            let (prompt, params) = (author.prompt(len), author.params(40));
            let dice = author.dice();
            let leaves = match dice.from(0, 9) {
                0 => Some(Leaves::Drops(dice.from(0, 40))),
                1 => Some(Leaves::Cancels(dice.from(0, 40))),
                _ => None,
            };
            Script { prompt, params, submit_at: dice.from(0, 150), leaves }
        })
        .collect()
}

/// Numeric mode, and the type of keys and values.
type Arithmetic = (Numerics, Option<KvDType>);

fn alone_config((numerics, kv_dtype): Arithmetic) -> EngineConfig {
    let mut config = plain_config();
    (config.numerics, config.kv_dtype) = (numerics, kv_dtype);
    config
}

fn mixed_batch_config(arithmetic: Arithmetic) -> EngineConfig {
    let mut config = alone_config(arithmetic);
    config.prefix_caching = true;
    config.max_num_batched_tokens = 64;
    config.max_num_seqs = 16;
    config.kv_cache = CacheBudget::Blocks(POOL_BLOCKS);
    config
}

/// Compares each output in a mixed batch with that in a batch of its own; `None` if the caller dropped the handle.
fn compare(model: &Path, arithmetic: Arithmetic, label: &str, scripts: &[Script], seen: Vec<Option<Seen>>) {
    let (mut complete, mut abandoned) = (0, 0);
    for (index, (script, got)) in scripts.iter().zip(seen).enumerate() {
        let Some(got) = got else { continue };
        let expected = alone(model, &alone_config(arithmetic), script.request());
        if script.leaves.is_none() {
            complete += 1;
            assert!(got == expected, "{label}, request {index}: {got:#?}\nexpected: {expected:#?}\n{script:?}");
        } else {
            abandoned += 1;
            assert!(
                expected.begins_with(&got),
                "{label}, request {index}: {got:#?}\nexpected: {expected:#?}\n{script:?}"
            );
        }
    }
    assert!(
        complete >= REQUESTS / 2 && abandoned > 0,
        "only {complete} complete and {abandoned} abandoned outputs were compared"
    );
}

/// Runs a batch whose requests arrive and leave at fixed steps of a core.
fn mixed_batch(model: &Path, arithmetic: Arithmetic, seed: u64) {
    mixed_batch_in_flight(model, arithmetic, seed, 1);
}

/// Does the same with several in-flight steps.
fn mixed_batch_in_flight(model: &Path, arithmetic: Arithmetic, seed: u64, depth: u32) {
    let label = format!("{}, {arithmetic:?}, depth {depth}, seed {seed}", model.display());
    let scripts = scripts(seed);
    let mut config = mixed_batch_config(arithmetic);
    config.pipeline_depth = Some(depth);
    let mut core = core(model, config);
    let mut handles: Vec<Option<RequestHandle>> = scripts.iter().map(|_| None).collect();
    for step in 0..200 {
        for (script, handle) in scripts.iter().zip(&mut handles) {
            if script.submit_at == step {
                *handle = Some(core.submit(script.request()).unwrap());
            }
            match script.leaves {
                Some(Leaves::Drops(after)) if script.submit_at + after == step => *handle = None,
                Some(Leaves::Cancels(after)) if script.submit_at + after == step => handle.as_ref().unwrap().cancel(),
                _ => {}
            }
        }
        core.step().unwrap();
        core.check().unwrap();
    }
    drain(&mut core);
    let stats = core.stats();
    assert!(stats.preemptions > 0, "{label}: the pool was never full: {stats:?}");
    assert!(stats.prefix_hits > 0, "{label}: no prefix was shared: {stats:?}");
    assert!(stats.finished_cancelled > 0 && stats.finished_stop > 0 && stats.finished_length > 0, "{label}: {stats:?}");

    let seen = handles.into_iter().map(|handle| handle.map(|handle| Seen::of(&handle.collect_output().unwrap())));
    compare(model, arithmetic, &label, &scripts, seen.collect());
}

#[test]
fn batches_do_not_change_outputs_with_float_weights() {
    mixed_batch(&float(), (Numerics::Exact, None), 1);
}

#[test]
fn batches_do_not_change_outputs_with_integer_weights() {
    mixed_batch(&quantized(), (Numerics::Fast, None), 2);
}

#[test]
fn batches_do_not_change_outputs_with_keys_and_values_in_int8() {
    mixed_batch(&quantized(), (Numerics::Fast, Some(KvDType::I8)), 4);
}

/// The reference outputs come from engines with one in-flight step.
#[test]
fn batches_do_not_change_outputs_with_steps_in_flight() {
    for depth in [2, 3] {
        mixed_batch_in_flight(&quantized(), (Numerics::Fast, None), 2, depth);
    }
}

/// The engine runs on its own thread with four callers at once, so the arrival times vary.
#[test]
fn batches_of_several_callers_do_not_change_outputs() {
    let (model, arithmetic, seed) = (quantized_with_offsets(), (Numerics::Fast, None), 3);
    let scripts = scripts(seed);
    let engine = builder(&model, mixed_batch_config(arithmetic)).build().unwrap();
    let mut seen: Vec<Option<Seen>> = scripts.iter().map(|_| None).collect();
    std::thread::scope(|scope| {
        for (scripts, seen) in scripts.chunks(REQUESTS / 4).zip(seen.chunks_mut(REQUESTS / 4)) {
            let engine = engine.clone();
            scope.spawn(move || {
                // All requests of this caller are in the engine before the caller reads the first output.
                let handles: Vec<_> = scripts.iter().map(|script| engine.submit(script.request()).unwrap()).collect();
                for ((script, seen), mut handle) in scripts.iter().zip(seen).zip(handles) {
                    match script.leaves {
                        None => *seen = Some(Seen::of(&handle.collect_output().unwrap())),
                        Some(Leaves::Cancels(_)) => {
                            handle.cancel();
                            *seen = Some(Seen::of(&handle.collect_output().unwrap()));
                        }
                        Some(Leaves::Drops(after)) => {
                            for _ in 0..after {
                                let Some(delta) = handle.recv() else { break };
                                delta.unwrap();
                            }
                        }
                    }
                }
            });
        }
    });
    compare(&model, arithmetic, &format!("threads, seed {seed}"), &scripts, seen);
    let last = engine.clone();
    engine.shutdown(std::time::Duration::MAX).unwrap();
    let stats = last.stats();
    assert_eq!((stats.queued_requests, stats.running, stats.waiting, stats.live_blocks), (0, 0, 0, 0), "{stats:?}");
    assert_eq!(stats.free_blocks + stats.cached_blocks, u64::from(POOL_BLOCKS), "{stats:?}");
}
