//! Error types, one for each thing that a caller does: build, submit, read a request, run the engine.
//!
//! `Display` writes the whole sentence, causes included. `source()` returns a further cause if an error of the
//! operating system or of another crate caused the error. [`ErrorKind`] classifies all errors, for hosts that map them
//! to responses of their own, such as HTTP status codes.
//!
//! A failure of a request is a [`RequestError`] and never ends the engine. An [`EngineError`] ends the engine, and each
//! open handle receives it as [`RequestError::Engine`].

use crate::device::DeviceError;
use crate::graph::CompileError;
use crate::model::ModelError;
use crate::sampler::{ParamError, SampleError};
use crate::scheduler::ScheduleError;
use crate::text::TextError;
use crate::weights::WeightError;

use super::request::Request;

/// Kind of an error, for hosts that map errors to responses of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ErrorKind {
    /// A field of the request is out of range, or its prompt cannot be encoded or rendered.
    InvalidRequest,
    /// The prompt is longer than the engine can serve.
    PromptTooLong,
    /// The queue is full; the same request may succeed later.
    QueueFull,
    /// The engine is shutting down or has stopped.
    ShuttingDown,
    /// The model's arithmetic overflowed or produced values that are not finite.
    Numeric,
    /// A custom operation of the host failed.
    CustomOp,
    /// The device failed.
    Device,
    /// A setting of the engine is out of range or contradicts another.
    InvalidConfig,
    /// The model's files cannot be used.
    InvalidModel,
    /// The host or the device has too little memory.
    OutOfMemory,
    /// A defect of the engine, or of code that the host supplied.
    Internal,
}

impl ErrorKind {
    /// Returns whether the caller has to change the request: sent again unchanged, it fails again.
    #[must_use]
    pub const fn is_client_error(self) -> bool {
        matches!(self, Self::InvalidRequest | Self::PromptTooLong)
    }

    /// Returns whether the same request may succeed later.
    #[must_use]
    pub const fn is_retryable(self) -> bool {
        matches!(self, Self::QueueFull | Self::ShuttingDown)
    }

    /// Returns the HTTP status that fits the error.
    ///
    /// 400 for errors of the client, 429 for a full queue, 503 for an engine that is shutting down, 500 for all others.
    #[must_use]
    pub const fn http_status(self) -> u16 {
        match self {
            Self::InvalidRequest | Self::PromptTooLong => 400,
            Self::QueueFull => 429,
            Self::ShuttingDown => 503,
            _ => 500,
        }
    }

    /// Returns the kind as one word, the same as its serialized form.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::InvalidRequest => "invalid_request",
            Self::PromptTooLong => "prompt_too_long",
            Self::QueueFull => "queue_full",
            Self::ShuttingDown => "shutting_down",
            Self::Numeric => "numeric",
            Self::CustomOp => "custom_op",
            Self::Device => "device",
            Self::InvalidConfig => "invalid_config",
            Self::InvalidModel => "invalid_model",
            Self::OutOfMemory => "out_of_memory",
            Self::Internal => "internal",
        }
    }

    const fn of_device(error: &DeviceError) -> Self {
        match error {
            DeviceError::OutOfMemory { .. } => Self::OutOfMemory,
            _ => Self::Device,
        }
    }
}

impl std::fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Reason why an engine could not be built.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// A field of the configuration is out of range or contradicts another field.
    #[error("configuration: {0}")]
    Config(ParamError),
    /// The vocabulary size of the model differs from the width of the runner's logit rows.
    #[error("the model has a vocabulary of {model} tokens, but its runner returns rows of {runner} logits")]
    VocabSize {
        /// Vocabulary size of the model.
        model: u32,
        /// Width of a logit row, as the runner reports it.
        runner: usize,
    },
    /// The memory budget leaves too little memory for the KV cache.
    #[error(
        "the KV cache does not fit: the budget is {budget_bytes} bytes, weights and buffers use {taken_bytes} bytes, one \
         block has {block_bytes} bytes, and the blocks need at least {needed_bytes} bytes; the budget would hold \
         {fitting_tokens} tokens"
    )]
    CacheDoesNotFit {
        /// Memory budget in bytes: the configured one, or the device's free memory when the pool was allocated.
        budget_bytes: u64,
        /// Number of bytes that weights and plans use in addition.
        taken_bytes: u64,
        /// Size of one KV block in bytes.
        block_bytes: u64,
        /// Number of bytes of the requested pool, or of the smallest possible pool.
        needed_bytes: u64,
        /// Number of tokens that fit in the budget; with one sequence, this is the longest possible `max_model_len`.
        fitting_tokens: u64,
    },
    /// The model's weight files cannot be used.
    #[error(transparent)]
    Weights(#[from] WeightError),
    /// The model is not supported, or its configuration is invalid.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The model's tokenizer or chat template cannot be used.
    #[error("tokenizer or chat template: {0}")]
    Text(TextError),
    /// The model cannot be compiled to plans.
    #[error("cannot compile the model: {0}")]
    Compile(CompileError),
    /// The scheduler rejected its configuration.
    #[error("scheduler: {0}")]
    Schedule(ScheduleError),
    /// The device failed.
    #[error("device: {0}")]
    Device(DeviceError),
    /// The engine's thread could not be started.
    #[error("cannot start the engine's thread: {0}")]
    Thread(std::io::Error),
}

