//! Tests of the Ascend device on the simulated runtime.
//!
//! Replayed graphs are bit-equal to eager execution, the step loop only queues, missing functions are named, and a hung
//! or lost device is detected.

#![allow(clippy::cast_possible_truncation, reason = "the numbers of a test are small")]

use crate::common::fable;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::common::model::{self, Model};
use crate::common::sim_npu::Npu;
use ascend_llm::device::ascend::{AscendDevice, AscendOpenError, AscendOptions};
use ascend_llm::device::{Device, DeviceError, MemKind, Span, Telemetry as _};
use ascend_llm::engine::{
    BuildError, CacheBudget, Engine, EngineConfig, EngineError, Health, Request, RequestError, SubmitError,
};
use ascend_llm::graph::{CompileOptions, Numerics, OverflowPolicy, Precision};
use ascend_llm::kv_cache::{BlockId, KvDType};
use ascend_llm::runner::{ForwardInput, ModelExecutor as _};
use ascend_llm::sampler::SamplingParams;

const PROMPT: [u32; 7] = [1, 40, 100, 7, 300, 21, 5];
/// Number of layers of the story model.
const LAYERS: u64 = 3;

fn config() -> EngineConfig {
    let mut config = fable::plain_config();
    (config.max_num_batched_tokens, config.max_num_seqs) = (64, 8);
    config.kv_cache = CacheBudget::Blocks(24);
    config
}

fn on(device: Arc<dyn Device>) -> Model {
    Model::new(Engine::builder(fable::float()).config(config()).device(device))
}

fn bits(rows: &[Vec<f32>]) -> Vec<u32> {
    rows.iter().flatten().map(|logit| logit.to_bits()).collect()
}

/// Runs a prompt, then decode steps; returns the bits of all logits.
fn trace(mut model: Model, steps: usize) -> Vec<u32> {
    let mut all = bits(&model.forward(&PROMPT, 3));
    for step in 0..steps {
        all.extend(bits(&model.forward(&[(step * 31 % 700) as u32 + 3], 1)));
    }
    all
}

#[test]
fn replays_give_the_eager_bits() {
    let npu = Npu::new();
    let eager = trace(on(npu.eager()), 12);
    assert_eq!(npu.sim.count("aclmdlRIExecuteAsync"), 0);
    npu.assert_clean();
    for seed in 1..=5 {
        npu.sim.set("delay_us", 50);
        npu.sim.set("seed", seed);
        let before = npu.sim.count("aclmdlRIExecuteAsync");
        assert!(trace(on(npu.device()), 12) == eager, "seed {seed}");
        assert_eq!(npu.sim.count("aclmdlRIExecuteAsync") - before, 12, "every decode step is a replay");
        npu.assert_clean();
    }
}

/// A batch of sequences with one row each, which pads its bucket.
#[test]
fn padded_replays_give_the_eager_bits_and_disturb_no_block() {
    let npu = Npu::new();
    let run = |device: Arc<dyn Device>| {
        let mut runner = Engine::builder(fable::float()).config(config()).device(device).build_runner().unwrap();
        let mut all = Vec::new();
        for step in 0..8u32 {
            let seqs = [5, 8, 3, 6][step as usize % 4];
            let mut input = ForwardInput::default();
            for seq in 0..seqs {
                let kv = 1 + step;
                input.tokens.push(3 + seq * 50 + step);
                input.q_lens.push(1);
                input.kv_lens.push(if seq < 3 { kv } else { 1 });
                input.tables.push(BlockId(2 * seq));
                // The number of requested logit rows varies, and is often less than the number of rows.
                if (seq + step) % 3 != 0 {
                    input.logit_rows.push(seq);
                }
            }
            let out = runner.forward(input).unwrap().logits;
            assert!(out.status.iter().all(|status| *status == 0));
            for (row, argmax) in out.logits.chunks(out.vocab).zip(out.argmax) {
                assert_eq!(*argmax, model::argmax(row), "step {step}");
            }
            all.extend(out.logits.iter().map(|logit| logit.to_bits()));
        }
        all
    };
    let (eager, captured) = (run(npu.eager()), run(npu.device()));
    assert!(eager == captured);
    assert!(npu.sim.count("aclmdlRIExecuteAsync") >= 8);
    npu.assert_clean();
}

