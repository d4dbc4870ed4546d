//! Tests of weights from quantized files on the simulated Ascend card.
//!
//! Each weight layout yields the file's logits within its bound and uses the expected memory. Weights that the
//! operations do not support are stored in 16 bits, and a note reports that.

#![allow(clippy::cast_possible_truncation, reason = "the numbers of a test are small")]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use crate::common::goldens::{Prompts, cases, prompts};
use crate::common::model::Model;
use crate::common::sim_npu::Npu;
use ascend_llm::device::ascend::{Activations, AscendDevice, AscendOptions, WeightForm, WeightTiles};
use ascend_llm::device::{Device, DeviceError, OwnedProgram, OwnedWeights, Telemetry as _};
use ascend_llm::engine::{CacheBudget, Engine, EngineConfig, Request};
use ascend_llm::graph::{Bucket, CompileOptions, CostRates, Numerics, OverflowPolicy, Weight, WeightRole, compile};
use ascend_llm::kv_cache::{BlockId, KvGeometry};
use ascend_llm::model::{self, config_from_gguf, config_from_hub, decoder_graph};
use ascend_llm::runner::{ForwardInput, ModelExecutor as _, ModelRunner, Programs, RunnerShape};
use ascend_llm::sampler::SamplingParams;
use ascend_llm::weights::{DType, MemorySource, ModelKind};

/// Block formats of the story model.
const FILES: [&str; 8] = ["q8_0", "q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K_M", "Q5_K_M", "Q6_K"];

fn story(kind: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/data/fable/gguf/fable-{kind}.gguf"))
}

fn golden(kind: &str) -> Prompts {
    prompts(&Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/data/fable/gguf/golden-{kind}.json")))
}

fn config() -> EngineConfig {
    let mut config = EngineConfig::default();
    (config.max_num_batched_tokens, config.max_num_seqs) = (64, 8);
    config.kv_cache = CacheBudget::Blocks(16);
    config
}

fn on(device: Arc<dyn Device>, path: &Path) -> Model {
    Model::new(Engine::builder(path).config(config()).device(device))
}

fn open(npu: &Npu, weights: WeightForm, change: impl FnOnce(&mut AscendOptions)) -> Arc<AscendDevice> {
    let device = npu.try_device(|options| {
        options.weights = weights;
        change(options);
    });
    device.expect("the simulated card opens")
}

/// Returns the logits of a prompt's last rows, and of the decode steps after it.
fn trace(mut model: Model) -> Vec<f32> {
    let mut all = model.forward(&[1, 40, 100, 7, 300, 21, 5, 9, 77, 650], 4);
    for step in 0..4 {
        all.extend(model.forward(&[step * 131 % 700 + 3], 1));
    }
    all.concat()
}

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, |most, x| if x <= most { most } else { x })
}

/// Largest difference of a top logit from the f32 reference of the same file; logits are up to 15.
///
/// In f16, the exact layouts are as close as widened weights, those with offsets nearly so, and those with one scale
/// for two groups less close.
const F16_BOUND: f32 = 6e-2;
const Q6_BOUND: f32 = 1.5e-1;
const DYNAMIC_BOUND: f32 = 6e-1;

#[test]
fn every_form_of_every_file_meets_its_reference() {
    for kind in FILES {
        let golden = golden(kind);
        for (form, bound) in [
            (WeightForm::Widened, F16_BOUND),
            (WeightForm::WeightOnly, if kind == "Q6_K" { Q6_BOUND } else { F16_BOUND }),
            (WeightForm::Dynamic, DYNAMIC_BOUND),
        ] {
            let npu = Npu::new();
            let device = open(&npu, form, |_| ());
            let mut model = on(device.clone(), &story(kind));
            assert!(device.notes().iter().all(|note| !note.contains("stored as")), "{kind}: {:?}", device.notes());
            let (mut worst, start) = (0.0f32, Instant::now());
            // The long prompt would not test the weights further.
            for prompt in golden.prompts.iter().filter(|prompt| prompt.input_ids.len() <= 64) {
                let label = format!("{} of {kind} in {form:?}", prompt.name);
                model.restart();
                let tops = &prompt.top20_last_positions;
                let rows = model.forward(&prompt.input_ids, tops.len());
                for (row, top) in rows.iter().zip(tops) {
                    for (id, logit) in top {
                        worst = worst.max((row[*id as usize] - logit).abs());
                    }
                }
                assert!(worst <= bound, "{label}: the largest difference of a logit is {worst}");
                let sure = prompt.greedy_top2_gap.iter().take_while(|gap| **gap > 2.0 * bound).count().min(12);
                assert_eq!(model.greedy(&prompt.input_ids, sure), prompt.greedy64[..sure], "{label}");
            }
            println!("{kind} in {form:?}: largest error {worst} of {bound}, {:?}", start.elapsed());
            drop(model);
            drop(device);
            npu.assert_clean();
        }
    }
}

