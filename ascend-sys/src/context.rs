//! A device's context: what streams, events and memory belong to, and what a thread needs before almost any call.

#![allow(unsafe_code)]

use crate::abi::{ACL_HBM_MEM, ACL_OPT_DETERMINISTIC, AclrtContext};
use crate::error::AscendError;
use crate::runtime::Runtime;
use std::ptr;
use std::sync::Arc;

/// An explicit context on one device. Clones share it; the last one destroys it and releases the device.
///
/// A context is an island: a failure in stop mode stops its streams and no others, and rebuilding after a crash means
/// dropping everything made in it. A thread uses a context after [`Context::bind`]; destructors bind it themselves.
#[derive(Clone, Debug)]
pub struct Context {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    runtime: Runtime,
    device: u32,
    handle: AclrtContext,
}

// SAFETY: the handle may be made current on any thread; the runtime locks what it shares between threads.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Context {
    /// Binds the thread to a device and makes a context on it, which becomes the thread's current one. The first call of a
    /// process takes seconds.
    pub fn create(runtime: &Runtime, device: u32) -> Result<Self, AscendError> {
        let symbols = runtime.symbols();
        // SAFETY: takes a number.
        runtime.check("aclrtSetDevice", unsafe { (symbols.aclrt_set_device)(device.cast_signed()) })?;
        let mut handle = ptr::null_mut();
        // SAFETY: a valid place for a handle.
        let code = unsafe { (symbols.aclrt_create_context)(&raw mut handle, device.cast_signed()) };
        if let Err(error) = runtime.check("aclrtCreateContext", code) {
            // SAFETY: takes a number; gives back the reference taken above.
            let code = unsafe { (symbols.aclrt_reset_device)(device.cast_signed()) };
            runtime.note_drop(runtime.check("aclrtResetDevice", code));
            return Err(error);
        }
        Ok(Self { inner: Arc::new(Inner { runtime: runtime.clone(), device, handle }) })
    }

    /// Makes this the calling thread's current context.
    pub fn bind(&self) -> Result<(), AscendError> {
        self.inner.bind()
    }

    /// The runtime it lives in.
    pub fn runtime(&self) -> &Runtime {
        &self.inner.runtime
    }

    /// Its device.
    pub fn device(&self) -> u32 {
        self.inner.device
    }

    /// Waits for all streams of the device.
    pub fn synchronize(&self) -> Result<(), AscendError> {
        // SAFETY: takes no argument.
        self.runtime().check("aclrtSynchronizeDevice", unsafe { (self.runtime().symbols().aclrt_synchronize_device)() })
    }

    /// Bytes of device memory (free, total). The total leaves out what the system keeps.
    pub fn memory_bytes(&self) -> Result<(u64, u64), AscendError> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: two valid places for a size_t.
        let code = unsafe { (self.runtime().symbols().aclrt_get_mem_info)(ACL_HBM_MEM, &raw mut free, &raw mut total) };
        self.runtime().check("aclrtGetMemInfo", code)?;
        Ok((free as u64, total as u64))
    }

    /// Asks for kernels whose sums do not depend on timing, for this context; call before anything is launched.
    pub fn set_deterministic(&self, on: bool) -> Result<(), AscendError> {
        let function =
            self.runtime().optional("aclrtCtxSetSysParamOpt", self.runtime().symbols().aclrt_ctx_set_sys_param_opt)?;
        // SAFETY: takes numbers.
        let code = unsafe { function(ACL_OPT_DETERMINISTIC, i64::from(on)) };
        self.runtime().check("aclrtCtxSetSysParamOpt", code)
    }

    /// Streams that can still be made on the device.
    pub fn streams_left(&self) -> Result<u32, AscendError> {
        let function = self
            .runtime()
            .optional("aclrtGetStreamAvailableNum", self.runtime().symbols().aclrt_get_stream_available_num)?;
        let mut count = 0;
        // SAFETY: a valid place for a uint32_t.
        let code = unsafe { function(&raw mut count) };
        self.runtime().check("aclrtGetStreamAvailableNum", code)?;
        Ok(count)
    }

    /// Runs a destructor with the context current, and keeps its failure for [`Runtime::take_drop_error`]. It runs even if
    /// the context cannot be bound: a lost device refuses everything and still gives memory back.
    pub(crate) fn destroy(&self, call: &'static str, destroy: impl FnOnce() -> i32) {
        self.runtime().note_drop(self.bind());
        self.runtime().note_drop(self.runtime().check(call, destroy()));
    }
}

impl Inner {
    fn bind(&self) -> Result<(), AscendError> {
        // SAFETY: the handle lives as long as this.
        let code = unsafe { (self.runtime.symbols().aclrt_set_current_context)(self.handle) };
        self.runtime.check("aclrtSetCurrentContext", code)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let symbols = self.runtime.symbols();
        // SAFETY: everything made in the context holds it, so nothing of it is left; destroyed once.
        let code = unsafe { (symbols.aclrt_destroy_context)(self.handle) };
        self.runtime.note_drop(self.runtime.check("aclrtDestroyContext", code));
        // SAFETY: takes a number; gives back the reference taken when the context was made.
        let code = unsafe { (symbols.aclrt_reset_device)(self.device.cast_signed()) };
        self.runtime.note_drop(self.runtime.check("aclrtResetDevice", code));
    }
}
