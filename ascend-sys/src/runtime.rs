//! The runtime of a process: initialize it, ask what it is, turn its codes into results.
//!
//! After a failed call the runtime's own message is fetched at once, on the same thread: it is thread-local and reading
//! clears it. Nothing happens on drop; the runtime crashes when it is finalized while a process exits.

#![allow(unsafe_code)]

use crate::abi::{ACL_ERROR_REPEAT_INITIALIZE, ACL_RT_THREAD_LEVEL, ACL_SUCCESS};
use crate::error::{AscendError, AscendErrorKind, LoadError, SHIM_NO_SYMBOL};
use crate::ffi::loader::Library;
use crate::ffi::symbols::Symbols;
use std::ffi::{CStr, c_char, c_int};
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// `AscendCL`, ready to be called. Clones share one table of functions.
#[derive(Clone, Debug)]
pub struct Runtime {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    symbols: Symbols,
    /// The first failure of a destructor that nobody has heard of yet.
    drop_error: Mutex<Option<AscendError>>,
}

/// What this install can do beyond what all can.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::struct_excessive_bools)]
#[non_exhaustive]
pub struct Capabilities {
    /// Streams can be captured into graphs (CANN 8.1).
    pub capture: bool,
    /// Tasks of a captured graph can be re-issued with other arguments. The driver may refuse even so (207000, 207019).
    pub task_update: bool,
    /// A running stream can be aborted (CANN 8.1).
    pub stream_abort: bool,
    /// The streams left on a device can be counted (CANN 8.5).
    pub stream_count: bool,
    /// A failure can stop its context.
    pub stop_on_failure: bool,
    /// A time limit for kernels can be set.
    pub kernel_time_limit: bool,
    /// A device can be reset whoever still holds it (CANN 8.1).
    pub reset_force: bool,
}

impl Runtime {
    /// Looks up every function used.
    pub fn load(library: &Library) -> Result<Self, LoadError> {
        Ok(Self { inner: Arc::new(Inner { symbols: Symbols::load(library)?, drop_error: Mutex::new(None) }) })
    }

    /// The functions themselves.
    pub fn symbols(&self) -> &Symbols {
        &self.inner.symbols
    }

    /// What this install can do.
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

    /// Initializes the runtime for the process. That somebody else has done so is success too.
    pub fn init(&self) -> Result<(), AscendError> {
        // SAFETY: a null configuration is allowed.
        match unsafe { (self.symbols().acl_init)(ptr::null()) } {
            ACL_ERROR_REPEAT_INITIALIZE => Ok(()),
            code => self.check("aclInit", code),
        }
    }

    /// Tears the runtime down for the whole process, other users of it included. Never call it while the process exits.
    pub fn finalize(&self) -> Result<(), AscendError> {
        // SAFETY: the function takes no argument.
        self.check("aclFinalize", unsafe { (self.symbols().acl_finalize)() })
    }

    /// CANN's version as one number, 90000000 for 9.0.0; from 8.5 on.
    pub fn cann_version(&self) -> Result<i32, AscendError> {
        let function = self.optional("aclsysGetVersionNum", self.symbols().aclsys_get_version_num)?;
        let mut version = 0;
        // SAFETY: the name is only read, though the header says otherwise; a valid place for an int32_t.
        let code = unsafe { function(c"runtime".as_ptr().cast_mut(), &raw mut version) };
        self.check("aclsysGetVersionNum", code)?;
        Ok(version)
    }

    /// Devices this process may use (`ASCEND_RT_VISIBLE_DEVICES` counts).
    pub fn device_count(&self) -> Result<u32, AscendError> {
        let mut count = 0;
        // SAFETY: a valid place for a uint32_t.
        let code = unsafe { (self.symbols().aclrt_get_device_count)(&raw mut count) };
        self.check("aclrtGetDeviceCount", code)?;
        Ok(count)
    }

    /// The chip, for example `Ascend910B3`; of device 0 on hosts with several. `None` if the runtime does not say.
    pub fn soc_name(&self) -> Option<String> {
        // SAFETY: null, or a string that is valid until this thread's next call.
        unsafe { copied((self.symbols().aclrt_get_soc_name)()) }
    }

    /// Limits every kernel of the process, in whole seconds. Without it a hung kernel shows after 18 minutes on a 910B.
    pub fn set_kernel_time_limit(&self, limit: Duration) -> Result<(), AscendError> {
        let function = self.optional("aclrtSetOpExecuteTimeOut", self.symbols().aclrt_set_op_execute_time_out)?;
        let seconds = u32::try_from(limit.as_secs().max(1)).unwrap_or(u32::MAX);
        // SAFETY: takes a number.
        self.check("aclrtSetOpExecuteTimeOut", unsafe { function(seconds) })
    }

    /// Gives a device back whoever still holds it: the way out after a kernel crashed.
    pub fn reset_device_force(&self, device: u32) -> Result<(), AscendError> {
        let function = self.optional("aclrtResetDeviceForce", self.symbols().aclrt_reset_device_force)?;
        // SAFETY: takes a number.
        self.check("aclrtResetDeviceForce", unsafe { function(device.cast_signed()) })
    }

    /// This thread's last error, 0 if none; `None` where the runtime does not say.
    pub fn last_error(&self) -> Option<i32> {
        // SAFETY: takes an enumeration.
        self.symbols().aclrt_peek_at_last_error.map(|function| unsafe { function(ACL_RT_THREAD_LEVEL) })
    }

    /// Turns a code into a result, with the runtime's words for a failure.
    pub fn check(&self, call: &'static str, code: c_int) -> Result<(), AscendError> {
        if code == ACL_SUCCESS {
            return Ok(());
        }
        Err(AscendError { call, code, kind: AscendErrorKind::from_code(code), message: self.recent_message() })
    }

    /// The runtime's words for this thread's latest failure; reading clears them.
    pub(crate) fn recent_message(&self) -> String {
        // SAFETY: null, or a string that is valid until this thread's next call.
        let message = unsafe { copied((self.symbols().acl_get_recent_err_msg)()) };
        message.unwrap_or_default().trim_end().to_owned()
    }

    /// A function that not every version has.
    #[allow(clippy::unused_self)]
    pub(crate) fn optional<F>(&self, call: &'static str, function: Option<F>) -> Result<F, AscendError> {
        function.ok_or_else(|| AscendError {
            call,
            code: SHIM_NO_SYMBOL,
            kind: AscendErrorKind::Unsupported,
            message: "the installed version has no such function".to_owned(),
        })
    }

    /// Keeps the first failure of a destructor; a destructor cannot report it itself.
    pub(crate) fn note_drop(&self, result: Result<(), AscendError>) {
        if let Err(error) = result {
            self.inner.drop_error.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        }
    }

    /// The first failure of a destructor since the last time this was asked.
    pub fn take_drop_error(&self) -> Option<AscendError> {
        self.inner.drop_error.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// The text at a C string, `None` if there is none.
///
/// # Safety
///
/// `text` is null or points to a NUL-terminated string that nobody changes meanwhile.
pub(crate) unsafe fn copied(text: *const c_char) -> Option<String> {
    if text.is_null() {
        return None;
    }
    // SAFETY: not null, and the caller's promise.
    Some(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}
