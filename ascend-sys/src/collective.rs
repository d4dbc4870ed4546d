//! Collectives between devices (HCCL): a communicator a device, its operations queued on the device's stream.
//!
//! Every rank queues the same operations with the same counts and types in the same order; nobody checks that, and ranks
//! that do not agree wait for each other until the stream fails with a time-out (507048, after 1836 s unless the variable
//! `HCCL_EXEC_TIMEOUT` says otherwise: read when a communicator is made). Failures of an operation come out where its
//! stream is synchronized, or at [`Communicator::async_error`]. After one, the communicator is of no use to any rank: each
//! rank aborts its streams ([`Stream::abort`]), drops its communicator, and joins a new one with a new [`RootInfo`].
//!
//! An operation may be captured into a graph. On replay every rank must replay the graph of the same capture.

#![allow(unsafe_code)]

use crate::abi::{
    HCCL_DATA_TYPE_BFP16, HCCL_DATA_TYPE_FP16, HCCL_DATA_TYPE_FP32, HCCL_E_NOT_SUPPORT, HCCL_E_RUNTIME,
    HCCL_REDUCE_SUM, HCCL_SUCCESS, HcclComm, HcclRootInfo,
};
use crate::context::Context;
use crate::error::{AscendError, AscendErrorKind, LoadError};
use crate::ffi::loader::Library;
use crate::ffi::symbols::HcclSymbols;
use crate::memory::DeviceAddress;
use crate::runtime::{Runtime, copied};
use crate::stream::Stream;
use crate::tensor::ElemType;
use std::ffi::c_char;
use std::ptr;

/// The functions of the collectives' library. Copies are the same.
#[derive(Clone, Copy, Debug)]
pub struct Collectives {
    symbols: HcclSymbols,
}

impl Collectives {
    /// Looks every function up. [`LoadError::MissingSymbol`] where the install has no `libhccl.so`.
    pub fn load(library: &Library) -> Result<Self, LoadError> {
        Ok(Self { symbols: HcclSymbols::load(library)? })
    }

    /// The functions themselves.
    pub fn symbols(&self) -> &HcclSymbols {
        &self.symbols
    }

    /// Makes what the ranks of a new communicator join with; one rank makes it, with its context current.
    pub fn root_info(&self, runtime: &Runtime) -> Result<RootInfo, AscendError> {
        let mut info = HcclRootInfo { internal: [0; RootInfo::BYTES] };
        // SAFETY: a valid place for the struct.
        let code = unsafe { (self.symbols.hccl_get_root_info)(&raw mut info) };
        self.check(runtime, "HcclGetRootInfo", code)?;
        Ok(RootInfo { info })
    }

    /// Turns an `HcclResult` into a result. The words are the runtime's, else the library's own for the code; a failure of
    /// the runtime inside (15) comes out with the runtime's code.
    fn check(&self, runtime: &Runtime, call: &'static str, code: i32) -> Result<(), AscendError> {
        if code == HCCL_SUCCESS {
            return Ok(());
        }
        let inner = runtime.last_error().filter(|&inner| code == HCCL_E_RUNTIME && inner != 0);
        let mut message = runtime.recent_message();
        if message.is_empty() {
            message = self.words(code);
        }
        let kind = inner.map_or_else(|| AscendErrorKind::from_hccl(code), AscendErrorKind::from_code);
        Err(AscendError { call, code: inner.unwrap_or(code), kind, message })
    }

    /// The library's words for a code, empty where it has none.
    fn words(&self, code: i32) -> String {
        // SAFETY: takes an enumeration; gives null or a constant string.
        self.symbols.hccl_get_error_string.and_then(|function| unsafe { copied(function(code)) }).unwrap_or_default()
    }
}

/// What one rank makes and all ranks of a communicator join with; it travels to other processes as bytes.
#[derive(Clone, Copy, Debug)]
pub struct RootInfo {
    info: HcclRootInfo,
}

impl RootInfo {
    /// Its size.
    pub const BYTES: usize = 4108;

    /// For the way to another process.
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        self.info.internal.map(|byte| byte.to_ne_bytes()[0])
    }

    /// As another process made it.
    pub fn from_bytes(bytes: &[u8; Self::BYTES]) -> Self {
        Self { info: HcclRootInfo { internal: bytes.map(|byte| c_char::from_ne_bytes([byte])) } }
    }
}

