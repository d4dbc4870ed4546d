//! Tasks that streams run: a body over device memory, with its modeled cost.

use crate::codes::Done;
use crate::control::Fault;
use crate::runtime::memory::DeviceMemory;
use crate::runtime::stream::Stream;
use crate::settings::Setting;
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Effect of a task on memory.
pub(crate) type Body = Arc<dyn Fn(&mut DeviceMemory) -> Done + Send + Sync>;

/// Wait before a task's body, on its stream's thread and without the memory lock; it may advance the modeled clock.
pub(crate) type Before = Arc<dyn Fn(&Stream, &mut u64) -> Done + Send + Sync>;

/// Amount of work of a task.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Cost {
    /// Bytes of device memory read and written.
    pub(crate) bytes: u64,
    /// Number of cube operations at f16 rate; int8 counts half.
    pub(crate) cube: u64,
    /// Number of vector operations.
    pub(crate) vector: u64,
    /// Bytes copied between host and device.
    pub(crate) host_bytes: u64,
    /// Bytes sent to another device, and the number of steps.
    pub(crate) link_bytes: u64,
    pub(crate) link_steps: u64,
}

impl Cost {
    /// Modeled nanoseconds: the slowest of the units that work in parallel.
    pub(crate) fn ns(self) -> u64 {
        let over = |amount: u64, per_ns: f64| if amount == 0 { 0.0 } else { amount as f64 / per_ns };
        let rate = |setting: Setting| setting.get().max(1) as f64;
        // GB/s are bytes per ns; TFLOP/s are 1000 operations per ns; GFLOP/s are operations per ns.
        let slowest = over(self.bytes, rate(Setting::hbm_gb_per_s))
            .max(over(self.cube, rate(Setting::cube_tflops) * 1e3))
            .max(over(self.vector, rate(Setting::vector_gflops)))
            .max(over(self.host_bytes, rate(Setting::pcie_gb_per_s)))
            .max(over(self.link_bytes, rate(Setting::link_gb_per_s)));
        #[allow(clippy::cast_possible_truncation)]
        let ns = slowest.ceil() as u64;
        ns + self.link_steps * Setting::link_ns.size()
    }
}

/// One task.
pub(crate) struct Task {
    pub(crate) name: &'static str,
    pub(crate) before: Option<Before>,
    pub(crate) body: Body,
    pub(crate) cost: Cost,
    pub(crate) fault: Option<(Fault, i32)>,
    /// Whether it is a single operation, which a task group may hold.
    pub(crate) is_op: bool,
    /// Size of its workspace.
    pub(crate) workspace_bytes: u64,
}

/// Modeled time of the most advanced host thread, in ns.
static HOST_NS: AtomicU64 = AtomicU64::new(0);
/// Number of resets of the clocks.
static RESETS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// Modeled time of this thread, and the number of resets it has seen: threads work in parallel. A new thread starts
    /// at the time of the most advanced one.
    static THREAD_NS: Cell<(u64, u64)> = const { Cell::new((0, u64::MAX)) };
}

fn thread_ns() -> u64 {
    match THREAD_NS.get() {
        (ns, resets) if resets == RESETS.load(Ordering::Relaxed) => ns,
        _ => HOST_NS.load(Ordering::Relaxed),
    }
}

fn set_thread_ns(ns: u64) {
    THREAD_NS.set((ns, RESETS.load(Ordering::Relaxed)));
    HOST_NS.fetch_max(ns, Ordering::Relaxed);
}
/// Total modeled time during which the devices were busy, in ns.
static BUSY_NS: AtomicU64 = AtomicU64::new(0);
/// Modeled time of the most advanced stream, in ns.
static DEVICE_NS: AtomicU64 = AtomicU64::new(0);

/// Advances the calling host thread by a setting's time; returns its new time.
pub(crate) fn host_works(setting: Setting) -> u64 {
    let ns = thread_ns() + setting.size();
    set_thread_ns(ns);
    ns
}

/// Advances the calling host thread to a time of the device.
pub(crate) fn host_waits_until(ns: u64) {
    set_thread_ns(thread_ns().max(ns));
}

/// Adds device work that ended at a given time.
pub(crate) fn device_worked(ns: u64, until: u64) {
    BUSY_NS.fetch_add(ns, Ordering::Relaxed);
    DEVICE_NS.fetch_max(until, Ordering::Relaxed);
}

/// Modelled (host, device, busy) time in ns.
pub(crate) fn clocks() -> (u64, u64, u64) {
    let read = |clock: &AtomicU64| clock.load(Ordering::Relaxed);
    (read(&HOST_NS), read(&DEVICE_NS), read(&BUSY_NS))
}

/// Sets all clocks to 0, for tests.
pub(crate) fn reset() {
    for clock in [&HOST_NS, &DEVICE_NS, &BUSY_NS] {
        clock.store(0, Ordering::Relaxed);
    }
    RESETS.fetch_add(1, Ordering::Relaxed);
}
