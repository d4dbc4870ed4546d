//! Tests that each conformance model yields the logits, log-probabilities and greedy tokens of its float32 reference.
//!
//! The tests cover both spellings of `config.json`, the lowest and the highest fusion level, and each instruction set
//! of the machine.

#![allow(missing_docs, clippy::cast_possible_truncation, clippy::struct_field_names)]

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::common::goldens::{cases, conformance_models, gguf_forms};
use crate::common::model::{Model, argmax, log_softmax_at, small_config};
use ascend_llm::device::cpu::{CpuDevice, CpuOptions, Isa};
use ascend_llm::engine::{BuildError, Engine};
use ascend_llm::graph::{CompileOptions, Numerics, Precision};
use ascend_llm::kv_cache::KvDType;
use ascend_llm::model::{Architecture, config_from_hub};

/// Bound that the reference guarantees for an f32 engine (its own f32 results differ from f64 by up to 2e-5).
const EXACT_BOUND: f32 = 2e-4;
/// Fast numerics on float weights only round keys and values to f16: 11 bits of values of a few units, averaged by
/// attention, over two layers.
const FAST_BOUND: f32 = 2e-2;

/// Returns a copy of the folder with `config.hub-style.json` as `config.json`.
fn older_spelling(folder: &Path) -> PathBuf {
    let copy = Path::new(env!("CARGO_TARGET_TMPDIR")).join("hub-style").join(folder.file_name().unwrap());
    std::fs::create_dir_all(&copy).unwrap();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap();
        if name != "config.json" {
            std::fs::copy(&path, copy.join(name)).unwrap();
        }
    }
    std::fs::rename(copy.join("config.hub-style.json"), copy.join("config.json")).unwrap();
    copy
}

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

fn model(folder: &Path, numerics: Numerics, fusion: u8) -> Model {
    model_on(Isa::detect(), folder, numerics, fusion)
}

fn model_on(isa: Isa, folder: &Path, numerics: Numerics, fusion: u8) -> Model {
    let mut config = small_config();
    (config.numerics, config.compile.fusion) = (numerics, Some(fusion));
    let mut options = CpuOptions::default();
    options.isa = Some(isa);
    Model::new(Engine::builder(folder).config(config).device(Arc::new(CpuDevice::new(options).unwrap())))
}

fn with_options(folder: &Path, numerics: Numerics, options: CompileOptions) -> Model {
    let mut config = small_config();
    (config.numerics, config.compile) = (numerics, options);
    Model::new(Engine::builder(folder).config(config))
}

#[test]
fn every_family_has_a_conformance_model() {
    let family_of = |folder: PathBuf| {
        let config = std::fs::read(folder.join("config.json")).unwrap();
        config_from_hub(&config).unwrap_or_else(|error| panic!("{}: {error}", folder.display())).architecture
    };
    let families: HashSet<Architecture> = conformance_models().into_iter().map(family_of).collect();
    for architecture in Architecture::ALL {
        assert!(families.contains(architecture), "{architecture:?}");
    }
}

#[test]
fn exact_numerics_meet_the_reference() {
    for folder in conformance_models() {
        let name = folder.file_name().unwrap().to_string_lossy().into_owned();
        // The spelling does not affect the device, so the older one runs on one instruction set only.
        let paths = Isa::available().iter().map(|&isa| ("new", folder.clone(), isa));
        for (spelling, folder, isa) in paths.chain([("older", older_spelling(&folder), Isa::detect())]) {
            for fusion in [0, 3] {
                let mut model = model_on(isa, &folder, Numerics::Exact, fusion);
                for case in cases(&folder).cases {
                    let tokens = case.input_ids.len();
                    let label = format!("{name}, {spelling} spelling, {isa:?}, fusion {fusion}, {tokens} tokens");
                    model.restart();
                    let rows = model.forward(&case.input_ids, case.input_ids.len());
                    let error = largest_difference(rows.last().unwrap(), &case.last_logits);
                    assert!(error <= EXACT_BOUND, "{label}: the largest difference of a logit is {error}");
                    let argmaxes: Vec<u32> = rows.iter().map(|row| argmax(row)).collect();
                    assert_eq!(argmaxes, case.argmax, "{label}");
                    assert_eq!(case.prompt_logprobs.len(), case.input_ids.len() - 1);
                    for (i, expected) in case.prompt_logprobs.iter().enumerate() {
                        let got = log_softmax_at(&rows[i], case.input_ids[i + 1]);
                        assert!(
                            (got - expected).abs() <= 2.0 * f64::from(EXACT_BOUND),
                            "{label}: got {got}, expected {expected}"
                        );
                    }
                    assert_eq!(model.greedy(&case.input_ids, case.greedy.len()), case.greedy, "{label}");
                }
            }
        }
    }
}