/// One rank of a group of devices. It may move to another thread; one thread at a time uses it, with its context current.
///
/// Before it is dropped its streams have been synchronized or aborted, and graphs that hold its operations are gone.
#[derive(Debug)]
pub struct Communicator {
    context: Context,
    collectives: Collectives,
    handle: HcclComm,
    rank: u32,
    ranks: u32,
}

// SAFETY: the handle may be used from any thread that has the context current, by one at a time.
unsafe impl Send for Communicator {}

impl Communicator {
    /// Joins as one of `ranks`, on the context's device, with the context current; waits for the others (120 s and 20 s more
    /// unless `HCCL_CONNECT_TIMEOUT` says otherwise). Ranks are threads of one process or processes, on different devices.
    pub fn join(
        collectives: &Collectives,
        context: &Context,
        root: &RootInfo,
        ranks: u32,
        rank: u32,
    ) -> Result<Self, AscendError> {
        let mut handle = ptr::null_mut();
        let function = collectives.symbols.hccl_comm_init_root_info;
        // SAFETY: the struct is only read; a valid place for a handle.
        let code = unsafe { function(ranks, &raw const root.info, rank, &raw mut handle) };
        collectives.check(context.runtime(), "HcclCommInitRootInfo", code)?;
        Ok(Self { context: context.clone(), collectives: *collectives, handle, rank, ranks })
    }

    /// A communicator for each of the contexts of this process, ranked as they stand, one context a device. The first one is
    /// current afterwards.
    ///
    /// Documented for one server and, up to CANN 8.5, not for Atlas 800I A2; the library makes its own streams in the devices'
    /// default contexts. [`Self::join`] from a thread a device has neither limit.
    pub fn join_all(collectives: &Collectives, contexts: &[Context]) -> Result<Vec<Self>, AscendError> {
        const CALL: &str = "HcclCommInitAll";
        let Some(first) = contexts.first() else { return Ok(Vec::new()) };
        let runtime = first.runtime();
        let function = runtime.optional(CALL, collectives.symbols.hccl_comm_init_all)?;
        let mut devices: Vec<i32> = contexts.iter().map(|context| context.device().cast_signed()).collect();
        let mut handles = vec![ptr::null_mut(); contexts.len()];
        let ranks = u32::try_from(contexts.len()).unwrap_or(u32::MAX);
        // SAFETY: arrays of as many devices and places for handles as are announced.
        let code = unsafe { function(ranks, devices.as_mut_ptr(), handles.as_mut_ptr()) };
        let joined = collectives.check(runtime, CALL, code);
        first.bind()?;
        joined?;
        let members = contexts.iter().zip(handles).zip(0..);
        Ok(members
            .map(|((context, handle), rank)| Self {
                context: context.clone(),
                collectives: *collectives,
                handle,
                rank,
                ranks,
            })
            .collect())
    }

    /// Its context.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// Its place among the ranks.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// How many ranks there are.
    pub fn ranks(&self) -> u32 {
        self.ranks
    }

    /// Queues: `dst[i]` of every rank becomes the sum of all ranks' `src[i]`, for `count` elements. `dst` may be `src`.
    pub fn all_reduce(
        &self,
        src: DeviceAddress,
        dst: DeviceAddress,
        count: usize,
        elem: ElemType,
        stream: &Stream,
    ) -> Result<(), AscendError> {
        const CALL: &str = "HcclAllReduce";
        let (dtype, function) = (self.data_type(CALL, elem)?, self.symbols().hccl_all_reduce);
        let (src, dst, count) = (src.as_ptr(), dst.as_ptr(), count as u64);
        // SAFETY: a live communicator and stream; wrong device addresses are a failure of the stream, not of the host.
        let code = unsafe { function(src, dst, count, dtype, HCCL_REDUCE_SUM, self.handle, stream.handle()) };
        self.check(CALL, code)
    }

