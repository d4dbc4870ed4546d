//! Settings and their defaults: the simulated machine, and the rates of the cost model.
//!
//! A setting is a name and an integer. An environment variable `ASCEND_SIM_<NAME>`, in capitals, sets one before the
//! first call.

use std::sync::atomic::{AtomicI64, Ordering};

macro_rules! settings {
    ($($(#[$doc:meta])* $name:ident: $default:expr,)*) => {
        /// Names of the settings, in the order of [`Setting`].
        const NAMES: &[&str] = &[$(stringify!($name)),*];
        const DEFAULTS: &[i64] = &[$($default),*];
        static VALUES: [AtomicI64; NAMES.len()] = [$(AtomicI64::new($default)),*];

        /// A setting.
        #[allow(non_camel_case_types)]
        #[derive(Clone, Copy, Debug)]
        pub(crate) enum Setting {
            $($(#[$doc])* $name,)*
        }
    };
}

settings! {
    /// Number of devices of the host.
    devices: 1,
    /// Device memory in bytes. A 910B with 64 GB reports 60.9 GiB; the host must have the memory that computations use.
    hbm_bytes: 2 << 30,
    /// Largest allocation of device memory in bytes, to simulate fragmentation; 0 for no limit.
    largest_block_bytes: 0,
    /// Number of streams of a device, 1984 on a 910B; captured graphs use some of them.
    streams: 1984,
    /// Number of hardware events, 65536 on a 910B.
    events: 65536,
    /// CANN version as returned by `aclsysGetVersionNum`; operations accept different arguments in different versions.
    cann: 80_500_000,
    /// Whether the driver can update tasks of a captured graph (25.0.RC1 can).
    task_update: 1,
    /// Longest random delay before a task, in microseconds; 0 for none.
    delay_us: 0,
    /// Seed of the delays and of the order in which a replay executes independent branches.
    seed: 1,
    /// Whether kernels compute and memory is poisoned. Without it only rules and costs remain, and any size can be
    /// modeled.
    compute: 1,
    /// Time limit for the other ranks to join a communicator, in ms. The real library waits 120 s and another 20 s.
    join_limit_ms: 140_000,
    /// Time limit for the other ranks in a collective, in ms. 1836 s on a 910B (`HCCL_EXEC_TIMEOUT`).
    collective_limit_ms: 1_836_000,
    /// Reported power, in 0.1 W.
    power_dw: 900,
    /// Reported frequency of the AI cores, in MHz.
    aicore_mhz: 1800,
    /// Reported health: 0 healthy, 3 critical.
    health: 0,
    /// Whether calls are logged.
    log: 0,
    /// Capacity of the log; older entries are dropped.
    log_entries: 1 << 16,

    /// Memory bandwidth in GB/s. Huawei's own analysis gives 800 to 900 as achievable on a 910B.
    hbm_gb_per_s: 850,
    /// Cube rate for f16 and bf16 in TFLOP/s: 20 cores x 8192 FLOP x 1.8 GHz of a 910B3. int8 has twice the rate.
    cube_tflops: 295,
    /// Vector rate in GFLOP/s. Assumed: 40 cores x 64 f32 lanes x 1.8 GHz.
    vector_gflops: 4608,
    /// Host time of an operation's first phase in ns. Both phases together take a few to tens of microseconds.
    query_ns: 6000,
    /// Host time of an operation's second phase, a copy or an event, in ns.
    launch_ns: 4000,
    /// Host time of a graph launch in ns. Assumed.
    replay_ns: 20_000,
    /// Host time of a task update in addition to the launch itself, in ns. Updates cost more than plain launches;
    /// assumed.
    update_ns: 4000,
    /// Time that a device needs to start a task, in ns. Assumed.
    task_ns: 2000,
    /// Time that a device needs to start a task of a replayed graph, in ns. Assumed.
    graph_task_ns: 1000,
    /// Bandwidth of copies between host and device in GB/s. Assumed: the rate of a `PCIe` 4.0 x16 slot.
    pcie_gb_per_s: 24,
    /// Bandwidth of a ring of devices in GB/s: one HCCS link, one direction. 392 GB/s per device are published for
    /// servers with eight devices; this is assumed to be both directions of seven links.
    link_gb_per_s: 28,
    /// Smallest time of a step of a ring, in ns. Assumed: with eight devices a small sum then takes 21 us.
    link_ns: 1500,
}

impl Setting {
    pub(crate) fn get(self) -> i64 {
        VALUES[self as usize].load(Ordering::Relaxed)
    }

    /// Value of a setting that is never negative.
    pub(crate) fn size(self) -> u64 {
        self.get().max(0).cast_unsigned()
    }
}

/// Sets a value by name; false if there is no such setting.
pub(crate) fn set(name: &str, value: i64) -> bool {
    let place = NAMES.iter().position(|known| *known == name);
    if let Some(place) = place {
        VALUES[place].store(value, Ordering::Relaxed);
    }
    place.is_some()
}

/// Value by name; `None` if there is no such setting.
pub(crate) fn value(name: &str) -> Option<i64> {
    NAMES.iter().position(|known| *known == name).map(|place| VALUES[place].load(Ordering::Relaxed))
}

/// Restores the defaults, then applies the environment.
pub(crate) fn reset() {
    for ((value, default), name) in VALUES.iter().zip(DEFAULTS).zip(NAMES) {
        let variable = format!("ASCEND_SIM_{}", name.to_uppercase());
        let given = std::env::var(variable).ok().and_then(|text| text.parse().ok());
        value.store(given.unwrap_or(*default), Ordering::Relaxed);
    }
}
