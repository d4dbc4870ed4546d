//! Streams and events: queues of work on a device, and what orders them.

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

/// A queue of work that runs in the order given. It is used while its own context is current.
///
/// Dropping it waits for its work; after a kernel has hung, [`Stream::abort`] first.
#[derive(Debug)]
pub struct Stream {
    context: Context,
    handle: AclrtStream,
}

// SAFETY: the handle may be used from any thread that has the context current.
unsafe impl Send for Stream {}
// SAFETY: as above; the runtime locks the queue.
unsafe impl Sync for Stream {}

impl Stream {
    /// A stream that stops its context at the first failure, where the install can do that: otherwise later work would run
    /// on garbage, and its errors hide the first one.
    pub fn new(context: &Context) -> Result<Self, AscendError> {
        let symbols = context.runtime().symbols();
        let mut handle = ptr::null_mut();
        let flags = ACL_STREAM_FAST_LAUNCH | ACL_STREAM_FAST_SYNC;
        // SAFETY: a valid place for a handle; the priority is reserved and 0.
        let code = unsafe { (symbols.aclrt_create_stream_with_config)(&raw mut handle, 0, flags) };
        context.runtime().check("aclrtCreateStreamWithConfig", code)?;
        let stream = Self { context: context.clone(), handle };
        if let Some(function) = symbols.aclrt_set_stream_failure_mode {
            // SAFETY: a live stream, set once.
            let code = unsafe { function(handle, ACL_STOP_ON_FAILURE) };
            context.runtime().check("aclrtSetStreamFailureMode", code)?;
        }
        Ok(stream)
    }

    /// The handle, for calls that are not wrapped.
    pub fn handle(&self) -> AclrtStream {
        self.handle
    }

    /// Its context.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// Waits until everything queued is done; failures of that work come out here. With a limit, expiry is an error of kind
    /// [`WaitTimeout`](crate::AscendErrorKind::WaitTimeout) and the work goes on.
    pub fn synchronize(&self, limit: Option<Duration>) -> Result<(), AscendError> {
        let symbols = self.context.runtime().symbols();
        let code = match limit {
            // SAFETY: a live stream.
            None => unsafe { (symbols.aclrt_synchronize_stream)(self.handle) },
            // SAFETY: a live stream and a number of milliseconds.
            Some(limit) => unsafe { (symbols.aclrt_synchronize_stream_with_timeout)(self.handle, millis(limit)) },
        };
        let call = if limit.is_some() { "aclrtSynchronizeStreamWithTimeout" } else { "aclrtSynchronizeStream" };
        self.context.runtime().check(call, code)
    }

    /// Ends the running task and drops the queued ones; whoever waits hears code 107023.
    pub fn abort(&self) -> Result<(), AscendError> {
        let runtime = self.context.runtime();
        let function = runtime.optional("aclrtStreamAbort", runtime.symbols().aclrt_stream_abort)?;
        // SAFETY: a live stream.
        runtime.check("aclrtStreamAbort", unsafe { function(self.handle) })
    }

    /// Marks the present end of the queue.
    pub fn record(&self, event: &Event) -> Result<(), AscendError> {
        // SAFETY: a live event and a live stream.
        let code = unsafe { (self.context.runtime().symbols().aclrt_record_event)(event.handle, self.handle) };
        self.context.runtime().check("aclrtRecordEvent", code)
    }

    /// Work queued from now on waits for the event's latest record; an ordering event never recorded holds nothing back.
    pub fn wait(&self, event: &Event) -> Result<(), AscendError> {
        // SAFETY: a live stream and a live event.
        let code = unsafe { (self.context.runtime().symbols().aclrt_stream_wait_event)(self.handle, event.handle) };
        self.context.runtime().check("aclrtStreamWaitEvent", code)
    }

    /// Re-arms an external event, behind the wait for it.
    pub fn reset(&self, event: &Event) -> Result<(), AscendError> {
        let runtime = self.context.runtime();
        let function = runtime.optional("aclrtResetEvent", runtime.symbols().aclrt_reset_event)?;
        // SAFETY: a live event and a live stream.
        runtime.check("aclrtResetEvent", unsafe { function(event.handle, self.handle) })
    }

    /// Queues a copy from pinned host memory.
    ///
    /// # Safety
    /// - `src` is pinned, with at least `bytes` bytes from there.
    /// - Nobody writes to them, and they are not freed, until the stream has passed the copy.
    pub unsafe fn copy_in(&self, dst: DeviceAddress, src: *const u8, bytes: usize) -> Result<(), AscendError> {
        // SAFETY: the caller's promise about the source; the destination is the device's to check.
        unsafe { self.copy(dst.as_ptr(), src.cast(), bytes, ACL_MEMCPY_HOST_TO_DEVICE) }
    }

    /// Queues a copy to pinned host memory.
    ///
    /// # Safety
    /// - `dst` is pinned, with room for `bytes` bytes.
    /// - Nobody reads or writes them, and they are not freed, until the stream has passed the copy.
    pub unsafe fn copy_out(&self, dst: *mut u8, src: DeviceAddress, bytes: usize) -> Result<(), AscendError> {
        // SAFETY: the caller's promise about the destination; the source is the device's to check.
        unsafe { self.copy(dst.cast(), src.as_ptr(), bytes, ACL_MEMCPY_DEVICE_TO_HOST) }
    }

    /// Queues a copy within the device.
    pub fn copy_within(&self, dst: DeviceAddress, src: DeviceAddress, bytes: usize) -> Result<(), AscendError> {
        // SAFETY: both ends are device addresses: a wrong one is a failure of the stream, not of the host.
        unsafe { self.copy(dst.as_ptr(), src.as_ptr(), bytes, ACL_MEMCPY_DEVICE_TO_DEVICE) }
    }

