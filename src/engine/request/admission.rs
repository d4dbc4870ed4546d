//! Admission: checks requests on the caller's thread and queues them for the loop.
//!
//! The loop and all clones of the engine share one [`Admission`]; each handle shares its doorbell. The admission owns
//! the inbox (the engine's lifecycle and the requests that the loop has not fetched yet) and the number of requests that
//! wait for their first step. It never accesses the device, the scheduler or a running request.

use crate::sampler::ParamError;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::sampler::{ParamLimits, SamplingParams};
use crate::scheduler::{SchedulePolicy, Tick};

use super::doorbell::Doorbell;
use super::encoding::PromptEncoder;
use super::handle::RequestHandle;
use super::mailbox::Mailbox;
use super::{Request, RequestId};
use crate::engine::clock::{Clock, micros};
use crate::engine::error::{EngineError, SubmitError};

/// Maximum length of an invalid value in an error message, in characters.
const QUOTED_CHARS: usize = 40;

/// Request that has passed all checks and waits for the loop to fetch it.
#[derive(Debug)]
pub(crate) struct AdmittedRequest {
    pub id: RequestId,
    pub mailbox: Arc<Mailbox>,
    pub prompt: Arc<[u32]>,
    pub params: SamplingParams,
    /// Maximum number of tokens per choice: the requested number, limited by the model's maximum length.
    pub max_tokens: u32,
    /// `bad_words` as token sequences.
    pub bad_words: Vec<Vec<u32>>,
    pub seed: u64,
    pub priority: i32,
    pub salt: Box<[u8]>,
    pub arrived: Tick,
    pub deadline: Option<Tick>,
}

/// Stage of the engine's lifecycle.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Lifecycle {
    Open,
    /// The engine rejects new requests; accepted ones continue, at most until the tick.
    Draining(Option<Tick>),
    /// The engine stops before its next step.
    Stopping,
    /// The loop has ended; `Some` if it failed.
    Ended(Option<EngineError>),
}

/// Limits that requests are checked against.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AdmissionLimits {
    pub params: ParamLimits,
    pub block_size: u32,
    pub pool_blocks: u32,
    pub max_queue: u32,
    pub policy: SchedulePolicy,
    pub seed: u64,
}

#[derive(Debug)]
pub(crate) struct Admission {
    limits: AdmissionLimits,
    encoder: PromptEncoder,
    clock: Arc<dyn Clock>,
    inbox: Mutex<Inbox>,
    doorbell: Arc<Doorbell>,
    /// Number of requests that wait for their first step.
    queued: AtomicU32,
    next_id: AtomicU64,
}

#[derive(Debug)]
struct Inbox {
    lifecycle: Lifecycle,
    admitted: Vec<AdmittedRequest>,
}

impl Admission {
    pub fn new(limits: AdmissionLimits, encoder: PromptEncoder, clock: Arc<dyn Clock>) -> Self {
        Self {
            limits,
            encoder,
            clock,
            inbox: Mutex::new(Inbox { lifecycle: Lifecycle::Open, admitted: Vec::new() }),
            doorbell: Arc::default(),
            queued: AtomicU32::new(0),
            next_id: AtomicU64::new(0),
        }
    }

    /// Returns the encoder, which holds the vocabulary and the chat template.
    pub fn encoder(&self) -> &PromptEncoder {
        &self.encoder
    }

    /// Returns the doorbell that wakes the loop.
    pub fn doorbell(&self) -> &Arc<Doorbell> {
        &self.doorbell
    }

