//! `libhccl`: collectives between devices of one process, a thread a rank.

#![allow(unsafe_code, non_snake_case)]

use crate::codes::Done;
use crate::collective::{self, COMMUNICATORS, Reduce};
use crate::context;
use crate::ffi::{In, Note, Out, call, plain};
use crate::registry::Handle;
use crate::stream::Stream;
use std::ffi::c_char;

const ROOT_INFO_BYTES: usize = 4108;

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
            crate::codes::fail!(collective::NULL, "the root info is null");
        };
        let root = u64::from_le_bytes(bytes[..8].try_into().unwrap_or_default());
        comm.put(collective::join(root, ranks as usize, rank as usize)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn HcclCommDestroy(comm: Handle) -> i32 {
    plain("HcclCommDestroy", || COMMUNICATORS.remove(comm, collective::PARAMETER).map(drop))
}

fn queue(
    name: &'static str,
    comm: Handle,
    stream: Handle,
    bytes: u64,
    plan: impl FnOnce() -> Done<collective::Plan>,
) -> i32 {
    call(name, Note { kind: "collective", bytes }, || {
        let comm = COMMUNICATORS.get(comm, collective::PARAMETER)?;
        Stream::of(stream)?.submit(collective::task(name, &comm, plan()?))
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
    queue("HcclAllReduce", comm, stream, count, || {
        collective::Plan::all_reduce(send, recv, count, dtype, Reduce::of(op)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn HcclAllGather(send: usize, recv: usize, count: u64, dtype: i32, comm: Handle, stream: Handle) -> i32 {
    queue("HcclAllGather", comm, stream, count, || collective::Plan::all_gather(send, recv, count, dtype))
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
    queue("HcclReduceScatter", comm, stream, count, || {
        collective::Plan::reduce_scatter(send, recv, count, dtype, Reduce::of(op)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn HcclBroadcast(buffer: usize, count: u64, dtype: i32, root: u32, comm: Handle, stream: Handle) -> i32 {
    queue("HcclBroadcast", comm, stream, count, || collective::Plan::broadcast(buffer, count, dtype, root as usize))
}

#[unsafe(no_mangle)]
pub extern "C" fn HcclGetErrorString(code: i32) -> *const c_char {
    match code {
        0 => c"success",
        1 => c"parameter error",
        2 => c"null pointer",
        9 => c"timeout",
        _ => c"error",
    }
    .as_ptr()
}

#[unsafe(no_mangle)]
pub extern "C" fn HcclGetCommAsyncError(comm: Handle, error: Out<i32>) -> i32 {
    plain("HcclGetCommAsyncError", || {
        COMMUNICATORS.get(comm, collective::PARAMETER)?;
        error.put(0)
    })
}
