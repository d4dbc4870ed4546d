//! Configuration from GGUF metadata (keys: the GGUF specification, ggml-org/ggml `docs/gguf.md`).

use std::cell::RefCell;

use super::{Fields, OutputHead, Sizes};
use crate::graph::RopeStyle;
use crate::model::error::{invalid, unsupported};
use crate::model::rope::RopeScaling;
use crate::model::{Architecture, ModelConfig, ModelError, RopeConfig};
use crate::weights::gguf::{Gguf, Metadata, QkRows, Value};
use crate::weights::{TensorView, WeightSource as _};

/// Reads the configuration from a GGUF file.
///
/// Settings without a key (tied embeddings, biases) are derived from the presence of tensors. The file must have been
/// opened with [`gguf_conventions`](crate::model::gguf_conventions), as by [`open`](crate::model::open): tensors are
/// looked up by their hub names.
///
/// # Errors
/// A [`ModelError`] with the name of the key or tensor that is invalid, missing, or belongs to an unsupported feature.
pub fn config_from_gguf(file: &Gguf) -> Result<ModelConfig, ModelError> {
    let metadata = file.metadata();
    let prefix =
        metadata.architecture().ok_or_else(|| ModelError::MissingField { field: "general.architecture".into() })?;
    let architecture = Architecture::from_gguf(prefix)?;
    let fields = Fields::Gguf(GgufFields { file, metadata, prefix, architecture, keys_read: RefCell::default() });
    let model = (architecture.family().describe)(&fields)?;
    let Fields::Gguf(gguf) = fields else { return Ok(model) };
    gguf.refuse_unread_keys()?;
    model.validate().map_err(|error| gguf.rename(error))?;
    Ok(model)
}

/// Factors that other engines apply and that change all results, each with its neutral value.
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

/// Hub names of fields, each with its key in GGUF metadata.
const FIELDS: [(&str, &str); 15] = [
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
    ("attention scale", "attention.scale"),
    ("embedding_scale", "embedding_scale"),
    ("residual_scale", "residual_scale"),
    ("logit_scale", "logit_scale"),
];

/// Metadata and tensors of a file of a known family.
#[derive(Debug)]
pub(in crate::model) struct GgufFields<'a> {
    file: &'a Gguf,
    metadata: &'a Metadata,
    /// Name of the architecture, which is the prefix of its keys.
    prefix: &'a str,
    pub(super) architecture: Architecture,
    /// Keys of the numbers that have been read.
    keys_read: RefCell<Vec<&'static str>>,
}

impl<'a> GgufFields<'a> {
    pub(super) fn name(&self, key: &str) -> String {
        format!("{}.{key}", self.prefix)
    }

    pub(super) fn vocab_size(&self) -> Result<usize, ModelError> {
        let name = "model.embed_tokens.weight";
        let embedding = self.tensor(name)?.ok_or_else(|| ModelError::MissingTensor { name: name.into() })?;
        Ok(embedding.shape.first().copied().unwrap_or(0))
    }

    /// Returns the number of elements per head; `usual` if the file does not contain it.
    pub(super) fn head_dim(&self, usual: usize) -> Result<usize, ModelError> {
        let keys = self.size("attention.key_length")?.unwrap_or(usual);
        match self.size("attention.value_length")? {
            Some(values) if values != keys => {
                let expected = "expected the value of attention.key_length";
                Err(unsupported(&self.name("attention.value_length"), values, expected))
            }
            _ => Ok(keys),
        }
    }

    pub(super) fn head(&self) -> Result<OutputHead, ModelError> {
        let has_matrix = self.tensor("lm_head.weight")?.is_some();
        Ok(if has_matrix { OutputHead::Untied } else { OutputHead::Tied })
    }

    pub(super) fn eos_ids(&self) -> Vec<u32> {
        self.metadata.u32("tokenizer.ggml.eos_token_id").into_iter().collect()
    }

    /// Returns the window of all layers.
    pub(super) fn window(&self) -> Result<Option<u32>, ModelError> {
        let key = "attention.sliding_window";
        let window = self.size(key)?.filter(|window| *window > 0);
        window.map(|w| u32::try_from(w).map_err(|_| invalid(&self.name(key), w, "a 32-bit number"))).transpose()
    }

    pub(super) fn rope(&self, sizes: &Sizes) -> Result<RopeConfig, ModelError> {
        let dim = self.size("rope.dimension_count")?.unwrap_or(sizes.head_dim);
        if self.architecture.family().gguf.qk_rows == QkRows::InterleavedPairs && dim != sizes.head_dim {
            // `permute_qk` reorders the rows of the whole head.
            let expected = format!("expected {}", sizes.head_dim);
            return Err(unsupported(&self.name("rope.dimension_count"), dim, &expected));
        }
        Ok(RopeConfig {
            theta: self.float("rope.freq_base")?.map_or(10_000.0, f64::from),
            scaling: rope_scaling(self, sizes.max_position_embeddings)?,
            divisors: self.tensor("rope_freqs.weight")?.map(|tensor| tensor.to_f32()),
            dim,
            // The weight source returns query and key rows in the hub's order.
            style: RopeStyle::Half,
        })
    }

