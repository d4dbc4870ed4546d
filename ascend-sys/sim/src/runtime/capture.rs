//! Graph capture: work submitted to streams is recorded as branches of nodes; a replay executes the branches.
//!
//! A stream joins a capture by waiting for an event that was recorded in it; another stream of the capture must wait
//! for it before the capture ends. A replay executes the branches' nodes in a random order that their marks allow. Task
//! groups hold the nodes whose tasks can be replaced.

use crate::codes::{
    Done, Fail, RT_CAPTURE_DEPENDENCY, RT_CAPTURE_INVALIDATED, RT_CAPTURE_MODE, RT_CAPTURE_WRONG_THREAD,
    RT_EVENT_CAPTURED, RT_FEATURE_NOT_SUPPORTED, RT_INVALID_HANDLE, RT_MODEL_RUNNING, RT_NO_STREAM, RT_PARAM_INVALID,
    RT_STREAM_CAPTURED, RT_STREAM_NOT_CAPTURED, RT_STREAM_UNJOINED, RT_TASK_TYPE_NOT_SUPPORTED, RT_UPDATE_FAILED,
    TASK_GROUP_STATUS, fail, rule,
};
use crate::random::Random;
use crate::registry::{Handle, Registry, lock};
use crate::runtime::event::{Event, Kind};
use crate::runtime::stream::{STREAMS, Stream, Work};
use crate::runtime::task;
use crate::runtime::task::Task;
use crate::settings::Setting;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::ThreadId;

pub(crate) static GRAPHS: Registry<Graph> = Registry::new("graph");
pub(crate) static GROUPS: Registry<Vec<Arc<TaskNode>>> = Registry::new("task group");

/// Active captures.
static ACTIVE: Mutex<Vec<Arc<Capture>>> = Mutex::new(Vec::new());
static NEXT_ID: AtomicUsize = AtomicUsize::new(1);

/// `aclmdlRICaptureMode`.
const GLOBAL: i32 = 0;
const THREAD_LOCAL: i32 = 1;
const RELAXED: i32 = 2;

/// A node of a graph whose task an update may replace.
pub(crate) struct TaskNode {
    task: Mutex<Arc<Task>>,
    /// Workspace at capture: the largest that an update may use.
    workspace_bytes: u64,
}

impl TaskNode {
    pub(crate) fn put(&self, task: Arc<Task>) {
        *lock(&self.task) = task;
    }

    fn get(&self) -> Arc<Task> {
        lock(&self.task).clone()
    }
}

enum Node {
    Run(Arc<TaskNode>),
    /// Records a captured event, or waits for it.
    Mark(usize),
    Await(usize),
    /// External events keep their meaning in every replay.
    SetFlag(Arc<Event>),
    AwaitFlag(Arc<Event>),
    ClearFlag(Arc<Event>),
}

pub(crate) struct Capture {
    id: usize,
    mode: i32,
    thread: ThreadId,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    lanes: Vec<Vec<Node>>,
    marks: usize,
    awaited: Vec<usize>,
    /// Failure that invalidated the capture.
    spoilt: Option<Fail>,
    /// Nodes of the open task group, and its branch.
    group: Option<(usize, Vec<Arc<TaskNode>>)>,
}

impl Capture {
    fn spoil(&self, fail: &Fail) {
        lock(&self.inner).spoilt.get_or_insert_with(|| fail.clone());
    }

    /// Invalidates the capture with a failure and returns it.
    pub(crate) fn spoil_with(&self, code: i32, message: &str) -> Fail {
        let fail = Fail::new(code, message);
        self.spoil(&fail);
        fail
    }

    /// Records work in a branch.
    pub(crate) fn append(self: &Arc<Self>, lane: usize, work: Work) -> Done {
        let result = self.try_append(lane, work);
        if let Err(fail) = &result {
            self.spoil(fail);
        }
        result
    }

