//! Tests that a model sharded over ranks yields the logits of the unsharded one within rounding.
//!
//! Its bits are the same in each run, with any chunks and in any batch.

#![allow(missing_docs, clippy::cast_possible_truncation)]

#[allow(dead_code)]
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::common::goldens::conformance_models;
use crate::common::model::{Model, small_config};
use ascend_llm::device::cpu::{CpuDevice, CpuOptions};
use ascend_llm::engine::{BuildError, Engine, EngineConfig};
use ascend_llm::graph::passes::shard;
use ascend_llm::graph::{
    Bucket, CompileError, CompileOptions, CustomCall, CustomOp, CustomOpError, CustomSite, Graph, Numerics, Op, Target,
    TpRank, compile,
};
use ascend_llm::kv_cache::KvDType;
use ascend_llm::model::{self, config_from_hub, decoder_graph};

/// Float weights, f32 activations: sums of up to 512 products in other groups, over three layers.
///
/// Relative to 1 + the largest logit.
const EXACT_BOUND: f32 = 2e-5;
/// int8 activations may be rounded in the other direction if a sum differs in its last bit; so may f16 keys and values.
const FAST_BOUND: f32 = 2e-2;
/// The same for int8 keys and values, whose steps are larger.
const INT8_BOUND: f32 = 2e-2;

fn data(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(path)
}

fn models() -> Vec<PathBuf> {
    let fable = ["fable", "fable/gguf/fable-q8_0.gguf", "fable/gguf/fable-Q4_1.gguf"].map(data);
    conformance_models().into_iter().chain(fable).collect()
}

fn config(ranks: u32, numerics: Numerics, options: &CompileOptions) -> EngineConfig {
    let mut config = small_config();
    (config.max_num_batched_tokens, config.max_num_seqs) = (64, 8);
    (config.tensor_parallel_size, config.numerics, config.compile) = (ranks, numerics, options.clone());
    config
}

fn run(
    path: &Path,
    ranks: u32,
    numerics: Numerics,
    options: &CompileOptions,
    threads: usize,
    chunk: usize,
) -> Vec<f32> {
    run_with(path, config(ranks, numerics, options), threads, chunk)
}

fn run_with(path: &Path, config: EngineConfig, threads: usize, chunk: usize) -> Vec<f32> {
    let mut device = CpuOptions::default();
    device.threads = Some(threads);
    let device = Arc::new(CpuDevice::new(device).unwrap());
    let mut model = Model::new(Engine::builder(path).config(config).device(device));
    let ids: Vec<u32> = (0..40u32).map(|i| (i * i * 7 + 3) % 160).collect();
    ids.chunks(chunk).flat_map(|chunk| model.forward(chunk, chunk.len().min(8)).concat()).collect()
}

fn error(got: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(got.len(), expected.len());
    let largest = expected.iter().fold(1.0f32, |most, x| most.max(1.0 + x.abs()));
    got.iter().zip(expected).map(|(a, b)| (a - b).abs() / largest).fold(0.0, f32::max)
}

#[test]
fn ranks_agree_with_the_whole_and_with_themselves() {
    for (numerics, bound) in [(Numerics::Exact, EXACT_BOUND), (Numerics::Fast, FAST_BOUND)] {
        let mut worst = 0.0f32;
        for path in models() {
            let options = CompileOptions::default();
            let whole = run(&path, 1, numerics, &options, 1, 40);
            for ranks in [2, 4] {
                let label = format!("{}, {numerics:?}, {ranks} ranks", path.display());
                let sharded = run(&path, ranks, numerics, &options, 1, 40);
                let error = error(&sharded, &whole);
                assert!(error <= bound, "{label}: the error is {error}");
                worst = worst.max(error);
                for level in 0..=CompileOptions::MAX_OPT_LEVEL {
                    let threads = 1 + usize::from(level) % 2;
                    let again = run(&path, ranks, numerics, &CompileOptions::preset(level), threads, 40);
                    assert!(again == sharded, "{label}: level {level} on {threads} threads");
                }
            }
        }
        println!("{numerics:?}: largest error {worst}");
    }
}

#[test]
fn chunks_do_not_change_the_bits_of_ranks() {
    for path in [data("fable"), data("conformance/qwen3"), data("fable/gguf/fable-q8_0.gguf")] {
        for ranks in [2, 4] {
            let rows = |chunk| run(&path, ranks, Numerics::Fast, &CompileOptions::preset(3), 2, chunk);
            // Chunks of 8 yield all rows, as chunks of 4 do.
            assert!(rows(8) == rows(4), "{}, {ranks} ranks", path.display());
        }
    }
}