/// The GGUF file of a model has other names, other metadata and another order of query and key rows, but the same
/// results.
#[test]
fn gguf_forms_meet_the_reference() {
    for (file, folder) in gguf_forms() {
        let label = file.display();
        let mut model = model(&file, Numerics::Exact, 3);
        for case in cases(&folder).cases {
            model.restart();
            let rows = model.forward(&case.input_ids, case.input_ids.len());
            let error = largest_difference(rows.last().unwrap(), &case.last_logits);
            assert!(error <= EXACT_BOUND, "{label}: the largest difference of a logit is {error}");
            let argmaxes: Vec<u32> = rows.iter().map(|row| argmax(row)).collect();
            assert_eq!(argmaxes, case.argmax, "{label}");
            assert_eq!(model.greedy(&case.input_ids, case.greedy.len()), case.greedy, "{label}");
        }
    }
}

#[test]
fn fast_numerics_stay_within_their_bound() {
    for folder in conformance_models() {
        for &isa in Isa::available() {
            let mut model = model_on(isa, &folder, Numerics::Fast, 2);
            for case in cases(&folder).cases {
                model.restart();
                let rows = model.forward(&case.input_ids, 1);
                let error = largest_difference(&rows[0], &case.last_logits);
                let bound = if mix_is_bf16(&folder, isa) { BF16_BOUND } else { FAST_BOUND };
                assert!(error <= bound, "{}, {isa:?}: the largest difference of a logit is {error}", folder.display());
            }
        }
    }
}

/// Largest difference of a logit from the f32 reference, by the type of the activations.
///
/// Each input of a product is rounded by 2^-9 (bf16) or 2^-12 (f16), averaged over the sum, through two layers. Keys
/// and values stay in f32 here.
const PRECISION_BOUNDS: [(Precision, f32); 4] =
    [(Precision::F32, EXACT_BOUND), (Precision::BF16, 1.2e-1), (Precision::F16, 1.5e-2), (Precision::Mix, EXACT_BOUND)];
const BF16_BOUND: f32 = PRECISION_BOUNDS[1].1;

/// Returns whether `mix` rounds to bfloat16: only if products of bf16 weights are faster with it.
fn mix_is_bf16(folder: &Path, isa: Isa) -> bool {
    isa == Isa::Avx512Bf16 && folder.ends_with("llama-bf16")
}

/// Each precision stays within its bound, is bit-equal at all fusion levels, and differs from the other precisions.
#[test]
fn precisions_stay_within_their_bounds() {
    let mut worst = [0.0f32; 4];
    for folder in conformance_models() {
        let case = cases(&folder).cases.pop().unwrap();
        let ids = &case.input_ids;
        for ((precision, bound), worst) in PRECISION_BOUNDS.into_iter().zip(&mut worst) {
            let with = |level, overrides: &[(&str, Precision)]| {
                let mut config = small_config();
                (config.numerics, config.kv_dtype) = (Numerics::Fast, Some(KvDType::F32));
                config.compile = CompileOptions::preset(level);
                config.compile.precision = Some(precision);
                for (name, precision) in overrides {
                    config.compile.precision_overrides.insert((*name).to_owned(), *precision);
                }
                Model::new(Engine::builder(&folder).config(config)).forward(ids, ids.len())
            };
            let rows = with(0, &[]);
            let label = format!("{}, {precision:?}", folder.display());
            let error = largest_difference(rows.last().unwrap(), &case.last_logits);
            let mixed = precision == Precision::Mix && mix_is_bf16(&folder, Isa::detect());
            let bound = if mixed { BF16_BOUND } else { bound };
            assert!(error <= bound, "{label}: the largest difference of a logit is {error}");
            *worst = worst.max(error);
            for level in 1..=CompileOptions::MAX_OPT_LEVEL {
                assert!(with(level, &[]) == rows, "{label}: level {level}");
            }
            // Each override has its own effect, and all of them together equal a precision of f32.
            let projections = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"];
            let is_narrow = mixed || matches!(precision, Precision::BF16 | Precision::F16);
            for name in projections {
                assert_eq!(with(2, &[(name, Precision::F32)]) != rows, is_narrow, "{label}: {name}");
            }
            assert_eq!(with(2, &[("layers.1.mlp.down_proj", Precision::F32)]) != rows, is_narrow, "{label}");
            let all = projections.map(|name| (name, Precision::F32));
            assert!(with(2, &all) == model_in_f32(&folder).forward(ids, ids.len()), "{label}");
        }
    }
    println!("largest errors of {PRECISION_BOUNDS:?}: {worst:?}");
}

