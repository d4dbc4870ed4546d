//! Who is in the engine: requests, their choices, and which choice is which sequence of the scheduler.
//!
//! Owns what the loop knows of a request and tells its mailbox what happens. A request is here from the moment the loop
//! fetched it until its last choice has ended.

use crate::num::to_u32;
use std::collections::BTreeMap;
use std::sync::Arc;

use crate::device::CustomFailure;
use crate::graph::RowStatus;
use crate::kv_cache::SeqId;
use crate::sampler::{Sampled, SamplingParams, TokenLogprob, is_argmax_only};
use crate::scheduler::{NewSequence, Tick};
use crate::text::Vocabulary;

use super::choice::{ChoiceState, StopRules};
use crate::engine::clock::elapsed_us;
use crate::engine::error::RequestError;
use crate::engine::metrics::{Counters, Ending};
use crate::engine::request::RequestId;
use crate::engine::request::admission::AdmittedRequest;
use crate::engine::request::mailbox::{Mailbox, Update};
use crate::engine::request::output::{FinishReason, PromptInfo, Usage};
use crate::runner::{RowOutcome, SequenceOutcome};

#[derive(Debug)]
pub(crate) struct ActiveRequest {
    pub mailbox: Arc<Mailbox>,
    pub params: SamplingParams,
    pub prompt_tokens: u32,
    pub max_tokens: u32,
    pub bad_words: Vec<Vec<u32>>,
    pub seed: u64,
    /// Whether all its tokens are the best of their rows, and nothing else of these is looked at.
    pub is_argmax_only: bool,
    pub arrived: Tick,
    pub deadline: Option<Tick>,
    /// When its first step was planned; `None` while it counts as waiting for it.
    started: Option<Tick>,
    /// When the first token of choice 0 came.
    first_token: Option<Tick>,
    /// Prompt tokens that the prefix cache served.
    cached_tokens: u32,
    /// Tokens published, of all choices.
    generated_tokens: u32,
    /// Choices that have not ended.
    open: Vec<SeqId>,
    /// Of these, the ones the scheduler does not know yet: they fork off choice 0 at its first token, so that the prompt
    /// is computed once.
    unforked: Vec<SeqId>,
    /// What the scheduler is told of such a choice if choice 0 ends before they can fork.
    sibling: Option<NewSequence>,
    /// Failed in this step; its choices leave once the step is committed.
    failed: bool,
}

impl ActiveRequest {
    /// Tokens and times of the request if it ends now.
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
}

#[derive(Debug)]
pub(crate) struct ActiveRequests {
    requests: BTreeMap<RequestId, ActiveRequest>,
    choices: BTreeMap<SeqId, ChoiceState>,
    next_seq: u64,
    next_deadline: Option<Tick>,
    failed: Vec<RequestId>,
    eos_ids: Vec<u32>,
    vocabulary: Option<Arc<dyn Vocabulary>>,
    counters: Arc<Counters>,
}

impl ActiveRequests {
    pub fn new(eos_ids: Vec<u32>, vocabulary: Option<Arc<dyn Vocabulary>>, counters: Arc<Counters>) -> Self {
        Self {
            requests: BTreeMap::new(),
            choices: BTreeMap::new(),
            next_seq: 0,
            next_deadline: None,
            failed: Vec::new(),
            eos_ids,
            vocabulary,
            counters,
        }
    }

    /// Takes a request in; the sequence of its choice 0, which is scheduled first. `sibling` describes the others.
    pub fn admit(&mut self, admitted: AdmittedRequest, sibling: Option<NewSequence>) -> SeqId {
        let ids = self.next_seq..self.next_seq + u64::from(admitted.params.n);
        self.next_seq = ids.end;
        for (choice, seq) in (0..).zip(ids.clone()) {
            let sequence = ChoiceState::new(admitted.id, choice, &admitted.params, self.vocabulary.is_some());
            self.choices.insert(SeqId(seq), sequence);
        }
        self.next_deadline = earlier(self.next_deadline, admitted.deadline);
        let takes_best = self.is_argmax_only(&admitted);
        let active = ActiveRequest {
            mailbox: admitted.mailbox,
            params: admitted.params,
            prompt_tokens: to_u32(admitted.prompt.len()),
            max_tokens: admitted.max_tokens,
            bad_words: admitted.bad_words,
            seed: admitted.seed,
            is_argmax_only: takes_best,
            arrived: admitted.arrived,
            deadline: admitted.deadline,
            started: None,
            first_token: None,
            cached_tokens: 0,
            generated_tokens: 0,
            open: ids.clone().map(SeqId).collect(),
            unforked: ids.clone().skip(1).map(SeqId).collect(),
            sibling,
            failed: false,
        };
        self.requests.insert(admitted.id, active);
        SeqId(ids.start)
    }

    /// Whether all tokens of a request are the best of their rows, and nothing else of these is looked at.
    pub fn is_argmax_only(&self, admitted: &AdmittedRequest) -> bool {
        is_argmax_only(&admitted.params, self.eos_ids(&admitted.params), &admitted.bad_words)
    }