#[test]
fn a_decode_step_only_queues() {
    let npu = Npu::new();
    let mut model = on(npu.device());
    model.forward(&PROMPT, 1);
    model.forward(&[9], 1);
    npu.sim.set("log", 1);
    npu.sim.clear_log();
    const STEPS: u64 = 4;
    for step in 0..STEPS as u32 {
        model.forward(&[10 + step], 1);
    }
    let log = npu.sim.log();
    let count = |name: &str| log.iter().filter(|line| line.split_whitespace().next() == Some(name)).count() as u64;
    assert_eq!(count("aclmdlRIExecuteAsync"), STEPS);
    assert_eq!(count("aclmdlRICaptureTaskUpdateBegin"), STEPS * LAYERS);
    for forbidden in
        ["aclrtMalloc", "aclrtMallocHost", "aclrtFree", "aclrtMemcpy", "aclrtMemset", "aclrtSynchronizeDevice"]
    {
        assert_eq!(count(forbidden), 0, "{forbidden} in {log:#?}");
    }
    // The host waits only for the status, the logits and the argmax of each step.
    let waits = log.iter().filter(|line| line.starts_with("aclrtSynchronize")).count() as u64;
    assert_eq!(waits, 3 * STEPS, "{log:#?}");
    drop(model);
    npu.assert_clean();
}

#[test]
fn what_is_missing_is_named() {
    let missing = Path::new("/nowhere/at/all/libascendcl.so");
    let mut options = AscendOptions::default();
    options.library = Some(missing.to_owned());
    let error = AscendDevice::open(options).unwrap_err();
    assert!(matches!(error, AscendOpenError::Library(_)) && error.to_string().contains("/nowhere/at/all"), "{error}");

    let npu = Npu::new();
    let error = npu.try_device(|options| options.cards = vec![7]).unwrap_err();
    assert_eq!(error, AscendOpenError::Card { card: 7, count: 1 });
    let error = npu.try_device(|options| options.cards = vec![0, 1]).unwrap_err();
    assert_eq!(error, AscendOpenError::Card { card: 1, count: 1 });
    for cards in [vec![], vec![0, 0]] {
        let error = npu.try_device(|options| options.cards.clone_from(&cards)).unwrap_err();
        assert_eq!(error, AscendOpenError::Cards { cards });
    }
    for call in ["aclInit", "aclrtSetDevice", "aclrtCreateContext", "aclrtGetMemInfo", "aclrtMallocHost", "aclrtMalloc"]
    {
        npu.sim.fail_call(call, 1, 207_001);
        let error = npu.try_device(|_| ()).unwrap_err();
        assert!(error.to_string().contains(call), "{call}: {error}");
        npu.assert_clean();
    }
    let error = npu.sim_without(&["aclnnRmsNorm", "aclnnRmsNormGetWorkspaceSize"]).unwrap_err();
    let AscendOpenError::MissingOperations { names, .. } = &error else { panic!("{error}") };
    assert_eq!(names[..], ["aclnnRmsNorm"]);
}

#[test]
fn what_cannot_be_honoured_is_refused_by_name() {
    let npu = Npu::new();
    type Change = fn(&mut EngineConfig);
    let cases: [(&str, Change); 9] = [
        ("numerics", |config| config.numerics = Numerics::Exact),
        ("kv_dtype", |config| config.kv_dtype = Some(KvDType::I8)),
        ("kv_dtype", |config| config.kv_dtype = Some(KvDType::F32)),
        ("retry_f32", |config| config.compile.overflow = Some(OverflowPolicy::RetryF32)),
        ("precision f16", |config| config.compile.precision = Some(Precision::F16)),
        ("precision", |config| config.compile.precision = Some(Precision::F32)),
        ("clamp", |config| config.compile.overflow = Some(OverflowPolicy::Clamp)),
        ("precision f16", |config| {
            (config.compile.precision, config.compile.overflow) = (Some(Precision::F16), Some(OverflowPolicy::Error));
        }),
        ("block_size", |config| config.block_size = Some(24)),
    ];
    for (name, change) in cases {
        let mut config = config();
        change(&mut config);
        let error = Engine::builder(fable::float()).config(config).device(npu.device()).build_core().unwrap_err();
        let mut text = error.to_string();
        let mut cause: Option<&dyn std::error::Error> = std::error::Error::source(&error);
        while let Some(inner) = cause {
            text.push_str(&inner.to_string());
            cause = inner.source();
        }
        assert!(text.contains(name), "{name}: {text}");
        npu.assert_clean();
    }
    // KV cache and activations of different types.
    let mut config = config();
    config.kv_dtype = Some(KvDType::F16);
    let error = Engine::builder(fable::float()).config(config).device(npu.device()).build_core().unwrap_err();
    assert!(matches!(error, BuildError::Compile(_)), "{error:?}");
}