/// If the shards of a file's matrices over two cards consist of whole blocks, each card holds its part like a single
/// card.
#[test]
fn cards_hold_their_parts_in_the_same_forms() {
    for (kind, form) in
        [("q8_0", WeightForm::WeightOnly), ("Q4_1", WeightForm::WeightOnly), ("q4_0", WeightForm::Dynamic)]
    {
        let run = |cards: u32| {
            let npu = Npu::with(&[("devices", cards.into())]);
            let device = open(&npu, form, |options| options.cards = (0..cards).collect());
            let mut config = config();
            config.tensor_parallel_size = cards;
            let builder = Engine::builder(story(kind)).config(config).device(device.clone());
            let logits = trace(Model::new(builder));
            assert!(device.notes().iter().all(|note| !note.contains("stored as")), "{kind}: {:?}", device.notes());
            drop(device);
            npu.assert_clean();
            logits
        };
        let error = largest_difference(&run(1), &run(2));
        // int8 rows are scaled by the largest element of each card's own shard.
        let bound = if form == WeightForm::Dynamic { DYNAMIC_BOUND } else { F16_BOUND };
        println!("{kind} in {form:?}: {error} of {bound}");
        assert!(error <= bound, "{kind} in {form:?}: two cards differ from one by {error}");
    }
}

/// Formats whose integers and scales the product uses unchanged: the weights are bit-equal to widened ones.
///
/// (Without fused operations, which round SwiGLU once instead of twice.)
#[test]
fn exact_forms_give_the_bits_of_widened_weights() {
    for kind in ["q8_0", "q4_0", "Q5_0"] {
        let npu = Npu::new();
        let run = |form| {
            let mut config = config();
            config.compile.fusion = Some(1);
            let device = open(&npu, form, |_| ());
            trace(Model::new(Engine::builder(story(kind)).config(config).device(device)))
        };
        let (widened, held) = (run(WeightForm::Widened), run(WeightForm::WeightOnly));
        assert!(npu.sim.count("aclnnWeightQuantBatchMatmulV2") > 0);
        assert!(held == widened, "{kind}: {}", largest_difference(&held, &widened));
        npu.assert_clean();
    }
}

#[test]
fn bf16_activations_take_quantized_weights() {
    let npu = Npu::new();
    for (form, bound) in [(WeightForm::WeightOnly, 0.6), (WeightForm::Dynamic, 1.0)] {
        for kind in ["q8_0", "Q4_1"] {
            let bf16 = |options: &mut AscendOptions| options.activations = Activations::BF16;
            let exact = trace(on(open(&npu, WeightForm::Widened, |_| ()), &story(kind)));
            let error = largest_difference(&trace(on(open(&npu, form, bf16), &story(kind))), &exact);
            println!("{kind} in {form:?}, bf16: largest error {error} of {bound}");
            assert!(error <= bound, "{kind} in {form:?}: {error}");
            npu.assert_clean();
        }
    }
}

