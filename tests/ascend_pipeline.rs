//! Steps in flight on the simulated Ascend card: outputs are equal at every depth and under any delay, a greedy step only
//! queues, and whatever call fails ends in a typed error or the right answer.

#![cfg(feature = "ascend")]
#![allow(clippy::cast_possible_truncation, reason = "the numbers of a test are small")]

mod npu;
mod story;

use std::sync::Arc;

use ascend_llm::device::Device;
use ascend_llm::engine::{CacheBudget, Engine, EngineConfig, EngineCore, Output, Request, RequestError};
use ascend_llm::sampler::SamplingParams;
use npu::Npu;
use story::Seen;

/// Layers of the story model.
const LAYERS: u64 = 3;

fn config(depth: u32) -> EngineConfig {
    let mut config = story::plain_config();
    (config.max_num_batched_tokens, config.max_num_seqs) = (32, 4);
    config.kv_cache = CacheBudget::Blocks(12);
    config.pipeline_depth = Some(depth);
    config
}

fn core_on(device: Arc<dyn Device>, config: EngineConfig) -> EngineCore {
    Engine::builder(story::float()).config(config).device(device).build_core().expect("the model builds")
}

fn greedy(tokens: u32) -> SamplingParams {
    let mut params = SamplingParams::default();
    (params.temperature, params.max_tokens, params.ignore_eos) = (0.0, Some(tokens), true);
    params
}

/// Runs requests together; what each gives.
fn outcomes(core: &mut EngineCore, requests: &[(Vec<u32>, SamplingParams)]) -> Vec<Result<Output, RequestError>> {
    let handles: Vec<_> = requests
        .iter()
        .map(|(prompt, params)| core.submit(Request::tokens(prompt.clone()).sampling(params.clone())).unwrap())
        .collect();
    while !core.is_idle() && core.step().is_ok() {}
    handles.into_iter().map(ascend_llm::engine::RequestHandle::collect_output).collect()
}

fn seen(core: &mut EngineCore, requests: &[(Vec<u32>, SamplingParams)]) -> Vec<Seen> {
    outcomes(core, requests).into_iter().map(|outcome| Seen::of(&outcome.unwrap())).collect()
}

#[test]
fn outputs_are_equal_at_every_depth() {
    let npu = Npu::with(&[("cann", 90_100_000)]);
    let mut author = story::Author::new(11);
    let requests: Vec<(Vec<u32>, SamplingParams)> = (0..64)
        .map(|index| {
            let len = author.dice().from(1, 60);
            let prompt = author.prompt(len);
            // Every other request can be fed on the device.
            (prompt, if index % 2 == 0 { greedy(1 + index % 24) } else { author.params(24) })
        })
        .collect();
    let run = |depth| {
        let mut config = config(depth);
        (config.block_size, config.kv_cache) = (Some(16), CacheBudget::Blocks(40));
        (config.max_num_batched_tokens, config.max_num_seqs) = (64, 16);
        let mut core = core_on(npu.device(), config);
        let seen = seen(&mut core, &requests);
        assert!(core.stats().preemptions > 0, "depth {depth}: the pool is small enough");
        core.check().unwrap();
        drop(core);
        npu.assert_clean();
        seen
    };
    let one = run(1);
    assert!(run(2) == one, "depth 2");
    assert!(run(3) == one, "depth 3");
}

/// Streams run their work late and in any order that events allow: a missing event or a buffer that is used again too early
/// shows as other tokens.
#[test]
fn no_delay_of_a_stream_changes_an_output() {
    let npu = Npu::new();
    let requests = [
        (vec![1, 40, 100, 7], greedy(5)),
        (vec![1, 9], greedy(3)),
        (vec![1, 300, 21, 5, 8, 13], {
            let mut params = greedy(4);
            (params.temperature, params.seed) = (0.8, Some(3));
            params
        }),
    ];
    let mut calm = core_on(npu.device(), config(1));
    let expected = seen(&mut calm, &requests);
    drop(calm);
    for depth in [2, 3] {
        let mut core = core_on(npu.device(), config(depth));
        npu.sim.set("delay_us", 30);
        for seed in 1..=100 {
            npu.sim.set("seed", seed);
            assert!(seen(&mut core, &requests) == expected, "depth {depth}, seed {seed}");
        }
        npu.sim.set("delay_us", 0);
        drop(core);
        npu.assert_clean();
    }
}

