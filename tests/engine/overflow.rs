//! Tests of activations that overflow half precision: they are clamped and counted, an error, or computed again in f32.
//!
//! An overflow never yields a row of "!" tokens, and its handling does not depend on other requests, chunks, the prefix
//! cache or preemption.

#![allow(missing_docs, clippy::cast_possible_truncation)]
#![cfg(feature = "text")]

use crate::common::fable;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::common::deferred_device::DeferredDevice;
use crate::common::fable::{Seen, alone, builder, core, drain, float, plain_config};
use ascend_llm::engine::{CacheBudget, EngineConfig, Request, RequestError, Stats};
use ascend_llm::graph::{Numerics, OverflowPolicy, Precision};
use ascend_llm::kv_cache::KvDType;
use ascend_llm::sampler::SamplingParams;

/// Returns a copy of the story model with one tensor of a layer multiplied by 2^`shift`, and another one divided by it.
///
/// In f32 the outputs are bit-equal to those of the original model, but the values between the two tensors are larger
/// by that factor.
fn stretched(name: &str, pair: [&str; 2], shift: i32) -> PathBuf {
    // Each call uses its own folder, because tests run in parallel.
    static CALLS: AtomicU32 = AtomicU32::new(0);
    let call = CALLS.fetch_add(1, Ordering::Relaxed);
    let copy = Path::new(env!("CARGO_TARGET_TMPDIR")).join("overflow").join(format!("{name}-{call}"));
    std::fs::create_dir_all(&copy).unwrap();
    for entry in std::fs::read_dir(float()).unwrap() {
        let path = entry.unwrap().path();
        if path.is_file() {
            std::fs::copy(&path, copy.join(path.file_name().unwrap())).unwrap();
        }
    }
    let file = copy.join("model.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    let header_len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + header_len]).unwrap();
    for (tensor, shift) in pair.into_iter().zip([shift, -shift]) {
        let entry = &header[tensor];
        let offsets = [0, 1].map(|i| 8 + header_len + entry["data_offsets"][i].as_u64().unwrap() as usize);
        let data = &mut bytes[offsets[0]..offsets[1]];
        let factor = 2f32.powi(shift);
        match entry["dtype"].as_str().unwrap() {
            "F32" => {
                for x in data.as_chunks_mut::<4>().0 {
                    *x = (f32::from_le_bytes(*x) * factor).to_le_bytes();
                }
            }
            "BF16" => {
                for x in data.as_chunks_mut::<2>().0 {
                    let wide = f32::from_bits(u32::from(u16::from_le_bytes(*x)) << 16) * factor;
                    *x = ((wide.to_bits() >> 16) as u16).to_le_bytes();
                }
            }
            other => panic!("{other}"),
        }
    }
    std::fs::write(&file, bytes).unwrap();
    copy
}

/// Returns the model in which the inputs of the last layer's down projection are multiplied by 2^`shift`.
fn large_products(shift: i32) -> PathBuf {
    let mlp = "model.layers.2.mlp";
    let pair = [format!("{mlp}.up_proj.weight"), format!("{mlp}.down_proj.weight")];
    stretched(&format!("products-{shift}"), [&pair[0], &pair[1]], shift)
}

/// A shift with which some rows overflow and others do not.
const SHIFT: i32 = 14;

fn config(overflow: OverflowPolicy) -> EngineConfig {
    let mut config = plain_config();
    config.numerics = Numerics::Fast;
    (config.compile.precision, config.compile.overflow) = (Some(Precision::F16), Some(overflow));
    config.max_num_seqs = 8;
    config
}

fn request(prompt: &[u32], n: u32) -> Request {
    let mut params = SamplingParams::default();
    (params.max_tokens, params.logprobs, params.seed, params.n) = (Some(24), Some(3), Some(5), n);
    Request::tokens(prompt.to_vec()).with_sampling(params)
}

fn prompts() -> Vec<Vec<u32>> {
    (1..6u32).map(|seed| (0..seed * 21).map(|i| 3 + (i * i * 5 + i * seed + seed) % 700).collect()).collect()
}

fn requests() -> Vec<Request> {
    prompts().iter().zip([1, 2, 1, 1, 3]).map(|(prompt, n)| request(prompt, n)).collect()
}

type Answers = Vec<Result<Seen, RequestError>>;

fn together(model: &Path, config: &EngineConfig, rounds: usize) -> (Answers, Stats) {
    let mut core = core(model, config.clone());
    let mut answers = Vec::new();
    for _ in 0..rounds {
        let handles: Vec<_> = requests().into_iter().map(|request| core.submit(request).unwrap()).collect();
        drain(&mut core);
        answers.extend(handles.into_iter().map(|handle| handle.collect_output().map(|output| Seen::of(&output))));
    }
    (answers, core.stats())
}

#[test]
fn sequences_that_overflow_continue_in_f32_and_nothing_else_changes() {
    let model = large_products(SHIFT);
    let config = config(OverflowPolicy::RetryF32);
    let expected: Vec<Seen> = requests().into_iter().map(|request| alone(&model, &config, request)).collect();
    type Change = (&'static str, fn(&mut EngineConfig));
    let changes: [Change; 11] = [
        ("other requests", |_| {}),
        ("two steps in flight", |c| (c.pipeline_depth, c.max_num_batched_tokens) = (Some(2), 24)),
        ("three steps in flight", |c| (c.pipeline_depth, c.max_num_batched_tokens) = (Some(3), 16)),
        ("two threads", |c| c.threads = Some(2)),
        ("8 rows per step", |c| c.max_num_batched_tokens = 8),
        ("29 rows per step", |c| c.max_num_batched_tokens = 29),
        ("prefix cache", |c| c.prefix_caching = true),
        ("prefix cache, 24 rows per step", |c| (c.prefix_caching, c.max_num_batched_tokens) = (true, 24)),
        ("a small pool", |c| c.kv_cache = CacheBudget::Blocks(13)),
        ("level 0", |c| c.compile.opt_level = Some(0)),
        ("level 3", |c| (c.compile.opt_level, c.compile.token_buckets) = (Some(3), Some(vec![4, 16]))),
    ];
    let mut preempted = 0;
    for (name, change) in changes {
        let mut config = config.clone();
        change(&mut config);
        let (answers, stats) = together(&model, &config, 2);
        for (index, answer) in answers.into_iter().enumerate() {
            assert!(answer.unwrap() == expected[index % expected.len()], "{name}: wrong output {index}");
        }
        assert!(stats.retried_sequences > 0 && !stats.overflows.is_empty(), "{name}: {stats:?}");
        preempted += stats.preemptions;
    }
    assert!(preempted > 0, "the small pool must cause preemptions");
    // Each sequence continues like the original half-precision model until a row overflows; from there on with the
    // numbers of f32.
    let unstretched: Vec<Seen> = requests().into_iter().map(|request| alone(&float(), &config, request)).collect();
    let same = expected.iter().zip(&unstretched).filter(|(a, b)| a == b).count();
    assert!(same < expected.len(), "at least one sequence must overflow");
}

/// Greedy sequences are scheduled ahead: an overflow makes their in-flight rows stale.
///
/// A sequence that has ended is not computed again, because its blocks may already belong to another one.
#[test]
fn rows_after_one_that_overflowed_are_computed_again() {
    let model = large_products(SHIFT);
    let mut config = config(OverflowPolicy::RetryF32);
    (config.kv_cache, config.max_num_batched_tokens, config.prefix_caching) = (CacheBudget::Blocks(20), 24, true);
    let run = |depth: u32, late: bool| {
        let mut config = config.clone();
        config.pipeline_depth = Some(depth);
        let mut builder = builder(&model, config);
        if late {
            builder = builder.device(DeferredDevice::new());
        }
        let mut core = builder.build_core().unwrap();
        let mut author = fable::Author::new(7);
        let mut handles = Vec::new();
        for at in 0..24 {
            let mut params = SamplingParams::greedy();
            (params.max_tokens, params.stop_token_ids) = (Some(10 + at), vec![10 + at, 300 + at, 500 + at]);
            params.ignore_eos = at % 2 == 0;
            handles.push(core.submit(Request::tokens(author.prompt(3 + 5 * at)).with_sampling(params)).unwrap());
            core.step().unwrap();
            core.check().unwrap();
        }
        drain(&mut core);
        let seen: Vec<_> = handles.into_iter().map(|handle| Seen::of(&handle.collect_output().unwrap())).collect();
        (seen, core.stats())
    };
    let (expected, stats) = run(1, false);
    assert!(stats.retried_sequences > 2 && stats.wasted_rows == 0, "{stats:?}");
    for depth in 1..=3 {
        for late in [false, true] {
            let (seen, stats) = run(depth, late);
            assert!(seen == expected, "depth {depth}, late {late}: {seen:#?}\nexpected {expected:#?}");
            assert!(depth == 1 || stats.wasted_rows > 0, "{stats:?}");
        }
    }
}

/// In f32 no row overflows, and factors that are powers of two change no bit.
#[test]
fn the_stretched_model_is_the_same_in_f32() {
    let mut config = config(OverflowPolicy::Error);
    config.compile.precision = Some(Precision::F32);
    let (stretched, stats) = together(&large_products(SHIFT), &config, 1);
    let (plain, _) = together(&float(), &config, 1);
    assert!(stretched.iter().zip(&plain).all(|(a, b)| a.as_ref().unwrap() == b.as_ref().unwrap()));
    assert_eq!((stats.retried_sequences, stats.overflows), (0, vec![]));
    // If every row overflows, half precision with retries equals f32.
    let mut config = self::config(OverflowPolicy::RetryF32);
    let (all, stats) = together(&large_products(40), &config, 1);
    assert!(all.iter().zip(&plain).all(|(a, b)| a.as_ref().unwrap() == b.as_ref().unwrap()), "{stats:?}");
    assert_eq!(stats.retried_sequences, 5, "expected one retry per request, because its choices share the prompt");
    // With a smaller shift no row overflows.
    config.compile.overflow = Some(OverflowPolicy::Error);
    let (none, stats) = together(&large_products(2), &config, 1);
    let (half, _) = together(&float(), &config, 1);
    assert!(none.iter().zip(&half).all(|(a, b)| a.as_ref().unwrap() == b.as_ref().unwrap()), "{stats:?}");
}

#[test]
fn the_policy_error_names_the_first_row_with_any_chunks() {
    let model = large_products(40);
    for rows in [8, 29, 512] {
        let mut config = config(OverflowPolicy::Error);
        config.max_num_batched_tokens = rows;
        let (answers, stats) = together(&model, &config, 1);
        for answer in answers {
            assert!(matches!(answer, Err(RequestError::Overflow { choice: 0, position: 0 })), "{answer:?}");
        }
        assert_eq!((stats.retried_sequences, stats.finished_error), (0, 8));
    }
    let some = large_products(SHIFT);
    let mut seen: Vec<Vec<String>> = Vec::new();
    for rows in [8, 29, 512] {
        let mut config = config(OverflowPolicy::Error);
        config.max_num_batched_tokens = rows;
        let describe =
            |answer: Result<Seen, RequestError>| answer.map_or_else(|e| e.to_string(), |seen| format!("{seen:?}"));
        seen.push(together(&some, &config, 1).0.into_iter().map(describe).collect());
    }
    assert!(seen.windows(2).all(|pair| pair[0] == pair[1]), "{seen:#?}");
    assert!(seen[0].iter().any(|answer| answer.contains("too large for the type it is stored in")));
}

#[test]
fn the_policy_clamp_goes_on_and_counts() {
    let (answers, stats) = together(&large_products(40), &config(OverflowPolicy::Clamp), 1);
    assert!(answers.iter().all(Result::is_ok), "{answers:?}");
    assert_eq!(stats.retried_sequences, 0);
    // Only the product of one layer's gated MLP overflows.
    assert_eq!(stats.overflows.len(), 1, "{stats:?}");
    let (op, count) = stats.overflows[0];
    assert!(op == "swiglu_linear" && count > 1000, "{op}: {count}");
    let (all, _) = together(&float(), &config(OverflowPolicy::Clamp), 1);
    assert_ne!(answers[4].as_ref().unwrap(), all[4].as_ref().unwrap(), "clamping must change the output");
}

/// Keys that are too large for f16 are clamped and counted; computing in f32 would not change them.
#[test]
fn stored_keys_and_values_are_clamped_and_counted() {
    let attention = "model.layers.1.self_attn";
    let pair = [format!("{attention}.v_proj.weight"), format!("{attention}.o_proj.weight")];
    let model = stretched("values", [&pair[0], &pair[1]], 24);
    for policy in [OverflowPolicy::Clamp, OverflowPolicy::RetryF32, OverflowPolicy::Error] {
        let mut config = config(policy);
        (config.compile.precision, config.kv_dtype) = (Some(Precision::F32), Some(KvDType::F16));
        let (answers, stats) = together(&model, &config, 1);
        assert_eq!(stats.overflows.len(), 1, "{stats:?}");
        assert_eq!((stats.overflows[0].0, stats.retried_sequences), ("rope_kv_write", 0));
        let failed = answers.iter().filter(|answer| matches!(answer, Err(RequestError::Overflow { .. }))).count();
        assert_eq!(failed, if policy == OverflowPolicy::Error { 5 } else { 0 }, "{answers:?}");
        // With bf16 keys and values, these values do not overflow.
        config.kv_dtype = Some(KvDType::BF16);
        let (answers, stats) = together(&model, &config, 1);
        assert!(answers.iter().all(Result::is_ok) && stats.overflows.is_empty());
    }
}

/// A prompt contains a token whose embedding is not finite: a retry cannot help, and the error names the first bad row.
#[test]
fn rows_that_are_not_finite_end_the_request_at_the_first_of_them() {
    let model = stretched("endless", ["model.embed_tokens.weight", "model.norm.weight"], 0);
    let file = model.join("model.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    let header_len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + header_len]).unwrap();
    let table = &header["model.embed_tokens.weight"];
    let start = 8 + header_len + table["data_offsets"][0].as_u64().unwrap() as usize;
    let element = if table["dtype"] == "F32" { 4 } else { 2 };
    let at = start + 7 * 256 * element + 40 * element;
    bytes[at..at + element].fill(0x7f);
    // Sets all bits of the exponent, in any type.
    bytes[at + element - 2] = 0x80;
    std::fs::write(&file, bytes).unwrap();
    for policy in [OverflowPolicy::Clamp, OverflowPolicy::RetryF32, OverflowPolicy::Error] {
        for (rows, precision) in [(512, Precision::F16), (10, Precision::F16), (10, Precision::F32)] {
            let mut config = config(policy);
            (config.compile.precision, config.max_num_batched_tokens) = (Some(precision), rows);
            let mut core = builder(&model, config).build_core().unwrap();
            let mut prompt: Vec<u32> = (10..60).collect();
            prompt[23] = 7;
            let (one, two) = (core.submit(request(&prompt, 1)).unwrap(), core.submit(request(&[10, 11], 1)).unwrap());
            drain(&mut core);
            let error = one.collect_output().unwrap_err();
            assert!(matches!(error, RequestError::NonFinite { choice: 0, position: 23 }), "{policy:?}: {error:?}");
            // The output projection is tied to the embedding, so every row of logits contains a non-finite one.
            let error = two.collect_output().unwrap_err();
            assert!(matches!(error, RequestError::NonFinite { choice: 0, position: 1 }), "{policy:?}: {error:?}");
        }
    }
}
