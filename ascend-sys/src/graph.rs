//! Graph capture: record the work of a stream once, replay it with one call, and update single tasks between replays.
//!
//! During a capture nothing runs, and a call that waits, queries, uses the default stream or copies from pageable
//! memory fails and invalidates the capture. A graph contains the device addresses of its operands: each buffer and
//! workspace that it uses must outlive the graph. A task group is a section of the captured work that can be issued
//! again with other arguments. [`TaskUpdate`] does that on another stream; external events order the update and the
//! replay.

#![allow(unsafe_code)]

use crate::abi::{
    ACL_MODEL_RI_CAPTURE_MODE_GLOBAL, ACL_MODEL_RI_CAPTURE_MODE_RELAXED, ACL_MODEL_RI_CAPTURE_MODE_THREAD_LOCAL,
    AclmdlRI, AclrtTaskGrp,
};
use crate::context::Context;
use crate::error::AscendError;
use crate::stream::Stream;
use std::ptr;

/// Threads that must not make calls which capture forbids.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CaptureMode {
    /// All threads of the process.
    Global,
    /// The capturing thread only: the mode to use if other threads call the runtime.
    #[default]
    ThreadLocal,
    /// No thread: calls are not checked.
    Relaxed,
}

/// Capture in progress. Dropping it ends the capture and discards the graph.
#[derive(Debug)]
pub struct Capture<'a> {
    stream: &'a Stream,
    is_open: bool,
}

impl<'a> Capture<'a> {
    /// Starts to capture the work queued on the stream.
    ///
    /// # Errors
    /// [`AscendError`] of kind [`Unsupported`](crate::AscendErrorKind::Unsupported) if the install lacks
    /// `aclmdlRICaptureBegin`; with the code of the call if it fails.
    pub fn begin(stream: &'a Stream, mode: CaptureMode) -> Result<Self, AscendError> {
        let runtime = stream.context().runtime();
        let function = runtime.optional("aclmdlRICaptureBegin", runtime.symbols().aclmdl_ri_capture_begin)?;
        let mode = match mode {
            CaptureMode::Global => ACL_MODEL_RI_CAPTURE_MODE_GLOBAL,
            CaptureMode::ThreadLocal => ACL_MODEL_RI_CAPTURE_MODE_THREAD_LOCAL,
            CaptureMode::Relaxed => ACL_MODEL_RI_CAPTURE_MODE_RELAXED,
        };
        // SAFETY: `stream` is alive, and it is not the default stream, because [`Stream`] creates all its handles.
        runtime.check("aclmdlRICaptureBegin", unsafe { function(stream.handle(), mode) })?;
        Ok(Self { stream, is_open: true })
    }

    /// Runs `issue`, and turns the tasks that it queues into a group that can be issued again.
    ///
    /// `issue` may queue only operations.
    ///
    /// # Errors
    /// [`AscendError`] of kind [`Unsupported`](crate::AscendErrorKind::Unsupported) if the install lacks
    /// `aclmdlRICaptureTaskGrpBegin` or `aclmdlRICaptureTaskGrpEnd`; the error of `issue`; with the code of the call if
    /// one of the two calls fails.
    pub fn group(&self, issue: impl FnOnce() -> Result<(), AscendError>) -> Result<TaskGroup, AscendError> {
        let runtime = self.stream.context().runtime();
        let symbols = runtime.symbols();
        let begin = runtime.optional("aclmdlRICaptureTaskGrpBegin", symbols.aclmdl_ri_capture_task_grp_begin)?;
        let end = runtime.optional("aclmdlRICaptureTaskGrpEnd", symbols.aclmdl_ri_capture_task_grp_end)?;
        // SAFETY: `self` borrows the stream, which is alive and in capture.
        runtime.check("aclmdlRICaptureTaskGrpBegin", unsafe { begin(self.stream.handle()) })?;
        let issued = issue();
        let mut handle = ptr::null_mut();
        // SAFETY: `self` borrows the stream, which is alive and has an open group.
        // SAFETY: `handle` is a local variable; the call writes one handle to it.
        let ended = runtime.check("aclmdlRICaptureTaskGrpEnd", unsafe { end(self.stream.handle(), &raw mut handle) });
        issued?;
        ended?;
        Ok(TaskGroup { handle })
    }

