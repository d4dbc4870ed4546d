//! Hub names of a model's tensors, by their role.

/// Tensor names without `.weight` and `.bias`; the names of a layer follow `layers` and the layer's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::model) struct TensorNames {
    pub embedding: &'static str,
    pub final_norm: &'static str,
    pub head: &'static str,
    pub layers: &'static str,
    pub attention_norm: &'static str,
    pub query: &'static str,
    pub key: &'static str,
    pub value: &'static str,
    pub query_norm: &'static str,
    pub key_norm: &'static str,
    pub attention_output: &'static str,
    pub mlp_norm: &'static str,
    pub gate: &'static str,
    pub up: &'static str,
    pub down: &'static str,
}

impl TensorNames {
    /// Names that Llama introduced and most families use.
    pub(in crate::model) const USUAL: Self = Self {
        embedding: "model.embed_tokens",
        final_norm: "model.norm",
        head: "lm_head",
        layers: "model.layers",
        attention_norm: "input_layernorm",
        query: "self_attn.q_proj",
        key: "self_attn.k_proj",
        value: "self_attn.v_proj",
        query_norm: "self_attn.q_norm",
        key_norm: "self_attn.k_norm",
        attention_output: "self_attn.o_proj",
        mlp_norm: "post_attention_layernorm",
        gate: "mlp.gate_proj",
        up: "mlp.up_proj",
        down: "mlp.down_proj",
    };
}
