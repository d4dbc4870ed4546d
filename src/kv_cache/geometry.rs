//! What a KV block holds.

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
    /// Whole numbers from -127 to 127 with one f32 scale for a token's key and one for its value under each KV head.
    #[serde(alias = "int8")]
    I8,
}

impl KvDType {
    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::I8 => 1,
        }
    }

    /// Bytes of the scale that each token's key (or value) under a head has; none for floats.
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
    /// Transformer layers that keep keys and values.
    pub layers: usize,
    /// KV heads a layer.
    pub kv_heads: usize,
    /// Elements of a head of keys and of a head of values.
    pub head_dim: usize,
    /// Tokens a block, a multiple of 16 (attention's tile).
    pub block_size: usize,
    /// Element type as stored.
    pub dtype: KvDType,
}

impl KvGeometry {
    /// Shape of a cache of `layers` layers with `kv_heads` heads of `head_dim` elements, in blocks of `block_size` tokens.
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

    /// Bytes of one token's keys and values over all layers, scales included.
    pub const fn bytes_per_token(&self) -> usize {
        2 * self.layers * self.kv_heads * (self.head_dim * self.dtype.bytes() + self.dtype.scale_bytes())
    }

    /// Bytes of one block over all layers, without any padding a device may add.
    pub const fn bytes_per_block(&self) -> usize {
        self.bytes_per_token() * self.block_size
    }
}
