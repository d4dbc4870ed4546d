//! Engines on one or more simulated cards, and tests of their steps that apply to any number of cards.

#![allow(dead_code)] // each test binary uses only a part
#![allow(clippy::cast_possible_truncation, reason = "the numbers of a test are small")]

use std::path::Path;
use std::sync::Arc;

use ascend_llm::device::Device;
use ascend_llm::engine::{CacheBudget, Engine, EngineConfig, EngineCore, Output, Request, RequestError};
use ascend_llm::sampler::SamplingParams;

use crate::common::fable::{self, Seen};
use crate::common::sim_npu::Npu;

/// Number of layers of the story model.
pub const LAYERS: u64 = 3;

/// A prompt, and the sampling parameters of its request.
pub type Asked = (Vec<u32>, SamplingParams);

/// Returns a simulated machine with `cards` cards, on which joining a communicator fails fast.
pub fn machine(cards: u32) -> Npu {
    let npu = Npu::new();
    set_up(&npu, cards);
    npu
}

fn set_up(npu: &Npu, cards: u32) {
    npu.sim.set("devices", cards.into());
    npu.sim.set("join_limit_ms", 300);
}

pub fn config(cards: u32, depth: u32) -> EngineConfig {
    let mut config = fable::plain_config();
    (config.max_num_batched_tokens, config.max_num_seqs) = (32, 4);
    config.kv_cache = CacheBudget::Blocks(12);
    (config.tensor_parallel_size, config.pipeline_depth) = (cards, Some(depth));
    config
}

pub fn core_on(device: Arc<dyn Device>, config: EngineConfig) -> EngineCore {
    Engine::builder(fable::float()).config(config).device(device).build_core().expect("the model builds")
}

pub fn greedy(tokens: u32) -> SamplingParams {
    let mut params = SamplingParams::default();
    (params.temperature, params.max_tokens, params.ignore_eos) = (0.0, Some(tokens), true);
    params
}

/// Runs requests in one batch; returns the outcome of each.
pub fn outcomes(core: &mut EngineCore, requests: &[Asked]) -> Vec<Result<Output, RequestError>> {
    let handles: Vec<_> = requests
        .iter()
        .map(|(prompt, params)| core.submit(Request::tokens(prompt.clone()).with_sampling(params.clone())).unwrap())
        .collect();
    while !core.is_idle() && core.step().is_ok() {}
    handles.into_iter().map(ascend_llm::engine::RequestHandle::collect_output).collect()
}

pub fn seen(core: &mut EngineCore, requests: &[Asked]) -> Vec<Seen> {
    outcomes(core, requests).into_iter().map(|outcome| Seen::of(&outcome.unwrap())).collect()
}

/// Runs 64 mixed requests at depths 1, 2 and 3, in a pool that is too small for them.
pub fn outputs_are_equal_at_every_depth(cards: u32, seed: u64) {
    let npu = machine(cards);
    npu.sim.set("cann", 90_100_000);
    let mut author = fable::Author::new(seed);
    let requests: Vec<Asked> = (0..64)
        .map(|index| {
            let len = author.dice().from(1, 60);
            let prompt = author.prompt(len);
            // The device can copy the deferred tokens of every other request.
            (prompt, if index % 2 == 0 { greedy(1 + index % 24) } else { author.params(24) })
        })
        .collect();
    let run = |depth| {
        let mut config = config(cards, depth);
        (config.block_size, config.kv_cache) = (Some(16), CacheBudget::Blocks(40));
        (config.max_num_batched_tokens, config.max_num_seqs) = (64, 16);
        let mut core = core_on(npu.cards(cards), config);
        let seen = seen(&mut core, &requests);
        assert!(core.stats().preemptions > 0, "depth {depth}: the pool must be small enough to cause preemptions");
        core.check().unwrap();
        drop(core);
        npu.assert_clean();
        seen
    };
    let one = run(1);
    assert!(run(2) == one, "depth 2");
    assert!(run(3) == one, "depth 3");
}

/// Streams run their work late, in any order that the events allow.
///
/// A missing event, a buffer reused too early, or data that one card sends to the others too early changes the tokens.
pub fn no_delay_changes_an_output(cards: u32, seeds: i64) {
    let npu = machine(cards);
    let requests = [
        (vec![1, 40, 100, 7], greedy(5)),
        (vec![1, 9], greedy(3)),
        (vec![1, 300, 21, 5, 8, 13], {
            let mut params = greedy(4);
            (params.temperature, params.seed) = (0.8, Some(3));
            params
        }),
    ];
    let mut calm = core_on(npu.cards(cards), config(cards, 1));
    let expected = seen(&mut calm, &requests);
    drop(calm);
    for depth in [2, 3] {
        let mut core = core_on(npu.cards(cards), config(cards, depth));
        npu.sim.set("delay_us", 30);
        for seed in 1..=seeds {
            npu.sim.set("seed", seed);
            assert!(seen(&mut core, &requests) == expected, "depth {depth}, seed {seed}");
        }
        npu.sim.set("delay_us", 0);
        drop(core);
        npu.assert_clean();
    }
}