/// A block contains the heads of all ranks next to each other, each with its scales.
#[test]
fn ranks_agree_with_the_whole_over_int8_keys_and_values() {
    for path in [data("fable"), data("fable/gguf/fable-q8_0.gguf")] {
        let run = |ranks, level, threads, chunk| {
            let mut config = config(ranks, Numerics::Fast, &CompileOptions::preset(level));
            config.kv_dtype = Some(KvDType::I8);
            run_with(&path, config, threads, chunk)
        };
        let whole = run(1, 2, 1, 40);
        for ranks in [2, 4] {
            let label = format!("{}, {ranks} ranks", path.display());
            let sharded = run(ranks, 2, 1, 40);
            let error = error(&sharded, &whole);
            println!("{label}: the error is {error}");
            assert!(error <= INT8_BOUND, "{label}: the error is {error}");
            assert!(run(ranks, 3, 2, 40) == sharded, "{label}: level 3 on two threads");
            assert!(run(ranks, 3, 2, 8) == run(ranks, 0, 1, 4), "{label}: chunks");
        }
    }
}

fn graph(path: &str) -> Graph {
    let files = model::open(data(path)).unwrap();
    let config = config_from_hub(&std::fs::read(data(path).join("config.json")).unwrap()).unwrap();
    decoder_graph(&config, files.source.as_ref()).unwrap()
}

/// The products with weights of all ranks add up: nothing is computed twice, nothing is missing.
#[test]
fn ranks_share_the_work() {
    let whole = graph("fable");
    let products = |graph: &Graph| -> usize {
        let elements = |node: &ascend_llm::graph::Node| match &node.op {
            Op::Linear(part) => graph.weight(part.weight).shape.iter().product(),
            _ => 0,
        };
        graph.nodes.iter().map(elements).sum()
    };
    for of in [2, 4] {
        let parts: Vec<Graph> = (0..of).map(|index| shard(&whole, TpRank { index, of }).unwrap()).collect();
        // With more ranks than KV heads, several ranks compute each head's keys and values.
        let shared = if of > 2 { 2 * 3 * 128 * 256 } else { 0 };
        assert_eq!(parts.iter().map(products).sum::<usize>(), products(&whole) + shared, "{of} ranks");
        for part in &parts {
            let count = |op: &Op| part.nodes.iter().filter(|node| node.op == *op).count();
            // All-reduce after the embedding and after attention and MLP of each layer; all-gather of the logits.
            assert_eq!((count(&Op::AllReduce), count(&Op::AllGather)), (1 + 2 * 3, 1));
            let bucket = Bucket { tokens: 64, logit_rows: 8, seqs: 8, kv_tokens: 256 };
            for level in 0..=CompileOptions::MAX_OPT_LEVEL {
                let options = CompileOptions::preset(level);
                let plan = compile(part, Target::new(128), Numerics::Exact, &options, bucket).unwrap();
                plan.check().unwrap();
                assert!(plan.dump().contains(&format!("rank={}/{of}", part.rank.index)), "{}", plan.dump());
            }
        }
    }
}

#[derive(Debug)]
struct Nothing;

impl CustomOp for Nothing {
    fn name(&self) -> &'static str {
        "nothing"
    }

    fn run(&self, _: &CustomCall<'_>, _: &[f32], _: &mut [f32]) -> Result<(), CustomOpError> {
        Ok(())
    }
}

#[test]
fn models_that_cannot_be_sharded_are_rejected_with_the_reason() {
    let refused = |path: &str, ranks: u32, words: &str| {
        let config = config(ranks, Numerics::Exact, &CompileOptions::default());
        match Engine::builder(data(path)).config(config).build_core() {
            Err(BuildError::Compile(error @ CompileError::Shard { .. })) => {
                assert!(error.to_string().contains(words), "{error}");
            }
            other => panic!("{path}, {ranks} ranks: {other:?}"),
        }
    };
    refused("fable", 3, "4 query heads over 2 KV heads");
    refused("fable", 8, "4 query heads over 2 KV heads");
    refused("conformance/llama-mha-untied-bias", 8, "4 query heads over 4 KV heads");
    let config = config(2, Numerics::Exact, &CompileOptions::default());
    let builder = Engine::builder(data("fable")).config(config);
    let error = builder.custom_op(CustomSite::AfterEmbedding, Arc::new(Nothing)).build_core().unwrap_err();
    let BuildError::Compile(error) = error else { panic!("{error:?}") };
    assert!(error.to_string().contains("custom operation nothing runs on one rank only"), "{error}");
    let bad = shard(&graph("fable"), TpRank { index: 2, of: 2 });
    assert!(matches!(bad, Err(CompileError::Shard { .. })), "{bad:?}");
}

/// The progress of loading covers the bytes read by all ranks, and ends at the total.
#[test]
fn progress_ends_at_the_whole() {
    for ranks in [1, 2] {
        let reports = Arc::new(std::sync::Mutex::new(Vec::new()));
        let sender = Arc::clone(&reports);
        let config = config(ranks, Numerics::Fast, &CompileOptions::default());
        let builder = Engine::builder(data("fable")).config(config);
        let told = builder.on_progress(move |progress| sender.lock().unwrap().push(progress));
        drop(told.build_runner().unwrap());
        let reports = reports.lock().unwrap();
        assert!(reports.windows(2).all(|pair| pair[0].done_bytes <= pair[1].done_bytes), "{ranks} ranks: {reports:?}");
        let last = reports.last().unwrap();
        assert_eq!(last.done_bytes, last.total_bytes, "{ranks} ranks");
    }
}
