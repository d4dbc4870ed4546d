//! Tests that the output of a request does not depend on other requests, the pool size or the token budget.

use crate::common::scripted_engine;
use std::sync::Arc;

use crate::common::scripted_engine::{Rig, assert_at_rest, drain, finish};
use ascend_llm::engine::{
    CacheBudget, EngineConfig, FinishReason, Output, Request, RequestError, RequestHandle, SystemClock,
};
use ascend_llm::runner::scripted::{ScriptedForward, hashed_logits};
use ascend_llm::sampler::SamplingParams;
use proptest::prelude::*;

const VOCAB: u32 = 50;

/// A request of a random run, and the actions of its caller.
#[derive(Clone, Debug)]
struct Script {
    prompt: Vec<u32>,
    params: SamplingParams,
    submit_at: usize,
    /// Number of steps after submission at which the caller drops the handle.
    leaves_after: Option<usize>,
    cancels: bool,
}

fn script() -> impl Strategy<Value = Script> {
    // Prompts share a few long beginnings, so that prefixes are shared.
    let prompt = (0u32..3, 0u32..50, prop::collection::vec(0..VOCAB, 1..12)).prop_map(|(base, len, tail)| {
        (0..len).map(|at| (base * 17 + at * 7) % VOCAB).chain(tail).collect::<Vec<u32>>()
    });
    let wishes = (any::<u64>(), 1u32..4, 1u32..20, 0u32..5, prop::option::of(0u32..4), any::<bool>(), any::<bool>());
    let leaving = (0usize..30, prop::option::weighted(0.3, 0usize..12), any::<bool>());
    (prompt, wishes, leaving).prop_map(|(prompt, wishes, (submit_at, leaves_after, cancels))| {
        let (seed, n, max_tokens, min_tokens, logprobs, prompt_logprobs, greedy) = wishes;
        let mut params = if greedy { SamplingParams::greedy() } else { SamplingParams::default() };
        params.seed = Some(seed);
        params.n = if greedy { 1 } else { n };
        params.max_tokens = Some(max_tokens);
        params.min_tokens = min_tokens.min(max_tokens);
        params.logprobs = logprobs;
        params.prompt_logprobs = prompt_logprobs.then_some(2);
        params.stop_token_ids = vec![4, 5];
        params.presence_penalty = if seed % 3 == 0 { 0.5 } else { 0.0 };
        Script { prompt, params, submit_at, leaves_after, cancels }
    })
}

fn request(script: &Script) -> Request {
    Request::tokens(script.prompt.clone()).with_sampling(script.params.clone())
}

fn roomy() -> Rig {
    let mut rig = Rig::new(VOCAB, 64);
    rig.model.eos_ids = vec![7];
    rig.config.prefix_caching = false;
    rig.config.max_num_batched_tokens = 512;
    rig
}

fn alone(script: &Script) -> Output {
    let rig = roomy();
    let mut core = rig.core(rig.hashed());
    let handle = core.submit(request(script)).unwrap();
    finish(&mut core, handle)
}

proptest! {
    #[test]
    fn batches_do_not_change_outputs(
        scripts in prop::collection::vec(script(), 1..10),
        blocks in 6u32..24, max_num_seqs in 1u32..6, spare_rows in 0u32..40,
        prefix_caching in any::<bool>(), max_logit_rows in 1u32..40,
    ) {
        let mut rig = Rig::new(VOCAB, blocks);
        rig.model.eos_ids = vec![7];
        rig.model.max_logit_rows = max_logit_rows;
        rig.config.prefix_caching = prefix_caching;
        rig.config.max_num_seqs = max_num_seqs;
        rig.config.max_num_batched_tokens = max_num_seqs + spare_rows;
        let mut core = rig.core(rig.hashed());

        let mut handles: Vec<Option<RequestHandle>> = scripts.iter().map(|_| None).collect();
        let mut step = 0;
        while step < 45 || !core.is_idle() {
            for (script, handle) in scripts.iter().zip(&mut handles) {
                if script.submit_at == step {
                    *handle = Some(core.submit(request(script)).unwrap());
                }
                if script.leaves_after.is_some_and(|after| script.submit_at + after == step) {
                    if script.cancels {
                        handle.as_ref().unwrap().cancel();
                    } else {
                        *handle = None;
                    }
                }
            }
            core.step().unwrap();
            core.check().unwrap();
            step += 1;
            prop_assert!(step < 20_000, "the requests do not end within the bound");
        }
        assert_at_rest(&core);

        for (script, handle) in scripts.iter().zip(handles) {
            let Some(handle) = handle else { continue };
            let (got, expected) = (handle.collect_output().unwrap(), alone(script));
            if script.leaves_after.is_none() {
                prop_assert_eq!(&got.choices, &expected.choices);
                prop_assert_eq!(&got.prompt_logprobs, &expected.prompt_logprobs);
                prop_assert_eq!(got.prompt_logprobs.is_some(), script.params.prompt_logprobs.is_some());
            }
            for (got, expected) in got.choices.iter().zip(&expected.choices) {
                let ended = got.finish_reason == expected.finish_reason;
                prop_assert!(ended || got.finish_reason == FinishReason::Cancelled);
                prop_assert!(expected.token_ids.starts_with(&got.token_ids), "{got:?} {expected:?}");
            }
        }
    }
}

