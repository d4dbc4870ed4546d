//! Tests the story model in all its formats, and SmolLM2, against float32 references of the same (dequantized) weights.
//!
//! The tests compare top logits, prompt log-probabilities and 64 greedy tokens. The story model runs on each
//! instruction set of the machine.

#![allow(missing_docs, clippy::cast_possible_truncation, clippy::struct_field_names)]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::common::goldens::{Prompts, prompts};
use crate::common::model::{Model, argmax, log_softmax_at, small_config};
use crate::common::smollm2::smollm2;
use ascend_llm::device::cpu::{CpuDevice, CpuOptions, Isa};
use ascend_llm::engine::{Engine, EngineConfig};
use ascend_llm::graph::Numerics;
use ascend_llm::kv_cache::KvDType;

fn data(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(path)
}

fn device(isa: Isa) -> Arc<CpuDevice> {
    let mut options = CpuOptions::default();
    options.isa = Some(isa);
    Arc::new(CpuDevice::new(options).unwrap())
}

/// Runs [`compare_on`] on each instruction set of this machine.
fn compare(model_path: &Path, golden: &Prompts, numerics: Numerics, bound: f32) {
    for &isa in Isa::available() {
        compare_on(isa, model_path, golden, numerics, bound);
    }
}

/// Does the same for one of [`QUANTIZED`]. Plain code takes ten times as long for these, so only one of them runs on
/// it.
fn compare_quantized(kind: &str, numerics: Numerics, bound: f32) {
    let golden = prompts(&data(&format!("fable/gguf/golden-{kind}.json")));
    let path = data(&format!("fable/gguf/fable-{kind}.gguf"));
    for &isa in Isa::available().iter().filter(|isa| **isa != Isa::Plain || kind == "Q4_K_M") {
        compare_on(isa, &path, &golden, numerics, bound);
    }
}

/// Compares a model with its reference; returns the largest error of the top logits.
///
/// Greedy tokens must agree up to the first step whose two largest logits are so close that the error could swap them.
fn compare_on(isa: Isa, model_path: &Path, golden: &Prompts, numerics: Numerics, bound: f32) -> f32 {
    let mut config = small_config();
    config.numerics = numerics;
    compare_with(isa, model_path, golden, config, bound)
}

fn compare_with(isa: Isa, model_path: &Path, golden: &Prompts, mut config: EngineConfig, bound: f32) -> f32 {
    let numerics = config.numerics;
    config.max_num_batched_tokens = 512;
    let mut model = Model::new(Engine::builder(model_path).config(config).device(device(isa)));
    let mut worst = 0.0f32;
    for prompt in &golden.prompts {
        let label = format!("{} of {}, {isa:?}", prompt.name, model_path.display());
        model.restart();
        let rows = model.forward(&prompt.input_ids, prompt.input_ids.len());
        let tops = &prompt.top20_last_positions;
        for (row, top) in rows[rows.len() - tops.len()..].iter().zip(tops) {
            for (id, logit) in top {
                worst = worst.max((row[*id as usize] - logit).abs());
            }
        }
        assert!(worst <= bound, "{label}: the largest difference of a logit is {worst}");
        for (i, expected) in prompt.prompt_logprobs.iter().enumerate() {
            let got = log_softmax_at(&rows[i], prompt.input_ids[i + 1]);
            assert!(
                (got - expected).abs() <= 2.0 * f64::from(bound),
                "{label}: log-probability {got}, expected {expected}"
            );
        }

        let steps = prompt.greedy_top2_gap.iter().take_while(|gap| **gap > 2.0 * bound).count().min(64);
        if numerics == Numerics::Exact {
            assert!(steps > 0, "{label}: no greedy step can be compared");
        }
        assert_eq!(model.greedy(&prompt.input_ids, steps), prompt.greedy64[..steps], "{label}");
        let argmax_of_last = rows.last().map(|row| argmax(row));
        assert!(steps == 0 || argmax_of_last == Some(prompt.greedy64[0]), "{label}");
    }
    worst
}

