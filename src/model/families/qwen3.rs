//! Qwen3: Llama with a norm on each query and key head, and an explicit head size.

use super::{Family, qwen2};
use crate::graph::ActivationKind;
use crate::model::ModelError;
use crate::model::config::{
    AttentionConfig, Fields, GatedMlp, GroupedQueryAttention, HubDefaults, LayerConfig, MlpConfig, ModelConfig,
    NormPlacement, TensorNames,
};
use crate::weights::gguf::{Conventions, NameTable, QkRows};

pub(super) const FAMILY: Family = Family {
    name: "qwen3",
    hub_names: &["qwen3", "Qwen3ForCausalLM"],
    gguf_names: &["qwen3"],
    gguf: Conventions { names: &NameTable::PRE_NORM, qk_rows: QkRows::AsOnHub },
    tensors: TensorNames::USUAL,
    hub_defaults: HubDefaults { head_dim: Some(128), ..qwen2::FAMILY.hub_defaults },
    describe,
};

fn describe(fields: &Fields<'_>) -> Result<ModelConfig, ModelError> {
    let (sizes, norm) = (fields.sizes()?, fields.rms_norm()?);
    let attention_bias = fields.switch("attention_bias")?;
    let attention = GroupedQueryAttention {
        qkv_bias: fields.has_bias("self_attn.q_proj", attention_bias)?,
        output_bias: fields.has_bias("self_attn.o_proj", attention_bias)?,
        qk_norm: fields.head_norm(norm, true)?,
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
    let windows = fields.windows(qwen2::WINDOWS, sizes.layers)?;
    fields.model(&sizes, norm, windows.into_iter().map(layer).collect())
}