/// Tiles contain the same numbers in another order. (Without fused operations, as above: tiled gates are not joined.)
#[test]
fn tiles_change_no_bit() {
    let npu = Npu::new();
    let run = |form, tiles| {
        let mut config = config();
        config.compile.fusion = Some(1);
        let device = open(&npu, form, |options| options.tiles = tiles);
        let all = trace(Model::new(Engine::builder(story("Q6_K")).config(config).device(device.clone())));
        assert!(device.notes().iter().all(|note| !note.contains("tile") && !note.contains("stored as")));
        all
    };
    let tiled = |npu: &Npu| npu.sim.count("aclnnTransMatmulWeight");
    let rows = run(WeightForm::Widened, WeightTiles::Never);
    assert_eq!((tiled(&npu), npu.sim.count("aclnnMatmulWeightNz")), (0, 0));
    assert!(run(WeightForm::Widened, WeightTiles::Always) == rows);
    // Seven matrices in each of three layers; the output projection is tied to the embedding table.
    assert_eq!(tiled(&npu), 21);
    assert!(npu.sim.count("aclnnMatmulWeightNz") > 0);
    let rows = run(WeightForm::Dynamic, WeightTiles::Never);
    assert!(run(WeightForm::Dynamic, WeightTiles::Int8) == rows);
    assert_eq!(tiled(&npu), 42);
    npu.assert_clean();
}

/// Biases are added after tiled products.
///
/// Models with biases, other head sizes and sliding windows stay within the bounds of row-major weights.
#[test]
fn tiled_models_stay_within_the_bounds_of_rows() {
    let npu = Npu::new();
    for name in ["qwen2", "qwen3", "llama-mha-untied-bias", "llama-bf16"] {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/conformance").join(name);
        let device = open(&npu, WeightForm::WeightOnly, |options| options.tiles = WeightTiles::Always);
        let mut model = on(device, &folder);
        let bound = if name == "llama-bf16" { 3e-1 } else { 4e-2 };
        for case in cases(&folder).cases {
            model.restart();
            let rows = model.forward(&case.input_ids, 1);
            let error = largest_difference(&rows[0], &case.last_logits);
            assert!(error <= bound, "{name}: the largest difference of a logit is {error}");
        }
    }
    assert!(npu.sim.count("aclnnMatmulWeightNz") > 0);
    npu.assert_clean();
}

/// Returns a prompt's logits from a hub model whose matrices are first rounded to `Q8_0`.
fn rounded_model_on(device: Arc<dyn Device>, folder: &Path, prompt: &[u32]) -> Vec<f32> {
    let config = config_from_hub(&std::fs::read(folder.join("config.json")).unwrap()).unwrap();
    let files = model::open(folder).unwrap();
    let mut source = MemorySource::new();
    for name in files.source.names() {
        let tensor = files.source.tensor(&name).unwrap();
        let dtype = if tensor.shape.len() == 2 && tensor.row_len() % 32 == 0 { DType::Q8_0 } else { tensor.dtype };
        source.insert_f32(name, dtype, tensor.shape, &tensor.to_f32()).unwrap();
    }
    let graph = decoder_graph(&config, &source).unwrap();
    let uploaded = Arc::new(OwnedWeights::upload(&device, &source, &graph.weights, 0).unwrap());
    let rows = prompt.len();
    let bucket = Bucket { tokens: rows, logit_rows: rows, seqs: 1, kv_tokens: 128 };
    let mut options = CompileOptions::default();
    options.overflow = Some(OverflowPolicy::Error);
    let plan = compile(&graph, device.caps().target, Numerics::Fast, &options, bucket).unwrap();
    let (layers, kv_heads, head_dim, block_size) = (config.layers.len(), config.kv_heads(), config.head_dim(), 128);
    let dtype = device.kv_dtype(&graph.weights).unwrap();
    let geometry = KvGeometry::new(layers, kv_heads, head_dim, block_size, dtype);
    let layout = device.kv_layout(&geometry).unwrap();
    let rates = vec![CostRates::new(&plan, 2)];
    let program = OwnedProgram::load(&device, &[plan], &[uploaded], &geometry).unwrap();
    let programs = Programs::new(vec![(bucket, program)], rates);
    let shape = RunnerShape::new(bucket, block_size, 1, config.vocab_size);
    let mut runner = ModelRunner::new(device, programs, layout, shape).unwrap();
    let input = ForwardInput::new(prompt.to_vec(), vec![rows as u32], vec![rows as u32], vec![BlockId(0)])
        .with_logit_rows((0..rows as u32).collect());
    runner.forward(input).unwrap().logits.logits.to_vec()
}

