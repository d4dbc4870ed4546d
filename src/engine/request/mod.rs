//! What a caller asks for: a prompt and how to go on from it.
//!
//! A [`Request`] is plain data and may be built anywhere; it is checked when it is submitted.

pub(super) mod admission;
pub(super) mod doorbell;
pub(super) mod handle;
pub(super) mod mailbox;
pub(super) mod output;

use std::time::Duration;

use crate::sampler::SamplingParams;

use crate::text::ChatMessage;

/// Number of a request, unique within its engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

impl std::fmt::Display for RequestId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// What the model is to continue.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Prompt {
    /// Token ids, taken as they are.
    Tokens(Vec<u32>),
    /// Text; the vocabulary encodes it with its usual special tokens around it.
    Text(String),
    /// A conversation; the model's chat template turns it into text that opens the assistant's turn.
    Chat(Vec<ChatMessage>),
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

impl From<Vec<ChatMessage>> for Prompt {
    fn from(messages: Vec<ChatMessage>) -> Self {
        Self::Chat(messages)
    }
}

/// One request: a prompt, how to sample, and how it stands among others.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    pub(crate) prompt: Prompt,
    pub(crate) sampling: SamplingParams,
    pub(crate) priority: i32,
    pub(crate) deadline: Option<Duration>,
    pub(crate) cache_salt: Box<[u8]>,
}

impl Request {
    /// A request with default sampling, priority 0 and no deadline.
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

    /// A request to continue a text.
    #[must_use]
    pub fn text(text: impl Into<String>) -> Self {
        Self::new(Prompt::Text(text.into()))
    }

    /// A request to continue token ids.
    #[must_use]
    pub fn tokens(tokens: impl Into<Vec<u32>>) -> Self {
        Self::new(Prompt::Tokens(tokens.into()))
    }

    /// A request to answer the last message of a conversation.
    #[must_use]
    pub fn chat(messages: impl Into<Vec<ChatMessage>>) -> Self {
        Self::new(Prompt::Chat(messages.into()))
    }

    /// Sets how tokens are drawn and when to stop.
    #[must_use]
    pub fn sampling(mut self, params: SamplingParams) -> Self {
        self.sampling = params;
        self
    }

    /// Sets the priority: higher is served first under [`SchedulePolicy::Priority`](crate::scheduler::SchedulePolicy).
    /// Other policies take 0 only.
    #[must_use]
    pub fn priority(mut self, priority: i32) -> Self {
        self.priority = priority;
        self
    }

    /// Ends the request with [`FinishReason::Deadline`](super::FinishReason) when that long has passed since it was
    /// submitted, waiting or running.
    #[must_use]
    pub fn deadline(mut self, after: Duration) -> Self {
        self.deadline = Some(after);
        self
    }

    /// Shares cached prompts only with requests of the same salt.
    #[must_use]
    pub fn cache_salt(mut self, salt: impl Into<Box<[u8]>>) -> Self {
        self.cache_salt = salt.into();
        self
    }
}
