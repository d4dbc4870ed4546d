//! Chat templates: render a conversation to the text format of the model's training.
//!
//! Templates are Jinja templates in the dialect of the Transformers library: trimmed blocks, loop controls,
//! `raise_exception`, `strftime_now`, a `tojson` that keeps the order of keys and escapes only what JSON requires, the
//! `generation` tag, and the string methods of Python.
//!
//! A template is untrusted code. It can access only its arguments, and rendering fails with [`TextError::Budget`] once
//! it exceeds a budget of steps and memory that grows with the conversation. The template engine does not count one
//! operation: a list that is repeatedly added to itself.

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

/// Budget of every rendering, in steps: an instruction or 64 bytes of data each, so at most 32 MiB in addition to the
/// conversation. Real templates use a few thousand steps for a short conversation.
const BASE_BUDGET: u64 = 500_000;
/// Additional steps per byte of the conversation: 64 passes over its text.
const BUDGET_PER_BYTE: u64 = 1;
const NAME: &str = "chat template";

/// Compiled chat template.
pub struct ChatTemplate {
    environment: Environment<'static>,
    bos: Option<String>,
    eos: Option<String>,
}

impl ChatTemplate {
    /// Compiles a template; `bos` and `eos` are the texts of the special tokens that it may write.
    ///
    /// # Errors
    /// [`TextError::Template`] if the template is invalid.
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

    /// Renders a conversation to text.
    ///
    /// The text contains the special tokens as text; [`Tokenizer::encode_chat`](super::Tokenizer::encode_chat) converts
    /// it to ids.
    ///
    /// # Errors
    /// [`TextError::Refused`] if the template calls `raise_exception`; [`TextError::Budget`] if rendering exceeds its
    /// budget; [`TextError::Template`] if rendering fails for another reason.
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

/// Message that a template passed to `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, "the template called raise_exception").with_source(Raised(message)))
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
