//! GGUF files, versions 2 and 3, little-endian, in one part.
//!
//! Opening maps a file and checks its header completely; tensor data is read when a tensor is requested. A tensor can
//! always be looked up by its name in the file, and also by its hub name if the file has the [`Conventions`] of its
//! architecture. A tensor of an unsupported type does not prevent opening the file: requesting that tensor is an error.
//!
//! A lookup by hub name returns the tensor as on the hub. If the file stores the rows of `attn_q` and `attn_k` in the
//! order of interleaved rotary pairs, the lookup returns a copy in the hub's order (two halves per head). The copy is
//! created once and kept until the file is dropped. A lookup by the file's name returns the rows in the file's order.
//!
//! Values are never changed. For example, norm weights of Gemma still contain the 1 of `(1 + w)` that the converter has
//! added.

#![forbid(unsafe_code)]

mod conventions;
mod header;
mod metadata;
mod names;
mod permute_qk;
mod reader;
mod types;
mod value;

use std::path::Path;
use std::sync::{Arc, OnceLock};

use super::mmap::FileMap;
use super::{TensorView, WeightError, WeightSource};
pub use conventions::{Conventions, QkRows};
use header::TensorInfo;
pub use metadata::Metadata;
pub use names::NameTable;
pub use value::{Array, Value, ValueType};

/// One GGUF file.
#[derive(Debug)]
pub struct Gguf {
    file: Arc<FileMap>,
    metadata: Metadata,
    /// Tensors in file order.
    tensors: Vec<TensorInfo>,
    /// Indices into `tensors`, sorted by the file's name.
    by_name: Vec<u32>,
    /// For each tensor, its rows in the hub's order: set at the first request, and only if the order differs.
    hub_rows: Vec<OnceLock<Box<[u8]>>>,
    conventions: Option<Conventions>,
}

impl Gguf {
    /// Maps a file and checks its header. Its tensors have the file's own names.
    ///
    /// # Errors
    /// A [`WeightError`] with the file and the reason.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, WeightError> {
        Self::from_map(FileMap::open(path.as_ref())?)
    }

    /// Parses the bytes of a file; `label` is its name in errors.
    ///
    /// # Errors
    /// The errors of [`open`](Self::open), except [`WeightError::Io`].
    pub fn parse(label: impl AsRef<Path>, bytes: Vec<u8>) -> Result<Self, WeightError> {
        Self::from_map(FileMap::from_vec(label.as_ref(), bytes))
    }

    fn from_map(file: FileMap) -> Result<Self, WeightError> {
        let file = Arc::new(file);
        let (metadata, tensors) = header::parse(&file)?;
        let Ok(len) = u32::try_from(tensors.len()) else {
            let what = format!("the file has {} tensors, expected at most u32::MAX", tensors.len());
            return Err(WeightError::Corrupt { path: file.path().to_owned(), what });
        };
        let mut by_name: Vec<u32> = (0..len).collect();
        by_name.sort_unstable_by_key(|&id| &file.bytes()[tensors[id as usize].name.clone()]);
        let hub_rows = tensors.iter().map(|_| OnceLock::new()).collect();
        Ok(Self { file, metadata, tensors, by_name, hub_rows, conventions: None })
    }

    /// Enables lookups by hub name, with the conventions that `of` returns for the file's architecture.
    #[must_use]
    pub fn with_conventions(mut self, of: impl FnOnce(&str) -> Option<Conventions>) -> Self {
        self.conventions = self.metadata.architecture().and_then(of);
        self
    }

    /// Returns the metadata: configuration, tokenizer, chat template.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// Iterates over the tensors' names in the file, in file order.
    pub fn raw_names(&self) -> impl Iterator<Item = &str> {
        self.tensors.iter().map(|tensor| self.name(tensor))
    }

    fn name(&self, tensor: &TensorInfo) -> &str {
        std::str::from_utf8(&self.file.bytes()[tensor.name.clone()]).unwrap_or_default()
    }

    /// Finds a tensor by the file's name or the hub's; the flag is true for a hub name.
    fn find(&self, name: &str) -> Option<(usize, bool)> {
        let find = |raw: &str| {
            let at = self.by_name.binary_search_by(|&id| self.name(&self.tensors[id as usize]).cmp(raw)).ok()?;
            Some(self.by_name[at] as usize)
        };
        if let Some(id) = find(name) {
            return Some((id, false));
        }
        Some((find(&self.conventions?.names.to_gguf(name)?)?, true))
    }

    /// Returns the bytes of a tensor with the rows in the hub's order.
    fn hub_rows(&self, id: usize, view: TensorView<'_>) -> Result<&[u8], WeightError> {
        let tensor = &self.tensors[id];
        if let Some(rows) = self.hub_rows[id].get() {
            return Ok(rows);
        }
        let name = self.name(tensor);
        let is_reordered = self.conventions.is_some_and(|has| has.qk_rows == QkRows::InterleavedPairs);
        let Some(heads) = permute_qk::heads(&self.metadata, name).filter(|_| is_reordered) else {
            return Ok(&self.file.bytes()[tensor.data.clone()]);
        };
        let rows = heads.and_then(|heads| permute_qk::to_halves(view, heads)).map_err(|what| WeightError::Corrupt {
            path: self.path().to_owned(),
            what: format!("tensor {name:?}: {what}"),
        })?;
        self.file.release(tensor.data.clone());
        Ok(self.hub_rows[id].get_or_init(|| rows))
    }
}

impl WeightSource for Gguf {
    fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        self.require(name).ok()
    }

    fn names(&self) -> Vec<String> {
        let hub = |raw: &str| self.conventions?.names.to_hub(raw);
        let name = |raw: &str| hub(raw).unwrap_or_else(|| raw.to_owned());
        self.raw_names().map(name).collect()
    }

    fn release(&self, name: &str) {
        if let Some((id, _)) = self.find(name) {
            self.file.release(self.tensors[id].data.clone());
        }
    }

    fn require(&self, name: &str) -> Result<TensorView<'_>, WeightError> {
        let (id, by_hub_name) = self.find(name).ok_or_else(|| WeightError::MissingTensor { name: name.to_owned() })?;
        let tensor = &self.tensors[id];
        let dtype = tensor.ty.dtype.ok_or_else(|| WeightError::UnsupportedType {
            path: self.path().to_owned(),
            tensor: self.name(tensor).to_owned(),
            type_id: Some(tensor.ty.id),
            type_name: tensor.ty.name.to_owned(),
        })?;
        let mut view = TensorView { dtype, shape: tensor.shape(), data: &self.file.bytes()[tensor.data.clone()] };
        if by_hub_name {
            view.data = self.hub_rows(id, view)?;
        }
        Ok(view)
    }
}
