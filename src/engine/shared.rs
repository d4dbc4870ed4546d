//! State that callers share with the engine's loop, and the methods that need no other state.

use std::sync::Arc;

use super::clock::Clock;
use super::config::EngineConfig;
use super::info::{EngineInfo, Health};
use super::metrics::{Counters, Stats};
use super::request::admission::{Admission, Lifecycle};
use crate::device::{Device, PeakRates, Telemetry};

/// State shared by the loop and all clones of the engine.
#[derive(Debug)]
pub(crate) struct Shared {
    pub config: EngineConfig,
    pub info: EngineInfo,
    pub admission: Admission,
    pub counters: Arc<Counters>,
    pub clock: Arc<dyn Clock>,
    /// Device of the model, if a builder built the engine.
    pub device: Option<Arc<dyn Device>>,
}

impl Shared {
    pub fn stats(&self) -> Stats {
        self.counters.snapshot(self.admission.queued())
    }

    pub fn health(&self) -> Health {
        match self.admission.lifecycle() {
            Lifecycle::Open if !self.admission.is_full() => Health::Ready,
            Lifecycle::Open | Lifecycle::Draining(_) | Lifecycle::Stopping => Health::NotAccepting,
            Lifecycle::Ended(None) => Health::Stopped,
            Lifecycle::Ended(Some(_)) => Health::Failed,
        }
    }

    pub fn peak_rates(&self) -> Option<PeakRates> {
        self.telemetry()?.peak_rates()
    }

    pub fn energy_uj(&self) -> Option<u64> {
        self.telemetry()?.energy_uj()
    }

    pub fn device_notes(&self) -> Vec<String> {
        self.telemetry().map(Telemetry::notes).unwrap_or_default()
    }

    fn telemetry(&self) -> Option<&dyn Telemetry> {
        self.device.as_ref()?.telemetry()
    }
}

/// Methods that [`Engine`](super::Engine) and [`EngineCore`](super::EngineCore) have in common. The type must have a
/// method `shared`.
macro_rules! caller_methods {
    () => {
        /// Checks a request, queues it and returns at once, without waiting for the device.
        ///
        /// The caller's thread encodes a text or chat prompt.
        ///
        /// # Errors
        /// [`SubmitError`] if a field is out of range, the prompt is too long or cannot be encoded, the queue is full,
        /// or the engine is shut down or has failed.
        pub fn submit(&self, request: Request) -> Result<RequestHandle, SubmitError> {
            self.shared().admission.submit(request)
        }

        /// Returns the token ids of a text.
        ///
        /// `add_special` adds the special tokens that the tokenizer puts around a prompt (BOS, for example).
        ///
        /// # Errors
        /// [`SubmitError::Param`] if the engine has no vocabulary; [`SubmitError::Encode`] if the vocabulary rejects
        /// the text.
        pub fn tokenize(&self, text: &str, add_special: bool) -> Result<Vec<u32>, SubmitError> {
            self.shared().admission.encoder().tokenize(text, add_special)
        }

        /// Returns the text of token ids.
        ///
        /// `skip_special` omits control tokens. Bytes that do not form a character become U+FFFD.
        ///
        /// # Errors
        /// [`SubmitError::Param`] if the engine has no vocabulary.
        pub fn detokenize(&self, ids: &[u32], skip_special: bool) -> Result<String, SubmitError> {
            self.shared().admission.encoder().detokenize(ids, skip_special)
        }

        /// Returns the number of tokens of a prompt as the model receives it.
        ///
        /// A text counts with its special tokens, a conversation as rendered by the chat template.
        ///
        /// # Errors
        /// [`SubmitError`] if the prompt cannot be encoded.
        pub fn count_tokens(&self, prompt: impl Into<Prompt>) -> Result<usize, SubmitError> {
            Ok(self.shared().admission.encoder().encode(&prompt.into())?.len())
        }

        /// Renders a conversation to text with the chat template.
        ///
        /// # Errors
        /// [`SubmitError::Param`] if the engine has no chat template; [`SubmitError::Render`] if the template rejects
        /// the conversation.
        pub fn render_chat(&self, chat: impl Into<ChatPrompt>) -> Result<String, SubmitError> {
            self.shared().admission.encoder().render(&chat.into())
        }

        /// Returns a snapshot of the counters.
        pub fn stats(&self) -> Stats {
            self.shared().stats()
        }

        /// Returns the device's peak rates, if they are known.
        ///
        /// [`Stats::utilization`] computes from them how well the device is used.
        ///
        /// The first call may measure for some tens of milliseconds; call it while no request is running. See
        /// [`Telemetry::peak_rates`](crate::device::Telemetry::peak_rates).
        ///
        /// ```
        /// # use ascend_llm::{Engine, SamplingParams};
        /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
        /// # if cfg!(not(feature = "text")) { return Ok(()); }
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
            self.shared().peak_rates()
        }

        /// Returns the energy used since the first call, in microjoules, if the device has a readable meter.
        ///
        /// Only differences between two calls are meaningful. Divided by the tokens that [`stats`](Self::stats) counted
        /// in the same time, they are the joules per token. See
        /// [`Telemetry::energy_uj`](crate::device::Telemetry::energy_uj).
        ///
        /// ```
        /// # use ascend_llm::{Engine, SamplingParams};
        /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
        /// # if cfg!(not(feature = "text")) { return Ok(()); }
        /// let engine = Engine::builder("examples/models/fable-f16.gguf").build()?;
        /// let (before_uj, before) = (engine.energy_uj(), engine.stats());
        /// engine.generate("Once upon a time", &SamplingParams::greedy())?;
        /// if let (Some(before_uj), Some(after_uj)) = (before_uj, engine.energy_uj()) {
        ///     let tokens = engine.stats().generated_tokens - before.generated_tokens;
        ///     println!("{:.3} J per token", (after_uj - before_uj) as f64 / 1e6 / tokens as f64);
        /// }
        /// # Ok(())
        /// # }
        /// ```
        pub fn energy_uj(&self) -> Option<u64> {
            self.shared().energy_uj()
        }

        /// Returns the device's current notes, for example why a fallback is in use.
        ///
        /// See [`Telemetry::notes`](crate::device::Telemetry::notes).
        pub fn device_notes(&self) -> Vec<String> {
            self.shared().device_notes()
        }

        /// Returns whether the engine runs and accepts requests.
        pub fn health(&self) -> Health {
            self.shared().health()
        }

        /// Returns the description of the model, the device and the sizes in force.
        pub fn info(&self) -> &EngineInfo {
            &self.shared().info
        }

        /// Returns the configuration in force: every optional field that the engine resolves is set.
        pub fn config(&self) -> &EngineConfig {
            &self.shared().config
        }
    };
}

pub(crate) use caller_methods;