#[test]
fn a_pool_too_small_for_the_output_ends_it_with_length() {
    let mut rig = Rig::new(VOCAB, 2);
    rig.config.max_num_seqs = 2;
    let mut core = rig.core(rig.hashed());
    let mut params = SamplingParams::greedy();
    params.max_tokens = Some(100);
    let handle = core.submit(Request::tokens(vec![1; 20]).with_sampling(params)).unwrap();
    let output = finish(&mut core, handle);
    assert_eq!(output.choices[0].finish_reason, FinishReason::Length);
    // 32 slots hold 20 + 12 tokens; the 13th token is sampled from the row in the last slot and needs no slot itself.
    assert_eq!(output.choices[0].token_ids.len(), 13);
}

#[test]
fn choices_differ_repeat_and_end_on_their_own() {
    let run = || {
        let rig = roomy();
        let mut core = rig.core(rig.hashed());
        let mut params = SamplingParams::default();
        (params.n, params.seed, params.max_tokens) = (3, Some(7), Some(12));
        let handle = core.submit(Request::tokens(vec![1, 2, 3]).with_sampling(params)).unwrap();
        finish(&mut core, handle)
    };
    let (first, second) = (run(), run());
    assert_eq!(first.choices, second.choices);
    assert_eq!(first.choices.iter().map(|choice| choice.index).collect::<Vec<_>>(), [0, 1, 2]);
    assert_ne!(first.choices[0].token_ids, first.choices[1].token_ids);
    assert_ne!(first.choices[1].token_ids, first.choices[2].token_ids);
}

#[test]
fn unseeded_requests_differ_within_an_engine_and_repeat_across_engines() {
    let run = |engine_seed| {
        let mut rig = roomy();
        rig.config.seed = engine_seed;
        let mut core = rig.core(rig.hashed());
        let mut params = SamplingParams::default();
        params.max_tokens = Some(12);
        let request = Request::tokens(vec![1, 2, 3]).with_sampling(params);
        let handles = [core.submit(request.clone()).unwrap(), core.submit(request).unwrap()];
        drain(&mut core);
        handles.map(|handle| handle.collect_output().unwrap().choices.remove(0).token_ids)
    };
    let [first, second] = run(0);
    assert_ne!(first, second);
    assert_eq!(run(0), [first.clone(), second]);
    assert_ne!(run(1)[0], first);
}

#[test]
fn prompt_logprobs_are_the_same_twice_with_the_prefix_cache_on() {
    let mut rig = Rig::new(VOCAB, 32);
    rig.config.max_num_batched_tokens = 10;
    let mut core = rig.core(rig.hashed());
    let mut params = SamplingParams::greedy();
    (params.max_tokens, params.prompt_logprobs) = (Some(2), Some(3));
    let request = Request::tokens((0..40).collect::<Vec<u32>>()).with_sampling(params.clone());
    let handle = core.submit(request.clone()).unwrap();
    let first = finish(&mut core, handle);
    let handle = core.submit(request).unwrap();
    let second = finish(&mut core, handle);
    let logprobs = first.prompt_logprobs.as_ref().unwrap();
    assert_eq!(logprobs.len(), 39, "expected one entry per token except the first");
    for (at, entry) in (1u32..).zip(logprobs.iter()) {
        assert_eq!((entry.chosen.token, entry.top.len()), (at, 3));
        let mut row = vec![0.0; VOCAB as usize];
        hashed_logits(&(0..at).collect::<Vec<u32>>(), &mut row);
        let total = row.iter().map(|&logit| f64::from(logit).exp()).sum::<f64>().ln();
        let expected = f64::from(row[at as usize]) - total;
        assert!(
            (f64::from(entry.chosen.logprob) - expected).abs() < 1e-5,
            "token {at}: {entry:?}, expected {expected}"
        );
    }
    assert_eq!(second.prompt_logprobs, first.prompt_logprobs);
    assert_eq!((first.usage.cached_tokens, second.usage.cached_tokens), (0, 0));

    params.prompt_logprobs = None;
    let handle = core.submit(Request::tokens((0..40).collect::<Vec<u32>>()).with_sampling(params)).unwrap();
    let third = finish(&mut core, handle);
    assert_eq!(third.usage.cached_tokens, 32, "a plain request must hit the blocks that they left in the cache");
    assert_eq!(third.choices[0].token_ids, first.choices[0].token_ids);
}