    /// # Safety
    /// Host ends are pinned, long enough, and left alone until the stream has passed the copy.
    unsafe fn copy(
        &self,
        dst: *mut std::ffi::c_void,
        src: *const std::ffi::c_void,
        bytes: usize,
        kind: i32,
    ) -> Result<(), AscendError> {
        let function = self.context.runtime().symbols().aclrt_memcpy_async;
        // SAFETY: the caller's promise.
        let code = unsafe { function(dst, bytes, src, bytes, kind, self.handle) };
        self.context.runtime().check("aclrtMemcpyAsync", code)
    }

    /// Queues a fill with one byte.
    pub fn fill(&self, dst: DeviceAddress, byte: u8, bytes: usize) -> Result<(), AscendError> {
        let function = self.context.runtime().symbols().aclrt_memset_async;
        // SAFETY: a device address: a wrong one is a failure of the stream, not of the host.
        let code = unsafe { function(dst.as_ptr(), bytes, i32::from(byte), bytes, self.handle) };
        self.context.runtime().check("aclrtMemsetAsync", code)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: made once, destroyed once, in its own context.
        self.context.destroy("aclrtDestroyStream", || unsafe {
            (self.context.runtime().symbols().aclrt_destroy_stream)(self.handle)
        });
    }
}

/// What an event is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// Orders streams and the host; may be recorded again, the latest record counts; complete before the first.
    Ordering,
    /// Carries a time as well.
    Timing,
    /// Crosses the border of a captured graph: a flag that [`Stream::record`] sets and [`Stream::reset`] clears.
    External,
}

/// A point in a stream's work.
#[derive(Debug)]
pub struct Event {
    context: Context,
    handle: AclrtEvent,
}

// SAFETY: the handle may be used from any thread that has the context current.
unsafe impl Send for Event {}
// SAFETY: as above; the runtime locks it.
unsafe impl Sync for Event {}

impl Event {
    /// A new event.
    pub fn new(context: &Context, kind: EventKind) -> Result<Self, AscendError> {
        let symbols = context.runtime().symbols();
        let mut handle = ptr::null_mut();
        let place = &raw mut handle;
        let (call, code) = match kind {
            // SAFETY: a valid place for a handle.
            EventKind::Ordering => ("aclrtCreateEventExWithFlag", unsafe {
                (symbols.aclrt_create_event_ex_with_flag)(place, ACL_EVENT_SYNC)
            }),
            // SAFETY: as above.
            EventKind::Timing => ("aclrtCreateEventExWithFlag", unsafe {
                (symbols.aclrt_create_event_ex_with_flag)(place, ACL_EVENT_SYNC | ACL_EVENT_TIME_LINE)
            }),
            // SAFETY: as above.
            EventKind::External => ("aclrtCreateEventWithFlag", unsafe {
                (symbols.aclrt_create_event_with_flag)(place, ACL_EVENT_EXTERNAL)
            }),
        };
        context.runtime().check(call, code)?;
        Ok(Self { context: context.clone(), handle })
    }

    /// Whether the recorded work is done.
    pub fn is_complete(&self) -> Result<bool, AscendError> {
        let mut status = 0;
        // SAFETY: a live event and a valid place for an enumeration.
        let code = unsafe { (self.context.runtime().symbols().aclrt_query_event_status)(self.handle, &raw mut status) };
        self.context.runtime().check("aclrtQueryEventStatus", code)?;
        Ok(status == ACL_EVENT_RECORDED_STATUS_COMPLETE)
    }

    /// Blocks the host until the recorded work is done. A limit works where the install has it (CANN 8.1).
    pub fn synchronize(&self, limit: Option<Duration>) -> Result<(), AscendError> {
        let runtime = self.context.runtime();
        match limit {
            None => {
                // SAFETY: a live event.
                let code = unsafe { (runtime.symbols().aclrt_synchronize_event)(self.handle) };
                runtime.check("aclrtSynchronizeEvent", code)
            }
            Some(limit) => {
                let call = "aclrtSynchronizeEventWithTimeout";
                let function = runtime.optional(call, runtime.symbols().aclrt_synchronize_event_with_timeout)?;
                // SAFETY: a live event and a number of milliseconds.
                runtime.check(call, unsafe { function(self.handle, millis(limit)) })
            }
        }
    }

    /// Time from an earlier timing event to this one. Synchronize first.
    pub fn since(&self, earlier: &Self) -> Result<Duration, AscendError> {
        let runtime = self.context.runtime();
        let function = runtime.optional("aclrtEventElapsedTime", runtime.symbols().aclrt_event_elapsed_time)?;
        let mut ms = 0.0f32;
        // SAFETY: a valid place for a float and two live events.
        let code = unsafe { function(&raw mut ms, earlier.handle, self.handle) };
        runtime.check("aclrtEventElapsedTime", code)?;
        Ok(Duration::from_secs_f64(f64::from(ms.max(0.0)) / 1e3))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made once, destroyed once; the runtime keeps what queued work still needs.
        self.context.destroy("aclrtDestroyEvent", || unsafe {
            (self.context.runtime().symbols().aclrt_destroy_event)(self.handle)
        });
    }
}

/// Whether the code says that the host's own wait ran out while the work goes on.
pub fn is_wait_timeout(error: &AscendError) -> bool {
    matches!(error.code, ACL_ERROR_RT_STREAM_SYNC_TIMEOUT | ACL_ERROR_RT_EVENT_SYNC_TIMEOUT)
}

/// Milliseconds for the C interface, where -1 is forever.
fn millis(limit: Duration) -> i32 {
    i32::try_from(limit.as_millis().max(1)).unwrap_or(i32::MAX)
}
