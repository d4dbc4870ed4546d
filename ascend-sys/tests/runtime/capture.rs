//! A captured graph replays the recorded work, task updates replace single operations in order, and the rules of
//! capture are enforced.

#![allow(unsafe_code)]

use crate::common;
use crate::common::{Rig, noise};
use ElemType::{BF16, F32, I32};
use ascend_sys::{
    AscendError, AscendErrorKind, Attention, Capture, CaptureMode, DeviceBuffer, ElemType, Event, EventKind, Mask,
    PinnedBuffer, QueryLayout, Stream, TaskUpdate, TensorDesc,
};

#[test]
fn nothing_runs_until_the_replay_and_then_every_time() {
    let rig = Rig::new();
    let (x, one) = (rig.tensor(F32, &[8], &[1.0; 8]), rig.tensor(F32, &[8], &[1.0; 8]));
    let capture = Capture::begin(&rig.stream, CaptureMode::ThreadLocal).expect("begin");
    let mut op = rig.ops.add(&x.desc, &one.desc, &x.desc).expect("op");
    op.launch(one.at(), 0, &rig.stream).expect("captured");
    let graph = capture.end().expect("end");
    rig.stream.synchronize(None).expect("nothing queued");
    assert_eq!(x.values(), [1.0; 8]);
    for _ in 0..3 {
        graph.launch(&rig.stream).expect("replay");
    }
    rig.stream.synchronize(None).expect("done");
    assert_eq!(x.values(), [4.0; 8]);
    drop((op, graph));
    assert_eq!((rig.sim.live("graphs"), rig.sim.live("executors")), (0, 0));
}

#[test]
fn side_streams_join_by_events_and_must_come_back() {
    for seed in 1..=10 {
        let rig = Rig::with(|sim| {
            sim.set("delay_us", 50);
            sim.set("seed", seed);
        });
        let side = Stream::new(&rig.context).expect("stream");
        let (fork, join) = (
            Event::new(&rig.context, EventKind::Ordering).expect("event"),
            Event::new(&rig.context, EventKind::Ordering).expect("event"),
        );
        let (x, y) = (rig.tensor(F32, &[8], &[1.0; 8]), rig.tensor(F32, &[8], &[0.0; 8]));
        let scale = |from: &common::Tensor, to: &common::Tensor, on: &Stream| {
            let mut op = rig.ops.scale(&from.desc, 2.0, &to.desc)?;
            op.launch(from.at(), 0, on)
        };
        let capture = Capture::begin(&rig.stream, CaptureMode::ThreadLocal).expect("begin");
        scale(&x, &x, &rig.stream).expect("main");
        rig.stream.record(&fork).expect("record");
        side.wait(&fork).expect("joins");
        scale(&x, &y, &side).expect("side");
        side.record(&join).expect("record");
        rig.stream.wait(&join).expect("comes back");
        scale(&y, &x, &rig.stream).expect("main");
        let graph = capture.end().expect("end");
        graph.launch(&rig.stream).expect("replay");
        rig.stream.synchronize(None).expect("done");
        assert_eq!(x.values(), [8.0; 8], "seed {seed}");

        let capture = Capture::begin(&rig.stream, CaptureMode::ThreadLocal).expect("begin");
        rig.stream.record(&fork).expect("record");
        side.wait(&fork).expect("joins");
        scale(&x, &y, &side).expect("side");
        assert_eq!(capture.end().expect_err("lost a stream").code, 107_025);
    }
}

#[test]
fn what_capture_forbids_spoils_it() {
    let rig = Rig::new();
    let buffer = rig.buffer(64);
    let pageable = [0u8; 64];
    type Forbidden<'a> = (&'a str, Box<dyn Fn() -> Result<(), AscendError> + 'a>);
    let event = Event::new(&rig.context, EventKind::Ordering).expect("event");
    let forbidden: Vec<Forbidden<'_>> = vec![
        ("synchronize", Box::new(|| rig.stream.synchronize(None))),
        ("device", Box::new(|| rig.context.synchronize())),
        ("blocking copy", Box::new(|| buffer.write(0, &pageable))),
        ("blocking fill", Box::new(|| buffer.fill(0))),
        ("event query", Box::new(|| event.is_complete().map(drop))),
        // SAFETY: refused before any memory is read.
        ("pageable copy", Box::new(|| unsafe { rig.stream.copy_in(buffer.address(), pageable.as_ptr(), 64) })),
    ];
    for (what, call) in &forbidden {
        let capture = Capture::begin(&rig.stream, CaptureMode::ThreadLocal).expect("begin");
        let error = call().expect_err(what);
        assert_eq!(error.kind, AscendErrorKind::Capture, "{what}: {error}");
        assert_eq!(capture.end().expect_err(what).code, 507_903, "{what}");
        call().unwrap_or_else(|error| panic!("{what} afterwards: {error}"));
    }
    let capture = Capture::begin(&rig.stream, CaptureMode::ThreadLocal).expect("begin");
    assert_eq!(Capture::begin(&rig.stream, CaptureMode::ThreadLocal).expect_err("twice").code, 107_027);
    drop(capture);
    rig.stream.synchronize(None).expect("a dropped capture leaves the stream usable");
}