    /// Checks a request and queues it for the loop.
    ///
    /// # Errors
    /// [`SubmitError`] with the reason of the rejection.
    pub fn submit(&self, request: Request) -> Result<RequestHandle, SubmitError> {
        if let Some(refusal) = rejection_for(&self.inbox.lock().lifecycle) {
            return Err(refusal.into_error(request));
        }
        let place = |queued: u32| (queued < self.limits.max_queue).then_some(queued + 1);
        if self.queued.fetch_update(Ordering::AcqRel, Ordering::Acquire, place).is_err() {
            return Err(SubmitError::QueueFull(Box::new(request)));
        }
        let checked = self.check(&request).inspect_err(|_| self.leave_queue())?;

        let mut inbox = self.inbox.lock();
        if let Some(refusal) = rejection_for(&inbox.lifecycle) {
            drop(inbox);
            self.leave_queue();
            return Err(refusal.into_error(request));
        }
        // The lock is held here, so that the order of ids, of seeds and of `admitted` is the same.
        let ordinal = self.next_id.fetch_add(1, Ordering::Relaxed);
        let id = RequestId(ordinal);
        let choices = request.sampling.n;
        let mailbox = Arc::new(Mailbox::new(choices as usize, request.sampling.logprobs.is_some()));
        let arrived = self.clock.now();
        let handle = RequestHandle::new(
            id,
            Arc::clone(&checked.prompt),
            choices,
            Arc::clone(&mailbox),
            Arc::clone(&self.doorbell),
        );
        inbox.admitted.push(AdmittedRequest {
            id,
            mailbox,
            prompt: checked.prompt,
            max_tokens: checked.max_tokens,
            bad_words: checked.bad_words,
            seed: request.sampling.seed.unwrap_or_else(|| derived_seed(self.limits.seed, ordinal)),
            params: request.sampling,
            priority: request.priority,
            salt: request.cache_salt,
            arrived,
            deadline: request.deadline.map(|after| Tick(arrived.0.saturating_add(micros(after)))),
        });
        drop(inbox);
        self.doorbell.notify();
        Ok(handle)
    }

    /// Moves the requests that the loop has not fetched yet to `into`, in the order of their submission.
    pub fn take_admitted(&self, into: &mut Vec<AdmittedRequest>) {
        into.append(&mut self.inbox.lock().admitted);
    }

    /// Decrements the number of requests that wait for their first step.
    pub fn leave_queue(&self) {
        self.queued.fetch_sub(1, Ordering::AcqRel);
    }

    pub fn queued(&self) -> u32 {
        self.queued.load(Ordering::Acquire)
    }

    pub fn is_full(&self) -> bool {
        self.queued() >= self.limits.max_queue
    }

    pub fn lifecycle(&self) -> Lifecycle {
        self.inbox.lock().lifecycle.clone()
    }

    /// Advances to a later stage of the lifecycle; a request for an earlier stage is ignored.
    pub fn advance(&self, to: Lifecycle) {
        let mut inbox = self.inbox.lock();
        if lifecycle_rank(&to) >= lifecycle_rank(&inbox.lifecycle) && !matches!(inbox.lifecycle, Lifecycle::Ended(_)) {
            inbox.lifecycle = to;
        }
        drop(inbox);
        self.doorbell.notify();
    }

    fn check(&self, request: &Request) -> Result<CheckedRequest, SubmitError> {
        let params = &request.sampling;
        let limits = &self.limits;
        params.validate(&limits.params)?;
        if request.priority != 0 && limits.policy != SchedulePolicy::Priority {
            let expected = "0, because the engine's policy is first come, first served".to_owned();
            return Err(ParamError::new("priority", request.priority, expected).into());
        }
        let prompt = self.encoder.encode(&request.prompt)?;
        let prompt_tokens = self.check_prompt(&prompt, params)?;
        let space = limits.params.max_model_len - prompt_tokens;
        Ok(CheckedRequest {
            max_tokens: params.max_tokens.map_or(space, |asked| asked.min(space)),
            bad_words: self.bad_words(&params.bad_words)?,
            prompt,
        })
    }

