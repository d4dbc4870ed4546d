//! Tests that no byte of the arena is read outside of the lifetime of its value.
//!
//! Outputs stay the same if all dead bytes are filled with NaN before each step.

#![allow(missing_docs, clippy::cast_possible_truncation)]

#[allow(dead_code)]
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::common::goldens::conformance_models;
use crate::common::model::{Model, small_config};
use ascend_llm::device::cpu::{CpuDevice, CpuOptions, Poison};
use ascend_llm::engine::Engine;
use ascend_llm::graph::{CompileOptions, Numerics, RowStatus};

/// Uneven chunks: a prompt, a shorter run, single tokens, so that the arena still contains rows of an earlier launch.
const CHUNKS: [usize; 5] = [21, 6, 1, 1, 17];

fn models() -> Vec<PathBuf> {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    let fable = ["fable", "fable/gguf/fable-q8_0.gguf", "fable/gguf/fable-Q4_1.gguf"].map(|path| data.join(path));
    conformance_models().into_iter().chain(fable).collect()
}

fn device(threads: usize, poison: Poison) -> Arc<CpuDevice> {
    let mut options = CpuOptions::default();
    (options.threads, options.poison) = (Some(threads), poison);
    Arc::new(CpuDevice::new(options).unwrap())
}

fn model(path: &Path, device: &Arc<CpuDevice>, numerics: Numerics, options: &CompileOptions) -> Model {
    let mut config = small_config();
    (config.max_num_batched_tokens, config.max_num_seqs) = (64, 8);
    (config.numerics, config.compile) = (numerics, options.clone());
    Model::new(Engine::builder(path).config(config).device(device.clone()))
}

/// Returns the logits and the status of the last rows of each chunk (one, or all of a short chunk).
fn run(mut model: Model) -> (Vec<Vec<f32>>, Vec<u8>) {
    let (mut logits, mut status, mut id) = (Vec::new(), Vec::new(), 7);
    for chunk in CHUNKS {
        let ids: Vec<u32> = (0..chunk)
            .map(|_| {
                id = (id * 31 + 17) % 64;
                id
            })
            .collect();
        let (rows, states) = model.forward_unchecked(&ids, chunk.min(6));
        logits.extend(rows);
        status.extend(states);
    }
    (logits, status)
}

fn levels() -> Vec<CompileOptions> {
    let reuse = (0..=CompileOptions::MAX_FUSION).flat_map(|level| [(level, true), (level, false)]);
    let with = |(level, memory_reuse)| {
        let mut options = CompileOptions::default();
        (options.fusion, options.memory_reuse) = (Some(level), Some(memory_reuse));
        options
    };
    let mut multi_stream = CompileOptions::preset(3);
    multi_stream.parallel_ops = Some(4);
    let mut plain_multi_stream = CompileOptions::preset(1);
    (plain_multi_stream.fusion, plain_multi_stream.parallel_ops) = (Some(0), Some(4));
    reuse.map(with).chain([multi_stream, plain_multi_stream]).collect()
}

#[test]
fn nothing_reads_what_is_dead() {
    let clean = device(1, Poison::Off);
    let poisoned = [device(1, Poison::Dead), device(2, Poison::Dead)];
    for path in models() {
        for numerics in [Numerics::Exact, Numerics::Fast] {
            let (expected, _) = run(model(&path, &clean, numerics, &levels()[0]));
            for options in levels() {
                for device in &poisoned {
                    let (logits, status) = run(model(&path, device, numerics, &options));
                    let label = format!("{}, {numerics:?}, {options:?}, {} threads", path.display(), device.threads());
                    assert!(status.iter().all(|status| *status == RowStatus::Ok as u8), "{label}: {status:?}");
                    assert!(logits == expected, "{label}");
                }
            }
        }
    }
}

/// Filling live bytes as well must change the outputs; otherwise the test above would prove nothing.
#[test]
fn filling_live_bytes_changes_the_outputs() {
    let device = device(1, Poison::All);
    for path in models() {
        for options in levels() {
            let (_, status) = run(model(&path, &device, Numerics::Fast, &options));
            let all_changed = status.iter().all(|status| *status == RowStatus::NonFinite as u8);
            assert!(all_changed, "{}, {options:?}: {status:?}", path.display());
        }
    }
}
