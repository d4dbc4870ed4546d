//! The system's dynamic loader: open, look up, ask where an address came from.
//!
//! Handles are never closed. On systems without `dlopen` (`AscendCL` exists for Linux only) opening is an error with
//! that reason, so that the crate still builds there.

#![allow(unsafe_code)]

use std::ffi::{CStr, c_void};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;

/// An open library.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(unix), allow(dead_code))]
pub(crate) struct Handle(NonNull<c_void>);

// SAFETY: a handle is only ever given to dlsym, which may be called from any thread, and is never closed.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

#[cfg(unix)]
impl Handle {
    /// Opens a file, or a bare name by the system's own search; the error is in the loader's words.
    pub(crate) fn open(file: &Path) -> Result<Self, String> {
        use std::os::unix::ffi::OsStrExt as _;

        let name =
            std::ffi::CString::new(file.as_os_str().as_bytes()).map_err(|_| "the path holds a NUL".to_owned())?;
        // SAFETY: a C string; what the library's start-up code does is its vendor's to answer for.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
        NonNull::new(handle).map(Self).ok_or_else(|| {
            // SAFETY: the message belongs to this thread until its next call of the loader.
            let message = unsafe { libc::dlerror() };
            if message.is_null() {
                return "no reason given".to_owned();
            }
            // SAFETY: not null, hence a C string; copied at once.
            unsafe { CStr::from_ptr(message) }.to_string_lossy().into_owned()
        })
    }

    /// The address of a symbol.
    pub(crate) fn find(self, name: &CStr) -> Option<NonNull<c_void>> {
        // SAFETY: the handle is open, the name a C string.
        NonNull::new(unsafe { libc::dlsym(self.0.as_ptr(), name.as_ptr()) })
    }
}

/// The file an address was loaded from.
#[cfg(unix)]
pub(crate) fn file_of(address: NonNull<c_void>) -> Option<PathBuf> {
    use std::os::unix::ffi::OsStrExt as _;

    let mut info = libc::Dl_info {
        dli_fname: std::ptr::null(),
        dli_fbase: std::ptr::null_mut(),
        dli_sname: std::ptr::null(),
        dli_saddr: std::ptr::null_mut(),
    };
    // SAFETY: any address may be asked for; the answer goes to a valid place.
    let known = unsafe { libc::dladdr(address.as_ptr(), &raw mut info) } != 0;
    if !known || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: a C string that lives as long as the library, which is never unloaded.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    Some(std::ffi::OsStr::from_bytes(name.to_bytes()).into())
}

#[cfg(not(unix))]
impl Handle {
    pub(crate) fn open(_: &Path) -> Result<Self, String> {
        Err("this system has no dlopen; AscendCL exists for Linux only".to_owned())
    }

    pub(crate) fn find(self, _: &CStr) -> Option<NonNull<c_void>> {
        None
    }
}

#[cfg(not(unix))]
pub(crate) fn file_of(_: NonNull<c_void>) -> Option<PathBuf> {
    None
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn an_address_leads_back_to_its_file() {
        // The test binary and what it is linked with: any of them has malloc.
        let here = Handle::open(Path::new("libc.so.6")).or_else(|_| Handle::open(Path::new("libc.so"))).expect("opens");
        let file = file_of(here.find(c"malloc").expect("malloc")).expect("a file");
        assert!(file.to_string_lossy().contains('/'), "{}", file.display());
        assert_eq!(here.find(c"no such symbol"), None);
    }
}
