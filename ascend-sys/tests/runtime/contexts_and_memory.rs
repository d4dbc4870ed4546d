//! Calls return typed errors with the runtime's message, objects are destroyed in their own context, and forbidden
//! calls are refused.

#![allow(unsafe_code)]

use crate::common;
use crate::common::Rig;
use ElemType::{BF16, F16, F32};
use ascend_sys::{
    AscendErrorKind, Context, DeviceBuffer, ElemType, Event, EventKind, Library, LoadError, Ops, Pages, PinnedBuffer,
    Runtime, Stream, TensorDesc,
};
use std::path::PathBuf;

#[test]
fn the_machine_introduces_itself() {
    let rig = Rig::new();
    assert_eq!(rig.runtime.device_count(), Ok(1));
    assert_eq!(rig.runtime.soc_name().as_deref(), Some("Ascend910B3"));
    assert_eq!(rig.runtime.cann_version(), Ok(80_500_000));
    rig.runtime.init().expect("a second time is fine");
    let (free, total) = rig.context.memory_bytes().expect("memory");
    assert!(free == total && total == 2 << 30);
    assert_eq!(rig.runtime.symbols().missing(), [""; 0]);
}

#[test]
fn device_memory_is_apart_poisoned_and_given_back() {
    let rig = Rig::new();
    let buffer = rig.buffer(1000);
    assert_eq!(buffer.address().0 % 64, 0);
    let mut bytes = vec![0; 1000];
    buffer.read(0, &mut bytes).expect("read");
    assert!(bytes.iter().all(|&b| b == 0xFF), "poison");
    buffer.write(10, &[1, 2, 3]).expect("write");
    buffer.read(9, &mut bytes[..5]).expect("read");
    assert_eq!(bytes[..5], [0xFF, 1, 2, 3, 0xFF]);
    buffer.fill(7).expect("fill");
    buffer.read(999, &mut bytes[..1]).expect("read");
    assert_eq!(bytes[0], 7);
    // 1000 is rounded up to a multiple of 32, plus 32 bytes of padding.
    assert_eq!(rig.sim.live("device_bytes"), 1024 + 32);
    let before = buffer.address();
    drop(buffer);
    assert_eq!(rig.sim.live("device_bytes"), 0);
    let again = rig.buffer(1000);
    assert_eq!(again.address(), before, "freed memory is soon used again");
    again.read(0, &mut bytes).expect("read");
    assert!(bytes.iter().all(|&b| b == 0xFF), "and holds nothing of what was there");
    assert_eq!(rig.runtime.take_drop_error(), None);
}

#[test]
fn a_device_address_cannot_be_followed_on_the_host() {
    let rig = Rig::new();
    let buffer = rig.buffer(64);
    let maps = std::fs::read_to_string("/proc/self/maps").expect("maps");
    let holds = |line: &&str| {
        let (start, rest) = line.split_once('-')?;
        let end = rest.split(' ').next()?;
        let number = |text| usize::from_str_radix(text, 16).ok();
        Some((number(start)?..number(end)?).contains(&buffer.address().0))
    };
    let line = maps.lines().find(|line| holds(line) == Some(true)).expect("a reserved range");
    assert!(line.contains(" ---p "), "{line}");
}

#[test]
fn running_out_of_memory_is_an_error_to_recover_from() {
    let rig = Rig::with(|sim| sim.set("hbm_bytes", 4096));
    let first = rig.buffer(3000);
    let error = DeviceBuffer::new(&rig.context, 2000, Pages::HugeFirst).expect_err("full");
    assert_eq!((error.call, error.code, error.kind), ("aclrtMalloc", 207_001, AscendErrorKind::OutOfMemory));
    assert!(error.message.contains("2000"), "{error}");
    drop(first);
    rig.buffer(2000);
    assert!(DeviceBuffer::new(&rig.context, 0, Pages::Normal).is_err(), "size 0");
}

#[test]
fn a_thread_needs_a_context() {
    let rig = Rig::new();
    let context = rig.context.clone();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let error = Stream::new(&context).expect_err("none yet");
            assert_eq!((error.code, error.kind), (107_002, AscendErrorKind::Usage));
            // An operation reports a code of its own; the wrapper extracts the runtime's code.
            let x = TensorDesc::new(ascend_sys::DeviceAddress(64), F32, &[1]);
            let error = rig.ops.silu(&x, &x).expect_err("none yet");
            assert_eq!((error.call, error.code), ("aclnnSiluGetWorkspaceSize", 107_002));
            context.bind().expect("bound");
            Stream::new(&context).expect("stream");
        });
    });
}

