//! Handle of a request: the reader's end.
//!
//! A [`RequestHandle`] delivers deltas to blocking code (`for`, [`recv`](RequestHandle::recv) and its variants) and,
//! with the feature `async`, to any executor ([`next_delta`](RequestHandle::next_delta),
//! [`output`](RequestHandle::output), or as a `futures_core::Stream`). Dropping the handle cancels the request and
//! frees its blocks before the next step is planned. The handle does not keep the engine alive: when the engine ends,
//! the last item is an error.

use std::sync::Arc;
use std::time::Duration;

use super::RequestId;
use super::doorbell::Doorbell;
use super::mailbox::{Mailbox, Poll, deadline_after};
use super::output::{Delta, FinishReason, Output, OutputBuilder, Usage};
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
    /// Ends that have been read already, for a collection that begins late.
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

    /// An empty [`OutputBuilder`] for this request.
    pub fn output_builder(&self) -> OutputBuilder {
        OutputBuilder::new(self.id, self.prompt.to_vec(), self.reasons.len())
    }

    /// Waits for the next delta; `None` after the last one. An error is the last item.
    ///
    /// With an `EngineCore`, this blocks forever unless another thread steps the core; see
    /// [`try_recv`](Self::try_recv).
    pub fn recv(&mut self) -> Option<Result<Delta, RequestError>> {
        if self.ended {
            return None;
        }
        let found = self.mailbox.wait(None);
        self.item(found)
    }

    /// Blocking iterator over the remaining deltas that does not consume the handle.
    pub fn deltas(&mut self) -> impl Iterator<Item = Result<Delta, RequestError>> + '_ {
        std::iter::from_fn(|| self.recv())
    }

    /// Returns the next delta without waiting; `Ok(None)` if there is none yet or the request has ended (see
    /// [`is_ended`](Self::is_ended)).
    ///
    /// # Errors
    /// The failure of the request, as the last item.
    pub fn try_recv(&mut self) -> Result<Option<Delta>, RequestError> {
        if self.ended {
            return Ok(None);
        }
        let found = self.mailbox.take();
        self.item(found).transpose()
    }

    /// Waits for the next delta for at most `timeout`; `Ok(None)` if none arrived or the request has ended (see
    /// [`is_ended`](Self::is_ended)).
    ///
    /// # Errors
    /// The failure of the request, as the last item.
    pub fn recv_timeout(&mut self, timeout: Duration) -> Result<Option<Delta>, RequestError> {
        if self.ended {
            return Ok(None);
        }
        let found = self.mailbox.wait(deadline_after(timeout));
        self.item(found).transpose()
    }

    /// Cancels the request before its next step.
    ///
    /// Output up to then can still be read, and the last delta of each open choice has [`FinishReason::Cancelled`]. Has
    /// no effect on a request that has ended.
    pub fn cancel(&self) {
        self.mailbox.cancel();
        self.doorbell.notify();
    }

    /// Lets the request run to its end without a reader, for example to fill the prefix cache.
    pub fn detach(mut self) {
        self.mailbox.detach();
        self.ended = true;
    }

    /// Waits for the end of the request. The output excludes deltas that were read before.
    ///
    /// # Errors
    /// The failure of the request, even if it was read before.
    pub fn collect_output(mut self) -> Result<Output, RequestError> {
        let mut output = self.output_builder();
        while let Some(delta) = self.recv() {
            output.push(&delta?);
        }
        self.finish(output)
    }

    /// The output, with the ends that had been read before it was collected.
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

/// Reads deltas with a blocking `for`.
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
        /// Waits for the next delta without blocking the executor; `None` after the last one. An error is the last
        /// item.
        ///
        /// The future is cancel-safe: if it is dropped, the next call returns the pending output.
        pub async fn next_delta(&mut self) -> Option<Item> {
            std::future::poll_fn(|context| self.poll_delta(context)).await
        }

        /// Waits for the end of the request without blocking the executor.
        ///
        /// The output excludes deltas that were read before. Dropping the future cancels the request.
        ///
        /// # Errors
        /// The failure of the request, even if it was read before.
        pub async fn output(mut self) -> Result<Output, RequestError> {
            let mut output = self.output_builder();
            while let Some(delta) = self.next_delta().await {
                output.push(&delta?);
            }
            self.finish(output)
        }

        /// The handle as a stream of deltas only, without its blocking methods.
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
        /// The handle of the request, with its id, its prompt and `cancel`.
        pub fn handle(&self) -> &RequestHandle {
            &self.handle
        }

        /// The handle, with the deltas that have not been read.
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
