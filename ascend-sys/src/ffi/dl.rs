//! The system's dynamic loader: open, look up, ask where an address came from.
//!
//! Libraries are never closed: `AscendCL` leaves threads and exit handlers behind. On systems without `dlopen` (`AscendCL`
//! exists for Linux only) opening is an error with that reason, so that the crate still builds there.

#![allow(unsafe_code)]

use std::ffi::{CStr, c_void};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;

#[cfg(unix)]
use libloading::os::unix as system;
#[cfg(unix)]
use std::mem::ManuallyDrop;

/// An open library. Dropping it leaves the library open.
#[cfg(unix)]
#[derive(Debug)]
pub(crate) struct Handle(ManuallyDrop<system::Library>);

#[cfg(unix)]
impl Handle {
    /// Opens a file, or a bare name by the system's own search; the error is in the loader's words.
    pub(crate) fn open(file: &Path) -> Result<Self, String> {
        // SAFETY: the vendor answers for the start-up code of the library.
        // SAFETY: exit code of the library runs only at the end of the process, since the handle is never closed.
        let library = unsafe { system::Library::open(Some(file), system::RTLD_NOW | system::RTLD_GLOBAL) };
        library.map(|library| Self(ManuallyDrop::new(library))).map_err(|error| match error {
            libloading::Error::DlOpen { source } => source.to_string(),
            libloading::Error::InteriorZeroElements => "the path holds a NUL".to_owned(),
            other => other.to_string(),
        })
    }

    /// The address of a symbol.
    pub(crate) fn find(&self, name: &CStr) -> Option<NonNull<c_void>> {
        // SAFETY: only the symbol's address is taken, and it is that of some object, of whatever type.
        let symbol = unsafe { self.0.get::<*mut c_void>(name) };
        NonNull::new(symbol.ok()?.into_raw())
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
    // SAFETY: any address may be asked for.
    // SAFETY: the answer goes to a valid place.
    let known = unsafe { libc::dladdr(address.as_ptr(), &raw mut info) } != 0;
    if !known || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: a C string that lives as long as the library, which is never unloaded.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    Some(std::ffi::OsStr::from_bytes(name.to_bytes()).into())
}

/// An open library, of which there is none.
#[cfg(not(unix))]
#[derive(Debug)]
pub(crate) enum Handle {}

#[cfg(not(unix))]
impl Handle {
    pub(crate) fn open(_: &Path) -> Result<Self, String> {
        Err("this system has no dlopen; AscendCL exists for Linux only".to_owned())
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
        // The test binary and what it is linked with: any of them has malloc.
        let here = Handle::open(Path::new("libc.so.6")).or_else(|_| Handle::open(Path::new("libc.so"))).expect("opens");
        let file = file_of(here.find(c"malloc").expect("malloc")).expect("a file");
        assert!(file.to_string_lossy().contains('/'), "{}", file.display());
        assert_eq!(here.find(c"no such symbol"), None);
    }

    #[test]
    fn the_reason_is_in_the_loaders_words() {
        let reason = |file| Handle::open(Path::new(file)).expect_err("no library");
        assert!(reason("libno-such-acl.so").contains("libno-such-acl.so"), "{}", reason("libno-such-acl.so"));
        assert_eq!(reason("a\0b"), "the path holds a NUL");
    }
}
