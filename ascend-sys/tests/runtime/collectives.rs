//! Collectives between simulated devices add in rank order, whichever rank is late, both eagerly and in graphs. Ranks
//! that disagree, fail or are missing cause typed errors on all ranks, never a hang.

use crate::common;
use crate::common::{decode, encode, noise, rounded};
use ElemType::{BF16, F16, F32};
use ascend_sys::{
    AscendError, AscendErrorKind, Capture, CaptureMode, Collectives, Communicator, Context, DeviceBuffer, ElemType,
    Library, Pages, RootInfo, Runtime, Stream,
};
use std::sync::Barrier;
use std::time::Duration;

const RANKS: u32 = 4;
const ALL: usize = RANKS as usize;
const COUNT: usize = 24;

/// Objects of the thread of one rank.
struct Rank {
    comm: Communicator,
    stream: Stream,
    context: Context,
    at: usize,
}

impl Rank {
    fn buffer(&self, values: &[f32], elem: ElemType) -> DeviceBuffer {
        let buffer =
            DeviceBuffer::new(&self.context, values.len() * elem.bits() / 8, Pages::default()).expect("memory");
        buffer.write(0, &encode(elem, values)).expect("write");
        buffer
    }

    fn values(&self, buffer: &DeviceBuffer, elem: ElemType) -> Vec<f32> {
        self.stream.synchronize(None).expect("done");
        let mut bytes = vec![0; buffer.bytes()];
        buffer.read(0, &mut bytes).expect("read");
        decode(elem, &bytes)
    }

    fn sum(&self, buffer: &DeviceBuffer, count: usize, elem: ElemType) -> Result<(), AscendError> {
        self.comm.all_reduce(buffer.address(), buffer.address(), count, elem, &self.stream)
    }
}

fn load(devices: u32) -> (Runtime, Collectives) {
    let sim = common::simulator();
    sim.set("devices", i64::from(devices));
    let library = Library::open(Some(sim.path())).expect("opens");
    let runtime = Runtime::load(&library).expect("loads");
    runtime.init().expect("init");
    (runtime, Collectives::load(&library).expect("collectives"))
}

/// Runs one thread per device, joined to a communicator; returns their results in rank order.
fn on_all_ranks<T: Send>(ranks: u32, work: impl Fn(&Rank) -> T + Sync) -> Vec<T> {
    let (runtime, collectives) = load(ranks);
    let root = collectives.root_info(&runtime).expect("root info");
    let root = RootInfo::from_bytes(&root.to_bytes());
    std::thread::scope(|scope| {
        let start = |rank: u32| {
            let (runtime, collectives, work, root) = (&runtime, &collectives, &work, &root);
            scope.spawn(move || {
                let context = Context::create(runtime, rank).expect("context");
                let stream = Stream::new(&context).expect("stream");
                let comm = Communicator::join(collectives, &context, root, ranks, rank).expect("joined");
                assert_eq!((comm.rank(), comm.ranks(), comm.context().device()), (rank, ranks, rank));
                work(&Rank { comm, stream, context, at: rank as usize })
            })
        };
        let threads: Vec<_> = (0..ranks).map(start).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    })
}

fn own(elem: ElemType, ranks: u32) -> Vec<Vec<f32>> {
    (1..=u64::from(ranks)).map(|seed| noise(elem, COUNT, seed)).collect()
}

fn nothing_is_left() {
    let sim = common::simulator();
    for sort in ["communicators", "device_blocks", "streams", "contexts", "graphs"] {
        assert_eq!(sim.live(sort), 0, "{sort}");
    }
}

#[test]
fn ranks_reduce_gather_scatter_and_share() {
    let _turn = common::turn();
    common::simulator().set("delay_us", 200);
    for elem in [F32, F16, BF16] {
        let own = own(elem, RANKS);
        let sums: Vec<f32> = (0..COUNT).map(|i| own.iter().map(|values| values[i]).sum()).collect();
        let sum = rounded(elem, &sums);
        on_all_ranks(RANKS, |rank| {
            let (send, recv) = (rank.buffer(&own[rank.at], elem), rank.buffer(&[0.0; ALL * COUNT], elem));
            let (src, dst, stream) = (send.address(), recv.address(), &rank.stream);
            rank.comm.all_gather(src, dst, COUNT, elem, stream).expect("gather");
            assert_eq!(rank.values(&recv, elem), own.concat());
            rank.comm.reduce_scatter(src, dst, COUNT / ALL, elem, stream).expect("scatter");
            assert_eq!(rank.values(&recv, elem)[..COUNT / ALL], sum[rank.at * COUNT / ALL..][..COUNT / ALL]);
            rank.comm.all_reduce(src, dst, COUNT, elem, stream).expect("sum");
            assert_eq!(rank.values(&recv, elem)[..COUNT], sum);
            // In place, twice: the second collective sees the first one's sums.
            for _ in 0..2 {
                rank.sum(&send, COUNT, elem).expect("sum");
            }
            let twice: Vec<f32> = sum.iter().map(|v| (0..RANKS).map(|_| *v).sum()).collect();
            assert_eq!(rank.values(&send, elem), rounded(elem, &twice));
            send.write(0, &encode(elem, &own[rank.at])).expect("write");
            rank.comm.broadcast(src, COUNT, elem, 2, stream).expect("broadcast");
            assert_eq!(rank.values(&send, elem), own[2]);
            assert_eq!(rank.comm.async_error(), Ok(None));
        });
    }
    nothing_is_left();
}

