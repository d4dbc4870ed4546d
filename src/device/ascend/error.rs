//! Converts failures of the runtime to device errors, and keeps failures of queued work until they are reported.

#![forbid(unsafe_code)]

use std::time::Duration;

use ascend_sys::{AscendError, AscendErrorKind, Context};
use parking_lot::Mutex;

use crate::device::DeviceError;
use crate::graph::{ArenaTooLarge, CompileError};

/// Converts a failed call to the error of the device contract: retryable, or fatal for the device.
pub(super) fn device_error(error: AscendError, asked_bytes: u64, limit: Duration, context: &Context) -> DeviceError {
    match error.kind {
        // The runtime does not know the free memory of the host.
        AscendErrorKind::OutOfMemory if error.call == "aclrtMallocHost" => {
            DeviceError::OutOfMemory { kind: "pinned", asked_bytes, free_bytes: 0 }
        }
        AscendErrorKind::OutOfMemory => {
            DeviceError::OutOfMemory { kind: "device", asked_bytes, free_bytes: free_bytes(context) }
        }
        AscendErrorKind::WaitTimeout => {
            DeviceError::TimedOut { call: error.call, limit_us: u64::try_from(limit.as_micros()).unwrap_or(u64::MAX) }
        }
        AscendErrorKind::KernelTimeout
        | AscendErrorKind::KernelException
        | AscendErrorKind::DeviceLost
        | AscendErrorKind::HardwareMemory => {
            DeviceError::Crashed { call: error.call, code: error.code, message: error.message }
        }
        _ => DeviceError::Call { call: error.call, code: error.code, message: error.message },
    }
}

/// Free bytes of the card; 0 if it does not report them. Uses the context of the calling thread.
fn free_bytes(context: &Context) -> u64 {
    context.memory_bytes().map_or(0, |(free, _)| free)
}

/// Converts a failure while a program is loaded, on the card's thread.
pub(super) fn compile_error(op: &'static str, error: AscendError, bytes: u64, context: &Context) -> CompileError {
    match error.kind {
        AscendErrorKind::OutOfMemory => CompileError::Memory(ArenaTooLarge { bytes, free_bytes: free_bytes(context) }),
        AscendErrorKind::Refused | AscendErrorKind::Unsupported => {
            CompileError::Unsupported { op, reason: error.to_string() }
        }
        _ => CompileError::Device { reason: error.to_string() },
    }
}

/// The first unreported failure of queued work, and the failure that ended the device.
#[derive(Debug)]
pub(super) struct ErrorState {
    /// With several cards each failure is fatal: a card that has skipped work can no longer take part in collectives.
    each_is_fatal: bool,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    unreported: Option<DeviceError>,
    fatal: Option<DeviceError>,
}

impl ErrorState {
    pub(super) fn new(each_is_fatal: bool) -> Self {
        Self { each_is_fatal, state: Mutex::default() }
    }

    /// Records a failure of queued work; returns whether it ends the device.
    pub(super) fn note(&self, error: DeviceError) -> bool {
        let state = &mut *self.state.lock();
        let ends = self.each_is_fatal || error.is_lost();
        let kept = if ends { &mut state.fatal } else { &mut state.unreported };
        let is_first = kept.is_none();
        kept.get_or_insert(error);
        ends && is_first
    }

    /// The failure that ended the device, if it has ended.
    pub(super) fn fatal(&self) -> Option<DeviceError> {
        self.state.lock().fatal.clone()
    }

    /// Whether queued work has failed without a report: work queued after it must not use its results.
    pub(super) fn has_unreported(&self) -> bool {
        self.state.lock().unreported.is_some()
    }

    /// Whether the device still works.
    pub(super) fn check(&self) -> Result<(), DeviceError> {
        self.fatal().map_or(Ok(()), Err)
    }

    /// Returns the fatal failure, or the unreported failure of queued work, and clears the latter.
    pub(super) fn take(&self) -> Result<(), DeviceError> {
        let state = &mut *self.state.lock();
        state.fatal.clone().or_else(|| state.unreported.take()).map_or(Ok(()), Err)
    }
}
