//! Expected results of the test models, computed by independent references, and read from files.

#![allow(dead_code)] // each test binary uses only a part
#![allow(clippy::struct_field_names, reason = "the names are those of the files")]

use std::path::{Path, PathBuf};

use ascend_llm::model::config_from_hub;
use serde::Deserialize;
use serde::de::DeserializeOwned;

/// Prompt of a conformance model, with expected results.
#[derive(Deserialize)]
pub struct Case {
    pub input_ids: Vec<u32>,
    pub last_logits: Vec<f32>,
    pub argmax: Vec<u32>,
    pub prompt_logprobs: Vec<f64>,
    pub greedy: Vec<u32>,
}

/// Prompt of a model with text, with expected results.
#[derive(Deserialize)]
pub struct Prompt {
    pub name: String,
    pub input_ids: Vec<u32>,
    /// (id, logit) of the top tokens in descending order, for the last four positions (fewer in a shorter prompt).
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

/// Returns the folders of the conformance models.
pub fn conformance_models() -> Vec<PathBuf> {
    entries("conformance")
}

/// Returns the conformance models that an Ascend card supports: those whose head size is a multiple of 16 elements.
pub fn ascend_models() -> Vec<PathBuf> {
    let mut models = conformance_models();
    models.retain(|folder| {
        let config = config_from_hub(&std::fs::read(folder.join("config.json")).unwrap()).unwrap();
        config.head_dim().is_multiple_of(16)
    });
    assert!(models.len() >= 10);
    models
}

/// Returns pairs of the GGUF file and the folder of a conformance model; the folder's goldens also hold for the file.
pub fn gguf_forms() -> Vec<(PathBuf, PathBuf)> {
    let folder = |file: &Path| {
        let name = file.file_name().unwrap().to_str().unwrap();
        let name = name.strip_suffix("-f32.gguf").unwrap_or_else(|| panic!("{name}: expected NAME-f32.gguf"));
        file.parent().unwrap().with_file_name("conformance").join(name)
    };
    entries("conformance-gguf").into_iter().map(|file| (file.clone(), folder(&file))).collect()
}

/// Returns the sorted entries of a folder of the test data.
fn entries(folder: &str) -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(folder);
    let mut entries: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    entries.sort();
    assert!(!entries.is_empty());
    entries
}

/// Returns the cases of a conformance model.
pub fn cases(folder: &Path) -> Cases {
    read(&folder.join("golden.json"))
}

/// Returns the prompts of a file.
pub fn prompts(path: &Path) -> Prompts {
    read(path)
}

fn read<T: DeserializeOwned>(path: &Path) -> T {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}
