//! The handle people hold, and the loop.
//!
//! [`Engine`] is what most programs want: it lives on a thread of its own, may be cloned and shared, and takes
//! [`Request`]s from anywhere. [`EngineCore`] is the same engine without the thread, for hosts that want to drive every
//! step; below it, hosts with a loop of their own use [`ModelExecutor`](crate::runner::ModelExecutor) and [`Sampler`](crate::sampler::Sampler) directly.
//!
//! The life of a request: `submit` checks it on the caller's thread and queues it ([`SubmitError`] says why not); each
//! step schedules rows, runs the model, samples, and merges what came into the [`RequestHandle`]; the last [`Delta`] of a
//! choice says why it ended. Dropping the handle takes the request out before the next step.
//!
//! A request without a seed gets one drawn from the engine's seed and its place in the order of submission: runs that
//! submit in the same order repeat, and two equal requests in one engine still differ.

#![forbid(unsafe_code)]

mod build;
mod clock;
mod config;
mod core;
mod error;
mod info;
mod metrics;
mod request;
mod step;
mod thread;

use crate::sampler::ParamError;
use std::sync::Arc;
use std::time::Duration;

pub use build::EngineBuilder;
pub use clock::{Clock, ManualClock, SystemClock};
pub use config::{CacheBudget, EngineConfig};
pub use core::EngineCore;
pub use error::{BuildError, EngineError, GenerateError, RequestError, SubmitError};
pub use info::{BucketInfo, EngineInfo, Health, LoadProgress, ModelLimits, StepReport};
pub use metrics::utilization::Utilization;
pub use metrics::{Stats, TimeHistogram};
pub use request::handle::RequestHandle;
pub use request::output::{Choice, Delta, FinishReason, Logprobs, LogprobsAt, Output, PromptInfo, StopMatch, Usage};
pub use request::{Prompt, Request, RequestId};
pub use step::stop::{StopChecker, default_stop_ids};

use crate::device::{Device, PeakRates};
use crate::sampler::SamplingParams;
use crate::scheduler::Tick;
use crate::text::ChatMessage;
use clock::micros;
use metrics::Counters;
use request::admission::{Admission, Lifecycle};
use thread::EngineThread;

/// How long dropping the last clone waits for the step that runs. A longer step (a device that hangs) is left to its
/// thread, so that a drop never blocks for good.
const DROP_WAIT: Duration = Duration::from_secs(1);

/// An engine on a thread of its own; clones are the same engine.
///
/// Dropping the last clone stops it after the step that runs: open handles end with [`RequestError::Closed`].
/// [`shutdown`](Self::shutdown) lets requests finish first.
#[derive(Clone, Debug)]
pub struct Engine {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    config: Arc<EngineConfig>,
    info: Arc<EngineInfo>,
    admission: Arc<Admission>,
    counters: Arc<Counters>,
    clock: Arc<dyn Clock>,
    device: Option<Arc<dyn Device>>,
    thread: EngineThread,
}

impl Engine {
    /// Moves a core to a thread of its own.
    pub fn spawn(core: EngineCore) -> Result<Self, BuildError> {
        let (config, info, admission, counters, clock, device) = (
            Arc::clone(core.shared_config()),
            Arc::clone(core.shared_info()),
            Arc::clone(core.admission()),
            Arc::clone(core.counters()),
            Arc::clone(core.clock()),
            core.device().cloned(),
        );
        let worker = EngineThread::spawn(core).map_err(BuildError::Thread)?;
        Ok(Self { inner: Arc::new(Inner { config, info, admission, counters, clock, device, thread: worker }) })
    }

    /// Checks a request, queues it and returns at once; never waits for the device. A text or chat prompt is encoded on
    /// the caller's thread.
    pub fn submit(&self, request: Request) -> Result<RequestHandle, SubmitError> {
        self.inner.admission.submit(request)
    }

    /// Continues a text and waits for all of it. For one answer: `n` must be 1.
    pub fn generate(&self, prompt: impl Into<Prompt>, params: &SamplingParams) -> Result<String, GenerateError> {
        if params.n != 1 {
            let expected = "1: submit the request to get several answers".to_owned();
            return Err(SubmitError::Param(ParamError::new("n", params.n, expected)).into());
        }
        let output = self.submit(Request::new(prompt).sampling(params.clone()))?.collect_output()?;
        Ok(output.choices.into_iter().next().map(|choice| choice.text).unwrap_or_default())
    }

