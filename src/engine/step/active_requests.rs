//! Active requests: the state of each request and its choices, and the publication of results to its mailbox.
//!
//! A request is active from the moment when the loop takes it from the inbox until its last choice has ended. Each
//! choice is one sequence of the scheduler. The id of a sequence encodes the request and the choice, so that one lookup
//! finds both.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::device::CustomFailure;
use crate::graph::RowStatus;
use crate::kv_cache::SeqId;
use crate::num::to_u32;
use crate::sampler::{MAX_N, Sampled, SamplingParams, TokenLogprob, is_argmax_only};
use crate::scheduler::{NewSequence, Tick};
use crate::text::Vocabulary;

use super::choice::{ChoiceState, Phase, StopRules};
use crate::engine::clock::elapsed_us;
use crate::engine::error::RequestError;
use crate::engine::metrics::{Counters, Ending};
use crate::engine::request::RequestId;
use crate::engine::request::admission::AdmittedRequest;
use crate::engine::request::mailbox::{Mailbox, Update};
use crate::engine::request::output::{FinishReason, PromptInfo, Usage};
use crate::runner::{RowOutcome, SequenceOutcome};

/// Returns the id of the sequence of a choice.
fn seq_of(request: RequestId, choice: u32) -> SeqId {
    SeqId(request.0 * u64::from(MAX_N) + u64::from(choice))
}

/// Returns the request of a sequence, and the index of its choice.
pub(crate) fn request_of(seq: SeqId) -> (RequestId, usize) {
    let choices = u64::from(MAX_N);
    (RequestId(seq.0 / choices), usize::try_from(seq.0 % choices).unwrap_or(usize::MAX))
}

#[derive(Debug)]
pub(crate) struct ActiveRequest {
    pub mailbox: Arc<Mailbox>,
    pub params: SamplingParams,
    pub prompt_tokens: u32,
    pub max_tokens: u32,
    pub bad_words: Vec<Vec<u32>>,
    pub seed: u64,
    /// Whether every token is the argmax of its row; such a request needs no logits.
    pub is_argmax_only: bool,
    pub arrived: Tick,
    pub deadline: Option<Tick>,
    /// Time at which the request's first step was planned; `None` before that.
    started: Option<Tick>,
    /// Time at which the first token of choice 0 was sampled.
    first_token: Option<Tick>,
    /// Number of prompt tokens from the prefix cache.
    cached_tokens: u32,
    /// Number of published tokens of all choices.
    generated_tokens: u32,
    choices: Vec<ChoiceState>,
    /// Number of choices that have not ended.
    open: u32,
    /// Number of those choices that are in [`Phase::Unforked`].
    unforked: u32,
    /// Description of the other choices' sequences, if choice 0 ends before they can fork.
    sibling: Option<NewSequence>,
    /// Whether the request failed in this step; its choices are removed after the commit.
    failed: bool,
}

impl ActiveRequest {
    /// Returns the token counts and times of the request, as if it ended now.
    fn usage(&self, now: Tick) -> Usage {
        let until_first = self.first_token.map(|first| elapsed_us(self.arrived, first));
        Usage {
            prompt_tokens: self.prompt_tokens,
            cached_tokens: self.cached_tokens,
            generated_tokens: self.generated_tokens,
            queue_us: elapsed_us(self.arrived, self.started.unwrap_or(now)),
            prefill_us: self.started.map_or(0, |started| elapsed_us(started, self.first_token.unwrap_or(now))),
            decode_us: self.first_token.map_or(0, |first| elapsed_us(first, now)),
            time_to_first_token_us: until_first,
        }
    }

    /// Returns the sequences of the choices that have not ended.
    fn open_seqs(&self) -> impl Iterator<Item = SeqId> {
        self.choices.iter().filter(|choice| choice.phase != Phase::Ended).map(|choice| choice.seq)
    }

    /// Returns the choices that wait to fork from choice 0.
    pub fn unforked(&self) -> impl Iterator<Item = &ChoiceState> {
        let choices = if self.unforked == 0 { &[] } else { self.choices.as_slice() };
        choices.iter().filter(|choice| choice.phase == Phase::Unforked)
    }

    /// Advances a choice to a later phase.
    fn set_phase(&mut self, choice: usize, phase: Phase) {
        let Some(state) = self.choices.get_mut(choice) else { return };
        self.unforked -= u32::from(state.phase == Phase::Unforked);
        self.open -= u32::from(state.phase != Phase::Ended && phase == Phase::Ended);
        state.phase = phase;
    }
}