    /// Ends the capture and returns the graph.
    ///
    /// # Errors
    /// [`AscendError`] of kind [`Unsupported`](crate::AscendErrorKind::Unsupported) if the install lacks
    /// `aclmdlRICaptureEnd`; with the code of the call if it fails, e.g. because an earlier call invalidated the
    /// capture.
    pub fn end(mut self) -> Result<Graph, AscendError> {
        self.is_open = false;
        self.finish()
    }

    fn finish(&self) -> Result<Graph, AscendError> {
        let context = self.stream.context();
        let runtime = context.runtime();
        let function = runtime.optional("aclmdlRICaptureEnd", runtime.symbols().aclmdl_ri_capture_end)?;
        let mut handle = ptr::null_mut();
        // SAFETY: `self` borrows the stream, which is alive and in capture.
        // SAFETY: `handle` is a local variable; the call writes one handle to it.
        runtime.check("aclmdlRICaptureEnd", unsafe { function(self.stream.handle(), &raw mut handle) })?;
        Ok(Graph { context: context.clone(), handle })
    }
}

impl Drop for Capture<'_> {
    fn drop(&mut self) {
        if self.is_open {
            // The capture is dropped because an earlier call failed. An error of ending the capture is only a
            // consequence of that failure.
            drop(self.finish());
        }
    }
}

/// Captured graph.
#[derive(Debug)]
pub struct Graph {
    context: Context,
    handle: AclmdlRI,
}

// SAFETY: Any thread on which the context is current may use the handle.
unsafe impl Send for Graph {}

impl Graph {
    /// Queues a replay of the graph.
    ///
    /// # Errors
    /// [`AscendError`] of kind [`Unsupported`](crate::AscendErrorKind::Unsupported) if the install lacks
    /// `aclmdlRIExecuteAsync`; with the code of the call if it fails.
    pub fn launch(&self, stream: &Stream) -> Result<(), AscendError> {
        let runtime = self.context.runtime();
        let function = runtime.optional("aclmdlRIExecuteAsync", runtime.symbols().aclmdl_ri_execute_async)?;
        // SAFETY: `self` and `stream` keep the graph and the stream alive during the call.
        runtime.check("aclmdlRIExecuteAsync", unsafe { function(self.handle, stream.handle()) })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        self.context.destroy("aclmdlRIDestroy", || match self.context.runtime().symbols().aclmdl_ri_destroy {
            // SAFETY: The handle comes from a successful capture and is destroyed only here.
            Some(function) => unsafe { function(self.handle) },
            None => 0,
        });
    }
}

/// Group of tasks of a graph that can be issued again. It is valid as long as its graph and needs no destructor.
#[derive(Debug)]
pub struct TaskGroup {
    handle: AclrtTaskGrp,
}

// SAFETY: An update borrows the group exclusively, so only one thread at a time uses the handle.
unsafe impl Send for TaskGroup {}

/// Issues the tasks of a group again, on a separate stream.
#[derive(Debug)]
pub struct TaskUpdate;

impl TaskUpdate {
    /// Runs `issue`, which queues the operations of the group on `stream` again, with other lengths.
    ///
    /// `issue` must queue the same operations, in the same number, as the capture of the group did. The update itself
    /// is also queued: to order it with the replay, record an external event on `stream` after this call.
    ///
    /// # Errors
    /// [`AscendError`] of kind [`Unsupported`](crate::AscendErrorKind::Unsupported) if the install lacks
    /// `aclmdlRICaptureTaskUpdateBegin` or `aclmdlRICaptureTaskUpdateEnd`; the error of `issue`; with the code of the
    /// call if one of the two calls fails.
    pub fn run(
        stream: &Stream,
        group: &mut TaskGroup,
        issue: impl FnOnce() -> Result<(), AscendError>,
    ) -> Result<(), AscendError> {
        let runtime = stream.context().runtime();
        let symbols = runtime.symbols();
        let begin = runtime.optional("aclmdlRICaptureTaskUpdateBegin", symbols.aclmdl_ri_capture_task_update_begin)?;
        let end = runtime.optional("aclmdlRICaptureTaskUpdateEnd", symbols.aclmdl_ri_capture_task_update_end)?;
        // SAFETY: `stream` is alive.
        // SAFETY: The caller keeps the graph of the group alive, as the documentation of `TaskGroup` requires.
        runtime.check("aclmdlRICaptureTaskUpdateBegin", unsafe { begin(stream.handle(), group.handle) })?;
        let issued = issue();
        // SAFETY: `stream` is alive and has the update that was opened above.
        let ended = runtime.check("aclmdlRICaptureTaskUpdateEnd", unsafe { end(stream.handle()) });
        issued?;
        ended
    }
}
