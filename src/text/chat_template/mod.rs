//! Chat templates: a conversation becomes the text the model was trained on.
//!
//! Templates are Jinja as the Transformers library runs it: blocks trimmed, loop controls, `raise_exception`,
//! `strftime_now`, a `tojson` that keeps key order and escapes nothing but what JSON asks for, the `generation` tag,
//! and the string methods of Python. A template is foreign code: it sees its arguments only, and a render ends with a
//! typed error once it has used up a budget of steps and memory that grows with the conversation. One thing the engine
//! below does not count: a list added to itself over and over.

mod clock;
mod python;
mod tags;
mod tojson;
mod values;

use std::fmt;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Value;
use minijinja::{AutoEscape, Environment, Error, ErrorKind};

use super::{ChatMessage, ChatOptions, ChatPrompt, ChatRenderer, TextError};
use clock::CivilTime;

/// Steps of any render: an instruction or 64 bytes of data each, so at most 32 MiB besides the conversation. Real
/// templates take some thousands on a short conversation.
const BASE_BUDGET: u64 = 500_000;
/// Further steps for each byte of the conversation: 64 passes over its text.
const BUDGET_PER_BYTE: u64 = 1;
const NAME: &str = "chat template";

/// A compiled chat template.
pub struct ChatTemplate {
    environment: Environment<'static>,
    bos: Option<String>,
    eos: Option<String>,
}

impl ChatTemplate {
    /// Compiles a template. `bos` and `eos` are the texts of the special tokens it may write.
    pub fn new(source: &str, bos: Option<&str>, eos: Option<&str>) -> Result<Self, TextError> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .build()
            .map_err(|error| explain(&error, BASE_BUDGET))?;
        environment.set_syntax(syntax);
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment.set_unknown_method_callback(python::method);
        environment.add_test("iterable", python::is_iterable);
        environment.add_test("sequence", python::is_sequence);
        environment.add_test("number", python::is_number);
        environment.add_filter(tags::ITERABLE, python::iterable);
        environment.add_filter("tojson", tojson::tojson);
        environment.add_function("raise_exception", raise_exception);
        environment.add_template_owned(NAME, tags::rewrite(source)).map_err(|error| explain(&error, BASE_BUDGET))?;
        Ok(Self { environment, bos: bos.map(str::to_owned), eos: eos.map(str::to_owned) })
    }

    /// Renders a conversation. The text holds the special tokens as text:
    /// [`Tokenizer::encode_chat`](super::Tokenizer::encode_chat) turns it into ids.
    pub fn render(&self, messages: &[ChatMessage], options: &ChatOptions) -> Result<String, TextError> {
        let now = CivilTime::from_unix_s(options.now_unix_s.unwrap_or_else(clock::system_unix_s));
        let strftime_now = Value::from_function(move |format: &str| now.format(format));
        let mut context: Vec<(&str, Value)> = vec![
            ("strftime_now", strftime_now),
            ("documents", options.documents().map_or(Value::from(()), values::to_template)),
            ("messages", messages.iter().map(values::message).collect()),
            ("tools", options.tools().map_or(Value::from(()), values::to_template)),
            ("add_generation_prompt", Value::from(options.add_generation_prompt)),
        ];
        for (name, token) in [("bos_token", &self.bos), ("eos_token", &self.eos)] {
            context.extend(token.as_ref().map(|token| (name, Value::from(token.as_str()))));
        }
        context.extend(options.variables().iter().map(|(name, value)| (name.as_str(), values::to_template(value))));

        let given_bytes: usize = messages.iter().map(values::message_bytes).sum::<usize>()
            + options.tools().map_or(0, values::weight_bytes)
            + options.documents().map_or(0, values::weight_bytes)
            + options.variables().values().map(values::weight_bytes).sum::<usize>();
        let budget = BASE_BUDGET.saturating_add(BUDGET_PER_BYTE.saturating_mul(given_bytes as u64));
        let mut environment = self.environment.clone();
        environment.set_fuel(Some(budget));
        let render = || environment.get_template(NAME)?.render(Value::from_pairs(context));
        render().map_err(|error| explain(&error, budget))
    }
}

impl ChatRenderer for ChatTemplate {
    fn render(&self, chat: &ChatPrompt) -> Result<String, String> {
        Self::render(self, &chat.messages, &chat.options).map_err(|error| error.to_string())
    }
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChatTemplate").field("bos", &self.bos).field("eos", &self.eos).finish_non_exhaustive()
    }
}

/// What a template said with `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, "refused by the template").with_source(Raised(message)))
}

fn explain(error: &Error, budget: u64) -> TextError {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(at) = cause {
        if let Some(Raised(reason)) = at.downcast_ref() {
            return TextError::Refused { reason: reason.clone() };
        }
        if at.downcast_ref::<Error>().is_some_and(|error| error.kind() == ErrorKind::OutOfFuel) {
            return TextError::Budget { budget };
        }
        cause = at.source();
    }
    let detail = error.detail().map(|detail| format!(": {detail}")).unwrap_or_default();
    TextError::Template { line: error.line().unwrap_or(0), reason: format!("{}{detail}", error.kind()) }
}