/// Biases are added after a product that does not support them.
#[test]
fn quantized_models_with_biases_agree_with_widened_ones() {
    let npu = Npu::new();
    let prompt = [1, 40, 100, 7, 90, 21, 5];
    for name in ["qwen2", "llama-mha-untied-bias"] {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/conformance").join(name);
        let f16 = |options: &mut AscendOptions| options.activations = Activations::F16;
        let widened = rounded_model_on(open(&npu, WeightForm::Widened, f16), &folder, &prompt);
        for (form, bound) in [(WeightForm::WeightOnly, 4e-2), (WeightForm::Dynamic, 5e-1)] {
            let device = open(&npu, form, f16);
            let got = rounded_model_on(device.clone(), &folder, &prompt);
            let error = largest_difference(&got, &widened);
            println!("{name} in {form:?}: {error} of {bound}, {:?}", device.notes());
            assert!(error > 0.0 && error <= bound, "{name} in {form:?}: the largest difference of a logit is {error}");
        }
    }
    assert!(npu.sim.count("aclnnWeightQuantBatchMatmulV2") > 0 && npu.sim.count("aclnnQuantMatmulV4") > 0);
    npu.assert_clean();
}

#[test]
fn replays_and_steps_in_flight_change_no_bit() {
    let npu = Npu::new();
    let cases = [
        ("Q4_K_M", WeightForm::WeightOnly, WeightTiles::Never),
        ("Q6_K", WeightForm::Dynamic, WeightTiles::Int8),
        ("q8_0", WeightForm::Widened, WeightTiles::Always),
    ];
    for (kind, form, tiles) in cases {
        let run = |capture: bool| {
            let device = open(&npu, form, |options| (options.capture, options.tiles) = (capture, tiles));
            trace(on(device, &story(kind)))
        };
        let replays = npu.sim.count("aclmdlRIExecuteAsync");
        let captured = run(true);
        assert_eq!(npu.sim.count("aclmdlRIExecuteAsync") - replays, 4, "each decode step must be a replay");
        assert!(captured == run(false), "{kind} in {form:?}");
        let answers = |depth: u32| {
            let mut config = config();
            config.pipeline_depth = Some(depth);
            let device = open(&npu, form, |options| options.tiles = tiles);
            let mut core = Engine::builder(story(kind)).config(config).device(device).build_core().unwrap();
            let mut params = SamplingParams::default();
            (params.temperature, params.max_tokens, params.ignore_eos) = (0.0, Some(12), true);
            let prompts = [vec![1, 40, 100, 7], vec![1, 9], vec![1, 300, 21, 5, 8, 13]];
            let handles =
                prompts.map(|prompt| core.submit(Request::tokens(prompt).with_sampling(params.clone())).unwrap());
            while !core.is_idle() {
                core.step().unwrap();
            }
            handles.map(|handle| handle.collect_output().unwrap().choices[0].token_ids.clone())
        };
        let one = answers(1);
        assert!(answers(2) == one && answers(3) == one, "{kind} in {form:?}");
        npu.assert_clean();
    }
}

/// Bytes on the card that an upload uses, the weights, and the value whose drop frees them.
type Uploaded = (u64, Vec<Weight>, OwnedWeights);

fn uploaded(npu: &Npu, device: &Arc<dyn Device>, path: &Path) -> Result<Uploaded, DeviceError> {
    let files = model::open(path).unwrap();
    let ModelKind::Gguf(file) = &files.kind else { panic!("the model is not a GGUF file") };
    let graph = decoder_graph(&config_from_gguf(file).unwrap(), files.source.as_ref()).unwrap();
    let before = npu.sim.live("device_bytes");
    let weights = OwnedWeights::upload(device, files.source.as_ref(), &graph.weights, 0)?;
    Ok((npu.sim.live("device_bytes") - before, graph.weights, weights))
}

/// Returns the size of a matrix element in its layout, in half bits.
fn half_bits(form: WeightForm, dtype: DType) -> u64 {
    match (form, dtype) {
        (WeightForm::Widened, _) | (_, DType::F32) => 32,
        (WeightForm::Dynamic, _) => 16,
        (_, DType::Q4_0) => 9,
        (_, DType::Q4_1 | DType::Q4_K) => 10,
        (_, DType::Q5_1 | DType::Q5_K) => 18,
        (_, DType::Q5_0 | DType::Q6_K | DType::Q8_0) => 17,
        other => panic!("{other:?}"),
    }
}

