//! Errors of weight files. Every variant contains the file or the tensor, and the invalid item in it.

#![forbid(unsafe_code)]

use std::path::PathBuf;

use super::DType;

/// Reason why weights could not be opened, or a tensor could not be returned.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WeightError {
    /// The operating system could not open, map or list a file or folder.
    #[error("cannot read {}: {error}", path.display())]
    Io {
        /// File or folder.
        path: PathBuf,
        /// Error of the operating system.
        error: std::io::Error,
    },
    /// The path contains no model in a supported form.
    #[error("no model at {}: {looked_for}", path.display())]
    NotAModel {
        /// The given file or folder.
        path: PathBuf,
        /// Description of the files that were found or not found, and of the supported forms.
        looked_for: String,
    },
    /// The index refers to a file that does not exist. This is checked before any weights are read.
    #[error("shard {shard:?} is missing: according to {}, it contains {tensor:?}", index.display())]
    MissingShard {
        /// The index file.
        index: PathBuf,
        /// File name of the shard in the index.
        shard: String,
        /// The first tensor of the shard, in the order of the index.
        tensor: String,
    },
    /// The file violates a rule of its format.
    #[error("{} is corrupt: {what}", path.display())]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// Description of the violated rule, with the position and the value.
        what: String,
    },
    /// The file is valid, but this crate does not support its kind.
    #[error("{}: {what}", path.display())]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// Description of the file and of the supported kinds.
        what: String,
    },
    /// The elements of a tensor have a type that this crate does not support.
    #[error("tensor {tensor:?} in {} has type {type_name}{}, expected one of f32, f16, bf16, q4_0, q4_1, q5_0, \
             q5_1, q8_0, q4_k, q5_k, q6_k", path.display(), type_id.map_or(String::new(), |id| format!(" (ggml type {id})")))]
    UnsupportedType {
        /// The file.
        path: PathBuf,
        /// Name of the tensor in the file.
        tensor: String,
        /// GGML's number of the type, for a GGUF file.
        type_id: Option<u32>,
        /// Name of the type.
        type_name: String,
    },
    /// The weights contain no tensor with this name.
    #[error("the weights contain no tensor {name:?}")]
    MissingTensor {
        /// The requested name.
        name: String,
    },
    /// The shape of a tensor differs from the one that the model's configuration requires.
    #[error("tensor {name:?} has shape {got:?}, expected {expected:?}")]
    Shape {
        /// Name of the tensor.
        name: String,
        /// Its shape, slowest dimension first.
        got: Vec<usize>,
        /// The required shape.
        expected: Vec<usize>,
    },
    /// The number of bytes of a tensor does not match its type and shape.
    #[error("tensor {name:?} has {got_bytes} bytes, expected {} for {dtype} of shape {shape:?}",
        expected_bytes.map_or("a size that no file can have".to_owned(), |bytes| bytes.to_string()))]
    Size {
        /// Name of the tensor.
        name: String,
        /// Its type.
        dtype: DType,
        /// Its shape, slowest dimension first.
        shape: Vec<usize>,
        /// Actual number of bytes.
        got_bytes: usize,
        /// Required number of bytes; `None` if the rows are not a whole number of blocks or the size overflows.
        expected_bytes: Option<usize>,
    },
    /// Two tensors have the same name.
    #[error("two tensors have the name {name:?}")]
    DuplicateTensor {
        /// The name.
        name: String,
    },
}
