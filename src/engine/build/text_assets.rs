//! Text assets of a model: vocabulary, chat template, end-of-sequence ids.

use std::path::Path;
use std::sync::Arc;

use crate::engine::error::BuildError;
use crate::model::eos_ids_of_generation_config;
use crate::text::{ChatRenderer, Vocabulary};
use crate::weights::{ModelFiles, ModelKind, WeightError};

/// Parts that the caller supplies in place of the model's own.
#[derive(Clone, Debug, Default)]
pub(crate) struct TextOverrides {
    pub vocabulary: Option<Arc<dyn Vocabulary>>,
    pub chat_renderer: Option<Arc<dyn ChatRenderer>>,
    #[cfg(feature = "text")]
    pub chat_template: Option<String>,
}

/// Text assets of a model. Without a tokenizer, the engine accepts and returns token ids only.
#[derive(Debug, Default)]
pub(crate) struct TextAssets {
    pub vocabulary: Option<Arc<dyn Vocabulary>>,
    pub chat: Option<Arc<dyn ChatRenderer>>,
    pub generation_eos_ids: Vec<u32>,
    pub tokenizer_eos_ids: Vec<u32>,
    /// Reason why a part of the model was left out, for the engine's notes.
    pub note: Option<String>,
}

impl TextAssets {
    /// Reads the model's own text assets, except those that the caller supplies.
    ///
    /// If the model's tokenizer cannot be read, this is an error only if no vocabulary was supplied.
    pub(crate) fn read(files: &ModelFiles, given: TextOverrides) -> Result<Self, BuildError> {
        #[cfg(feature = "text")]
        let mut text = match Self::from_files(files, given.chat_template.as_deref()) {
            Err(BuildError::Text(error)) if given.vocabulary.is_some() => {
                let note = format!("the model's own tokenizer or chat template is left out: {error}");
                Self { note: Some(note), ..Self::default() }
            }
            text => text?,
        };
        #[cfg(not(feature = "text"))]
        let mut text = Self::default();
        if let ModelKind::Folder(folder) = &files.kind
            && let Some(json) = read_optional(&folder.join("generation_config.json"))?
        {
            text.generation_eos_ids = eos_ids_of_generation_config(&json)?;
        }
        text.vocabulary = given.vocabulary.or(text.vocabulary);
        text.chat = given.chat_renderer.or(text.chat);
        if let Some(vocabulary) = &text.vocabulary {
            text.tokenizer_eos_ids = vocabulary.eos_ids().to_vec();
        }
        Ok(text)
    }

    #[cfg(feature = "text")]
    fn from_files(files: &ModelFiles, given_template: Option<&str>) -> Result<Self, BuildError> {
        use crate::text::{ChatTemplate, Tokenizer};
        let (tokenizer, template_file) = match &files.kind {
            ModelKind::Gguf(file) if file.metadata().str("tokenizer.ggml.model").is_none() => (None, None),
            ModelKind::Gguf(file) => (Some(Tokenizer::from_gguf(file.metadata())?), None),
            ModelKind::Folder(folder) => match read_optional(&folder.join("tokenizer.json"))? {
                Some(json) => {
                    let config = read_optional(&folder.join("tokenizer_config.json"))?;
                    let template = read_optional(&folder.join("chat_template.jinja"))?;
                    (Some(Tokenizer::from_json(&json, config.as_deref())?), template)
                }
                None => (None, None),
            },
        };
        let template_file = template_file.map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        let own_template = || tokenizer.as_ref().and_then(Tokenizer::chat_template);
        let chat = match given_template.or(template_file.as_deref()).or_else(own_template) {
            Some(source) => {
                let (bos, eos) = (
                    tokenizer.as_ref().and_then(Tokenizer::bos_token),
                    tokenizer.as_ref().and_then(Tokenizer::eos_token),
                );
                Some(Arc::new(ChatTemplate::new(source, bos, eos)?) as Arc<dyn ChatRenderer>)
            }
            None => None,
        };
        let vocabulary = tokenizer.map(|tokenizer| Arc::new(tokenizer) as Arc<dyn Vocabulary>);
        Ok(Self { vocabulary, chat, ..Self::default() })
    }
}

/// Returns the content of a file, or `None` if the file does not exist.
fn read_optional(path: &Path) -> Result<Option<Vec<u8>>, BuildError> {
    match std::fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(WeightError::Io { path: path.to_owned(), error }.into()),
    }
}
