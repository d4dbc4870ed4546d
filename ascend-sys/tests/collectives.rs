//! Promise: collectives between simulated devices add in the order of the ranks, whoever comes late.

#![allow(unsafe_code)]

mod rig;

use ascend_sys::abi::{HCCL_DATA_TYPE_FP32, HCCL_REDUCE_SUM, HcclRootInfo};
use ascend_sys::{Context, DeviceBuffer, HcclSymbols, Library, Pages, Runtime, Stream};
use rig::{decode, encode, noise};
use std::ptr;

const RANKS: u32 = 4;
const ALL: usize = RANKS as usize;
const COUNT: usize = 24;

#[test]
fn ranks_reduce_gather_scatter_and_share() {
    let _turn = rig::turn();
    let sim = rig::simulator();
    sim.set("devices", i64::from(RANKS));
    sim.set("delay_us", 200);
    let library = Library::open(Some(sim.path())).expect("opens");
    let runtime = Runtime::load(&library).expect("loads");
    let hccl = HcclSymbols::load(&library).expect("collectives");
    runtime.init().expect("init");
    let mut root = HcclRootInfo { internal: [0; 4108] };
    // SAFETY: a place for the root info.
    assert_eq!(unsafe { (hccl.hccl_get_root_info)(&raw mut root) }, 0);
    let f32s = ascend_sys::ElemType::F32;
    let own: Vec<Vec<f32>> = (1..=u64::from(RANKS)).map(|seed| noise(f32s, COUNT, seed)).collect();
    let sum: Vec<f32> = (0..COUNT).map(|i| own.iter().map(|values| values[i]).sum()).collect();
    std::thread::scope(|scope| {
        for rank in 0..RANKS {
            let (runtime, hccl, own, sum) = (&runtime, &hccl, &own, &sum);
            let at = rank as usize;
            scope.spawn(move || {
                let context = Context::create(runtime, rank).expect("context");
                let stream = Stream::new(&context).expect("stream");
                let mut comm = ptr::null_mut();
                // SAFETY: the root info, and a place for a handle.
                let code = unsafe { (hccl.hccl_comm_init_root_info)(RANKS, &raw const root, rank, &raw mut comm) };
                assert_eq!(code, 0);
                let buffer = |bytes| DeviceBuffer::new(&context, bytes, Pages::default()).expect("memory");
                let (send, recv) = (buffer(COUNT * 4), buffer(ALL * COUNT * 4));
                let (s, r) = (send.address().0 as *mut _, recv.address().0 as *mut _);
                let read = |from: &DeviceBuffer, count: usize| {
                    stream.synchronize(None).expect("done");
                    let mut bytes = vec![0; count * 4];
                    from.read(0, &mut bytes).expect("read");
                    decode(f32s, &bytes)
                };
                let dtype = HCCL_DATA_TYPE_FP32;
                send.write(0, &encode(f32s, &own[at])).expect("write");
                // SAFETY: device buffers of the sizes given, and this rank's communicator and stream.
                unsafe {
                    assert_eq!((hccl.hccl_all_gather)(s, r, COUNT as u64, dtype, comm, stream.handle()), 0);
                    assert_eq!(read(&recv, ALL * COUNT), own.concat());
                    let share = (COUNT / ALL) as u64;
                    assert_eq!(
                        (hccl.hccl_reduce_scatter)(s, r, share, dtype, HCCL_REDUCE_SUM, comm, stream.handle()),
                        0
                    );
                    assert_eq!(read(&recv, COUNT / ALL), sum[at * COUNT / ALL..][..COUNT / ALL]);
                    // In place, twice: the second sees the first's sums.
                    for _ in 0..2 {
                        assert_eq!(
                            (hccl.hccl_all_reduce)(s, s, COUNT as u64, dtype, HCCL_REDUCE_SUM, comm, stream.handle()),
                            0
                        );
                    }
                    let twice: Vec<f32> = sum.iter().map(|v| (0..RANKS).map(|_| *v).sum()).collect();
                    assert_eq!(read(&send, COUNT), twice);
                    send.write(0, &encode(f32s, &own[at])).expect("write");
                    assert_eq!((hccl.hccl_broadcast)(s, COUNT as u64, dtype, 2, comm, stream.handle()), 0);
                    assert_eq!(read(&send, COUNT), own[2]);
                    assert_eq!((hccl.hccl_comm_destroy)(comm), 0);
                }
            });
        }
    });
    assert_eq!((sim.live("communicators"), sim.live("device_blocks")), (0, 0));
}