    /// Returns the tensor if the file contains it; an unreadable tensor is an error, not an absent tensor.
    pub(super) fn tensor(&self, name: &str) -> Result<Option<TensorView<'a>>, ModelError> {
        match self.file.require(name) {
            Ok(tensor) => Ok(Some(tensor)),
            Err(error) => match ModelError::from_tensor(name, &error) {
                ModelError::MissingTensor { .. } => Ok(None),
                other => Err(other),
            },
        }
    }

    pub(super) fn float(&self, key: &'static str) -> Result<Option<f32>, ModelError> {
        self.keys_read.borrow_mut().push(key);
        let name = self.name(key);
        let value = self.metadata.get(&name);
        value.map(|value| value.as_f32().ok_or_else(|| invalid(&name, format!("{value:?}"), "a float"))).transpose()
    }

    pub(super) fn size(&self, key: &'static str) -> Result<Option<usize>, ModelError> {
        self.keys_read.borrow_mut().push(key);
        let name = self.name(key);
        match (self.metadata.get(&name), self.metadata.u64(&name)) {
            (None, _) => Ok(None),
            (_, Some(n)) => usize::try_from(n).map(Some).map_err(|_| invalid(&name, n, "a size")),
            (Some(Value::Array(list)), None) => {
                let value = format!("a list of {} values", list.len());
                Err(unsupported(&name, value, "expected one whole number for all layers"))
            }
            (Some(value), None) => Err(invalid(&name, format!("{value:?}"), "a whole number of at least 0")),
        }
    }

    fn str(&self, key: &str) -> Result<Option<&'a str>, ModelError> {
        let name = self.name(key);
        match (self.metadata.get(&name), self.metadata.str(&name)) {
            (Some(value), None) => Err(invalid(&name, format!("{value:?}"), "a string")),
            (_, text) => Ok(text),
        }
    }

    /// Replaces the hub name of the field in an error by the file's key.
    fn rename(&self, error: ModelError) -> ModelError {
        match error {
            ModelError::InvalidField { field, value, expected } => {
                let key = FIELDS.iter().find(|(hub, _)| *hub == field).map(|(_, key)| self.name(key));
                ModelError::InvalidField { field: key.unwrap_or(field), value, expected }
            }
            other => other,
        }
    }

    /// Returns an error for a key that would change the model's results and that the family has not read.
    fn refuse_unread_keys(&self) -> Result<(), ModelError> {
        let is_unread = |key: &str| !self.keys_read.borrow().contains(&key);
        if is_unread("expert_count")
            && let Some(experts) = self.size("expert_count")?.filter(|experts| *experts > 0)
        {
            return Err(unsupported(
                &self.name("expert_count"),
                experts,
                "expected 0: only dense models are supported",
            ));
        }
        for (key, none) in FACTORS.into_iter().filter(|(key, _)| is_unread(key)) {
            if let Some(factor) = self.float(key)?.filter(|factor| *factor != none) {
                return Err(unsupported(&self.name(key), factor, &format!("expected {none}")));
            }
        }
        Ok(())
    }
}

fn rope_scaling(gguf: &GgufFields<'_>, max_positions: usize) -> Result<RopeScaling, ModelError> {
    let kind = gguf.str("rope.scaling.type")?;
    let mut factor = gguf.float("rope.scaling.factor")?;
    if factor.is_none() {
        factor = gguf.float("rope.scale_linear")?;
    }
    let need_factor =
        || factor.map(f64::from).ok_or_else(|| ModelError::MissingField { field: gguf.name("rope.scaling.factor") });
    match kind {
        // Files without a scaling type scale linearly; there, a factor of 0 means no scaling.
        None if factor.is_some_and(|factor| factor != 0.0) => Ok(RopeScaling::Linear { factor: need_factor()? }),
        None | Some("none") => Ok(RopeScaling::Default),
        Some("linear") => Ok(RopeScaling::Linear { factor: need_factor()? }),
        Some("yarn") => Ok(RopeScaling::Yarn {
            factor: need_factor()?,
            original_max_position_embeddings: {
                let name = "rope.scaling.original_context_length";
                let tokens = gguf.size(name)?.unwrap_or(max_positions);
                u32::try_from(tokens).map_err(|_| invalid(&gguf.name(name), tokens, "a 32-bit number"))?
            },
            beta_fast: gguf.float("rope.scaling.yarn_beta_fast")?.map_or(32.0, f64::from),
            beta_slow: gguf.float("rope.scaling.yarn_beta_slow")?.map_or(1.0, f64::from),
            attention_factor: None,
            mscale: None,
            mscale_all_dim: None,
            truncate: true,
        }),
        Some(other) => Err(unsupported(&gguf.name("rope.scaling.type"), other, "expected none, linear or yarn")),
    }
}
