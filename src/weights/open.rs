//! Opens the weights at a path in any of the supported forms.

#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::gguf::{Conventions, Gguf};
use super::safetensors::{INDEX_FILE, SINGLE_FILE, SafetensorsFolder};
use super::{WeightError, WeightSource};

/// Weights of a model, and the form of its files, which determines the location of configuration and tokenizer.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ModelFiles {
    /// Tensors, by hub name.
    pub source: Arc<dyn WeightSource>,
    /// Form of the files.
    pub kind: ModelKind,
}

/// Form of a model on disk.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum ModelKind {
    /// One GGUF file; its metadata contains the configuration and the tokenizer.
    Gguf(Arc<Gguf>),
    /// Folder with `config.json`, safetensors weights and, if the model has a tokenizer, the tokenizer's files.
    Folder(PathBuf),
}

/// Opens the weights of a model.
///
/// The path is a `.gguf` file, a folder with `config.json` and safetensors weights, or a folder with exactly one
/// `.gguf` file. If a folder contains both forms, safetensors takes precedence.
///
/// `conventions` returns the conventions of a GGUF file's architecture. [`model::open`](crate::model::open) passes
/// those of the supported families.
///
/// # Errors
/// A [`WeightError`] with the file or folder and the reason.
pub fn open(
    path: impl AsRef<Path>,
    conventions: impl FnOnce(&str) -> Option<Conventions>,
) -> Result<ModelFiles, WeightError> {
    let path = path.as_ref();
    let meta = std::fs::metadata(path).map_err(|error| WeightError::Io { path: path.to_owned(), error })?;
    if !meta.is_dir() {
        if !has_gguf_extension(path) {
            let looked_for = "expected a .gguf file, or a folder with config.json and model.safetensors".to_owned();
            return Err(WeightError::NotAModel { path: path.to_owned(), looked_for });
        }
        return open_gguf(path, conventions);
    }
    let has_config = path.join("config.json").is_file();
    let has_weights = path.join(INDEX_FILE).is_file() || path.join(SINGLE_FILE).is_file();
    if has_config && has_weights {
        let source = Arc::new(SafetensorsFolder::open(path)?);
        return Ok(ModelFiles { source, kind: ModelKind::Folder(path.to_owned()) });
    }
    let ggufs = gguf_files(path)?;
    if let [only] = ggufs.as_slice() {
        return open_gguf(only, conventions);
    }
    let found = |there: bool| if there { "found" } else { "not found" };
    let looked_for = format!(
        "config.json {}, {SINGLE_FILE} or {INDEX_FILE} {}, {} .gguf files; expected config.json with weights, or exactly \
         one .gguf file",
        found(has_config),
        found(has_weights),
        ggufs.len(),
    );
    Err(WeightError::NotAModel { path: path.to_owned(), looked_for })
}

fn open_gguf(path: &Path, conventions: impl FnOnce(&str) -> Option<Conventions>) -> Result<ModelFiles, WeightError> {
    let gguf = Arc::new(Gguf::open(path)?.with_conventions(conventions));
    Ok(ModelFiles { source: gguf.clone(), kind: ModelKind::Gguf(gguf) })
}

fn has_gguf_extension(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"))
}

fn gguf_files(folder: &Path) -> Result<Vec<PathBuf>, WeightError> {
    let io = |error| WeightError::Io { path: folder.to_owned(), error };
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(io)? {
        let path = entry.map_err(io)?.path();
        if has_gguf_extension(&path) && path.is_file() {
            found.push(path);
        }
    }
    Ok(found)
}
