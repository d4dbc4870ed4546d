//! Errors: one enum per operation of the caller (build, submit, read a request, run the engine).
//!
//! `Display` is a whole sentence that includes the causes; `source()` returns an error of the system or of another
//! crate, if one is the cause. [`ErrorKind`] classifies all errors for hosts that map them to responses, such as
//! HTTP's.
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

/// Kind of an error, for hosts that map errors to responses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ErrorKind {
    /// A field of the request is out of range, or its prompt cannot be encoded or rendered.
    InvalidRequest,
    /// The prompt is longer than the engine can serve.
    PromptTooLong,
    /// The queue is full; the same request may pass later.
    QueueFull,
    /// The engine is shutting down or has stopped.
    ShuttingDown,
    /// The model's arithmetic overflowed or gave values that are not finite.
    Numeric,
    /// A custom operation of the host failed.
    CustomOp,
    /// A device failed.
    Device,
    /// A setting of the engine is out of range or contradicts another.
    InvalidConfig,
    /// The model's files cannot be used.
    InvalidModel,
    /// Memory does not suffice.
    OutOfMemory,
    /// A defect of the engine or of code that the host gave it.
    Internal,
}

impl ErrorKind {
    /// Whether the caller must change the request: submitting it again unchanged fails again.
    #[must_use]
    pub const fn is_client_error(self) -> bool {
        matches!(self, Self::InvalidRequest | Self::PromptTooLong)
    }

    /// Whether the same request may pass later.
    #[must_use]
    pub const fn is_retryable(self) -> bool {
        matches!(self, Self::QueueFull | Self::ShuttingDown)
    }

    /// HTTP status for this kind.
    ///
    /// 400 for errors of the client, 429 for a full queue, 503 for an engine that shuts down, 500 otherwise.
    #[must_use]
    pub const fn http_status(self) -> u16 {
        match self {
            Self::InvalidRequest | Self::PromptTooLong => 400,
            Self::QueueFull => 429,
            Self::ShuttingDown => 503,
            _ => 500,
        }
    }

    /// The kind as one word, as in its serialized form.
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

/// Why an engine could not be built.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// A field of the configuration is out of its range or contradicts another.
    #[error("configuration: {0}")]
    Config(ParamError),
    /// Model and runner disagree on the width of a row of logits.
    #[error("the model has a vocabulary of {model}, but its runner gives rows of {runner} logits")]
    VocabSize {
        /// Entries of the model's vocabulary.
        model: u32,
        /// Width of the runner's rows.
        runner: usize,
    },
    /// The memory budget leaves too little for keys and values.
    #[error(
        "the KV cache does not fit: the budget is {budget_bytes} bytes, weights and buffers take {taken_bytes}, one block \
         takes {block_bytes}, and at least {needed_bytes} bytes of blocks are needed; {fitting_tokens} tokens would fit"
    )]
    CacheDoesNotFit {
        /// Bytes that may be used for it: by the configuration, or by the device's free memory when the pool was allocated.
        budget_bytes: u64,
        /// Bytes that weights and programs use.
        taken_bytes: u64,
        /// Bytes of one KV block.
        block_bytes: u64,
        /// Bytes of the requested pool, or of the smallest usable one.
        needed_bytes: u64,
        /// Tokens that the blocks within the budget hold: with one sequence the longest `max_model_len`.
        fitting_tokens: u64,
    },
    /// The model's weight files cannot be used.
    #[error(transparent)]
    Weights(#[from] WeightError),
    /// The model cannot be run.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The model's tokenizer or chat template cannot be used.
    #[error("tokenizer or chat template: {0}")]
    Text(TextError),
    /// The plan could not be made.
    #[error("cannot compile the model: {0}")]
    Compile(CompileError),
    /// The scheduler refused its configuration.
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
    /// The kind of trouble.
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

/// Reason why a request was refused. A refused request leaves nothing in the engine.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SubmitError {
    /// A field of the request is out of its range.
    #[error(transparent)]
    Param(#[from] ParamError),
    /// The prompt leaves no space for one token of output.
    #[error("the prompt has {prompt_tokens} tokens, expected at most {limit_tokens}, so that a token of output fits")]
    TooLong {
        /// Tokens of the prompt.
        prompt_tokens: usize,
        /// The longest prompt that the engine accepts.
        limit_tokens: u32,
    },
    /// The whole pool of KV blocks is too small for the prompt.
    #[error(
        "the prompt has {prompt_tokens} tokens and needs {needed_blocks} KV blocks of {block_size} tokens, the whole pool \
         has {pool_blocks}"
    )]
    NeverFits {
        /// Tokens of the prompt.
        prompt_tokens: u32,
        /// Blocks that it needs.
        needed_blocks: u32,
        /// Blocks in the pool.
        pool_blocks: u32,
        /// Tokens a block.
        block_size: u32,
    },
    /// The tokenizer refused the prompt.
    #[error("cannot encode the prompt: {reason}")]
    Encode {
        /// The tokenizer's own words.
        reason: String,
    },
    /// The chat template refused the messages.
    #[error("cannot render the chat: {reason}")]
    Render {
        /// The template's own words.
        reason: String,
    },
    /// The queue is full. The error returns the request for a later attempt.
    #[error("the queue is full")]
    QueueFull(Box<Request>),
    /// The engine is shut down. The error returns the request.
    #[error("the engine is shut down")]
    Closed(Box<Request>),
    /// The engine has failed. The error returns the request.
    #[error("the engine has failed: {cause}")]
    Failed {
        /// The request.
        request: Box<Request>,
        /// The error that ended the engine.
        cause: EngineError,
    },
}

