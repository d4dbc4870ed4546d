//! Collectives between devices (HCCL): one communicator per device, which queues operations on streams of its device.
//!
//! All ranks must queue the same operations with the same counts and types in the same order. The library does not
//! check that: ranks that disagree wait for each other until the stream fails with a time-out (code 507048, after 1836
//! s by default; the variable `HCCL_EXEC_TIMEOUT`, read when a communicator is created, changes that). A failed
//! operation is reported when its stream is synchronized, or by [`Communicator::async_error`]. After a failure no rank
//! can use the communicator any longer: each rank aborts its streams ([`Stream::abort`]), drops its communicator, and
//! joins a new one with a new [`RootInfo`].
//!
//! A graph may capture collectives. On replay, all ranks must replay the graph of the same capture.

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

/// Functions of the collectives library (HCCL). Copies are equivalent.
#[derive(Clone, Copy, Debug)]
pub struct Collectives {
    symbols: HcclSymbols,
}

impl Collectives {
    /// Looks up the functions of the collectives library.
    ///
    /// # Errors
    /// [`LoadError::MissingSymbol`] if a required function is missing, e.g. because the install has no `libhccl.so`.
    pub fn load(library: &Library) -> Result<Self, LoadError> {
        Ok(Self { symbols: HcclSymbols::load(library)? })
    }

    /// Returns the table of C functions.
    pub fn symbols(&self) -> &HcclSymbols {
        &self.symbols
    }

    /// Creates the root info with which the ranks of a new communicator join.
    ///
    /// One rank calls this method, with its context current, and sends the result to the other ranks.
    ///
    /// # Errors
    /// [`AscendError`] if `HcclGetRootInfo` fails, e.g. because the thread has no current context.
    pub fn root_info(&self, runtime: &Runtime) -> Result<RootInfo, AscendError> {
        let mut info = HcclRootInfo { internal: [0; RootInfo::BYTES] };
        // SAFETY: `info` is a local variable of the struct's full size; the call only writes to it.
        let code = unsafe { (self.symbols.hccl_get_root_info)(&raw mut info) };
        self.check(runtime, "HcclGetRootInfo", code)?;
        Ok(RootInfo { info })
    }

    /// Converts an `HcclResult` into a result.
    ///
    /// The message is the runtime's, or the library's own text for the code if the runtime has none. If a runtime call
    /// failed inside the collective (15), the error contains the code of that call.
    fn check(&self, runtime: &Runtime, call: &'static str, code: i32) -> Result<(), AscendError> {
        if code == HCCL_SUCCESS {
            return Ok(());
        }
        let inner = runtime.last_error().filter(|&inner| code == HCCL_E_RUNTIME && inner != 0);
        let mut message = runtime.recent_message();
        if message.is_empty() {
            message = self.error_string(code);
        }
        let kind = inner.map_or_else(|| AscendErrorKind::from_hccl(code), AscendErrorKind::from_code);
        Err(AscendError { call, code: inner.unwrap_or(code), kind, message })
    }

    /// Returns the library's text for a code; empty if the library has none.
    fn error_string(&self, code: i32) -> String {
        // SAFETY: `HcclGetErrorString` takes an enumeration by value, and any value is allowed.
        // SAFETY: The returned pointer is null or a constant NUL-terminated string, as `copied` requires.
        self.symbols.hccl_get_error_string.and_then(|function| unsafe { copied(function(code)) }).unwrap_or_default()
    }
}

/// Root info of a communicator: created by one rank, and used by all ranks to join; can be sent between processes as
/// bytes.
#[derive(Clone, Copy, Debug)]
pub struct RootInfo {
    info: HcclRootInfo,
}

impl RootInfo {
    /// Size in bytes.
    pub const BYTES: usize = 4108;

    /// Returns the bytes to send to another process.
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        self.info.internal.map(|byte| byte.to_ne_bytes()[0])
    }

    /// Restores the root info from the bytes sent by another process.
    pub fn from_bytes(bytes: &[u8; Self::BYTES]) -> Self {
        Self { info: HcclRootInfo { internal: bytes.map(|byte| c_char::from_ne_bytes([byte])) } }
    }
}

/// One rank of a communicator. It can move to another thread; one thread at a time may use it, with its context
/// current.
///
/// Before you drop a communicator, synchronize or abort its streams, and drop the graphs that contain its operations.
#[derive(Debug)]
pub struct Communicator {
    context: Context,
    collectives: Collectives,
    handle: HcclComm,
    rank: u32,
    ranks: u32,
}

