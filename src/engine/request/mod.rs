//! Requests: a prompt, and the parameters with which to continue it.
//!
//! A [`Request`] is plain data that may be built on any thread. It is checked when it is submitted.

pub(super) mod admission;
pub(super) mod doorbell;
pub(super) mod encoding;
pub(super) mod handle;
pub(super) mod mailbox;
pub(super) mod output;

use std::time::Duration;

use crate::sampler::SamplingParams;
use crate::text::{ChatMessage, ChatPrompt};

/// Id of a request, unique within its engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize)]
pub struct RequestId(pub u64);

impl std::fmt::Display for RequestId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// Prompt that the model continues.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
#[allow(clippy::large_enum_variant, reason = "a prompt is moved a few times in its life")]
pub enum Prompt {
    /// Token ids, used unchanged.
    Tokens(Vec<u32>),
    /// Text; the vocabulary encodes it and adds its usual special tokens.
    Text(String),
    /// A conversation; the chat template renders it to text, by default up to the start of the assistant's answer.
    Chat(ChatPrompt),
}

impl From<Vec<u32>> for Prompt {
    fn from(tokens: Vec<u32>) -> Self {
        Self::Tokens(tokens)
    }
}

impl From<&[u32]> for Prompt {
    fn from(tokens: &[u32]) -> Self {
        Self::Tokens(tokens.to_vec())
    }
}

impl From<String> for Prompt {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

impl From<&str> for Prompt {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<ChatPrompt> for Prompt {
    fn from(chat: ChatPrompt) -> Self {
        Self::Chat(chat)
    }
}

impl From<Vec<ChatMessage>> for Prompt {
    fn from(messages: Vec<ChatMessage>) -> Self {
        Self::Chat(messages.into())
    }
}

/// Request: a prompt, sampling parameters, priority, deadline and cache salt.
///
/// If [`Engine::submit`](super::Engine::submit) fails for a reason that is not the request's fault, the error contains
/// the request.
///
/// ```
/// use ascend_llm::{ChatMessage, Request, SamplingParams};
///
/// let request = Request::chat([ChatMessage::user("What does the duck say?")])
///     .with_sampling(SamplingParams::greedy().with_max_tokens(32))
///     .with_cache_salt(*b"tenant 7");
/// assert_eq!(request.sampling().max_tokens, Some(32));
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    prompt: Prompt,
    sampling: SamplingParams,
    priority: i32,
    deadline: Option<Duration>,
    cache_salt: Box<[u8]>,
}

impl Request {
    /// Creates a request with default sampling parameters, priority 0 and no deadline.
    #[must_use]
    pub fn new(prompt: impl Into<Prompt>) -> Self {
        Self {
            prompt: prompt.into(),
            sampling: SamplingParams::default(),
            priority: 0,
            deadline: None,
            cache_salt: Box::default(),
        }
    }

    /// Creates a request to continue a text.
    #[must_use]
    pub fn text(text: impl Into<String>) -> Self {
        Self::new(Prompt::Text(text.into()))
    }

    /// Creates a request to continue token ids.
    #[must_use]
    pub fn tokens(tokens: impl Into<Vec<u32>>) -> Self {
        Self::new(Prompt::Tokens(tokens.into()))
    }

    /// Creates a request to answer the last message of a conversation.
    ///
    /// `chat` is a list of messages, or a [`ChatPrompt`] with tools, documents and template variables.
    #[must_use]
    pub fn chat(chat: impl Into<ChatPrompt>) -> Self {
        Self::new(Prompt::Chat(chat.into()))
    }

    /// Sets the sampling parameters, which include the stop conditions.
    #[must_use]
    pub fn with_sampling(mut self, params: SamplingParams) -> Self {
        self.sampling = params;
        self
    }

    /// Sets the priority.
    ///
    /// Under [`SchedulePolicy::Priority`](crate::scheduler::SchedulePolicy), requests with a higher priority are
    /// scheduled first. Other policies accept only priority 0.
    #[must_use]
    pub fn with_priority(mut self, priority: i32) -> Self {
        self.priority = priority;
        self
    }

    /// Sets the deadline, as a time after the submission.
    ///
    /// If the request is waiting or running at its deadline, it ends with
    /// [`FinishReason::Deadline`](super::FinishReason).
    #[must_use]
    pub fn with_deadline(mut self, after: Duration) -> Self {
        self.deadline = Some(after);
        self
    }

    /// Sets the cache salt: the request shares cached prompts only with requests that have the same salt.
    #[must_use]
    pub fn with_cache_salt(mut self, salt: impl Into<Box<[u8]>>) -> Self {
        self.cache_salt = salt.into();
        self
    }

    /// Returns the prompt.
    pub fn prompt(&self) -> &Prompt {
        &self.prompt
    }

    /// Returns the sampling parameters.
    pub fn sampling(&self) -> &SamplingParams {
        &self.sampling
    }

    /// Returns the priority.
    pub fn priority(&self) -> i32 {
        self.priority
    }

    /// Returns the deadline, as a time after the submission.
    pub fn deadline(&self) -> Option<Duration> {
        self.deadline
    }

    /// Returns the cache salt; empty by default.
    pub fn cache_salt(&self) -> &[u8] {
        &self.cache_salt
    }
}
