//! Supported families of models, one file each.
//!
//! The file of a family contains the names of its models, the names and the order of tensors in their files, the
//! defaults of its hub configs, and the structure of its layers. No other code of the crate depends on a family.

use super::ModelError;
use super::config::{Fields, HubDefaults, ModelConfig, TensorNames};
use crate::weights::gguf::Conventions;

/// Description of a family.
#[derive(Debug)]
pub(super) struct Family {
    /// Name in errors and reports.
    pub name: &'static str,
    /// Names in hub configs: values of `model_type`, and class names in `architectures`.
    pub hub_names: &'static [&'static str],
    /// Names in GGUF files: values of `general.architecture`.
    pub gguf_names: &'static [&'static str],
    /// Names and row order of tensors in its GGUF files.
    pub gguf: Conventions,
    /// Hub names of its tensors.
    pub tensors: TensorNames,
    /// Defaults of its hub configs.
    pub hub_defaults: HubDefaults,
    /// Creates the configuration of a model.
    pub describe: fn(&Fields<'_>) -> Result<ModelConfig, ModelError>,
}

macro_rules! families {
    ($($module:ident: $variant:ident = $doc:literal,)+) => {
        $(mod $module;)+

        /// Family of models.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum Architecture {
            $(#[doc = $doc] $variant,)+
        }

        impl Architecture {
            /// All supported families.
            pub const ALL: &[Self] = &[$(Self::$variant,)+];

            pub(super) const fn family(self) -> &'static Family {
                match self {
                    $(Self::$variant => &$module::FAMILY,)+
                }
            }
        }
    };
}

families! {
    llama: Llama = "Llama 1 to 3 and models of the same structure (`SmolLM2`, `TinyLlama` …).",
    mistral: Mistral = "Mistral: Llama with a sliding window.",
    qwen2: Qwen2 = "Qwen2 and Qwen2.5: Llama with a bias on queries, keys and values.",
    qwen3: Qwen3 = "Qwen3: Llama with a norm on each query and key head.",
    granite: Granite = "Granite (IBM): Llama with factors on embeddings, scores, residual sums and logits.",
}

/// Serializes the family as its [`name`](Architecture::name).
impl serde::Serialize for Architecture {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl Architecture {
    /// Returns the family for the `model_type` of a hub config, or for the class name in `architectures`.
    ///
    /// # Errors
    /// [`ModelError::UnsupportedArchitecture`] if no family has this name.
    pub fn from_hub(name: &str) -> Result<Self, ModelError> {
        Self::find(name, |family| family.hub_names)
    }

    /// Returns the family for the `general.architecture` of a GGUF file.
    ///
    /// # Errors
    /// [`ModelError::UnsupportedArchitecture`] if no family has this name.
    pub fn from_gguf(name: &str) -> Result<Self, ModelError> {
        Self::find(name, |family| family.gguf_names)
    }

    /// Returns the name for errors and reports.
    pub const fn name(self) -> &'static str {
        self.family().name
    }

    fn find(name: &str, names: impl Fn(&Family) -> &'static [&'static str]) -> Result<Self, ModelError> {
        let found = Self::ALL.iter().find(|architecture| names(architecture.family()).contains(&name));
        found.copied().ok_or_else(|| ModelError::UnsupportedArchitecture { name: name.to_owned() })
    }
}

/// Returns the conventions of an architecture's GGUF files; `None` for an unsupported architecture.
pub fn gguf_conventions(architecture: &str) -> Option<Conventions> {
    Architecture::from_gguf(architecture).ok().map(|architecture| architecture.family().gguf)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn no_two_families_share_a_name() {
        let lists: [fn(&Family) -> Vec<&'static str>; 3] =
            [|family| vec![family.name], |family| family.hub_names.to_vec(), |family| family.gguf_names.to_vec()];
        for names in lists {
            let mut seen = HashSet::new();
            for architecture in Architecture::ALL {
                assert!(names(architecture.family()).into_iter().all(|name| seen.insert(name)), "{architecture:?}");
            }
        }
    }

    #[test]
    fn gguf_names_are_one_to_one_and_lead_to_the_hubs() {
        for architecture in Architecture::ALL {
            let Family { gguf, tensors, .. } = architecture.family();
            let names = gguf.names;
            assert!(names.is_one_to_one(), "{architecture:?}");
            for hub in [tensors.embedding, tensors.final_norm, tensors.head] {
                assert!(names.to_gguf(&format!("{hub}.weight")).is_some(), "{architecture:?}: {hub}");
            }
            let TensorNames { layers, attention_norm, query, key, value, attention_output, .. } = tensors;
            let TensorNames { mlp_norm, gate, up, down, .. } = tensors;
            for part in [attention_norm, query, key, value, attention_output, mlp_norm, gate, up, down] {
                assert!(names.to_gguf(&format!("{layers}.0.{part}.weight")).is_some(), "{architecture:?}: {part}");
            }
        }
    }
}
