//! Safetensors weights as on the hub: `model.safetensors`, or shards with `model.safetensors.index.json`.
//!
//! The index is authoritative. Every file that it refers to must exist, which is checked before any weights are read. A
//! tensor must be in the file that the index maps it to. Tensors and files that the index does not mention are ignored.
//! Names are those of the files. All files stay mapped during the lifetime of the source; [`WeightSource::release`]
//! releases a tensor's pages.

#![forbid(unsafe_code)]

mod header;
mod index;

use std::collections::HashMap;
use std::path::Path;

use super::mmap::FileMap;
use super::{TensorView, WeightError, WeightSource};
use header::Entry;

/// File name of unsharded weights.
pub const SINGLE_FILE: &str = "model.safetensors";
/// File name of the index of sharded weights.
pub const INDEX_FILE: &str = "model.safetensors.index.json";

/// Weights of one folder.
#[derive(Debug)]
pub struct SafetensorsFolder {
    files: Vec<FileMap>,
    tensors: Vec<(usize, Entry)>,
    by_name: HashMap<String, usize>,
}

impl SafetensorsFolder {
    /// Opens the weights of a folder: the shards of its index if it has one, otherwise `model.safetensors`.
    ///
    /// # Errors
    /// [`WeightError::NotAModel`] if the folder contains neither file; [`WeightError::MissingShard`] if a shard does
    /// not exist; [`WeightError::Corrupt`] if a file violates a rule of its format; [`WeightError::Io`] if a file
    /// cannot be read.
    pub fn open(folder: impl AsRef<Path>) -> Result<Self, WeightError> {
        let folder = folder.as_ref();
        let index_path = folder.join(INDEX_FILE);
        if index_path.is_file() {
            return Self::open_shards(folder, &index_path);
        }
        let single = folder.join(SINGLE_FILE);
        if single.is_file() {
            return Self::open_file(single);
        }
        let looked_for = format!("expected {INDEX_FILE} or {SINGLE_FILE}");
        Err(WeightError::NotAModel { path: folder.to_owned(), looked_for })
    }

    /// Opens a single safetensors file.
    ///
    /// # Errors
    /// [`WeightError::Corrupt`] if the file violates a rule of its format; [`WeightError::Io`] if it cannot be read.
    pub fn open_file(path: impl AsRef<Path>) -> Result<Self, WeightError> {
        Self::from_map(FileMap::open(path.as_ref())?)
    }

    /// Parses the bytes of one safetensors file; `label` is its name in errors.
    ///
    /// # Errors
    /// [`WeightError::Corrupt`] if the bytes violate a rule of the format.
    pub fn parse(label: impl AsRef<Path>, bytes: Vec<u8>) -> Result<Self, WeightError> {
        Self::from_map(FileMap::from_vec(label.as_ref(), bytes))
    }

    fn from_map(file: FileMap) -> Result<Self, WeightError> {
        let tensors = read_header(&file)?.into_iter().map(|entry| (0, entry)).collect();
        Ok(Self::assemble(vec![file], tensors))
    }

    fn open_shards(folder: &Path, index_path: &Path) -> Result<Self, WeightError> {
        let corrupt = |what| WeightError::Corrupt { path: index_path.to_owned(), what };
        let text = FileMap::open(index_path)?;
        let pairs = index::parse(text.bytes()).map_err(corrupt)?;

        // Check all file names before the first file is opened: with a missing shard, reading the others would be
        // wasted work.
        let mut shards: Vec<&str> = Vec::new();
        let mut shard_ids: HashMap<&str, usize> = HashMap::new();
        for (tensor, shard) in &pairs {
            if shard_ids.contains_key(shard.as_str()) {
                continue;
            }
            if !folder.join(shard).is_file() {
                let (index, shard, tensor) = (index_path.to_owned(), shard.clone(), tensor.clone());
                return Err(WeightError::MissingShard { index, shard, tensor });
            }
            shard_ids.insert(shard, 0);
            shards.push(shard);
        }
        // An index is often sorted by tensor name, so its order is not that of the files.
        shards.sort_unstable();
        for (id, shard) in shards.iter().enumerate() {
            shard_ids.insert(shard, id);
        }

        let mut missing: HashMap<&str, usize> =
            pairs.iter().map(|(name, shard)| (name.as_str(), shard_ids[&**shard])).collect();
        let mut files = Vec::with_capacity(shards.len());
        let mut tensors = Vec::with_capacity(pairs.len());
        for (id, shard) in shards.iter().enumerate() {
            let file = FileMap::open(&folder.join(shard))?;
            for entry in read_header(&file)? {
                if missing.get(entry.name.as_str()) == Some(&id) {
                    missing.remove(entry.name.as_str());
                    tensors.push((id, entry));
                }
            }
            files.push(file);
        }
        // Report the smallest name, so that the same folder always causes the same message.
        if let Some((name, id)) = missing.into_iter().min() {
            return Err(corrupt(format!("weight_map maps {name:?} to {:?}, which does not contain it", shards[id])));
        }
        Ok(Self::assemble(files, tensors))
    }

    fn assemble(files: Vec<FileMap>, tensors: Vec<(usize, Entry)>) -> Self {
        let by_name = tensors.iter().enumerate().map(|(id, (_, entry))| (entry.name.clone(), id)).collect();
        Self { files, tensors, by_name }
    }

    fn entry(&self, name: &str) -> Option<(&FileMap, &Entry)> {
        let (file, entry) = &self.tensors[*self.by_name.get(name)?];
        Some((&self.files[*file], entry))
    }
}

impl WeightSource for SafetensorsFolder {
    fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        self.require(name).ok()
    }

    fn names(&self) -> Vec<String> {
        self.tensors.iter().map(|(_, entry)| entry.name.clone()).collect()
    }

    fn release(&self, name: &str) {
        if let Some((file, entry)) = self.entry(name) {
            file.release(entry.data.clone());
        }
    }

    fn require(&self, name: &str) -> Result<TensorView<'_>, WeightError> {
        let (file, entry) = self.entry(name).ok_or_else(|| WeightError::MissingTensor { name: name.to_owned() })?;
        let dtype = entry.dtype.map_err(|type_name| WeightError::UnsupportedType {
            path: file.path().to_owned(),
            tensor: name.to_owned(),
            type_id: None,
            type_name: type_name.to_owned(),
        })?;
        Ok(TensorView { dtype, shape: &entry.shape, data: &file.bytes()[entry.data.clone()] })
    }
}

fn read_header(file: &FileMap) -> Result<Vec<Entry>, WeightError> {
    header::parse(file.bytes()).map_err(|what| WeightError::Corrupt { path: file.path().to_owned(), what })
}
