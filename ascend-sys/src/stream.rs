//! Streams and events: queues of work on a device, and the synchronization between them.

#![allow(unsafe_code)]

use crate::abi::{
    ACL_ERROR_RT_EVENT_SYNC_TIMEOUT, ACL_ERROR_RT_STREAM_SYNC_TIMEOUT, ACL_EVENT_EXTERNAL,
    ACL_EVENT_RECORDED_STATUS_COMPLETE, ACL_EVENT_SYNC, ACL_EVENT_TIME_LINE, ACL_MEMCPY_DEVICE_TO_DEVICE,
    ACL_MEMCPY_DEVICE_TO_HOST, ACL_MEMCPY_HOST_TO_DEVICE, ACL_STOP_ON_FAILURE, ACL_STREAM_FAST_LAUNCH,
    ACL_STREAM_FAST_SYNC, AclrtEvent, AclrtStream,
};
use crate::context::Context;
use crate::error::AscendError;
use crate::memory::DeviceAddress;
use std::ptr;
use std::time::Duration;

/// Queue of work that runs in order. Use it while its own context is current.
///
/// Dropping a stream waits for its work; if a kernel hangs, call [`Stream::abort`] first.
#[derive(Debug)]
pub struct Stream {
    context: Context,
    handle: AclrtStream,
}

// SAFETY: Any thread on which the context is current may use the handle.
unsafe impl Send for Stream {}
// SAFETY: The runtime locks the queue, so several threads may use the handle at the same time.
unsafe impl Sync for Stream {}

impl Stream {
    /// Creates a stream whose first failure stops its context, if the install supports that.
    ///
    /// Otherwise later work would run on invalid data, and its errors would hide the first one.
    ///
    /// # Errors
    /// [`AscendError`] if `aclrtCreateStreamWithConfig` or `aclrtSetStreamFailureMode` fails; of kind
    /// [`ResourceExhausted`](crate::AscendErrorKind::ResourceExhausted) if the device has no free stream.
    pub fn new(context: &Context) -> Result<Self, AscendError> {
        let symbols = context.runtime().symbols();
        let mut handle = ptr::null_mut();
        let flags = ACL_STREAM_FAST_LAUNCH | ACL_STREAM_FAST_SYNC;
        // SAFETY: `handle` is a local variable; the call writes one handle to it.
        // SAFETY: The priority is 0, the only value that the reserved argument allows.
        let code = unsafe { (symbols.aclrt_create_stream_with_config)(&raw mut handle, 0, flags) };
        context.runtime().check("aclrtCreateStreamWithConfig", code)?;
        let stream = Self { context: context.clone(), handle };
        if let Some(function) = symbols.aclrt_set_stream_failure_mode {
            // SAFETY: `handle` is the stream created above, and `stream` keeps it alive.
            let code = unsafe { function(handle, ACL_STOP_ON_FAILURE) };
            context.runtime().check("aclrtSetStreamFailureMode", code)?;
        }
        Ok(stream)
    }

    /// Returns the handle, for C functions that this crate does not wrap.
    pub fn handle(&self) -> AclrtStream {
        self.handle
    }

    /// Returns the context of the stream.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// Waits until all queued work is done, at most for `limit`.
    ///
    /// # Errors
    /// [`AscendError`] with the code of the first failure of that work; of kind
    /// [`WaitTimeout`](crate::AscendErrorKind::WaitTimeout) if `limit` expires, while the work continues.
    pub fn synchronize(&self, limit: Option<Duration>) -> Result<(), AscendError> {
        let symbols = self.context.runtime().symbols();
        let code = match limit {
            // SAFETY: `self` keeps the stream alive during the call.
            None => unsafe { (symbols.aclrt_synchronize_stream)(self.handle) },
            // SAFETY: `self` keeps the stream alive during the call; the time-out is an integer.
            Some(limit) => unsafe { (symbols.aclrt_synchronize_stream_with_timeout)(self.handle, millis(limit)) },
        };
        let call = if limit.is_some() { "aclrtSynchronizeStreamWithTimeout" } else { "aclrtSynchronizeStream" };
        self.context.runtime().check(call, code)
    }

