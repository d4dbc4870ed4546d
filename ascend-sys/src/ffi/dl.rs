//! The system's dynamic loader: opens libraries, looks up symbols, and finds the file that contains an address.
//!
//! Libraries are never closed, because `AscendCL` leaves threads and exit handlers running. On systems without
//! `dlopen`, opening a library returns an error with that reason, so that the crate still builds there; `AscendCL`
//! itself exists for Linux only.

#![allow(unsafe_code)]

use std::ffi::{CStr, c_void};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;

#[cfg(unix)]
use libloading::os::unix as system;
#[cfg(unix)]
use std::mem::ManuallyDrop;

/// Open library. Dropping the handle does not close the library.
#[cfg(unix)]
#[derive(Debug)]
pub(crate) struct Handle(ManuallyDrop<system::Library>);

#[cfg(unix)]
impl Handle {
    /// Opens a path, or searches a bare file name with the system's loader. The error is the loader's message.
    pub(crate) fn open(file: &Path) -> Result<Self, String> {
        // SAFETY: The vendor supports running the library's initialization code at any time.
        // SAFETY: The library's exit code runs only at the end of the process, because the handle is never closed.
        let library = unsafe { system::Library::open(Some(file), system::RTLD_NOW | system::RTLD_GLOBAL) };
        library.map(|library| Self(ManuallyDrop::new(library))).map_err(|error| match error {
            libloading::Error::DlOpen { source } => source.to_string(),
            libloading::Error::InteriorZeroElements => "the path contains a NUL byte".to_owned(),
            other => other.to_string(),
        })
    }

    /// Returns the address of a symbol.
    pub(crate) fn find(&self, name: &CStr) -> Option<NonNull<c_void>> {
        // SAFETY: Only the address of the symbol is used; no access depends on the type `*mut c_void`.
        let symbol = unsafe { self.0.get::<*mut c_void>(name) };
        NonNull::new(symbol.ok()?.into_raw())
    }
}

/// Returns the file from which an address was loaded.
#[cfg(unix)]
pub(crate) fn file_of(address: NonNull<c_void>) -> Option<PathBuf> {
    use std::os::unix::ffi::OsStrExt as _;

    let mut info = libc::Dl_info {
        dli_fname: std::ptr::null(),
        dli_fbase: std::ptr::null_mut(),
        dli_sname: std::ptr::null(),
        dli_saddr: std::ptr::null_mut(),
    };
    // SAFETY: `dladdr` accepts any address.
    // SAFETY: `info` is a local variable; the call only writes to it.
    let known = unsafe { libc::dladdr(address.as_ptr(), &raw mut info) } != 0;
    if !known || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: `dli_fname` is not null, hence a NUL-terminated string.
    // SAFETY: The string is valid as long as the library is loaded; libraries are never unloaded.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    Some(std::ffi::OsStr::from_bytes(name.to_bytes()).into())
}

/// Uninhabited: no library can be opened on this system.
#[cfg(not(unix))]
#[derive(Debug)]
pub(crate) enum Handle {}

#[cfg(not(unix))]
impl Handle {
    pub(crate) fn open(_: &Path) -> Result<Self, String> {
        Err("this system has no dlopen; AscendCL is available for Linux only".to_owned())
    }

    pub(crate) fn find(&self, _: &CStr) -> Option<NonNull<c_void>> {
        match *self {}
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
        // The test binary or a library that it is linked with contains `malloc`.
        let here =
            Handle::open(Path::new("libc.so.6")).or_else(|_| Handle::open(Path::new("libc.so"))).expect("libc opens");
        let file = file_of(here.find(c"malloc").expect("libc contains malloc")).expect("the address belongs to a file");
        assert!(file.to_string_lossy().contains('/'), "{}", file.display());
        assert_eq!(here.find(c"no such symbol"), None);
    }

    #[test]
    fn the_reason_is_in_the_loaders_words() {
        let reason = |file| Handle::open(Path::new(file)).expect_err("the library does not exist");
        assert!(reason("libno-such-acl.so").contains("libno-such-acl.so"), "{}", reason("libno-such-acl.so"));
        assert_eq!(reason("a\0b"), "the path contains a NUL byte");
    }
}