#[test]
fn another_threads_copy_spoils_a_global_capture_only() {
    let rig = Rig::new();
    let buffer = rig.buffer(64);
    for (mode, is_free) in
        [(CaptureMode::Global, false), (CaptureMode::ThreadLocal, true), (CaptureMode::Relaxed, true)]
    {
        let capture = Capture::begin(&rig.stream, mode).expect("begin");
        let (context, buffer): (_, &DeviceBuffer) = (rig.context.clone(), &buffer);
        let copied = std::thread::scope(|scope| {
            let copy = scope.spawn(move || {
                context.bind().expect("bound");
                buffer.write(0, &[1; 64]).is_ok()
            });
            copy.join().expect("no panic")
        });
        assert_eq!((copied, capture.end().is_ok()), (is_free, is_free), "{mode:?}");
    }
}

#[test]
fn pinned_copies_are_captured_and_read_their_memory_at_each_replay() {
    let rig = Rig::new();
    let device = rig.buffer(64);
    let mut pinned = PinnedBuffer::new(&rig.context, 64).expect("pinned");
    let capture = Capture::begin(&rig.stream, CaptureMode::ThreadLocal).expect("begin");
    // SAFETY: the memory is pinned and stays unchanged while a replay runs.
    unsafe { rig.stream.copy_in(device.address(), pinned.as_ptr(), 64) }.expect("captured");
    let graph = capture.end().expect("end");
    for value in [1u8, 2] {
        pinned.as_mut_slice().fill(value);
        graph.launch(&rig.stream).expect("replay");
        rig.stream.synchronize(None).expect("done");
        let mut bytes = [0; 64];
        device.read(0, &mut bytes).expect("read");
        assert_eq!(bytes, [value; 64]);
    }
}

/// Attention of one decode step over a cache of growing length, captured once.
struct Decode<'a> {
    rig: &'a Rig,
    query: common::Tensor,
    cache: common::Tensor,
    table: common::Tensor,
    out: common::Tensor,
    workspace: DeviceBuffer,
}

const HEADS: usize = 2;
const HEAD: usize = 64;
const MOST: usize = 100;

impl<'a> Decode<'a> {
    fn new(rig: &'a Rig) -> Self {
        let row = HEADS * HEAD;
        Self {
            rig,
            query: rig.tensor(BF16, &[1, 1, HEADS, HEAD], &noise(BF16, row, 1)),
            cache: rig.tensor(BF16, &[1, 128, row], &noise(BF16, 128 * row, 2)),
            table: rig.ints(I32, &[0]),
            out: rig.empty(BF16, &[1, 1, HEADS, HEAD]),
            workspace: rig.buffer(1 << 20),
        }
    }

    fn issue(&self, keys: usize, workspace_bytes: usize, on: &Stream) -> Result<(), AscendError> {
        let table = TensorDesc::new(self.table.at(), I32, &[1, 1]);
        let shape = Attention {
            layout: QueryLayout::Padded,
            query_ends: &[],
            kv_lens: &[keys as i64],
            heads: HEADS,
            kv_heads: HEADS,
            scale: 0.125,
            mask: Mask::Full,
            block_size: 128,
        };
        let mut op = self.rig.ops.attention(
            &self.query.desc,
            &self.cache.desc,
            &self.cache.desc,
            None,
            &table,
            &self.out.desc,
            &shape,
        )?;
        let bytes = if workspace_bytes == 0 { op.workspace_bytes() } else { workspace_bytes };
        op.launch(self.workspace.address(), bytes, on)
    }

    fn eager(&self, keys: usize) -> Vec<u8> {
        self.issue(keys, 0, &self.rig.stream).expect("eager");
        self.rig.stream.synchronize(None).expect("done");
        self.out.bytes()
    }
}

