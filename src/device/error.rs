//! Errors of a device.

/// A failure that the caller could not have foreseen, or a broken contract.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// An allocation failed for lack of memory.
    #[error("out of {kind} memory: asked for {asked_bytes} bytes, {free_bytes} free")]
    OutOfMemory {
        /// Which memory.
        kind: &'static str,
        /// Requested bytes.
        asked_bytes: u64,
        /// Bytes free, as far as known.
        free_bytes: u64,
    },
    /// A call of the device's runtime failed.
    #[error("{call} failed with code {code}: {message}")]
    Call {
        /// The call.
        call: &'static str,
        /// The runtime's code.
        code: i32,
        /// The runtime's own words.
        message: String,
    },
    /// The caller broke the contract (another device's id, a span out of bounds, a binding too small).
    #[error("invalid use of the device: {what}")]
    Invalid {
        /// The reason.
        what: String,
    },
    /// Work that was queued did not end in time; nothing on the device can be used again.
    #[error("{call} did not end within {limit_us} us")]
    TimedOut {
        /// The call that timed out.
        call: &'static str,
        /// How long.
        limit_us: u64,
    },
    /// Work on the device crashed, or the device dropped out: nothing on it can be used again.
    #[error("device lost: {call} failed with code {code}: {message}")]
    Crashed {
        /// The call that reported the loss.
        call: &'static str,
        /// The runtime's code.
        code: i32,
        /// The runtime's own words.
        message: String,
    },
    /// The device is gone; nothing on it can be used again.
    #[error("device lost")]
    Lost,
}

impl DeviceError {
    /// Whether nothing on the device can be used again.
    pub const fn is_lost(&self) -> bool {
        matches!(self, Self::Lost | Self::Crashed { .. } | Self::TimedOut { .. })
    }
}
