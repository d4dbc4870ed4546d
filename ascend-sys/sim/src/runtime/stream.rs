//! Streams: real queues, each with a thread of its own.
//!
//! A task runs some time after it was queued, and never at the same time as another task. Thread scheduling and random
//! delays decide which of several streams continues. Work of one stream keeps its order. No other order is guaranteed,
//! so a missing event shows up as wrong data.

use crate::codes::{
    Done, Fail, RT_AICORE_TIMEOUT, RT_CONTEXT_NULL, RT_INVALID_HANDLE, RT_NO_STREAM, RT_STREAM_ABORT,
    RT_STREAM_CONTEXT, RT_STREAM_SYNC_TIMEOUT, TASK_GROUP_STATUS, fail, rule,
};
use crate::control::{self, Fault};
use crate::random::Random;
use crate::registry::{Handle, Registry, lock};
use crate::runtime::capture::{Capture, Replay, TaskNode};
use crate::runtime::context::Context;
use crate::runtime::event::Event;
use crate::runtime::memory::memory;
use crate::runtime::task::Task;
use crate::runtime::{capture, context, task};
use crate::settings::Setting;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

pub(crate) static STREAMS: Registry<Stream> = Registry::new("stream");

/// Limit of a kernel's run time in seconds; 1091 on a 910B unless set.
pub(crate) static KERNEL_LIMIT_S: AtomicU64 = AtomicU64::new(1091);

/// Interval at which a blocked task polls.
const POLL: Duration = Duration::from_micros(50);

/// A queued item.
pub(crate) enum Work {
    Task(Arc<Task>),
    Record(Arc<Event>, u64),
    Wait(Arc<Event>, u64),
    Reset(Arc<Event>),
    Replay(Replay),
    /// New tasks for nodes of a graph.
    Update(Vec<(Arc<TaskNode>, Arc<Task>)>),
}

/// Nodes of a group, and the tasks issued for them so far.
pub(crate) type Update = (Vec<Arc<TaskNode>>, Vec<Arc<Task>>);

pub(crate) struct Stream {
    pub(crate) context: Arc<Context>,
    state: Mutex<State>,
    changed: Condvar,
    worker: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Default)]
#[allow(clippy::struct_excessive_bools)]
struct State {
    queue: VecDeque<(Work, u64)>,
    is_running: bool,
    is_closing: bool,
    is_aborted: bool,
    stops_on_failure: bool,
    error: Option<Fail>,
    /// Active capture, and the stream's branch in it.
    capture: Option<(Arc<Capture>, usize)>,
    /// Group being updated, and the tasks issued so far.
    update: Option<Update>,
    /// Modeled time up to which the stream has worked.
    clock_ns: u64,
}

impl Stream {
    /// Creates and registers a stream of the current context.
    pub(crate) fn create() -> Done<Handle> {
        let context = context::current()?;
        let used = STREAMS.len() as u64 + capture::streams_used();
        rule!(used < Setting::streams.size(), RT_NO_STREAM, "all {used} streams are in use");
        Ok(STREAMS.add(Self::start(context)))
    }

    /// Starts a stream and its thread.
    pub(crate) fn start(context: Arc<Context>) -> Arc<Self> {
        let stream =
            Arc::new(Self { context, state: Mutex::default(), changed: Condvar::new(), worker: Mutex::new(None) });
        let work = stream.clone();
        let worker = std::thread::Builder::new().name("ascend-sim-stream".into()).spawn(move || work.run());
        *lock(&stream.worker) = worker.ok();
        stream
    }

    /// Stream of a handle, which must belong to the thread's context; null is the context's default stream.
    pub(crate) fn from_handle(handle: Handle) -> Done<Arc<Self>> {
        let context = context::current()?;
        if handle == 0 {
            rule!(
                !capture::is_active_on_thread(),
                crate::codes::RT_CAPTURE_IMPLICIT,
                "default stream during a capture"
            );
            return Ok(context.default_stream());
        }
        let stream = STREAMS.get(handle, RT_INVALID_HANDLE)?;
        rule!(Arc::ptr_eq(&stream.context, &context), RT_STREAM_CONTEXT, "the stream belongs to another context");
        Ok(stream)
    }

    pub(crate) fn set_stop_on_failure(&self) {
        lock(&self.state).stops_on_failure = true;
    }

