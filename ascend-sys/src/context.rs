//! Contexts: owners of streams, events and memory on a device. Almost every call needs a current context on its thread.

#![allow(unsafe_code)]

use crate::abi::{ACL_HBM_MEM, ACL_OPT_DETERMINISTIC, AclrtContext};
use crate::error::AscendError;
use crate::runtime::Runtime;
use std::ptr;
use std::sync::Arc;

/// Explicit context on one device. Clones share it; dropping the last clone destroys it and releases the device.
///
/// Contexts are isolated: a failure in stop mode stops only the streams of its own context. To recover from a crash,
/// drop every object created in the context and create a new one. A thread uses a context after [`Context::bind`];
/// destructors bind the context themselves.
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

// SAFETY: The handle may be made current on any thread.
unsafe impl Send for Inner {}
// SAFETY: The runtime locks the state of a context that threads share.
unsafe impl Sync for Inner {}

impl Context {
    /// Binds the thread to a device and creates a context on it, which becomes the thread's current context.
    ///
    /// The first call in a process takes seconds.
    ///
    /// # Errors
    /// [`AscendError`] if `aclrtSetDevice` or `aclrtCreateContext` fails, e.g. because the device does not exist.
    pub fn create(runtime: &Runtime, device: u32) -> Result<Self, AscendError> {
        let symbols = runtime.symbols();
        // SAFETY: `aclrtSetDevice` only takes an integer, and reports an invalid device as an error.
        runtime.check("aclrtSetDevice", unsafe { (symbols.aclrt_set_device)(device.cast_signed()) })?;
        let mut handle = ptr::null_mut();
        // SAFETY: `handle` is a local variable; the call writes one handle to it.
        let code = unsafe { (symbols.aclrt_create_context)(&raw mut handle, device.cast_signed()) };
        if let Err(error) = runtime.check("aclrtCreateContext", code) {
            // SAFETY: `aclrtResetDevice` only takes an integer; the call releases the reference acquired by
            // `aclrtSetDevice` above.
            let code = unsafe { (symbols.aclrt_reset_device)(device.cast_signed()) };
            runtime.note_drop(runtime.check("aclrtResetDevice", code));
            return Err(error);
        }
        Ok(Self { inner: Arc::new(Inner { runtime: runtime.clone(), device, handle }) })
    }

    /// Makes this context the calling thread's current one.
    ///
    /// # Errors
    /// [`AscendError`] if `aclrtSetCurrentContext` fails.
    pub fn bind(&self) -> Result<(), AscendError> {
        self.inner.bind()
    }

    /// Returns the runtime of the context.
    pub fn runtime(&self) -> &Runtime {
        &self.inner.runtime
    }

    /// Returns the index of the device.
    pub fn device(&self) -> u32 {
        self.inner.device
    }

    /// Waits for all streams of the device.
    ///
    /// # Errors
    /// [`AscendError`] if `aclrtSynchronizeDevice` fails; it also reports failures of the work it waits for.
    pub fn synchronize(&self) -> Result<(), AscendError> {
        // SAFETY: `aclrtSynchronizeDevice` takes no argument.
        self.runtime().check("aclrtSynchronizeDevice", unsafe { (self.runtime().symbols().aclrt_synchronize_device)() })
    }

    /// Returns the bytes of device memory as (free, total). The total excludes memory reserved by the system.
    ///
    /// # Errors
    /// [`AscendError`] if `aclrtGetMemInfo` fails.
    pub fn memory_bytes(&self) -> Result<(u64, u64), AscendError> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: `free` and `total` are local variables of type `size_t`; the call only writes to them.
        let code = unsafe { (self.runtime().symbols().aclrt_get_mem_info)(ACL_HBM_MEM, &raw mut free, &raw mut total) };
        self.runtime().check("aclrtGetMemInfo", code)?;
        Ok((free as u64, total as u64))
    }

    /// Sets whether this context uses only kernels whose sums do not depend on timing.
    ///
    /// The context must be current. Call this method before the first launch.
    ///
    /// # Errors
    /// [`AscendError`] of kind [`Unsupported`](crate::AscendErrorKind::Unsupported) if the install lacks
    /// `aclrtCtxSetSysParamOpt`; with the code of the call if it fails.
    pub fn set_deterministic(&self, on: bool) -> Result<(), AscendError> {
        let function =
            self.runtime().optional("aclrtCtxSetSysParamOpt", self.runtime().symbols().aclrt_ctx_set_sys_param_opt)?;
        // SAFETY: `aclrtCtxSetSysParamOpt` takes only integers.
        let code = unsafe { function(ACL_OPT_DETERMINISTIC, i64::from(on)) };
        self.runtime().check("aclrtCtxSetSysParamOpt", code)
    }

    /// Returns the number of streams that can still be created on the device.
    ///
    /// # Errors
    /// [`AscendError`] of kind [`Unsupported`](crate::AscendErrorKind::Unsupported) if the install lacks
    /// `aclrtGetStreamAvailableNum`; with the code of the call if it fails.
    pub fn streams_left(&self) -> Result<u32, AscendError> {
        let function = self
            .runtime()
            .optional("aclrtGetStreamAvailableNum", self.runtime().symbols().aclrt_get_stream_available_num)?;
        let mut count = 0;
        // SAFETY: `count` is a local variable of type `uint32_t`; the call only writes to it.
        let code = unsafe { function(&raw mut count) };
        self.runtime().check("aclrtGetStreamAvailableNum", code)?;
        Ok(count)
    }

    /// Runs a destructor with the context current, and stores its failure for [`Runtime::take_drop_error`].
    ///
    /// The destructor runs even if the context cannot be bound: a lost device fails every other call, but still frees
    /// memory.
    pub(crate) fn destroy(&self, call: &'static str, destroy: impl FnOnce() -> i32) {
        self.runtime().note_drop(self.bind());
        self.runtime().note_drop(self.runtime().check(call, destroy()));
    }
}

impl Inner {
    fn bind(&self) -> Result<(), AscendError> {
        // SAFETY: `self` owns the handle, which is valid until `self` is dropped.
        let code = unsafe { (self.runtime.symbols().aclrt_set_current_context)(self.handle) };
        self.runtime.check("aclrtSetCurrentContext", code)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let symbols = self.runtime.symbols();
        // SAFETY: Each object created in the context holds a reference to it, so no such object exists any longer.
        // SAFETY: The handle is destroyed only here.
        let code = unsafe { (symbols.aclrt_destroy_context)(self.handle) };
        self.runtime.note_drop(self.runtime.check("aclrtDestroyContext", code));
        // SAFETY: `aclrtResetDevice` only takes an integer; the call releases the reference acquired by
        // `Context::create`.
        let code = unsafe { (symbols.aclrt_reset_device)(self.device.cast_signed()) };
        self.runtime.note_drop(self.runtime.check("aclrtResetDevice", code));
    }
}