#[test]
fn objects_are_used_and_dropped_in_their_own_context() {
    let rig = Rig::new();
    let other = Context::create(&rig.runtime, 0).expect("second context");
    let (stream, event) =
        (Stream::new(&other).expect("stream"), Event::new(&other, EventKind::Ordering).expect("event"));
    rig.context.bind().expect("bound");
    let error = stream.synchronize(None).expect_err("the other one is current");
    assert_eq!(error.code, 107_003);
    drop((stream, event, other));
    assert_eq!(rig.runtime.take_drop_error(), None, "destructors bind their own context");
    assert_eq!(rig.sim.live("contexts"), 2, "default and explicit");
    rig.context.bind().expect("still there");
    assert_eq!(rig.sim.live("streams"), 1);
}

#[test]
fn a_failure_of_a_destructor_is_told_later() {
    let rig = Rig::new();
    let buffer = rig.buffer(64);
    rig.sim.fail_call("aclrtFree", 1, 107_017);
    drop(buffer);
    assert_eq!(rig.runtime.take_drop_error().map(|error| (error.call, error.code)), Some(("aclrtFree", 107_017)));
    assert_eq!(rig.runtime.take_drop_error(), None);
}

#[test]
fn queued_copies_want_pinned_memory_and_right_sizes() {
    let rig = Rig::new();
    let buffer = rig.buffer(64);
    let mut pinned = PinnedBuffer::new(&rig.context, 64).expect("pinned");
    pinned.as_mut_slice().fill(3);
    // SAFETY: the memory is pinned and stays unused until the stream is done.
    unsafe { rig.stream.copy_in(buffer.address(), pinned.as_ptr(), 64) }.expect("copy");
    rig.stream.synchronize(None).expect("done");
    let back = PinnedBuffer::new(&rig.context, 64).expect("pinned");
    // SAFETY: as above.
    unsafe { rig.stream.copy_out(back.as_ptr(), buffer.address(), 64) }.expect("copy");
    rig.stream.synchronize(None).expect("done");
    assert_eq!(back.as_slice(), [3; 64]);
    assert!(rig.sim.complaints().is_empty());
    let pageable = [5u8; 64];
    // SAFETY: the memory is pageable, so the call waits for the copy.
    unsafe { rig.stream.copy_in(buffer.address(), pageable.as_ptr(), 64) }.expect("works, but waits");
    assert_eq!(rig.sim.complaints().len(), 1);
    // SAFETY: the call is refused and reads nothing.
    let error = unsafe { rig.stream.copy_out(back.as_ptr(), ascend_sys::DeviceAddress(pinned.as_ptr() as usize), 64) };
    assert_eq!(error.expect_err("host to host").code, 207_000);
    rig.stream.copy_within(buffer.address(), buffer.address().offset(1 << 20), 32).expect("queued");
    assert_eq!(rig.stream.synchronize(None).expect_err("beyond the buffer").code, 507_015);
}

#[test]
fn operands_are_aligned_padded_and_alive() {
    let rig = Rig::new();
    let refused = |x: &TensorDesc, out: &TensorDesc| rig.run(rig.ops.silu(x, out)).expect_err("refused");
    let arena = rig.buffer(256);
    let out = TensorDesc::new(arena.address().offset(128), F16, &[16]);
    let error = refused(&TensorDesc::new(arena.address().offset(16), F16, &[8]), &out);
    assert_eq!((error.code, error.kind), (161_002, AscendErrorKind::Refused));
    assert!(error.message.contains("aligned"), "{error}");
    // 256 bytes, rounded and padded to 288: a tensor that ends there has 32 bytes after it, one that ends later does
    // not.
    let last = TensorDesc::new(arena.address().offset(224), F16, &[16]);
    rig.run(rig.ops.silu(&last, &out)).expect("the allocation's own padding");
    let beyond = TensorDesc::new(arena.address().offset(256), F16, &[16]);
    assert!(refused(&beyond, &out).message.contains("not device memory"));
    let gone = TensorDesc::new(rig.buffer(1 << 20).address().offset(4096), F16, &[16]);
    refused(&gone, &out);
    let host = [0f32; 64];
    let on_host = ascend_sys::DeviceAddress((host.as_ptr() as usize).next_multiple_of(32));
    refused(&TensorDesc::new(on_host, F16, &[16]), &out);
}

