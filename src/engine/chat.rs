//! Chat templates as the engine sees them.

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct ChatMessage {
    /// Who speaks: `system`, `user`, `assistant`, or what else the model's template knows.
    pub role: String,
    /// What is said.
    pub content: String,
}

impl ChatMessage {
    /// A message of plain text.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into() }
    }
}

/// Turns a conversation into the text a model was trained on. The feature `text` has one for Jinja templates.
pub trait ChatRender: Send + Sync + std::fmt::Debug {
    /// The conversation as text that ends where the assistant is to go on.
    fn render(&self, messages: &[ChatMessage]) -> Result<String, String>;
}