#[test]
fn a_salt_of_its_own_shares_nothing() {
    let rig = Rig::new(VOCAB, 32);
    let mut core = rig.core(rig.hashed());
    let mut cached = |salt: &[u8]| {
        let mut params = SamplingParams::greedy();
        params.max_tokens = Some(1);
        let request = Request::tokens(vec![3; 40]).with_sampling(params).with_cache_salt(salt);
        let handle = core.submit(request).unwrap();
        finish(&mut core, handle).usage.cached_tokens
    };
    assert_eq!([cached(b"a"), cached(b"b"), cached(b"a"), cached(b"")], [0, 0, 32, 0]);
}

#[test]
fn bad_logits_end_their_own_request_only() {
    for prompt_logprobs in [None, Some(1)] {
        let rig = Rig::new(VOCAB, 32);
        let model = |history: &[u32], logits: &mut [f32]| {
            hashed_logits(history, logits);
            if history[0] == 9 && history.len() > 4 {
                logits[3] = f32::NAN;
            }
        };
        let mut core = rig.core(ScriptedForward::new(VOCAB, 32, scripted_engine::BLOCK, Box::new(model)));
        let mut params = SamplingParams::default();
        (params.max_tokens, params.seed, params.n) = (Some(6), Some(1), 2);
        let good = core.submit(Request::tokens(vec![1, 2]).with_sampling(params.clone())).unwrap();
        params.prompt_logprobs = prompt_logprobs;
        let bad =
            core.submit(Request::tokens(vec![9; if prompt_logprobs.is_some() { 8 } else { 3 }]).with_sampling(params));
        let bad = bad.unwrap();
        drain(&mut core);
        assert!(good.collect_output().is_ok());
        let items: Vec<_> = bad.into_iter().collect();
        let (last, before) = items.split_last().unwrap();
        assert!(matches!(last, Err(RequestError::NonFinite { position: 4, .. })), "{last:?}");
        assert_eq!(
            before.len(),
            if prompt_logprobs.is_some() { 0 } else { 2 },
            "the updates before the error can still be read"
        );
        assert_eq!(core.stats().finished_error, 2);
    }
}

#[test]
fn the_first_delta_contains_the_prompt() {
    let rig = Rig::new(VOCAB, 32);
    let mut core = rig.core(rig.hashed());
    let mut params = SamplingParams::greedy();
    params.max_tokens = Some(3);
    let mut handle = core.submit(Request::tokens(vec![1; 70]).with_sampling(params)).unwrap();
    core.step().unwrap();
    assert!(handle.try_recv().unwrap().is_none(), "70 rows need two chunks of at most 64");
    rig.clock.advance(std::time::Duration::from_millis(5));
    core.step().unwrap();
    let first = handle.try_recv().unwrap().unwrap();
    let prompt = first.prompt.unwrap();
    assert_eq!((prompt.prompt_tokens, prompt.cached_tokens), (70, 0));
    assert_eq!(prompt.time_to_first_token_us, 5_000);
    core.step().unwrap();
    let second = handle.try_recv().unwrap().unwrap();
    assert_eq!((second.prompt, second.token_ids.len()), (None, 1));
    let output = finish(&mut core, handle);
    assert_eq!(output.choices[0].token_ids.len(), 1, "the output repeats tokens that have already been read");
    assert_eq!(core.stats().time_to_first_token.sum_us(), 5_000);
    assert_eq!(core.stats().generated_tokens, 3);
}

#[test]
fn parts_that_do_not_fit_are_refused() {
    let rig = Rig::new(VOCAB, 8);
    let build = |change: fn(&mut EngineConfig), vocab: u32| {
        let mut config = rig.config.clone();
        change(&mut config);
        let forward = Box::new(ScriptedForward::hashed(vocab, 8, scripted_engine::BLOCK));
        ascend_llm::engine::EngineCore::from_parts(
            config,
            forward,
            rig.model.clone(),
            None,
            None,
            Arc::new(SystemClock::new()),
        )
        .map(|core| core.config().clone())
        .map_err(|error| error.to_string().trim_start_matches("configuration: ").to_owned())
    };
    assert_eq!(build(|_| {}, VOCAB).unwrap().max_model_len, Some(256));
    assert!(build(|_| {}, VOCAB + 1).unwrap_err().contains("rows of 51 logits"));
    assert!(build(|config| config.max_model_len = Some(300), VOCAB).unwrap_err().starts_with("max_model_len: got 300"));
    assert!(build(|config| config.kv_cache = CacheBudget::Auto, VOCAB).unwrap_err().starts_with("kv_cache: got Auto"));
    assert!(
        build(|config| config.kv_cache = CacheBudget::Blocks(u32::MAX), VOCAB)
            .unwrap_err()
            .starts_with("kv_cache.blocks: got 4294967295")
    );
}

