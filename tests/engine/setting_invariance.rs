//! Tests that settings for speed or memory do not change any output.
//!
//! The settings are threads, prefix cache, step budget, block size, fusion, streams, buckets, attention's loop orders,
//! memory reuse and in-flight steps. Outputs are bit-equal within a numeric mode and an instruction set, so each of
//! these is compared separately.
#![allow(clippy::cast_possible_truncation, reason = "the numbers of a test are small")]
#![cfg(feature = "text")]

use std::path::Path;

use crate::common::fable::{
    Author, Seen, alone, builder, device, drain, float, plain_config, quantized, quantized_with_offsets,
};
use ascend_llm::device::cpu::Isa;
use ascend_llm::engine::{CacheBudget, EngineConfig, Request, Stats};
use ascend_llm::graph::Numerics;
use ascend_llm::kv_cache::KvDType;

/// Prompt lengths around the sizes of tiles (16), blocks (16, 32, 128), budgets (16, 64) and attention's segments
/// (256).
const PROMPT_TOKENS: [u32; 9] = [1, 15, 16, 17, 33, 64, 129, 255, 261];

fn requests(seed: u64) -> Vec<Request> {
    let mut author = Author::new(seed);
    let mut request = |&len: &u32| {
        let prompt = author.prompt(len);
        Request::tokens(prompt).with_sampling(author.params(12))
    };
    PROMPT_TOKENS.iter().map(&mut request).collect()
}

/// Runs all requests at once; with the prefix cache, runs them a second time, when the cache contains all prompts.
fn together(model: &Path, requests: &[Request], config: EngineConfig, isa: Isa) -> (Vec<Seen>, Stats) {
    let (threads, rounds) = (config.threads, if config.prefix_caching { 2 } else { 1 });
    let device = device(|options| (options.threads, options.isa) = (threads, Some(isa)));
    let mut core = builder(model, config).device(device).build_core().unwrap();
    let mut seen = Vec::new();
    for _ in 0..rounds {
        let handles: Vec<_> = requests.iter().map(|request| core.submit(request.clone()).unwrap()).collect();
        drain(&mut core);
        seen.extend(handles.into_iter().map(|handle| Seen::of(&handle.collect_output().unwrap())));
    }
    (seen, core.stats())
}

/// Configuration of the simplest engine: one thread, no prefix cache, no fusion, one chunk per prompt, small blocks.
fn plain(numerics: Numerics) -> EngineConfig {
    let mut config = plain_config();
    config.numerics = numerics;
    config.compile.fusion = Some(0);
    config
}

/// The same with int8 keys and values, which are a numeric mode of their own.
fn plain_int8() -> EngineConfig {
    let mut config = plain(Numerics::Fast);
    config.kv_dtype = Some(KvDType::I8);
    config
}

