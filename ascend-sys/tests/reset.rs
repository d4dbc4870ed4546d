//! A reset leaves nothing behind, whatever has failed before; and memory of any size can be modeled.

#![allow(unsafe_code)]

mod common;

use ascend_sys::{
    AscendError, Context, DeviceBuffer, ElemType, Event, EventKind, Library, Ops, Pages, PinnedBuffer, Runtime, Stream,
    TensorDesc,
};
use std::time::Duration;

const SORTS: [&str; 10] = [
    "device_blocks",
    "device_bytes",
    "pinned_blocks",
    "pinned_bytes",
    "streams",
    "events",
    "contexts",
    "graphs",
    "executors",
    "descriptors",
];

/// Number of threads of this process, and its resident memory in bytes.
#[cfg(target_os = "linux")]
fn threads_and_bytes() -> (u64, u64) {
    let status = std::fs::read_to_string("/proc/self/status").expect("status");
    let field = |name: &str| {
        let line = status.lines().find(|line| line.starts_with(name)).expect("a field");
        line.split_whitespace().nth(1).and_then(|number| number.parse::<u64>().ok()).expect("a number")
    };
    (field("Threads:"), field("VmRSS:") << 10)
}

/// A small workload that waits for its result up to a limit.
fn small_work(runtime: &Runtime, ops: &Ops, limit: Duration) -> Result<(), AscendError> {
    runtime.init()?;
    let context = Context::create(runtime, 0)?;
    let (stream, side) = (Stream::new(&context)?, Stream::new(&context)?);
    let buffer = DeviceBuffer::new(&context, 4096, Pages::default())?;
    let pinned = PinnedBuffer::new(&context, 4096)?;
    let event = Event::new(&context, EventKind::Ordering)?;
    let work = || {
        let desc = TensorDesc::new(buffer.address(), ElemType::F32, &[512]);
        stream.fill(buffer.address(), 0, 4096)?;
        ops.silu(&desc, &desc)?.launch(buffer.address(), 0, &stream)?;
        stream.record(&event)?;
        side.wait(&event)?;
        // SAFETY: the memory is pinned and stays unused until the stream is done or aborted.
        unsafe { side.copy_out(pinned.as_ptr(), buffer.address(), 4096) }?;
        side.synchronize(Some(limit))
    };
    let result = work();
    if result.is_err() {
        drop([stream.abort(), side.abort()]);
    }
    result
}

#[test]
#[cfg(target_os = "linux")]
fn three_hundred_lives_with_faults_leave_nothing() {
    let _turn = common::turn();
    let sim = common::simulator();
    let library = Library::open(Some(sim.path())).expect("opens");
    let runtime = Runtime::load(&library).expect("loads");
    let ops = Ops::load(&library, &runtime);
    // Only the work that hangs reaches the short limit.
    let (short, long) = (Duration::from_millis(20), Duration::from_secs(60));
    let mut failures = 0;
    let mut after_warm_up = (0, 0);
    for run in 0..300u64 {
        match run % 4 {
            0 => sim.fail_call("*", 1 + run / 4, 507_899),
            1 => sim.fail_task("*", 1 + run / 4 % 4, 507_015),
            2 => sim.hang_task("*", 1 + run / 4 % 4),
            _ => {
                // Lose the device in the middle of the work, from another thread.
                std::thread::scope(|scope| {
                    scope.spawn(|| {
                        std::thread::sleep(Duration::from_micros(50 * (run % 16)));
                        sim.lose_device(507_899);
                    });
                    drop(small_work(&runtime, &ops, short));
                });
            }
        }
        if run % 4 != 3 {
            failures += u64::from(small_work(&runtime, &ops, short).is_err());
        }
        drop(runtime.take_drop_error());
        for sort in SORTS {
            // An injected fault may leave a handle whose descriptor could not be created or destroyed, or a context.
            let left = sim.live(sort);
            assert!(left == 0 || ["descriptors", "contexts"].contains(&sort), "run {run}: {left} {sort}");
        }
        sim.reset();
        for sort in SORTS {
            assert_eq!(sim.live(sort), 0, "run {run}: {sort} after the reset");
        }
        small_work(&runtime, &ops, long).expect("as good as new");
        assert_eq!(runtime.take_drop_error(), None, "run {run}");
        sim.reset();
        if run == 40 {
            after_warm_up = threads_and_bytes();
        }
    }
    assert!(failures > 100, "{failures}");
    let (threads, bytes) = threads_and_bytes();
    assert_eq!(threads, after_warm_up.0, "threads");
    assert!(bytes < after_warm_up.1 + (8 << 20), "{bytes} bytes, {} at the start", after_warm_up.1);
}

