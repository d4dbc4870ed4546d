//! If any call or task fails, a typed error is returned in time, nothing hangs, and nothing leaks.

#![allow(unsafe_code)]

use crate::common;
use crate::common::Rig;
use ElemType::F32;
use ascend_sys::{
    AscendError, AscendErrorKind, Capture, CaptureMode, Context, DeviceBuffer, ElemType, Event, EventKind, Graph,
    Library, Ops, Pages, PinnedBuffer, Runtime, Stream, TensorDesc,
};
use std::time::Duration;

/// A small workload: allocate, compute on two streams, copy, capture, replay.
fn life(runtime: &Runtime, ops: &Ops) -> Result<Vec<f32>, AscendError> {
    let context = Context::create(runtime, 0)?;
    let (stream, side) = (Stream::new(&context)?, Stream::new(&context)?);
    let buffer = DeviceBuffer::new(&context, 256, Pages::default())?;
    let pinned = PinnedBuffer::new(&context, 32)?;
    let event = Event::new(&context, EventKind::Ordering)?;
    let mut graph = None;
    let worked = work(ops, [&stream, &side], &buffer, &pinned, &event, &mut graph);
    if worked.is_err() {
        // Queued work must end before its memory is freed; its result is ignored.
        drop([stream.abort(), side.abort()]);
    }
    worked?;
    Ok(common::decode(F32, pinned.as_slice()))
}

fn work(
    ops: &Ops,
    [stream, side]: [&Stream; 2],
    buffer: &DeviceBuffer,
    pinned: &PinnedBuffer,
    event: &Event,
    graph: &mut Option<Graph>,
) -> Result<(), AscendError> {
    let desc = TensorDesc::new(buffer.address(), F32, &[8]);
    let double = |on: &Stream| ops.scale(&desc, 2.0, &desc)?.launch(buffer.address(), 0, on);
    buffer.write(0, &common::encode(F32, &[1.0; 8]))?;
    double(stream)?;
    stream.record(event)?;
    side.wait(event)?;
    double(side)?;
    side.synchronize(None)?;
    let capture = Capture::begin(stream, CaptureMode::ThreadLocal)?;
    double(stream)?;
    let graph = graph.insert(capture.end()?);
    graph.launch(stream)?;
    // SAFETY: the memory is pinned and stays unused until the stream is done or aborted.
    unsafe { stream.copy_out(pinned.as_ptr(), buffer.address(), 32) }?;
    stream.synchronize(Some(Duration::from_secs(10)))
}

#[test]
fn every_call_may_fail() {
    let _turn = common::turn();
    let sim = common::simulator();
    let library = Library::open(Some(sim.path())).expect("opens");
    let runtime = Runtime::load(&library).expect("loads");
    let ops = Ops::load(&library, &runtime);
    runtime.init().expect("init");
    let before = sim.count("*");
    assert_eq!(life(&runtime, &ops), Ok(vec![8.0; 8]));
    let calls = sim.count("*") - before;
    assert!(calls > 50, "{calls}");
    for n in 1..=calls {
        sim.reset();
        runtime.init().expect("init");
        sim.fail_call("*", n, 207_001);
        let result = life(&runtime, &ops);
        let told = runtime.take_drop_error();
        match (&result, &told) {
            (Ok(values), Some(error)) => {
                assert!(values == &[8.0; 8] && error.code == 207_001, "call {n}: {values:?}, {error}");
            }
            (Err(error), _) => assert!([207_001, -2].contains(&error.code), "call {n}: {error}"),
            // A descriptor that could not be destroyed is not reported.
            (Ok(values), None) => assert_eq!(values, &[8.0; 8], "call {n}"),
        }
        for sort in ["device_blocks", "pinned_blocks", "events", "graphs", "executors", "descriptors"] {
            assert_eq!(sim.live(sort), 0, "{sort} after the failure of call {n}: {result:?}");
        }
        assert_eq!(life(&runtime, &ops), Ok(vec![8.0; 8]), "usable again after call {n}");
    }
}

#[test]
fn a_crashed_kernel_stops_its_context_and_a_new_one_works() {
    let rig = Rig::new();
    let x = rig.tensor(F32, &[8], &[1.0; 8]);
    rig.sim.fail_task("aclnnSilu", 2, 507_015);
    for _ in 0..3 {
        let mut op = rig.ops.silu(&x.desc, &x.desc).expect("op");
        // The third call may already receive the error.
        if let Err(error) = op.launch(x.at(), 0, &rig.stream) {
            assert_eq!((error.code, error.kind), (507_015, AscendErrorKind::KernelException));
        }
    }
    let error = rig.stream.synchronize(None).expect_err("507015");
    assert_eq!(
        (error.call, error.code, error.kind),
        ("aclrtSynchronizeStream", 507_015, AscendErrorKind::KernelException)
    );
    let error = rig.stream.fill(x.at(), 0, 4).expect_err("no new work in this context");
    assert_eq!(error.code, 507_015);
    let fresh = Context::create(&rig.runtime, 0).expect("context");
    let stream = Stream::new(&fresh).expect("stream");
    rig.ops.silu(&x.desc, &x.desc).and_then(|mut op| op.launch(x.at(), 0, &stream)).expect("launch");
    stream.synchronize(None).expect("works");
}

