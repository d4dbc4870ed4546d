//! Tests of devices with fewer capabilities.
//!
//! Unsupported operations are not compiled, or rejected by name. Fixed shapes cost padding, which is counted. The
//! overflow policy is the best that the device supports.

#![allow(missing_docs, clippy::cast_possible_truncation)]

#[allow(dead_code)]
use std::path::PathBuf;
use std::sync::Arc;

use crate::common::model::{Model, small_config};
use ascend_llm::device::cpu::{CpuDevice, CpuOptions};
use ascend_llm::device::{
    BufferId, CustomFailure, Device, DeviceCaps, DeviceError, EventId, KvLayout, LaunchArgs, MemKind, ProgramId, Span,
    StreamId, WeightSetId,
};
use ascend_llm::engine::{BuildError, Engine, EngineConfig, EngineCore, Request};
use ascend_llm::graph::passes::OpSet;
use ascend_llm::graph::{CompileError, CompileOptions, Numerics, Op, OverflowPolicy, Plan, Precision, Weight};
use ascend_llm::kv_cache::{BlockId, KvGeometry};
use ascend_llm::sampler::SamplingParams;
use ascend_llm::weights::WeightSource;

/// CPU device with other capabilities; it panics if a caller exceeds them.
#[derive(Debug)]
struct RestrictedDevice {
    cpu: CpuDevice,
    caps: DeviceCaps,
}

impl RestrictedDevice {
    fn new(change: impl FnOnce(&mut DeviceCaps)) -> Arc<Self> {
        let cpu = CpuDevice::new(CpuOptions::default()).unwrap();
        let mut caps = cpu.caps().clone();
        change(&mut caps);
        Arc::new(Self { cpu, caps })
    }
}

impl Device for RestrictedDevice {
    fn caps(&self) -> &DeviceCaps {
        &self.caps
    }

    fn load(&self, plans: &[Plan], weights: &[WeightSetId], kv: &KvGeometry) -> Result<ProgramId, CompileError> {
        for plan in plans {
            for step in &plan.steps {
                assert!(
                    self.caps.target.ops.contains(step.op.name()),
                    "the plan uses the unsupported operation {}",
                    step.op.name()
                );
                let scheduled = matches!(&step.op, Op::Attention(shape) if shape.schedules.is_some());
                assert!(self.caps.target.attention_schedules || !scheduled, "the plan uses unsupported loop orders");
            }
        }
        self.cpu.load(plans, weights, kv)
    }

    fn alloc(&self, bytes: u64, kind: MemKind) -> Result<BufferId, DeviceError> {
        self.cpu.alloc(bytes, kind)
    }
    fn free(&self, buffer: BufferId) {
        self.cpu.free(buffer);
    }
    fn write(&self, dst: Span, src: &[u8], on: StreamId) -> Result<(), DeviceError> {
        self.cpu.write(dst, src, on)
    }
    fn read(&self, src: Span, dst: &mut [u8], after: Option<EventId>) -> Result<(), DeviceError> {
        self.cpu.read(src, dst, after)
    }
    fn copy_sampled_tokens(&self, ids: Span, best: Span, rows: &[(u32, u32)], on: StreamId) -> Result<(), DeviceError> {
        self.cpu.copy_sampled_tokens(ids, best, rows, on)
    }
    fn copy(&self, dst: Span, src: Span, on: StreamId) -> Result<(), DeviceError> {
        self.cpu.copy(dst, src, on)
    }
    fn stream(&self) -> Result<StreamId, DeviceError> {
        self.cpu.stream()
    }
    fn record(&self, on: StreamId) -> Result<EventId, DeviceError> {
        self.cpu.record(on)
    }
    fn wait(&self, on: StreamId, event: EventId) -> Result<(), DeviceError> {
        self.cpu.wait(on, event)
    }
    fn wait_host(&self, event: EventId) -> Result<(), DeviceError> {
        self.cpu.wait_host(event)
    }
    fn kv_layout(&self, geometry: &KvGeometry) -> Result<KvLayout, DeviceError> {
        self.cpu.kv_layout(geometry)
    }
    fn upload(&self, source: &dyn WeightSource, weights: &[Weight], rank: u32) -> Result<WeightSetId, DeviceError> {
        self.cpu.upload(source, weights, rank)
    }
    fn release_weights(&self, weights: WeightSetId) {
        self.cpu.release_weights(weights);
    }
    fn overflows(&self, program: ProgramId) -> Vec<(&'static str, u64)> {
        self.cpu.overflows(program)
    }
    fn custom_failures(&self, program: ProgramId) -> Vec<CustomFailure> {
        self.cpu.custom_failures(program)
    }
    fn unload(&self, program: ProgramId) {
        self.cpu.unload(program);
    }
    fn launch(&self, program: ProgramId, args: &LaunchArgs<'_>, on: StreamId) -> Result<(), DeviceError> {
        self.cpu.launch(program, args, on)
    }
    fn copy_blocks(
        &self,
        layout: &KvLayout,
        src_pool: Span,
        dst_pool: Span,
        pairs: &[(BlockId, BlockId)],
        on: StreamId,
    ) -> Result<(), DeviceError> {
        self.cpu.copy_blocks(layout, src_pool, dst_pool, pairs, on)
    }
}

