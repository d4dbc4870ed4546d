//! Streams are independent queues, so a missing event gives wrong data under delays, and an event prevents that.

#![allow(unsafe_code)]

use crate::common::Rig;
use ElemType::F32;
use ascend_sys::{AscendErrorKind, ElemType, Event, EventKind, PinnedBuffer, Stream, is_wait_timeout};
use std::time::Duration;

/// A chain over two streams: each step adds 1 on one stream and doubles on the other. Returns whether the result is
/// right.
fn chain(rig: &Rig, ordered: bool) -> bool {
    let side = Stream::new(&rig.context).expect("stream");
    let events: Vec<Event> = (0..16).map(|_| Event::new(&rig.context, EventKind::Ordering).expect("event")).collect();
    let (x, one) = (rig.tensor(F32, &[8], &[1.0; 8]), rig.tensor(F32, &[8], &[1.0; 8]));
    let mut want = 1.0f32;
    let mut ops = Vec::new();
    for pair in events.chunks(2) {
        let mut add = rig.ops.add(&x.desc, &one.desc, &x.desc).expect("add");
        let mut double = rig.ops.scale(&x.desc, 2.0, &x.desc).expect("scale");
        add.launch(one.at(), 0, &rig.stream).expect("launch");
        if ordered {
            rig.stream.record(&pair[0]).expect("record");
            side.wait(&pair[0]).expect("wait");
        }
        double.launch(one.at(), 0, &side).expect("launch");
        if ordered {
            side.record(&pair[1]).expect("record");
            rig.stream.wait(&pair[1]).expect("wait");
        }
        want = (want + 1.0) * 2.0;
        ops.extend([add, double]);
    }
    rig.context.synchronize().expect("done");
    x.values() == [want; 8]
}

#[test]
fn a_missing_event_shows_as_wrong_data() {
    let mut wrong = 0;
    for seed in 1..=20 {
        let rig = Rig::with(|sim| {
            sim.set("delay_us", 200);
            sim.set("seed", seed);
        });
        assert!(chain(&rig, true), "seed {seed}: events order the streams");
        wrong += usize::from(!chain(&rig, false));
    }
    assert!(wrong >= 15, "only {wrong} of 20 unordered chains went wrong");
}

#[test]
fn a_buffer_reused_too_early_shows_as_wrong_data() {
    let rig = Rig::with(|sim| sim.set("delay_us", 500));
    let device = rig.buffer(4);
    let mut staging = PinnedBuffer::new(&rig.context, 4).expect("pinned");
    let mut seen = Vec::new();
    for value in 0..50u8 {
        staging.as_mut_slice().fill(value);
        // SAFETY: violates the contract on purpose: the simulator reads the bytes at any later time, and any bytes are
        // valid.
        unsafe { rig.stream.copy_in(device.address(), staging.as_ptr(), 4) }.expect("copy");
        staging.as_mut_slice().fill(0xEE);
        rig.stream.synchronize(None).expect("done");
        let mut byte = [0];
        device.read(0, &mut byte).expect("read");
        seen.push(byte[0]);
    }
    assert!(seen.contains(&0xEE), "the copy reads what is there when it runs");
}

#[test]
fn blocking_copies_do_not_wait_for_streams() {
    let rig = Rig::new();
    rig.sim.hang_task("aclnnSilu", 1);
    let (x, out) = (rig.tensor(F32, &[8], &[1.0; 8]), rig.tensor(F32, &[8], &[0.0; 8]));
    let mut op = rig.ops.silu(&x.desc, &out.desc).expect("op");
    op.launch(x.at(), 0, &rig.stream).expect("launch");
    assert_eq!(out.values(), [0.0; 8], "what the stream has not come to is not there");
    rig.sim.release();
    rig.stream.synchronize(None).expect("done");
    assert!(out.values()[0] > 0.7);
}

#[test]
fn events_tell_when_work_is_done() {
    let rig = Rig::new();
    let event = Event::new(&rig.context, EventKind::Ordering).expect("event");
    assert_eq!(event.is_complete(), Ok(true), "before the first record");
    rig.stream.wait(&event).expect("holds nothing back");
    rig.sim.hang_task("aclrtMemsetAsync", 1);
    let buffer = rig.buffer(64);
    rig.stream.fill(buffer.address(), 1, 64).expect("fill");
    rig.stream.record(&event).expect("record");
    assert_eq!(event.is_complete(), Ok(false));
    let error = event.synchronize(Some(Duration::from_millis(5))).expect_err("still running");
    assert!(is_wait_timeout(&error) && error.kind == AscendErrorKind::WaitTimeout && error.code == 507_047);
    let error = rig.stream.synchronize(Some(Duration::from_millis(5))).expect_err("still running");
    assert!(is_wait_timeout(&error) && error.code == 507_046);
    rig.sim.release();
    event.synchronize(Some(Duration::from_secs(10))).expect("reached");
    assert_eq!(event.is_complete(), Ok(true));
}

#[test]
fn timing_events_carry_modelled_time() {
    let rig = Rig::new();
    let (start, end) = (
        Event::new(&rig.context, EventKind::Timing).expect("event"),
        Event::new(&rig.context, EventKind::Timing).expect("event"),
    );
    let buffer = rig.buffer(1 << 20);
    rig.stream.record(&start).expect("record");
    rig.stream.fill(buffer.address(), 0, 1 << 20).expect("fill");
    rig.stream.record(&end).expect("record");
    rig.stream.synchronize(None).expect("done");
    // 1 MiB at 850 GB/s and 2 µs to start, after the 4 µs of the launch.
    let took = end.since(&start).expect("time");
    assert!((3_200..9_000).contains(&took.as_nanos()), "{took:?}");
    let plain = Event::new(&rig.context, EventKind::Ordering).expect("event");
    assert!(end.since(&plain).is_err(), "no time in it");
}

#[test]
fn streams_run_out() {
    let rig = Rig::with(|sim| sim.set("streams", 3));
    assert_eq!(rig.context.streams_left(), Ok(2));
    let _two = [Stream::new(&rig.context).expect("second"), Stream::new(&rig.context).expect("third")];
    let error = Stream::new(&rig.context).expect_err("fourth");
    assert_eq!((error.code, error.kind), (207_008, AscendErrorKind::ResourceExhausted));
}