/// Two in-flight steps, all rows greedy. Between two launches, each card only gets copies of ids, tables and lengths,
/// one task update per layer, and the wait for the results of the step before.
pub fn greedy_steps_in_flight_only_queue(cards: u32) {
    let npu = machine(cards);
    let mut core = core_on(npu.cards(cards), config(cards, 2));
    let request = Request::tokens(vec![1, 40, 100, 7]).with_sampling(greedy(40));
    let handle = core.submit(request).unwrap();
    for _ in 0..8 {
        core.step().unwrap();
    }
    npu.sim.set("log", 1);
    npu.sim.clear_log();
    const STEPS: u64 = 20;
    let cards = u64::from(cards);
    for _ in 0..STEPS {
        core.step().unwrap();
    }
    // After this wait, the thread of each card has issued all its work.
    let log = npu.sim.log();
    let lines = |name: &str| log.iter().filter(|line| line.split_whitespace().next() == Some(name)).collect::<Vec<_>>();
    let count = |name: &str| lines(name).len() as u64;
    let launches = count("aclmdlRIExecuteAsync");
    assert!(
        launches.abs_diff(cards * STEPS) <= cards,
        "{launches} launches in {STEPS} steps, expected one per card and step"
    );
    let updates = count("aclmdlRICaptureTaskUpdateBegin");
    assert!(
        updates.abs_diff(cards * STEPS * LAYERS) <= cards * LAYERS,
        "{updates} updates, expected one per layer and step"
    );
    for forbidden in [
        "aclrtMalloc",
        "aclrtMallocHost",
        "aclrtFree",
        "aclrtFreeHost",
        "aclrtMemcpy",
        "aclrtMemset",
        "aclrtSynchronizeDevice",
        "aclrtCreateEventExWithFlag",
        "HcclAllReduce",
        "HcclAllGather",
    ] {
        assert_eq!(count(forbidden), 0, "{forbidden}");
    }
    // Data copied to the card in a step of one row: its id, position, requested logit row, a row of the block table,
    // the slot of its key, and the index of the deferred token. Logits are not copied back.
    let bytes = |kind: &str| -> u64 {
        let fields = log.iter().map(|line| line.split_whitespace().collect::<Vec<_>>());
        fields
            .filter(|fields| fields[0].starts_with("aclrtMemcpyAsync") && fields[1] == kind)
            .map(|fields| fields[2].parse::<u64>().unwrap())
            .sum()
    };
    let (up, down) = (bytes("h2d") / STEPS / cards, bytes("d2h") / STEPS);
    assert!(up > 0 && up <= 256, "{up} bytes per step are copied to the card: {log:#?}");
    assert!(down > 0 && down <= 64, "{down} bytes per step are copied back");
    npu.sim.set("log", 0);
    drop(handle);
    drop(core);
    npu.assert_clean();
}

/// Fails every `stride`-th call of a short run in turn. Each run builds a new engine, on a machine in a clean state.
pub fn failing_calls_are_typed_errors_or_leave_the_answer(cards: u32, stride: usize) {
    let npu = machine(cards);
    let requests = [(vec![1, 40], greedy(2)), (vec![9], greedy(2))];
    let run = || -> Result<Vec<Result<Output, RequestError>>, String> {
        let all = (0..cards).collect();
        let device = npu.try_device(|options| (options.cards, options.timeout_us) = (all, 5_000_000));
        let device = device.map_err(|error| error.to_string())?;
        let mut config = config(cards, 2);
        (config.max_num_batched_tokens, config.max_num_seqs, config.max_model_len) = (2, 2, Some(64));
        // One program, so that loading needs few calls.
        config.compile.token_buckets = Some(vec![2]);
        // A small model, because each run uploads it again.
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/conformance/llama-gqa-tied");
        let builder = Engine::builder(model).config(config).device(device);
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
    for (round, nth) in (1..=calls).step_by(stride).enumerate() {
        npu.sim.reset();
        set_up(&npu, cards);
        let code = [207_001, 507_015, 161_002][round % 3];
        npu.sim.fail_call("*", nth, code);
        let outcomes = run().unwrap_or_else(|message| {
            assert!(!message.is_empty());
            failed += 1;
            Vec::new()
        });
        for (outcome, right) in outcomes.into_iter().zip(&right) {
            match outcome {
                Ok(output) => {
                    assert_eq!(Seen::of(&output), *right, "call {nth} of {calls} failed with {code}");
                    answered += 1;
                }
                Err(RequestError::Engine(_)) => failed += 1,
                Err(error) => panic!("call {nth}, code {code}: {error:?}"),
            }
        }
        npu.assert_clean();
    }
    println!("{calls} calls, each {stride}th failed: {failed} failures, {answered} right answers");
    assert!(failed > calls as usize / stride / 30, "only {failed} calls failed");
}