/// Two steps in flight, all rows greedy: between two launches there is nothing but copies of ids, tables and lengths, one task
/// update a layer, and the wait for the results of the step before.
#[test]
fn greedy_steps_in_flight_only_queue() {
    let npu = Npu::new();
    let mut core = core_on(npu.device(), config(2));
    let request = Request::tokens(vec![1, 40, 100, 7]).sampling(greedy(40));
    let handle = core.submit(request).unwrap();
    for _ in 0..8 {
        core.step().unwrap();
    }
    npu.sim.set("log", 1);
    npu.sim.clear_log();
    const STEPS: u64 = 20;
    for _ in 0..STEPS {
        core.step().unwrap();
    }
    // The card's thread has issued what was asked of it once this one has been waited for.
    let log = npu.sim.log();
    let lines = |name: &str| log.iter().filter(|line| line.split_whitespace().next() == Some(name)).collect::<Vec<_>>();
    let count = |name: &str| lines(name).len() as u64;
    let launches = count("aclmdlRIExecuteAsync");
    assert!(launches.abs_diff(STEPS) <= 1, "{launches} launches in {STEPS} steps");
    assert!(count("aclmdlRICaptureTaskUpdateBegin").abs_diff(STEPS * LAYERS) <= LAYERS, "one update a layer and step");
    for forbidden in [
        "aclrtMalloc",
        "aclrtMallocHost",
        "aclrtFree",
        "aclrtFreeHost",
        "aclrtMemcpy",
        "aclrtMemset",
        "aclrtSynchronizeDevice",
        "aclrtCreateEventExWithFlag",
    ] {
        assert_eq!(count(forbidden), 0, "{forbidden}");
    }
    // What crosses to the card in a step of one row: its id, position, wanted row, a line of the table, where its key goes, and
    // which row is fed; logits do not come back.
    let bytes = |kind: &str| -> u64 {
        let fields = log.iter().map(|line| line.split_whitespace().collect::<Vec<_>>());
        fields
            .filter(|fields| fields[0].starts_with("aclrtMemcpyAsync") && fields[1] == kind)
            .map(|fields| fields[2].parse::<u64>().unwrap())
            .sum()
    };
    let (up, down) = (bytes("h2d") / STEPS, bytes("d2h") / STEPS);
    assert!(up > 0 && up <= 256, "{up} bytes a step to the card: {log:#?}");
    assert!(down > 0 && down <= 64, "{down} bytes a step back");
    npu.sim.set("log", 0);
    drop(handle);
    drop(core);
    npu.assert_clean();
}

/// Resident memory of this process in KiB.
#[cfg(target_os = "linux")]
fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Steps of `requests` requests of 50 tokens each, one after the other, without arithmetic: what is left is the engine, the
/// device and the runtime's bookkeeping.
#[cfg(target_os = "linux")]
fn memory_grown_kib(requests: u32) -> u64 {
    let npu = Npu::with(&[("compute", 0)]);
    let mut core = core_on(npu.device(), config(2));
    let mut run = |requests: u32| {
        for request in 0..requests {
            let handle = core.submit(Request::tokens(vec![1, 2 + request % 700]).sampling(greedy(50))).unwrap();
            while !core.is_idle() {
                core.step().unwrap();
            }
            drop(handle);
        }
    };
    run(requests / 10);
    let before = resident_kib();
    run(requests);
    let grown = resident_kib().saturating_sub(before);
    drop(core);
    npu.assert_clean();
    grown
}

#[cfg(target_os = "linux")]
#[test]
fn host_memory_stays_flat() {
    let grown = memory_grown_kib(60);
    assert!(grown < 4096, "{grown} KiB more after 3,000 steps");
}

/// The same at length; takes minutes.
#[cfg(target_os = "linux")]
#[test]
#[ignore = "minutes"]
fn host_memory_stays_flat_over_100_000_steps() {
    let grown = memory_grown_kib(2_000);
    println!("{grown} KiB more after 100,000 steps");
    assert!(grown < 4096, "{grown} KiB");
}

/// Fails each call of a short run in turn. The engine is made anew each time, on a machine that was left clean.
#[test]
fn each_failing_call_is_a_typed_error_or_leaves_the_answer() {
    let npu = Npu::new();
    let requests = [(vec![1, 40], greedy(2)), (vec![9], greedy(2))];
    let run = || -> Result<Vec<Result<Output, RequestError>>, String> {
        let device = npu.try_device(|options| options.timeout_us = 2_000_000).map_err(|error| error.to_string())?;
        let mut config = config(2);
        (config.max_num_batched_tokens, config.max_num_seqs, config.max_model_len) = (2, 2, Some(64));
        // One program, so that loading takes few calls.
        config.compile.token_buckets = Some(vec![2]);
        let builder = Engine::builder(story::float()).config(config).device(device);
        let mut core = builder.build_core().map_err(|error| error.to_string())?;
        let outcomes = outcomes(&mut core, &requests);
        core.check()?;
        Ok(outcomes)
    };
    let before = npu.sim.count("*");
    let right: Vec<Seen> = run().unwrap().into_iter().map(|outcome| Seen::of(&outcome.unwrap())).collect();
    let calls = npu.sim.count("*") - before;
    npu.assert_clean();
    let (mut failed, mut answered) = (0, 0);
    for nth in 1..=calls {
        npu.sim.reset();
        let code = [207_001, 507_015, 161_002][nth as usize % 3];
        npu.sim.fail_call("*", nth, code);
        match run() {
            Err(message) => {
                assert!(!message.is_empty());
                failed += 1;
            }
            Ok(outcomes) => {
                for (outcome, right) in outcomes.into_iter().zip(&right) {
                    match outcome {
                        Ok(output) => {
                            assert_eq!(Seen::of(&output), *right, "call {nth} of {calls} failed with {code}");
                            answered += 1;
                        }
                        Err(error) => {
                            assert!(matches!(error, RequestError::Engine(_)), "call {nth}, code {code}: {error:?}");
                            failed += 1;
                        }
                    }
                }
            }
        }
        npu.assert_clean();
    }
    println!("{calls} calls: {failed} failures, {answered} right answers");
    assert!(failed > 100, "{failed} of {calls} calls");
}
