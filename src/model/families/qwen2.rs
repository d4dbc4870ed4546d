//! Qwen2 and Qwen2.5: Llama with a bias on queries, keys and values, and an optional window per layer.

use super::{Family, llama};
use crate::graph::ActivationKind;
use crate::model::ModelError;
use crate::model::config::{
    AttentionConfig, Fields, GatedMlp, GroupedQueryAttention, HubDefaults, LayerConfig, MlpConfig, ModelConfig,
    NormPlacement, TensorNames, WindowRule,
};
use crate::weights::gguf::{Conventions, NameTable, QkRows};

pub(super) const FAMILY: Family = Family {
    name: "qwen2",
    hub_names: &["qwen2", "Qwen2ForCausalLM"],
    gguf_names: &["qwen2"],
    gguf: Conventions { names: &NameTable::PRE_NORM, qk_rows: QkRows::AsOnHub },
    tensors: TensorNames::USUAL,
    hub_defaults: HubDefaults {
        vocab_size: 151_936,
        intermediate_size: 22_016,
        kv_heads: Some(32),
        max_position_embeddings: 32_768,
        sliding_window: Some(4096),
        ..llama::FAMILY.hub_defaults
    },
    describe,
};

/// Rule for the windows in older configs, which have no `layer_types`.
pub(super) const WINDOWS: WindowRule = WindowRule::Switched { first_layer: 28 };

fn describe(fields: &Fields<'_>) -> Result<ModelConfig, ModelError> {
    let (sizes, norm) = (fields.sizes()?, fields.rms_norm()?);
    let attention = GroupedQueryAttention {
        qkv_bias: fields.has_bias("self_attn.q_proj", true)?,
        output_bias: fields.has_bias("self_attn.o_proj", false)?,
        qk_norm: fields.head_norm(norm, false)?,
        ..sizes.attention()
    };
    let mlp = GatedMlp {
        bias: fields.has_bias("mlp.gate_proj", false)?,
        ..sizes.gated_mlp(fields.activation(ActivationKind::Silu)?)
    };
    let layer = |window| {
        let attention = AttentionConfig::GroupedQuery(GroupedQueryAttention { window, ..attention });
        LayerConfig::new(attention, MlpConfig::Gated(mlp), NormPlacement::Pre(norm))
    };
    let windows = fields.windows(WINDOWS, sizes.layers)?;
    fields.model(&sizes, norm, windows.into_iter().map(layer).collect())
}
