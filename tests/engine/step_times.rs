//! Tests of step times and costs: a profiled device times each plan step and computes the same bits.
//!
//! The engine reports the cost of its plan, and the device utilization of its last steps.

#![allow(missing_docs)]

#[allow(dead_code, unreachable_pub)]
#[path = "../../examples/terminal/op_table.rs"]
mod op_table;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::common::scripted_engine::{Rig, drain};
use ascend_llm::device::cpu::{CpuDevice, CpuOptions};
use ascend_llm::device::{DeviceError, PeakRates, ProgramId, Telemetry as _};
use ascend_llm::engine::{CacheBudget, Engine, EngineConfig, ManualClock, Request, Utilization};
use ascend_llm::graph::Cost;
use ascend_llm::kv_cache::BlockId;
use ascend_llm::runner::scripted::ScriptedForward;
use ascend_llm::runner::{BatchId, ForwardInput, ForwardOutput, ModelExecutor, ModelRunner};
use ascend_llm::sampler::SamplingParams;
use op_table::OpTable;

/// Per microsecond: a thousand f32 operations, four thousand int8 operations, fifty bytes.
const PEAKS: PeakRates = PeakRates::new(1_000_000_000, 4_000_000_000, 50_000_000);

fn model() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/fable/gguf/fable-q8_0.gguf")
}

fn config() -> EngineConfig {
    let mut config = EngineConfig::default();
    config.kv_cache = CacheBudget::Blocks(8);
    config.block_size = Some(16);
    config.max_num_batched_tokens = 32;
    config.max_num_seqs = 2;
    config
}

fn runner(profile: bool) -> (Arc<CpuDevice>, ModelRunner) {
    let mut options = CpuOptions::default();
    options.threads = Some(2);
    options.profile = profile;
    let device = Arc::new(CpuDevice::new(options).unwrap());
    let runner = Engine::builder(model()).config(config()).device(device.clone()).build_runner().unwrap();
    (device, runner)
}

fn forward(runner: &mut ModelRunner, logit_rows: Vec<u32>) -> Vec<u32> {
    let (tokens, tables) = (vec![5, 6, 7, 8], vec![BlockId(3)]);
    let input = ForwardInput::new(tokens, vec![4], vec![4], tables).with_logit_rows(logit_rows);
    runner.forward(input).unwrap().logits.logits.iter().map(|logit| logit.to_bits()).collect()
}

#[test]
fn every_step_is_timed_and_changes_no_bit() {
    let ((plain, mut untimed), (device, mut timed)) = (runner(false), runner(true));
    let expected = forward(&mut untimed, vec![3]);
    assert!(plain.take_profile(untimed.program()).is_empty());

    assert!(device.take_profile(timed.program()).is_empty(), "the profile must be empty before the first run");
    assert_eq!(forward(&mut timed, vec![3]), expected);
    assert_eq!(forward(&mut timed, vec![3]), expected);
    let times = device.take_profile(timed.program());
    assert!(times.iter().enumerate().all(|(at, time)| time.step == at && time.runs == 2), "{times:?}");
    assert!(times.iter().all(|time| time.total_us >= 0.0 && time.last_start_us > 0.0), "{times:?}");
    assert!(times.windows(2).all(|pair| pair[0].last_start_us <= pair[1].last_start_us), "{times:?}");
    let layers: Vec<_> = times.iter().filter(|time| time.op == "attention").map(|time| time.layer).collect();
    assert_eq!(layers, [Some(0), Some(1), Some(2)]);
    assert_eq!(times.last().unwrap().op, "row_status");

    // Taking a profile clears it, and another program has its own (empty) profile.
    assert!(device.take_profile(timed.program()).is_empty());
    forward(&mut timed, vec![]);
    assert!(device.take_profile(ProgramId(0)).is_empty());
    assert!(device.take_profile(timed.program()).iter().all(|time| time.runs == 1));
}

#[test]
fn an_engine_reports_the_cost_of_its_plan() {
    let core = Engine::builder(model()).config(config()).build_core().unwrap();
    let info = core.info();
    assert_eq!(info.plan_groups, info.plan_steps, "with one stream each group has one step: {info:?}");
    let (decode, prefill) = (info.decode_cost, info.prefill_cost);
    // Each weight of a matrix product is used once per token, and all weights are read once, for any number of tokens.
    assert!(decode.flops > info.parameters, "{info:?}");
    assert!(prefill.flops > 16 * info.parameters && prefill.flops < 32 * decode.flops, "{info:?}");
    assert!(prefill.weight_bytes >= decode.weight_bytes && prefill.weight_bytes < 2 * decode.weight_bytes, "{info:?}");
    // The step reads each token of the context and writes one.
    let token_bytes = info.pool_bytes / info.pool_tokens;
    assert_eq!(decode.kv_bytes, token_bytes * (u64::from(info.max_model_len) + 1));
    assert_eq!(prefill.kv_bytes, token_bytes * (32 + 32));
}

/// Model whose batches take 100 microseconds per row, on a clock that only the batches advance.
struct Timed {
    model: ScriptedForward,
    clock: ManualClock,
}

impl ModelExecutor for Timed {
    fn launch(&mut self, input: ForwardInput) -> Result<BatchId, DeviceError> {
        self.clock.advance(Duration::from_micros(100 * input.tokens.len() as u64));
        self.model.launch(input)
    }

