//! Tests in-flight steps on a device: real models and real kernels, on the CPU device and on one that defers all work.
//!
//! Outputs are bit-equal, the host does not wait between launches, and buffers outlive the queued work that uses them.
#![allow(clippy::cast_possible_truncation, reason = "the numbers of a test are small")]
#![cfg(feature = "text")]

use crate::common::fable;
use std::path::Path;
use std::sync::Arc;

use crate::common::deferred_device::DeferredDevice;
use crate::common::fable::{Author, Seen, assert_at_rest, builder, drain, float, plain_config, quantized};
use ascend_llm::device::Device;
use ascend_llm::engine::{CacheBudget, EngineConfig, EngineCore, Request, RequestError, RequestHandle, Stats};
use ascend_llm::graph::Numerics;
use ascend_llm::sampler::SamplingParams;

/// A request, its submission step, and the step in which its caller cancels it.
#[derive(Clone, Debug)]
struct Script {
    request: Request,
    submit_at: u32,
    cancels_at: Option<u32>,
}

fn scripts(seed: u64, count: usize) -> Vec<Script> {
    let mut author = Author::new(seed);
    let script = |_| {
        let most = author.dice().one_of(&[20, 60, 150]);
        let len = author.dice().from(1, most);
        let prompt = author.prompt(len);
        // Half of the requests are plain greedy ones, so that they are scheduled ahead.
        let mut params = author.params(30);
        if author.dice().chance(50) {
            let (max_tokens, ignore_eos) = (params.max_tokens, params.ignore_eos);
            let (stop, stop_token_ids) = (params.stop, params.stop_token_ids);
            params = SamplingParams::greedy();
            (params.max_tokens, params.ignore_eos) = (max_tokens, ignore_eos);
            (params.stop, params.stop_token_ids) = (stop, stop_token_ids);
        }
        let dice = author.dice();
        let submit_at = dice.from(0, 40);
        let cancels_at = dice.chance(15).then(|| submit_at + dice.from(0, 30));
        Script { request: Request::tokens(prompt).with_sampling(params), submit_at, cancels_at }
    };
    (0..count).map(script).collect()
}

fn run(core: &mut EngineCore, scripts: &[Script]) -> (Vec<Seen>, Stats) {
    let mut handles: Vec<Option<RequestHandle>> = scripts.iter().map(|_| None).collect();
    for step in 0..80 {
        for (script, handle) in scripts.iter().zip(&mut handles) {
            if script.submit_at == step {
                *handle = Some(core.submit(script.request.clone()).unwrap());
            }
            if script.cancels_at == Some(step) {
                handle.as_ref().unwrap().cancel();
            }
        }
        core.step().unwrap();
        core.check().unwrap();
    }
    drain(core);
    let seen = handles.into_iter().flatten().map(|handle| Seen::of(&handle.collect_output().unwrap()));
    (seen.collect(), core.stats())
}

fn crowded(numerics: Numerics) -> EngineConfig {
    let mut config = plain_config();
    (config.numerics, config.prefix_caching) = (numerics, true);
    (config.max_num_batched_tokens, config.max_num_seqs) = (48, 6);
    config.kv_cache = CacheBudget::Blocks(16);
    config
}