#[test]
fn one_call_makes_the_communicators_of_a_process() {
    let _turn = common::turn();
    let (runtime, collectives) = load(2);
    let contexts = [1, 0].map(|device| Context::create(&runtime, device).expect("context"));
    let comms = Communicator::join_all(&collectives, &contexts).expect("joined");
    let streams = contexts.each_ref().map(|context| {
        context.bind().expect("bound");
        Stream::new(context).expect("stream")
    });
    let buffers = contexts.each_ref().map(|context| {
        context.bind().expect("bound");
        DeviceBuffer::new(context, 64, Pages::default()).expect("memory")
    });
    for (at, comm) in comms.iter().enumerate() {
        contexts[at].bind().expect("bound");
        assert_eq!((comm.rank(), comm.ranks()), (u32::try_from(at).expect("small"), 2));
        buffers[at].write(0, &encode(F32, &[1.0 + at as f32; 16])).expect("write");
        let at_device = buffers[at].address();
        comm.all_reduce(at_device, at_device, 16, F32, &streams[at]).expect("queued");
    }
    for at in 0..2 {
        contexts[at].bind().expect("bound");
        streams[at].synchronize(None).expect("done");
        let mut bytes = [0; 64];
        buffers[at].read(0, &mut bytes).expect("read");
        assert_eq!(decode(F32, &bytes), [3.0; 16]);
    }
    // The same device twice, and an unsupported type.
    let twice = Communicator::join_all(&collectives, &[contexts[0].clone(), contexts[0].clone()]).expect_err("twice");
    assert_eq!((twice.call, twice.code, twice.kind), ("HcclCommInitAll", 1, AscendErrorKind::Usage));
    let at_device = buffers[0].address();
    let error = comms[0].all_reduce(at_device, at_device, 4, ElemType::I64, &streams[0]).expect_err("no i64");
    assert_eq!(error.kind, AscendErrorKind::Unsupported);
    // A stream of another device.
    let error = comms[1].all_reduce(at_device, at_device, 4, F32, &streams[0]).expect_err("another device");
    assert_eq!(error.kind, AscendErrorKind::Usage);
    drop((comms, buffers, streams, contexts));
    nothing_is_left();
}

#[test]
fn captured_sums_are_replayed() {
    let _turn = common::turn();
    common::simulator().set("delay_us", 200);
    let results = on_all_ranks(3, |rank| {
        let buffer = rank.buffer(&[1.0 + rank.at as f32; 8], F32);
        let capture = Capture::begin(&rank.stream, CaptureMode::ThreadLocal).expect("begin");
        rank.sum(&buffer, 8, F32).expect("captured");
        rank.sum(&buffer, 8, F32).expect("captured");
        let graph = capture.end().expect("graph");
        for _ in 0..3 {
            graph.launch(&rank.stream).expect("launch");
        }
        rank.values(&buffer, F32)
    });
    // 1 + 2 + 3, then five times the sum of three equals.
    assert_eq!(results, vec![vec![6.0 * 3f32.powi(5); 8]; 3]);
    nothing_is_left();
}

#[test]
fn ranks_that_disagree_fail_all_and_are_complained_about() {
    let _turn = common::turn();
    let sim = common::simulator();
    for case in 0..3 {
        sim.reset();
        let errors = on_all_ranks(2, |rank| {
            let buffer = rank.buffer(&[1.0; 16], F32);
            let at = buffer.address();
            match (case, rank.at) {
                (0, 1) => rank.sum(&buffer, 8, F32),
                (1, 1) => rank.sum(&buffer, 16, BF16),
                (2, 1) => rank.comm.broadcast(at, 16, F32, 0, &rank.stream),
                _ => rank.sum(&buffer, 16, F32),
            }
            .expect("queued: the library does not look");
            rank.stream.synchronize(None).expect_err("no two ranks agree")
        });
        for error in errors {
            assert_eq!((error.code, error.kind), (507_048, AscendErrorKind::KernelTimeout), "{error}");
        }
        let complaints = sim.complaints();
        assert!(complaints.len() == 1 && complaints[0].contains("asks for"), "{complaints:?}");
        nothing_is_left();
    }
}

