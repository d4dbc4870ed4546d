//! Configuration from `config.json` of the Hugging Face hub.
//!
//! Both spellings are supported: that of Transformers 5 (`rope_parameters`, `dtype`) and the older one (`rope_theta`,
//! `rope_scaling`, `torch_dtype`).

use serde_json::{Map, Value};

use super::{Fields, OutputHead, Sizes, WindowRule};
use crate::graph::{ActivationKind, RopeStyle};
use crate::model::error::{invalid, unsupported};
use crate::model::rope::RopeScaling;
use crate::model::{Architecture, ModelConfig, ModelError, RopeConfig};

/// Defaults of absent fields in the hub configs of a family.
///
/// They are the defaults of the family's configuration class in Transformers 5, which does not write fields with their
/// default.
#[derive(Clone, Copy, Debug)]
pub(in crate::model) struct HubDefaults {
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub layers: usize,
    pub heads: usize,
    /// `None` means the same number as `heads`.
    pub kv_heads: Option<usize>,
    /// `None` means `hidden_size / heads`.
    pub head_dim: Option<usize>,
    pub max_position_embeddings: usize,
    pub rms_norm_eps: f32,
    pub sliding_window: Option<usize>,
}

/// Reads the configuration from a `config.json`.
///
/// A field that is absent or null has its family's default, as in Transformers.
///
/// # Errors
/// A [`ModelError`] with the name of the field that is invalid, missing, or belongs to an unsupported feature.
pub fn config_from_hub(json: &[u8]) -> Result<ModelConfig, ModelError> {
    let object = object(json, "config.json")?;
    let json = JsonFields { object: &object, parent: "" };
    let architecture = architecture(&json)?;
    if let Some(method) = json.get("quantization_config") {
        let name = method.get("quant_method").and_then(Value::as_str).unwrap_or("unnamed");
        return Err(unsupported("quantization_config.quant_method", name, "use unquantized weights or a GGUF file"));
    }
    for field in ["is_encoder_decoder", "add_cross_attention"] {
        if json.bool(field)?.unwrap_or(false) {
            return Err(unsupported(field, true, "expected false: only decoder-only models are supported"));
        }
    }
    let family = architecture.family();
    let model = (family.describe)(&Fields::Hub(HubFields { json, architecture, defaults: &family.hub_defaults }))?;
    model.validate()?;
    Ok(model)
}

/// Returns the end-of-sequence ids in a `generation_config.json`.
///
/// # Errors
/// [`ModelError::Json`] if the file is not a JSON object; [`ModelError::InvalidField`] if `eos_token_id` is not a token
/// id or a list of token ids.
pub(crate) fn eos_ids_of_generation_config(json: &[u8]) -> Result<Vec<u32>, ModelError> {
    let object = object(json, "generation_config.json")?;
    JsonFields { object: &object, parent: "" }.ids("eos_token_id")
}

fn object(json: &[u8], file: &str) -> Result<Map<String, Value>, ModelError> {
    let error = |reason| ModelError::Json { file: file.to_owned(), reason };
    match serde_json::from_slice(json).map_err(|e| error(e.to_string()))? {
        Value::Object(object) => Ok(object),
        _ => Err(error("expected an object".to_owned())),
    }
}

fn architecture(config: &JsonFields<'_>) -> Result<Architecture, ModelError> {
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

/// Hub config of a known family.
#[derive(Debug)]
pub(in crate::model) struct HubFields<'a> {
    pub(super) json: JsonFields<'a>,
    pub(super) architecture: Architecture,
    pub(super) defaults: &'a HubDefaults,
}