/// Matrices use the bits of their layout, embedding tables and norms 16 bits per element.
///
/// Each allocation ends at a multiple of 512 bytes, and each int8 row has four additional bytes.
#[test]
fn the_card_holds_as_many_bits_as_the_layout_defines() {
    let npu = Npu::new();
    for kind in FILES {
        for form in [WeightForm::Widened, WeightForm::WeightOnly, WeightForm::Dynamic] {
            let device: Arc<dyn Device> = open(&npu, form, |_| ());
            let (bytes, list, weights) = uploaded(&npu, &device, &story(kind)).unwrap();
            let half_bits = |weight: &Weight| {
                let elements = weight.shape.iter().product::<usize>() as u64;
                elements * if weight.role == WeightRole::Matrix { half_bits(form, weight.dtype) } else { 32 }
            };
            let least = list.iter().map(half_bits).sum::<u64>() / 16;
            assert!(
                (least..least + 90 * 512).contains(&bytes),
                "{kind} in {form:?}: {bytes} bytes, expected about {least}"
            );
            drop((weights, device));
            npu.assert_clean();
        }
    }
}

/// Returns a library without an operation (both its phases), or without a function that is no operation.
fn without(npu: &Npu, lacking: &str) -> PathBuf {
    let query = format!("{lacking}GetWorkspaceSize");
    let symbols = [lacking, &query];
    npu.library_without(&symbols[..if lacking.contains("Calculate") { 1 } else { 2 }])
}

#[test]
fn weights_without_operations_are_held_in_16_bits_with_a_note() {
    let cases = [
        (WeightForm::WeightOnly, WeightTiles::Never, "aclnnWeightQuantBatchMatmulV2"),
        (WeightForm::Dynamic, WeightTiles::Int8, "aclnnQuantMatmulV4"),
        (WeightForm::Dynamic, WeightTiles::Never, "aclnnDynamicQuant"),
        (WeightForm::Widened, WeightTiles::Always, "aclnnTransMatmulWeight"),
        (WeightForm::Widened, WeightTiles::Always, "aclnnCalculateMatmulWeightSizeV2"),
    ];
    let npu = Npu::new();
    let widened = trace(on(open(&npu, WeightForm::Widened, |_| ()), &story("q8_0")));
    for (form, tiles, lacking) in cases {
        let device =
            open(&npu, form, |options| (options.tiles, options.library) = (tiles, Some(without(&npu, lacking))));
        assert!(trace(on(device.clone(), &story("q8_0"))) == widened, "{lacking}");
        let notes = device.telemetry().unwrap().notes();
        // Four shapes: queries and outputs, keys and values, gates, down projections.
        let reported = notes.iter().filter(|note| note.contains("stored as 16 bits") && note.contains(lacking)).count();
        assert_eq!(reported, 4, "{lacking}: {notes:?}");
        drop(device);
        npu.assert_clean();
    }
    // int8 tiles require more than int8 rows; 16-bit tiles use the plain product if the tiled one is missing.
    let run = |form, tiles, lacking: &str| {
        let device =
            open(&npu, form, |options| (options.tiles, options.library) = (tiles, Some(without(&npu, lacking))));
        (trace(on(device.clone(), &story("q8_0"))), device.notes())
    };
    let rows = trace(on(open(&npu, WeightForm::Dynamic, |options| options.tiles = WeightTiles::Never), &story("q8_0")));
    let (without, notes) = run(WeightForm::Dynamic, WeightTiles::Int8, "aclnnTransMatmulWeight");
    assert!(
        without == rows && notes.iter().any(|note| note.contains("stored as rows of int8 instead of tiles")),
        "{notes:?}"
    );
    let tiled =
        trace(on(open(&npu, WeightForm::Widened, |options| options.tiles = WeightTiles::Always), &story("q8_0")));
    let (without, notes) = run(WeightForm::Widened, WeightTiles::Always, "aclnnMatmulWeightNz");
    assert!(without == tiled && notes.iter().all(|note| !note.contains("stored as")), "{notes:?}");
    npu.assert_clean();
}

