//! State of an engine that callers share with its loop, and the methods that need only this state.

use std::sync::Arc;

use super::clock::Clock;
use super::config::EngineConfig;
use super::info::{EngineInfo, Health};
use super::metrics::{Counters, Stats};
use super::request::admission::{Admission, Lifecycle};
use crate::device::{Device, PeakRates, Telemetry};

/// Shared by the loop and every clone of the engine.
#[derive(Debug)]
pub(crate) struct Shared {
    pub config: EngineConfig,
    pub info: EngineInfo,
    pub admission: Admission,
    pub counters: Arc<Counters>,
    pub clock: Arc<dyn Clock>,
    /// The model's device, where a builder made the engine.
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

/// The calls that an [`Engine`](super::Engine) and an [`EngineCore`](super::EngineCore) have in common, written once; the
/// type has a method `shared`.
macro_rules! caller_methods {
    () => {
        /// Checks a request, queues it and returns at once, without waiting for the device. A text or chat prompt is
        /// encoded on the caller's thread.
        ///
        /// # Errors
        /// [`SubmitError`] names the field that is out of range, or reports a full queue or an engine that is shut
        /// down.
        pub fn submit(&self, request: Request) -> Result<RequestHandle, SubmitError> {
            self.shared().admission.submit(request)
        }

        /// Encodes a text. `add_special` adds the tokens that the tokenizer puts around a prompt (BOS, for example).
        ///
        /// # Errors
        /// [`SubmitError::Param`] without a vocabulary, [`SubmitError::Encode`] if the vocabulary refuses the text.
        pub fn tokenize(&self, text: &str, add_special: bool) -> Result<Vec<u32>, SubmitError> {
            self.shared().admission.encoder().tokenize(text, add_special)
        }

        /// Decodes token ids. `skip_special` omits control tokens. Bytes that are not UTF-8 become U+FFFD.
        ///
        /// # Errors
        /// [`SubmitError::Param`] without a vocabulary.
        pub fn detokenize(&self, ids: &[u32], skip_special: bool) -> Result<String, SubmitError> {
            self.shared().admission.encoder().detokenize(ids, skip_special)
        }

        /// Tokens of a prompt as the model would see it: text with its special tokens, a conversation as rendered.
        ///
        /// # Errors
        /// [`SubmitError`] if the prompt cannot be encoded.
        pub fn count_tokens(&self, prompt: impl Into<Prompt>) -> Result<usize, SubmitError> {
            Ok(self.shared().admission.encoder().encode(&prompt.into())?.len())
        }

        /// Renders a conversation with the chat template.
        ///
        /// # Errors
        /// [`SubmitError::Param`] without a chat template, [`SubmitError::Render`] if the template refuses the
        /// conversation.
        pub fn render_chat(&self, chat: impl Into<ChatPrompt>) -> Result<String, SubmitError> {
            self.shared().admission.encoder().render(&chat.into())
        }

        /// A snapshot of the counters.
        pub fn stats(&self) -> Stats {
            self.shared().stats()
        }

        /// Peak rates of the device, if known; with [`Stats::utilization`] they show how well it is used.
        ///
        /// The first call may measure for some tens of milliseconds, and should be made while the engine is idle; see
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

        /// Energy that the device has used since the first call, in microjoules, if it has a readable meter.
        ///
        /// The difference of two calls, with the tokens of the same interval in [`stats`](Self::stats), gives joules
        /// per token. See [`Telemetry::energy_uj`](crate::device::Telemetry::energy_uj).
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
        ///     println!("{:.3} J a token", (after_uj - before_uj) as f64 / 1e6 / tokens as f64);
        /// }
        /// # Ok(())
        /// # }
        /// ```
        pub fn energy_uj(&self) -> Option<u64> {
            self.shared().energy_uj()
        }

        /// Notes of the device, such as why a fallback is in use; see
        /// [`Telemetry::notes`](crate::device::Telemetry::notes).
        pub fn device_notes(&self) -> Vec<String> {
            self.shared().device_notes()
        }

        /// Whether the engine runs and takes requests.
        pub fn health(&self) -> Health {
            self.shared().health()
        }

        /// The model, the device and the sizes in force.
        pub fn info(&self) -> &EngineInfo {
            &self.shared().info
        }

        /// The configuration in force: every field that may be left open is set.
        pub fn config(&self) -> &EngineConfig {
            &self.shared().config
        }
    };
}

pub(crate) use caller_methods;
