//! What the independent references say of the test models, as their files have it.

#![allow(dead_code)] // each test file uses a part
#![allow(clippy::struct_field_names, reason = "names of the files")]

use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::DeserializeOwned;

/// A prompt of a conformance model.
#[derive(Deserialize)]
pub struct Case {
    pub input_ids: Vec<u32>,
    pub last_logits: Vec<f32>,
    pub argmax: Vec<u32>,
    pub prompt_logprobs: Vec<f64>,
    pub greedy: Vec<u32>,
}

/// A prompt of a model with text.
#[derive(Deserialize)]
pub struct Prompt {
    pub name: String,
    pub input_ids: Vec<u32>,
    /// Of the last four positions (fewer in a shorter prompt): (id, logit), best first.
    pub top20_last_positions: Vec<Vec<(u32, f32)>>,
    pub prompt_logprobs: Vec<f64>,
    pub greedy64: Vec<u32>,
    pub greedy_top2_gap: Vec<f32>,
}

#[derive(Deserialize)]
pub struct Cases {
    pub cases: Vec<Case>,
}

#[derive(Deserialize)]
pub struct Prompts {
    pub prompts: Vec<Prompt>,
}

/// Folders of the conformance models.
pub fn conformance_models() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/conformance");
    let mut models: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    models.sort();
    assert_eq!(models.len(), 10);
    models
}

/// The cases of a conformance model.
pub fn cases(folder: &Path) -> Cases {
    read(&folder.join("golden.json"))
}

/// The prompts of a file.
pub fn prompts(path: &Path) -> Prompts {
    read(path)
}

fn read<T: DeserializeOwned>(path: &Path) -> T {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}