#[derive(Debug)]
pub(crate) struct ActiveRequests {
    requests: BTreeMap<RequestId, ActiveRequest>,
    next_deadline: Option<Tick>,
    failed: Vec<RequestId>,
    eos_ids: Vec<u32>,
    vocabulary: Option<Arc<dyn Vocabulary>>,
    counters: Arc<Counters>,
}

impl ActiveRequests {
    pub fn new(eos_ids: Vec<u32>, vocabulary: Option<Arc<dyn Vocabulary>>, counters: Arc<Counters>) -> Self {
        let requests = BTreeMap::new();
        Self { requests, next_deadline: None, failed: Vec::new(), eos_ids, vocabulary, counters }
    }

    /// Adds a request, and returns the sequence of its choice 0, which is scheduled first.
    ///
    /// `sibling` describes the sequences of the other choices.
    pub fn admit(&mut self, admitted: AdmittedRequest, sibling: Option<NewSequence>) -> SeqId {
        let n = admitted.params.n;
        let choice = |choice| {
            let phase = if choice == 0 { Phase::Open } else { Phase::Unforked };
            let seq = seq_of(admitted.id, choice);
            ChoiceState::new(seq, choice, phase, &admitted.params, self.vocabulary.is_some())
        };
        let choices = (0..n).map(choice).collect();
        self.next_deadline = earlier(self.next_deadline, admitted.deadline);
        let is_argmax_only = self.is_argmax_only(&admitted);
        let active = ActiveRequest {
            mailbox: admitted.mailbox,
            params: admitted.params,
            prompt_tokens: to_u32(admitted.prompt.len()),
            max_tokens: admitted.max_tokens,
            bad_words: admitted.bad_words,
            seed: admitted.seed,
            is_argmax_only,
            arrived: admitted.arrived,
            deadline: admitted.deadline,
            started: None,
            first_token: None,
            cached_tokens: 0,
            generated_tokens: 0,
            choices,
            open: n,
            unforked: n - 1,
            sibling,
            failed: false,
        };
        self.requests.insert(admitted.id, active);
        seq_of(admitted.id, 0)
    }

    /// Returns whether every token of a request is the argmax of its row.
    ///
    /// Such a request needs only the argmax, not the logits.
    pub fn is_argmax_only(&self, admitted: &AdmittedRequest) -> bool {
        is_argmax_only(&admitted.params, self.eos_ids(&admitted.params), &admitted.bad_words)
    }

    /// Opens the choices that have not forked, and returns their sequences and the description to schedule them with.
    pub fn take_unforked(&mut self, request: RequestId) -> Option<(Vec<SeqId>, NewSequence)> {
        let active = self.requests.get_mut(&request)?;
        let unforked: Vec<SeqId> = active.unforked().map(|choice| choice.seq).collect();
        for &seq in &unforked {
            active.set_phase(request_of(seq).1, Phase::Open);
        }
        Some((unforked, active.sibling.take()?))
    }

    /// Returns whether the request has choices that are not in the scheduler yet.
    pub fn waits_to_fork(&self, request: RequestId) -> bool {
        self.requests.get(&request).is_some_and(|active| !active.failed && active.unforked > 0)
    }

    /// Marks a choice as forked; the scheduler receives its sequence at the end of this step.
    pub fn mark_forked(&mut self, seq: SeqId) {
        let (request, choice) = request_of(seq);
        if let Some(active) = self.requests.get_mut(&request)
            && active.choices.get(choice).is_some_and(|choice| choice.phase == Phase::Unforked)
        {
            active.set_phase(choice, Phase::Open);
        }
    }

    /// Returns the number of choices that are not in the scheduler yet.
    pub fn unscheduled(&self) -> usize {
        self.requests.values().map(|active| active.unforked as usize).sum()
    }

    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Returns the number of choices that have not ended.
    pub fn choices(&self) -> usize {
        self.requests.values().map(|active| active.open as usize).sum()
    }

    pub fn eos_ids(&self, params: &SamplingParams) -> &[u32] {
        if params.ignore_eos { &[] } else { &self.eos_ids }
    }

    /// Returns the choice and the request of a sequence, or `None` once either has ended or failed.
    pub fn get(&self, seq: SeqId) -> Option<(&ChoiceState, &ActiveRequest)> {
        let (request, choice) = request_of(seq);
        let active = self.requests.get(&request).filter(|active| !active.failed)?;
        Some((active.choices.get(choice).filter(|choice| choice.phase != Phase::Ended)?, active))
    }

