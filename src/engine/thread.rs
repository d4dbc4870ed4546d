//! The engine's thread: steps a core while there is work, sleeps while there is none.
//!
//! It is the only thread that touches the core. It ends when it is told to, when a drain is done, or when the engine
//! fails; whatever way, the core is dropped and every open handle hears of it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::{JoinHandle, ThreadId};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::panic_message::panic_message;

use super::core::EngineCore;
use super::error::EngineError;
use super::request::admission::Lifecycle;

/// Says when the thread has let go of everything it owned.
#[derive(Debug, Default)]
struct Finished {
    is_done: Mutex<bool>,
    done: Condvar,
}

#[derive(Debug)]
pub(crate) struct EngineThread {
    thread: Mutex<Option<JoinHandle<()>>>,
    id: ThreadId,
    finished: Arc<Finished>,
}

impl EngineThread {
    /// Starts the thread.
    pub fn spawn(core: EngineCore) -> std::io::Result<Self> {
        let finished = Arc::new(Finished::default());
        let told = Arc::clone(&finished);
        let thread = std::thread::Builder::new().name("ascend-llm".to_owned()).spawn(move || {
            run(core);
            *told.is_done.lock() = true;
            told.done.notify_all();
        })?;
        Ok(Self { id: thread.thread().id(), thread: Mutex::new(Some(thread)), finished })
    }

    /// Waits for the thread, for ever or no longer than `timeout`; a thread that is not done by then is left to itself.
    /// From the thread itself (a waker or vocabulary that held the last engine) it returns at once.
    pub fn join(&self, timeout: Option<Duration>) {
        if std::thread::current().id() == self.id {
            return;
        }
        if let Some(timeout) = timeout {
            let until = Instant::now() + timeout;
            let mut flag = self.finished.is_done.lock();
            while !*flag {
                if self.finished.done.wait_until(&mut flag, until).timed_out() {
                    return;
                }
            }
        }
        if let Some(thread) = self.thread.lock().take() {
            // A panic has been caught inside and told to every handle.
            let _ = thread.join();
        }
    }
}

fn run(mut core: EngineCore) {
    let admission = Arc::clone(core.admission());
    let clock = Arc::clone(core.clock());
    loop {
        let idle = core.is_idle();
        match admission.lifecycle() {
            Lifecycle::Open if idle => admission.doorbell().wait(),
            Lifecycle::Draining(_) if idle => break,
            Lifecycle::Draining(Some(until)) if clock.now() >= until => break,
            Lifecycle::Open | Lifecycle::Draining(_) => match catch_unwind(AssertUnwindSafe(|| core.step())) {
                Ok(Ok(_)) => {}
                Ok(Err(_)) => break,
                Err(panic) => {
                    core.fail(&EngineError::Panicked { message: panic_message(panic.as_ref()) });
                    break;
                }
            },
            Lifecycle::Stopping | Lifecycle::Ended(_) => break,
        }
    }
}
