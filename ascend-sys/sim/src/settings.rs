//! What a test can set, with defaults: the machine that is simulated, and the rates of the cost model.
//!
//! A setting is a name and a whole number. `ASCEND_SIM_<NAME>` in the environment, in capitals, sets one before the first
//! call.

use std::sync::atomic::{AtomicI64, Ordering};

macro_rules! settings {
    ($($(#[$doc:meta])* $name:ident: $default:expr,)*) => {
        /// Names in the order of [`Setting`].
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
    /// Devices of the host.
    devices: 1,
    /// Bytes of memory a device can give out. A 910B with 64 GB shows 60.9 GiB; the host must have what is computed with.
    hbm_bytes: 2 << 30,
    /// Most bytes that one allocation of device memory can have, as where what is free lies in pieces; 0 for any.
    largest_block_bytes: 0,
    /// Streams a device has, 1984 on a 910B; captured graphs take some.
    streams: 1984,
    /// Hardware events, 65536 on a 910B.
    events: 65536,
    /// CANN's version as `aclsysGetVersionNum` gives it: what operations accept depends on it.
    cann: 80_500_000,
    /// Whether the driver can update tasks of a captured graph (25.0.RC1 can).
    task_update: 1,
    /// Longest random delay before a task, in microseconds; 0 for none.
    delay_us: 0,
    /// Seed of the delays and of the order in which a replay walks independent branches.
    seed: 1,
    /// Whether kernels compute and memory is poisoned. Off, only rules and costs remain, and any size can be modelled.
    compute: 1,
    /// How long a rank waits for the others to join a communicator, in ms. The real library waits 120 s and 20 s more.
    join_limit_ms: 140_000,
    /// How long a rank waits for the others in a collective, in ms. 1836 s on a 910B (`HCCL_EXEC_TIMEOUT`).
    collective_limit_ms: 1_836_000,
    /// What the card says it draws, in 0.1 W.
    power_dw: 900,
    /// What the card says its AI cores run at.
    aicore_mhz: 1800,
    /// What the card says of its health: 0 well, 3 critical.
    health: 0,
    /// Whether calls are logged.
    log: 0,
    /// Entries the log keeps; older ones are dropped.
    log_entries: 1 << 16,

    /// Memory bandwidth in GB/s. Achievable on a 910B by Huawei's own analysis: 800 to 900.
    hbm_gb_per_s: 850,
    /// Cube rate at f16 and bf16 in TFLOP/s: 20 cores x 8192 FLOP x 1.8 GHz of a 910B3. int8 has twice as much.
    cube_tflops: 295,
    /// Vector rate in GFLOP/s. Assumed: 40 cores x 64 f32 lanes x 1.8 GHz.
    vector_gflops: 4608,
    /// Host time of an operation's first phase in ns. With the second a few to tens of microseconds.
    query_ns: 6000,
    /// Host time of an operation's second phase, a copy or an event, in ns.
    launch_ns: 4000,
    /// Host time of a graph's launch in ns. Assumed.
    replay_ns: 20_000,
    /// Host time of a task update beyond the launch itself, in ns. Updates cost more than plain launches; assumed.
    update_ns: 4000,
    /// Time a device needs to begin a task in ns. Assumed.
    task_ns: 2000,
    /// The same inside a replayed graph. Assumed.
    graph_task_ns: 1000,
    /// Bandwidth of copies between host and device in GB/s. Assumed: what a x16 slot of the fourth generation gives.
    pcie_gb_per_s: 24,
    /// Bandwidth of a ring of devices in GB/s: one HCCS link, one way. 392 GB/s a device are published for servers with
    /// eight; that is taken as both directions of seven links.
    link_gb_per_s: 28,
    /// Time a step of a ring takes at least, in ns. Assumed: with eight devices a small sum takes 21 us then.
    link_ns: 1500,
}

impl Setting {
    pub(crate) fn get(self) -> i64 {
        VALUES[self as usize].load(Ordering::Relaxed)
    }

    /// The value of a setting that is never negative.
    pub(crate) fn size(self) -> u64 {
        self.get().max(0).cast_unsigned()
    }
}

/// Sets by name; false if there is no such setting.
pub(crate) fn set(name: &str, value: i64) -> bool {
    let place = NAMES.iter().position(|known| *known == name);
    if let Some(place) = place {
        VALUES[place].store(value, Ordering::Relaxed);
    }
    place.is_some()
}

/// The present value by name; none if there is no such setting.
pub(crate) fn value(name: &str) -> Option<i64> {
    NAMES.iter().position(|known| *known == name).map(|place| VALUES[place].load(Ordering::Relaxed))
}

/// Defaults, then what the environment says.
pub(crate) fn reset() {
    for ((value, default), name) in VALUES.iter().zip(DEFAULTS).zip(NAMES) {
        let variable = format!("ASCEND_SIM_{}", name.to_uppercase());
        let given = std::env::var(variable).ok().and_then(|text| text.parse().ok());
        value.store(given.unwrap_or(*default), Ordering::Relaxed);
    }
}