    /// Aborts the running task and discards the queued ones. Calls that wait for the stream fail with code 107023.
    ///
    /// # Errors
    /// [`AscendError`] of kind [`Unsupported`](crate::AscendErrorKind::Unsupported) if the install lacks
    /// `aclrtStreamAbort`; with the code of the call if it fails.
    pub fn abort(&self) -> Result<(), AscendError> {
        let runtime = self.context.runtime();
        let function = runtime.optional("aclrtStreamAbort", runtime.symbols().aclrt_stream_abort)?;
        // SAFETY: `self` keeps the stream alive during the call.
        runtime.check("aclrtStreamAbort", unsafe { function(self.handle) })
    }

    /// Records the event at the current end of the queue.
    ///
    /// # Errors
    /// [`AscendError`] if `aclrtRecordEvent` fails.
    pub fn record(&self, event: &Event) -> Result<(), AscendError> {
        // SAFETY: `event` and `self` keep the event and the stream alive during the call.
        let code = unsafe { (self.context.runtime().symbols().aclrt_record_event)(event.handle, self.handle) };
        self.context.runtime().check("aclrtRecordEvent", code)
    }

    /// Makes work that is queued after this call wait for the latest record of the event.
    ///
    /// An ordering event that was never recorded does not block.
    ///
    /// # Errors
    /// [`AscendError`] if `aclrtStreamWaitEvent` fails.
    pub fn wait(&self, event: &Event) -> Result<(), AscendError> {
        // SAFETY: `self` and `event` keep the stream and the event alive during the call.
        let code = unsafe { (self.context.runtime().symbols().aclrt_stream_wait_event)(self.handle, event.handle) };
        self.context.runtime().check("aclrtStreamWaitEvent", code)
    }

    /// Queues the reset of an external event; queue it after the wait for that event.
    ///
    /// # Errors
    /// [`AscendError`] of kind [`Unsupported`](crate::AscendErrorKind::Unsupported) if the install lacks
    /// `aclrtResetEvent`; with the code of the call if it fails.
    pub fn reset(&self, event: &Event) -> Result<(), AscendError> {
        let runtime = self.context.runtime();
        let function = runtime.optional("aclrtResetEvent", runtime.symbols().aclrt_reset_event)?;
        // SAFETY: `event` and `self` keep the event and the stream alive during the call.
        runtime.check("aclrtResetEvent", unsafe { function(event.handle, self.handle) })
    }

    /// Queues a copy from pinned host memory.
    ///
    /// # Safety
    /// - `src` must point to at least `bytes` bytes of pinned memory.
    /// - No thread may write to these bytes or free them until the stream has executed the copy.
    ///
    /// # Errors
    /// [`AscendError`] if `aclrtMemcpyAsync` fails.
    pub unsafe fn copy_in(&self, dst: DeviceAddress, src: *const u8, bytes: usize) -> Result<(), AscendError> {
        // SAFETY: `src` points to `bytes` pinned bytes that stay unchanged until the copy is done, as the caller
        // guarantees.
        // SAFETY: The host does not access `dst`: a wrong device address makes the stream fail.
        unsafe { self.copy(dst.as_ptr(), src.cast(), bytes, ACL_MEMCPY_HOST_TO_DEVICE) }
    }

    /// Queues a copy to pinned host memory.
    ///
    /// # Safety
    /// - `dst` must point to at least `bytes` bytes of pinned memory.
    /// - No thread may read, write or free these bytes until the stream has executed the copy.
    ///
    /// # Errors
    /// [`AscendError`] if `aclrtMemcpyAsync` fails.
    pub unsafe fn copy_out(&self, dst: *mut u8, src: DeviceAddress, bytes: usize) -> Result<(), AscendError> {
        // SAFETY: `dst` points to `bytes` pinned bytes that are not accessed until the copy is done, as the caller
        // guarantees.
        // SAFETY: The host does not access `src`: a wrong device address makes the stream fail.
        unsafe { self.copy(dst.cast(), src.as_ptr(), bytes, ACL_MEMCPY_DEVICE_TO_HOST) }
    }

