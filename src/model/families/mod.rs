//! The architectures this crate implements, with what a description leaves unsaid.

use super::ModelError;
use crate::weights::gguf::{Conventions, NameTable, QkRows};

/// A family of models with one graph shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Architecture {
    /// Llama 1 to 3 and what is built alike (SmolLM2, `TinyLlama` …).
    Llama,
    /// Mistral: Llama with a sliding window.
    Mistral,
    /// Qwen2 and Qwen2.5: Llama with a bias on queries, keys and values.
    Qwen2,
    /// Qwen3: Llama with a norm on each query and key head.
    Qwen3,
}

/// Values a hub config may leave out: those of the family's configuration class in Transformers 5, which does not write
/// a field that has its default.
#[derive(Clone, Copy, Debug)]
pub(super) struct HubDefaults {
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub layers: usize,
    pub heads: usize,
    /// None: as many as `heads`.
    pub kv_heads: Option<usize>,
    /// None: `hidden_size / heads`.
    pub head_dim: Option<usize>,
    pub max_position_embeddings: usize,
    pub rms_norm_eps: f32,
    pub sliding_window: Option<usize>,
}

impl Architecture {
    /// By the `model_type` of a hub config, or by the class name in `architectures`.
    pub fn from_hub(name: &str) -> Result<Self, ModelError> {
        match name {
            "llama" | "LlamaForCausalLM" => Ok(Self::Llama),
            "mistral" | "MistralForCausalLM" => Ok(Self::Mistral),
            "qwen2" | "Qwen2ForCausalLM" => Ok(Self::Qwen2),
            "qwen3" | "Qwen3ForCausalLM" => Ok(Self::Qwen3),
            _ => Err(ModelError::UnsupportedArchitecture { name: name.to_owned() }),
        }
    }

    /// By `general.architecture` of a GGUF file.
    pub fn from_gguf(name: &str) -> Result<Self, ModelError> {
        match name {
            "llama" => Ok(Self::Llama),
            "mistral" => Ok(Self::Mistral),
            "qwen2" => Ok(Self::Qwen2),
            "qwen3" => Ok(Self::Qwen3),
            _ => Err(ModelError::UnsupportedArchitecture { name: name.to_owned() }),
        }
    }

    /// Name in errors and reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Mistral => "mistral",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
        }
    }

    pub(super) const fn hub_defaults(self) -> HubDefaults {
        let llama = HubDefaults {
            vocab_size: 32_000,
            hidden_size: 4096,
            intermediate_size: 11_008,
            layers: 32,
            heads: 32,
            kv_heads: None,
            head_dim: None,
            max_position_embeddings: 2048,
            rms_norm_eps: 1e-6,
            sliding_window: None,
        };
        let qwen2 = HubDefaults {
            vocab_size: 151_936,
            intermediate_size: 22_016,
            kv_heads: Some(32),
            max_position_embeddings: 32_768,
            sliding_window: Some(4096),
            ..llama
        };
        match self {
            Self::Llama => llama,
            Self::Mistral => HubDefaults {
                intermediate_size: 14_336,
                kv_heads: Some(8),
                max_position_embeddings: 4096 * 32,
                sliding_window: Some(4096),
                ..llama
            },
            Self::Qwen2 => qwen2,
            Self::Qwen3 => HubDefaults { head_dim: Some(128), ..qwen2 },
        }
    }
}

/// How GGUF files of an architecture spell and order tensors; none for architectures of no family here.
pub fn gguf_conventions(architecture: &str) -> Option<Conventions> {
    let qk_rows = match Architecture::from_gguf(architecture).ok()? {
        Architecture::Llama | Architecture::Mistral => QkRows::InterleavedPairs,
        Architecture::Qwen2 | Architecture::Qwen3 => QkRows::AsOnHub,
    };
    Some(Conventions { names: &NameTable::PRE_NORM, qk_rows })
}
