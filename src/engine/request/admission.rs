//! Admission: checks requests on the caller's thread and queues them for the engine loop.
//!
//! The loop, each `Engine` clone and each handle share one [`Admission`]. It owns the inbox (the lifecycle, and the
//! requests that the loop has not fetched yet) and the number of queued requests. It never touches the device, the
//! scheduler or a running request.

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

/// Length limit of a refused value in an error message, in characters.
const QUOTED_CHARS: usize = 40;

/// Request that has passed every check and is queued for the loop.
#[derive(Debug)]
pub(crate) struct AdmittedRequest {
    pub id: RequestId,
    pub mailbox: Arc<Mailbox>,
    pub prompt: Arc<[u32]>,
    pub params: SamplingParams,
    /// Maximum number of tokens of a choice: the requested limit, at most the rest of the model's context.
    pub max_tokens: u32,
    /// `bad_words` as token sequences.
    pub bad_words: Vec<Vec<u32>>,
    pub seed: u64,
    pub priority: i32,
    pub salt: Box<[u8]>,
    pub arrived: Tick,
    pub deadline: Option<Tick>,
}

/// Lifecycle of the engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Lifecycle {
    Open,
    /// Accepts no new requests; the admitted ones run on, at the latest until the given time.
    Draining(Option<Tick>),
    /// Stops before the next step.
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
    /// Number of requests that have not started their first step.
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

    /// The vocabulary and the chat template.
    pub fn encoder(&self) -> &PromptEncoder {
        &self.encoder
    }

    /// The doorbell that wakes the loop.
    pub fn doorbell(&self) -> &Arc<Doorbell> {
        &self.doorbell
    }

    /// Checks a request and puts it into the inbox.
    pub fn submit(&self, request: Request) -> Result<RequestHandle, SubmitError> {
        if let Some(refusal) = rejection_for(&self.inbox.lock().lifecycle) {
            return Err(refusal.into_error(request));
        }
        let place = |queued: u32| (queued < self.limits.max_queue).then_some(queued + 1);
        if self.queued.fetch_update(Ordering::AcqRel, Ordering::Acquire, place).is_err() {
            return Err(SubmitError::QueueFull(Box::new(request)));
        }
        let checked = self.check(&request).inspect_err(|_| self.leave_queue())?;

        let mut gate = self.inbox.lock();
        if let Some(refusal) = rejection_for(&gate.lifecycle) {
            drop(gate);
            self.leave_queue();
            return Err(refusal.into_error(request));
        }
        // Under the lock of the inbox, so that ids, seeds and the order of admission agree.
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
        gate.admitted.push(AdmittedRequest {
            id,
            mailbox,
            prompt: checked.prompt,
            max_tokens: checked.max_tokens,
            bad_words: checked.bad_words,
            seed: request.sampling.seed.unwrap_or_else(|| drawn_seed(self.limits.seed, ordinal)),
            params: request.sampling,
            priority: request.priority,
            salt: request.cache_salt,
            arrived,
            deadline: request.deadline.map(|after| Tick(arrived.0.saturating_add(micros(after)))),
        });
        drop(gate);
        self.doorbell.notify();
        Ok(handle)
    }

    /// Moves the new requests to `into`, in order of arrival.
    pub fn take_admitted(&self, into: &mut Vec<AdmittedRequest>) {
        into.append(&mut self.inbox.lock().admitted);
    }

    /// Removes one request from the count of queued requests.
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

    /// Advances to a later stage of the lifecycle; ignores an earlier one.
    pub fn advance(&self, to: Lifecycle) {
        let mut gate = self.inbox.lock();
        if lifecycle_rank(&to) >= lifecycle_rank(&gate.lifecycle) && !matches!(gate.lifecycle, Lifecycle::Ended(_)) {
            gate.lifecycle = to;
        }
        drop(gate);
        self.doorbell.notify();
    }

    fn check(&self, request: &Request) -> Result<CheckedRequest, SubmitError> {
        let params = &request.sampling;
        let limits = &self.limits;
        params.validate(&limits.params)?;
        if request.priority != 0 && limits.policy != SchedulePolicy::Priority {
            let expected = "0: the engine's policy is first come, first served".to_owned();
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

    /// Length of the prompt.
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
            let expected = format!("at most {space}, the room behind a prompt of {prompt_tokens} tokens");
            return Err(ParamError::new("min_tokens", params.min_tokens, expected).into());
        }
        let needed_blocks = prompt_tokens.div_ceil(limits.block_size);
        if needed_blocks > limits.pool_blocks {
            let (block_size, pool_blocks) = (limits.block_size, limits.pool_blocks);
            return Err(SubmitError::NeverFits { prompt_tokens, needed_blocks, pool_blocks, block_size });
        }
        Ok(prompt_tokens)
    }

    /// Token forms of each bad word: as at the start of a text and, if the vocabulary can write it, after a space.
    fn bad_words(&self, words: &[String]) -> Result<Vec<Vec<u32>>, SubmitError> {
        let Some(vocabulary) = self.encoder.vocabulary() else { return Ok(Vec::new()) };
        let mut sequences = Vec::new();
        for word in words {
            let bare = vocabulary.encode(word, false).map_err(|reason| SubmitError::Encode { reason })?;
            if bare.is_empty() {
                let quoted = word.chars().take(QUOTED_CHARS).collect::<String>();
                return Err(ParamError::new("bad_words", quoted, "texts of at least one token".to_owned()).into());
            }
            let behind_blank = vocabulary.encode(&format!(" {}", word.trim_start()), false).unwrap_or_default();
            for ids in [bare, behind_blank] {
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

/// The seed of the engine's `ordinal`-th request: a bijection of the ordinal under a given engine seed (splitmix64's
/// output function), so that no two requests of an engine share a seed and a run can be repeated.
fn drawn_seed(engine_seed: u64, ordinal: u64) -> u64 {
    let mut bits = engine_seed.wrapping_add((ordinal.wrapping_add(1)).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

#[cfg(test)]
mod tests {
    use super::drawn_seed;

    #[test]
    fn drawn_seeds_differ_within_an_engine_and_repeat_across_runs() {
        let seeds: std::collections::HashSet<u64> = (0..10_000).map(|ordinal| drawn_seed(7, ordinal)).collect();
        assert_eq!(seeds.len(), 10_000);
        assert_eq!(drawn_seed(7, 3), drawn_seed(7, 3));
        assert_ne!(drawn_seed(7, 3), drawn_seed(8, 3));
    }
}