impl BuildError {
    /// Returns the kind of the error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Config(_) | Self::Schedule(_) | Self::Compile(CompileError::Option { .. }) => {
                ErrorKind::InvalidConfig
            }
            Self::CacheDoesNotFit { .. } | Self::Compile(CompileError::Memory(_)) => ErrorKind::OutOfMemory,
            Self::Weights(_) | Self::Model(_) | Self::Text(_) | Self::Compile(_) => ErrorKind::InvalidModel,
            Self::Device(error) => ErrorKind::of_device(error),
            Self::VocabSize { .. } | Self::Thread(_) => ErrorKind::Internal,
        }
    }
}

/// Reason why a request was rejected. The engine keeps no part of a rejected request.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SubmitError {
    /// A field of the request is out of range.
    #[error(transparent)]
    Param(#[from] ParamError),
    /// The prompt leaves no space for one output token.
    #[error("the prompt has {prompt_tokens} tokens, expected at most {limit_tokens}, so that an output token fits")]
    TooLong {
        /// Number of tokens of the prompt.
        prompt_tokens: usize,
        /// Maximum number of prompt tokens in this engine.
        limit_tokens: u32,
    },
    /// The whole pool of KV blocks is too small for the prompt.
    #[error(
        "the prompt has {prompt_tokens} tokens and needs {needed_blocks} KV blocks of {block_size} tokens, but the whole \
         pool has {pool_blocks}"
    )]
    NeverFits {
        /// Number of tokens of the prompt.
        prompt_tokens: u32,
        /// Number of blocks that the prompt needs.
        needed_blocks: u32,
        /// Number of blocks in the pool.
        pool_blocks: u32,
        /// Number of tokens per block.
        block_size: u32,
    },
    /// The tokenizer rejected the prompt.
    #[error("cannot encode the prompt: {reason}")]
    Encode {
        /// Message of the tokenizer.
        reason: String,
    },
    /// The chat template rejected the messages.
    #[error("cannot render the chat: {reason}")]
    Render {
        /// Message of the template.
        reason: String,
    },
    /// The queue is full. The error contains the request, so that it can be submitted later.
    #[error("the queue is full")]
    QueueFull(Box<Request>),
    /// The engine is shutting down or was shut down. The error contains the request.
    #[error("the engine is shut down")]
    Closed(Box<Request>),
    /// The engine has failed.
    #[error("the engine has failed: {cause}")]
    Failed {
        /// The rejected request.
        request: Box<Request>,
        /// The error that ended the engine.
        cause: EngineError,
    },
}

impl SubmitError {
    /// Returns the kind of the error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Param(_) | Self::Encode { .. } | Self::Render { .. } => ErrorKind::InvalidRequest,
            Self::TooLong { .. } | Self::NeverFits { .. } => ErrorKind::PromptTooLong,
            Self::QueueFull(_) => ErrorKind::QueueFull,
            Self::Closed(_) => ErrorKind::ShuttingDown,
            Self::Failed { cause, .. } => cause.kind(),
        }
    }

    /// Returns whether the caller has to change the request; see [`ErrorKind::is_client_error`].
    pub fn is_client_error(&self) -> bool {
        self.kind().is_client_error()
    }

    /// Returns the rejected request if the error contains it.
    pub fn into_request(self) -> Option<Request> {
        match self {
            Self::QueueFull(request) | Self::Closed(request) | Self::Failed { request, .. } => Some(*request),
            _ => None,
        }
    }
}

