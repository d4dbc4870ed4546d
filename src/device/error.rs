//! Error type of a device.

/// Failure of a device call: a failure that the caller could not foresee, or a violation of the contract.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The device has too little free memory for an allocation.
    #[error("out of {kind} memory: requested {asked_bytes} bytes, but only {free_bytes} bytes are free")]
    OutOfMemory {
        /// Kind of memory.
        kind: &'static str,
        /// Number of requested bytes.
        asked_bytes: u64,
        /// Number of free bytes, as far as known.
        free_bytes: u64,
    },
    /// A call of the device's runtime failed.
    #[error("{call} failed with code {code}: {message}")]
    Call {
        /// Name of the call.
        call: &'static str,
        /// Error code of the runtime.
        code: i32,
        /// Error message of the runtime.
        message: String,
    },
    /// The caller violated the contract (another device's id, a span out of bounds, a binding too small).
    #[error("invalid use of the device: {what}")]
    Invalid {
        /// Description of the violation.
        what: String,
    },
    /// Queued work did not finish in time. No resource of the device can be used again.
    #[error("{call} did not finish within {limit_us} us")]
    TimedOut {
        /// Name of the call that waited.
        call: &'static str,
        /// Time limit in microseconds.
        limit_us: u64,
    },
    /// Work on the device crashed, or the device dropped out. No resource of the device can be used again.
    #[error("device lost: {call} failed with code {code}: {message}")]
    Crashed {
        /// Name of the call that returned the error.
        call: &'static str,
        /// Error code of the runtime.
        code: i32,
        /// Error message of the runtime.
        message: String,
    },
    /// The device is lost. No resource of the device can be used again.
    #[error("device lost")]
    Lost,
}

impl DeviceError {
    /// Returns whether the device is lost: no resource of it can be used again.
    pub const fn is_lost(&self) -> bool {
        matches!(self, Self::Lost | Self::Crashed { .. } | Self::TimedOut { .. })
    }
}