#[test]
fn a_rank_that_fails_ends_the_others_by_their_limit() {
    let _turn = common::turn();
    let sim = common::simulator();
    sim.set("collective_limit_ms", 150);
    for link_fails in [true, false] {
        let code = if link_fails { 507_056 } else { 507_015 };
        sim.fail_task("HcclAllReduce", 4, code);
        let results = on_all_ranks(3, |rank| {
            let buffer = rank.buffer(&[1.0; 16], F32);
            // The first collective completes before the second, so that the fault affects the second one of one rank.
            rank.sum(&buffer, 16, F32).expect("queued");
            rank.stream.synchronize(None).expect("the first is done");
            rank.sum(&buffer, 16, F32).expect("queued");
            let error = rank.stream.synchronize(None).expect_err("one rank has failed");
            let known = rank.comm.async_error().expect("asked").map(|error| error.kind);
            let refused = rank.sum(&buffer, 16, F32).expect_err("the context has stopped");
            (error.code, refused.code, known)
        });
        let failed = results.iter().filter(|result| (result.0, result.1) == (code, code)).count();
        let waited = results.iter().filter(|result| (result.0, result.1) == (507_048, 507_048)).count();
        assert_eq!((failed, waited), (1, 2), "{results:?}");
        let known = link_fails.then_some(AscendErrorKind::Link);
        assert!(results.iter().all(|result| result.2 == known), "{results:?}");
        nothing_is_left();
    }
}

#[test]
fn a_waiting_rank_can_be_aborted_and_a_new_communicator_works() {
    let _turn = common::turn();
    on_all_ranks(2, |rank| {
        let buffer = rank.buffer(&[1.0; 16], F32);
        if rank.at == 0 {
            rank.sum(&buffer, 16, F32).expect("queued");
            let error = rank.stream.synchronize(Some(Duration::from_millis(30))).expect_err("the other stays away");
            assert_eq!(error.kind, AscendErrorKind::WaitTimeout);
            rank.stream.abort().expect("aborted");
        }
    });
    nothing_is_left();
    on_all_ranks(2, |rank| {
        let buffer = rank.buffer(&[1.0; 16], F32);
        rank.sum(&buffer, 16, F32).expect("queued");
        assert_eq!(rank.values(&buffer, F32), [2.0; 16]);
    });
}

#[test]
fn a_rank_that_never_joins_is_a_failure_of_the_link() {
    let _turn = common::turn();
    common::simulator().set("join_limit_ms", 50);
    let (runtime, collectives) = load(2);
    let root = collectives.root_info(&runtime).expect("root info");
    let context = Context::create(&runtime, 0).expect("context");
    let error = Communicator::join(&collectives, &context, &root, 2, 0).expect_err("alone");
    assert_eq!((error.code, error.kind), (9, AscendErrorKind::Link));
    let error = Communicator::join(&collectives, &context, &root, 2, 2).expect_err("no third");
    assert_eq!((error.code, error.kind), (1, AscendErrorKind::Usage));
    common::simulator().fail_call("HcclCommInitRootInfo", 1, 24);
    let error = Communicator::join(&collectives, &context, &root, 2, 0).expect_err("on demand");
    assert_eq!((error.code, error.kind, error.message.is_empty()), (24, AscendErrorKind::OutOfMemory, false));
}

#[test]
fn a_lost_device_ends_every_wait() {
    let _turn = common::turn();
    let sim = common::simulator();
    let ready = Barrier::new(2);
    on_all_ranks(2, |rank| {
        let buffer = rank.buffer(&[1.0; 16], F32);
        ready.wait();
        if rank.at == 1 {
            sim.lose_device(507_899);
            return;
        }
        let error = rank.sum(&buffer, 16, F32).and_then(|()| rank.stream.synchronize(None)).expect_err("lost");
        assert_eq!(error.kind, AscendErrorKind::DeviceLost);
    });
    assert_eq!((sim.live("streams"), sim.live("device_blocks"), sim.live("communicators")), (0, 0, 0));
}

#[test]
fn modelled_time_of_a_ring() {
    let _turn = common::turn();
    let sim = common::simulator();
    sim.set("compute", 0);
    let count = 8 << 20;
    on_all_ranks(8, |rank| {
        let buffer = DeviceBuffer::new(&rank.context, count * 2, Pages::default()).expect("memory");
        rank.sum(&buffer, count, BF16).expect("queued");
        rank.stream.synchronize(None).expect("done");
    });
    // For 16 MiB each device sends 14/8 over a link of 28 GB/s, in 14 steps of 1.5 us; a task starts in 2 us.
    let bound = (14 * (count as u64 * 2) / 8).div_ceil(28) + 14 * 1500 + 2000;
    let clock = sim.clock();
    assert_eq!(clock.busy.as_nanos(), u128::from(8 * bound), "eight devices");
    let device = u64::try_from(clock.device.as_nanos()).expect("small");
    assert!((bound..bound + 1_000_000).contains(&device), "side by side: {device} beside {bound}");
}
