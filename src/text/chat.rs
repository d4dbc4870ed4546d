//! Conversations as the engine sees them: messages, and the trait that turns them into text.
//!
//! A message is a JSON object that the template sees as it is.

#![forbid(unsafe_code)]

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::TextError;

/// A message with a role, a content and whatever else the template knows (`tool_calls`, `name`, `reasoning_content`).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Value", into = "Value")]
pub struct ChatMessage(Map<String, Value>);

impl ChatMessage {
    /// A message of plain text.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        let pairs = [("role", role.into()), ("content", content.into())];
        Self(pairs.map(|(key, value)| (key.to_owned(), Value::String(value))).into_iter().collect())
    }

    /// What the model is to keep to.
    pub fn system(content: impl Into<String>) -> Self {
        Self::new("system", content)
    }

    /// What the user says.
    pub fn user(content: impl Into<String>) -> Self {
        Self::new("user", content)
    }

    /// What the model said.
    pub fn assistant(content: impl Into<String>) -> Self {
        Self::new("assistant", content)
    }

    /// A message as it stands in a request; it must be an object with a `role`.
    pub fn from_json(message: Value) -> Result<Self, TextError> {
        let unsupported =
            |field, got: String, expected: &str| TextError::Unsupported { field, got, expected: expected.to_owned() };
        match message {
            Value::Object(fields) => match fields.get("role") {
                Some(Value::String(_)) => Ok(Self(fields)),
                Some(role) => Err(unsupported("role", role.to_string(), "a string")),
                None => {
                    Err(unsupported("role", "nothing".to_owned(), "\"system\", \"user\", \"assistant\" or \"tool\""))
                }
            },
            other => Err(unsupported("message", other.to_string(), "an object with role and content")),
        }
    }

    /// The same message with one more field.
    #[must_use]
    pub fn with(mut self, field: impl Into<String>, value: Value) -> Self {
        self.0.insert(field.into(), value);
        self
    }

    /// Who speaks.
    pub fn role(&self) -> &str {
        self.0.get("role").and_then(Value::as_str).unwrap_or_default()
    }

    /// A field of the message.
    pub fn get(&self, field: &str) -> Option<&Value> {
        self.0.get(field)
    }

    /// All fields of the message.
    pub fn fields(&self) -> &Map<String, Value> {
        &self.0
    }
}

impl TryFrom<Value> for ChatMessage {
    type Error = TextError;

    fn try_from(message: Value) -> Result<Self, TextError> {
        Self::from_json(message)
    }
}

impl From<ChatMessage> for Value {
    fn from(message: ChatMessage) -> Self {
        Self::Object(message.0)
    }
}

/// Turns a conversation into the text a model was trained on. The feature `text` has one for Jinja templates.
pub trait ChatRenderer: Send + Sync + std::fmt::Debug {
    /// The conversation as text that ends where the assistant is to go on.
    fn render(&self, messages: &[ChatMessage]) -> Result<String, String>;
}
