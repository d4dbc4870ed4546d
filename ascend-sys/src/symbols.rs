//! Declarations of the functions used, and their look-up.
//!
//! Signatures are those that have been stable from CANN 8.0 to 9.2: plain C, `aclError` an `int`. A function is declared
//! here when it is first used, never in advance. The whole set is looked up at once, so that a missing function is
//! found at load time and not in the middle of a step.

use crate::error::LoadError;
use crate::loader::Library;
use std::ffi::{CStr, c_char, c_int, c_void};

/// `ACL_SUCCESS`.
pub const ACL_SUCCESS: c_int = 0;

/// `ACL_ERROR_REPEAT_INITIALIZE`: somebody in this process has called `aclInit` before.
pub const ACL_ERROR_REPEAT_INITIALIZE: c_int = 100_002;

/// Declares a struct of function pointers, each field named after its C function.
macro_rules! symbols {
    ($(#[$meta:meta])* pub struct $name:ident { $($(#[$doc:meta])* $field:ident: $symbol:literal fn($($arg:ty),*) -> $ret:ty,)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug)]
        pub struct $name {
            $($(#[$doc])* pub $field: unsafe extern "C" fn($($arg),*) -> $ret,)*
        }

        impl $name {
            /// Looks every function up; the first one missing is the error.
            pub fn load(library: &Library) -> Result<Self, LoadError> {
                Ok(Self {$(
                    $field: {
                        const NAME: &CStr = match CStr::from_bytes_with_nul(concat!($symbol, "\0").as_bytes()) {
                            Ok(name) => name,
                            Err(_) => panic!("a symbol has no inner NUL"),
                        };
                        let address = library.address(NAME, $symbol)?.as_ptr();
                        // SAFETY: the address is that of a function of this name in a library that is never unloaded;
                        // its type is the one its header has had in every version since CANN 8.0.
                        #[allow(unsafe_code)]
                        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($arg),*) -> $ret>(address) }
                    },
                )*})
            }
        }
    };
}

symbols! {
    /// The functions as they stand in the library. Calling one is unsafe: the arguments must be what C expects.
    pub struct Symbols {
        /// `aclError aclInit(const char *configPath)`; null for no configuration.
        acl_init: "aclInit" fn(*const c_char) -> c_int,
        /// `aclError aclFinalize(void)`.
        acl_finalize: "aclFinalize" fn() -> c_int,
        /// `const char *aclGetRecentErrMsg(void)`: may be null, valid until the thread's next call.
        acl_get_recent_err_msg: "aclGetRecentErrMsg" fn() -> *const c_char,
        /// `aclError aclrtGetVersion(int32_t *major, int32_t *minor, int32_t *patch)`: the version of the interface.
        aclrt_get_version: "aclrtGetVersion" fn(*mut i32, *mut i32, *mut i32) -> c_int,
        /// `aclError aclrtGetDeviceCount(uint32_t *count)`.
        aclrt_get_device_count: "aclrtGetDeviceCount" fn(*mut u32) -> c_int,
        /// `const char *aclrtGetSocName(void)`: may be null.
        aclrt_get_soc_name: "aclrtGetSocName" fn() -> *const c_char,
    }
}
