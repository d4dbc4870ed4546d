//! Chat conversations: messages, options of a chat template, and the trait that renders them to text.
//!
//! A message is a JSON object, and the template receives all its fields. Values are converted from and to JSON with
//! serde: from any `impl Serialize` or from JSON text ([`ChatMessage::from_json`]), and to JSON with the types' own
//! `Serialize`.

#![forbid(unsafe_code)]

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value};

use super::TextError;

/// Message of a chat.
///
/// It has a role, a content, and any other field that the template uses (`tool_calls`, `name`, `reasoning_content`).
#[derive(Clone, Debug, PartialEq)]
pub struct ChatMessage(Map<String, Value>);

impl ChatMessage {
    /// Creates a message with a text as content.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        let pairs = [("role", role.into()), ("content", content.into())];
        Self(pairs.map(|(key, value)| (key.to_owned(), Value::String(value))).into_iter().collect())
    }

    /// Creates a message with the role `system`.
    pub fn system(content: impl Into<String>) -> Self {
        Self::new("system", content)
    }

    /// Creates a message with the role `user`.
    pub fn user(content: impl Into<String>) -> Self {
        Self::new("user", content)
    }

    /// Creates a message with the role `assistant`.
    pub fn assistant(content: impl Into<String>) -> Self {
        Self::new("assistant", content)
    }

    /// Creates a message with the role `tool`: the result of a tool call.
    pub fn tool(content: impl Into<String>) -> Self {
        Self::new("tool", content)
    }

    /// Reads a message from JSON text: an object with a string `role`.
    ///
    /// # Errors
    /// [`TextError::Json`] if the text is not JSON; [`TextError::Unsupported`] if it is not an object or its role is
    /// not a string.
    pub fn from_json(message: &str) -> Result<Self, TextError> {
        let value = serde_json::from_str(message).map_err(|error| TextError::json("message", &error))?;
        Self::from_value(value)
    }

    fn from_value(message: Value) -> Result<Self, TextError> {
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

    /// Sets a further field, e.g. `tool_calls`.
    ///
    /// # Errors
    /// [`TextError::Json`] if the value cannot be represented in JSON (a map whose keys are not strings).
    pub fn with(mut self, field: impl Into<String>, value: impl Serialize) -> Result<Self, TextError> {
        self.0.insert(field.into(), to_json("message", value)?);
        Ok(self)
    }

    /// Returns the role: `system`, `user`, `assistant`, `tool` or a role of the model.
    pub fn role(&self) -> &str {
        self.0.get("role").and_then(Value::as_str).unwrap_or_default()
    }

    /// Returns the content if it is a text.
    pub fn content(&self) -> Option<&str> {
        self.0.get("content").and_then(Value::as_str)
    }

    #[cfg(feature = "text")]
    pub(crate) fn fields(&self) -> &Map<String, Value> {
        &self.0
    }
}

impl Serialize for ChatMessage {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for ChatMessage {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::from_value(Value::deserialize(deserializer)?).map_err(D::Error::custom)
    }
}

/// Input of a chat template in addition to the messages.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ChatOptions {
    /// Whether the text ends with the start of an assistant message, which the model continues (true by default).
    pub add_generation_prompt: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    tools: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    documents: Option<Value>,
    #[serde(skip_serializing_if = "Map::is_empty")]
    variables: Map<String, Value>,
    /// Time for `strftime_now`, in seconds since 1970 (UTC); `None` means the system clock.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub now_unix_s: Option<i64>,
}

impl Default for ChatOptions {
    fn default() -> Self {
        Self { add_generation_prompt: true, tools: None, documents: None, variables: Map::new(), now_unix_s: None }
    }
}

