//! What can go wrong, one enum for each thing a caller does: build, submit, read a request, run the engine.
//!
//! A request's failure is a [`RequestError`] and never ends the engine; an [`EngineError`] ends it, and every open handle
//! hears it as [`RequestError::Engine`].

use crate::device::DeviceError;
use crate::graph::CompileError;
use crate::model::ModelError;
use crate::sampler::{ParamError, SampleError};
use crate::scheduler::ScheduleError;
use crate::text::TextError;
use crate::weights::WeightError;

use super::request::Request;

/// Why an engine could not be built.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// A field of the configuration is out of its range or contradicts another.
    #[error("bad configuration")]
    Config(#[from] ParamError),
    /// The model and the runner disagree on the width of a row of logits.
    #[error("the model has a vocabulary of {model}, but its runner gives rows of {runner} logits")]
    VocabSize {
        /// Entries of the model's vocabulary.
        model: u32,
        /// Width of a row as the runner states it.
        runner: usize,
    },
    /// The memory budget leaves no room for keys and values.
    #[error(
        "no room for the KV cache: the budget is {budget_bytes} bytes, weights and buffers take {taken_bytes}, one block \
         takes {block_bytes}, and at least {needed_bytes} bytes of blocks are needed; {fitting_tokens} tokens would fit"
    )]
    NoRoomForCache {
        /// Bytes that may be used for it: what the configuration says, or what a device had free when the pool was asked for.
        budget_bytes: u64,
        /// Bytes that weights and plans take beside it.
        taken_bytes: u64,
        /// Bytes of one KV block.
        block_bytes: u64,
        /// Bytes of the pool that was asked for, or of the smallest that would do.
        needed_bytes: u64,
        /// Tokens that the blocks within the budget hold: with one sequence the longest `max_model_len`.
        fitting_tokens: u64,
    },
    /// The model's weight files cannot be used.
    #[error("cannot open the model")]
    Weights(#[from] WeightError),
    /// The model cannot be run.
    #[error("cannot run the model")]
    Model(#[from] ModelError),
    /// The model's tokenizer or chat template cannot be used.
    #[error("cannot use the model's tokenizer or chat template")]
    Text(#[from] TextError),
    /// The plan could not be made.
    #[error("cannot compile the model")]
    Compile(#[from] CompileError),
    /// The scheduler refused its configuration.
    #[error("bad scheduler configuration")]
    Schedule(#[from] ScheduleError),
    /// The device failed.
    #[error("device failed")]
    Device(#[from] DeviceError),
    /// The engine's thread could not be started.
    #[error("cannot start the engine's thread")]
    Thread(#[source] std::io::Error),
}

/// Why a request was not taken. Nothing of it is left in the engine.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SubmitError {
    /// A field of the request is out of its range.
    #[error("bad parameter")]
    Param(#[from] ParamError),
    /// The prompt leaves no room for one token of output.
    #[error("prompt of {prompt_tokens} tokens leaves no room for output, expected at most {limit_tokens}")]
    TooLong {
        /// Tokens of the prompt.
        prompt_tokens: usize,
        /// The longest prompt this engine takes.
        limit_tokens: u32,
    },
    /// The whole pool of KV blocks is too small for the prompt.
    #[error(
        "prompt of {prompt_tokens} tokens needs {needed_blocks} KV blocks of {block_size} tokens, the pool has {pool_blocks}"
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
    /// As many requests wait as may wait; here is the request back, try again later.
    #[error("queue is full")]
    QueueFull(Box<Request>),
    /// The engine takes no more requests; here is the request back.
    #[error("engine is shut down")]
    Closed(Box<Request>),
    /// The engine has failed; here is the request back.
    #[error("engine has failed")]
    Failed {
        /// The request.
        request: Box<Request>,
        /// What ended the engine.
        #[source]
        source: EngineError,
    },
}

/// Why a request that was taken did not come to its end.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RequestError {
    /// A row of this request has infinite or NaN values, in the last layer's sums or in its logits: the model's arithmetic
    /// overflowed, with f32 activations as well where these were to be tried.
    #[error("values at position {position} are not finite: the model overflowed in this numeric mode")]
    NonFinite {
        /// The choice.
        choice: u32,
        /// Position in the sequence of the first token whose row is bad.
        position: u32,
    },
    /// A value was too large for the type it is stored in, and the policy is to end the request.
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
        /// What it or its panic said.
        reason: String,
    },
    /// No token could be drawn.
    #[error("cannot draw token {generated_tokens} of choice {choice}")]
    Sample {
        /// The choice.
        choice: u32,
        /// Tokens the choice had generated before.
        generated_tokens: u32,
        /// Why.
        #[source]
        source: SampleError,
    },
    /// The scheduler refused the request.
    #[error("cannot schedule the request")]
    Schedule(#[from] ScheduleError),
    /// The engine failed.
    #[error("engine failed")]
    Engine(#[from] EngineError),
    /// The engine was shut down or dropped before the request was done.
    #[error("engine was shut down before the request was done")]
    Closed,
}

/// What ends an engine.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The device failed in a step; what it holds cannot be trusted any more.
    #[error("device failed")]
    Device(#[from] DeviceError),
    /// The runner's answer has not the shape asked for.
    #[error("runner gave {got} of {what}, expected {expected}")]
    BadAnswer {
        /// What was counted.
        what: &'static str,
        /// How many came.
        got: usize,
        /// How many were asked for.
        expected: usize,
    },
    /// There is work, and the scheduler plans none of it.
    #[error("no progress: {waiting} sequences wait, {running} run, and nothing was planned")]
    Stalled {
        /// Sequences that wait.
        waiting: usize,
        /// Sequences that run.
        running: usize,
    },
    /// The step panicked (a runner, vocabulary or clock of the host's, or a defect of the engine).
    #[error("step panicked: {message}")]
    Panicked {
        /// The panic's message.
        message: String,
    },
}

/// Why [`Engine::generate`](super::Engine::generate) or [`chat`](super::Engine::chat) gave no text.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GenerateError {
    /// The request was not taken.
    #[error(transparent)]
    Submit(#[from] SubmitError),
    /// The request did not come to its end.
    #[error(transparent)]
    Request(#[from] RequestError),
}