    fn try_append(&self, lane: usize, work: Work) -> Done {
        let mut inner = lock(&self.inner);
        let inner = &mut *inner;
        let node = match work {
            Work::Task(task) => {
                let is_op = task.is_op;
                let slot = Arc::new(TaskNode { workspace_bytes: task.workspace_bytes, task: Mutex::new(task) });
                if let Some((_, slots)) = inner.group.as_mut().filter(|(of, _)| *of == lane) {
                    rule!(is_op, RT_TASK_TYPE_NOT_SUPPORTED, "a task group holds single operations only");
                    slots.push(slot.clone());
                }
                Node::Run(slot)
            }
            Work::Record(event, _) if event.kind == Kind::Counting => {
                event.set_captured(self.id, inner.marks);
                inner.marks += 1;
                Node::Mark(inner.marks - 1)
            }
            Work::Record(event, _) => Node::SetFlag(event),
            Work::Wait(event, ticket) => match event.captured() {
                Some((id, mark)) if id == self.id => {
                    inner.awaited.push(mark);
                    Node::Await(mark)
                }
                _ if event.kind != Kind::Counting => Node::AwaitFlag(event),
                None if ticket == 0 => return Ok(()),
                _ => fail!(RT_CAPTURE_DEPENDENCY, "waits for an event recorded outside the capture"),
            },
            Work::Reset(event) => Node::ClearFlag(event),
            Work::Replay(_) | Work::Update(_) => fail!(RT_STREAM_CAPTURED, "graphs are not launched in a capture"),
        };
        inner.lanes[lane].push(node);
        Ok(())
    }
}

/// Starts capturing a stream.
pub(crate) fn begin(stream: &Arc<Stream>, mode: i32) -> Done {
    rule!((GLOBAL..=RELAXED).contains(&mode), RT_PARAM_INVALID, "capture mode {mode}");
    rule!(stream.capture().is_none(), RT_STREAM_CAPTURED, "the stream is being captured already");
    let used = STREAMS.len() as u64 + streams_used();
    rule!(used < Setting::streams.size(), RT_NO_STREAM, "a graph needs a stream, and all {used} are in use");
    let capture = Arc::new(Capture {
        id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
        mode,
        thread: std::thread::current().id(),
        inner: Mutex::new(Inner { lanes: vec![Vec::new()], ..Inner::default() }),
    });
    lock(&ACTIVE).push(capture.clone());
    stream.set_capture(Some((capture, 0)));
    Ok(())
}

/// Ends a capture; its streams leave capture mode whether it succeeds or not.
pub(crate) fn end(stream: &Arc<Stream>) -> Done<Handle> {
    let Some((capture, lane)) = stream.capture() else {
        fail!(RT_STREAM_NOT_CAPTURED, "the stream is not being captured");
    };
    let is_own_thread = capture.mode == RELAXED || capture.thread == std::thread::current().id();
    rule!(is_own_thread, RT_CAPTURE_WRONG_THREAD, "a capture ends on the thread that began it");
    rule!(lane == 0, RT_STREAM_CAPTURED, "a capture ends on the stream it began on");
    lock(&ACTIVE).retain(|active| active.id != capture.id);
    for joined in STREAMS.all() {
        if joined.capture().is_some_and(|(of, _)| of.id == capture.id) {
            joined.set_capture(None);
        }
    }
    let inner = std::mem::take(&mut *lock(&capture.inner));
    if let Some(fail) = inner.spoilt {
        fail!(RT_CAPTURE_INVALIDATED, "the capture was spoilt: {}", fail.message);
    }
    rule!(inner.group.is_none(), TASK_GROUP_STATUS, "a task group is still open");
    for lane in &inner.lanes[1..] {
        let is_joined = matches!(lane.last(), Some(Node::Mark(mark)) if inner.awaited.contains(mark));
        rule!(is_joined, RT_STREAM_UNJOINED, "a side stream was not joined again");
    }
    let graph = Graph { lanes: inner.lanes, marks: inner.marks, running: AtomicUsize::new(0) };
    Ok(GRAPHS.add(Arc::new(graph)))
}

/// Ends the capture of a stream that is destroyed.
pub(crate) fn abandon(stream: &Stream) {
    if let Some((capture, _)) = stream.capture() {
        lock(&ACTIVE).retain(|active| active.id != capture.id);
    }
}

