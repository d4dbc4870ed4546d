//! Mistral: Llama with a sliding window in all layers.

use super::{Family, llama};
use crate::graph::ActivationKind;
use crate::model::ModelError;
use crate::model::config::{
    AttentionConfig, Fields, GatedMlp, GroupedQueryAttention, HubDefaults, LayerConfig, MlpConfig, ModelConfig,
    NormPlacement, TensorNames, WindowRule,
};
use crate::weights::gguf::{Conventions, NameTable, QkRows};

pub(super) const FAMILY: Family = Family {
    name: "mistral",
    hub_names: &["mistral", "MistralForCausalLM"],
    gguf_names: &["mistral"],
    gguf: Conventions { names: &NameTable::PRE_NORM, qk_rows: QkRows::InterleavedPairs },
    tensors: TensorNames::USUAL,
    hub_defaults: HubDefaults {
        intermediate_size: 14_336,
        kv_heads: Some(8),
        max_position_embeddings: 4096 * 32,
        sliding_window: Some(4096),
        ..llama::FAMILY.hub_defaults
    },
    describe,
};

fn describe(fields: &Fields<'_>) -> Result<ModelConfig, ModelError> {
    let (sizes, norm) = (fields.sizes()?, fields.rms_norm()?);
    let attention_bias = fields.switch("attention_bias")?;
    let attention = GroupedQueryAttention {
        qkv_bias: fields.has_bias("self_attn.q_proj", attention_bias)?,
        output_bias: fields.has_bias("self_attn.o_proj", attention_bias)?,
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
    let windows = fields.windows(WindowRule::All, sizes.layers)?;
    fields.model(&sizes, norm, windows.into_iter().map(layer).collect())
}