/// Path of the example's f16 file; `tests/data/fable` only contains safetensors and quantized files.
fn story_f16() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/models/fable-f16.gguf")
}

const QUANTIZED: [&str; 8] = ["q8_0", "q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K_M", "Q5_K_M", "Q6_K"];

#[test]
fn the_story_model_meets_its_reference_exactly() {
    let fable = prompts(&data("fable.json"));
    compare(&data("fable"), &fable, Numerics::Exact, 2e-4);
    compare(&story_f16(), &fable, Numerics::Exact, 2e-4);
}

#[test]
fn the_quantized_story_models_meet_their_references_exactly() {
    for kind in QUANTIZED {
        compare_quantized(kind, Numerics::Exact, 2e-4);
    }
}

/// Bounds for `numerics: fast`: keys and values are rounded to f16; integer weights also use int8 activations, and bf16
/// weights bf16 activations where these are faster.
///
/// The logits of this model reach 15. Activations of 8 bits over three layers cause errors of some hundredths,
/// activation blocks of 127 steps some tenths.
#[test]
fn fast_numerics_stay_within_their_bounds() {
    let fable = prompts(&data("fable.json"));
    for &isa in Isa::available() {
        let bound = if isa == Isa::Avx512Bf16 { 0.1 } else { 0.02 };
        let worst = compare_on(isa, &data("fable"), &fable, Numerics::Fast, bound);
        println!("bf16 weights on {isa:?}: largest error {worst}");
    }
    compare(&story_f16(), &fable, Numerics::Fast, 0.02);
    for kind in QUANTIZED {
        compare_quantized(kind, Numerics::Fast, 0.6);
    }
}

/// Each key and value changes by at most half a step, 1/254 of the largest element of its row.
///
/// With float weights there is no other error, and f16 would stay below 0.02.
#[test]
fn int8_keys_and_values_stay_within_their_bounds() {
    let mut config = small_config();
    (config.numerics, config.kv_dtype) = (Numerics::Fast, Some(KvDType::I8));
    let fable = prompts(&data("fable.json"));
    for path in [data("fable"), story_f16()] {
        let worst = compare_with(Isa::detect(), &path, &fable, config.clone(), 0.3);
        println!("{}: largest error {worst}", path.display());
        assert!(worst > 0.02, "{}: the error {worst} is not larger than that of f16", path.display());
    }
    for kind in QUANTIZED {
        let golden = prompts(&data(&format!("fable/gguf/golden-{kind}.json")));
        let path = data(&format!("fable/gguf/fable-{kind}.gguf"));
        let worst = compare_with(Isa::detect(), &path, &golden, config.clone(), 0.6);
        println!("{kind}: largest error {worst}");
    }
}

#[test]
fn the_story_begins_with_the_64_reference_tokens() {
    let fable = prompts(&data("fable.json"));
    let story = fable.prompts.iter().find(|prompt| prompt.greedy64.len() == 64).unwrap();
    for &isa in Isa::available() {
        for numerics in [Numerics::Exact, Numerics::Fast] {
            let mut config = small_config();
            config.numerics = numerics;
            let mut model = Model::new(Engine::builder(story_f16()).config(config).device(device(isa)));
            assert_eq!(model.greedy(&story.input_ids, 64), story.greedy64, "{isa:?}");
        }
    }
}

#[test]
fn smollm2_meets_its_reference() {
    let Some(path) = smollm2() else { return };
    let golden = prompts(&data("smollm2-135m-instruct-q4_1.json"));
    let exact = compare_on(Isa::detect(), &path, &golden, Numerics::Exact, 2e-3);
    let fast = compare_on(Isa::detect(), &path, &golden, Numerics::Fast, 3.0);
    println!("smollm2 ran: largest error {exact} exact, {fast} fast");
}