#[test]
fn a_hung_kernel_ends_by_its_time_limit_or_an_abort() {
    let rig = Rig::new();
    let x = rig.tensor(F32, &[8], &[1.0; 8]);
    let launch = |stream: &Stream| rig.ops.silu(&x.desc, &x.desc).and_then(|mut op| op.launch(x.at(), 0, stream));
    rig.sim.hang_task("aclnnSilu", 1);
    launch(&rig.stream).expect("launch");
    let error = rig.stream.synchronize(Some(Duration::from_millis(20))).expect_err("hangs");
    assert_eq!(error.kind, AscendErrorKind::WaitTimeout);
    rig.stream.abort().expect("aborted");
    rig.stream.synchronize(None).expect("empty again");
    launch(&rig.stream).expect("usable again");
    rig.stream.synchronize(None).expect("done");

    rig.runtime.set_kernel_time_limit(Duration::from_secs(1)).expect("limit");
    rig.sim.hang_task("aclnnSilu", 1);
    launch(&rig.stream).expect("launch");
    let error = rig.stream.synchronize(None).expect_err("ran too long");
    assert_eq!((error.code, error.kind), (507_014, AscendErrorKind::KernelTimeout));
}

#[test]
fn a_lost_device_answers_every_call() {
    let rig = Rig::new();
    let buffer = rig.buffer(64);
    rig.sim.hang_task("aclrtMemsetAsync", 1);
    rig.stream.fill(buffer.address(), 0, 64).expect("queued");
    rig.sim.lose_device(507_899);
    let errors = [
        rig.stream.synchronize(None).expect_err("lost"),
        rig.stream.fill(buffer.address(), 0, 64).expect_err("lost"),
        Stream::new(&rig.context).expect_err("lost"),
    ];
    assert!(errors.iter().all(|error| error.kind == AscendErrorKind::DeviceLost), "{errors:?}");
    drop(buffer);
    assert_eq!(rig.runtime.take_drop_error().map(|error| error.kind), Some(AscendErrorKind::DeviceLost));
    assert_eq!(rig.sim.live("device_blocks"), 0, "what is given back is given back");
    // Ends hanging tasks: a device that is restored would let them continue to hang.
    rig.sim.reset();
}

#[test]
fn an_overflow_is_silent_and_the_finite_check_finds_it() {
    let rig = Rig::new();
    let (x, out) = (rig.tensor(F32, &[1, 8], &[1.0; 8]), rig.empty(F32, &[1, 8]));
    let (finite, all) = (rig.empty(ElemType::Bool, &[1, 8]), rig.empty(ElemType::Bool, &[1]));
    rig.sim.overflow_task("aclnnSilu", 1);
    for want in [0, 1] {
        rig.run(rig.ops.silu(&x.desc, &out.desc)).expect("a 910B reports nothing");
        rig.run(rig.ops.is_finite(&out.desc, &finite.desc)).expect("finite");
        rig.run(rig.ops.all(&finite.desc, &all.desc)).expect("all");
        assert_eq!(all.ints(), [want]);
    }
}

#[test]
fn calls_are_counted_and_logged() {
    let rig = Rig::new();
    rig.sim.set("log", 1);
    let before = rig.sim.count("aclrtMalloc");
    let buffer = rig.buffer(100);
    rig.stream.fill(buffer.address(), 0, 100).expect("fill");
    rig.sim.fail_call("aclrtSynchronizeStream", 1, 107_020);
    rig.stream.synchronize(None).expect_err("on demand");
    assert_eq!(rig.sim.count("aclrtMalloc") - before, 1);
    assert_eq!(
        rig.sim.log(),
        ["aclrtMalloc device 100 0", "aclrtMemsetAsync set 100 0", "aclrtSynchronizeStream - 0 107020"]
    );
    rig.sim.clear_log();
    assert!(rig.sim.log().is_empty());
}

#[test]
fn modelled_time_follows_bytes_and_operations() {
    let rig = Rig::with(|sim| {
        sim.set("compute", 0);
        sim.set("hbm_bytes", 8 << 30);
    });
    // A decode product with a 4096 x 11008 bf16 weight: 90 MB at 850 GB/s.
    let (k, n) = (4096, 11_008);
    let (x, w, out) =
        (rig.empty(ElemType::BF16, &[1, k]), rig.empty(ElemType::BF16, &[n, k]), rig.empty(ElemType::BF16, &[1, n]));
    rig.run(rig.ops.linear(&x.desc, &w.desc, None, &out.desc)).expect("linear");
    let busy = rig.sim.clock().busy.as_nanos();
    let bound = 2 * (k * n + k + n) as u128 / 850;
    assert_eq!(busy, bound + 1 + 2000, "the weight's bytes, rounded up, and the task's start");
    // A prefill product of 4096 rows is bound by the cube.
    let (x, out) = (rig.empty(ElemType::BF16, &[4096, k]), rig.empty(ElemType::BF16, &[4096, n]));
    rig.run(rig.ops.linear(&x.desc, &w.desc, None, &out.desc)).expect("linear");
    let busy = rig.sim.clock().busy.as_nanos() - busy;
    let bound = 2 * (4096 * k * n) as u128 / 295_000;
    assert!(busy.abs_diff(bound + 2000) <= 1, "{busy} beside {bound}");
    let clock = rig.sim.clock();
    assert!(clock.host >= clock.device, "the host has waited for the last");
}
