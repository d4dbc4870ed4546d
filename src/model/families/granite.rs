//! Granite (IBM): Llama with factors on embeddings, attention scores, residual sums and logits.

use super::{Family, llama};
use crate::model::ModelError;
use crate::model::config::{AttentionConfig, Fields, ModelConfig, TensorNames};
use crate::model::error::invalid;
use crate::weights::gguf::{Conventions, NameTable, QkRows};

pub(super) const FAMILY: Family = Family {
    name: "granite",
    hub_names: &["granite", "GraniteForCausalLM"],
    gguf_names: &["granite"],
    gguf: Conventions { names: &NameTable::PRE_NORM, qk_rows: QkRows::InterleavedPairs },
    tensors: TensorNames::USUAL,
    hub_defaults: llama::FAMILY.hub_defaults,
    describe,
};

fn describe(fields: &Fields<'_>) -> Result<ModelConfig, ModelError> {
    let mut model = (llama::FAMILY.describe)(fields)?;
    let is_not_one = |factor: &f32| *factor != 1.0;
    model.embedding_scale = factor(fields, "embedding_multiplier", "embedding_scale")?.filter(is_not_one);
    // The value of this field is a divisor.
    model.logit_scale = factor(fields, "logits_scaling", "logit_scale")?.filter(is_not_one).map(f32::recip);
    let residual_scale = factor(fields, "residual_multiplier", "residual_scale")?.filter(is_not_one);
    let score_scale = match (factor(fields, "attention_multiplier", "attention.scale")?, fields) {
        // Without this key, a GGUF file has the usual factor, which depends on the size of a head.
        (None, Fields::Hub(_)) => Some(1.0),
        (given, _) => given,
    };
    for layer in &mut model.layers {
        layer.residual_scale = residual_scale;
        let AttentionConfig::GroupedQuery(attention) = &mut layer.attention;
        attention.scale = score_scale.unwrap_or(attention.scale);
    }
    Ok(model)
}

/// Returns a factor, or `None` if it is absent; in a GGUF file, 0 also means absent.
#[allow(clippy::cast_possible_truncation)] // a factor rounds to f32
fn factor(fields: &Fields<'_>, field: &str, key: &'static str) -> Result<Option<f32>, ModelError> {
    let given = fields.float(field, key)?.map(|factor| factor as f32);
    let given = given.filter(|factor| *factor != 0.0 || matches!(fields, Fields::Hub(_)));
    match given.filter(|factor| !(factor.is_finite() && *factor > 0.0)) {
        Some(wrong) => Err(invalid(&fields.name(field, key), wrong, "a finite number above 0")),
        None => Ok(given),
    }
}
