//! Tests that the simulated Ascend card, through the engine, agrees with the CPU's reference within stated bounds.

#![allow(clippy::cast_possible_truncation, reason = "the numbers of a test are small")]

use std::path::Path;
use std::sync::Arc;

use crate::common::goldens::{ascend_models, cases};
use crate::common::model::Model;
use crate::common::sim_npu::Npu;
use ascend_llm::device::Device;
use ascend_llm::engine::{CacheBudget, Engine, EngineConfig};
use ascend_llm::kv_cache::{KvDType, KvGeometry};

fn config() -> EngineConfig {
    let mut config = EngineConfig::default();
    config.max_num_batched_tokens = 128;
    config.max_num_seqs = 8;
    config.kv_cache = CacheBudget::Blocks(16);
    config
}

fn on(device: Arc<dyn Device>, folder: &Path) -> Model {
    Model::new(Engine::builder(folder).config(config()).device(device))
}

/// Largest difference of a logit from the f32 reference; logits are up to 10.
///
/// All activations are rounded to 11 bits (f16) or 8 bits (bf16) after each operation, residual sums and logits
/// included, through two layers.
const F16_BOUND: f32 = 4e-2;
const BF16_BOUND: f32 = 3e-1;

fn bound(folder: &Path) -> f32 {
    if folder.ends_with("llama-bf16") { BF16_BOUND } else { F16_BOUND }
}

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

#[test]
fn heads_of_other_sizes_are_refused_with_the_reason() {
    let device = Npu::new().device();
    for (head_dim, is_supported) in [(16, true), (80, true), (12, false), (8, false)] {
        let geometry = KvGeometry::new(2, 2, head_dim, 128, KvDType::F16);
        let outcome = device.kv_layout(&geometry);
        assert_eq!(outcome.is_ok(), is_supported, "{head_dim}: {outcome:?}");
        if let Err(error) = outcome {
            let text = error.to_string();
            assert!(text.contains(&format!("heads of {head_dim}")) && text.contains("multiples of 16"), "{text}");
        }
    }
}

#[test]
fn conformance_models_stay_within_their_bounds() {
    for capture in [false, true] {
        let mut worst = [0.0f32; 2];
        for folder in ascend_models() {
            let npu = Npu::new();
            let device = npu.try_device(|options| options.capture = capture).unwrap();
            let mut model = on(device, &folder);
            for case in cases(&folder).cases {
                model.restart();
                let rows = model.forward(&case.input_ids, 1);
                let mut error = largest_difference(&rows[0], &case.last_logits);
                // Teacher forcing: the end of the prompt runs token by token, through decode steps.
                model.restart();
                let (start, end) = case.input_ids.split_at(case.input_ids.len() / 2);
                if !start.is_empty() {
                    model.forward(start, 1);
                }
                let rows = end.iter().map(|&token| model.forward(&[token], 1).remove(0)).last();
                if let Some(last) = rows {
                    error = error.max(largest_difference(&last, &case.last_logits));
                }
                let label = format!("{}, capture {capture}", folder.display());
                assert!(error <= bound(&folder), "{label}: the largest difference of a logit is {error}");
                let worst = &mut worst[usize::from(folder.ends_with("llama-bf16"))];
                *worst = worst.max(error);
            }
            drop(model);
            npu.assert_clean();
        }
        println!("capture {capture}: largest errors {worst:?} of [{F16_BOUND}, {BF16_BOUND}]");
    }
}