fn fable() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data/fable/gguf/fable-q8_0.gguf")
}

fn config(level: u8) -> EngineConfig {
    let mut config = small_config();
    (config.max_num_batched_tokens, config.max_num_seqs) = (64, 8);
    config.numerics = Numerics::Fast;
    config.compile = CompileOptions::preset(level);
    config
}

fn logits(config: EngineConfig, device: Arc<RestrictedDevice>) -> Vec<Vec<f32>> {
    let ids: Vec<u32> = (0..40u32).map(|i| (i * i * 7 + 3) % 700).collect();
    Model::new(Engine::builder(fable()).config(config).device(device)).forward(&ids, 8)
}

const FUSED: [&str; 8] = [
    "add_rms_norm",
    "norm_cast",
    "qk_norm_rope",
    "rope_kv_write",
    "act_mul",
    "linear_multi",
    "swiglu_linear",
    "linear_arg_max",
];

#[test]
fn fused_operations_that_a_device_lacks_are_not_made() {
    let expected = logits(config(3), RestrictedDevice::new(|_| {}));
    for name in FUSED {
        let device = RestrictedDevice::new(|caps| caps.target.ops = OpSet::ALL.without(&[name]));
        assert!(logits(config(3), device) == expected, "{name}");
    }
    let device = RestrictedDevice::new(|caps| {
        (caps.target.ops, caps.target.attention_schedules) = (OpSet::ALL.without(&FUSED), false);
    });
    assert!(logits(config(3), device) == expected, "wrong logits without any of these operations");
}

#[test]
fn plain_operations_that_a_device_lacks_are_refused_by_name() {
    for name in ["embed", "linear", "attention", "row_status", "arg_max", "cast", "rms_norm"] {
        let device = RestrictedDevice::new(|caps| caps.target.ops = OpSet::ALL.without(&[name]));
        match Engine::builder(fable()).config(config(0)).device(device).build_core() {
            Err(BuildError::Compile(CompileError::Unsupported { op, .. })) => assert_eq!(op, name),
            other => panic!("{name}: {other:?}"),
        }
    }
    assert!(OpSet::ALL.without(&["nothing"]) == OpSet::ALL && !OpSet::ALL.contains("nothing"));
}

/// Returns the policy in force, or the message of the error.
fn overflow_policy(
    asked: Option<OverflowPolicy>,
    change: impl FnOnce(&mut DeviceCaps),
) -> Result<&'static str, String> {
    let mut config = config(2);
    config.compile.overflow = asked;
    match Engine::builder(fable()).config(config).device(RestrictedDevice::new(change)).build_core() {
        Ok(core) => {
            assert_eq!(core.config().compile.overflow, core.info().overflow);
            Ok(core.info().overflow.expect("a builder sets the policy").name())
        }
        Err(BuildError::Config(error)) => {
            assert_eq!(error.field, "compile.overflow");
            assert_eq!(asked.map(OverflowPolicy::name), Some(error.value.as_str()));
            Err(error.expected)
        }
        Err(other) => panic!("{other:?}"),
    }
}

