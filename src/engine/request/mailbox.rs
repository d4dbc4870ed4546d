//! Mailbox of a request: buffers the updates of its choices until the reader takes them.
//!
//! The engine merges each update into the mailbox, and the reader takes everything that has accumulated. A slow reader
//! therefore costs only memory, bounded by the request's own output and reserved at the start of each choice, and never
//! delays a step. A fast reader receives every token separately.
//!
//! State of a choice: open → (update)* → finished. An error ends all choices of the request. The reader receives the
//! updates before the error first.

use crate::num::to_u32;
use std::time::{Duration, Instant};

use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{Condvar, Mutex};

use super::output::{Delta, FinishReason, Logprobs, PromptInfo, Usage};
use crate::engine::error::RequestError;

/// Capacity reserved for unread text, in bytes per token. Byte-level vocabularies average 4 bytes per token on English
/// text. Longer unread text only costs a reallocation.
const TEXT_BYTES_PER_TOKEN: usize = 8;

/// Update of one choice in one step.
#[derive(Debug, Default)]
pub(crate) struct Update<'a> {
    pub text: &'a str,
    pub token: Option<u32>,
    pub logprobs: Option<&'a Logprobs>,
    pub finish: Option<FinishReason>,
    pub prompt: Option<PromptInfo>,
    /// Token counts and times; set in the update that ends the last choice of the request.
    pub usage: Option<Usage>,
}

/// Result of a read.
#[derive(Debug)]
#[allow(clippy::large_enum_variant)] // stays on the reader's stack, and only for a moment
pub(crate) enum Poll {
    Delta(Delta),
    Error(RequestError),
    Nothing,
    Ended,
}

#[derive(Debug)]
pub(crate) struct Mailbox {
    state: Mutex<State>,
    changed: Condvar,
    cancelled: AtomicBool,
    is_detached: AtomicBool,
}

#[derive(Debug)]
struct State {
    choices: Vec<Buffered>,
    /// Choice to read first, so that each choice is read once before any choice is read again.
    next_choice: usize,
    open: usize,
    prompt: Option<PromptInfo>,
    /// Returned with the last delta of the request.
    usage: Option<Usage>,
    error: Option<RequestError>,
    #[cfg(feature = "async")]
    waker: Option<std::task::Waker>,
}

#[derive(Debug, Default)]
struct Buffered {
    text: String,
    token_ids: Vec<u32>,
    logprobs: Logprobs,
    wants_logprobs: bool,
    finish: Option<FinishReason>,
    closed: bool,
    has_unread: bool,
}

impl Mailbox {
    pub fn new(choices: usize, wants_logprobs: bool) -> Self {
        let choices = (0..choices).map(|_| Buffered { wants_logprobs, ..Buffered::default() }).collect::<Vec<_>>();
        Self {
            state: Mutex::new(State {
                open: choices.len(),
                choices,
                next_choice: 0,
                prompt: None,
                usage: None,
                error: None,
                #[cfg(feature = "async")]
                waker: None,
            }),
            changed: Condvar::new(),
            cancelled: AtomicBool::new(false),
            is_detached: AtomicBool::new(false),
        }
    }

    /// Reserves capacity for everything that a choice may publish, so that publishing allocates no memory.
    pub fn reserve(&self, choice: u32, tokens: usize, with_text: bool, top: Option<usize>) {
        if self.is_detached.load(Ordering::Relaxed) {
            return;
        }
        let mut state = self.state.lock();
        let pending = &mut state.choices[choice as usize];
        pending.token_ids.reserve(tokens);
        if with_text {
            pending.text.reserve(tokens.saturating_mul(TEXT_BYTES_PER_TOKEN));
        }
        if let Some(top) = top {
            pending.logprobs.reserve(tokens, top);
        }
    }