    /// Choices of the sequence's request that wait to fork off it.
    pub fn unforked_siblings(&self, seq: SeqId) -> &[SeqId] {
        self.get(seq).map_or(&[], |(_, active)| &active.unforked)
    }

    /// The request's choices that have not forked and now have to be scheduled by themselves, and as what.
    pub fn take_unforked(&mut self, request: RequestId) -> Option<(Vec<SeqId>, NewSequence)> {
        let active = self.requests.get_mut(&request)?;
        let unforked = std::mem::take(&mut active.unforked);
        Some((unforked, active.sibling.take()?))
    }

    /// Whether the request has choices that the scheduler does not know.
    pub fn waits_to_fork(&self, request: RequestId) -> bool {
        self.requests.get(&request).is_some_and(|active| !active.failed && !active.unforked.is_empty())
    }

    /// Notes that a choice is the scheduler's from the end of this step on.
    pub fn mark_forked(&mut self, seq: SeqId) {
        let request = self.choices.get(&seq).map(|sequence| sequence.request);
        if let Some(active) = request.and_then(|request| self.requests.get_mut(&request)) {
            active.unforked.retain(|&unforked| unforked != seq);
        }
    }

    /// Choices in here that the scheduler does not know.
    pub fn unscheduled(&self) -> usize {
        self.requests.values().map(|active| active.unforked.len()).sum()
    }

    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    pub fn choices(&self) -> usize {
        self.choices.len()
    }

    pub fn eos_ids(&self, params: &SamplingParams) -> &[u32] {
        if params.ignore_eos { &[] } else { &self.eos_ids }
    }

    /// The choice behind a sequence and its request; `None` once either has ended or failed.
    pub fn get(&self, seq: SeqId) -> Option<(&ChoiceState, &ActiveRequest)> {
        let sequence = self.choices.get(&seq)?;
        let active = self.requests.get(&sequence.request).filter(|active| !active.failed)?;
        Some((sequence, active))
    }

    /// Position of the first prompt row whose logits the sequence still wants.
    pub fn prompt_rows_from(&self, seq: SeqId) -> Option<u32> {
        self.get(seq)?.0.prompt_rows_from()
    }

    /// Notes that a sequence is part of a step. At its first one its buffers are reserved; `true` if its request was
    /// waiting until then.
    pub fn mark_started(&mut self, seq: SeqId, now: Tick) -> bool {
        let Some(sequence) = self.choices.get_mut(&seq).filter(|sequence| !sequence.started) else { return false };
        let Some(active) = self.requests.get_mut(&sequence.request) else { return false };
        sequence.started = true;
        let top = |asked: Option<u32>| asked.map(|top| top as usize);
        if let Some(top) = top(active.params.prompt_logprobs) {
            sequence.reserve_prompt_logprobs(active.prompt_tokens.saturating_sub(1) as usize, top);
        }
        let with_text = self.vocabulary.is_some();
        let logprobs = top(active.params.logprobs);
        active.mailbox.reserve(sequence.choice, active.max_tokens as usize, with_text, logprobs);
        active.started.replace(active.started.unwrap_or(now)).is_none()
    }

    /// Records the log-probability of the prompt token behind `sequence`'s last recorded one.
    pub fn prompt_logprob(&mut self, seq: SeqId, logprob: TokenLogprob, rank: u32, top: &[TokenLogprob]) {
        if let Some(sequence) = self.choices.get_mut(&seq) {
            sequence.push_prompt_logprob(logprob, rank, top);
        }
    }

    /// Takes a drawn token and publishes what it brings; `true` if the choice ended on it.
    pub fn accept(&mut self, seq: SeqId, sampled: &Sampled, cached_tokens: u32, now: Tick) -> bool {
        let Some(sequence) = self.choices.get_mut(&seq) else { return true };
        let Some(active) = self.requests.get_mut(&sequence.request).filter(|active| !active.failed) else {
            return true;
        };
        let rules = StopRules {
            params: &active.params,
            eos_ids: if active.params.ignore_eos { &[] } else { &self.eos_ids },
            max_tokens: active.max_tokens,
            vocabulary: self.vocabulary.as_deref(),
        };
        let is_first = sequence.choice == 0 && sequence.is_first_token();
        let accepted = sequence.accept(&rules, sampled);
        let prompt = is_first.then(|| {
            let waited_us = elapsed_us(active.arrived, now);
            (active.first_token, active.cached_tokens) = (Some(now), cached_tokens);
            self.counters.time_to_first_token.record(waited_us);
            Counters::add(&self.counters.prompt_tokens, u64::from(active.prompt_tokens));
            Counters::add(&self.counters.cached_tokens, u64::from(cached_tokens));
            PromptInfo {
                prompt_tokens: active.prompt_tokens,
                cached_tokens,
                time_to_first_token_us: waited_us,
                logprobs: sequence.take_prompt_logprobs(),
            }
        });
        if accepted.token.is_some() {
            Counters::add(&self.counters.generated_tokens, 1);
            active.generated_tokens += 1;
        }
        let ended = accepted.finish.as_ref().map(Ending::from);
        let news = Update {
            text: sequence.text(),
            token: accepted.token,
            logprobs: active.params.logprobs.is_some().then_some(sequence.logprobs()),
            usage: (ended.is_some() && active.open.len() == 1).then(|| active.usage(now)),
            finish: accepted.finish,
            prompt,
        };
        active.mailbox.publish(sequence.choice, news);
        if let Some(ending) = ended {
            self.counters.finish(ending);
            self.remove_choice(seq);
        }
        ended.is_some()
    }