// SAFETY: Any thread on which the context is current may use the handle.
// SAFETY: The type is not `Sync`, so only one thread at a time uses the handle.
unsafe impl Send for Communicator {}

impl Communicator {
    /// Joins a communicator of `ranks` ranks as rank `rank`, on the device of `context`, which must be current.
    ///
    /// The call blocks until the other ranks have joined, by default for at most 120 s plus 20 s; the variable
    /// `HCCL_CONNECT_TIMEOUT` changes that. Ranks are threads of one process or separate processes, each on a different
    /// device.
    ///
    /// # Errors
    /// [`AscendError`] if `HcclCommInitRootInfo` fails; of kind [`Link`](AscendErrorKind::Link) if the other ranks do
    /// not join in time.
    pub fn join(
        collectives: &Collectives,
        context: &Context,
        root: &RootInfo,
        ranks: u32,
        rank: u32,
    ) -> Result<Self, AscendError> {
        let mut handle = ptr::null_mut();
        let function = collectives.symbols.hccl_comm_init_root_info;
        // SAFETY: `root.info` is a complete struct; the call only reads it.
        // SAFETY: `handle` is a local variable; the call writes one handle to it.
        let code = unsafe { function(ranks, &raw const root.info, rank, &raw mut handle) };
        collectives.check(context.runtime(), "HcclCommInitRootInfo", code)?;
        Ok(Self { context: context.clone(), collectives: *collectives, handle, rank, ranks })
    }

    /// Creates one communicator for each context, all in this process; the rank is the index in `contexts`.
    ///
    /// Each context must be on a different device. The first context is current afterwards.
    ///
    /// The C function is documented for a single server and, up to CANN 8.5, not for Atlas 800I A2; it creates its own
    /// streams in the devices' default contexts. Calling [`Self::join`] from one thread per device avoids both limits.
    ///
    /// # Errors
    /// [`AscendError`] of kind [`Unsupported`](AscendErrorKind::Unsupported) if the install lacks `HcclCommInitAll`;
    /// with the code of the failed call if `HcclCommInitAll` fails or the first context cannot be made current.
    pub fn join_all(collectives: &Collectives, contexts: &[Context]) -> Result<Vec<Self>, AscendError> {
        const CALL: &str = "HcclCommInitAll";
        let Some(first) = contexts.first() else { return Ok(Vec::new()) };
        let runtime = first.runtime();
        let function = runtime.optional(CALL, collectives.symbols.hccl_comm_init_all)?;
        let mut devices: Vec<i32> = contexts.iter().map(|context| context.device().cast_signed()).collect();
        let mut handles = vec![ptr::null_mut(); contexts.len()];
        let ranks = u32::try_from(contexts.len()).unwrap_or(u32::MAX);
        // SAFETY: `devices` and `handles` have `ranks` elements each.
        // SAFETY: The call only reads and writes elements of these arrays, which outlive it.
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

    /// Returns the context of the communicator.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// Returns the index of this rank in the communicator.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// Returns the number of ranks of the communicator.
    pub fn ranks(&self) -> u32 {
        self.ranks
    }

    /// Queues an all-reduce: `dst[i]` of each rank becomes the sum of `src[i]` of all ranks, for `count` elements.
    ///
    /// `src` and `dst` may be the same address.
    ///
    /// # Errors
    /// [`AscendError`] of kind [`Unsupported`](AscendErrorKind::Unsupported) if `elem` is not f32, f16 or bf16; with
    /// the code of `HcclAllReduce` if the operation cannot be queued.
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
        // SAFETY: `self` and `stream` keep the communicator and the stream alive during the call.
        // SAFETY: The host does not access `src` and `dst`: a wrong device address makes the stream fail, not the host.
        let code = unsafe { function(src, dst, count, dtype, HCCL_REDUCE_SUM, self.handle, stream.handle()) };
        self.check(CALL, code)
    }