    /// Answers the last message of a conversation and waits for all of it. For one answer: `n` must be 1.
    pub fn chat(&self, messages: &[ChatMessage], params: &SamplingParams) -> Result<String, GenerateError> {
        self.generate(Prompt::Chat(messages.to_vec()), params)
    }

    /// The counters as they stand.
    pub fn stats(&self) -> Stats {
        self.inner.counters.snapshot(self.inner.admission.queued())
    }

    /// What the device can do at most, where that is known; with the [`Utilization`] in [`stats`](Self::stats) it says how well the
    /// device is used. See [`Device::peak_rates`]: the first call may measure for some tens of milliseconds, and is best made while
    /// nothing runs.
    ///
    /// ```
    /// # use ascend_llm::engine::Engine;
    /// # use ascend_llm::sampler::SamplingParams;
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let engine = Engine::builder("examples/models/fable-f16.gguf").build()?;
    /// let peaks = engine.peak_rates().ok_or("a CPU measures its peaks")?;
    /// engine.generate("Once upon a time", &SamplingParams::greedy())?;
    /// let recent = engine.stats().utilization;
    /// if let (Some(mfu), Some(mbu)) = (recent.mfu(&peaks), recent.mbu(&peaks)) {
    ///     println!("last {} steps: MFU {:.1} %, MBU {:.1} %", recent.steps, 100.0 * mfu, 100.0 * mbu);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn peak_rates(&self) -> Option<PeakRates> {
        self.inner.device.as_ref()?.peak_rates()
    }

    /// Energy the device has used since it was first asked, in microjoules, where it has a meter that may be read; see
    /// [`Device::energy_uj`]. With the tokens of the same time in [`stats`](Self::stats) it gives joules a token.
    ///
    /// ```
    /// # use ascend_llm::engine::Engine;
    /// # use ascend_llm::sampler::SamplingParams;
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let engine = Engine::builder("examples/models/fable-f16.gguf").build()?;
    /// let (before_uj, before) = (engine.energy_uj(), engine.stats());
    /// engine.generate("Once upon a time", &SamplingParams::greedy())?;
    /// if let (Some(before_uj), Some(after_uj)) = (before_uj, engine.energy_uj()) {
    ///     let tokens = engine.stats().generated_tokens - before.generated_tokens;
    ///     println!("{:.3} J a token", (after_uj - before_uj) as f64 / 1e6 / tokens as f64);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn energy_uj(&self) -> Option<u64> {
        self.inner.device.as_ref()?.energy_uj()
    }

    /// What the device says of itself now, such as why something runs in another way than it could; see [`Device::notes`].
    pub fn device_notes(&self) -> Vec<String> {
        self.inner.device.as_ref().map(|device| device.notes()).unwrap_or_default()
    }

    /// Whether the engine lives and takes requests.
    pub fn health(&self) -> Health {
        core::health(&self.inner.admission)
    }

    /// What the engine runs, and on what.
    pub fn info(&self) -> &EngineInfo {
        &self.inner.info
    }

    /// The configuration, with everything settled that may be left open.
    pub fn config(&self) -> &EngineConfig {
        &self.inner.config
    }

    /// Takes no more requests, lets those here finish for no longer than `grace` by the engine's clock, ends the others
    /// with [`RequestError::Closed`], and waits for the thread. Other clones then refuse requests. The error is the one
    /// that ended the engine, if it failed.
    pub fn shutdown(self, grace: Duration) -> Result<(), EngineError> {
        let until = self.inner.clock.now().0.saturating_add(micros(grace));
        self.inner.admission.advance(Lifecycle::Draining(Some(Tick(until))));
        self.inner.thread.join(None);
        match self.inner.admission.lifecycle() {
            Lifecycle::Ended(Some(error)) => Err(error),
            _ => Ok(()),
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.admission.advance(Lifecycle::Stopping);
        self.thread.join(Some(DROP_WAIT));
    }
}