    /// Ends one choice from outside and publishes what was held back.
    pub fn end_choice(&mut self, seq: SeqId, reason: FinishReason, now: Tick) {
        let Some(sequence) = self.choices.get_mut(&seq) else { return };
        if let Some(active) = self.requests.get(&sequence.request) {
            self.counters.finish(Ending::from(&reason));
            sequence.close();
            let usage = (active.open.len() == 1).then(|| active.usage(now));
            let update = Update { text: sequence.text(), finish: Some(reason), usage, ..Update::default() };
            active.mailbox.publish(sequence.choice, update);
        }
        self.remove_choice(seq);
    }

    /// Ends a request with an error. Its choices stay until [`next_failed`](Self::next_failed) hands them out, since the
    /// scheduler may be between a plan and its commit.
    pub fn fail(&mut self, request: RequestId, error: RequestError) {
        let Some(active) = self.requests.get_mut(&request).filter(|active| !active.failed) else { return };
        active.failed = true;
        active.mailbox.fail(error);
        for _ in &active.open {
            self.counters.finish(Ending::Error);
        }
        self.failed.push(request);
    }

    /// Ends the request of a sequence with what a step told of one of its rows.
    pub fn fail_sequence(&mut self, seq: SeqId, found: &SequenceOutcome) {
        let RowOutcome::Failed { status, custom } = &found.outcome else { return };
        let Some((sequence, _)) = self.get(seq) else { return };
        let (request, choice, position) = (sequence.request, sequence.choice, found.position);
        let error = match (status, custom) {
            (RowStatus::Overflow, _) => RequestError::Overflow { choice, position },
            (RowStatus::CustomOpFailed, Some(CustomFailure { name, reason, .. })) => {
                RequestError::CustomOp { choice, position, name: name.clone(), reason: reason.clone() }
            }
            _ => RequestError::NonFinite { choice, position },
        };
        self.fail(request, error);
    }

    /// Lets the next failed request go; the sequences it had open.
    pub fn next_failed(&mut self) -> Option<Vec<SeqId>> {
        let request = self.failed.pop()?;
        let open = self.requests.remove(&request).map(|active| active.open).unwrap_or_default();
        for seq in &open {
            self.choices.remove(seq);
        }
        Some(open)
    }

    /// Sequences of a request that have not ended, and whether the request still waits for its first step.
    pub fn open_choices(&self, request: RequestId) -> (Vec<SeqId>, bool) {
        self.requests.get(&request).map(|active| (active.open.clone(), active.started.is_none())).unwrap_or_default()
    }

    /// A request whose caller has cancelled it.
    pub fn next_cancelled(&self) -> Option<RequestId> {
        self.requests.iter().find(|(_, active)| active.mailbox.is_cancelled()).map(|(&id, _)| id)
    }

    /// A request whose deadline has passed.
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

    /// Tells every open request of an error and forgets them all.
    pub fn clear(&mut self, error: &RequestError) {
        for active in self.requests.values() {
            if !active.failed {
                active.mailbox.fail(error.clone());
                for _ in &active.open {
                    self.counters.finish(Ending::Error);
                }
            }
        }
        self.requests.clear();
        self.choices.clear();
        self.failed.clear();
    }

    /// That requests and sequences name each other, and nothing else is here.
    pub fn check(&self) -> Result<(), String> {
        let open = self.requests.values().map(|active| active.open.len()).sum::<usize>();
        if open != self.choices.len() {
            return Err(format!("requests name {open} open sequences, there are {}", self.choices.len()));
        }
        for (id, active) in &self.requests {
            if active.unforked.iter().any(|seq| !active.open.contains(seq)) {
                return Err(format!("request {id} waits to fork a choice that has ended"));
            }
            if active.open.is_empty() {
                return Err(format!("request {id} has no open choice"));
            }
            for seq in &active.open {
                if self.choices.get(seq).map(|sequence| sequence.request) != Some(*id) {
                    return Err(format!("request {id} names {seq:?}, which is not its own"));
                }
            }
        }
        Ok(())
    }

    fn remove_choice(&mut self, seq: SeqId) {
        let Some(sequence) = self.choices.remove(&seq) else { return };
        if let Some(active) = self.requests.get_mut(&sequence.request) {
            active.open.retain(|&open| open != seq);
            active.unforked.retain(|&unforked| unforked != seq);
            if active.open.is_empty() {
                self.requests.remove(&sequence.request);
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