    /// Does the same as [`get`](Self::get), with a mutable request and the index of the choice.
    fn get_mut(&mut self, seq: SeqId) -> Option<(usize, &mut ActiveRequest)> {
        self.get(seq)?;
        let (request, choice) = request_of(seq);
        Some((choice, self.requests.get_mut(&request)?))
    }

    /// Marks a sequence as part of a step, and reserves its buffers at its first step.
    ///
    /// Returns true if the request was waiting for its first step until now.
    pub fn mark_started(&mut self, seq: SeqId, now: Tick) -> bool {
        let with_text = self.vocabulary.is_some();
        let (request, choice) = request_of(seq);
        let Some(active) = self.requests.get_mut(&request) else { return false };
        let ActiveRequest { choices, params, prompt_tokens, mailbox, max_tokens, started, .. } = active;
        let Some(state) = choices.get_mut(choice).filter(|state| !state.started) else { return false };
        state.started = true;
        let top = |asked: Option<u32>| asked.map(|top| top as usize);
        if let Some(top) = top(params.prompt_logprobs) {
            state.reserve_prompt_logprobs(prompt_tokens.saturating_sub(1) as usize, top);
        }
        mailbox.reserve(state.choice, *max_tokens as usize, with_text, top(params.logprobs));
        started.replace(started.unwrap_or(now)).is_none()
    }

    /// Records the log-probability of the next prompt token of a sequence.
    pub fn prompt_logprob(&mut self, seq: SeqId, logprob: TokenLogprob, rank: u32, top: &[TokenLogprob]) {
        if let Some((choice, active)) = self.get_mut(seq) {
            active.choices[choice].push_prompt_logprob(logprob, rank, top);
        }
    }

    /// Accepts a sampled token and publishes the resulting update; returns true if the choice has ended.
    ///
    /// `cached_tokens` is called at the request's first token.
    pub fn accept(&mut self, seq: SeqId, sampled: &Sampled, cached_tokens: impl FnOnce() -> u32, now: Tick) -> bool {
        let (request, index) = request_of(seq);
        let Some(active) = self.requests.get_mut(&request).filter(|active| !active.failed) else { return true };
        let Some(choice) = active.choices.get_mut(index).filter(|choice| choice.phase != Phase::Ended) else {
            return true;
        };
        let rules = StopRules {
            params: &active.params,
            eos_ids: if active.params.ignore_eos { &[] } else { &self.eos_ids },
            max_tokens: active.max_tokens,
            vocabulary: self.vocabulary.as_deref(),
        };
        let is_first = choice.choice == 0 && choice.is_first_token();
        let accepted = choice.accept(&rules, sampled);
        let prompt = is_first.then(|| {
            let waited_us = elapsed_us(active.arrived, now);
            let cached_tokens = cached_tokens();
            (active.first_token, active.cached_tokens) = (Some(now), cached_tokens);
            self.counters.time_to_first_token.record(waited_us);
            Counters::add(&self.counters.prompt_tokens, u64::from(active.prompt_tokens));
            Counters::add(&self.counters.cached_tokens, u64::from(cached_tokens));
            PromptInfo {
                prompt_tokens: active.prompt_tokens,
                cached_tokens,
                time_to_first_token_us: waited_us,
                logprobs: choice.take_prompt_logprobs(),
            }
        });
        if accepted.token.is_some() {
            Counters::add(&self.counters.generated_tokens, 1);
            active.generated_tokens += 1;
        }
        let ended = accepted.finish.as_ref().map(Ending::from);
        let choice = &active.choices[index];
        let update = Update {
            text: choice.text(),
            token: accepted.token,
            logprobs: active.params.logprobs.is_some().then_some(choice.logprobs()),
            usage: (ended.is_some() && active.open == 1).then(|| active.usage(now)),
            finish: accepted.finish,
            prompt,
        };
        active.mailbox.publish(choice.choice, update);
        if let Some(ending) = ended {
            self.counters.finish(ending);
            self.remove_choice(seq);
        }
        ended.is_some()
    }

    /// Ends one choice for a reason other than its output, and publishes the text that was held back.
    pub fn end_choice(&mut self, seq: SeqId, reason: FinishReason, now: Tick) {
        let (request, index) = request_of(seq);
        let Some(active) = self.requests.get_mut(&request) else { return };
        let Some(choice) = active.choices.get_mut(index).filter(|choice| choice.phase != Phase::Ended) else { return };
        choice.close();
        self.counters.finish(Ending::from(&reason));
        let usage = (active.open == 1).then(|| active.usage(now));
        let choice = &active.choices[index];
        let update = Update { text: choice.text(), finish: Some(reason), usage, ..Update::default() };
        active.mailbox.publish(choice.choice, update);
        self.remove_choice(seq);
    }

