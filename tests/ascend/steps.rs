//! Engines on one or more simulated cards, and what must hold of their steps however many cards there are.

#![allow(dead_code)] // each test file uses a part
#![allow(clippy::cast_possible_truncation, reason = "the numbers of a test are small")]

use std::path::Path;
use std::sync::Arc;

use ascend_llm::device::Device;
use ascend_llm::engine::{CacheBudget, Engine, EngineConfig, EngineCore, Output, Request, RequestError};
use ascend_llm::sampler::SamplingParams;

use crate::common::fable::{self, Seen};
use crate::common::sim_npu::Npu;

/// Layers of the story model.
pub const LAYERS: u64 = 3;

/// A prompt, and how its answer is drawn.
pub type Asked = (Vec<u32>, SamplingParams);

/// A machine of so many cards that join quickly or not at all.
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

/// Runs requests together; what each gives.
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

/// 64 mixed requests in a pool too small for them, at depths 1, 2 and 3.
pub fn outputs_are_equal_at_every_depth(cards: u32, seed: u64) {
    let npu = machine(cards);
    npu.sim.set("cann", 90_100_000);
    let mut author = fable::Author::new(seed);
    let requests: Vec<Asked> = (0..64)
        .map(|index| {
            let len = author.dice().from(1, 60);
            let prompt = author.prompt(len);
            // Every other request can be fed on the device.
            (prompt, if index % 2 == 0 { greedy(1 + index % 24) } else { author.params(24) })
        })
        .collect();
    let run = |depth| {
        let mut config = config(cards, depth);
        (config.block_size, config.kv_cache) = (Some(16), CacheBudget::Blocks(40));
        (config.max_num_batched_tokens, config.max_num_seqs) = (64, 16);
        let mut core = core_on(npu.cards(cards), config);
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

/// Streams run their work late and in any order that events allow: a missing event, a buffer that is used again too early, or
/// what a card brings to the others too soon shows as other tokens.
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

/// Two steps in flight, all rows greedy: on each card, between two launches there is nothing but copies of ids, tables and lengths, one task
/// update a layer, and the wait for the results of the step before.
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
    // Each card's thread has issued what was asked of it once this one has been waited for.
    let log = npu.sim.log();
    let lines = |name: &str| log.iter().filter(|line| line.split_whitespace().next() == Some(name)).collect::<Vec<_>>();
    let count = |name: &str| lines(name).len() as u64;
    let launches = count("aclmdlRIExecuteAsync");
    assert!(launches.abs_diff(cards * STEPS) <= cards, "{launches} launches in {STEPS} steps");
    let updates = count("aclmdlRICaptureTaskUpdateBegin");
    assert!(updates.abs_diff(cards * STEPS * LAYERS) <= cards * LAYERS, "{updates} updates, not one a layer and step");
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
    // What crosses to the card in a step of one row: its id, position, wanted row, a line of the table, where its key goes, and
    // which row is fed; logits do not come back.
    let bytes = |kind: &str| -> u64 {
        let fields = log.iter().map(|line| line.split_whitespace().collect::<Vec<_>>());
        fields
            .filter(|fields| fields[0].starts_with("aclrtMemcpyAsync") && fields[1] == kind)
            .map(|fields| fields[2].parse::<u64>().unwrap())
            .sum()
    };
    let (up, down) = (bytes("h2d") / STEPS / cards, bytes("d2h") / STEPS);
    assert!(up > 0 && up <= 256, "{up} bytes a step to the card: {log:#?}");
    assert!(down > 0 && down <= 64, "{down} bytes a step back");
    npu.sim.set("log", 0);
    drop(handle);
    drop(core);
    npu.assert_clean();
}

/// Fails every `stride`-th call of a short run in turn. The engine is made anew each time, on a machine that was left clean.
pub fn failing_calls_are_typed_errors_or_leave_the_answer(cards: u32, stride: usize) {
    let npu = machine(cards);
    let requests = [(vec![1, 40], greedy(2)), (vec![9], greedy(2))];
    let run = || -> Result<Vec<Result<Output, RequestError>>, String> {
        let all = (0..cards).collect();
        let device = npu.try_device(|options| (options.cards, options.timeout_us) = (all, 5_000_000));
        let device = device.map_err(|error| error.to_string())?;
        let mut config = config(cards, 2);
        (config.max_num_batched_tokens, config.max_num_seqs, config.max_model_len) = (2, 2, Some(64));
        // One program, so that loading takes few calls.
        config.compile.token_buckets = Some(vec![2]);
        // A small model, for it is uploaded anew each time.
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
    assert!(failed > calls as usize / stride / 30, "{failed} failures");
}