#[test]
fn a_machine_without_graphs_runs_eagerly_and_adds_a_note() {
    let npu = Npu::new();
    let eager = trace(on(npu.eager()), 3);
    for (setting, value) in [("task_update", 0), ("streams", 4)] {
        npu.sim.set(setting, value);
        let device = npu.device();
        assert!(trace(on(device.clone()), 3) == eager, "{setting}");
        let notes = device.notes();
        assert!(notes.iter().any(|note| note.contains("operation by operation")), "{setting}: {notes:?}");
        drop(device);
        npu.assert_clean();
        npu.sim.reset();
    }
}

#[test]
fn a_hung_kernel_is_noticed_within_the_limit() {
    let npu = Npu::new();
    let device = npu.try_device(|options| options.timeout_us = 300_000).unwrap();
    let mut runner = Engine::builder(fable::float()).config(config()).device(device.clone()).build_runner().unwrap();
    npu.sim.hang_task("aclnnRmsNorm", 1);
    let mut input = ForwardInput::default();
    input.tokens.push(5);
    input.q_lens.push(1);
    input.kv_lens.push(1);
    input.tables.push(BlockId(0));
    input.logit_rows.push(0);
    let start = Instant::now();
    let error = runner.forward(input.clone()).unwrap_err();
    assert!(error.is_lost(), "{error}");
    assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
    assert!(runner.forward(input).unwrap_err().is_lost());
    drop(runner);
    drop(device);
    npu.sim.release();
    npu.assert_clean();
}

/// A crashed kernel ends the engine with the runtime's code and message, once for each request.
///
/// No call is tried again, and later calls return the same error.
#[test]
fn a_crash_is_reported_with_its_call_code_and_message() {
    let npu = Npu::new();
    let device = npu.device();
    let engine = Engine::builder(fable::float()).config(config()).device(device.clone()).build().unwrap();
    let mut params = SamplingParams::greedy();
    params.max_tokens = Some(8);
    npu.sim.fail_task("aclnnFusedInferAttentionScoreV3", 1, 507_015);
    let launches = npu.sim.count("aclnnEmbedding");
    let handles: Vec<_> = (0..3u32)
        .filter_map(|at| engine.submit(Request::tokens(vec![1, 40 + at]).with_sampling(params.clone())).ok())
        .collect();
    assert!(!handles.is_empty());
    for handle in handles {
        let error = handle.collect_output().unwrap_err();
        let RequestError::Engine(EngineError::Device(DeviceError::Crashed { call, code, message })) = &error else {
            panic!("{error:?}")
        };
        // A later call reports the crash; the runtime's message names the operation.
        assert!(call.starts_with("acl") && *code == 507_015, "{call} {code} {message}");
        assert!(message.contains("aclnnFusedInferAttentionScoreV3"), "{call} {code} {message}");
    }
    assert_eq!(engine.health(), Health::Failed);
    let refused = engine.submit(Request::tokens(vec![1]).with_sampling(params)).unwrap_err();
    assert!(matches!(refused, SubmitError::Failed { .. }), "{refused:?}");
    // Two steps may have been in flight.
    assert!(npu.sim.count("aclnnEmbedding") <= launches + 2, "the engine tried the step again");
    let later = device.alloc(64, MemKind::Device).unwrap_err();
    assert!(matches!(later, DeviceError::Crashed { code: 507_015, .. }), "{later:?}");
    assert!(engine.shutdown(Duration::from_secs(5)).is_err());
    drop(device);
    npu.assert_clean();
}

#[test]
fn sampled_tokens_are_copied_on_the_device() {
    let npu = Npu::new();
    let device: Arc<dyn Device> = npu.device();
    // The device only accepts the ids of a loaded model.
    let runner = Engine::builder(fable::float()).config(config()).device(device.clone()).build_runner().unwrap();
    let stream = device.stream().unwrap();
    let words = |n: u64| {
        let buffer = device.alloc(4 * n, MemKind::Device).unwrap();
        Span { buffer, offset: 0, bytes: 4 * n }
    };
    let (ids, argmax) = (words(6), words(4));
    let put = |span: Span, values: &[u32]| {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        device.write(span, &bytes, stream).unwrap();
    };
    put(ids, &[10, 11, 12, 13, 14, 15]);
    put(argmax, &[700, u32::MAX, 3, 0]);
    device.copy_sampled_tokens(ids, argmax, &[(5, 0), (0, 2), (2, 1), (3, 3)], stream).unwrap();
    let event = device.record(stream).unwrap();
    let mut bytes = [0u8; 24];
    device.read(ids, &mut bytes, Some(event)).unwrap();
    let got: Vec<u32> = bytes.chunks(4).map(|b| u32::from_le_bytes(b.try_into().unwrap())).collect();
    assert_eq!(got, [3, 11, 0, 0, 14, 700]);
    assert!(device.copy_sampled_tokens(ids, argmax, &[(6, 0)], stream).is_err());
    device.free(ids.buffer);
    device.free(argmax.buffer);
    drop(runner);
    drop(device);
    npu.assert_clean();
}

