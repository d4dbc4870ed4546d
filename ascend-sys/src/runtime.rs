//! The declared functions as calls that return `Result`.
//!
//! After a failed call the runtime's own message is fetched at once, on the same thread: it is thread-local and reading
//! clears it. Nothing happens on drop; the runtime crashes when it is finalised while a process exits.

#![allow(unsafe_code)]

use crate::error::{AclError, AclErrorKind, LoadError};
use crate::loader::Library;
use crate::symbols::{ACL_ERROR_REPEAT_INITIALIZE, ACL_SUCCESS, Symbols};
use std::ffi::{CStr, c_char, c_int};
use std::ptr;

/// `AscendCL`, ready to be called.
#[derive(Clone, Copy, Debug)]
pub struct Runtime {
    symbols: Symbols,
}

impl Runtime {
    /// Looks up every function used.
    pub fn load(library: &Library) -> Result<Self, LoadError> {
        Ok(Self { symbols: Symbols::load(library)? })
    }

    /// The functions themselves.
    pub fn symbols(&self) -> &Symbols {
        &self.symbols
    }

    /// Initialises the runtime for the process. That somebody else has done so is success too.
    pub fn init(&self) -> Result<(), AclError> {
        // SAFETY: a null configuration is allowed.
        match unsafe { (self.symbols.acl_init)(ptr::null()) } {
            ACL_ERROR_REPEAT_INITIALIZE => Ok(()),
            code => self.check("aclInit", code),
        }
    }

    /// Tears the runtime down for the whole process, other users of it included. Never call it while the process exits.
    pub fn finalize(&self) -> Result<(), AclError> {
        // SAFETY: the function takes no argument.
        self.check("aclFinalize", unsafe { (self.symbols.acl_finalize)() })
    }

    /// Version of the interface (major, minor, patch); not that of CANN.
    pub fn version(&self) -> Result<(i32, i32, i32), AclError> {
        let (mut major, mut minor, mut patch) = (0, 0, 0);
        // SAFETY: three valid, distinct places for an int32_t.
        let code = unsafe { (self.symbols.aclrt_get_version)(&raw mut major, &raw mut minor, &raw mut patch) };
        self.check("aclrtGetVersion", code)?;
        Ok((major, minor, patch))
    }

    /// Devices this process may use (`ASCEND_RT_VISIBLE_DEVICES` counts).
    pub fn device_count(&self) -> Result<u32, AclError> {
        let mut count = 0;
        // SAFETY: a valid place for a uint32_t.
        let code = unsafe { (self.symbols.aclrt_get_device_count)(&raw mut count) };
        self.check("aclrtGetDeviceCount", code)?;
        Ok(count)
    }

    /// The chip, for example `Ascend910B3`; of device 0 on hosts with several. `None` if the runtime does not say.
    pub fn soc_name(&self) -> Option<String> {
        // SAFETY: null, or a string that is valid until this thread's next call.
        unsafe { copied((self.symbols.aclrt_get_soc_name)()) }
    }

    /// Turns a code into a result, with the runtime's words for a failure.
    pub fn check(&self, call: &'static str, code: c_int) -> Result<(), AclError> {
        if code == ACL_SUCCESS {
            return Ok(());
        }
        // SAFETY: null, or a string that is valid until this thread's next call.
        let message = unsafe { copied((self.symbols.acl_get_recent_err_msg)()) }.unwrap_or_default();
        Err(AclError { call, code, kind: AclErrorKind::of(code), message: message.trim_end().to_owned() })
    }
}

/// The text at a C string, `None` if there is none.
///
/// # Safety
///
/// `text` is null or points to a NUL-terminated string that nobody changes meanwhile.
unsafe fn copied(text: *const c_char) -> Option<String> {
    if text.is_null() {
        return None;
    }
    // SAFETY: not null, and the caller's promise.
    Some(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    unsafe extern "C" fn zero() -> c_int {
        0
    }

    unsafe extern "C" fn crash() -> c_int {
        507_015
    }

    unsafe extern "C" fn again(_: *const c_char) -> c_int {
        ACL_ERROR_REPEAT_INITIALIZE
    }

    unsafe extern "C" fn no_device(_: *const c_char) -> c_int {
        507_033
    }

    unsafe extern "C" fn said() -> *const c_char {
        c"EZ9999: inner error \xff\n".as_ptr()
    }

    unsafe extern "C" fn silent() -> *const c_char {
        ptr::null()
    }

    unsafe extern "C" fn version(major: *mut i32, minor: *mut i32, patch: *mut i32) -> c_int {
        // SAFETY: the caller gives three valid places.
        unsafe { (*major, *minor, *patch) = (1, 14, 2) };
        0
    }

    unsafe extern "C" fn count(count: *mut u32) -> c_int {
        // SAFETY: the caller gives a valid place.
        unsafe { *count = 8 };
        0
    }

    unsafe extern "C" fn no_count(_: *mut u32) -> c_int {
        107_002
    }

    const WORKING: Symbols = Symbols {
        acl_init: again,
        acl_finalize: zero,
        acl_get_recent_err_msg: said,
        aclrt_get_version: version,
        aclrt_get_device_count: count,
        aclrt_get_soc_name: said,
    };

    #[test]
    fn answers_come_through_and_a_second_init_is_success() {
        let runtime = Runtime { symbols: WORKING };
        assert_eq!(runtime.init(), Ok(()));
        assert_eq!(runtime.version(), Ok((1, 14, 2)));
        assert_eq!(runtime.device_count(), Ok(8));
        assert_eq!(runtime.soc_name().as_deref(), Some("EZ9999: inner error \u{fffd}\n"));
        assert_eq!(runtime.finalize(), Ok(()));
    }

    #[test]
    fn failures_name_call_code_and_the_runtimes_words() {
        let runtime = Runtime { symbols: Symbols { acl_init: no_device, acl_finalize: crash, ..WORKING } };
        let error = runtime.init().expect_err("507033");
        assert_eq!((error.call, error.code, error.kind), ("aclInit", 507_033, AclErrorKind::DeviceLost));
        assert_eq!(
            runtime.finalize().expect_err("507015").to_string(),
            "aclFinalize failed with code 507015 (kernel exception): EZ9999: inner error \u{fffd}"
        );
    }

    #[test]
    fn a_silent_runtime_gives_no_text() {
        let silent = Symbols {
            acl_get_recent_err_msg: silent,
            aclrt_get_soc_name: silent,
            aclrt_get_device_count: no_count,
            ..WORKING
        };
        let runtime = Runtime { symbols: silent };
        assert_eq!(runtime.soc_name(), None);
        assert_eq!(
            runtime.device_count().expect_err("107002").to_string(),
            "aclrtGetDeviceCount failed with code 107002 (wrong use)"
        );
    }
}
