//! The runtime of the process: initialization, version and device queries, conversion of codes to results.
//!
//! After a failed call, the runtime's message is read at once on the same thread, because it is thread-local and
//! reading it clears it. Dropping a [`Runtime`] does not finalize it: the runtime crashes if it is finalized while the
//! process exits.

#![allow(unsafe_code)]

use crate::abi::{ACL_ERROR_REPEAT_INITIALIZE, ACL_RT_THREAD_LEVEL, ACL_SUCCESS};
use crate::error::{AscendError, AscendErrorKind, LoadError, SHIM_NO_SYMBOL};
use crate::ffi::loader::Library;
use crate::ffi::symbols::Symbols;
use std::ffi::{CStr, c_char, c_int};
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Loaded `AscendCL` library. Clones share one table of functions.
#[derive(Clone, Debug)]
pub struct Runtime {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    symbols: Symbols,
    /// First failure of a destructor since the last call of [`Runtime::take_drop_error`].
    drop_error: Mutex<Option<AscendError>>,
}

/// Optional features that the installed version supports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::struct_excessive_bools)]
#[non_exhaustive]
pub struct Capabilities {
    /// Streams can be captured into graphs (CANN 8.1).
    pub capture: bool,
    /// Tasks of a captured graph can be issued again with other arguments.
    ///
    /// The driver may still reject the calls (codes 207000 and 207019).
    pub task_update: bool,
    /// Running streams can be aborted (CANN 8.1).
    pub stream_abort: bool,
    /// The number of streams that a device can still create can be queried (CANN 8.5).
    pub stream_count: bool,
    /// A failure can stop all work of its context.
    pub stop_on_failure: bool,
    /// A time limit for kernels can be set.
    pub kernel_time_limit: bool,
    /// A device can be reset even if it is in use (CANN 8.1).
    pub reset_force: bool,
}

impl Runtime {
    /// Looks up all functions of the runtime.
    ///
    /// # Errors
    /// [`LoadError::MissingSymbol`] if the library lacks a required function.
    pub fn load(library: &Library) -> Result<Self, LoadError> {
        Ok(Self { inner: Arc::new(Inner { symbols: Symbols::load(library)?, drop_error: Mutex::new(None) }) })
    }

    /// Returns the table of C functions.
    pub fn symbols(&self) -> &Symbols {
        &self.inner.symbols
    }

    /// Returns which optional features the installed version supports.
    pub fn capabilities(&self) -> Capabilities {
        let s = self.symbols();
        let capture = s.aclmdl_ri_capture_begin.is_some()
            && s.aclmdl_ri_capture_end.is_some()
            && s.aclmdl_ri_execute_async.is_some()
            && s.aclmdl_ri_destroy.is_some();
        let task_update = s.aclmdl_ri_capture_task_grp_begin.is_some()
            && s.aclmdl_ri_capture_task_grp_end.is_some()
            && s.aclmdl_ri_capture_task_update_begin.is_some()
            && s.aclmdl_ri_capture_task_update_end.is_some()
            && s.aclrt_reset_event.is_some();
        Capabilities {
            capture,
            task_update: capture && task_update,
            stream_abort: s.aclrt_stream_abort.is_some(),
            stream_count: s.aclrt_get_stream_available_num.is_some(),
            stop_on_failure: s.aclrt_set_stream_failure_mode.is_some(),
            kernel_time_limit: s.aclrt_set_op_execute_time_out.is_some(),
            reset_force: s.aclrt_reset_device_force.is_some(),
        }
    }

    /// Initializes the runtime for the process. Succeeds as well if the runtime has already been initialized.
    ///
    /// # Errors
    /// [`AscendError`] if `aclInit` fails for another reason.
    pub fn init(&self) -> Result<(), AscendError> {
        // SAFETY: `aclInit` accepts a null pointer as configuration.
        match unsafe { (self.symbols().acl_init)(ptr::null()) } {
            ACL_ERROR_REPEAT_INITIALIZE => Ok(()),
            code => self.check("aclInit", code),
        }
    }

    /// Finalizes the runtime for the whole process, including its other users. Never call it while the process exits.
    ///
    /// # Errors
    /// [`AscendError`] if `aclFinalize` fails.
    pub fn finalize(&self) -> Result<(), AscendError> {
        // SAFETY: `aclFinalize` takes no argument.
        self.check("aclFinalize", unsafe { (self.symbols().acl_finalize)() })
    }

    /// Returns the version of CANN as one number, e.g. 90000000 for 9.0.0. Available from CANN 8.5 on.
    ///
    /// # Errors
    /// [`AscendError`] of kind [`Unsupported`](AscendErrorKind::Unsupported) if the install lacks
    /// `aclsysGetVersionNum`; with the code of the call if it fails.
    pub fn cann_version(&self) -> Result<i32, AscendError> {
        let function = self.optional("aclsysGetVersionNum", self.symbols().aclsys_get_version_num)?;
        let mut version = 0;
        // SAFETY: The call only reads the name, although the header declares it as `char *`.
        // SAFETY: `version` is a local variable of type `int32_t`; the call only writes to it.
        let code = unsafe { function(c"runtime".as_ptr().cast_mut(), &raw mut version) };
        self.check("aclsysGetVersionNum", code)?;
        Ok(version)
    }