impl HubFields<'_> {
    pub(super) fn activation(&self) -> Result<Option<ActivationKind>, ModelError> {
        match self.json.str("hidden_act")? {
            None => Ok(None),
            Some("silu" | "swish") => Ok(Some(ActivationKind::Silu)),
            Some("gelu_pytorch_tanh" | "gelu_new") => Ok(Some(ActivationKind::GeluTanh)),
            Some(name) => Err(unsupported("hidden_act", name, "expected silu or gelu_pytorch_tanh")),
        }
    }

    pub(super) fn head(&self) -> Result<OutputHead, ModelError> {
        let is_tied = self.json.bool("tie_word_embeddings")?.unwrap_or(false);
        Ok(if is_tied { OutputHead::Tied } else { OutputHead::Untied })
    }

    #[allow(clippy::cast_possible_truncation)] // at most head_dim
    pub(super) fn rope(&self, sizes: &Sizes) -> Result<RopeConfig, ModelError> {
        let config = &self.json;
        let parameters = config.object("rope_parameters")?;
        let scaling = match &parameters {
            Some(parameters) => Some(*parameters),
            None => config.object("rope_scaling")?,
        };
        if let Some(scaling) = scaling
            && let Some((kind, _)) = scaling.object.iter().find(|(_, value)| value.is_object())
        {
            // Transformers 5 nests one set of parameters per layer type; none of the supported families has more than
            // one.
            return Err(unsupported(&scaling.name(kind), "a nested set", "expected one set for all layers"));
        }
        let nested = |field: &str| parameters.map_or(Ok(None), |parameters| parameters.float(field));
        let either = |field: &str| -> Result<Option<f64>, ModelError> { Ok(nested(field)?.or(config.float(field)?)) };
        let rotary_factor = either("partial_rotary_factor")?.unwrap_or(1.0);
        if !(rotary_factor > 0.0 && rotary_factor <= 1.0) {
            return Err(invalid("partial_rotary_factor", rotary_factor, "a number above 0 and up to 1"));
        }
        // Some configs store the original context length outside the parameters.
        let original = config.size("original_max_position_embeddings")?.unwrap_or(sizes.max_position_embeddings);
        let scaling = scaling.map_or(Ok(RopeScaling::Default), |scaling| rope_scaling(&scaling, original))?;
        scaling.validate()?;
        Ok(RopeConfig {
            theta: either("rope_theta")?.unwrap_or(10_000.0),
            scaling,
            divisors: None,
            dim: (sizes.head_dim as f64 * rotary_factor) as usize,
            style: RopeStyle::Half,
        })
    }

    /// Returns the window of each layer: by `layer_types` if present, otherwise by the family's rule.
    pub(super) fn windows(&self, rule: WindowRule, layers: usize) -> Result<Vec<Option<u32>>, ModelError> {
        let config = &self.json;
        // Here null means "no window", while for sizes it means "absent".
        let window = if config.object.contains_key("sliding_window") {
            config.size("sliding_window")?
        } else {
            self.defaults.sliding_window
        };
        let is_on = match rule {
            WindowRule::None => false,
            WindowRule::All => true,
            WindowRule::Switched { .. } => config.bool("use_sliding_window")?.unwrap_or(false),
        };
        let window = match window.filter(|_| is_on) {
            Some(0) => return Err(invalid("sliding_window", 0, "at least 1, or null for no window")),
            Some(w) => Some(u32::try_from(w).map_err(|_| invalid("sliding_window", w, "a 32-bit number"))?),
            None => None,
        };
        let Some(types) = config.list("layer_types")? else {
            let first_layer = match rule {
                WindowRule::None | WindowRule::All => 0,
                WindowRule::Switched { first_layer } => config.size("max_window_layers")?.unwrap_or(first_layer),
            };
            return Ok((0..layers).map(|layer| window.filter(|_| layer >= first_layer)).collect());
        };
        if types.len() != layers {
            let expected = format!("one entry for each of {layers} layers");
            return Err(invalid("layer_types", format!("{} entries", types.len()), &expected));
        }
        let window_of = |kind: &Value| match kind.as_str() {
            Some("full_attention") => Ok(None),
            Some("sliding_attention") if window.is_some() => Ok(window),
            Some("sliding_attention") => Err(invalid("layer_types", "sliding_attention", "a sliding_window as well")),
            _ => Err(unsupported("layer_types", kind, "expected full_attention or sliding_attention")),
        };
        types.iter().map(window_of).collect()
    }
}

fn rope_scaling(scaling: &JsonFields<'_>, default_original: usize) -> Result<RopeScaling, ModelError> {
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
        _ => Err(unsupported(&scaling.name("rope_type"), kind, "expected default, linear, llama3 or yarn")),
    }
}

/// Typed access to a JSON object; null counts as absent.
#[derive(Clone, Copy, Debug)]
pub(super) struct JsonFields<'a> {
    object: &'a Map<String, Value>,
    /// Name of the field that contains the object, for errors; empty for the config itself.
    parent: &'static str,
}

impl<'a> JsonFields<'a> {
    fn get(&self, field: &str) -> Option<&'a Value> {
        self.object.get(field).filter(|value| !value.is_null())
    }

    /// Returns the name of the field with its path.
    pub(super) fn name(&self, field: &str) -> String {
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

    pub(super) fn size(&self, field: &str) -> Result<Option<usize>, ModelError> {
        self.typed(field, "a whole number of at least 0", |v| v.as_u64().and_then(|n| usize::try_from(n).ok()))
    }

    pub(super) fn float(&self, field: &str) -> Result<Option<f64>, ModelError> {
        self.typed(field, "a number", Value::as_f64)
    }

    pub(super) fn bool(&self, field: &str) -> Result<Option<bool>, ModelError> {
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

    /// Reads one id or a list of ids.
    pub(super) fn ids(&self, field: &str) -> Result<Vec<u32>, ModelError> {
        let id = |v: &Value| v.as_u64().and_then(|n| u32::try_from(n).ok());
        let read = |v: &Value| match v {
            Value::Array(list) => list.iter().map(id).collect(),
            one => id(one).map(|n| vec![n]),
        };
        Ok(self.typed(field, "a token id or a list of them", read)?.unwrap_or_default())
    }
}