fn model_in_f32(folder: &Path) -> Model {
    model(folder, Numerics::Exact, 2)
}

#[test]
fn an_exception_for_no_projection_is_refused() {
    for name in ["norm", "logits", "proj", "softmax", "layers.7.mlp.down_proj", "model.norm"] {
        let mut config = small_config();
        config.compile.precision_overrides.insert(name.to_owned(), Precision::F16);
        let error = Engine::builder(&conformance_models()[0]).config(config).build_core().unwrap_err();
        let BuildError::Compile(error) = error else { panic!("{name}: {error:?}") };
        assert!(error.to_string().contains(&format!("precision_overrides: got {name}, expected the name")), "{error}");
    }
}

#[test]
fn fusion_levels_and_chunks_agree_bit_by_bit() {
    for folder in conformance_models() {
        for numerics in [Numerics::Exact, Numerics::Fast] {
            let case = cases(&folder).cases.pop().unwrap();
            let ids = &case.input_ids;
            let reference = model(&folder, numerics, 0).forward(ids, ids.len());
            for level in 0..=CompileOptions::MAX_FUSION {
                let presets = std::iter::once(CompileOptions::preset(level));
                let knobs = [(true, 1), (false, 1), (true, 2), (true, 3), (true, 4), (false, 4)];
                let knobs = knobs.map(|(memory_reuse, parallel_ops)| {
                    let mut options = CompileOptions::default();
                    (options.fusion, options.memory_reuse) = (Some(level), Some(memory_reuse));
                    options.parallel_ops = Some(parallel_ops);
                    options
                });
                for options in presets.chain(knobs) {
                    let got = with_options(&folder, numerics, options.clone()).forward(ids, ids.len());
                    assert!(got == reference, "{}: {options:?}", folder.display());
                }
            }
            for chunk in [1, 7, 16] {
                let mut model = model(&folder, numerics, 3);
                let rows: Vec<Vec<f32>> =
                    ids.chunks(chunk).flat_map(|chunk| model.forward(chunk, chunk.len())).collect();
                assert!(rows == reference, "{}: chunks of {chunk}", folder.display());
            }
        }
    }
}

/// Fusion levels 0 and 3 as above on each instruction set, and chunks.
#[test]
fn fusion_and_chunks_agree_bit_by_bit_on_every_instruction_set() {
    for folder in conformance_models() {
        for (&isa, numerics) in Isa::available().iter().flat_map(|isa| [(isa, Numerics::Exact), (isa, Numerics::Fast)])
        {
            let case = cases(&folder).cases.pop().unwrap();
            let ids = &case.input_ids;
            let label = format!("{}, {isa:?}, {numerics:?}", folder.display());
            let reference = model_on(isa, &folder, numerics, 0).forward(ids, ids.len());
            let mut most = model_on(isa, &folder, numerics, 3);
            assert!(most.forward(ids, ids.len()) == reference, "{label}: fusion 3");
            most.restart();
            let rows: Vec<Vec<f32>> = ids.chunks(7).flat_map(|chunk| most.forward(chunk, chunk.len())).collect();
            assert!(rows == reference, "{label}: chunks of 7");
        }
    }
}