    /// Returns the number of devices that this process can use; `ASCEND_RT_VISIBLE_DEVICES` restricts them.
    ///
    /// # Errors
    /// [`AscendError`] if `aclrtGetDeviceCount` fails.
    pub fn device_count(&self) -> Result<u32, AscendError> {
        let mut count = 0;
        // SAFETY: `count` is a local variable of type `uint32_t`; the call only writes to it.
        let code = unsafe { (self.symbols().aclrt_get_device_count)(&raw mut count) };
        self.check("aclrtGetDeviceCount", code)?;
        Ok(count)
    }

    /// Returns the name of the chip, e.g. `Ascend910B3`, or `None` if the runtime reports none.
    ///
    /// If the host has several kinds of chips, the name is that of device 0.
    pub fn soc_name(&self) -> Option<String> {
        // SAFETY: The returned pointer is null or a NUL-terminated string that is valid until this thread's next call.
        unsafe { copied((self.symbols().aclrt_get_soc_name)()) }
    }

    /// Sets a time limit for all kernels of the process, in whole seconds.
    ///
    /// Without it, a hung kernel fails only after 18 minutes on a 910B.
    ///
    /// # Errors
    /// [`AscendError`] of kind [`Unsupported`](AscendErrorKind::Unsupported) if the install lacks
    /// `aclrtSetOpExecuteTimeOut`; with the code of the call if it fails.
    pub fn set_kernel_time_limit(&self, limit: Duration) -> Result<(), AscendError> {
        let function = self.optional("aclrtSetOpExecuteTimeOut", self.symbols().aclrt_set_op_execute_time_out)?;
        let seconds = u32::try_from(limit.as_secs().max(1)).unwrap_or(u32::MAX);
        // SAFETY: `aclrtSetOpExecuteTimeOut` takes only an integer.
        self.check("aclrtSetOpExecuteTimeOut", unsafe { function(seconds) })
    }

    /// Resets a device even if contexts or streams still use it: the way to recover from a crashed kernel.
    ///
    /// # Errors
    /// [`AscendError`] of kind [`Unsupported`](AscendErrorKind::Unsupported) if the install lacks
    /// `aclrtResetDeviceForce`; with the code of the call if it fails.
    pub fn reset_device_force(&self, device: u32) -> Result<(), AscendError> {
        let function = self.optional("aclrtResetDeviceForce", self.symbols().aclrt_reset_device_force)?;
        // SAFETY: `aclrtResetDeviceForce` only takes an integer, and reports an invalid device as an error.
        self.check("aclrtResetDeviceForce", unsafe { function(device.cast_signed()) })
    }

    /// Returns the last error code of this thread (0 if none), or `None` if the install lacks `aclrtPeekAtLastError`.
    pub fn last_error(&self) -> Option<i32> {
        // SAFETY: `aclrtPeekAtLastError` only takes an enumeration.
        self.symbols().aclrt_peek_at_last_error.map(|function| unsafe { function(ACL_RT_THREAD_LEVEL) })
    }

    /// Converts a code into a result; the error contains the runtime's message.
    ///
    /// # Errors
    /// [`AscendError`] with this code if `code` is not `ACL_SUCCESS`.
    pub fn check(&self, call: &'static str, code: c_int) -> Result<(), AscendError> {
        if code == ACL_SUCCESS {
            return Ok(());
        }
        Err(AscendError { call, code, kind: AscendErrorKind::from_code(code), message: self.recent_message() })
    }

    /// Returns the runtime's message for this thread's latest failure; reading clears it.
    pub(crate) fn recent_message(&self) -> String {
        // SAFETY: The returned pointer is null or a NUL-terminated string that is valid until this thread's next call.
        let message = unsafe { copied((self.symbols().acl_get_recent_err_msg)()) };
        message.unwrap_or_default().trim_end().to_owned()
    }

    /// Returns a function that some versions lack, or an error of kind `Unsupported`.
    #[allow(clippy::unused_self)]
    pub(crate) fn optional<F>(&self, call: &'static str, function: Option<F>) -> Result<F, AscendError> {
        function.ok_or_else(|| AscendError {
            call,
            code: SHIM_NO_SYMBOL,
            kind: AscendErrorKind::Unsupported,
            message: "the installed version does not have this function".to_owned(),
        })
    }

    /// Stores the first failure of a destructor, because a destructor cannot return it.
    pub(crate) fn note_drop(&self, result: Result<(), AscendError>) {
        if let Err(error) = result {
            self.inner.drop_error.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        }
    }

    /// Returns and clears the first failure of a destructor since the last call of this method.
    pub fn take_drop_error(&self) -> Option<AscendError> {
        self.inner.drop_error.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// Copies a C string; returns `None` for a null pointer.
///
/// # Safety
///
/// `text` must be null or point to a NUL-terminated string that no thread changes during the call.
pub(crate) unsafe fn copied(text: *const c_char) -> Option<String> {
    if text.is_null() {
        return None;
    }
    // SAFETY: `text` is not null, hence a NUL-terminated string that no thread changes, as the caller guarantees.
    Some(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}