/// Adds a stream that waits for a captured event to the capture.
pub(crate) fn join(stream: &Stream, event: &Event) -> Done {
    let Some((id, _)) = event.captured() else { return Ok(()) };
    if stream.capture().is_some() {
        return Ok(());
    }
    let capture = lock(&ACTIVE).iter().find(|capture| capture.id == id).cloned();
    let Some(capture) = capture else {
        fail!(RT_EVENT_CAPTURED, "the event was recorded in a capture that has ended");
    };
    let lane = {
        let mut inner = lock(&capture.inner);
        inner.lanes.push(Vec::new());
        inner.lanes.len() - 1
    };
    stream.set_capture(Some((capture, lane)));
    Ok(())
}

/// Refuses operations that are forbidden during any capture: blocking copies, synchronization, queries. A refused call
/// invalidates the capture.
pub(crate) fn forbid(what: &str) -> Done {
    let thread = std::thread::current().id();
    let forbids = |capture: &&Arc<Capture>| match capture.mode {
        GLOBAL => true,
        THREAD_LOCAL => capture.thread == thread,
        _ => false,
    };
    let capture = lock(&ACTIVE).iter().find(forbids).cloned();
    if let Some(capture) = capture {
        let fail = Fail::new(RT_CAPTURE_MODE, format!("{what} during a capture"));
        capture.spoil(&fail);
        return Err(fail);
    }
    Ok(())
}

/// Refuses to wait for or query a captured stream.
pub(crate) fn forbid_on(stream: &Stream, what: &str) -> Done {
    if let Some((capture, _)) = stream.capture() {
        let fail = Fail::new(RT_STREAM_CAPTURED, format!("{what} of a stream in capture"));
        capture.spoil(&fail);
        return Err(fail);
    }
    forbid(what)
}

/// Refuses to wait for or query an event that was recorded in a capture.
pub(crate) fn forbid_event(event: &Event, what: &str) -> Done {
    if let Some((id, _)) = event.captured() {
        let fail = Fail::new(RT_EVENT_CAPTURED, format!("{what} of an event recorded in a capture"));
        if let Some(capture) = lock(&ACTIVE).iter().find(|capture| capture.id == id) {
            capture.spoil(&fail);
        }
        return Err(fail);
    }
    forbid(what)
}

/// Whether this thread has an active capture.
pub(crate) fn is_active_on_thread() -> bool {
    let thread = std::thread::current().id();
    lock(&ACTIVE).iter().any(|capture| capture.thread == thread)
}

/// 0 not capturing, 1 capturing, 2 invalidated.
pub(crate) fn status(stream: &Stream) -> i32 {
    stream.capture().map_or(0, |(capture, _)| if lock(&capture.inner).spoilt.is_some() { 2 } else { 1 })
}

/// Opens a task group.
pub(crate) fn begin_group(stream: &Stream) -> Done {
    let Some((capture, lane)) = stream.capture() else {
        fail!(RT_STREAM_NOT_CAPTURED, "task groups exist in captures only");
    };
    let mut inner = lock(&capture.inner);
    rule!(inner.group.is_none(), TASK_GROUP_STATUS, "a task group is open already");
    inner.group = Some((lane, Vec::new()));
    Ok(())
}

/// Closes the task group and returns its handle.
pub(crate) fn end_group(stream: &Stream) -> Done<Handle> {
    let Some((capture, _)) = stream.capture() else {
        fail!(RT_STREAM_NOT_CAPTURED, "task groups exist in captures only");
    };
    let group = lock(&capture.inner).group.take();
    match group {
        Some((_, slots)) => Ok(GROUPS.add(Arc::new(slots))),
        None => fail!(TASK_GROUP_STATUS, "no task group is open"),
    }
}

pub(crate) fn begin_update(stream: &Stream, group: Handle) -> Done {
    rule!(Setting::task_update.get() != 0, RT_FEATURE_NOT_SUPPORTED, "the driver is too old for task updates");
    rule!(stream.capture().is_none(), RT_STREAM_CAPTURED, "updates are issued on a stream that is not captured");
    stream.begin_update(GROUPS.get(group, RT_INVALID_HANDLE)?.to_vec())
}