#[test]
fn what_a_lost_run_forgets_a_reset_finds() {
    let rig = common::Rig::new();
    let context = rig.context.clone();
    let stream = Stream::new(&context).expect("stream");
    let buffer = DeviceBuffer::new(&context, 64, Pages::default()).expect("memory");
    let pinned = PinnedBuffer::new(&context, 64).expect("pinned");
    rig.sim.hang_task("aclrtMemsetAsync", 1);
    stream.fill(buffer.address(), 0, 64).expect("queued");
    rig.sim.lose_device(507_899);
    std::mem::forget((stream, buffer));
    rig.sim.reset();
    for sort in SORTS {
        assert_eq!(rig.sim.live(sort), 0, "{sort}");
    }
    // Pinned memory that the test still holds stays valid and is freed by it.
    assert_eq!(pinned.as_slice(), [0; 64]);
    drop(pinned);
}

#[test]
#[cfg(target_os = "linux")]
fn a_model_of_seventy_billion_weights_needs_no_memory() {
    const DEVICES: u32 = 8;
    let _turn = common::turn();
    let sim = common::simulator();
    sim.set("devices", i64::from(DEVICES));
    sim.set("hbm_bytes", 64 << 30);
    sim.set("compute", 0);
    let library = Library::open(Some(sim.path())).expect("opens");
    let runtime = Runtime::load(&library).expect("loads");
    runtime.init().expect("init");
    let before = threads_and_bytes().1;
    let host = vec![7u8; 1 << 20];
    let mut kept = Vec::new();
    for device in 0..DEVICES {
        let context = Context::create(&runtime, device).expect("context");
        let stream = Stream::new(&context).expect("stream");
        for _ in 0..5 {
            let weights = DeviceBuffer::new(&context, 12 << 30, Pages::HugeFirst).expect("12 GiB");
            for at in [0, 1 << 30, (12 << 30) - host.len()] {
                weights.write(at, &host).expect("checked, not copied");
            }
            weights.fill(0).expect("checked, not filled");
            stream.fill(weights.address(), 1, 12 << 30).expect("queued");
            stream.copy_within(weights.address(), weights.address().offset(6 << 30), 6 << 30).expect("queued");
            kept.push(weights);
        }
        stream.synchronize(None).expect("done");
        let error = DeviceBuffer::new(&context, 8 << 30, Pages::HugeFirst).expect_err("60 of 64 GiB are in use");
        assert_eq!(error.kind, ascend_sys::AscendErrorKind::OutOfMemory);
        let mut read = [1u8; 64];
        kept[0].read(12 << 20, &mut read).expect("zeros");
        assert_eq!(read, [0; 64]);
    }
    let after = threads_and_bytes().1;
    assert!(after < before + (32 << 20), "{after} bytes, {before} before");
}

/// Settings can be read, and a reset restores them.
#[test]
fn settings_can_be_asked_for() {
    let _turn = common::turn();
    let sim = common::simulator();
    let before = sim.setting("task_ns");
    sim.set("task_ns", before + 5);
    assert_eq!(sim.setting("task_ns"), before + 5);
    sim.reset();
    assert_eq!(sim.setting("task_ns"), before);
    assert!(std::panic::catch_unwind(|| sim.setting("no_such_thing")).is_err());
}