#[test]
fn choices_compute_their_prompt_once() {
    for prefix_caching in [false, true] {
        let mut rig = Rig::new(VOCAB, 32);
        rig.config.prefix_caching = prefix_caching;
        let mut core = rig.core(rig.hashed());
        let mut params = SamplingParams::default();
        (params.n, params.seed, params.max_tokens) = (3, Some(7), Some(5));
        let handle = core.submit(Request::tokens(vec![1; 40]).with_sampling(params)).unwrap();
        core.step().unwrap();
        let stats = core.stats();
        assert_eq!((stats.computed_rows, stats.generated_tokens, stats.running), (40, 3, 3));
        assert_eq!(stats.live_blocks, 3, "the choices must share all blocks");
        finish(&mut core, handle);
        assert_eq!(core.stats().computed_rows, 40 + 3 * 4);
    }
}

#[test]
fn choices_go_on_when_the_first_of_them_ends_at_once() {
    let mut rig = Rig::new(2, 32);
    rig.model.eos_ids = vec![1];
    // Each token ends a choice with a probability of one half: over several seeds, all patterns of three choices occur.
    let model = || {
        ScriptedForward::new(2, 32, scripted_engine::BLOCK, Box::new(|_: &[u32], logits: &mut [f32]| logits.fill(0.0)))
    };
    let mut patterns = std::collections::BTreeSet::new();
    for seed in 0..64 {
        let mut core = rig.core(model());
        let mut params = SamplingParams::default();
        (params.n, params.seed, params.max_tokens) = (3, Some(seed), Some(4));
        let handle = core.submit(Request::tokens(vec![0; 20]).with_sampling(params)).unwrap();
        let output = finish(&mut core, handle);
        patterns.insert(output.choices.iter().map(|choice| choice.token_ids.is_empty()).collect::<Vec<_>>());
        assert_eq!(core.stats().finished_stop + core.stats().finished_length, 3);
    }
    assert_eq!(patterns.len(), 8, "{patterns:?}");
}

#[test]
fn a_step_with_many_logit_rows_is_split_and_computes_each_row_once() {
    let mut rig = Rig::new(VOCAB, 32);
    rig.model.max_logit_rows = 7;
    let rows = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let seen = Arc::clone(&rows);
    let mut core = rig.core(rig.hashed().watched(Box::new(move |input| {
        assert!(input.logit_rows.len() <= 7, "{input:?}");
        seen.fetch_add(input.tokens.len(), std::sync::atomic::Ordering::Relaxed);
        Ok(())
    })));
    let mut params = SamplingParams::greedy();
    params.max_tokens = Some(3);
    let plain = core.submit(Request::tokens(vec![2; 10]).with_sampling(params.clone())).unwrap();
    params.prompt_logprobs = Some(1);
    let handle = core.submit(Request::tokens(vec![1; 100]).with_sampling(params)).unwrap();
    let output = finish(&mut core, handle);
    assert_eq!(output.prompt_logprobs.map(|logprobs| logprobs.len()), Some(99));
    assert_eq!(plain.collect_output().unwrap().choices[0].token_ids.len(), 3);
    assert_eq!(rows.load(std::sync::atomic::Ordering::Relaxed), 10 + 100 + 2 * 2);
    assert_eq!(core.stats().computed_rows, 10 + 100 + 2 * 2);
}

#[test]
fn preempted_requests_give_the_same() {
    let script = |seed: u32, n| {
        let mut params = SamplingParams::default();
        (params.n, params.seed, params.max_tokens) = (n, Some(u64::from(seed)), Some(40));
        Script { prompt: vec![seed; 30], params, submit_at: 0, leaves_after: None, cancels: false }
    };
    let scripts: Vec<Script> = (1..6).map(|seed| script(seed, 1 + seed % 3)).collect();
    let mut rig = Rig::new(VOCAB, 9);
    rig.model.eos_ids = vec![7];
    let mut core = rig.core(rig.hashed());
    let handles: Vec<_> = scripts.iter().map(|script| core.submit(request(script)).unwrap()).collect();
    drain(&mut core);
    assert!(core.stats().preemptions > 3, "{:?}", core.stats());
    for (script, handle) in scripts.iter().zip(handles) {
        assert_eq!(handle.collect_output().unwrap().choices, alone(script).choices);
    }
}
