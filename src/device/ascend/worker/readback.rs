//! Channel for the results of reads and host waits: one reusable landing buffer and one reusable answer.

#![forbid(unsafe_code)]

use ascend_sys::PinnedBuffer;
use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::device::DeviceError;

/// Slot for the answer of the device's thread; one caller waits at a time.
#[derive(Debug)]
pub(crate) struct Readback {
    /// Held by the waiting caller.
    turn: Mutex<()>,
    state: Mutex<State>,
    answered: Condvar,
}

#[derive(Debug)]
struct State {
    buffer: Option<PinnedBuffer>,
    answer: Option<Result<(), DeviceError>>,
    /// Error that every caller receives once the thread has ended.
    end: Option<DeviceError>,
}

impl Readback {
    pub(crate) fn new(buffer: PinnedBuffer) -> Self {
        let state = State { buffer: Some(buffer), answer: None, end: None };
        Self { turn: Mutex::new(()), state: Mutex::new(state), answered: Condvar::new() }
    }

    /// Excludes other callers.
    pub(crate) fn turn(&self) -> MutexGuard<'_, ()> {
        self.turn.lock()
    }

    /// Waits for the answer; if it is a success, `then` receives the landing buffer.
    pub(crate) fn wait(&self, then: impl FnOnce(&PinnedBuffer)) -> Result<(), DeviceError> {
        let mut state = self.state.lock();
        loop {
            if let Some(answer) = state.answer.take() {
                answer?;
                if let Some(buffer) = &state.buffer {
                    then(buffer);
                }
                return Ok(());
            }
            if let Some(end) = &state.end {
                return Err(end.clone());
            }
            self.answered.wait(&mut state);
        }
    }

    /// Takes the landing buffer to fill it.
    ///
    /// # Panics
    /// If it is already taken: only one thread takes it, and it puts it back.
    pub(crate) fn take(&self) -> PinnedBuffer {
        self.state.lock().buffer.take().expect("the landing buffer is in")
    }

    pub(crate) fn put(&self, buffer: PinnedBuffer) {
        self.state.lock().buffer = Some(buffer);
    }

    pub(crate) fn answer(&self, answer: Result<(), DeviceError>) {
        self.state.lock().answer = Some(answer);
        self.answered.notify_all();
    }

    /// Makes every further wait return `end`.
    pub(crate) fn close(&self, end: DeviceError) -> Option<PinnedBuffer> {
        let mut state = self.state.lock();
        state.end.get_or_insert(end);
        let buffer = state.buffer.take();
        drop(state);
        self.answered.notify_all();
        buffer
    }
}