#[test]
fn shapes_the_operations_refuse_are_held_in_16_bits_with_a_note() {
    let npu = Npu::new();
    let weight = |index: usize, shape: [usize; 2], dtype| {
        let (name, role) = (format!("w{index}"), WeightRole::Matrix);
        Weight::new(name, shape.to_vec(), dtype, role)
    };
    // Too many rows; columns not longer than a group; an odd number of int4 rows.
    let shapes =
        [([65_568, 64], DType::Q8_0), ([64, 32], DType::Q4_0), ([63, 64], DType::Q4_0), ([64, 64], DType::Q4_0)];
    let mut source = MemorySource::new();
    let mut list = Vec::new();
    for (index, (shape, dtype)) in shapes.into_iter().enumerate() {
        let bytes = vec![0; dtype.bytes_for(shape[0] * shape[1]).unwrap()];
        source.insert(format!("w{index}"), dtype, &shape, bytes).unwrap();
        list.push(weight(index, shape, dtype));
    }
    let device: Arc<dyn Device> = npu.device();
    let before = npu.sim.live("device_bytes");
    let weights = OwnedWeights::upload(&device, &source, &list, 0).unwrap();
    let used_bytes = npu.sim.live("device_bytes") - before;
    let expected = 2 * (65_568 * 64 + 64 * 32 + 63 * 64) + 64 * 64 * 45 / 80;
    assert!((expected..expected + 16 * 512).contains(&used_bytes), "{used_bytes} bytes, expected about {expected}");
    let notes = device.telemetry().unwrap().notes();
    for shape in ["q8_0 matrices of 65568 by 64", "q4_0 matrices of 64 by 32", "q4_0 matrices of 63 by 64"] {
        assert!(notes.iter().any(|note| note.contains(shape) && note.contains("16 bits")), "{shape}: {notes:?}");
    }
    assert!(notes.iter().all(|note| !note.contains("64 by 64")), "{notes:?}");
    drop((weights, device));
    npu.assert_clean();
}

#[test]
fn weights_of_impossible_sizes_are_refused() {
    let npu = Npu::new();
    for (form, tiles) in [
        (WeightForm::WeightOnly, WeightTiles::Always),
        (WeightForm::Dynamic, WeightTiles::Int8),
        (WeightForm::Widened, WeightTiles::Never),
    ] {
        let device: Arc<dyn Device> = open(&npu, form, |options| options.tiles = tiles);
        for shape in [
            vec![],
            vec![usize::MAX, 0],
            vec![usize::MAX, 32],
            vec![1 << 62, 2],
            vec![1 << 58, 2],
            vec![1 << 50, 32],
            vec![2, 1 << 58],
            vec![4, 5, 6],
        ] {
            for dtype in [DType::F16, DType::Q8_0, DType::Q4_K] {
                let (name, role) = ("w".to_owned(), WeightRole::Matrix);
                let weight = Weight::new(name, shape.clone(), dtype, role);
                let uploaded = OwnedWeights::upload(&device, &MemorySource::new(), &[weight], 0);
                assert!(uploaded.is_err(), "{shape:?} of {dtype} in {form:?}");
            }
        }
        drop(device);
        npu.assert_clean();
    }
}

/// If any call of an upload fails, the failure is a typed error or has no effect, and no object is left on the card.
#[test]
fn any_call_of_an_upload_may_fail() {
    let npu = Npu::new();
    let cases =
        [("Q4_1", WeightForm::WeightOnly, WeightTiles::Never), ("q8_0", WeightForm::Dynamic, WeightTiles::Int8)];
    for (kind, form, tiles) in cases {
        let device: Arc<dyn Device> = open(&npu, form, |options| options.tiles = tiles);
        let before = npu.sim.count("*");
        drop(uploaded(&npu, &device, &story(kind)).unwrap());
        let calls = npu.sim.count("*") - before;
        drop(device);
        let (mut failed, mut tried) = (0, 0);
        for nth in (1..=calls).step_by((calls / 60).max(1) as usize) {
            for code in [207_001, 161_002, 507_015] {
                npu.sim.reset();
                let device: Arc<dyn Device> = open(&npu, form, |options| options.tiles = tiles);
                npu.sim.fail_call("*", nth, code);
                failed += u32::from(uploaded(&npu, &device, &story(kind)).is_err());
                tried += 1;
                drop(device);
                npu.assert_clean();
            }
        }
        println!("{kind} in {form:?}: {failed} of {tried} failed");
        assert!(failed > tried / 3, "{failed} of {tried}");
    }
}