/// Runs the same scripts at each depth, on the CPU device and on the deferred device, and compares with the simplest
/// engine.
fn depth_does_not_change_outputs(model: &Path, config: &EngineConfig, seed: u64) -> Stats {
    let scripts = scripts(seed, 24);
    let at = |depth: u32, device: Option<Arc<dyn Device>>| {
        let mut config = config.clone();
        config.pipeline_depth = Some(depth);
        let mut builder = builder(model, config);
        if let Some(device) = device {
            builder = builder.device(device);
        }
        run(&mut builder.build_core().unwrap(), &scripts)
    };
    let (expected, plain) = at(1, None);
    assert_eq!(plain.wasted_rows, 0);
    let mut last = plain;
    for depth in 1..=3 {
        for late in [false, true] {
            let device = late.then(DeferredDevice::new);
            let (seen, stats) = at(depth, device.clone().map(|device| device as Arc<dyn Device>));
            for (index, (seen, expected)) in seen.iter().zip(&expected).enumerate() {
                let label = format!("seed {seed}, depth {depth}, late {late}, request {index}: {:?}", scripts[index]);
                if scripts[index].cancels_at.is_none() {
                    assert!(seen == expected, "{label}: {seen:#?}\nexpected {expected:#?}");
                } else {
                    assert!(expected.begins_with(seen) || seen.begins_with(expected) || seen == expected, "{label}");
                }
            }
            assert!(stats.wasted_rows <= u64::from(depth - 1) * (stats.finished_stop + 48 * stats.finished_cancelled));
            if let Some(device) = device {
                assert!(device.is_drained(), "dropping the engine must wait for its in-flight work");
                assert_eq!(
                    device.most_launched(),
                    u64::from(depth),
                    "the number of queued launches differs from the depth"
                );
            }
            last = stats;
        }
    }
    last
}

#[test]
fn depth_does_not_change_outputs_with_float_weights() {
    let stats = depth_does_not_change_outputs(&float(), &crowded(Numerics::Exact), 31);
    assert!(stats.preemptions > 0 && stats.prefix_hits > 0 && stats.wasted_rows > 0, "{stats:?}");
}

#[test]
fn depth_does_not_change_outputs_with_integer_weights() {
    let stats = depth_does_not_change_outputs(&quantized(), &crowded(Numerics::Fast), 32);
    assert!(stats.preemptions > 0 && stats.prefix_hits > 0 && stats.wasted_rows > 0, "{stats:?}");
}

/// Two ranks on one CPU device; their collectives are in the same queue.
#[test]
fn depth_does_not_change_outputs_of_ranks() {
    let mut config = crowded(Numerics::Fast);
    config.tensor_parallel_size = 2;
    let stats = depth_does_not_change_outputs(&quantized(), &config, 33);
    assert!(stats.preemptions > 0 && stats.wasted_rows > 0, "{stats:?}");
}

/// If a row has no argmax although its status is good, its request ends with its own error at any depth.
///
/// The outputs of the other requests are those of batches of their own.
#[test]
fn a_row_without_a_largest_logit_ends_its_own_request() {
    let prompts = [vec![7; 20], vec![9, 8, 300], (3..30).collect::<Vec<u32>>()];
    let config = |depth| {
        let mut config = plain_config();
        config.pipeline_depth = Some(depth);
        config
    };
    let request = |prompt: &Vec<u32>| Request::tokens(prompt.clone()).with_sampling(greedy(12));
    let alone: Vec<Seen> =
        prompts.iter().map(|prompt| fable::alone(&quantized(), &config(1), request(prompt))).collect();
    for depth in 1..=3 {
        for launch in 1..=6 {
            for row in 0..prompts.len() as u64 {
                let device = DeferredDevice::new();
                let builder = builder(&quantized(), config(depth)).device(device.clone());
                let mut core = builder.build_core().unwrap();
                device.corrupt(launch, row);
                let handles: Vec<_> = prompts.iter().map(|prompt| core.submit(request(prompt)).unwrap()).collect();
                drain(&mut core);
                let label = format!("depth {depth}, launch {launch}, row {row}");
                assert!(!device.will_corrupt(), "{label}");
                let mut failed = 0;
                for (handle, alone) in handles.into_iter().zip(&alone) {
                    match handle.collect_output() {
                        Ok(output) => assert_eq!(Seen::of(&output), *alone, "{label}"),
                        Err(error) => {
                            assert!(matches!(error, RequestError::NonFinite { choice: 0, .. }), "{label}: {error:?}");
                            failed += 1;
                        }
                    }
                }
                assert_eq!(failed, 1, "{label}");
            }
        }
    }
}