/// Many requests in a pool that is too small for them, so that some are preempted; their outputs are those of batches
/// of their own.
///
/// (In the simulator, a row does not depend on the rest of the batch; on a real card it may.)
#[test]
fn mixed_requests_with_preemption_end_well() {
    let npu = Npu::with(&[("cann", 90_100_000)]);
    let mut config = config();
    (config.block_size, config.kv_cache) = (Some(16), CacheBudget::Blocks(40));
    (config.max_num_batched_tokens, config.max_num_seqs) = (64, 16);
    let mut core = Engine::builder(fable::float()).config(config.clone()).device(npu.device()).build_core().unwrap();
    let mut author = fable::Author::new(7);
    let requests: Vec<(Vec<u32>, SamplingParams)> = (0..64)
        .map(|_| {
            let len = author.dice().from(1, 60);
            let prompt = author.prompt(len);
            (prompt, author.params(24))
        })
        .collect();
    let handles: Vec<_> = requests
        .iter()
        .map(|(prompt, params)| core.submit(Request::tokens(prompt.clone()).with_sampling(params.clone())).unwrap())
        .collect();
    fable::drain(&mut core);
    assert!(core.stats().preemptions > 0, "the pool must be small enough to cause preemptions");
    let together: Vec<_> = handles.into_iter().map(|handle| handle.collect_output().unwrap()).collect();
    for ((prompt, params), output) in requests.into_iter().zip(&together).take(8) {
        let handle = core.submit(Request::tokens(prompt).with_sampling(params)).unwrap();
        let alone = fable::finish(&mut core, handle);
        assert_eq!(fable::Seen::of(&alone), fable::Seen::of(output));
    }
    drop(core);
    npu.assert_clean();
}

/// Fusion that omits no rounding, streams, and the precision that the model has anyway yield the same bits.
///
/// From level 2 on, gate and up are one product, and SwiGLU rounds once; the two separate operations round twice.
#[test]
fn settings_that_change_no_number_give_the_same_bits() {
    let npu = Npu::new();
    let with = |change: &dyn Fn(&mut EngineConfig)| {
        let mut config = config();
        change(&mut config);
        trace(Model::new(Engine::builder(fable::float()).config(config).device(npu.device())), 2)
    };
    let plain = with(&|_| ());
    let [none, least, most] = [0, 1, 3].map(|level| with(&|config| config.compile = CompileOptions::preset(level)));
    assert!(none == least && most == plain && none != plain);
    let own = |config: &mut EngineConfig| {
        (config.compile.precision, config.compile.overflow) = (Some(Precision::BF16), Some(OverflowPolicy::Error));
    };
    assert!(with(&own) == plain);
    npu.assert_clean();
}

/// A failure of any call is returned as a typed error or has no effect, and no object is left on the card.
#[test]
fn any_call_may_fail() {
    let npu = Npu::new();
    let run = || -> Result<(), Box<dyn std::error::Error>> {
        let device = npu.try_device(|options| options.timeout_us = 2_000_000)?;
        let mut config = config();
        (config.max_num_batched_tokens, config.max_num_seqs) = (4, 2);
        config.max_model_len = Some(64);
        let builder = Engine::builder(fable::float()).config(config).device(device);
        let mut runner = builder.build_runner()?;
        let mut input = ForwardInput::default();
        for kv in 1..=3 {
            input.clear();
            input.tokens.push(5 + kv);
            input.q_lens.push(1);
            input.kv_lens.push(kv);
            input.tables.push(BlockId(0));
            input.logit_rows.push(0);
            input = runner.forward(input)?.input;
        }
        Ok(())
    };
    let before = npu.sim.count("*");
    run().unwrap();
    let calls = npu.sim.count("*") - before;
    let (mut failed, step) = (0, (calls / 150).max(1));
    for nth in (1..=calls).step_by(step as usize) {
        npu.sim.reset();
        for code in [207_001, 507_015] {
            npu.sim.fail_call("*", nth, code);
            failed += u32::from(run().is_err());
            npu.assert_clean();
        }
    }
    assert!(failed > 100, "{failed} of {calls} calls");
}
