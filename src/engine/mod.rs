//! The engine: accepts requests, runs steps and publishes tokens.
//!
//! Most programs use [`Engine`]. It runs on a thread of its own, may be cloned and shared, and accepts [`Request`]s
//! from any thread. [`EngineCore`] is the same engine without the thread, for hosts that call every step themselves.
//! Hosts with a loop of their own use the layer below directly: [`ModelExecutor`](crate::runner::ModelExecutor) and
//! [`Sampler`](crate::sampler::Sampler).
//!
//! # Layout
//! - `request`: the caller's types ([`Request`], [`RequestHandle`], [`Output`]) and the admission, which checks
//!   requests;
//! - `core`: [`EngineCore::step`], the loop body; `step`: the state of one step;
//! - `thread`: the engine's thread; `shared`: the state that callers share with the loop;
//! - `build`: [`EngineBuilder`], which builds an engine from a path; `metrics`: counters and utilization.
//!
//! # Lifecycle of a request
//! `submit` checks the request on the caller's thread and queues it, or returns a [`SubmitError`]. Each step schedules
//! rows, runs the model, samples tokens, and merges the new output into the mailbox of the [`RequestHandle`]. The last
//! [`Delta`] of a choice contains its finish reason. Dropping the handle removes the request before the next step.
//!
//! A request without a seed gets a seed derived from the engine's seed and the request's number in the order of
//! submission. Two runs that submit requests in the same order therefore produce the same output, and two equal
//! requests in one engine still differ.

#![forbid(unsafe_code)]

mod build;
mod clock;
mod config;
mod core;
mod error;
mod info;
mod metrics;
mod request;
mod shared;
mod step;
mod thread;

use std::sync::Arc;
use std::time::Duration;

pub use build::EngineBuilder;
pub use clock::{Clock, ManualClock, SystemClock};
pub use config::{CacheBudget, EngineConfig};
pub use core::EngineCore;
pub use error::{BuildError, EngineError, ErrorKind, GenerateError, RequestError, SubmitError};
pub use info::{BucketInfo, EngineInfo, Health, LoadProgress, ModelLimits, StepReport};
pub use metrics::utilization::Utilization;
pub use metrics::{Stats, TimeHistogram};
#[cfg(feature = "async")]
pub use request::handle::DeltaStream;
pub use request::handle::{Deltas, RequestHandle};
pub use request::output::{
    Choice, Delta, FinishReason, Logprobs, LogprobsAt, Output, OutputBuilder, PromptInfo, StopMatch, Usage,
};
pub use request::{Prompt, Request, RequestId};
pub use step::stop::{StopChecker, default_stop_ids};

use crate::device::PeakRates;
use crate::sampler::{ParamError, SamplingParams};
use crate::scheduler::Tick;
use crate::text::ChatPrompt;
use clock::micros;
use request::admission::Lifecycle;
use shared::{Shared, caller_methods};
use thread::EngineThread;

/// Engine on a thread of its own; clones share the same engine.
///
/// Dropping the last clone stops the engine after the current step, without waiting for the thread. Open handles then
/// end with [`RequestError::Closed`]. [`shutdown`](Self::shutdown) instead lets requests finish and waits for the
/// thread.
#[derive(Clone, Debug)]
pub struct Engine {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    shared: Arc<Shared>,
    thread: EngineThread,
}

impl Engine {
    caller_methods!();

    /// Starts a thread that runs `core`.
    ///
    /// # Errors
    /// [`BuildError::Thread`] if the operating system cannot start the thread.
    pub fn spawn(core: EngineCore) -> Result<Self, BuildError> {
        let shared = Arc::clone(core.shared_arc());
        let thread = EngineThread::spawn(core).map_err(BuildError::Thread)?;
        Ok(Self { inner: Arc::new(Inner { shared, thread }) })
    }

    /// Continues a prompt and waits for the whole text. `n` must be 1.
    ///
    /// # Errors
    /// [`GenerateError::Submit`] if the request is rejected, also because `n` is not 1; [`GenerateError::Request`] if
    /// it fails.
    pub fn generate(&self, prompt: impl Into<Prompt>, params: &SamplingParams) -> Result<String, GenerateError> {
        if params.n != 1 {
            let error = ParamError::new("n", params.n, "1; use `submit` for several choices");
            return Err(SubmitError::Param(error).into());
        }
        let output = self.submit(Request::new(prompt).with_sampling(params.clone()))?.collect_output()?;
        Ok(output.choices.into_iter().next().map(|choice| choice.text).unwrap_or_default())
    }

    /// Answers the last message of a conversation and waits for the whole text. `n` must be 1.
    ///
    /// # Errors
    /// The same as [`generate`](Self::generate).
    pub fn chat(&self, chat: impl Into<ChatPrompt>, params: &SamplingParams) -> Result<String, GenerateError> {
        self.generate(Prompt::Chat(chat.into()), params)
    }

    /// Stops accepting requests and returns at once.
    ///
    /// Accepted requests run to their end; then the engine's thread ends.
    pub fn close(&self) {
        self.inner.shared.admission.advance(Lifecycle::Draining(None));
    }

    /// Stops accepting requests, lets accepted ones finish within `grace`, and waits for the thread.
    ///
    /// The engine's clock measures `grace`. Requests that are still open after `grace` end with
    /// [`RequestError::Closed`]. Other clones of the engine then reject requests.
    ///
    /// This method blocks; async code uses [`shutdown_async`](Self::shutdown_async).
    ///
    /// # Errors
    /// The [`EngineError`] that ended the engine, if it failed.
    pub fn shutdown(self, grace: Duration) -> Result<(), EngineError> {
        self.drain(grace);
        self.inner.thread.join();
        self.outcome()
    }

    /// Does the same as [`shutdown`](Self::shutdown), without blocking the executor.
    ///
    /// The shutdown starts when this method is called. The future only waits for the thread; dropping it changes
    /// nothing.
    ///
    /// # Errors
    /// The [`EngineError`] that ended the engine, if it failed.
    #[cfg(feature = "async")]
    pub fn shutdown_async(self, grace: Duration) -> impl Future<Output = Result<(), EngineError>> + Send + use<> {
        self.drain(grace);
        async move {
            std::future::poll_fn(|context| self.inner.thread.poll_finished(context)).await;
            self.outcome()
        }
    }

    fn drain(&self, grace: Duration) {
        let until = self.inner.shared.clock.now().0.saturating_add(micros(grace));
        self.inner.shared.admission.advance(Lifecycle::Draining(Some(Tick(until))));
    }

    fn outcome(&self) -> Result<(), EngineError> {
        match self.inner.shared.admission.lifecycle() {
            Lifecycle::Ended(Some(error)) => Err(error),
            _ => Ok(()),
        }
    }

    fn shared(&self) -> &Shared {
        &self.inner.shared
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.shared.admission.advance(Lifecycle::Stopping);
    }
}
