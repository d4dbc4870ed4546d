//! The engine's thread: steps a core while there is work, and sleeps otherwise.
//!
//! Only this thread accesses the core. The thread ends on request, after a drain, or when the engine fails. In each
//! case it drops the core, and each open handle receives an error.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::{JoinHandle, ThreadId};

use parking_lot::Mutex;

use crate::panic_message::panic_message;

use super::core::EngineCore;
use super::error::EngineError;
use super::request::admission::Lifecycle;

/// State shared with the futures that wait for the end of the thread.
#[cfg(feature = "async")]
#[derive(Debug, Default)]
struct Finished {
    is_done: bool,
    wakers: Vec<std::task::Waker>,
}

/// Wakes the waiting futures when it is dropped, after everything else on the thread.
#[cfg(feature = "async")]
struct FinishOnDrop(Arc<Mutex<Finished>>);

#[cfg(feature = "async")]
impl Drop for FinishOnDrop {
    fn drop(&mut self) {
        let wakers = {
            let mut finished = self.0.lock();
            finished.is_done = true;
            std::mem::take(&mut finished.wakers)
        };
        for waker in wakers {
            // A waker is code of the host: its panic must not affect the engine.
            let _ = catch_unwind(AssertUnwindSafe(|| waker.wake()));
        }
    }
}

#[derive(Debug)]
pub(crate) struct EngineThread {
    thread: Mutex<Option<JoinHandle<()>>>,
    id: ThreadId,
    #[cfg(feature = "async")]
    finished: Arc<Mutex<Finished>>,
}

impl EngineThread {
    /// Starts the thread.
    pub fn spawn(core: EngineCore) -> std::io::Result<Self> {
        #[cfg(feature = "async")]
        let finished = Arc::<Mutex<Finished>>::default();
        #[cfg(feature = "async")]
        let on_end = FinishOnDrop(Arc::clone(&finished));
        let thread = std::thread::Builder::new().name("ascend-llm".to_owned()).spawn(move || {
            #[cfg(feature = "async")]
            let _on_end = on_end;
            run(core);
        })?;
        Ok(Self {
            id: thread.thread().id(),
            thread: Mutex::new(Some(thread)),
            #[cfg(feature = "async")]
            finished,
        })
    }

    /// Waits for the thread to end.
    ///
    /// If the engine's thread itself calls this method (a waker or vocabulary that held the last engine), it returns at
    /// once.
    pub fn join(&self) {
        if std::thread::current().id() == self.id {
            return;
        }
        if let Some(thread) = self.thread.lock().take() {
            // The thread has caught each panic and sent it to every handle.
            let _ = thread.join();
        }
    }

    /// Returns ready once the thread has dropped everything it owned; until then, stores the waker.
    #[cfg(feature = "async")]
    pub fn poll_finished(&self, context: &std::task::Context<'_>) -> std::task::Poll<()> {
        let mut finished = self.finished.lock();
        if finished.is_done {
            return std::task::Poll::Ready(());
        }
        if !finished.wakers.iter().any(|waker| waker.will_wake(context.waker())) {
            finished.wakers.push(context.waker().clone());
        }
        std::task::Poll::Pending
    }
}

fn run(mut core: EngineCore) {
    let shared = Arc::clone(core.shared_arc());
    loop {
        let idle = core.is_idle();
        match shared.admission.lifecycle() {
            Lifecycle::Open if idle => shared.admission.doorbell().wait(),
            Lifecycle::Draining(_) if idle => break,
            Lifecycle::Draining(Some(until)) if shared.clock.now() >= until => break,
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
