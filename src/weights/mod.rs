//! Weight files and their element types: safetensors folders and GGUF files on a memory map.
//!
//! This module provides tensors by name, as stored. It dequantizes, quantizes and slices, but never packs: the device
//! that runs the model packs its weights (`Device::upload`).
//!
//! Files are untrusted until they are checked. Opening a file uses memory and time proportional to the size of its
//! header, whatever counts and lengths the header contains. Every returned tensor is within its file, and its size
//! matches its type and shape.

#![deny(unsafe_code)]

pub mod convert;
mod dtype;
mod error;
pub mod gguf;
mod memory;
pub mod mmap;
mod open;
pub mod safetensors;
pub mod slice;

pub use dtype::DType;
pub use error::WeightError;
pub use memory::MemorySource;
pub use open::{ModelFiles, ModelKind, open};

/// One tensor, as stored in its file.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct TensorView<'a> {
    /// Storage type of the elements.
    pub dtype: DType,
    /// Row-major shape, slowest dimension first: a linear weight is `[out_features, in_features]`.
    pub shape: &'a [usize],
    /// Bytes as stored, `dtype.bytes_for(elements)` in number. They are not necessarily aligned.
    pub data: &'a [u8],
}

impl<'a> TensorView<'a> {
    /// Creates a view of a tensor.
    pub const fn new(dtype: DType, shape: &'a [usize], data: &'a [u8]) -> Self {
        Self { dtype, shape, data }
    }

    /// Returns the number of elements: the product of the dimensions, 1 for a scalar.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns the number of elements of one row, i.e. of the fastest dimension; 1 for a scalar.
    pub fn row_len(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Returns the bytes of rows `rows`, with the tensor viewed as a matrix of [`row_len`](Self::row_len) columns.
    ///
    /// Returns `None` if the range exceeds the rows of the tensor. A row is a whole number of blocks, so a slice of
    /// rows is exact in every type.
    pub fn rows(&self, rows: std::ops::Range<usize>) -> Option<&'a [u8]> {
        let row_bytes = self.dtype.bytes_for(self.row_len())?;
        self.data.get(rows.start.checked_mul(row_bytes)?..rows.end.checked_mul(row_bytes)?)
    }

    /// Returns the elements as f32, bit-equal to GGML's dequantization.
    pub fn to_f32(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.elements()];
        convert::dequantize(self.dtype, self.data, &mut out);
        out
    }

    /// Returns the view if its shape is `expected`.
    ///
    /// # Errors
    /// [`WeightError::Shape`] with `name` and both shapes if the shape differs.
    pub fn expect_shape(self, name: &str, expected: &[usize]) -> Result<Self, WeightError> {
        if self.shape == expected {
            return Ok(self);
        }
        let (got, expected) = (self.shape.to_vec(), expected.to_vec());
        Err(WeightError::Shape { name: name.to_owned(), got, expected })
    }
}

/// Set of named tensors from which a device uploads its weights.
///
/// Names are those of the model's graph, i.e. the names on the Hugging Face hub
/// (`model.layers.0.self_attn.q_proj.weight`); a source with other names (GGUF) translates them.
pub trait WeightSource: Send + Sync + std::fmt::Debug {
    /// Returns the tensor with this name, or `None`.
    fn tensor(&self, name: &str) -> Option<TensorView<'_>>;
    /// Returns the names of all tensors, in file order.
    fn names(&self) -> Vec<String>;
    /// Announces that the tensor will not be read again soon, so that the source may release its pages.
    fn release(&self, _name: &str) {}
    /// Returns the tensor with this name, or an error.
    ///
    /// # Errors
    /// [`WeightError::MissingTensor`] if the source does not contain the tensor; [`WeightError::UnsupportedType`] if
    /// its type is not supported.
    fn require(&self, name: &str) -> Result<TensorView<'_>, WeightError> {
        self.tensor(name).ok_or_else(|| WeightError::MissingTensor { name: name.to_owned() })
    }
}
