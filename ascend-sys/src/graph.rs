//! Captured graphs: record a stream's work once, replay it with one call, refresh single tasks in between.
//!
//! While a stream is captured nothing runs, and whatever waits, queries, uses the default stream or copies from pageable
//! memory is an error that spoils the capture. Addresses are baked in: every buffer and workspace used must outlive the
//! graph. A task group is a stretch of the captured work that can be issued again with other arguments; [`TaskUpdate`]
//! does that on another stream, ordered against the replay by external events.

#![allow(unsafe_code)]

use crate::abi::{
    ACL_MODEL_RI_CAPTURE_MODE_GLOBAL, ACL_MODEL_RI_CAPTURE_MODE_RELAXED, ACL_MODEL_RI_CAPTURE_MODE_THREAD_LOCAL,
    AclmdlRI, AclrtTaskGrp,
};
use crate::context::Context;
use crate::error::AscendError;
use crate::stream::Stream;
use std::ptr;

/// Which threads must not call what capture forbids.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CaptureMode {
    /// All threads of the process.
    Global,
    /// The capturing thread: the one to use beside other threads.
    #[default]
    ThreadLocal,
    /// None.
    Relaxed,
}

/// A capture going on. Dropping it ends the capture and throws the result away.
#[derive(Debug)]
pub struct Capture<'a> {
    stream: &'a Stream,
    is_open: bool,
}

impl<'a> Capture<'a> {
    /// Starts capturing what is queued on the stream.
    pub fn begin(stream: &'a Stream, mode: CaptureMode) -> Result<Self, AscendError> {
        let runtime = stream.context().runtime();
        let function = runtime.optional("aclmdlRICaptureBegin", runtime.symbols().aclmdl_ri_capture_begin)?;
        let mode = match mode {
            CaptureMode::Global => ACL_MODEL_RI_CAPTURE_MODE_GLOBAL,
            CaptureMode::ThreadLocal => ACL_MODEL_RI_CAPTURE_MODE_THREAD_LOCAL,
            CaptureMode::Relaxed => ACL_MODEL_RI_CAPTURE_MODE_RELAXED,
        };
        // SAFETY: a live stream that is not the default one.
        runtime.check("aclmdlRICaptureBegin", unsafe { function(stream.handle(), mode) })?;
        Ok(Self { stream, is_open: true })
    }

    /// Runs `issue`, whose tasks become a group that can be issued again. Only operations may be issued there.
    pub fn group(&self, issue: impl FnOnce() -> Result<(), AscendError>) -> Result<TaskGroup, AscendError> {
        let runtime = self.stream.context().runtime();
        let symbols = runtime.symbols();
        let begin = runtime.optional("aclmdlRICaptureTaskGrpBegin", symbols.aclmdl_ri_capture_task_grp_begin)?;
        let end = runtime.optional("aclmdlRICaptureTaskGrpEnd", symbols.aclmdl_ri_capture_task_grp_end)?;
        // SAFETY: a live stream in capture.
        runtime.check("aclmdlRICaptureTaskGrpBegin", unsafe { begin(self.stream.handle()) })?;
        let issued = issue();
        let mut handle = ptr::null_mut();
        // SAFETY: a live stream with an open group, and a valid place for a handle.
        let ended = runtime.check("aclmdlRICaptureTaskGrpEnd", unsafe { end(self.stream.handle(), &raw mut handle) });
        issued?;
        ended?;
        Ok(TaskGroup { handle })
    }

    /// Ends the capture.
    pub fn end(mut self) -> Result<Graph, AscendError> {
        self.is_open = false;
        self.finish()
    }

    fn finish(&self) -> Result<Graph, AscendError> {
        let context = self.stream.context();
        let runtime = context.runtime();
        let function = runtime.optional("aclmdlRICaptureEnd", runtime.symbols().aclmdl_ri_capture_end)?;
        let mut handle = ptr::null_mut();
        // SAFETY: a live stream in capture, and a valid place for a handle.
        runtime.check("aclmdlRICaptureEnd", unsafe { function(self.stream.handle(), &raw mut handle) })?;
        Ok(Graph { context: context.clone(), handle })
    }
}

impl Drop for Capture<'_> {
    fn drop(&mut self) {
        if self.is_open {
            // The capture is given up because something failed already; that it ends with an error as well says nothing new.
            drop(self.finish());
        }
    }
}

/// A captured graph.
#[derive(Debug)]
pub struct Graph {
    context: Context,
    handle: AclmdlRI,
}

// SAFETY: the handle may be used from any thread that has the context current.
unsafe impl Send for Graph {}

impl Graph {
    /// Queues a replay.
    pub fn launch(&self, stream: &Stream) -> Result<(), AscendError> {
        let runtime = self.context.runtime();
        let function = runtime.optional("aclmdlRIExecuteAsync", runtime.symbols().aclmdl_ri_execute_async)?;
        // SAFETY: a live graph and a live stream.
        runtime.check("aclmdlRIExecuteAsync", unsafe { function(self.handle, stream.handle()) })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        self.context.destroy("aclmdlRIDestroy", || match self.context.runtime().symbols().aclmdl_ri_destroy {
            // SAFETY: captured once, destroyed once.
            Some(function) => unsafe { function(self.handle) },
            None => 0,
        });
    }
}

/// Tasks of a graph that can be issued again. Valid as long as its graph; it needs no destructor.
#[derive(Debug)]
pub struct TaskGroup {
    handle: AclrtTaskGrp,
}

// SAFETY: the handle is used by one update at a time, which borrows the group exclusively.
unsafe impl Send for TaskGroup {}

/// Issues a group's tasks again on a stream of its own.
#[derive(Debug)]
pub struct TaskUpdate;

impl TaskUpdate {
    /// Runs `issue`, which queues on `stream` the same operations in the same number as the group has, with other lengths.
    /// The update itself is queued: order it against the replay by an external event recorded on `stream` after it.
    pub fn run(
        stream: &Stream,
        group: &mut TaskGroup,
        issue: impl FnOnce() -> Result<(), AscendError>,
    ) -> Result<(), AscendError> {
        let runtime = stream.context().runtime();
        let symbols = runtime.symbols();
        let begin = runtime.optional("aclmdlRICaptureTaskUpdateBegin", symbols.aclmdl_ri_capture_task_update_begin)?;
        let end = runtime.optional("aclmdlRICaptureTaskUpdateEnd", symbols.aclmdl_ri_capture_task_update_end)?;
        // SAFETY: a live stream that is not captured, and the handle of a live graph's group.
        runtime.check("aclmdlRICaptureTaskUpdateBegin", unsafe { begin(stream.handle(), group.handle) })?;
        let issued = issue();
        // SAFETY: a live stream with an open update.
        let ended = runtime.check("aclmdlRICaptureTaskUpdateEnd", unsafe { end(stream.handle()) });
        issued?;
        ended
    }
}
