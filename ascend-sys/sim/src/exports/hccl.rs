//! `libhccl`: collectives between devices of one process, with one thread per rank.

#![allow(unsafe_code, non_snake_case)]

use crate::codes::{Done, fail, rule};
use crate::control::Note;
use crate::ffi;
use crate::ffi::{In, Out};
use crate::registry::Handle;
use crate::runtime::collective::{COMMUNICATORS, Plan, Reduce, What};
use crate::runtime::stream::Stream;
use crate::runtime::{collective, context};
use std::ffi::c_char;

const ROOT_INFO_BYTES: usize = 4108;

/// `HCCL_E_RUNTIME`: the runtime's own code is the thread's last error.
const RUNTIME: i32 = 15;

/// Runs a call that returns an `HcclResult`.
fn call(name: &'static str, note: Note, body: impl FnOnce() -> Done) -> i32 {
    match ffi::call(name, note, body) {
        100_000.. => RUNTIME,
        code => code,
    }
}

fn plain(name: &'static str, body: impl FnOnce() -> Done) -> i32 {
    call(name, Note::default(), body)
}

/// `HcclRootInfo`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct RootInfo([u8; ROOT_INFO_BYTES]);

#[unsafe(no_mangle)]
pub extern "C" fn HcclGetRootInfo(info: Out<RootInfo>) -> i32 {
    plain("HcclGetRootInfo", || {
        let mut bytes = [0; ROOT_INFO_BYTES];
        bytes[..8].copy_from_slice(&collective::new_root().to_le_bytes());
        info.put(RootInfo(bytes))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn HcclCommInitRootInfo(ranks: u32, info: In<RootInfo>, rank: u32, comm: Out<Handle>) -> i32 {
    plain("HcclCommInitRootInfo", || {
        context::current()?;
        let info = info.values(1).unwrap_or_default();
        let [RootInfo(bytes)] = &info[..] else {
            fail!(collective::NULL, "the root info is null");
        };
        let root = u64::from_le_bytes(bytes[..8].try_into().unwrap_or_default());
        comm.put(collective::join(root, ranks as usize, rank as usize)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn HcclCommInitAll(count: u32, devices: In<i32>, comms: Out<Handle>) -> i32 {
    plain("HcclCommInitAll", || {
        rule!(!comms.is_null(), collective::NULL, "a place for an answer is null");
        let Some(devices) = devices.values(u64::from(count)) else {
            fail!(collective::NULL, "the devices are null");
        };
        comms.put_all(&collective::join_all(&devices)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn HcclCommDestroy(comm: Handle) -> i32 {
    plain("HcclCommDestroy", || COMMUNICATORS.remove(comm, collective::PARAMETER).map(drop))
}

fn queue(name: &'static str, count: u64, comm: Handle, stream: Handle, plan: impl FnOnce() -> Done<Plan>) -> i32 {
    call(name, Note { kind: "collective", bytes: count }, || {
        let comm = COMMUNICATORS.get(comm, collective::PARAMETER)?;
        let stream = Stream::from_handle(stream)?;
        stream.submit(collective::task(name, &comm, &stream, plan()?)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn HcclAllReduce(
    send: usize,
    recv: usize,
    count: u64,
    dtype: i32,
    op: i32,
    comm: Handle,
    stream: Handle,
) -> i32 {
    let plan = || Plan::new(What::AllReduce(Reduce::from_code(op)?), send, recv, count, dtype);
    queue("HcclAllReduce", count, comm, stream, plan)
}

#[unsafe(no_mangle)]
pub extern "C" fn HcclAllGather(send: usize, recv: usize, count: u64, dtype: i32, comm: Handle, stream: Handle) -> i32 {
    queue("HcclAllGather", count, comm, stream, || Plan::new(What::AllGather, send, recv, count, dtype))
}

#[unsafe(no_mangle)]
pub extern "C" fn HcclReduceScatter(
    send: usize,
    recv: usize,
    count: u64,
    dtype: i32,
    op: i32,
    comm: Handle,
    stream: Handle,
) -> i32 {
    let plan = || Plan::new(What::ReduceScatter(Reduce::from_code(op)?), send, recv, count, dtype);
    queue("HcclReduceScatter", count, comm, stream, plan)
}

#[unsafe(no_mangle)]
pub extern "C" fn HcclBroadcast(buffer: usize, count: u64, dtype: i32, root: u32, comm: Handle, stream: Handle) -> i32 {
    let plan = || Plan::new(What::Broadcast(root as usize), buffer, buffer, count, dtype);
    queue("HcclBroadcast", count, comm, stream, plan)
}

#[unsafe(no_mangle)]
pub extern "C" fn HcclGetErrorString(code: i32) -> *const c_char {
    match code {
        0 => c"success",
        1 => c"parameter error",
        2 => c"null pointer",
        5 => c"not supported",
        15 => c"runtime error",
        9 => c"timeout",
        21 => c"remote error",
        _ => c"error",
    }
    .as_ptr()
}

#[unsafe(no_mangle)]
pub extern "C" fn HcclGetCommAsyncError(comm: Handle, error: Out<i32>) -> i32 {
    plain("HcclGetCommAsyncError", || error.put(COMMUNICATORS.get(comm, collective::PARAMETER)?.async_error()))
}