    /// Queues a copy within the device.
    ///
    /// # Errors
    /// [`AscendError`] if `aclrtMemcpyAsync` fails.
    pub fn copy_within(&self, dst: DeviceAddress, src: DeviceAddress, bytes: usize) -> Result<(), AscendError> {
        // SAFETY: Neither end is host memory; a wrong device address makes the stream fail, not the host.
        unsafe { self.copy(dst.as_ptr(), src.as_ptr(), bytes, ACL_MEMCPY_DEVICE_TO_DEVICE) }
    }

    /// # Safety
    /// A host end must be pinned and at least `bytes` long, and no thread may access it until the stream has executed
    /// the copy.
    unsafe fn copy(
        &self,
        dst: *mut std::ffi::c_void,
        src: *const std::ffi::c_void,
        bytes: usize,
        kind: i32,
    ) -> Result<(), AscendError> {
        let function = self.context.runtime().symbols().aclrt_memcpy_async;
        // SAFETY: A host end is pinned, long enough and not accessed until the copy is done, as the caller guarantees.
        // SAFETY: `self` keeps the stream alive during the call.
        let code = unsafe { function(dst, bytes, src, bytes, kind, self.handle) };
        self.context.runtime().check("aclrtMemcpyAsync", code)
    }

    /// Queues the setting of `bytes` bytes at `dst` to `byte`.
    ///
    /// # Errors
    /// [`AscendError`] if `aclrtMemsetAsync` fails.
    pub fn fill(&self, dst: DeviceAddress, byte: u8, bytes: usize) -> Result<(), AscendError> {
        let function = self.context.runtime().symbols().aclrt_memset_async;
        // SAFETY: The host does not access `dst`: a wrong device address makes the stream fail, not the host.
        // SAFETY: `self` keeps the stream alive during the call.
        let code = unsafe { function(dst.as_ptr(), bytes, i32::from(byte), bytes, self.handle) };
        self.context.runtime().check("aclrtMemsetAsync", code)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: The handle comes from a successful creation and is destroyed only here, with its context current.
        self.context.destroy("aclrtDestroyStream", || unsafe {
            (self.context.runtime().symbols().aclrt_destroy_stream)(self.handle)
        });
    }
}

/// Purpose of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// Orders streams and the host. It can be recorded again; only the latest record counts. Before its first record it
    /// is complete.
    Ordering,
    /// Orders like [`Ordering`](Self::Ordering), and also records a timestamp.
    Timing,
    /// Synchronizes a captured graph with work outside it: a flag that [`Stream::record`] sets and [`Stream::reset`]
    /// clears.
    External,
}

/// Marker of a position in a stream's queue.
#[derive(Debug)]
pub struct Event {
    context: Context,
    handle: AclrtEvent,
}

// SAFETY: Any thread on which the context is current may use the handle.
unsafe impl Send for Event {}
// SAFETY: The runtime locks the event, so several threads may use the handle at the same time.
unsafe impl Sync for Event {}

impl Event {
    /// Creates an event.
    ///
    /// # Errors
    /// [`AscendError`] if `aclrtCreateEventExWithFlag`, or `aclrtCreateEventWithFlag` for an external event, fails.
    pub fn new(context: &Context, kind: EventKind) -> Result<Self, AscendError> {
        let symbols = context.runtime().symbols();
        let mut handle = ptr::null_mut();
        let place = &raw mut handle;
        let (call, code) = match kind {
            // SAFETY: `place` points to a local variable; the call writes one handle to it.
            EventKind::Ordering => ("aclrtCreateEventExWithFlag", unsafe {
                (symbols.aclrt_create_event_ex_with_flag)(place, ACL_EVENT_SYNC)
            }),
            // SAFETY: `place` points to a local variable; the call writes one handle to it.
            EventKind::Timing => ("aclrtCreateEventExWithFlag", unsafe {
                (symbols.aclrt_create_event_ex_with_flag)(place, ACL_EVENT_SYNC | ACL_EVENT_TIME_LINE)
            }),
            // SAFETY: `place` points to a local variable; the call writes one handle to it.
            EventKind::External => ("aclrtCreateEventWithFlag", unsafe {
                (symbols.aclrt_create_event_with_flag)(place, ACL_EVENT_EXTERNAL)
            }),
        };
        context.runtime().check(call, code)?;
        Ok(Self { context: context.clone(), handle })
    }

