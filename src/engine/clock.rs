//! Time of the engine: an injected clock in microseconds.
//!
//! The loop reads no other clock, so a run with [`ManualClock`] is repeatable. Deadlines, ageing in the queue and all
//! times in [`Stats`](super::Stats) use this clock.

use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::scheduler::Tick;

/// Where the engine reads the time.
pub trait Clock: Send + Sync + Debug {
    /// Microseconds since a fixed moment. Never decreases.
    fn now(&self) -> Tick;
}

/// The monotonic clock of the machine.
#[derive(Clone, Copy, Debug)]
pub struct SystemClock {
    start: Instant,
}

impl SystemClock {
    /// A clock that starts now.
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

/// A clock that advances only on request; clones share the time.
#[derive(Clone, Debug, Default)]
pub struct ManualClock {
    now_us: Arc<AtomicU64>,
}

impl ManualClock {
    /// A clock at zero.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Moves the time on.
    pub fn advance(&self, by: Duration) {
        self.now_us.fetch_add(micros(by), Ordering::SeqCst);
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Tick {
        Tick(self.now_us.load(Ordering::SeqCst))
    }
}

/// A duration in whole microseconds; 584,000 years saturate.
pub(crate) fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// Microseconds from `from` to `to`; zero if `to` is earlier.
pub(crate) fn elapsed_us(from: Tick, to: Tick) -> u64 {
    to.0.saturating_sub(from.0)
}