    /// Queues: `dst` of every rank becomes all ranks' `src` in order. `count` elements of each: `dst` has as many a rank.
    pub fn all_gather(
        &self,
        src: DeviceAddress,
        dst: DeviceAddress,
        count: usize,
        elem: ElemType,
        stream: &Stream,
    ) -> Result<(), AscendError> {
        const CALL: &str = "HcclAllGather";
        let (dtype, function) = (self.data_type(CALL, elem)?, self.symbols().hccl_all_gather);
        let (src, dst, count) = (src.as_ptr(), dst.as_ptr(), count as u64);
        // SAFETY: as in `all_reduce`.
        let code = unsafe { function(src, dst, count, dtype, self.handle, stream.handle()) };
        self.check(CALL, code)
    }

    /// Queues: `dst` of rank r becomes the sum over all ranks of the r-th share of `src`. `count` elements a share: `src` has
    /// as many a rank.
    pub fn reduce_scatter(
        &self,
        src: DeviceAddress,
        dst: DeviceAddress,
        count: usize,
        elem: ElemType,
        stream: &Stream,
    ) -> Result<(), AscendError> {
        const CALL: &str = "HcclReduceScatter";
        let (dtype, function) = (self.data_type(CALL, elem)?, self.symbols().hccl_reduce_scatter);
        let (src, dst, count) = (src.as_ptr(), dst.as_ptr(), count as u64);
        // SAFETY: as in `all_reduce`.
        let code = unsafe { function(src, dst, count, dtype, HCCL_REDUCE_SUM, self.handle, stream.handle()) };
        self.check(CALL, code)
    }

    /// Queues: `count` elements at `buffer` of every rank become those of rank `root`.
    pub fn broadcast(
        &self,
        buffer: DeviceAddress,
        count: usize,
        elem: ElemType,
        root: u32,
        stream: &Stream,
    ) -> Result<(), AscendError> {
        const CALL: &str = "HcclBroadcast";
        let (dtype, function) = (self.data_type(CALL, elem)?, self.symbols().hccl_broadcast);
        // SAFETY: as in `all_reduce`.
        let code = unsafe { function(buffer.as_ptr(), count as u64, dtype, root, self.handle, stream.handle()) };
        self.check(CALL, code)
    }

    /// What has gone wrong between the ranks so far, `None` if nothing is known of. It waits for nothing.
    pub fn async_error(&self) -> Result<Option<AscendError>, AscendError> {
        const CALL: &str = "HcclGetCommAsyncError";
        let function = self.context.runtime().optional(CALL, self.symbols().hccl_get_comm_async_error)?;
        let mut code = HCCL_SUCCESS;
        // SAFETY: a live communicator and a valid place for an enumeration.
        self.check(CALL, unsafe { function(self.handle, &raw mut code) })?;
        if code == HCCL_SUCCESS {
            return Ok(None);
        }
        let (kind, message) = (AscendErrorKind::from_hccl(code), self.collectives.words(code));
        Ok(Some(AscendError { call: CALL, code, kind, message }))
    }

    fn symbols(&self) -> &HcclSymbols {
        &self.collectives.symbols
    }

    fn check(&self, call: &'static str, code: i32) -> Result<(), AscendError> {
        self.collectives.check(self.context.runtime(), call, code)
    }

    /// The value of `HcclDataType`; f32, f16 and bf16 are offered.
    fn data_type(&self, call: &'static str, elem: ElemType) -> Result<i32, AscendError> {
        match elem {
            ElemType::F32 => Ok(HCCL_DATA_TYPE_FP32),
            ElemType::F16 => Ok(HCCL_DATA_TYPE_FP16),
            ElemType::BF16 => Ok(HCCL_DATA_TYPE_BFP16),
            _ => Err(AscendError {
                call,
                code: HCCL_E_NOT_SUPPORT,
                kind: AscendErrorKind::from_hccl(HCCL_E_NOT_SUPPORT),
                message: format!("rank {}: no collectives over {elem:?}", self.rank),
            }),
        }
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        let runtime = self.context.runtime();
        runtime.note_drop(self.context.bind());
        // SAFETY: made once, destroyed once, in its own context.
        let code = unsafe { (self.symbols().hccl_comm_destroy)(self.handle) };
        runtime.note_drop(self.check("HcclCommDestroy", code));
    }
}