    /// Returns whether the recorded work is complete.
    ///
    /// # Errors
    /// [`AscendError`] if `aclrtQueryEventStatus` fails.
    pub fn is_complete(&self) -> Result<bool, AscendError> {
        let mut status = 0;
        // SAFETY: `self` keeps the event alive during the call.
        // SAFETY: `status` is a local variable; the call writes one enumeration value to it.
        let code = unsafe { (self.context.runtime().symbols().aclrt_query_event_status)(self.handle, &raw mut status) };
        self.context.runtime().check("aclrtQueryEventStatus", code)?;
        Ok(status == ACL_EVENT_RECORDED_STATUS_COMPLETE)
    }

    /// Blocks the host until the recorded work is complete, at most for `limit`.
    ///
    /// A limit requires CANN 8.1.
    ///
    /// # Errors
    /// [`AscendError`] with the code of the call if it fails; of kind
    /// [`WaitTimeout`](crate::AscendErrorKind::WaitTimeout) if `limit` expires; of kind
    /// [`Unsupported`](crate::AscendErrorKind::Unsupported) if `limit` is set and the install lacks
    /// `aclrtSynchronizeEventWithTimeout`.
    pub fn synchronize(&self, limit: Option<Duration>) -> Result<(), AscendError> {
        let runtime = self.context.runtime();
        match limit {
            None => {
                // SAFETY: `self` keeps the event alive during the call.
                let code = unsafe { (runtime.symbols().aclrt_synchronize_event)(self.handle) };
                runtime.check("aclrtSynchronizeEvent", code)
            }
            Some(limit) => {
                let call = "aclrtSynchronizeEventWithTimeout";
                let function = runtime.optional(call, runtime.symbols().aclrt_synchronize_event_with_timeout)?;
                // SAFETY: `self` keeps the event alive during the call; the time-out is an integer.
                runtime.check(call, unsafe { function(self.handle, millis(limit)) })
            }
        }
    }

    /// Returns the time from an earlier timing event to this one. Synchronize with both events first.
    ///
    /// # Errors
    /// [`AscendError`] of kind [`Unsupported`](crate::AscendErrorKind::Unsupported) if the install lacks
    /// `aclrtEventElapsedTime`; with the code of the call if it fails, e.g. because an event was not recorded.
    pub fn since(&self, earlier: &Self) -> Result<Duration, AscendError> {
        let runtime = self.context.runtime();
        let function = runtime.optional("aclrtEventElapsedTime", runtime.symbols().aclrt_event_elapsed_time)?;
        let mut ms = 0.0f32;
        // SAFETY: `earlier` and `self` keep the events alive during the call.
        // SAFETY: `ms` is a local variable of type `float`; the call only writes to it.
        let code = unsafe { function(&raw mut ms, earlier.handle, self.handle) };
        runtime.check("aclrtEventElapsedTime", code)?;
        Ok(Duration::from_secs_f64(f64::from(ms.max(0.0)) / 1e3))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: The handle comes from a successful creation and is destroyed only here.
        // SAFETY: Queued work may still use the event: the runtime keeps the state that the work needs.
        self.context.destroy("aclrtDestroyEvent", || unsafe {
            (self.context.runtime().symbols().aclrt_destroy_event)(self.handle)
        });
    }
}

/// Returns whether the error means that the host's wait timed out while the work continues.
pub fn is_wait_timeout(error: &AscendError) -> bool {
    matches!(error.code, ACL_ERROR_RT_STREAM_SYNC_TIMEOUT | ACL_ERROR_RT_EVENT_SYNC_TIMEOUT)
}

/// Converts a time limit to milliseconds for the C interface, where -1 means no limit.
fn millis(limit: Duration) -> i32 {
    i32::try_from(limit.as_millis().max(1)).unwrap_or(i32::MAX)
}
