//! How long the host waits for queued work, and early termination of a wait.

#![forbid(unsafe_code)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use ascend_sys::{AscendError, AscendErrorKind, SHIM_MISUSE};

use crate::device::ascend::error::ErrorState;

/// Interval at which a waiting card checks whether another one has failed.
pub(crate) const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Time limit for waits of one card.
#[derive(Clone, Debug)]
pub(crate) struct WaitPolicy {
    pub limit: Duration,
    /// Error state of the other cards, if there are several: a collective that waits for a failed card never completes.
    others: Option<Arc<ErrorState>>,
}

impl WaitPolicy {
    pub(crate) fn new(limit: Duration, others: Option<Arc<ErrorState>>) -> Self {
        Self { limit, others }
    }

    /// Waits with `wait`, which receives the time it may take.
    pub(crate) fn wait(&self, wait: impl Fn(Duration) -> Result<(), AscendError>) -> Result<(), AscendError> {
        let Some(errors) = &self.others else { return wait(self.limit) };
        let start = Instant::now();
        loop {
            if errors.fatal().is_some() {
                return Err(peer_failed());
            }
            let left = self.limit.saturating_sub(start.elapsed());
            match wait(left.clamp(Duration::from_millis(1), POLL_INTERVAL)) {
                Err(error) if error.kind == AscendErrorKind::WaitTimeout && start.elapsed() < self.limit => {}
                other => return other,
            }
        }
    }
}

/// Error of a card whose peer has failed; callers receive the peer's failure.
pub(crate) fn peer_failed() -> AscendError {
    AscendError {
        call: "aclrtSynchronizeStream",
        code: SHIM_MISUSE,
        kind: AscendErrorKind::WaitTimeout,
        message: "another card of the device has failed".into(),
    }
}
