//! One message of a conversation: a JSON object that the template sees as it is.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::super::TextError;

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

    /// The message as the template sees it.
    pub(super) fn to_template(&self) -> minijinja::Value {
        object(&self.0)
    }

    /// Bytes of text in the message, about.
    pub(super) fn weight_bytes(&self) -> usize {
        self.0.iter().map(|(key, value)| 64 + key.len() + weight_bytes(value)).sum()
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

/// Bytes of text in a value, about; every value counts a little, however short.
pub(super) fn weight_bytes(value: &Value) -> usize {
    64 + match value {
        Value::Null | Value::Bool(_) | Value::Number(_) => 0,
        Value::String(text) => text.len(),
        Value::Array(items) => items.iter().map(weight_bytes).sum(),
        Value::Object(fields) => fields.iter().map(|(key, value)| key.len() + weight_bytes(value)).sum(),
    }
}

/// A JSON value as the template sees it, keys in their order.
pub(super) fn to_template(value: &Value) -> minijinja::Value {
    match value {
        Value::Null => minijinja::Value::from(()),
        Value::Bool(truth) => (*truth).into(),
        Value::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(integer), _) => integer.into(),
            (None, Some(integer)) => integer.into(),
            (None, None) => number.as_f64().unwrap_or(f64::NAN).into(),
        },
        Value::String(text) => text.as_str().into(),
        Value::Array(items) => items.iter().map(to_template).collect(),
        Value::Object(fields) => object(fields),
    }
}

fn object(fields: &Map<String, Value>) -> minijinja::Value {
    minijinja::Value::from_pairs(fields.iter().map(|(key, value)| (key.as_str(), to_template(value))))
}
