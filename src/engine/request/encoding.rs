//! Encoding of prompts: the vocabulary and the chat template, as used by callers and the admission.

use std::sync::Arc;

use super::Prompt;
use crate::engine::error::SubmitError;
use crate::sampler::ParamError;
use crate::text::{ChatPrompt, ChatRenderer, Detokenizer, Vocabulary};

/// Encoder of prompts: the engine's vocabulary and chat template, if it has them.
#[derive(Clone, Debug)]
pub(crate) struct PromptEncoder {
    vocabulary: Option<Arc<dyn Vocabulary>>,
    chat: Option<Arc<dyn ChatRenderer>>,
}

impl PromptEncoder {
    pub fn new(vocabulary: Option<Arc<dyn Vocabulary>>, chat: Option<Arc<dyn ChatRenderer>>) -> Self {
        Self { vocabulary, chat }
    }

    pub fn shared_vocabulary(&self) -> Option<Arc<dyn Vocabulary>> {
        self.vocabulary.clone()
    }

    pub fn vocabulary(&self) -> Option<&dyn Vocabulary> {
        self.vocabulary.as_deref()
    }

    /// Returns the token ids of a prompt as the model receives them.
    pub fn encode(&self, prompt: &Prompt) -> Result<Arc<[u32]>, SubmitError> {
        match prompt {
            Prompt::Tokens(tokens) => Ok(Arc::from(tokens.as_slice())),
            Prompt::Text(text) => self.tokenize(text, true).map(Arc::from),
            Prompt::Chat(chat) => {
                let text = self.render(chat)?;
                // The template itself writes the special tokens.
                let failed = |reason| SubmitError::Encode { reason };
                self.require_vocabulary("prompt")?.encode_chat(&text).map(Arc::from).map_err(failed)
            }
        }
    }

    /// Returns the token ids of a text.
    pub fn tokenize(&self, text: &str, add_special: bool) -> Result<Vec<u32>, SubmitError> {
        let failed = |reason| SubmitError::Encode { reason };
        self.require_vocabulary("prompt")?.encode(text, add_special).map_err(failed)
    }

    /// Returns the text of token ids, decoded as the start of a text.
    pub fn detokenize(&self, ids: &[u32], skip_special: bool) -> Result<String, SubmitError> {
        let vocabulary = self.require_vocabulary("ids")?;
        let mut detokenizer = Detokenizer::new(skip_special);
        let mut text = String::new();
        for &id in ids {
            detokenizer.push(vocabulary, id, &mut text);
        }
        detokenizer.flush(&mut text);
        Ok(text)
    }

    /// Renders a conversation to text with the chat template.
    pub fn render(&self, chat: &ChatPrompt) -> Result<String, SubmitError> {
        let missing =
            || ParamError::new("prompt", "chat messages", "token ids or text: the engine has no chat template");
        let renderer = self.chat.as_deref().ok_or_else(missing)?;
        renderer.render(chat).map_err(|reason| SubmitError::Render { reason })
    }

    fn require_vocabulary(&self, field: &'static str) -> Result<&dyn Vocabulary, ParamError> {
        self.vocabulary().ok_or_else(|| ParamError::new(field, "text", "token ids: the engine has no vocabulary"))
    }
}