    /// Ends a request with an error.
    ///
    /// Its choices stay until [`next_failed`](Self::next_failed) returns them, because the scheduler may be between a
    /// plan and its commit.
    pub fn fail(&mut self, request: RequestId, error: RequestError) {
        let Some(active) = self.requests.get_mut(&request).filter(|active| !active.failed) else { return };
        active.failed = true;
        active.mailbox.fail(error);
        for _ in 0..active.open {
            self.counters.finish(Ending::Error);
        }
        self.failed.push(request);
    }

    /// Ends the request of a sequence with the error for a failed row.
    pub fn fail_sequence(&mut self, seq: SeqId, found: &SequenceOutcome) {
        let RowOutcome::Failed { status, custom } = &found.outcome else { return };
        let Some((choice, _)) = self.get(seq) else { return };
        let (choice, position) = (choice.choice, found.position);
        let error = match (status, custom) {
            (RowStatus::Overflow, _) => RequestError::Overflow { choice, position },
            (RowStatus::CustomOpFailed, Some(CustomFailure { name, reason, .. })) => {
                RequestError::CustomOp { choice, position, name: name.clone(), reason: reason.clone() }
            }
            _ => RequestError::NonFinite { choice, position },
        };
        self.fail(request_of(seq).0, error);
    }

    /// Removes the next failed request, and returns the sequences of its open choices.
    pub fn next_failed(&mut self) -> Option<Vec<SeqId>> {
        let request = self.failed.pop()?;
        Some(self.requests.remove(&request).map(|active| active.open_seqs().collect()).unwrap_or_default())
    }

    /// Returns the sequences of the open choices of a request, and whether it still waits for its first step.
    pub fn open_choices(&self, request: RequestId) -> (Vec<SeqId>, bool) {
        let open = |active: &ActiveRequest| (active.open_seqs().collect(), active.started.is_none());
        self.requests.get(&request).map(open).unwrap_or_default()
    }

    /// Returns a request that its caller has cancelled.
    pub fn next_cancelled(&self) -> Option<RequestId> {
        self.requests.iter().find(|(_, active)| active.mailbox.is_cancelled()).map(|(&id, _)| id)
    }

    /// Returns a request whose deadline has passed.
    pub fn next_expired(&mut self, now: Tick) -> Option<RequestId> {
        if self.next_deadline.is_none_or(|deadline| deadline > now) {
            return None;
        }
        let expired = self.requests.iter().find(|(_, active)| active.deadline.is_some_and(|deadline| deadline <= now));
        let expired = expired.map(|(&id, _)| id);
        if expired.is_none() {
            self.next_deadline = self.requests.values().filter_map(|active| active.deadline).min();
        }
        expired
    }

    /// Ends every open request with an error, and removes all requests.
    pub fn clear(&mut self, error: &RequestError) {
        for active in self.requests.values() {
            if !active.failed {
                active.mailbox.fail(error.clone());
                for _ in 0..active.open {
                    self.counters.finish(Ending::Error);
                }
            }
        }
        self.requests.clear();
        self.failed.clear();
    }

    /// Checks that counters and choices agree.
    ///
    /// # Errors
    /// A description of the first disagreement.
    pub fn check(&self) -> Result<(), String> {
        for (id, active) in &self.requests {
            let count = |phase| to_u32(active.choices.iter().filter(|choice| choice.phase == phase).count());
            let (unforked, open) = (count(Phase::Unforked), count(Phase::Open) + count(Phase::Unforked));
            if (unforked, open) != (active.unforked, active.open) {
                let counted = (active.unforked, active.open);
                return Err(format!(
                    "request {id} has {unforked} unforked and {open} open choices, but its counters are {counted:?}"
                ));
            }
            if open == 0 {
                return Err(format!("request {id} has no open choice"));
            }
        }
        Ok(())
    }

    fn remove_choice(&mut self, seq: SeqId) {
        let (request, choice) = request_of(seq);
        if let Some(active) = self.requests.get_mut(&request) {
            active.set_phase(choice, Phase::Ended);
            if active.open == 0 {
                self.requests.remove(&request);
            }
        }
    }
}

fn earlier(a: Option<Tick>, b: Option<Tick>) -> Option<Tick> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}
