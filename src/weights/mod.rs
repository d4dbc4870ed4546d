//! Weight files and their types: safetensors folders and GGUF files on a memory map.
//!
//! This room hands out tensors as stored, by name; it dequantises, quantises and slices, and never packs:
//! packing belongs to the device that will run them (`Device::upload`).

#![deny(unsafe_code)]

mod dtype;

pub use dtype::DType;

/// One tensor as it stands in its file.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    /// Storage type of the elements.
    pub dtype: DType,
    /// Row-major shape, slowest dimension first: a linear weight is `[out_features, in_features]`.
    pub shape: &'a [usize],
    /// The bytes as stored; `dtype.bytes_for(elements)` of them. Not necessarily aligned.
    pub data: &'a [u8],
}

/// A set of named tensors that a device can be filled from.
///
/// Names are the ones the model's graph uses, i.e. those of the Hugging Face hub
/// (`model.layers.0.self_attn.q_proj.weight`); a source of another spelling (GGUF) translates.
pub trait WeightSource: Send + Sync + std::fmt::Debug {
    /// The tensor of that name, or `None`.
    fn tensor(&self, name: &str) -> Option<TensorView<'_>>;
    /// Every tensor's name, in file order.
    fn names(&self) -> Vec<String>;
    /// Says that the tensor will not be read again soon, so that its pages may be dropped.
    fn release(&self, _name: &str) {}
}
