//! `config.json` of the Hugging Face hub, in the spelling of Transformers 5 (`rope_parameters`, `dtype`) and in the older
//! one (`rope_theta`, `rope_scaling`, `torch_dtype`).

use serde_json::{Map, Value};

use crate::graph::{ActivationKind, RopeStyle};
use crate::model::error::{invalid, unsupported};
use crate::model::rope::RopeScaling;
use crate::model::{Architecture, ModelConfig, ModelError, RopeConfig};

/// Reads a config. A field that is absent or null has its family's default, as Transformers has it.
#[allow(clippy::cast_possible_truncation)] // an epsilon rounds to f32
pub fn config_from_hub(json: &[u8]) -> Result<ModelConfig, ModelError> {
    let parsed: Value = serde_json::from_slice(json)
        .map_err(|e| ModelError::Json { file: "config.json".into(), reason: e.to_string() })?;
    let Value::Object(object) = parsed else {
        return Err(ModelError::Json { file: "config.json".into(), reason: "it is no object".into() });
    };
    let config = Fields { object: &object, parent: "" };
    let architecture = architecture(&config)?;
    let defaults = architecture.hub_defaults();

    if let Some(method) = config.get("quantization_config") {
        let name = method.get("quant_method").and_then(Value::as_str).unwrap_or("unnamed");
        return Err(unsupported("quantization_config.quant_method", name, "use unquantized weights or a GGUF file"));
    }
    for field in ["is_encoder_decoder", "add_cross_attention"] {
        if config.bool(field)?.unwrap_or(false) {
            return Err(unsupported(field, true, "only decoder models run"));
        }
    }

    let hidden_size = config.size("hidden_size")?.unwrap_or(defaults.hidden_size);
    let heads = config.size("num_attention_heads")?.unwrap_or(defaults.heads);
    if heads == 0 {
        return Err(invalid("num_attention_heads", heads, "at least 1"));
    }
    let layers = config.size("num_hidden_layers")?.unwrap_or(defaults.layers);
    let head_dim = config.size("head_dim")?.or(defaults.head_dim).unwrap_or(hidden_size / heads);
    let max_position_embeddings = config.size("max_position_embeddings")?.unwrap_or(defaults.max_position_embeddings);
    let attention_bias = config.bool("attention_bias")?.unwrap_or(false);
    let model = ModelConfig {
        architecture,
        vocab_size: config.size("vocab_size")?.unwrap_or(defaults.vocab_size),
        hidden_size,
        intermediate_size: config.size("intermediate_size")?.unwrap_or(defaults.intermediate_size),
        layers,
        heads,
        kv_heads: config.size("num_key_value_heads")?.or(defaults.kv_heads).unwrap_or(heads),
        head_dim,
        rms_norm_eps: config.float("rms_norm_eps")?.map_or(defaults.rms_norm_eps, |eps| eps as f32),
        rope: rope(&config, head_dim, max_position_embeddings)?,
        activation: activation(config.str("hidden_act")?.unwrap_or("silu"))?,
        tied_embeddings: config.bool("tie_word_embeddings")?.unwrap_or(false),
        qkv_bias: architecture == Architecture::Qwen2 || attention_bias,
        output_bias: attention_bias && architecture != Architecture::Qwen2,
        mlp_bias: config.bool("mlp_bias")?.unwrap_or(false) && architecture == Architecture::Llama,
        qk_norm: architecture == Architecture::Qwen3,
        windows: windows(&config, architecture, layers)?,
        max_position_embeddings,
        eos_ids: config.ids("eos_token_id")?,
    };
    model.validate()?;
    Ok(model)
}

/// End-of-sequence ids of a `generation_config.json`.
pub(crate) fn eos_ids_of_generation_config(json: &[u8]) -> Result<Vec<u32>, ModelError> {
    let parsed: Value = serde_json::from_slice(json)
        .map_err(|e| ModelError::Json { file: "generation_config.json".into(), reason: e.to_string() })?;
    match parsed {
        Value::Object(object) => Fields { object: &object, parent: "" }.ids("eos_token_id"),
        _ => Err(ModelError::Json { file: "generation_config.json".into(), reason: "it is no object".into() }),
    }
}