/// Reason why an accepted request failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RequestError {
    /// A row of this request has values that are infinite or NaN.
    ///
    /// The values are sums of the last layer or logits.
    ///
    /// The model's arithmetic overflowed, also with f32 activations if the overflow policy is to retry with them.
    #[error("values at position {position} are not finite: the model overflowed in this numeric mode")]
    NonFinite {
        /// Index of the choice.
        choice: u32,
        /// Position in the sequence of the first token with such a row.
        position: u32,
    },
    /// A value was too large for the type in which it is stored, and the overflow policy is `error`.
    #[error(
        "a value of the token at position {position} is too large for the type it is stored in; with the overflow policy \
         `clamp` or `retry_f32` the request would continue"
    )]
    Overflow {
        /// Index of the choice.
        choice: u32,
        /// Position in the sequence of the first token that overflowed.
        position: u32,
    },
    /// A custom operation failed for this request.
    #[error("custom operation {name} failed in choice {choice} from position {position} on: {reason}")]
    CustomOp {
        /// Index of the choice.
        choice: u32,
        /// Position in the sequence of the first row of the failed call.
        position: u32,
        /// Name of the operation.
        name: String,
        /// Message of the error or panic of the operation.
        reason: String,
    },
    /// The sampler could not sample a token.
    #[error("cannot sample token {generated_tokens} of choice {choice}: {cause}")]
    Sample {
        /// Index of the choice.
        choice: u32,
        /// Number of tokens that the choice had generated before.
        generated_tokens: u32,
        /// Error of the sampler.
        cause: SampleError,
    },
    /// The scheduler rejected the request.
    #[error("cannot schedule the request: {0}")]
    Schedule(ScheduleError),
    /// The engine failed.
    #[error("the engine failed: {0}")]
    Engine(EngineError),
    /// The engine was shut down or dropped before the request ended.
    #[error("the engine was shut down before the request ended")]
    Closed,
}

impl RequestError {
    /// Returns the kind of the error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::NonFinite { .. }
            | Self::Overflow { .. }
            | Self::Sample { cause: SampleError::NonFinite { .. }, .. } => ErrorKind::Numeric,
            Self::CustomOp { .. } => ErrorKind::CustomOp,
            // Logit bias, allowed ids and bad words can forbid every token of a row.
            Self::Sample { .. } => ErrorKind::InvalidRequest,
            Self::Schedule(_) => ErrorKind::Internal,
            Self::Engine(error) => error.kind(),
            Self::Closed => ErrorKind::ShuttingDown,
        }
    }

    /// Returns whether the caller has to change the request; see [`ErrorKind::is_client_error`].
    pub fn is_client_error(&self) -> bool {
        self.kind().is_client_error()
    }
}

/// Failure that ended an engine.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The device failed in a step; the content of its memory is no longer reliable.
    #[error("device: {0}")]
    Device(DeviceError),
    /// The results of the runner do not have the requested shape.
    #[error("the runner returned {got} {what}, expected {expected}")]
    BadAnswer {
        /// Name of the counted results.
        what: &'static str,
        /// Number of results that the runner returned.
        got: usize,
        /// Number of requested results.
        expected: usize,
    },
    /// Sequences are waiting or running, but the scheduler plans no rows.
    #[error(
        "no progress: {waiting} sequences are waiting and {running} are running, but the scheduler planned no rows"
    )]
    Stalled {
        /// Number of waiting sequences.
        waiting: usize,
        /// Number of running sequences.
        running: usize,
    },
    /// A step panicked: a runner, vocabulary or clock of the host, or a defect of the engine.
    #[error("a step panicked: {message}")]
    Panicked {
        /// Message of the panic.
        message: String,
    },
}

impl EngineError {
    /// Returns the kind of the error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Device(error) => ErrorKind::of_device(error),
            Self::BadAnswer { .. } | Self::Stalled { .. } | Self::Panicked { .. } => ErrorKind::Internal,
        }
    }
}

/// Reason why [`Engine::generate`](super::Engine::generate) or [`chat`](super::Engine::chat) returned no text.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GenerateError {
    /// The request was rejected.
    #[error(transparent)]
    Submit(#[from] SubmitError),
    /// The request failed.
    #[error(transparent)]
    Request(#[from] RequestError),
}

impl GenerateError {
    /// Returns the kind of the error.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Submit(error) => error.kind(),
            Self::Request(error) => error.kind(),
        }
    }

    /// Returns whether the caller has to change the request; see [`ErrorKind::is_client_error`].
    pub fn is_client_error(&self) -> bool {
        self.kind().is_client_error()
    }
}

macro_rules! from_causes {
    ($($error:ident::$variant:ident($cause:ty)),* $(,)?) => {$(
        impl From<$cause> for $error {
            fn from(cause: $cause) -> Self {
                Self::$variant(cause)
            }
        }
    )*};
}

from_causes! {
    BuildError::Config(ParamError),
    BuildError::Text(TextError),
    BuildError::Compile(CompileError),
    BuildError::Schedule(ScheduleError),
    BuildError::Device(DeviceError),
    RequestError::Schedule(ScheduleError),
    RequestError::Engine(EngineError),
    EngineError::Device(DeviceError),
}