    pub(crate) fn capture(&self) -> Option<(Arc<Capture>, usize)> {
        lock(&self.state).capture.clone()
    }

    pub(crate) fn set_capture(&self, capture: Option<(Arc<Capture>, usize)>) {
        lock(&self.state).capture = capture;
    }

    /// Starts collecting tasks for a group.
    pub(crate) fn begin_update(&self, slots: Vec<Arc<TaskNode>>) -> Done {
        let mut state = lock(&self.state);
        rule!(state.update.is_none(), TASK_GROUP_STATUS, "an update is open on this stream");
        state.update = Some((slots, Vec::new()));
        Ok(())
    }

    /// Returns the collected tasks.
    pub(crate) fn end_update(&self) -> Done<Update> {
        match lock(&self.state).update.take() {
            Some(update) => Ok(update),
            None => fail!(TASK_GROUP_STATUS, "no update is open on this stream"),
        }
    }

    /// Submits work to the capture, the open update, or the queue.
    pub(crate) fn submit(&self, work: Work) -> Done {
        if let Some(fail) = self.context.stopped() {
            return Err(fail);
        }
        let mut state = lock(&self.state);
        if let Some((capture, lane)) = state.capture.clone() {
            drop(state);
            return capture.append(lane, work);
        }
        if let Some((_, issued)) = &mut state.update {
            match work {
                Work::Task(task) if task.is_op => issued.push(task),
                _ => fail!(TASK_GROUP_STATUS, "only operations may be issued in an update"),
            }
            return Ok(());
        }
        let issued_ns =
            task::host_works(if matches!(work, Work::Replay(_)) { Setting::replay_ns } else { Setting::launch_ns });
        state.queue.push_back((work, issued_ns));
        self.changed.notify_all();
        Ok(())
    }

    pub(crate) fn is_idle(&self) -> bool {
        let state = lock(&self.state);
        state.queue.is_empty() && !state.is_running
    }

    /// Waits on the host until all work is done, and returns the failure of that work.
    pub(crate) fn synchronize(&self, limit: Option<Duration>) -> Done {
        let start = Instant::now();
        let mut state = lock(&self.state);
        while !state.queue.is_empty() || state.is_running {
            if state.is_aborted {
                fail!(RT_STREAM_ABORT, "the stream was aborted");
            }
            if let Some(code) = control::is_lost() {
                fail!(code, "device lost");
            }
            if limit.is_some_and(|limit| start.elapsed() >= limit) {
                fail!(RT_STREAM_SYNC_TIMEOUT, "the stream has work left; it goes on");
            }
            let wait = self.changed.wait_timeout(state, Duration::from_millis(1));
            state = wait.unwrap_or_else(PoisonError::into_inner).0;
        }
        task::host_waits_until(state.clock_ns);
        // Queued work was skipped, so the caller must not take it as done.
        if let Some(code) = control::is_lost() {
            fail!(code, "device lost");
        }
        if let Some(fail) = self.context.stopped() {
            return Err(fail);
        }
        state.error.take().map_or(Ok(()), Err)
    }

    /// Waits until all work is done; failures are kept for the next synchronize.
    pub(crate) fn drain(&self) -> Done {
        while !self.is_idle() {
            self.pause()?;
        }
        Ok(())
    }

    /// Drops queued work and ends running work where possible.
    pub(crate) fn abort(&self) {
        let mut state = lock(&self.state);
        state.queue.clear();
        state.is_aborted = true;
        self.changed.notify_all();
        while state.is_running {
            let wait = self.changed.wait_timeout(state, Duration::from_millis(1));
            state = wait.unwrap_or_else(PoisonError::into_inner).0;
        }
        state.is_aborted = false;
    }

    /// Ends the thread; without `force`, after all queued work.
    pub(crate) fn close(&self, force: bool) {
        capture::abandon(self);
        if force {
            self.abort();
        }
        lock(&self.state).is_closing = true;
        self.changed.notify_all();
        let worker = lock(&self.worker).take();
        if let Some(worker) = worker {
            // A panic of the worker has already failed the test.
            drop(worker.join());
        }
    }

