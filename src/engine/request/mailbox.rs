//! Mailbox of one request: deltas are merged here until the handle reads them.
//!
//! The engine *merges* each update into the mailbox, and the reader takes everything that has accumulated. A slow
//! reader therefore costs memory bounded by its own output (reserved at admission) and never delays a step; a fast
//! reader sees every token.
//!
//! State of a choice: open → (update)* → finished. An error ends all choices of the request; the reader gets the
//! updates from before the error first.

use crate::num::to_u32;
use std::time::{Duration, Instant};

use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{Condvar, Mutex};

use super::output::{Delta, FinishReason, Logprobs, PromptInfo, Usage};
use crate::engine::error::RequestError;

/// Reserved bytes of unread text per token of a choice. Byte-level vocabularies average 4 bytes per token on English
/// text; longer unread text costs a reallocation.
const TEXT_BYTES_PER_TOKEN: usize = 8;

/// New output of one choice in one step.
#[derive(Debug, Default)]
pub(crate) struct Update<'a> {
    pub text: &'a str,
    pub token: Option<u32>,
    pub logprobs: Option<&'a Logprobs>,
    pub finish: Option<FinishReason>,
    pub prompt: Option<PromptInfo>,
    /// Set with the end of the request's last choice.
    pub usage: Option<Usage>,
}

/// Result of reading the mailbox.
#[derive(Debug)]
#[allow(clippy::large_enum_variant)] // lives on a reader's stack for a moment
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
    /// The choice that is looked at first, so that no choice is read twice before another is read once.
    next_choice: usize,
    open: usize,
    prompt: Option<PromptInfo>,
    /// Part of the last delta that is read.
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

    /// Reserves capacity for everything that a choice may publish, so that publishing does not allocate.
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

    /// Cancels the request before its next step.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Release);
    }

    pub fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Acquire)
    }

    /// Drops everything that is published from now on: the request has no reader.
    pub fn detach(&self) {
        self.is_detached.store(true, Ordering::Release);
    }

    /// Merges an update into a choice. Updates of an ended choice are dropped.
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

    /// Ends every choice that is still open with an error.
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
            // A waker is code of the host's: its panic is its own affair and must not end the other requests.
            let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| waker.wake()));
        }
    }

    /// Takes the accumulated output.
    pub fn take(&self) -> Poll {
        self.state.lock().take()
    }

    /// Takes the accumulated output; waits for it until `deadline`, or forever if `None`.
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

    /// Takes the accumulated output, or stores the waker and wakes it on the next update.
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
    /// Copies the output instead of moving it, so that the engine keeps the capacity reserved at admission.
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

/// The time `timeout` from now; `None` if the clock cannot represent it.
pub(crate) fn deadline_after(timeout: Duration) -> Option<Instant> {
    Instant::now().checked_add(timeout)
}
