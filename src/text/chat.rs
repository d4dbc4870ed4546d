//! Conversations: messages, the options of a chat template, and the trait that renders both to text.
//!
//! A message is a JSON object, and the template sees all its fields. JSON enters through serde (`impl Serialize`, or
//! text with [`ChatMessage::from_json`]) and leaves through the types' own `Serialize`.

#![forbid(unsafe_code)]

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value};

use super::TextError;

/// A message: a role, a content, and any other field that the template uses (`tool_calls`, `name`,
/// `reasoning_content`).
#[derive(Clone, Debug, PartialEq)]
pub struct ChatMessage(Map<String, Value>);

impl ChatMessage {
    /// A message of plain text.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        let pairs = [("role", role.into()), ("content", content.into())];
        Self(pairs.map(|(key, value)| (key.to_owned(), Value::String(value))).into_iter().collect())
    }

    /// A message with the role `system`.
    pub fn system(content: impl Into<String>) -> Self {
        Self::new("system", content)
    }

    /// A message with the role `user`.
    pub fn user(content: impl Into<String>) -> Self {
        Self::new("user", content)
    }

    /// A message with the role `assistant`.
    pub fn assistant(content: impl Into<String>) -> Self {
        Self::new("assistant", content)
    }

    /// A message with the role `tool`: the result of a tool call.
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

    /// Sets a further field, such as `tool_calls`.
    ///
    /// # Errors
    /// [`TextError::Json`] if the value has no JSON form (a map whose keys are not strings, a number that is not
    /// finite).
    pub fn with(mut self, field: impl Into<String>, value: impl Serialize) -> Result<Self, TextError> {
        self.0.insert(field.into(), to_json("message", value)?);
        Ok(self)
    }

    /// The role: `system`, `user`, `assistant`, `tool` or one of the model's own.
    pub fn role(&self) -> &str {
        self.0.get("role").and_then(Value::as_str).unwrap_or_default()
    }

    /// The content, if it is plain text.
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
    /// Whether the text ends at the start of the assistant's answer (true by default).
    pub add_generation_prompt: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    tools: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    documents: Option<Value>,
    #[serde(skip_serializing_if = "Map::is_empty")]
    variables: Map<String, Value>,
    /// Time for `strftime_now`, in seconds since 1970 (UTC); `None` = the system's clock.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub now_unix_s: Option<i64>,
}

impl Default for ChatOptions {
    fn default() -> Self {
        Self { add_generation_prompt: true, tools: None, documents: None, variables: Map::new(), now_unix_s: None }
    }
}

impl ChatOptions {
    /// Variables with a place of their own among the options.
    const RESERVED: [&'static str; 4] = ["messages", "tools", "documents", "add_generation_prompt"];

    /// Sets whether the text ends at the start of the assistant's answer.
    #[must_use]
    pub fn with_generation_prompt(mut self, add: bool) -> Self {
        self.add_generation_prompt = add;
        self
    }

    /// Sets the tools that the model may call: a list of JSON schemas in the form that the model was trained on.
    ///
    /// # Errors
    /// [`TextError::Json`] if the value has no JSON form.
    pub fn with_tools(mut self, tools: impl Serialize) -> Result<Self, TextError> {
        self.tools = Some(to_json("tools", tools)?);
        Ok(self)
    }

    /// Sets the documents of a template for retrieval-augmented generation.
    ///
    /// # Errors
    /// [`TextError::Json`] if the value has no JSON form.
    pub fn with_documents(mut self, documents: impl Serialize) -> Result<Self, TextError> {
        self.documents = Some(to_json("documents", documents)?);
        Ok(self)
    }

    /// Sets a further variable of the template, such as `enable_thinking`.
    ///
    /// # Errors
    /// [`TextError::Json`] if the value has no JSON form; [`TextError::Unsupported`] for a variable that is set otherwise.
    pub fn with_variable(mut self, name: impl Into<String>, value: impl Serialize) -> Result<Self, TextError> {
        let name = name.into();
        if Self::RESERVED.contains(&name.as_str()) {
            let expected = "a variable that has no setting of its own".to_owned();
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

/// A conversation with the options of its template.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ChatPrompt {
    /// The messages, oldest first.
    pub messages: Vec<ChatMessage>,
    /// The template's options.
    pub options: ChatOptions,
}

impl ChatPrompt {
    /// A conversation with default options: the text ends at the start of the assistant's answer.
    pub fn new(messages: impl Into<Vec<ChatMessage>>) -> Self {
        Self { messages: messages.into(), options: ChatOptions::default() }
    }

    /// Sets the template's options.
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

/// Renders a conversation as the text that a model was trained on. The feature `text` implements it for Jinja
/// templates.
pub trait ChatRenderer: Send + Sync + std::fmt::Debug {
    /// Renders the conversation. The text ends at the start of the assistant's answer if the options ask for that.
    ///
    /// # Errors
    /// The reason why the conversation cannot be rendered, for the caller of the engine.
    fn render(&self, chat: &ChatPrompt) -> Result<String, String>;
}

fn to_json(field: &'static str, value: impl Serialize) -> Result<Value, TextError> {
    serde_json::to_value(value).map_err(|error| TextError::json(field, &error))
}