#[test]
fn shapes_and_types_are_checked_before_anything_runs() {
    let rig = Rig::new();
    let t = |elem, dims: &[usize]| rig.empty(elem, dims);
    let (x, w, out) = (t(F16, &[2, 32]), t(F16, &[16, 32]), t(F16, &[2, 16]));
    let ok = rig.ops.linear(&x.desc, &w.desc, None, &out.desc);
    assert!(ok.is_ok());
    drop(ok);
    let gamma = t(F16, &[32]);
    let refused = [
        rig.ops.linear(&x.desc, &t(BF16, &[16, 32]).desc, None, &out.desc).err(),
        rig.ops.linear(&x.desc, &t(F16, &[16, 31]).desc, None, &out.desc).err(),
        rig.ops.linear(&x.desc, &w.desc, None, &t(F16, &[2, 15]).desc).err(),
        rig.ops.linear(&x.desc, &w.desc, Some(&t(F16, &[15]).desc), &out.desc).err(),
        rig.ops.rms_norm(&x.desc, &gamma.desc, 1e-5, &x.desc, &t(F16, &[2, 1]).desc).err(),
        rig.ops.rms_norm(&x.desc, &gamma.desc, 1e-5, &x.desc, &t(F32, &[1, 1]).desc).err(),
        rig.ops.rms_norm(&x.desc, &t(F16, &[16]).desc, 1e-5, &x.desc, &t(F32, &[2, 1]).desc).err(),
        rig.ops.add(&x.desc, &t(F32, &[2, 32]).desc, &x.desc).err(),
        rig.ops.add(&x.desc, &t(F16, &[3, 32]).desc, &x.desc).err(),
        rig.ops.swiglu(&TensorDesc::view(x.at(), F16, &[2, 16], &[32, 1], 0, &[2, 32]), &t(F16, &[2, 8]).desc).err(),
        rig.ops
            .rope(
                &t(F16, &[2, 1, 32]).desc,
                &t(F16, &[2, 1, 16]).desc,
                &t(F16, &[2, 1, 16]).desc,
                false,
                &t(F16, &[2, 1, 32]).desc,
            )
            .err(),
        rig.ops.argmax(&x.desc, &t(F32, &[2]).desc).err(),
        rig.ops.topk(&x.desc, 33, &t(F16, &[2, 33]).desc, &t(ElemType::I64, &[2, 33]).desc).err(),
        rig.ops.embedding(&w.desc, &t(F32, &[2]).desc, &x.desc).err(),
        rig.ops.dynamic_quant(&t(F32, &[2, 32]).desc, &t(ElemType::I8, &[2, 32]).desc, &t(F32, &[2]).desc).err(),
    ];
    for (i, error) in refused.into_iter().enumerate() {
        let error = error.unwrap_or_else(|| panic!("number {i} was accepted"));
        assert_eq!((error.code, error.kind), (161_002, AscendErrorKind::Refused), "number {i}");
        assert!(error.call.ends_with("GetWorkspaceSize") && !error.message.is_empty(), "{error}");
    }
    let in_place = t(F16, &[2, 1, 32]);
    let table = t(F16, &[2, 1, 32]);
    let error = rig.ops.rope(&in_place.desc, &table.desc, &table.desc, false, &in_place.desc).expect_err("in place");
    assert!(error.message.contains("overlaps"), "{error}");
    drop((x, w, out, gamma, in_place, table));
    assert_eq!((rig.sim.live("descriptors"), rig.sim.live("executors")), (0, 0), "failures leave nothing behind");
}