fn architecture(config: &Fields<'_>) -> Result<Architecture, ModelError> {
    if let Some(name) = config.str("model_type")? {
        return Architecture::from_hub(name);
    }
    let names = config.list("architectures")?;
    let first = names.and_then(|names| names.first()).and_then(Value::as_str);
    match first {
        Some(name) => Architecture::from_hub(name),
        None => Err(ModelError::MissingField { field: "model_type".into() }),
    }
}

fn activation(name: &str) -> Result<ActivationKind, ModelError> {
    match name {
        "silu" | "swish" => Ok(ActivationKind::Silu),
        "gelu_pytorch_tanh" | "gelu_new" => Ok(ActivationKind::GeluTanh),
        _ => Err(unsupported("hidden_act", name, "silu or gelu_pytorch_tanh would be")),
    }
}

#[allow(clippy::cast_possible_truncation)] // at most head_dim
fn rope(config: &Fields<'_>, head_dim: usize, max_positions: usize) -> Result<RopeConfig, ModelError> {
    let parameters = config.object("rope_parameters")?;
    let scaling = match &parameters {
        Some(parameters) => Some(*parameters),
        None => config.object("rope_scaling")?,
    };
    if let Some(scaling) = scaling
        && let Some((kind, _)) = scaling.object.iter().find(|(_, value)| value.is_object())
    {
        // Transformers 5 nests one set a layer type; none of these families has more than one.
        return Err(unsupported(&scaling.name(kind), "a set of its own", "one set for all layers would be"));
    }
    let nested = |field: &str| parameters.map_or(Ok(None), |parameters| parameters.float(field));
    let either = |field: &str| -> Result<Option<f64>, ModelError> { Ok(nested(field)?.or(config.float(field)?)) };
    let rotary_factor = either("partial_rotary_factor")?.unwrap_or(1.0);
    if !(rotary_factor > 0.0 && rotary_factor <= 1.0) {
        return Err(invalid("partial_rotary_factor", rotary_factor, "a number above 0 and up to 1"));
    }
    // Some configs keep the first training's length beside the parameters.
    let original = config.size("original_max_position_embeddings")?.unwrap_or(max_positions);
    let scaling = scaling.map_or(Ok(RopeScaling::Default), |scaling| rope_scaling(&scaling, original))?;
    scaling.validate()?;
    Ok(RopeConfig {
        theta: either("rope_theta")?.unwrap_or(10_000.0),
        scaling,
        divisors: None,
        dim: (head_dim as f64 * rotary_factor) as usize,
        style: RopeStyle::Half,
    })
}

fn rope_scaling(scaling: &Fields<'_>, default_original: usize) -> Result<RopeScaling, ModelError> {
    let kind = scaling.str("rope_type")?.or(scaling.str("type")?).unwrap_or("default");
    let need =
        |field: &str| scaling.float(field)?.ok_or_else(|| ModelError::MissingField { field: scaling.name(field) });
    let original = || -> Result<u32, ModelError> {
        let field = "original_max_position_embeddings";
        let tokens = scaling.size(field)?.unwrap_or(default_original);
        u32::try_from(tokens).map_err(|_| invalid(&scaling.name(field), tokens, "a 32-bit number above 0"))
    };
    match kind {
        "default" => Ok(RopeScaling::Default),
        "linear" => Ok(RopeScaling::Linear { factor: need("factor")? }),
        "llama3" => Ok(RopeScaling::Llama3 {
            factor: need("factor")?,
            low_freq_factor: need("low_freq_factor")?,
            high_freq_factor: need("high_freq_factor")?,
            original_max_position_embeddings: original()?,
        }),
        "yarn" => Ok(RopeScaling::Yarn {
            factor: need("factor")?,
            original_max_position_embeddings: original()?,
            beta_fast: scaling.float("beta_fast")?.unwrap_or(32.0),
            beta_slow: scaling.float("beta_slow")?.unwrap_or(1.0),
            attention_factor: scaling.float("attention_factor")?,
            mscale: scaling.float("mscale")?,
            mscale_all_dim: scaling.float("mscale_all_dim")?,
            truncate: scaling.bool("truncate")?.unwrap_or(true),
        }),
        _ => Err(unsupported(&scaling.name("rope_type"), kind, "default, linear, llama3 or yarn would be")),
    }
}