fn greedy(max_tokens: u32) -> SamplingParams {
    let mut params = SamplingParams::greedy();
    (params.max_tokens, params.ignore_eos) = (Some(max_tokens), true);
    params
}

#[test]
fn the_host_waits_for_one_step_a_step() {
    let device = DeferredDevice::new();
    let mut config = plain_config();
    config.pipeline_depth = None;
    let mut core = builder(&quantized(), config).device(device.clone()).build_core().unwrap();
    assert_eq!(core.config().pipeline_depth, Some(2), "the depth must be the device's default");
    let _handles = [7, 8].map(|id| core.submit(Request::tokens(vec![id; 20]).with_sampling(greedy(40))).unwrap());
    for _ in 0..5 {
        core.step().unwrap();
    }
    for _ in 0..10 {
        let before = device.host_waits();
        core.step().unwrap();
        // The status and the sampled tokens; the logits are not read, because no request needs them.
        assert_eq!(device.host_waits() - before, 2);
    }
}

#[test]
fn dropping_an_engine_waits_for_what_is_in_flight() {
    for steps in 0..4 {
        let device = DeferredDevice::new();
        let mut config = plain_config();
        config.pipeline_depth = Some(3);
        let mut core = builder(&quantized(), config).device(device.clone()).build_core().unwrap();
        let handle = core.submit(Request::tokens(vec![7; 20]).with_sampling(greedy(40))).unwrap();
        for _ in 0..steps {
            core.step().unwrap();
        }
        // The device panics if a buffer is freed while queued work uses it.
        drop(core);
        assert!(device.is_drained());
        assert!(matches!(handle.into_iter().last(), Some(Err(RequestError::Closed))));
    }
}

/// A fault at any call of a short run yields either a typed error, once for each open handle, or the correct output.
#[test]
fn a_fault_at_any_call_is_reported() {
    let requests = || {
        let mut sampled = SamplingParams::default();
        (sampled.max_tokens, sampled.seed, sampled.n) = (Some(5), Some(3), 2);
        [Request::tokens(vec![7; 20]).with_sampling(greedy(6)), Request::tokens(vec![9; 40]).with_sampling(sampled)]
    };
    for depth in 1..=3 {
        let device = DeferredDevice::new();
        let mut config = crowded(Numerics::Fast);
        config.pipeline_depth = Some(depth);
        let build = || builder(&quantized(), config.clone()).device(device.clone()).build_core().unwrap();
        let run = |fails_at: u64| {
            let mut core = build();
            device.fail_at(fails_at);
            let handles = requests().map(|request| core.submit(request).unwrap());
            let mut failed = None;
            for _ in 0..100 {
                match core.step() {
                    Ok(_) if core.is_idle() => break,
                    Ok(_) => {}
                    Err(error) => {
                        failed = Some(error);
                        break;
                    }
                }
            }
            assert!(core.is_idle(), "call {fails_at}: the engine hangs");
            let calls = device.calls();
            device.fail_at(0);
            if failed.is_none() {
                assert_at_rest(&core);
            }
            drop(core);
            assert!(device.is_drained(), "call {fails_at}");
            (handles.map(|handle| handle.collect_output().map(|output| Seen::of(&output))), failed, calls)
        };
        let (expected, none, calls) = run(0);
        assert!(none.is_none());
        for call in 1..=calls {
            let (seen, failed, _) = run(call);
            for (seen, expected) in seen.into_iter().zip(&expected) {
                match (seen, &failed) {
                    (Ok(seen), _) => assert_eq!(&seen, expected.as_ref().unwrap(), "depth {depth}, call {call}"),
                    (Err(RequestError::Engine(heard)), Some(failed)) => assert_eq!(heard, *failed),
                    (Err(error), failed) => panic!("depth {depth}, call {call}: {error:?}, engine {failed:?}"),
                }
            }
        }
    }
}