type Change = (&'static str, fn(&mut EngineConfig));

/// All changes keep the pool at 2,048 tokens, which holds all requests of the test; `batch_invariance` tests small
/// pools.
const CHANGES: [Change; 19] = [
    ("two threads", |c| c.threads = Some(2)),
    ("prefix cache", |c| c.prefix_caching = true),
    ("16 rows per step", |c| c.max_num_batched_tokens = 16),
    ("64 rows per step", |c| c.max_num_batched_tokens = 64),
    ("8192 rows per step", |c| c.max_num_batched_tokens = 8192),
    ("blocks of 32", |c| (c.block_size, c.kv_cache) = (Some(32), CacheBudget::Blocks(64))),
    ("blocks of 128", |c| (c.block_size, c.kv_cache) = (Some(128), CacheBudget::Blocks(16))),
    ("one sequence per step", |c| c.max_num_seqs = 1),
    ("two steps in flight", |c| c.pipeline_depth = Some(2)),
    ("three steps in flight", |c| (c.pipeline_depth, c.max_num_batched_tokens) = (Some(3), 40)),
    ("fusion 2", |c| c.compile.fusion = Some(2)),
    ("fusion 3", |c| c.compile.fusion = Some(3)),
    ("no memory reuse", |c| c.compile.memory_reuse = Some(false)),
    ("two streams", |c| c.compile.parallel_ops = Some(2)),
    ("four streams", |c| (c.compile.parallel_ops, c.threads) = (Some(4), Some(2))),
    ("buckets", |c| c.compile.token_buckets = Some(vec![1, 2, 3, 16, 40])),
    ("attention at once", |c| {
        c.compile.fusion = Some(3);
        (c.compile.attention.full_max, c.compile.attention.partial_max) = (4096, 4096);
    }),
    ("attention in every order", |c| {
        c.compile.fusion = Some(3);
        (c.compile.attention.full_max, c.compile.attention.partial_max) = (32, 80);
    }),
    ("everything at once", |c| {
        (c.threads, c.prefix_caching, c.compile.opt_level) = (Some(2), true, Some(3));
        (c.compile.fusion, c.compile.token_buckets) = (Some(3), Some(vec![8, 24]));
        c.pipeline_depth = Some(3);
        (c.max_num_batched_tokens, c.block_size, c.kv_cache) = (64, Some(32), CacheBudget::Blocks(64));
    }),
];

fn settings_do_not_change_outputs(model: &Path, plain: &EngineConfig, seed: u64) {
    let label = format!("{}, {:?}, {:?}, seed {seed}", model.display(), plain.numerics, plain.kv_dtype);
    let requests = requests(seed);
    let expected: Vec<Seen> = requests.iter().map(|request| alone(model, plain, request.clone())).collect();
    for (name, change) in CHANGES {
        let mut config = plain.clone();
        config.max_num_seqs = 16;
        change(&mut config);
        let (seen, stats) = together(model, &requests, config.clone(), Isa::detect());
        for (index, seen) in seen.iter().enumerate() {
            let expected = &expected[index % expected.len()];
            assert!(seen == expected, "{label}, {name}, answer {index}: {seen:#?}\nexpected: {expected:#?}");
        }
        assert_eq!(stats.prefix_hits > 0, config.prefix_caching, "{label}, {name}: {stats:?}");
        assert_eq!(stats.preemptions, 0, "{label}, {name}: the pool must hold all requests");
    }
}

#[test]
fn settings_do_not_change_outputs_with_float_weights_and_exact_numerics() {
    settings_do_not_change_outputs(&float(), &plain(Numerics::Exact), 11);
}

#[test]
fn settings_do_not_change_outputs_with_float_weights_and_fast_numerics() {
    settings_do_not_change_outputs(&float(), &plain(Numerics::Fast), 12);
}

#[test]
fn settings_do_not_change_outputs_with_integer_weights_and_exact_numerics() {
    settings_do_not_change_outputs(&quantized(), &plain(Numerics::Exact), 13);
}

#[test]
fn settings_do_not_change_outputs_with_integer_weights_and_fast_numerics() {
    settings_do_not_change_outputs(&quantized(), &plain(Numerics::Fast), 14);
    settings_do_not_change_outputs(&quantized_with_offsets(), &plain(Numerics::Fast), 15);
}

#[test]
fn settings_do_not_change_outputs_with_keys_and_values_in_int8() {
    settings_do_not_change_outputs(&quantized(), &plain_int8(), 16);
}

/// Does the same comparison on each instruction set of the machine, with another budget and another work split.
#[test]
fn batches_do_not_change_outputs_on_any_instruction_set() {
    for (isa, seed) in Isa::available().iter().copied().zip(21..) {
        for (model, mut config) in
            [(float(), plain(Numerics::Fast)), (quantized(), plain(Numerics::Fast)), (float(), plain_int8())]
        {
            let label = format!("{}, {}, {:?}, seed {seed}", model.display(), isa.name(), config.kv_dtype);
            let requests = &requests(seed)[2..8];
            let expected: Vec<Seen> = requests
                .iter()
                .flat_map(|request| together(&model, std::slice::from_ref(request), config.clone(), isa).0)
                .collect();
            (config.max_num_batched_tokens, config.max_num_seqs, config.threads) = (40, 16, Some(2));
            let (seen, _) = together(&model, requests, config, isa);
            for (index, seen) in seen.iter().enumerate() {
                assert!(*seen == expected[index % expected.len()], "{label}, answer {index}: {seen:#?}");
            }
        }
    }
}

/// A budget in bytes holds nearly twice as many tokens in int8 as in f16: a head of 64 elements has 68 bytes instead of
/// 128.
#[test]
fn a_budget_in_bytes_counts_the_scales() {
    let blocks = |dtype| {
        let mut config = plain(Numerics::Fast);
        (config.kv_dtype, config.block_size, config.kv_cache) = (Some(dtype), Some(16), CacheBudget::Bytes(2_457_600));
        let core = builder(&float(), config).build_core().unwrap();
        let info = core.info();
        (info.kv_dtype, info.pool_blocks, info.pool_bytes)
    };
    // A token has 2 KV heads in each of 3 layers.
    assert_eq!(blocks(KvDType::F16), (Some(KvDType::F16), 100, 100 * 16 * 2 * 3 * 2 * 128));
    assert_eq!(blocks(KvDType::I8), (Some(KvDType::I8), 188, 188 * 16 * 2 * 3 * 2 * 68));
}

/// Different numeric modes and seeds must differ; otherwise the comparisons above would prove nothing.
#[test]
fn numeric_modes_and_seeds_change_outputs() {
    let model = quantized();
    let mut params = ascend_llm::sampler::SamplingParams::default();
    (params.max_tokens, params.logprobs, params.seed) = (Some(12), Some(2), Some(1));
    let request =
        |params: &ascend_llm::sampler::SamplingParams| Request::tokens(vec![5; 40]).with_sampling(params.clone());
    let exact = alone(&model, &plain(Numerics::Exact), request(&params));
    let fast = alone(&model, &plain(Numerics::Fast), request(&params));
    let int8 = alone(&model, &plain_int8(), request(&params));
    assert_ne!(exact.choices[0].logprobs, fast.choices[0].logprobs);
    assert_ne!(int8.choices[0].logprobs, fast.choices[0].logprobs);
    params.seed = Some(2);
    let other = alone(&model, &plain(Numerics::Exact), request(&params));
    assert_ne!(exact.choices[0].ids, other.choices[0].ids);
}
