//! Errors of weight files. Each variant names the file or the tensor, and the faulty part.

#![forbid(unsafe_code)]

use std::path::PathBuf;

use super::DType;

/// Reason why weights cannot be opened, or a tensor cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WeightError {
    /// The operating system refused to open, map or list something.
    #[error("cannot read {}: {error}", path.display())]
    Io {
        /// File or folder.
        path: PathBuf,
        /// The system's error.
        error: std::io::Error,
    },
    /// The path holds no model in a form that is known here.
    #[error("no model at {}: {looked_for}", path.display())]
    NotAModel {
        /// File or folder that was given.
        path: PathBuf,
        /// The files found or missing there, and the accepted forms of a model.
        looked_for: String,
    },
    /// The index names a file that is not there. Found before any weight is read.
    #[error("shard {shard:?} is missing: {} says that it holds {tensor:?}", index.display())]
    MissingShard {
        /// The index file.
        index: PathBuf,
        /// File name in the index.
        shard: String,
        /// The first tensor that the index puts there.
        tensor: String,
    },
    /// The file breaks its format's rules.
    #[error("{} is corrupt: {what}", path.display())]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// Which rule is broken, where, with the value found.
        what: String,
    },
    /// The file is valid, but of a kind that is not implemented.
    #[error("{}: {what}", path.display())]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// The kind, and the accepted kinds.
        what: String,
    },
    /// One tensor's elements are stored in a type that is not implemented.
    #[error("tensor {tensor:?} in {} has type {type_name}{}, expected one of f32, f16, bf16, q4_0, q4_1, q5_0, \
             q5_1, q8_0, q4_k, q5_k, q6_k", path.display(), type_id.map_or(String::new(), |id| format!(" (ggml type {id})")))]
    UnsupportedType {
        /// The file.
        path: PathBuf,
        /// Name of the tensor, as the file spells it.
        tensor: String,
        /// GGML's number of the type, for a GGUF file.
        type_id: Option<u32>,
        /// Name of the type.
        type_name: String,
    },
    /// No tensor of that name.
    #[error("no tensor {name:?} among the weights")]
    MissingTensor {
        /// The requested name.
        name: String,
    },
    /// The shape of a tensor differs from the model's configuration.
    #[error("tensor {name:?} has shape {got:?}, expected {expected:?}")]
    Shape {
        /// Name of the tensor.
        name: String,
        /// Its shape, slowest dimension first.
        got: Vec<usize>,
        /// The shape that would be right.
        expected: Vec<usize>,
    },
    /// A tensor's bytes do not match its type and shape.
    #[error("tensor {name:?} has {got_bytes} bytes, expected {} for {dtype} of shape {shape:?}",
        expected_bytes.map_or("a size that no file can have".to_owned(), |bytes| bytes.to_string()))]
    Size {
        /// Name of the tensor.
        name: String,
        /// Its type.
        dtype: DType,
        /// Its shape, slowest dimension first.
        shape: Vec<usize>,
        /// Bytes given.
        got_bytes: usize,
        /// The expected size; `None` if rows do not fill whole blocks or the size overflows.
        expected_bytes: Option<usize>,
    },
    /// Two tensors of one name.
    #[error("tensor {name:?} is given twice")]
    DuplicateTensor {
        /// The name.
        name: String,
    },
}