#[test]
fn lengths_are_refreshed_by_task_updates_in_order() {
    for seed in 1..=10 {
        let rig = Rig::with(|sim| {
            sim.set("delay_us", 100);
            sim.set("seed", seed);
        });
        let decode = Decode::new(&rig);
        let updates = Stream::new(&rig.context).expect("stream");
        let want: Vec<Vec<u8>> = [MOST, 3, 40, 41].map(|keys| decode.eager(keys)).into();
        let refreshed = Event::new(&rig.context, EventKind::External).expect("event");
        let capture = Capture::begin(&rig.stream, CaptureMode::ThreadLocal).expect("begin");
        rig.stream.wait(&refreshed).expect("captured");
        rig.stream.reset(&refreshed).expect("captured");
        let mut group = capture.group(|| decode.issue(MOST, 0, &rig.stream)).expect("group");
        let graph = capture.end().expect("end");
        for (keys, want) in [MOST, 3, 40, 41].into_iter().zip(&want) {
            // The replay is queued first and waits for its update.
            graph.launch(&rig.stream).expect("replay");
            TaskUpdate::run(&updates, &mut group, || decode.issue(keys, 0, &updates)).expect("update");
            updates.record(&refreshed).expect("record");
            rig.stream.synchronize(None).expect("done");
            assert_eq!(&decode.out.bytes(), want, "seed {seed}, {keys} keys");
        }
    }
}

#[test]
fn an_update_without_its_event_is_a_race() {
    let mut stale = 0;
    for seed in 1..=20 {
        let rig = Rig::with(|sim| {
            sim.set("delay_us", 300);
            sim.set("seed", seed);
        });
        let decode = Decode::new(&rig);
        let updates = Stream::new(&rig.context).expect("stream");
        let want = decode.eager(3);
        let capture = Capture::begin(&rig.stream, CaptureMode::ThreadLocal).expect("begin");
        let mut group = capture.group(|| decode.issue(MOST, 0, &rig.stream)).expect("group");
        let graph = capture.end().expect("end");
        TaskUpdate::run(&updates, &mut group, || decode.issue(3, 0, &updates)).expect("update");
        graph.launch(&rig.stream).expect("replay");
        rig.context.synchronize().expect("done");
        stale += usize::from(decode.out.bytes() != want);
    }
    assert!(stale > 0, "no replay was ahead of its update");
}

#[test]
fn updates_must_match_what_was_captured() {
    let rig = Rig::new();
    let decode = Decode::new(&rig);
    let updates = Stream::new(&rig.context).expect("stream");
    let capture = Capture::begin(&rig.stream, CaptureMode::ThreadLocal).expect("begin");
    let mut group = capture.group(|| decode.issue(10, 0, &rig.stream)).expect("group");
    let _graph = capture.end().expect("end");
    let failed = |result: Result<(), AscendError>| result.expect_err("refused").code;
    assert_eq!(failed(TaskUpdate::run(&updates, &mut group, || Ok(()))), 107_040, "too few");
    let silu = || rig.ops.silu(&decode.query.desc, &decode.out.desc)?.launch(decode.workspace.address(), 0, &updates);
    assert_eq!(failed(TaskUpdate::run(&updates, &mut group, silu)), 107_040, "another operation");
    let longer = || decode.issue(MOST, 0, &updates);
    assert_eq!(failed(TaskUpdate::run(&updates, &mut group, longer)), 107_040, "a larger workspace than captured");
    TaskUpdate::run(&updates, &mut group, || decode.issue(5, 0, &updates)).expect("shorter is fine");

    rig.sim.set("task_update", 0);
    let error = TaskUpdate::run(&updates, &mut group, || Ok(())).expect_err("an old driver");
    assert_eq!((error.code, error.kind), (207_000, AscendErrorKind::Unsupported));

    let capture = Capture::begin(&rig.stream, CaptureMode::ThreadLocal).expect("begin");
    let error = capture.group(|| rig.stream.fill(decode.workspace.address(), 0, 64)).expect_err("not an operation");
    assert_eq!(error.code, 507_009);
}

#[test]
fn captures_take_streams_and_running_graphs_stay() {
    let rig = Rig::with(|sim| sim.set("streams", 2));
    let x = rig.tensor(F32, &[8], &[1.0; 8]);
    let capture = Capture::begin(&rig.stream, CaptureMode::ThreadLocal).expect("begin");
    rig.ops.silu(&x.desc, &x.desc).and_then(|mut op| op.launch(x.at(), 0, &rig.stream)).expect("captured");
    let graph = capture.end().expect("end");
    let error = Capture::begin(&rig.stream, CaptureMode::ThreadLocal).expect_err("no stream left");
    assert_eq!((error.code, error.kind), (207_008, AscendErrorKind::ResourceExhausted));
    graph.launch(&rig.stream).expect("replay");
    rig.stream.synchronize(None).expect("done");
    drop(graph);
    Capture::begin(&rig.stream, CaptureMode::ThreadLocal).expect("a stream is free again");
}
