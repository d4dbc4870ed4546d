//! Events: an ordering event counts its records; a hardware or external event is a flag.

use crate::codes::{Done, RT_EVENT_SYNC_TIMEOUT, RT_INVALID_HANDLE, fail};
use crate::registry::{Handle, Registry, lock};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

pub(crate) static EVENTS: Registry<Event> = Registry::new("event");

/// Behavior of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// `aclrtCreateEventExWithFlag`: the latest record counts; complete before the first record.
    Counting,
    /// `aclrtCreateEventWithFlag`: a record sets the flag, a reset clears it, a wait waits until it is set.
    Flag,
    /// Like [`Flag`](Self::Flag), for use across the boundary of a captured graph.
    External,
}

pub(crate) struct Event {
    pub(crate) kind: Kind,
    pub(crate) flags: u32,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Number of queued records, and of completed ones.
    queued: u64,
    done: u64,
    is_set: bool,
    /// Modeled time of the latest completed record.
    at_ns: u64,
    /// Capture and node at which the latest record was captured.
    captured: Option<(usize, usize)>,
}

impl Event {
    pub(crate) fn new(kind: Kind, flags: u32) -> Self {
        Self { kind, flags, state: Mutex::default(), changed: Condvar::new() }
    }

    pub(crate) fn from_handle(handle: Handle) -> Done<Arc<Self>> {
        EVENTS.get(handle, RT_INVALID_HANDLE)
    }

    /// Queues a record and returns its number.
    pub(crate) fn queue_record(&self) -> u64 {
        let mut state = lock(&self.state);
        state.captured = None;
        state.queued += 1;
        state.queued
    }

    /// Number of the record that a wait queued now waits for.
    pub(crate) fn latest(&self) -> u64 {
        lock(&self.state).queued
    }

    pub(crate) fn captured(&self) -> Option<(usize, usize)> {
        lock(&self.state).captured
    }

    pub(crate) fn set_captured(&self, capture: usize, mark: usize) {
        lock(&self.state).captured = Some((capture, mark));
    }

    /// Completes a record.
    pub(crate) fn record(&self, ticket: u64, at_ns: u64) {
        let mut state = lock(&self.state);
        state.done = state.done.max(ticket);
        state.is_set = true;
        state.at_ns = at_ns;
        self.changed.notify_all();
    }

    pub(crate) fn reset(&self) {
        lock(&self.state).is_set = false;
    }

    /// Whether a wait for this record can complete.
    pub(crate) fn has_passed(&self, ticket: u64) -> bool {
        let state = lock(&self.state);
        if self.kind == Kind::Counting { state.done >= ticket } else { state.is_set }
    }

    pub(crate) fn at_ns(&self) -> u64 {
        lock(&self.state).at_ns
    }

    pub(crate) fn is_complete(&self) -> bool {
        let state = lock(&self.state);
        state.done >= state.queued
    }

    /// Waits on the host; `give_up` is polled and may end the wait.
    pub(crate) fn wait_host(&self, limit: Option<Duration>, give_up: impl Fn() -> Done) -> Done {
        let start = Instant::now();
        let mut state = lock(&self.state);
        let ticket = state.queued;
        while state.done < ticket {
            give_up()?;
            if limit.is_some_and(|limit| start.elapsed() >= limit) {
                fail!(RT_EVENT_SYNC_TIMEOUT, "the event is not reached; the work goes on");
            }
            let wait = self.changed.wait_timeout(state, Duration::from_millis(1));
            state = wait.unwrap_or_else(std::sync::PoisonError::into_inner).0;
        }
        Ok(())
    }
}
