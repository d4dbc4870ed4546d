//! Typed access to a configuration in either form, a hub config or GGUF metadata, for the families.
//!
//! A getter for a field that both forms have takes both names of the field. Settings that only a hub config contains
//! (biases, head norms) are derived from the tensors for a GGUF file.

use super::gguf::GgufFields;
use super::hub::{HubDefaults, HubFields};
use super::{GatedMlp, GroupedQueryAttention, LayerConfig, ModelConfig, NormConfig, QkNorm, layer_count};
use crate::graph::ActivationKind;
use crate::model::ModelError;
use crate::model::error::invalid;

/// Configuration in one of its forms.
#[derive(Debug)]
pub(in crate::model) enum Fields<'a> {
    /// Hub config; absent fields have their family's default.
    Hub(HubFields<'a>),
    /// Metadata and tensors of a GGUF file; the sizes are required.
    Gguf(GgufFields<'a>),
}

/// Sizes that most families have.
#[derive(Clone, Copy, Debug)]
pub(in crate::model) struct Sizes {
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub max_position_embeddings: usize,
}

impl Sizes {
    /// Returns attention with these heads.
    ///
    /// It has no bias, no head norm and no window, uses the model's first rotary embedding, and divides the scores by
    /// the square root of the head's size.
    pub(in crate::model) fn attention(&self) -> GroupedQueryAttention {
        GroupedQueryAttention {
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            qkv_bias: false,
            output_bias: false,
            qk_norm: None,
            rope: Some(0),
            window: None,
            scale: 1.0 / (self.head_dim as f32).sqrt(),
        }
    }

    /// Returns a gated MLP of this width, without bias.
    pub(in crate::model) const fn gated_mlp(&self, activation: ActivationKind) -> GatedMlp {
        GatedMlp { intermediate_size: self.intermediate_size, activation, bias: false }
    }
}

/// Rule for the layers with a sliding window in a hub config without `layer_types`.
#[derive(Clone, Copy, Debug)]
pub(in crate::model) enum WindowRule {
    /// No layer: the family's class ignores `sliding_window`.
    None,
    /// All layers, if `sliding_window` is not null.
    All,
    /// Layers from `max_window_layers` on, if `use_sliding_window` is true.
    Switched {
        /// First such layer if `max_window_layers` is absent.
        first_layer: usize,
    },
}

impl Fields<'_> {
    /// Returns the sizes of the model.
    pub(in crate::model) fn sizes(&self) -> Result<Sizes, ModelError> {
        let hidden_size = self.size("hidden_size", "embedding_length", |hub| hub.hidden_size)?;
        let heads = self.size("num_attention_heads", "attention.head_count", |hub| hub.heads)?;
        if heads == 0 {
            return Err(invalid(&self.name("num_attention_heads", "attention.head_count"), heads, "at least 1"));
        }
        let layers = self.size("num_hidden_layers", "block_count", |hub| hub.layers)?;
        layer_count(&self.name("num_hidden_layers", "block_count"), layers)?;
        let usual_dim = hidden_size / heads;
        let (vocab_size, kv_heads, head_dim) = match self {
            Self::Hub(HubFields { json, defaults, .. }) => (
                json.size("vocab_size")?.unwrap_or(defaults.vocab_size),
                json.size("num_key_value_heads")?.or(defaults.kv_heads),
                json.size("head_dim")?.or(defaults.head_dim).unwrap_or(usual_dim),
            ),
            Self::Gguf(gguf) => (gguf.vocab_size()?, gguf.size("attention.head_count_kv")?, gguf.head_dim(usual_dim)?),
        };
        Ok(Sizes {
            vocab_size,
            hidden_size,
            intermediate_size: self.size("intermediate_size", "feed_forward_length", |hub| hub.intermediate_size)?,
            layers,
            heads,
            kv_heads: kv_heads.unwrap_or(heads),
            head_dim,
            max_position_embeddings: self
                .size("max_position_embeddings", "context_length", |hub| hub.max_position_embeddings)?,
        })
    }

    /// Returns the RMS norm that the model uses everywhere.
    #[allow(clippy::cast_possible_truncation)] // an epsilon rounds to f32
    pub(in crate::model) fn rms_norm(&self) -> Result<NormConfig, ModelError> {
        let (field, key) = ("rms_norm_eps", "attention.layer_norm_rms_epsilon");
        let eps = match (self.float(field, key)?, self) {
            (Some(eps), _) => eps as f32,
            (None, Self::Hub(hub)) => hub.defaults.rms_norm_eps,
            (None, Self::Gguf(_)) => return Err(ModelError::MissingField { field: self.name(field, key) }),
        };
        Ok(NormConfig::Rms { eps })
    }

    /// Returns the activation function of the MLP: that of the hub config, otherwise `usual`.
    pub(in crate::model) fn activation(&self, usual: ActivationKind) -> Result<ActivationKind, ModelError> {
        match self {
            Self::Hub(hub) => Ok(hub.activation()?.unwrap_or(usual)),
            Self::Gguf(_) => Ok(usual),
        }
    }

    /// Returns a boolean of a hub config, false if it is absent; always false for a GGUF file, which has no such keys.
    pub(in crate::model) fn switch(&self, field: &str) -> Result<bool, ModelError> {
        match self {
            Self::Hub(hub) => Ok(hub.json.bool(field)?.unwrap_or(false)),
            Self::Gguf(_) => Ok(false),
        }
    }

    /// Returns whether a projection has a bias: `by_hub` for a hub config; by the first layer's tensors for a GGUF
    /// file.
    pub(in crate::model) fn has_bias(&self, projection: &str, by_hub: bool) -> Result<bool, ModelError> {
        self.first_layer_has(&format!("{projection}.bias"), by_hub)
    }

    /// Returns the norm of query and key heads, if any: `by_hub` for a hub config; by the first layer's tensors for a
    /// GGUF file.
    pub(in crate::model) fn head_norm(&self, norm: NormConfig, by_hub: bool) -> Result<Option<QkNorm>, ModelError> {
        Ok(self.first_layer_has("self_attn.q_norm.weight", by_hub)?.then_some(QkNorm::EachHead(norm)))
    }

    fn first_layer_has(&self, tensor: &str, by_hub: bool) -> Result<bool, ModelError> {
        match self {
            Self::Hub(_) => Ok(by_hub),
            Self::Gguf(gguf) => Ok(gguf.tensor(&format!("model.layers.0.{tensor}"))?.is_some()),
        }
    }

    /// Returns the sliding window of each layer.
    pub(in crate::model) fn windows(&self, rule: WindowRule, layers: usize) -> Result<Vec<Option<u32>>, ModelError> {
        match self {
            Self::Hub(hub) => hub.windows(rule, layers),
            Self::Gguf(gguf) => Ok(vec![gguf.window()?; layers]),
        }
    }

    /// Creates a model with these layers, one rotary embedding, and no factors on embeddings and logits.
    pub(in crate::model) fn model(
        &self,
        sizes: &Sizes,
        final_norm: NormConfig,
        layers: Vec<LayerConfig>,
    ) -> Result<ModelConfig, ModelError> {
        let (architecture, rope, head, eos_ids) = match self {
            Self::Hub(hub) => (hub.architecture, hub.rope(sizes)?, hub.head()?, hub.json.ids("eos_token_id")?),
            Self::Gguf(gguf) => (gguf.architecture, gguf.rope(sizes)?, gguf.head()?, gguf.eos_ids()),
        };
        Ok(ModelConfig {
            architecture,
            vocab_size: sizes.vocab_size,
            hidden_size: sizes.hidden_size,
            embedding_scale: None,
            layers,
            ropes: vec![rope],
            final_norm,
            head,
            logit_scale: None,
            max_position_embeddings: sizes.max_position_embeddings,
            eos_ids,
            tensors: &architecture.family().tensors,
        })
    }

    /// Returns a number by its hub name or by its key in a GGUF file.
    pub(in crate::model) fn float(&self, field: &str, key: &'static str) -> Result<Option<f64>, ModelError> {
        match self {
            Self::Hub(hub) => hub.json.float(field),
            Self::Gguf(gguf) => Ok(gguf.float(key)?.map(f64::from)),
        }
    }

    /// Returns the name of a field in this form of the configuration, for errors.
    pub(in crate::model) fn name(&self, field: &str, key: &str) -> String {
        match self {
            Self::Hub(hub) => hub.json.name(field),
            Self::Gguf(gguf) => gguf.name(key),
        }
    }

    fn size(
        &self,
        field: &str,
        key: &'static str,
        default: impl Fn(&HubDefaults) -> usize,
    ) -> Result<usize, ModelError> {
        match self {
            Self::Hub(hub) => Ok(hub.json.size(field)?.unwrap_or_else(|| default(hub.defaults))),
            Self::Gguf(gguf) => gguf.size(key)?.ok_or_else(|| ModelError::MissingField { field: gguf.name(key) }),
        }
    }
}