#[test]
fn the_default_overflow_policy_is_the_best_that_a_device_supports() {
    let policies = [OverflowPolicy::Error, OverflowPolicy::Clamp, OverflowPolicy::RetryF32];
    let with =
        |asked, retry_f32, clamps| overflow_policy(asked, |caps| (caps.retry_f32, caps.clamps) = (retry_f32, clamps));
    for clamps in [true, false] {
        assert_eq!(with(None, true, clamps), Ok("retry_f32"));
        assert_eq!(with(None, false, clamps), Ok("error"));
        assert_eq!(with(Some(OverflowPolicy::Error), false, clamps), Ok("error"));
    }
    for policy in policies {
        assert_eq!(with(Some(policy), true, true), Ok(policy.name()));
    }
    let refused = |asked, retry_f32, clamps, words: &str| {
        let expected = with(Some(asked), retry_f32, clamps).unwrap_err();
        assert!(expected.starts_with(words) && expected.contains("device cpu"), "{asked:?}: {expected}");
    };
    refused(OverflowPolicy::RetryF32, false, true, "`error` or `clamp`: ");
    refused(OverflowPolicy::RetryF32, false, false, "`error`: ");
    refused(OverflowPolicy::Clamp, true, false, "`error` or `retry_f32`: ");
    refused(OverflowPolicy::Clamp, false, false, "`error`: ");
}

#[test]
fn a_device_without_f32_plans_refuses_f32_precision() {
    let device = || RestrictedDevice::new(|caps| caps.retry_f32 = false);
    let build = |config: EngineConfig| Engine::builder(fable()).config(config).device(device()).build_core();
    let mut f32_precision = config(2);
    f32_precision.compile.precision = Some(Precision::F32);
    match build(f32_precision) {
        Err(BuildError::Config(error)) => assert_eq!(error.field, "compile.precision"),
        other => panic!("{other:?}"),
    }
}

fn run(core: &mut EngineCore) -> Vec<Vec<u32>> {
    let mut params = SamplingParams::greedy();
    (params.max_tokens, params.ignore_eos) = (Some(5), true);
    let request = |len: u32| {
        Request::tokens((0..len).map(|i| 3 + i * 7 % 600).collect::<Vec<u32>>()).with_sampling(params.clone())
    };
    let handles: Vec<_> = [30, 2, 9].map(|len| core.submit(request(len)).unwrap()).into_iter().collect();
    while !core.is_idle() {
        core.step().unwrap();
    }
    handles.into_iter().map(|handle| handle.collect_output().unwrap().choices[0].token_ids.clone()).collect()
}

#[test]
fn fixed_shapes_run_in_the_smallest_bucket_and_padding_is_counted() {
    let build = |config, fixed| {
        let device = RestrictedDevice::new(|caps| caps.static_shapes = fixed);
        Engine::builder(fable()).config(config).device(device).build_core().unwrap()
    };
    let mut free = build(config(2), false);
    let expected = run(&mut free);
    assert_eq!((free.stats().padded_rows, free.info().buckets.len()), (0, 1));

    let mut fixed = build(config(2), true);
    assert_eq!(run(&mut fixed), expected);
    let rows: Vec<u32> = fixed.info().buckets.iter().map(|bucket| bucket.rows).collect();
    assert_eq!(rows, [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]);
    // One step of 41 prompt rows in a bucket of 48, then four steps of 3 rows in a bucket of 4.
    assert_eq!((fixed.stats().steps, fixed.stats().padded_rows), (5, 7 + 4));

    let mut given = config(2);
    given.compile.token_buckets = Some(vec![3, 41]);
    let mut given = build(given, true);
    assert_eq!(run(&mut given), expected);
    assert_eq!(given.stats().padded_rows, 0);
    let buckets = &given.info().buckets;
    assert_eq!(
        buckets.iter().map(|bucket| (bucket.fewest_rows, bucket.rows)).collect::<Vec<_>>(),
        [(1, 3), (4, 41), (42, 64)]
    );
    for (smaller, larger) in buckets.iter().zip(&buckets[1..]) {
        assert_eq!((smaller.launches, smaller.groups), (larger.launches, larger.groups));
        assert!(smaller.arena_bytes < larger.arena_bytes && smaller.cost.flops < larger.cost.flops);
        assert!(
            larger.fewest_rows_cost.flops > smaller.cost.flops && larger.fewest_rows_cost.flops < larger.cost.flops
        );
        assert!(smaller.cost.bytes() < larger.cost.bytes());
    }
    let arenas: u64 = buckets.iter().map(|bucket| bucket.arena_bytes).sum();
    assert!(given.info().arena_bytes > arenas, "the arena of the f32 fallback plan must be counted too");
}