    fn collect(&mut self, ticket: BatchId, void: &[bool]) -> Result<ForwardOutput<'_>, DeviceError> {
        self.model.collect(ticket, void)
    }

    fn copy_blocks(&mut self, pairs: &[(BlockId, BlockId)]) -> Result<(), DeviceError> {
        self.model.copy_blocks(pairs)
    }

    fn vocab_size(&self) -> usize {
        self.model.vocab_size()
    }

    fn cost(&self, input: &ForwardInput) -> Cost {
        let rows = input.tokens.len() as u64;
        // 100 us at the peak rates: 100,000 operations in f32, 400,000 in int8, 5,000 bytes.
        Cost::default().with_flops(90_000 * rows).with_int8_flops(80_000 * rows).with_weight_bytes(1_000)
    }
}

#[test]
fn a_window_has_the_shares_that_one_counts_by_hand() {
    let rig = Rig::new(50, 64);
    let mut core = rig.core(Timed { model: rig.hashed(), clock: rig.clock.clone() });
    assert_eq!(core.stats().utilization, Utilization::default());
    assert_eq!((core.stats().utilization.mfu(&PEAKS), core.peak_rates()), (None, None));

    let mut params = SamplingParams::greedy();
    params.max_tokens = Some(3);
    let handle = core.submit(Request::tokens(vec![3; 20]).with_sampling(params)).unwrap();
    core.step().unwrap();
    let prefill = core.stats().utilization;
    assert_eq!((prefill.steps, prefill.elapsed_us, prefill.bytes), (1, 2_000, 1_000));
    assert_eq!((prefill.flops, prefill.int8_flops), (1_800_000, 1_600_000));
    drain(&mut core);
    drop(handle);
    // Two more tokens of one row each. At the peak rates a row takes 10 us in f32 and 20 us in int8; the bytes of a
    // step take 20 us.
    let window = core.stats().utilization;
    assert_eq!((window.steps, window.elapsed_us, window.bytes), (3, 2_200, 3_000));
    let close = |share: Option<f64>, expected: f64| (share.unwrap() - expected).abs() < 1e-12;
    assert!(close(window.mfu(&PEAKS), 30.0 / 100.0), "{window:?}");
    assert!(close(window.mbu(&PEAKS), 60.0 / 2_200.0), "{window:?}");
    // A step without rows is not counted.
    core.step().unwrap();
    assert_eq!(core.stats().utilization, window);
}

#[test]
fn an_engine_on_a_device_reports_its_work_and_its_peaks() {
    let mut options = CpuOptions::default();
    options.peaks = Some(PEAKS);
    let device = Arc::new(CpuDevice::new(options).unwrap());
    let mut core = Engine::builder(model()).config(config()).device(device).build_core().unwrap();
    assert_eq!(core.peak_rates(), Some(PEAKS));
    let mut params = SamplingParams::greedy();
    params.max_tokens = Some(5);
    let handle = core.submit(Request::tokens(vec![5; 10]).with_sampling(params)).unwrap();
    let info = core.info().clone();
    while !core.is_idle() {
        core.step().unwrap();
    }
    drop(handle);
    let window = core.stats().utilization;
    assert!((1..=5).contains(&window.steps) && window.elapsed_us > 0, "{window:?}");
    assert!(0 < window.int8_flops && window.int8_flops < window.flops, "{window:?}");
    // Each step reads the weights, and each row uses them.
    let rows = 10 + u64::from(window.steps) - 1;
    assert!(window.bytes > u64::from(window.steps) * info.decode_cost.weight_bytes, "{window:?}");
    assert!(window.flops <= rows * info.decode_cost.flops, "{window:?}");
    assert!(window.mfu(&PEAKS).unwrap() > 0.0 && window.mbu(&PEAKS).unwrap() > 0.0);

    // A device without known peak rates measures them, once for all engines.
    let engine = Engine::builder(model()).config(config()).build().unwrap();
    let peaks = engine.peak_rates().unwrap();
    assert!(peaks.f32_flops_per_s > 0 && peaks.int8_ops_per_s > 0 && peaks.read_bytes_per_s > 0, "{peaks:?}");
    assert_eq!(CpuDevice::new(CpuOptions::default()).unwrap().peak_rates(), Some(peaks));
}

#[test]
fn a_table_of_operations_lists_time_work_and_shares() {
    let cost = |flops, int8_flops, weight_bytes| {
        Cost::default().with_flops(flops).with_int8_flops(int8_flops).with_weight_bytes(weight_bytes)
    };
    let mut table = OpTable::default();
    for _ in 0..2 {
        table.add_launch([
            ("attention", 100.0, cost(25_000, 0, 1_000)),
            ("linear", 200.0, cost(420_000, 400_000, 2_500)),
            ("linear", 100.0, cost(0, 0, 2_500)),
            ("row_status", 0.0, cost(0, 0, 0)),
        ]);
    }
    let expected = "\
step: 2 launches, 0.40 ms each
operation                us   share      Mflop        MB   GFLOP/s    GB/s     MFU     MBU
linear                300.0   75.0%      0.420     0.005      1.40    0.02   40.0%   33.3%
attention             100.0   25.0%      0.025     0.001      0.25    0.01   25.0%   20.0%
row_status              0.0    0.0%      0.000     0.000      0.00    0.00       -       -
total                 400.0  100.0%      0.445     0.006      1.11    0.01   36.2%   30.0%
";
    assert_eq!(table.text("step", Some(&PEAKS)), expected);
    assert!(table.text("step", None).lines().skip(2).all(|line| line.ends_with("      -       -")));
}