impl ChatOptions {
    /// Names of variables that are set through other fields or methods.
    const RESERVED: [&'static str; 4] = ["messages", "tools", "documents", "add_generation_prompt"];

    /// Sets whether the text ends with the start of an assistant message.
    #[must_use]
    pub fn with_generation_prompt(mut self, add: bool) -> Self {
        self.add_generation_prompt = add;
        self
    }

    /// Sets the tools that the model may call.
    ///
    /// The value is a list of JSON schemas in the form with which the model was trained.
    ///
    /// # Errors
    /// [`TextError::Json`] if the value cannot be represented in JSON.
    pub fn with_tools(mut self, tools: impl Serialize) -> Result<Self, TextError> {
        self.tools = Some(to_json("tools", tools)?);
        Ok(self)
    }

    /// Sets the documents of a template for retrieval-augmented generation.
    ///
    /// # Errors
    /// [`TextError::Json`] if the value cannot be represented in JSON.
    pub fn with_documents(mut self, documents: impl Serialize) -> Result<Self, TextError> {
        self.documents = Some(to_json("documents", documents)?);
        Ok(self)
    }

    /// Sets a further variable of the template, e.g. `enable_thinking`.
    ///
    /// # Errors
    /// [`TextError::Json`] if the value cannot be represented in JSON; [`TextError::Unsupported`] for a variable that
    /// has its own field or method.
    pub fn with_variable(mut self, name: impl Into<String>, value: impl Serialize) -> Result<Self, TextError> {
        let name = name.into();
        if Self::RESERVED.contains(&name.as_str()) {
            let expected = "a variable that has no field or method of its own".to_owned();
            return Err(TextError::Unsupported { field: "variable", got: format!("{name:?}"), expected });
        }
        self.variables.insert(name, to_json("variable", value)?);
        Ok(self)
    }

    /// Sets the time for `strftime_now`, in seconds since 1970 (UTC).
    #[must_use]
    pub fn with_now_unix_s(mut self, seconds: i64) -> Self {
        self.now_unix_s = Some(seconds);
        self
    }

    #[cfg(feature = "text")]
    pub(crate) fn tools(&self) -> Option<&Value> {
        self.tools.as_ref()
    }

    #[cfg(feature = "text")]
    pub(crate) fn documents(&self) -> Option<&Value> {
        self.documents.as_ref()
    }

    #[cfg(feature = "text")]
    pub(crate) fn variables(&self) -> &Map<String, Value> {
        &self.variables
    }
}

/// Conversation with the options of its template.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ChatPrompt {
    /// Messages, oldest first.
    pub messages: Vec<ChatMessage>,
    /// Options of the template.
    pub options: ChatOptions,
}

impl ChatPrompt {
    /// Creates a conversation with default options: the model generates an assistant message.
    pub fn new(messages: impl Into<Vec<ChatMessage>>) -> Self {
        Self { messages: messages.into(), options: ChatOptions::default() }
    }

    /// Sets the options of the template.
    #[must_use]
    pub fn with_options(mut self, options: ChatOptions) -> Self {
        self.options = options;
        self
    }
}

impl From<Vec<ChatMessage>> for ChatPrompt {
    fn from(messages: Vec<ChatMessage>) -> Self {
        Self::new(messages)
    }
}

impl From<&[ChatMessage]> for ChatPrompt {
    fn from(messages: &[ChatMessage]) -> Self {
        Self::new(messages)
    }
}

impl<const N: usize> From<&[ChatMessage; N]> for ChatPrompt {
    fn from(messages: &[ChatMessage; N]) -> Self {
        Self::new(messages.as_slice())
    }
}

impl<const N: usize> From<[ChatMessage; N]> for ChatPrompt {
    fn from(messages: [ChatMessage; N]) -> Self {
        Self::new(messages)
    }
}

/// Renders a conversation to the text format of the model's training.
///
/// The feature `text` provides an implementation for Jinja templates.
pub trait ChatRenderer: Send + Sync + std::fmt::Debug {
    /// Renders the conversation to text.
    ///
    /// If the options request it, the text ends with the start of an assistant message.
    ///
    /// # Errors
    /// A description of the reason why the conversation cannot be rendered; the engine passes it on to its caller.
    fn render(&self, chat: &ChatPrompt) -> Result<String, String>;
}

fn to_json(field: &'static str, value: impl Serialize) -> Result<Value, TextError> {
    serde_json::to_value(value).map_err(|error| TextError::json(field, &error))
}