/// Queues the update once the same operations have been issued again.
pub(crate) fn end_update(stream: &Stream) -> Done {
    let (slots, tasks) = stream.end_update()?;
    rule!(slots.len() == tasks.len(), RT_UPDATE_FAILED, "{} tasks for a group of {}", tasks.len(), slots.len());
    for (slot, task) in slots.iter().zip(&tasks) {
        let old = slot.get();
        rule!(old.name == task.name, RT_UPDATE_FAILED, "{} in the place of {}", task.name, old.name);
        rule!(
            task.workspace_bytes <= slot.workspace_bytes,
            RT_UPDATE_FAILED,
            "{} needs a workspace of {} bytes; {} were captured",
            task.name,
            task.workspace_bytes,
            slot.workspace_bytes
        );
    }
    task::host_works(Setting::update_ns);
    stream.submit(Work::Update(slots.into_iter().zip(tasks).collect()))
}

/// Number of streams that captured graphs use.
pub(crate) fn streams_used() -> u64 {
    GRAPHS.all().iter().map(|graph| graph.lanes.len() as u64).sum()
}

pub(crate) struct Graph {
    lanes: Vec<Vec<Node>>,
    marks: usize,
    /// Number of queued or running replays.
    running: AtomicUsize,
}

/// A replay that is queued or running.
pub(crate) struct Replay {
    pub(crate) graph: Arc<Graph>,
}

impl Replay {
    pub(crate) fn from_handle(graph: Handle) -> Done<Self> {
        let graph = GRAPHS.get(graph, RT_INVALID_HANDLE)?;
        graph.running.fetch_add(1, Ordering::Relaxed);
        Ok(Self { graph })
    }
}

impl Drop for Replay {
    fn drop(&mut self) {
        self.graph.running.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Destroys a graph that is not in use.
pub(crate) fn destroy(graph: Handle) -> Done {
    let running = GRAPHS.get(graph, RT_INVALID_HANDLE)?.running.load(Ordering::Relaxed);
    rule!(running == 0, RT_MODEL_RUNNING, "the graph has {running} replays queued or running");
    GRAPHS.remove(graph, RT_INVALID_HANDLE).map(drop)
}

impl Graph {
    /// Executes the branches. Each has a modeled clock of its own, starting at the launch; the stream continues after
    /// the last.
    pub(crate) fn replay(&self, on: &Stream, clock_ns: &mut u64, random: &mut Random) -> Done {
        let mut reached: Vec<Option<u64>> = vec![None; self.marks];
        let mut at = vec![0; self.lanes.len()];
        let mut clocks = vec![*clock_ns; self.lanes.len()];
        loop {
            let can_go = |lane: usize| match self.lanes[lane].get(at[lane]) {
                None => false,
                Some(Node::Await(mark)) => reached[*mark].is_some(),
                Some(Node::AwaitFlag(event)) => event.has_passed(0),
                Some(_) => true,
            };
            let ready: Vec<usize> = (0..self.lanes.len()).filter(|&lane| can_go(lane)).collect();
            if ready.is_empty() {
                if (0..self.lanes.len()).all(|lane| at[lane] == self.lanes[lane].len()) {
                    *clock_ns = clocks.into_iter().fold(*clock_ns, u64::max);
                    return Ok(());
                }
                on.pause()?;
                continue;
            }
            let lane = ready[random.below(ready.len())];
            match &self.lanes[lane][at[lane]] {
                Node::Run(slot) => {
                    random.delay();
                    on.perform_task(&slot.get(), &mut clocks[lane], Setting::graph_task_ns)?;
                }
                Node::Mark(mark) => reached[*mark] = Some(clocks[lane]),
                Node::Await(mark) => clocks[lane] = clocks[lane].max(reached[*mark].unwrap_or(0)),
                Node::SetFlag(event) => event.record(event.latest(), clocks[lane]),
                Node::AwaitFlag(event) => clocks[lane] = clocks[lane].max(event.at_ns()),
                Node::ClearFlag(event) => event.reset(),
            }
            at[lane] += 1;
        }
    }
}

/// Resets the state, for tests.
pub(crate) fn reset() {
    lock(&ACTIVE).clear();
    GRAPHS.clear();
    GROUPS.clear();
}