impl SubmitError {
    /// The kind of trouble.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Param(_) | Self::Encode { .. } | Self::Render { .. } => ErrorKind::InvalidRequest,
            Self::TooLong { .. } | Self::NeverFits { .. } => ErrorKind::PromptTooLong,
            Self::QueueFull(_) => ErrorKind::QueueFull,
            Self::Closed(_) => ErrorKind::ShuttingDown,
            Self::Failed { cause, .. } => cause.kind(),
        }
    }

    /// Whether the caller must change the request; see [`ErrorKind::is_client_error`].
    pub fn is_client_error(&self) -> bool {
        self.kind().is_client_error()
    }

    /// The request, if the error returns it.
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
    /// A row of the request has infinite or NaN values in the last layer's sums or in its logits.
    ///
    /// The model's arithmetic overflowed, also in the f32 fallback if the policy asks for one.
    #[error("values at position {position} are not finite: the model overflowed in this numeric mode")]
    NonFinite {
        /// The choice.
        choice: u32,
        /// Position in the sequence of the first token whose row is bad.
        position: u32,
    },
    /// A value was too large for its type, and the policy is to end the request.
    #[error(
        "a value of the token at position {position} is too large for the type it is stored in; the overflow policies \
         `clamp` and `retry_f32` would go on"
    )]
    Overflow {
        /// The choice.
        choice: u32,
        /// Position in the sequence of the first token that overflowed.
        position: u32,
    },
    /// A custom operation failed for this request.
    #[error("custom operation {name} failed in choice {choice} from position {position} on: {reason}")]
    CustomOp {
        /// The choice.
        choice: u32,
        /// Position in the sequence of the first row of the call.
        position: u32,
        /// The operation.
        name: String,
        /// The message of its error or panic.
        reason: String,
    },
    /// No token could be sampled.
    #[error("cannot sample token {generated_tokens} of choice {choice}: {cause}")]
    Sample {
        /// The choice.
        choice: u32,
        /// Tokens the choice had generated before.
        generated_tokens: u32,
        /// The sampler's error.
        cause: SampleError,
    },
    /// The scheduler refused the request.
    #[error("cannot schedule the request: {0}")]
    Schedule(ScheduleError),
    /// The engine failed.
    #[error("the engine failed: {0}")]
    Engine(EngineError),
    /// The engine was shut down or dropped before the request was done.
    #[error("the engine was shut down before the request was done")]
    Closed,
}

impl RequestError {
    /// The kind of trouble.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::NonFinite { .. }
            | Self::Overflow { .. }
            | Self::Sample { cause: SampleError::NonFinite { .. }, .. } => ErrorKind::Numeric,
            Self::CustomOp { .. } => ErrorKind::CustomOp,
            // Bias, allowed ids and bad words can exclude every token of a row.
            Self::Sample { .. } => ErrorKind::InvalidRequest,
            Self::Schedule(_) => ErrorKind::Internal,
            Self::Engine(error) => error.kind(),
            Self::Closed => ErrorKind::ShuttingDown,
        }
    }

    /// Whether the caller must change the request; see [`ErrorKind::is_client_error`].
    pub fn is_client_error(&self) -> bool {
        self.kind().is_client_error()
    }
}

/// The failure that ended an engine.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The device failed in a step, so the contents of its memory are unreliable.
    #[error("device: {0}")]
    Device(DeviceError),
    /// The result of the runner does not have the requested shape.
    #[error("the runner gave {got} {what}, expected {expected}")]
    BadAnswer {
        /// The counted items.
        what: &'static str,
        /// How many came.
        got: usize,
        /// The requested number.
        expected: usize,
    },
    /// There is work, but the scheduler plans none of it.
    #[error("no progress: {waiting} sequences wait, {running} run, and nothing was planned")]
    Stalled {
        /// Sequences that wait.
        waiting: usize,
        /// Sequences that run.
        running: usize,
    },
    /// The step panicked (a runner, vocabulary or clock of the host's, or a defect of the engine).
    #[error("a step panicked: {message}")]
    Panicked {
        /// The panic's message.
        message: String,
    },
}

impl EngineError {
    /// The kind of trouble.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Device(error) => ErrorKind::of_device(error),
            Self::BadAnswer { .. } | Self::Stalled { .. } | Self::Panicked { .. } => ErrorKind::Internal,
        }
    }
}

/// Why [`Engine::generate`](super::Engine::generate) or [`chat`](super::Engine::chat) gave no text.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GenerateError {
    /// The request was refused.
    #[error(transparent)]
    Submit(#[from] SubmitError),
    /// The request failed.
    #[error(transparent)]
    Request(#[from] RequestError),
}

impl GenerateError {
    /// The kind of trouble.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Submit(error) => error.kind(),
            Self::Request(error) => error.kind(),
        }
    }

    /// Whether the caller must change the request; see [`ErrorKind::is_client_error`].
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
