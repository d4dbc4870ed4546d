//! Weight files and their types: safetensors folders and GGUF files on a memory map.
//!
//! This module returns tensors as stored, by name. It dequantizes, quantizes and slices, but never packs: packing
//! belongs to the device (`Device::upload`). Files are untrusted until checked: opening costs memory and time in
//! proportion to the bytes of the header, whatever counts and lengths it contains, and each returned tensor lies in its
//! file with the size of its type and shape.

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

/// One tensor as stored in its file.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct TensorView<'a> {
    /// Storage type of the elements.
    pub dtype: DType,
    /// Row-major shape, slowest dimension first: a linear weight is `[out_features, in_features]`.
    pub shape: &'a [usize],
    /// The bytes as stored; `dtype.bytes_for(elements)` of them. Not necessarily aligned.
    pub data: &'a [u8],
}

impl<'a> TensorView<'a> {
    /// A tensor of `data.len()` bytes as stored.
    pub const fn new(dtype: DType, shape: &'a [usize], data: &'a [u8]) -> Self {
        Self { dtype, shape, data }
    }

    /// Number of elements: the product of the dimensions, 1 for a scalar.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Elements of one row, i.e. of the fastest dimension; 1 for a scalar.
    pub fn row_len(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// The bytes of rows `rows` of the tensor, seen as a matrix of [`row_len`](Self::row_len) columns; `None` if there
    /// are fewer rows. A row is a whole number of blocks, so a slice by rows is exact in each type.
    pub fn rows(&self, rows: std::ops::Range<usize>) -> Option<&'a [u8]> {
        let row_bytes = self.dtype.bytes_for(self.row_len())?;
        self.data.get(rows.start.checked_mul(row_bytes)?..rows.end.checked_mul(row_bytes)?)
    }

    /// The elements as f32, bit-exactly as GGML dequantizes them.
    pub fn to_f32(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.elements()];
        convert::dequantize(self.dtype, self.data, &mut out);
        out
    }

    /// The view itself if its shape is `expected`, else an error that names `name` and both shapes.
    pub fn expect_shape(self, name: &str, expected: &[usize]) -> Result<Self, WeightError> {
        if self.shape == expected {
            return Ok(self);
        }
        let (got, expected) = (self.shape.to_vec(), expected.to_vec());
        Err(WeightError::Shape { name: name.to_owned(), got, expected })
    }
}

/// A set of named tensors that a device can be filled from.
///
/// Names are the ones the model's graph uses, i.e. those of the Hugging Face hub
/// (`model.layers.0.self_attn.q_proj.weight`); a source of another spelling (GGUF) translates.
pub trait WeightSource: Send + Sync + std::fmt::Debug {
    /// The tensor with this name, or `None`.
    fn tensor(&self, name: &str) -> Option<TensorView<'_>>;
    /// Every tensor's name, in file order.
    fn names(&self) -> Vec<String>;
    /// Announces that the tensor will not be read again soon, so that its pages may be dropped.
    fn release(&self, _name: &str) {}
    /// The tensor with this name.
    ///
    /// # Errors
    /// [`WeightError`] if there is none, or if its type is not implemented.
    fn require(&self, name: &str) -> Result<TensorView<'_>, WeightError> {
        self.tensor(name).ok_or_else(|| WeightError::MissingTensor { name: name.to_owned() })
    }
}
