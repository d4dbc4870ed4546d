//! Model configuration out of GGUF metadata (keys: the GGUF specification, ggml-org/ggml `docs/gguf.md`).

use super::config::{invalid, unsupported};
use super::rope::RopeScaling;
use super::{Architecture, ModelConfig, ModelError, RopeConfig};
use crate::graph::{ActivationKind, RopeStyle};
use crate::weights::WeightSource;
use crate::weights::gguf::{Gguf, Metadata};

/// Reads a configuration. What only the tensors say (tied embeddings, biases) is taken from their presence.
pub fn config_from_gguf(file: &Gguf) -> Result<ModelConfig, ModelError> {
    let metadata = file.metadata();
    let name =
        metadata.architecture().ok_or_else(|| ModelError::MissingField { field: "general.architecture".into() })?;
    let architecture = Architecture::from_gguf(name)?;
    let keys = Keys { metadata, architecture: name };
    let has = |tensor: &str| file.tensor(tensor).is_some();

    let hidden_size = keys.size("embedding_length")?;
    let heads = keys.size("attention.head_count")?;
    if heads == 0 {
        return Err(invalid(&keys.name("attention.head_count"), 0, "at least 1"));
    }
    let layers = keys.size("block_count")?;
    if layers > 1 << 20 {
        return Err(invalid(&keys.name("block_count"), layers, "at most 2^20"));
    }
    let head_dim = keys.optional_size("attention.key_length")?.unwrap_or(hidden_size / heads);
    if let Some(values) = keys.optional_size("attention.value_length")?
        && values != head_dim
    {
        return Err(unsupported(&keys.name("attention.value_length"), values, "it must equal attention.key_length"));
    }
    if let Some(experts) = keys.optional_size("expert_count")?.filter(|n| *n > 0) {
        return Err(unsupported(&keys.name("expert_count"), experts, "only dense models run"));
    }
    let embedding = file
        .tensor("model.embed_tokens.weight")
        .ok_or_else(|| ModelError::MissingTensor { name: "model.embed_tokens.weight".into() })?;
    let max_position_embeddings = keys.size("context_length")?;
    let window = match keys.optional_size("attention.sliding_window")? {
        None | Some(0) => None,
        Some(w) => {
            Some(u32::try_from(w).map_err(|_| invalid(&keys.name("attention.sliding_window"), w, "a 32-bit number"))?)
        }
    };
    let model = ModelConfig {
        architecture,
        vocab_size: embedding.shape.first().copied().unwrap_or(0),
        hidden_size,
        intermediate_size: keys.size("feed_forward_length")?,
        layers,
        heads,
        kv_heads: keys.optional_size("attention.head_count_kv")?.unwrap_or(heads),
        head_dim,
        rms_norm_eps: keys.float("attention.layer_norm_rms_epsilon")?,
        rope: RopeConfig {
            theta: metadata.f32(&keys.name("rope.freq_base")).map_or(10_000.0, f64::from),
            scaling: rope_scaling(&keys, max_position_embeddings)?,
            divisors: file.tensor("rope_freqs.weight").map(|tensor| tensor.to_f32()),
            dim: keys.optional_size("rope.dimension_count")?.unwrap_or(head_dim),
            // The weight source hands out query and key rows in the hub's order.
            style: RopeStyle::Half,
        },
        activation: ActivationKind::Silu,
        tied_embeddings: !has("lm_head.weight"),
        qkv_bias: has("model.layers.0.self_attn.q_proj.bias"),
        output_bias: has("model.layers.0.self_attn.o_proj.bias"),
        mlp_bias: has("model.layers.0.mlp.gate_proj.bias"),
        qk_norm: has("model.layers.0.self_attn.q_norm.weight"),
        windows: vec![window; layers],
        max_position_embeddings,
        eos_ids: metadata.u32("tokenizer.ggml.eos_token_id").into_iter().collect(),
    };
    model.validate()?;
    Ok(model)
}

fn rope_scaling(keys: &Keys<'_>, max_positions: usize) -> Result<RopeScaling, ModelError> {
    let metadata = keys.metadata;
    let key = keys.name("rope.scaling.type");
    let factor = metadata.f32(&keys.name("rope.scaling.factor")).or(metadata.f32(&keys.name("rope.scale_linear")));
    let need_factor = || match factor {
        Some(factor) if factor.is_finite() && factor >= 1.0 => Ok(f64::from(factor)),
        Some(factor) => Err(invalid(&keys.name("rope.scaling.factor"), factor, "a finite number of at least 1")),
        None => Err(ModelError::MissingField { field: keys.name("rope.scaling.factor") }),
    };
    match metadata.str(&key) {
        None if factor.is_some_and(|factor| factor > 1.0) => Ok(RopeScaling::Linear { factor: need_factor()? }),
        None | Some("none") => Ok(RopeScaling::Default),
        Some("linear") => Ok(RopeScaling::Linear { factor: need_factor()? }),
        Some("yarn") => Ok(RopeScaling::Yarn {
            factor: need_factor()?,
            original_max_position_embeddings: {
                let name = "rope.scaling.original_context_length";
                let tokens = keys.optional_size(name)?.unwrap_or(max_positions);
                u32::try_from(tokens).map_err(|_| invalid(&keys.name(name), tokens, "a 32-bit number"))?
            },
            beta_fast: metadata.f32(&keys.name("rope.scaling.yarn_beta_fast")).map_or(32.0, f64::from),
            beta_slow: metadata.f32(&keys.name("rope.scaling.yarn_beta_slow")).map_or(1.0, f64::from),
            attention_factor: None,
            mscale: None,
            mscale_all_dim: None,
            truncate: true,
        }),
        Some(other) => Err(unsupported(&key, other, "none, linear or yarn would be")),
    }
}

/// Keys of one architecture.
struct Keys<'a> {
    metadata: &'a Metadata,
    architecture: &'a str,
}

impl Keys<'_> {
    fn name(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture)
    }

    fn optional_size(&self, key: &str) -> Result<Option<usize>, ModelError> {
        let name = self.name(key);
        match (self.metadata.get(&name), self.metadata.u64(&name)) {
            (None, _) => Ok(None),
            (_, Some(n)) => usize::try_from(n).map(Some).map_err(|_| invalid(&name, n, "a size")),
            (Some(value), None) => {
                Err(unsupported(&name, format!("{value:?}"), "one whole number for all layers would be"))
            }
        }
    }

    fn size(&self, key: &str) -> Result<usize, ModelError> {
        self.optional_size(key)?.ok_or_else(|| ModelError::MissingField { field: self.name(key) })
    }

    fn float(&self, key: &str) -> Result<f32, ModelError> {
        let name = self.name(key);
        self.metadata.f32(&name).ok_or(ModelError::MissingField { field: name })
    }
}
