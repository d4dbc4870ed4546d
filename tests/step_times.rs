//! A device that was asked to times every step of a plan and computes the same bits; an engine says what its plan costs.

#![allow(missing_docs)]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use ascend_llm::device::ProgramId;
use ascend_llm::device::cpu::{CpuDevice, CpuOptions};
use ascend_llm::engine::{CacheBudget, Engine, EngineConfig, Forward as _, ForwardInput, ModelRunner};
use ascend_llm::kv_cache::BlockId;

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
    let input = ForwardInput { tokens, q_lens: vec![4], kv_lens: vec![4], tables, logit_rows, f32_from: vec![] };
    runner.forward(&input).unwrap().logits.logits.iter().map(|logit| logit.to_bits()).collect()
}

#[test]
fn every_step_is_timed_and_changes_no_bit() {
    let ((plain, mut untimed), (device, mut timed)) = (runner(false), runner(true));
    let expected = forward(&mut untimed, vec![3]);
    assert!(plain.take_profile(untimed.program()).is_empty());

    assert!(device.take_profile(timed.program()).is_empty(), "nothing ran yet");
    assert_eq!(forward(&mut timed, vec![3]), expected);
    assert_eq!(forward(&mut timed, vec![3]), expected);
    let times = device.take_profile(timed.program());
    assert!(times.iter().enumerate().all(|(at, time)| time.step == at && time.runs == 2), "{times:?}");
    assert!(times.iter().all(|time| time.total_us >= 0.0 && time.last_start_us > 0.0), "{times:?}");
    assert!(times.windows(2).all(|pair| pair[0].last_start_us <= pair[1].last_start_us), "{times:?}");
    let layers: Vec<_> = times.iter().filter(|time| time.op == "attention").map(|time| time.layer).collect();
    assert_eq!(layers, [Some(0), Some(1), Some(2)]);
    assert_eq!(times.last().unwrap().op, "row_status");

    // Taken is taken, and another program has none.
    assert!(device.take_profile(timed.program()).is_empty());
    forward(&mut timed, vec![]);
    assert!(device.take_profile(ProgramId(0)).is_empty());
    assert!(device.take_profile(timed.program()).iter().all(|time| time.runs == 1));
}

#[test]
fn an_engine_says_what_its_plan_costs() {
    let core = Engine::builder(model()).config(config()).build_core().unwrap();
    let info = core.info();
    assert_eq!(info.plan_groups, info.plan_steps, "one lane: {info:?}");
    let (decode, prefill) = (info.decode_cost, info.prefill_cost);
    // Each weight that multiplies does so once a token, and all are read once whatever the tokens.
    assert!(decode.flops > info.parameters, "{info:?}");
    assert!(prefill.flops > 16 * info.parameters && prefill.flops < 32 * decode.flops, "{info:?}");
    assert!(prefill.weight_bytes >= decode.weight_bytes && prefill.weight_bytes < 2 * decode.weight_bytes, "{info:?}");
    // Each token of the context is read, and one is written.
    let token_bytes = info.pool_bytes / info.pool_tokens;
    assert_eq!(decode.kv_bytes, token_bytes * (u64::from(info.max_model_len) + 1));
    assert_eq!(prefill.kv_bytes, token_bytes * (32 + 32));
}