    /// Queues an all-gather: `dst` of each rank becomes the concatenation of `src` of all ranks, in rank order.
    ///
    /// Each `src` has `count` elements, and each `dst` has `count * ranks` elements.
    ///
    /// # Errors
    /// [`AscendError`] of kind [`Unsupported`](AscendErrorKind::Unsupported) if `elem` is not f32, f16 or bf16; with
    /// the code of `HcclAllGather` if the operation cannot be queued.
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
        // SAFETY: `self` and `stream` keep the communicator and the stream alive during the call.
        // SAFETY: The host does not access `src` and `dst`: a wrong device address makes the stream fail, not the host.
        let code = unsafe { function(src, dst, count, dtype, self.handle, stream.handle()) };
        self.check(CALL, code)
    }

    /// Queues a reduce-scatter: `dst` of rank r becomes the sum over all ranks of the r-th shard of `src`.
    ///
    /// A shard has `count` elements: each `dst` has `count` elements, and each `src` has `count * ranks` elements.
    ///
    /// # Errors
    /// [`AscendError`] of kind [`Unsupported`](AscendErrorKind::Unsupported) if `elem` is not f32, f16 or bf16; with
    /// the code of `HcclReduceScatter` if the operation cannot be queued.
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
        // SAFETY: `self` and `stream` keep the communicator and the stream alive during the call.
        // SAFETY: The host does not access `src` and `dst`: a wrong device address makes the stream fail, not the host.
        let code = unsafe { function(src, dst, count, dtype, HCCL_REDUCE_SUM, self.handle, stream.handle()) };
        self.check(CALL, code)
    }

    /// Queues a broadcast: the `count` elements at `buffer` of each rank become those of rank `root`.
    ///
    /// # Errors
    /// [`AscendError`] of kind [`Unsupported`](AscendErrorKind::Unsupported) if `elem` is not f32, f16 or bf16; with
    /// the code of `HcclBroadcast` if the operation cannot be queued.
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
        // SAFETY: `self` and `stream` keep the communicator and the stream alive during the call.
        // SAFETY: The host does not access `buffer`: a wrong device address makes the stream fail, not the host.
        let code = unsafe { function(buffer.as_ptr(), count as u64, dtype, root, self.handle, stream.handle()) };
        self.check(CALL, code)
    }

    /// Returns the asynchronous error of the communicator, or `None` if none is known so far. It does not block.
    ///
    /// # Errors
    /// [`AscendError`] of kind [`Unsupported`](AscendErrorKind::Unsupported) if the install lacks
    /// `HcclGetCommAsyncError`; with the code of the call if the query itself fails.
    pub fn async_error(&self) -> Result<Option<AscendError>, AscendError> {
        const CALL: &str = "HcclGetCommAsyncError";
        let function = self.context.runtime().optional(CALL, self.symbols().hccl_get_comm_async_error)?;
        let mut code = HCCL_SUCCESS;
        // SAFETY: `self` keeps the communicator alive during the call.
        // SAFETY: `code` is a local variable; the call writes one enumeration value to it.
        self.check(CALL, unsafe { function(self.handle, &raw mut code) })?;
        if code == HCCL_SUCCESS {
            return Ok(None);
        }
        let (kind, message) = (AscendErrorKind::from_hccl(code), self.collectives.error_string(code));
        Ok(Some(AscendError { call: CALL, code, kind, message }))
    }

    fn symbols(&self) -> &HcclSymbols {
        &self.collectives.symbols
    }

    fn check(&self, call: &'static str, code: i32) -> Result<(), AscendError> {
        self.collectives.check(self.context.runtime(), call, code)
    }

    /// Returns the value of `HcclDataType`; only f32, f16 and bf16 are supported.
    fn data_type(&self, call: &'static str, elem: ElemType) -> Result<i32, AscendError> {
        match elem {
            ElemType::F32 => Ok(HCCL_DATA_TYPE_FP32),
            ElemType::F16 => Ok(HCCL_DATA_TYPE_FP16),
            ElemType::BF16 => Ok(HCCL_DATA_TYPE_BFP16),
            _ => Err(AscendError {
                call,
                code: HCCL_E_NOT_SUPPORT,
                kind: AscendErrorKind::from_hccl(HCCL_E_NOT_SUPPORT),
                message: format!("rank {}: collectives support F32, F16 and BF16, not {elem:?}", self.rank),
            }),
        }
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        let runtime = self.context.runtime();
        runtime.note_drop(self.context.bind());
        // SAFETY: The handle comes from a successful join and is destroyed only here, with its context current.
        let code = unsafe { (self.symbols().hccl_comm_destroy)(self.handle) };
        runtime.note_drop(self.check("HcclCommDestroy", code));
    }
}
