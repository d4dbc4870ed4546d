//! Time source of the engine: an injected clock that counts microseconds.
//!
//! The loop reads no other clock, so all runs under [`ManualClock`] are the same. Deadlines, ageing in the queue and
//! all times in [`Stats`](super::Stats) use this clock.

use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::scheduler::Tick;

/// Time source of an engine.
pub trait Clock: Send + Sync + Debug {
    /// Returns the microseconds since a fixed moment; the value never decreases.
    fn now(&self) -> Tick;
}

/// Monotonic clock of the machine.
#[derive(Clone, Copy, Debug)]
pub struct SystemClock {
    start: Instant,
}

impl SystemClock {
    /// Creates a clock that starts now.
    #[must_use]
    pub fn new() -> Self {
        Self { start: Instant::now() }
    }
}

impl Default for SystemClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for SystemClock {
    fn now(&self) -> Tick {
        Tick(micros(self.start.elapsed()))
    }
}

/// Clock that changes only when [`advance`](Self::advance) is called; clones share the time.
#[derive(Clone, Debug, Default)]
pub struct ManualClock {
    now_us: Arc<AtomicU64>,
}

impl ManualClock {
    /// Creates a clock at zero.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Advances the time.
    pub fn advance(&self, by: Duration) {
        self.now_us.fetch_add(micros(by), Ordering::SeqCst);
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Tick {
        Tick(self.now_us.load(Ordering::SeqCst))
    }
}

/// Converts a duration to whole microseconds; saturates (after 584,000 years).
pub(crate) fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// Returns the microseconds from `from` to `to`, or 0 if `to` is earlier.
pub(crate) fn elapsed_us(from: Tick, to: Tick) -> u64 {
    to.0.saturating_sub(from.0)
}