    fn run(&self) {
        let mut random = Random::new(Setting::seed.get().cast_unsigned() ^ (std::ptr::from_ref(self) as u64));
        loop {
            let mut state = lock(&self.state);
            let (work, issued_ns) = loop {
                if let Some(next) = state.queue.pop_front() {
                    break next;
                }
                if state.is_closing {
                    return;
                }
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            };
            state.is_running = true;
            let mut clock_ns = state.clock_ns.max(issued_ns);
            drop(state);
            random.delay();
            let result = if self.context.stopped().is_some() || control::is_lost().is_some() {
                Ok(())
            } else {
                self.perform(work, &mut clock_ns, &mut random)
            };
            let mut state = lock(&self.state);
            state.is_running = false;
            state.clock_ns = clock_ns;
            if let Err(fail) = result
                && !state.is_aborted
            {
                if state.stops_on_failure {
                    self.context.stop(&fail);
                }
                state.error = Some(fail);
            }
            self.changed.notify_all();
        }
    }

    fn perform(&self, work: Work, clock_ns: &mut u64, random: &mut Random) -> Done {
        match work {
            Work::Task(task) => self.perform_task(&task, clock_ns, Setting::task_ns),
            Work::Record(event, ticket) => {
                event.record(ticket, *clock_ns);
                Ok(())
            }
            Work::Wait(event, ticket) => {
                while !event.has_passed(ticket) {
                    self.pause()?;
                }
                *clock_ns = (*clock_ns).max(event.at_ns());
                Ok(())
            }
            Work::Reset(event) => {
                event.reset();
                Ok(())
            }
            Work::Replay(replay) => replay.graph.replay(self, clock_ns, random),
            Work::Update(tasks) => {
                for (slot, task) in tasks {
                    slot.put(task);
                }
                Ok(())
            }
        }
    }

    /// Runs a task on this stream's thread.
    pub(crate) fn perform_task(&self, task: &Task, clock_ns: &mut u64, start: Setting) -> Done {
        match task.fault {
            Some((Fault::Task, code)) => fail!(code, "{} failed on demand", task.name),
            Some((Fault::Hang, releases)) => self.hang(task.name, releases)?,
            _ => {}
        }
        if let Some(before) = &task.before {
            before(self, clock_ns)?;
        }
        (task.body)(&mut memory())?;
        let ns = start.size() + task.cost.ns();
        *clock_ns += ns;
        task::device_worked(ns, *clock_ns);
        Ok(())
    }

    /// Short sleep of a blocked task; fails if the stream was aborted or the device lost in the meantime.
    pub(crate) fn pause(&self) -> Done {
        std::thread::sleep(POLL);
        rule!(!lock(&self.state).is_aborted, RT_STREAM_ABORT, "the stream was aborted");
        if let Some(code) = control::is_lost() {
            fail!(code, "device lost");
        }
        if let Some(fail) = self.context.stopped() {
            return Err(fail);
        }
        Ok(())
    }

    /// Blocks until hanging tasks have been released more than `releases` times.
    fn hang(&self, name: &str, releases: i32) -> Done {
        let start = Instant::now();
        while control::releases() == releases {
            self.pause()?;
            let limit = Duration::from_secs(KERNEL_LIMIT_S.load(Ordering::Relaxed));
            rule!(start.elapsed() < limit, RT_AICORE_TIMEOUT, "{name} ran longer than {limit:?}");
        }
        Ok(())
    }
}

/// Unregisters a stream and ends it; without `force`, after its work.
pub(crate) fn destroy(handle: Handle, force: bool) -> Done {
    rule!(context::current_handle() != 0, RT_CONTEXT_NULL, "no context on this thread");
    let stream = Stream::from_handle(handle)?;
    STREAMS.remove(handle, RT_INVALID_HANDLE)?;
    stream.close(force);
    Ok(())
}

/// Ends streams without waiting for their work.
pub(crate) fn close_all(which: impl Fn(&Stream) -> bool) {
    for stream in STREAMS.drain(which) {
        stream.close(true);
    }
}

/// Waits for all streams of a device.
pub(crate) fn synchronize_device(device: i32, limit: Option<Duration>) -> Done {
    let mut first = Ok(());
    for stream in STREAMS.all().into_iter().filter(|stream| stream.context.device == device) {
        first = first.and(stream.synchronize(limit));
    }
    first
}
