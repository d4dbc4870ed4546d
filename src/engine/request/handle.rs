//! Handle of a request: the reader's side of its mailbox.
//!
//! A [`RequestHandle`] returns deltas to blocking code (a `for` loop, [`recv`](RequestHandle::recv) and similar
//! methods). With the feature `async`, it also returns them to any executor ([`next_delta`](RequestHandle::next_delta),
//! [`output`](RequestHandle::output), or as a `futures_core::Stream`). Dropping the handle cancels the request: the
//! engine removes it, with its blocks, before it plans the next step. The handle does not keep the engine alive; when
//! the engine ends, the last item is an error.

use std::sync::Arc;
use std::time::Duration;

use super::RequestId;
use super::doorbell::Doorbell;
use super::mailbox::{Mailbox, Poll, deadline_after};
use super::output::{Delta, FinishReason, Output, OutputBuilder, Usage};
use crate::engine::error::RequestError;

/// Handle of one submitted request. Dropping it cancels the request, unless [`detach`](Self::detach) is called.
#[derive(Debug)]
#[must_use = "dropping the handle cancels the request"]
pub struct RequestHandle {
    id: RequestId,
    prompt: Arc<[u32]>,
    mailbox: Arc<Mailbox>,
    doorbell: Arc<Doorbell>,
    ended: bool,
    /// Finish reasons that the caller has already read, for an output that is collected later.
    reasons: Vec<Option<FinishReason>>,
    usage: Option<Usage>,
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
        Self { id, prompt, mailbox, doorbell, ended: false, reasons, usage: None, failure: None }
    }

    /// Returns the request's id.
    pub fn id(&self) -> RequestId {
        self.id
    }

    /// Returns the prompt as the model receives it.
    pub fn prompt_token_ids(&self) -> &[u32] {
        &self.prompt
    }

    /// Returns whether the last item has been read.
    pub fn is_ended(&self) -> bool {
        self.ended
    }

    /// Returns an empty [`OutputBuilder`] for this request.
    pub fn output_builder(&self) -> OutputBuilder {
        OutputBuilder::new(self.id, self.prompt.to_vec(), self.reasons.len())
    }

    /// Waits for the next delta; returns `None` after the last item. An error is the last item.
    ///
    /// With an `EngineCore`, this method waits forever unless another thread steps the core; see
    /// [`try_recv`](Self::try_recv).
    pub fn recv(&mut self) -> Option<Result<Delta, RequestError>> {
        if self.ended {
            return None;
        }
        let found = self.mailbox.wait(None);
        self.item(found)
    }

    /// Returns a blocking iterator over the deltas that only borrows the handle; it ends when [`recv`](Self::recv)
    /// returns `None`.
    pub fn deltas(&mut self) -> impl Iterator<Item = Result<Delta, RequestError>> + '_ {
        std::iter::from_fn(|| self.recv())
    }

    /// Returns the unread delta, or `Ok(None)` if there is no unread delta or the request has ended.
    ///
    /// [`is_ended`](Self::is_ended) distinguishes the two cases.
    ///
    /// # Errors
    /// The [`RequestError`] of the request, as the last item.
    pub fn try_recv(&mut self) -> Result<Option<Delta>, RequestError> {
        if self.ended {
            return Ok(None);
        }
        let found = self.mailbox.take();
        self.item(found).transpose()
    }

    /// Waits at most `timeout` for the next delta.
    ///
    /// Returns `Ok(None)` if no delta arrived or the request has ended; [`is_ended`](Self::is_ended) distinguishes the
    /// two cases.
    ///
    /// # Errors
    /// The [`RequestError`] of the request, as the last item.
    pub fn recv_timeout(&mut self, timeout: Duration) -> Result<Option<Delta>, RequestError> {
        if self.ended {
            return Ok(None);
        }
        let found = self.mailbox.wait(deadline_after(timeout));
        self.item(found).transpose()
    }

    /// Asks the engine to end the request before its next step.
    ///
    /// The output up to then remains readable. The last delta of each open choice has the finish reason
    /// [`FinishReason::Cancelled`]. The call has no effect on a request that has ended.
    pub fn cancel(&self) {
        self.mailbox.cancel();
        self.doorbell.notify();
    }

    /// Drops the handle without cancelling: the request runs to its end unread (for example to fill the prefix cache).
    pub fn detach(mut self) {
        self.mailbox.detach();
        self.ended = true;
    }

    /// Waits for the end of the request and returns its output.
    ///
    /// The output does not contain deltas that have been read before.
    ///
    /// # Errors
    /// The [`RequestError`] of the request, also if it has been read before.
    pub fn collect_output(mut self) -> Result<Output, RequestError> {
        let mut output = self.output_builder();
        while let Some(delta) = self.recv() {
            output.push(&delta?);
        }
        self.finish(output)
    }

    /// Returns the output, with the finish reasons that had been read before it was collected.
    fn finish(&mut self, output: OutputBuilder) -> Result<Output, RequestError> {
        if let Some(error) = self.failure.take() {
            return Err(error);
        }
        let mut output = output.finish();
        for (choice, reason) in output.choices.iter_mut().zip(&mut self.reasons) {
            if let Some(reason) = reason.take() {
                choice.finish_reason = reason;
            }
        }
        output.usage = self.usage.unwrap_or(output.usage);
        Ok(output)
    }

    fn item(&mut self, found: Poll) -> Option<Result<Delta, RequestError>> {
        match found {
            Poll::Delta(delta) => {
                if let (Some(kept), Some(reason)) = (self.reasons.get_mut(delta.index as usize), &delta.finish_reason) {
                    *kept = Some(reason.clone());
                }
                self.usage = delta.usage.or(self.usage);
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

/// Iterates over the deltas with a blocking `for` loop.
impl IntoIterator for RequestHandle {
    type Item = Result<Delta, RequestError>;
    type IntoIter = Deltas;

    fn into_iter(self) -> Deltas {
        Deltas { handle: self }
    }
}

/// Blocking iterator over the deltas of a request; an error is its last item. Dropping it cancels the request.
#[derive(Debug)]
#[must_use = "dropping the iterator cancels the request"]
pub struct Deltas {
    handle: RequestHandle,
}

impl Iterator for Deltas {
    type Item = Result<Delta, RequestError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.handle.recv()
    }
}

impl std::iter::FusedIterator for Deltas {}

impl Drop for RequestHandle {
    fn drop(&mut self) {
        if !self.ended {
            self.mailbox.detach();
            self.cancel();
        }
    }
}

#[cfg(feature = "async")]
mod stream {
    use std::pin::Pin;
    use std::task::{Context, Poll};

    use futures_core::{FusedStream, Stream};

    use super::super::mailbox;
    use super::{Delta, Output, RequestError, RequestHandle};

    type Item = Result<Delta, RequestError>;

    impl RequestHandle {
        /// Waits for the next delta without blocking the executor; returns `None` after the last item.
        ///
        /// An error is the last item. Dropping the future loses no delta: the next call returns everything that has
        /// accumulated.
        pub async fn next_delta(&mut self) -> Option<Item> {
            std::future::poll_fn(|context| self.poll_delta(context)).await
        }

        /// Waits for the end of the request without blocking the executor, and returns its output.
        ///
        /// The output does not contain deltas that have been read before. Dropping the future cancels the request.
        ///
        /// # Errors
        /// The [`RequestError`] of the request, also if it has been read before.
        pub async fn output(mut self) -> Result<Output, RequestError> {
            let mut output = self.output_builder();
            while let Some(delta) = self.next_delta().await {
                output.push(&delta?);
            }
            self.finish(output)
        }

        /// Converts the handle to a stream of deltas, without the blocking methods.
        pub fn into_stream(self) -> DeltaStream {
            DeltaStream { handle: self }
        }

        fn poll_delta(&mut self, context: &mut Context<'_>) -> Poll<Option<Item>> {
            if self.ended {
                return Poll::Ready(None);
            }
            match self.mailbox.poll(context) {
                mailbox::Poll::Nothing => Poll::Pending,
                found => Poll::Ready(self.item(found)),
            }
        }
    }

    impl Stream for RequestHandle {
        type Item = Item;

        fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Item>> {
            self.poll_delta(context)
        }
    }

    impl FusedStream for RequestHandle {
        fn is_terminated(&self) -> bool {
            self.ended
        }
    }

    /// Stream of the deltas of a request; an error is its last item. Dropping it cancels the request.
    #[derive(Debug)]
    #[must_use = "dropping the stream cancels the request"]
    pub struct DeltaStream {
        handle: RequestHandle,
    }

    impl DeltaStream {
        /// Returns the handle of the request, for its id, its prompt and cancellation.
        pub fn handle(&self) -> &RequestHandle {
            &self.handle
        }

        /// Converts the stream back to the handle; unread deltas remain readable.
        pub fn into_handle(self) -> RequestHandle {
            self.handle
        }
    }

    impl Stream for DeltaStream {
        type Item = Item;

        fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Item>> {
            self.handle.poll_delta(context)
        }
    }

    impl FusedStream for DeltaStream {
        fn is_terminated(&self) -> bool {
            self.handle.ended
        }
    }
}

#[cfg(feature = "async")]
pub use stream::DeltaStream;