    /// Asks the engine to end the request before its next step.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Release);
    }

    pub fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Acquire)
    }

    /// Marks the mailbox as unread: later updates are dropped.
    pub fn detach(&self) {
        self.is_detached.store(true, Ordering::Release);
    }

    /// Merges an update into a choice. An update of a choice that has ended is dropped.
    pub fn publish(&self, choice: u32, update: Update<'_>) {
        if self.is_detached.load(Ordering::Acquire) {
            return;
        }
        let mut state = self.state.lock();
        if update.prompt.is_some() {
            state.prompt = update.prompt;
        }
        if update.usage.is_some() {
            state.usage = update.usage;
        }
        let pending = &mut state.choices[choice as usize];
        if pending.closed {
            return;
        }
        pending.text.push_str(update.text);
        pending.token_ids.extend(update.token);
        if let Some(logprobs) = update.logprobs {
            pending.logprobs.append(logprobs);
        }
        pending.has_unread = true;
        if update.finish.is_some() {
            pending.finish = update.finish;
            pending.closed = true;
            state.open -= 1;
        }
        self.wake_reader(state);
    }

    /// Ends every open choice with an error.
    pub fn fail(&self, error: RequestError) {
        let mut state = self.state.lock();
        if state.open == 0 {
            return;
        }
        for pending in &mut state.choices {
            pending.closed = true;
        }
        state.open = 0;
        state.error = Some(error);
        self.wake_reader(state);
    }

    #[cfg(not(feature = "async"))]
    fn wake_reader(&self, state: parking_lot::MutexGuard<'_, State>) {
        drop(state);
        self.changed.notify_all();
    }

    #[cfg(feature = "async")]
    fn wake_reader(&self, mut state: parking_lot::MutexGuard<'_, State>) {
        let waker = state.waker.take();
        drop(state);
        self.changed.notify_all();
        if let Some(waker) = waker {
            // A waker is code of the host: its panic must not end other requests.
            let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| waker.wake()));
        }
    }

    /// Takes everything that has accumulated.
    pub fn take(&self) -> Poll {
        self.state.lock().take()
    }

    /// Takes everything that has accumulated; waits for it until `deadline` (forever if `None`).
    pub fn wait(&self, deadline: Option<Instant>) -> Poll {
        let mut state = self.state.lock();
        loop {
            match state.take() {
                Poll::Nothing => {}
                found => return found,
            }
            match deadline {
                None => self.changed.wait(&mut state),
                Some(deadline) if self.changed.wait_until(&mut state, deadline).timed_out() => return state.take(),
                Some(_) => {}
            }
        }
    }

    /// Takes everything that has accumulated, or stores the waker and wakes it at the next update.
    #[cfg(feature = "async")]
    pub fn poll(&self, context: &mut std::task::Context<'_>) -> Poll {
        let mut state = self.state.lock();
        let found = state.take();
        if matches!(found, Poll::Nothing) {
            match &mut state.waker {
                Some(waker) => waker.clone_from(context.waker()),
                none => *none = Some(context.waker().clone()),
            }
        }
        found
    }
}

impl State {
    fn take(&mut self) -> Poll {
        let count = self.choices.len();
        for step in 0..count {
            let index = (self.next_choice + step) % count;
            if self.choices[index].has_unread {
                self.next_choice = (index + 1) % count;
                let prompt = if index == 0 { self.prompt.take() } else { None };
                let mut delta = self.choices[index].take(index, prompt);
                if self.open == 0 && !self.choices.iter().any(|choice| choice.has_unread) {
                    delta.usage = self.usage.take();
                }
                return Poll::Delta(delta);
            }
        }
        match self.error.take() {
            Some(error) => Poll::Error(error),
            None if self.open == 0 => Poll::Ended,
            None => Poll::Nothing,
        }
    }
}

impl Buffered {
    /// Clones the content instead of moving it, so that the mailbox keeps its reserved capacity.
    fn take(&mut self, index: usize, prompt: Option<PromptInfo>) -> Delta {
        let delta = Delta {
            index: to_u32(index),
            text: self.text.clone(),
            token_ids: self.token_ids.clone(),
            logprobs: self.wants_logprobs.then(|| self.logprobs.clone()),
            finish_reason: self.finish.take(),
            prompt,
            usage: None,
        };
        self.text.clear();
        self.token_ids.clear();
        self.logprobs.clear();
        self.has_unread = false;
        delta
    }
}

/// Returns the moment `timeout` from now, or `None` if [`Instant`] cannot represent it.
pub(crate) fn deadline_after(timeout: Duration) -> Option<Instant> {
    Instant::now().checked_add(timeout)
}
