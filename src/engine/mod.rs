//! The engine: requests in, tokens out.
//!
//! [`Engine`] suits most programs: it runs on its own thread, may be cloned and shared, and accepts [`Request`]s from
//! any thread. [`EngineCore`] is the same engine without the thread, for hosts that drive each step. Hosts with their
//! own loop use [`ModelExecutor`](crate::runner::ModelExecutor) and [`Sampler`](crate::sampler::Sampler) directly.
//!
//! # Layout
//! - `request`: the caller's side ([`Request`], [`RequestHandle`], [`Output`]) and the admission that checks requests;
//! - `core`: [`EngineCore::step`], the loop; `step`: the state of one step;
//! - `thread`: the engine's thread; `shared`: the part that callers share with the loop;
//! - `build`: [`EngineBuilder`], from a path to an engine; `metrics`: counters and utilization.
//!
//! # Life of a request
//! `submit` checks a request on the caller's thread and queues it, or returns a [`SubmitError`]. Each step schedules
//! rows, runs the model, samples, and merges new output into the mailbox of the [`RequestHandle`]; the last [`Delta`]
//! of a choice holds its finish reason. Dropping the handle cancels the request before the next step.
//!
//! A request without a seed gets one derived from the engine's seed and its place in the order of submission: runs that
//! submit in the same order are repeatable, and two equal requests in one engine still differ.

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

/// An engine on its own thread; clones refer to the same engine.
///
/// Dropping the last clone ends the engine after the current step, without waiting for it: open handles end with
/// [`RequestError::Closed`]. [`shutdown`](Self::shutdown) lets requests finish first and waits.
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

    /// Moves a core to a thread of its own.
    ///
    /// # Errors
    /// [`BuildError::Thread`] if the system starts no thread.
    pub fn spawn(core: EngineCore) -> Result<Self, BuildError> {
        let shared = Arc::clone(core.shared_arc());
        let thread = EngineThread::spawn(core).map_err(BuildError::Thread)?;
        Ok(Self { inner: Arc::new(Inner { shared, thread }) })
    }

    /// Completes a text and waits for the whole answer. For one answer: `n` must be 1.
    ///
    /// # Errors
    /// [`GenerateError::Submit`] if the request is refused, [`GenerateError::Request`] if it fails.
    pub fn generate(&self, prompt: impl Into<Prompt>, params: &SamplingParams) -> Result<String, GenerateError> {
        if params.n != 1 {
            let error = ParamError::new("n", params.n, "1: submit the request to get several answers");
            return Err(SubmitError::Param(error).into());
        }
        let output = self.submit(Request::new(prompt).with_sampling(params.clone()))?.collect_output()?;
        Ok(output.choices.into_iter().next().map(|choice| choice.text).unwrap_or_default())
    }

    /// Answers a conversation and waits for the whole answer. For one answer: `n` must be 1.
    ///
    /// # Errors
    /// As [`generate`](Self::generate).
    pub fn chat(&self, chat: impl Into<ChatPrompt>, params: &SamplingParams) -> Result<String, GenerateError> {
        self.generate(Prompt::Chat(chat.into()), params)
    }

    /// Stops admission and returns at once; accepted requests run to their ends, then the thread ends.
    pub fn close(&self) {
        self.inner.shared.admission.advance(Lifecycle::Draining(None));
    }

    /// Stops admission, lets accepted requests finish for at most `grace` by the engine's clock, ends the others with
    /// [`RequestError::Closed`], and waits for the thread. Other clones then refuse requests.
    ///
    /// This call blocks; async code uses [`shutdown_async`](Self::shutdown_async).
    ///
    /// # Errors
    /// The error that ended the engine, if it failed.
    pub fn shutdown(self, grace: Duration) -> Result<(), EngineError> {
        self.drain(grace);
        self.inner.thread.join();
        self.outcome()
    }

    /// [`shutdown`](Self::shutdown) without blocking the executor. It begins with the call; the future only waits, and
    /// dropping it changes nothing.
    ///
    /// # Errors
    /// The error that ended the engine, if it failed.
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