#[test]
fn an_op_runs_once_unless_it_is_made_repeatable() {
    let rig = Rig::new();
    let (a, b) = (rig.tensor(F32, &[8], &[1.0; 8]), rig.tensor(F32, &[8], &[2.0; 8]));
    let (sum, other) = (rig.empty(F32, &[8]), rig.empty(F32, &[8]));
    let none = ascend_sys::DeviceAddress(0);
    let mut once = rig.ops.add(&a.desc, &a.desc, &sum.desc).expect("op");
    once.launch(none, 0, &rig.stream).expect("first");
    assert_eq!(once.launch(none, 0, &rig.stream).expect_err("second").kind, AscendErrorKind::Usage);
    assert!(once.rebind(0, b.at()).is_err());

    let mut op = rig.ops.add(&a.desc, &a.desc, &sum.desc).expect("op");
    op.make_repeatable().expect("repeatable");
    op.launch(none, 0, &rig.stream).expect("first");
    op.rebind(1, b.at()).expect("input");
    op.rebind(2, other.at()).expect("output");
    op.launch(none, 0, &rig.stream).expect("second");
    rig.stream.synchronize(None).expect("done");
    assert_eq!((sum.values()[0], other.values()[0]), (2.0, 3.0));
    assert_eq!(op.rebind(1, b.at().offset(8)).expect_err("not aligned").code, 161_002);
    assert!(op.rebind(3, b.at()).is_err(), "no such operand");
    drop((once, op));
    assert_eq!((rig.sim.live("descriptors"), rig.sim.live("executors")), (0, 0));

    let weight = rig.empty(F16, &[32, 32]);
    let mut tiling = rig.ops.tile_weight(&weight.desc).expect("op");
    assert_eq!(tiling.make_repeatable().expect_err("copies inside").code, 161_002);
}

#[test]
fn a_workspace_that_is_too_small_is_refused() {
    let rig = Rig::new();
    let x = rig.tensor(F32, &[1, 64], &[0.0; 64]);
    let (values, places) = (rig.empty(F32, &[1, 2]), rig.empty(ElemType::I64, &[1, 2]));
    let mut op = rig.ops.topk(&x.desc, 2, &values.desc, &places.desc).expect("op");
    assert!(op.workspace_bytes() > 0);
    let small = rig.buffer(16);
    let error = op.launch(small.address(), 16, &rig.stream).expect_err("too small");
    assert_eq!(error.kind, AscendErrorKind::Usage);
    let error = op.launch(small.address(), op.workspace_bytes(), &rig.stream).expect_err("a lie about its size");
    assert_eq!(error.code, 161_002);
}

fn library_without(symbols: &[&str]) -> PathBuf {
    let file = std::env::temp_dir().join(format!("libascend_sim-{}-{}.so", std::process::id(), symbols.join("-")));
    common::simulator().without(symbols, &file).expect("copied");
    file
}

#[test]
fn missing_functions_are_named_or_leave_a_capability_off() {
    let _turn = common::turn();
    let required = library_without(&["aclrtRecordEvent"]);
    let library = Library::open(Some(&required)).expect("opens");
    let error = Runtime::load(&library).expect_err("a required function");
    assert_eq!(error, LoadError::MissingSymbol { library: required.clone(), symbol: "aclrtRecordEvent" });

    // Like CANN 8.0: no capture, no scatter into paged caches.
    let old =
        library_without(&["aclmdlRICaptureBegin", "aclnnScatterPaKvCache", "aclnnScatterPaKvCacheGetWorkspaceSize"]);
    let library = Library::open(Some(&old)).expect("opens");
    let runtime = Runtime::load(&library).expect("enough for a start");
    let capabilities = runtime.capabilities();
    assert!(!capabilities.capture && !capabilities.task_update && capabilities.stream_abort);
    assert_eq!(runtime.symbols().missing(), ["aclmdlRICaptureBegin"]);
    let ops = Ops::load(&library, &runtime);
    assert!(!ops.has("aclnnScatterPaKvCache") && ops.has("aclnnScatterNdUpdate"));
    runtime.init().expect("init");
    let context = Context::create(&runtime, 0).expect("context");
    let buffer = DeviceBuffer::new(&context, 4096, Pages::default()).expect("memory");
    let t = TensorDesc::new(buffer.address(), F16, &[1, 1, 16]);
    let error = ops.kv_scatter(&t, &t, &t, &t, &t).expect_err("missing");
    assert_eq!((error.call, error.kind), ("aclnnScatterPaKvCache", AscendErrorKind::Unsupported));
    for file in [required, old] {
        std::fs::remove_file(file).expect("removed");
    }
}