    /// Checks a prompt and returns its length.
    fn check_prompt(&self, prompt: &[u32], params: &SamplingParams) -> Result<u32, SubmitError> {
        let limits = &self.limits;
        let vocab_size = limits.params.vocab_size;
        if prompt.is_empty() {
            return Err(ParamError::new("prompt", "no tokens", "at least one token".to_owned()).into());
        }
        if let Some(id) = prompt.iter().find(|&&id| id >= vocab_size) {
            let expected = format!("ids below {vocab_size}, the size of the model's vocabulary");
            return Err(ParamError::new("prompt", id, expected).into());
        }
        let limit_tokens = limits.params.max_model_len - 1;
        let prompt_tokens = match u32::try_from(prompt.len()) {
            Ok(tokens) if tokens <= limit_tokens => tokens,
            _ => return Err(SubmitError::TooLong { prompt_tokens: prompt.len(), limit_tokens }),
        };
        let space = limits.params.max_model_len - prompt_tokens;
        if params.min_tokens > space {
            let expected =
                format!("at most {space}, the number of tokens that fit after a prompt of {prompt_tokens} tokens");
            return Err(ParamError::new("min_tokens", params.min_tokens, expected).into());
        }
        let needed_blocks = prompt_tokens.div_ceil(limits.block_size);
        if needed_blocks > limits.pool_blocks {
            let (block_size, pool_blocks) = (limits.block_size, limits.pool_blocks);
            return Err(SubmitError::NeverFits { prompt_tokens, needed_blocks, pool_blocks, block_size });
        }
        Ok(prompt_tokens)
    }

    /// Encodes each bad word as it appears at the start of a text and after a space.
    ///
    /// The second form is omitted if the vocabulary cannot encode it.
    fn bad_words(&self, words: &[String]) -> Result<Vec<Vec<u32>>, SubmitError> {
        let Some(vocabulary) = self.encoder.vocabulary() else { return Ok(Vec::new()) };
        let mut sequences = Vec::new();
        for word in words {
            let bare = vocabulary.encode(word, false).map_err(|reason| SubmitError::Encode { reason })?;
            if bare.is_empty() {
                let quoted = word.chars().take(QUOTED_CHARS).collect::<String>();
                return Err(ParamError::new("bad_words", quoted, "texts of at least one token".to_owned()).into());
            }
            let after_space = vocabulary.encode(&format!(" {}", word.trim_start()), false).unwrap_or_default();
            for ids in [bare, after_space] {
                if !ids.is_empty() && !sequences.contains(&ids) {
                    sequences.push(ids);
                }
            }
        }
        Ok(sequences)
    }
}

struct CheckedRequest {
    prompt: Arc<[u32]>,
    max_tokens: u32,
    bad_words: Vec<Vec<u32>>,
}

enum Rejection {
    Closed,
    Failed(EngineError),
}

impl Rejection {
    fn into_error(self, request: Request) -> SubmitError {
        let request = Box::new(request);
        match self {
            Self::Closed => SubmitError::Closed(request),
            Self::Failed(cause) => SubmitError::Failed { request, cause },
        }
    }
}

fn rejection_for(stage: &Lifecycle) -> Option<Rejection> {
    match stage {
        Lifecycle::Open => None,
        Lifecycle::Draining(_) | Lifecycle::Stopping | Lifecycle::Ended(None) => Some(Rejection::Closed),
        Lifecycle::Ended(Some(error)) => Some(Rejection::Failed(error.clone())),
    }
}

fn lifecycle_rank(stage: &Lifecycle) -> u8 {
    match stage {
        Lifecycle::Open => 0,
        Lifecycle::Draining(_) => 1,
        Lifecycle::Stopping => 2,
        Lifecycle::Ended(_) => 3,
    }
}

/// Derives the seed of the engine's `ordinal`-th request.
///
/// For a given engine seed, the function is a bijection of the ordinal (the output function of splitmix64). No two
/// requests of an engine have the same seed, and runs are reproducible.
fn derived_seed(engine_seed: u64, ordinal: u64) -> u64 {
    let mut bits = engine_seed.wrapping_add((ordinal.wrapping_add(1)).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

#[cfg(test)]
mod tests {
    use super::derived_seed;

    #[test]
    fn derived_seeds_differ_within_an_engine_and_repeat_across_runs() {
        let seeds: std::collections::HashSet<u64> = (0..10_000).map(|ordinal| derived_seed(7, ordinal)).collect();
        assert_eq!(seeds.len(), 10_000);
        assert_eq!(derived_seed(7, 3), derived_seed(7, 3));
        assert_ne!(derived_seed(7, 3), derived_seed(8, 3));
    }
}
