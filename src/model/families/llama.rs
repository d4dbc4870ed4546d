//! Llama 1 to 3 and models of the same structure: pre-norms, a gated MLP, and rotary embedding of whole heads.

use super::Family;
use crate::graph::ActivationKind;
use crate::model::ModelError;
use crate::model::config::{
    AttentionConfig, Fields, GatedMlp, GroupedQueryAttention, HubDefaults, LayerConfig, MlpConfig, ModelConfig,
    NormPlacement, TensorNames, WindowRule,
};
use crate::weights::gguf::{Conventions, NameTable, QkRows};

pub(super) const FAMILY: Family = Family {
    name: "llama",
    hub_names: &["llama", "LlamaForCausalLM"],
    gguf_names: &["llama"],
    gguf: Conventions { names: &NameTable::PRE_NORM, qk_rows: QkRows::InterleavedPairs },
    tensors: TensorNames::USUAL,
    hub_defaults: HubDefaults {
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
    },
    describe,
};

fn describe(fields: &Fields<'_>) -> Result<ModelConfig, ModelError> {
    let (sizes, norm) = (fields.sizes()?, fields.rms_norm()?);
    let (attention_bias, mlp_bias) = (fields.switch("attention_bias")?, fields.switch("mlp_bias")?);
    let attention = GroupedQueryAttention {
        qkv_bias: fields.has_bias("self_attn.q_proj", attention_bias)?,
        output_bias: fields.has_bias("self_attn.o_proj", attention_bias)?,
        qk_norm: fields.head_norm(norm, false)?,
        ..sizes.attention()
    };
    let mlp = GatedMlp {
        bias: fields.has_bias("mlp.gate_proj", mlp_bias)?,
        ..sizes.gated_mlp(fields.activation(ActivationKind::Silu)?)
    };
    let layer = |window| {
        let attention = AttentionConfig::GroupedQuery(GroupedQueryAttention { window, ..attention });
        LayerConfig::new(attention, MlpConfig::Gated(mlp), NormPlacement::Pre(norm))
    };
    let windows = fields.windows(WindowRule::None, sizes.layers)?;
    fields.model(&sizes, norm, windows.into_iter().map(layer).collect())
}
