//! What a model's files say of text: vocabulary, chat template, end-of-sequence ids.

use std::path::Path;
use std::sync::Arc;

use crate::engine::error::BuildError;
use crate::model::eos_ids_of_generation_config;
use crate::text::{ChatRenderer, Vocabulary};
use crate::weights::{ModelFiles, ModelKind, WeightError};

/// Text side of a model. A model without a tokenizer has none of it, and takes and gives token ids.
#[derive(Debug, Default)]
pub(crate) struct TextAssets {
    pub vocabulary: Option<Arc<dyn Vocabulary>>,
    pub chat: Option<Arc<dyn ChatRenderer>>,
    pub generation_eos_ids: Vec<u32>,
    pub tokenizer_eos_ids: Vec<u32>,
}

impl TextAssets {
    /// Reads what there is; a vocabulary given by the caller goes before the model's own.
    pub(crate) fn read(files: &ModelFiles, given: Option<Arc<dyn Vocabulary>>) -> Result<Self, BuildError> {
        #[cfg(feature = "text")]
        let mut text = Self::from_files(files)?;
        #[cfg(not(feature = "text"))]
        let mut text = Self::default();
        if let ModelKind::Folder(folder) = &files.kind
            && let Some(json) = read_optional(&folder.join("generation_config.json"))?
        {
            text.generation_eos_ids = eos_ids_of_generation_config(&json)?;
        }
        if given.is_some() {
            text.vocabulary = given;
        }
        if let Some(vocabulary) = &text.vocabulary {
            text.tokenizer_eos_ids = vocabulary.eos_ids().to_vec();
        }
        Ok(text)
    }

    #[cfg(feature = "text")]
    fn from_files(files: &ModelFiles) -> Result<Self, BuildError> {
        use crate::text::{ChatTemplate, Tokenizer};
        let (tokenizer, template_file) = match &files.kind {
            ModelKind::Gguf(file) => {
                if file.metadata().str("tokenizer.ggml.model").is_none() {
                    return Ok(Self::default());
                }
                (Tokenizer::from_gguf(file.metadata())?, None)
            }
            ModelKind::Folder(folder) => {
                let Some(json) = read_optional(&folder.join("tokenizer.json"))? else { return Ok(Self::default()) };
                let config = read_optional(&folder.join("tokenizer_config.json"))?;
                let template = read_optional(&folder.join("chat_template.jinja"))?;
                (Tokenizer::from_json(&json, config.as_deref())?, template)
            }
        };
        let template_file = template_file.map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        let chat = match template_file.as_deref().or(tokenizer.chat_template()) {
            Some(source) => {
                let template = ChatTemplate::new(source, tokenizer.bos_token(), tokenizer.eos_token())?;
                Some(Arc::new(template) as Arc<dyn ChatRenderer>)
            }
            None => None,
        };
        Ok(Self { vocabulary: Some(Arc::new(tokenizer)), chat, ..Self::default() })
    }
}

/// A file that may be absent.
fn read_optional(path: &Path) -> Result<Option<Vec<u8>>, BuildError> {
    match std::fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(WeightError::Io { path: path.to_owned(), source }.into()),
    }
}