/// Window of each layer: `layer_types` if given, else the family's older rule.
fn windows(config: &Fields<'_>, arch: Architecture, layers: usize) -> Result<Vec<Option<u32>>, ModelError> {
    let defaults = arch.hub_defaults();
    // Null says "none" here, unlike for sizes.
    let window = if config.object.contains_key("sliding_window") {
        config.size("sliding_window")?
    } else {
        defaults.sliding_window
    };
    let on = match arch {
        Architecture::Llama => false,
        // Mistral's class has no such switch.
        Architecture::Mistral => true,
        Architecture::Qwen2 | Architecture::Qwen3 => config.bool("use_sliding_window")?.unwrap_or(false),
    };
    let window = match window.filter(|_| on) {
        Some(0) => return Err(invalid("sliding_window", 0, "at least 1, or null for none")),
        Some(w) => Some(u32::try_from(w).map_err(|_| invalid("sliding_window", w, "a 32-bit number"))?),
        None => None,
    };
    if layers > 1 << 20 {
        return Err(invalid("num_hidden_layers", layers, "at most 2^20"));
    }
    if let Some(types) = config.list("layer_types")? {
        if types.len() != layers {
            let expected = format!("one entry for each of {layers} layers");
            return Err(invalid("layer_types", format!("{} entries", types.len()), &expected));
        }
        return types
            .iter()
            .map(|kind| match kind.as_str() {
                Some("full_attention") => Ok(None),
                Some("sliding_attention") if window.is_some() => Ok(window),
                Some("sliding_attention") => {
                    Err(invalid("layer_types", "sliding_attention", "a sliding_window with it"))
                }
                _ => Err(unsupported("layer_types", kind, "full_attention or sliding_attention would be")),
            })
            .collect();
    }
    // Qwen's older rule: layers from `max_window_layers` on have the window.
    let first_windowed = match arch {
        Architecture::Qwen2 | Architecture::Qwen3 => config.size("max_window_layers")?.unwrap_or(28),
        _ => 0,
    };
    Ok((0..layers).map(|layer| window.filter(|_| layer >= first_windowed)).collect())
}

/// Typed access to a JSON object; null counts as absent.
#[derive(Clone, Copy)]
struct Fields<'a> {
    object: &'a Map<String, Value>,
    /// The field that holds the object, for errors; empty for the config itself.
    parent: &'static str,
}

impl<'a> Fields<'a> {
    fn get(&self, field: &str) -> Option<&'a Value> {
        self.object.get(field).filter(|value| !value.is_null())
    }

    /// The field's name with its path.
    fn name(&self, field: &str) -> String {
        if self.parent.is_empty() { field.to_owned() } else { format!("{}.{field}", self.parent) }
    }

    fn typed<T>(
        &self,
        field: &str,
        expected: &str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ModelError> {
        match self.get(field) {
            None => Ok(None),
            Some(value) => read(value).map(Some).ok_or_else(|| invalid(&self.name(field), value, expected)),
        }
    }

    fn size(&self, field: &str) -> Result<Option<usize>, ModelError> {
        self.typed(field, "a whole number of at least 0", |v| v.as_u64().and_then(|n| usize::try_from(n).ok()))
    }

    fn float(&self, field: &str) -> Result<Option<f64>, ModelError> {
        self.typed(field, "a number", Value::as_f64)
    }

    fn bool(&self, field: &str) -> Result<Option<bool>, ModelError> {
        self.typed(field, "true or false", Value::as_bool)
    }

    fn str(&self, field: &str) -> Result<Option<&'a str>, ModelError> {
        self.typed(field, "a string", Value::as_str)
    }

    fn list(&self, field: &str) -> Result<Option<&'a Vec<Value>>, ModelError> {
        self.typed(field, "a list", Value::as_array)
    }

    fn object(&self, field: &'static str) -> Result<Option<Self>, ModelError> {
        let object = self.typed(field, "an object or null", Value::as_object)?;
        Ok(object.map(|object| Self { object, parent: field }))
    }

    /// One id or a list of ids.
    fn ids(&self, field: &str) -> Result<Vec<u32>, ModelError> {
        let id = |v: &Value| v.as_u64().and_then(|n| u32::try_from(n).ok());
        let read = |v: &Value| match v {
            Value::Array(list) => list.iter().map(id).collect(),
            one => id(one).map(|n| vec![n]),
        };
        Ok(self.typed(field, "a token id or a list of them", read)?.unwrap_or_default())
    }
}
