//! Model configuration out of GGUF metadata (keys: the GGUF specification, ggml-org/ggml `docs/gguf.md`).

use crate::graph::{ActivationKind, RopeStyle};
use crate::model::error::{invalid, unsupported};
use crate::model::rope::RopeScaling;
use crate::model::{Architecture, ModelConfig, ModelError, RopeConfig, gguf_conventions};
use crate::weights::gguf::{Gguf, Metadata, QkRows, Value};
use crate::weights::{TensorView, WeightSource as _};

/// Reads a configuration. What only the tensors say (tied embeddings, biases) is taken from their presence.
///
/// Tensors are looked up by their hub names: the file must have the [conventions](super::super::gguf_conventions) of its
/// family, as [`open`](super::super::open) gives them.
///
/// # Errors
/// [`ModelError`] names the key or tensor that is wrong, missing or of a feature that is not implemented.
pub fn config_from_gguf(file: &Gguf) -> Result<ModelConfig, ModelError> {
    let metadata = file.metadata();
    let name =
        metadata.architecture().ok_or_else(|| ModelError::MissingField { field: "general.architecture".into() })?;
    let architecture = Architecture::from_gguf(name)?;
    let keys = Keys { metadata, architecture: name };
    let has = |tensor: &str| present(file, tensor).map(|found| found.is_some());

    let hidden_size = keys.size("embedding_length")?;
    let heads = keys.size("attention.head_count")?;
    if heads == 0 {
        return Err(invalid(&keys.name("attention.head_count"), heads, "at least 1"));
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
    let embedding = present(file, "model.embed_tokens.weight")?
        .ok_or_else(|| ModelError::MissingTensor { name: "model.embed_tokens.weight".into() })?;
    let max_position_embeddings = keys.size("context_length")?;
    let window = match keys.optional_size("attention.sliding_window")? {
        None | Some(0) => None,
        Some(w) => {
            Some(u32::try_from(w).map_err(|_| invalid(&keys.name("attention.sliding_window"), w, "a 32-bit number"))?)
        }
    };
    let rope_dim = keys.optional_size("rope.dimension_count")?.unwrap_or(head_dim);
    let conventions = gguf_conventions(name);
    if conventions.is_some_and(|has| has.qk_rows == QkRows::InterleavedPairs) && rope_dim != head_dim {
        // Rows are brought into the hub's order over the whole head.
        return Err(unsupported(&keys.name("rope.dimension_count"), rope_dim, &format!("it must be {head_dim}")));
    }
    keys.refuse_unknown_factors()?;
    let model = ModelConfig {
        architecture,
        vocab_size: embedding.shape.first().copied().unwrap_or(0),
        hidden_size,
        intermediate_size: keys.size("feed_forward_length")?,
        layers,
        heads,
        kv_heads: keys.optional_size("attention.head_count_kv")?.unwrap_or(heads),
        head_dim,
        rms_norm_eps: keys
            .optional_float("attention.layer_norm_rms_epsilon")?
            .ok_or_else(|| ModelError::MissingField { field: keys.name("attention.layer_norm_rms_epsilon") })?,
        rope: RopeConfig {
            theta: keys.optional_float("rope.freq_base")?.map_or(10_000.0, f64::from),
            scaling: rope_scaling(&keys, max_position_embeddings)?,
            divisors: present(file, "rope_freqs.weight")?.map(|tensor| tensor.to_f32()),
            dim: rope_dim,
            // The weight source hands out query and key rows in the hub's order.
            style: RopeStyle::Half,
        },
        activation: ActivationKind::Silu,
        tied_embeddings: !has("lm_head.weight")?,
        qkv_bias: has("model.layers.0.self_attn.q_proj.bias")?,
        output_bias: has("model.layers.0.self_attn.o_proj.bias")?,
        mlp_bias: has("model.layers.0.mlp.gate_proj.bias")?,
        qk_norm: has("model.layers.0.self_attn.q_norm.weight")?,
        windows: vec![window; layers],
        max_position_embeddings,
        eos_ids: metadata.u32("tokenizer.ggml.eos_token_id").into_iter().collect(),
    };
    model.validate().map_err(|error| keys.rename(error))?;
    Ok(model)
}

/// The tensor, if the file has it. One that is there and cannot be read is no reason to do without.
fn present<'a>(file: &'a Gguf, name: &str) -> Result<Option<TensorView<'a>>, ModelError> {
    match file.require(name) {
        Ok(tensor) => Ok(Some(tensor)),
        Err(error) => match ModelError::from_tensor(name, &error) {
            ModelError::MissingTensor { .. } => Ok(None),
            other => Err(other),
        },
    }
}

