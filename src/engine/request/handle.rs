//! The reader's end of a request.
//!
//! A [`RequestHandle`] yields deltas as an iterator, by [`recv_timeout`](RequestHandle::recv_timeout) or, with the feature
//! `async`, as a stream. Dropping it cancels the request: it is gone, with its blocks, before the next step is planned.
//! The handle does not keep the engine alive; when the engine ends, its last item is an error.

use crate::num::to_u32;
use std::sync::Arc;
use std::time::Duration;

use super::RequestId;
use super::doorbell::Doorbell;
use super::mailbox::{Mailbox, Poll, deadline_after};
use super::output::{Choice, Delta, FinishReason, Output, Usage};
use crate::engine::error::RequestError;

/// One running request, seen from its reader. Dropping it cancels the request; [`detach`](Self::detach) opts out.
#[derive(Debug)]
#[must_use = "dropping the handle cancels the request"]
pub struct RequestHandle {
    id: RequestId,
    prompt: Arc<[u32]>,
    mailbox: Arc<Mailbox>,
    doorbell: Arc<Doorbell>,
    ended: bool,
    /// What has been read of how it ended, for a collection that begins late.
    reasons: Vec<Option<FinishReason>>,
    failure: Option<RequestError>,
}

impl RequestHandle {
    pub(crate) fn new(
        id: RequestId,
        prompt: Arc<[u32]>,
        choices: u32,
        mailbox: Arc<Mailbox>,
        doorbell: Arc<Doorbell>,
    ) -> Self {
        let reasons = vec![None; choices as usize];
        Self { id, prompt, mailbox, doorbell, ended: false, reasons, failure: None }
    }

    /// The request's number.
    pub fn id(&self) -> RequestId {
        self.id
    }

    /// The prompt as the model sees it.
    pub fn prompt_token_ids(&self) -> &[u32] {
        &self.prompt
    }

    /// Whether the last item has been read.
    pub fn is_ended(&self) -> bool {
        self.ended
    }

    /// Waits for the next delta; `None` after the last one. An error is the last item.
    ///
    /// Under an `EngineCore` it waits for ever unless another thread steps the core; see [`try_recv`](Self::try_recv).
    pub fn recv(&mut self) -> Option<Result<Delta, RequestError>> {
        if self.ended {
            return None;
        }
        let found = self.mailbox.wait(None);
        self.item(found)
    }

    /// The delta that is there now, `Ok(None)` if there is none or the request has ended
    /// (see [`is_ended`](Self::is_ended)).
    pub fn try_recv(&mut self) -> Result<Option<Delta>, RequestError> {
        if self.ended {
            return Ok(None);
        }
        let found = self.mailbox.take();
        self.item(found).transpose()
    }

    /// Waits for the next delta no longer than `timeout`; `Ok(None)` if none came or the request has ended
    /// (see [`is_ended`](Self::is_ended)).
    pub fn recv_timeout(&mut self, timeout: Duration) -> Result<Option<Delta>, RequestError> {
        if self.ended {
            return Ok(None);
        }
        let found = self.mailbox.wait(deadline_after(timeout));
        self.item(found).transpose()
    }

    /// Asks the engine to end the request before its next step; what has come until then can still be read, and the last
    /// delta of each open choice says [`FinishReason::Cancelled`]. No effect on a request that has ended.
    pub fn cancel(&self) {
        self.mailbox.cancel();
        self.doorbell.notify();
    }

    /// Lets the request run to its end unread (for example to fill the prefix cache).
    pub fn detach(mut self) {
        self.mailbox.detach();
        self.ended = true;
    }

    /// Waits for the whole request. Deltas that have been read before are not part of the output;
    /// an error that has been read before comes again.
    pub fn collect_output(mut self) -> Result<Output, RequestError> {
        let mut gathered = Gathered::new(self.reasons.len());
        while let Some(delta) = self.recv() {
            gathered.add(delta?);
        }
        match self.failure.take() {
            Some(error) => Err(error),
            None => Ok(gathered.finish(self.id, self.prompt.to_vec(), &mut self.reasons)),
        }
    }

    fn item(&mut self, found: Poll) -> Option<Result<Delta, RequestError>> {
        match found {
            Poll::Delta(delta) => {
                if let (Some(mailbox), Some(reason)) =
                    (self.reasons.get_mut(delta.index as usize), &delta.finish_reason)
                {
                    *mailbox = Some(reason.clone());
                }
                Some(Ok(delta))
            }
            Poll::Nothing => None,
            Poll::Error(error) => {
                self.ended = true;
                self.failure = Some(error.clone());
                Some(Err(error))
            }
            Poll::Ended => {
                self.ended = true;
                None
            }
        }
    }
}

impl Iterator for RequestHandle {
    type Item = Result<Delta, RequestError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.recv()
    }
}

impl std::iter::FusedIterator for RequestHandle {}

impl Drop for RequestHandle {
    fn drop(&mut self) {
        if !self.ended {
            self.mailbox.detach();
            self.cancel();
        }
    }
}

#[cfg(feature = "async")]
impl futures_core::Stream for RequestHandle {
    type Item = Result<Delta, RequestError>;

    fn poll_next(
        mut self: std::pin::Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Self::Item>> {
        if self.ended {
            return std::task::Poll::Ready(None);
        }
        match self.mailbox.poll(context) {
            Poll::Nothing => std::task::Poll::Pending,
            found => std::task::Poll::Ready(self.item(found)),
        }
    }
}

#[cfg(feature = "async")]
impl futures_core::FusedStream for RequestHandle {
    fn is_terminated(&self) -> bool {
        self.ended
    }
}

/// Deltas on their way to an [`Output`].
#[derive(Debug)]
struct Gathered {
    choices: Vec<Delta>,
}

impl Gathered {
    fn new(choices: usize) -> Self {
        Self { choices: (0u32..).take(choices).map(|index| Delta { index, ..Delta::default() }).collect() }
    }

    fn add(&mut self, delta: Delta) {
        let whole = &mut self.choices[delta.index as usize];
        whole.text.push_str(&delta.text);
        whole.token_ids.extend_from_slice(&delta.token_ids);
        if let Some(logprobs) = &delta.logprobs {
            whole.logprobs.get_or_insert_default().append(logprobs);
        }
        if delta.prompt.is_some() {
            whole.prompt = delta.prompt;
        }
    }

    fn finish(mut self, id: RequestId, prompt_token_ids: Vec<u32>, reasons: &mut [Option<FinishReason>]) -> Output {
        let prompt = self.choices.first_mut().and_then(|choice| choice.prompt.take());
        let mut usage = Usage {
            prompt_tokens: to_u32(prompt_token_ids.len()),
            cached_tokens: prompt.as_ref().map_or(0, |prompt| prompt.cached_tokens),
            generated_tokens: 0,
            time_to_first_token: prompt.as_ref().map(|prompt| prompt.time_to_first_token),
        };
        let choices = self
            .choices
            .into_iter()
            .map(|whole| {
                usage.generated_tokens += to_u32(whole.token_ids.len());
                Choice {
                    index: whole.index,
                    text: whole.text,
                    token_ids: whole.token_ids,
                    logprobs: whole.logprobs,
                    // A mailbox says `Ended` without an error only when each choice has published its reason.
                    finish_reason: reasons[whole.index as usize].take().unwrap_or(FinishReason::Cancelled),
                }
            })
            .collect();
        Output { id, prompt_token_ids, prompt_logprobs: prompt.and_then(|prompt| prompt.logprobs), choices, usage }
    }
}
