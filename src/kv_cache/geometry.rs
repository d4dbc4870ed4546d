//! Geometry of KV blocks: element type and shape.

use crate::settings::with_methods;

/// Element type of stored keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
#[allow(missing_docs)]
pub enum KvDType {
    F32,
    F16,
    BF16,
    /// Integers from -127 to 127. Each KV head has one f32 scale per token for the key and one for the value.
    #[serde(alias = "int8")]
    I8,
}

impl KvDType {
    /// Returns the bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::I8 => 1,
        }
    }

    /// Returns the bytes of the scale of one token's key (or value) in one head; 0 for float types.
    pub const fn scale_bytes(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::BF16 => 0,
            Self::I8 => 4,
        }
    }
}

/// Shape of the KV cache of one model (one cache group, one rank).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct KvGeometry {
    /// Number of transformer layers that store keys and values.
    pub layers: usize,
    /// KV heads per layer.
    pub kv_heads: usize,
    /// Elements of one head of a key or of a value.
    pub head_dim: usize,
    /// Tokens per block, a multiple of 16 (the tile of attention).
    pub block_size: usize,
    /// Storage type of the elements.
    pub dtype: KvDType,
}

impl KvGeometry {
    /// Creates the shape of a cache of `layers` layers with `kv_heads` heads of `head_dim` elements, in blocks of
    /// `block_size` tokens.
    pub const fn new(layers: usize, kv_heads: usize, head_dim: usize, block_size: usize, dtype: KvDType) -> Self {
        Self { layers, kv_heads, head_dim, block_size, dtype }
    }

    with_methods! {
        value {
            layers with_layers: usize,
            kv_heads with_kv_heads: usize,
            head_dim with_head_dim: usize,
            block_size with_block_size: usize,
            dtype with_dtype: KvDType,
        }
    }

    /// Returns the bytes of one token's keys and values over all layers, scales included.
    pub const fn bytes_per_token(&self) -> usize {
        2 * self.layers * self.kv_heads * (self.head_dim * self.dtype.bytes() + self.dtype.scale_bytes())
    }

    /// Returns the bytes of one block over all layers, without any padding that a device adds.
    pub const fn bytes_per_block(&self) -> usize {
        self.bytes_per_token() * self.block_size
    }
}