fn rope_scaling(keys: &Keys<'_>, max_positions: usize) -> Result<RopeScaling, ModelError> {
    let kind = keys.optional_str("rope.scaling.type")?;
    let mut factor = keys.optional_float("rope.scaling.factor")?;
    if factor.is_none() {
        factor = keys.optional_float("rope.scale_linear")?;
    }
    let need_factor =
        || factor.map(f64::from).ok_or_else(|| ModelError::MissingField { field: keys.name("rope.scaling.factor") });
    match kind {
        // Files without a type scale linearly; a factor of 0 there means none.
        None if factor.is_some_and(|factor| factor != 0.0) => Ok(RopeScaling::Linear { factor: need_factor()? }),
        None | Some("none") => Ok(RopeScaling::Default),
        Some("linear") => Ok(RopeScaling::Linear { factor: need_factor()? }),
        Some("yarn") => Ok(RopeScaling::Yarn {
            factor: need_factor()?,
            original_max_position_embeddings: {
                let name = "rope.scaling.original_context_length";
                let tokens = keys.optional_size(name)?.unwrap_or(max_positions);
                u32::try_from(tokens).map_err(|_| invalid(&keys.name(name), tokens, "a 32-bit number"))?
            },
            beta_fast: keys.optional_float("rope.scaling.yarn_beta_fast")?.map_or(32.0, f64::from),
            beta_slow: keys.optional_float("rope.scaling.yarn_beta_slow")?.map_or(1.0, f64::from),
            attention_factor: None,
            mscale: None,
            mscale_all_dim: None,
            truncate: true,
        }),
        Some(other) => Err(unsupported(&keys.name("rope.scaling.type"), other, "none, linear or yarn would be")),
    }
}

/// Factors that other engines read and that would change every number, with the value that means "none".
const FACTORS: [(&str, f32); 8] = [
    ("attention.scale", 0.0),
    ("attn_logit_softcapping", 0.0),
    ("final_logit_softcapping", 0.0),
    ("logit_scale", 0.0),
    ("embedding_scale", 0.0),
    ("residual_scale", 0.0),
    ("rope.scaling.attn_factor", 1.0),
    ("rope.scaling.yarn_attn_factor", 1.0),
];

/// What the configuration's fields are called here, where they are named otherwise.
const FIELDS: [(&str, &str); 11] = [
    ("hidden_size", "embedding_length"),
    ("intermediate_size", "feed_forward_length"),
    ("num_hidden_layers", "block_count"),
    ("num_attention_heads", "attention.head_count"),
    ("num_key_value_heads", "attention.head_count_kv"),
    ("head_dim", "attention.key_length"),
    ("max_position_embeddings", "context_length"),
    ("rotary dimension", "rope.dimension_count"),
    ("rms_norm_eps", "attention.layer_norm_rms_epsilon"),
    ("rope_theta", "rope.freq_base"),
    ("rope_scaling.factor", "rope.scaling.factor"),
];

/// Keys of one architecture.
struct Keys<'a> {
    metadata: &'a Metadata,
    architecture: &'a str,
}

impl<'a> Keys<'a> {
    fn name(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture)
    }

    /// The error with the file's own name of the field.
    fn rename(&self, error: ModelError) -> ModelError {
        match error {
            ModelError::InvalidField { field, value, expected } => {
                let key = FIELDS.iter().find(|(hub, _)| *hub == field).map(|(_, key)| self.name(key));
                ModelError::InvalidField { field: key.unwrap_or(field), value, expected }
            }
            other => other,
        }
    }

    fn refuse_unknown_factors(&self) -> Result<(), ModelError> {
        for (key, none) in FACTORS {
            if let Some(factor) = self.optional_float(key)?.filter(|factor| *factor != none) {
                return Err(unsupported(&self.name(key), factor, &format!("{none} would be")));
            }
        }
        Ok(())
    }

    fn optional_float(&self, key: &str) -> Result<Option<f32>, ModelError> {
        let name = self.name(key);
        let value = self.metadata.get(&name);
        value.map(|value| value.as_f32().ok_or_else(|| invalid(&name, format!("{value:?}"), "a float"))).transpose()
    }

    fn optional_str(&self, key: &str) -> Result<Option<&'a str>, ModelError> {
        let name = self.name(key);
        match (self.metadata.get(&name), self.metadata.str(&name)) {
            (Some(value), None) => Err(invalid(&name, format!("{value:?}"), "a string")),
            (_, text) => Ok(text),
        }
    }

    fn optional_size(&self, key: &str) -> Result<Option<usize>, ModelError> {
        let name = self.name(key);
        match (self.metadata.get(&name), self.metadata.u64(&name)) {
            (None, _) => Ok(None),
            (_, Some(n)) => usize::try_from(n).map(Some).map_err(|_| invalid(&name, n, "a size")),
            (Some(Value::Array(list)), None) => {
                let value = format!("a list of {}", list.len());
                Err(unsupported(&name, value, "one whole number for all layers would be"))
            }
            (Some(value), None) => Err(invalid(&name, format!("{value:?}"), "a whole number of at least 0")),
        }
    }

    fn size(&self, key: &str) -> Result<usize, ModelError> {
        self.optional_size(key)?.ok_or_else(|| ModelError::MissingField { field: self.name(key) })
    }
}
