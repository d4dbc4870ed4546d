//! The remote control of the shared library, for tests and tools.

#![allow(unsafe_code)]

use crate::strip_symbols;
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use std::ffi::{CStr, CString, c_char};
use std::io;
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The simulated runtime of this process.
#[derive(Debug)]
pub struct Simulator {
    path: PathBuf,
    /// Never closed, because the runtime under test also has it open.
    library: ManuallyDrop<Library>,
}

/// Modeled time since the last reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Clock {
    /// Time that the most advanced host thread has spent on calls and waits.
    pub host: Duration,
    /// Time of the most advanced stream.
    pub device: Duration,
    /// Total time during which the devices were busy.
    pub busy: Duration,
}

impl Simulator {
    /// Opens the shared library in the directory of the running binary.
    ///
    /// # Errors
    /// If the file is missing or cannot be loaded.
    pub fn beside_this_binary() -> io::Result<Self> {
        let binary = std::env::current_exe()?;
        let name = format!("{}ascend_sim{}", std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
        let folders = binary.ancestors().skip(1).take(3);
        let places = folders.flat_map(|folder| [folder.join(&name), folder.join("deps").join(&name)]);
        let found = places.into_iter().find(|place| place.exists());
        let path = found.ok_or_else(|| {
            io::Error::new(io::ErrorKind::NotFound, format!("{name} is not near {}", binary.display()))
        })?;
        Self::open(&path)
    }

    /// Opens a shared library.
    ///
    /// # Errors
    /// If the file is missing or cannot be loaded.
    pub fn open(path: &Path) -> io::Result<Self> {
        // SAFETY: the library runs no code when it is loaded.
        let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) };
        let library = library.map_err(|_| io::Error::other(format!("{} cannot be loaded", path.display())))?;
        Ok(Self { path: path.to_owned(), library: ManuallyDrop::new(library) })
    }

    /// Path of the shared library.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes a copy of the shared library that lacks some functions, as older versions do.
    ///
    /// # Errors
    /// If the library cannot be read, lacks one of the functions, or the copy cannot be written.
    pub fn without(&self, symbols: &[&str], file: &Path) -> io::Result<()> {
        strip_symbols::copy_without(&self.path, symbols, file)
    }

    /// Restores the initial state.
    pub fn reset(&self) {
        // SAFETY: the type is that of the function.
        unsafe { self.function::<extern "C" fn()>(c"ascend_sim_reset")() };
    }

    /// Sets a setting by name.
    ///
    /// # Panics
    /// If there is no such setting.
    pub fn set(&self, name: &str, value: i64) {
        let text = c_text(name);
        // SAFETY: the type is that of the function.
        let set = unsafe { self.function::<extern "C" fn(*const c_char, i64) -> i32>(c"ascend_sim_set") };
        assert_eq!(set(text.as_ptr(), value), 0, "no setting {name}");
    }

    /// Returns the value of a setting.
    ///
    /// # Panics
    /// If there is no such setting.
    pub fn setting(&self, name: &str) -> i64 {
        let text = c_text(name);
        // SAFETY: the type is that of the function.
        let value =
            unsafe { self.function::<extern "C" fn(*const c_char) -> i64>(c"ascend_sim_setting")(text.as_ptr()) };
        assert_ne!(value, i64::MIN, "no setting {name}");
        value
    }

    /// Makes the n-th call of a function from now (`*` for any) return a code without any effect.
    pub fn fail_call(&self, name: &str, nth: u64, code: i32) {
        self.fault(0, name, nth, code, false);
    }

    /// Makes every call of a function return a code.
    pub fn fail_always(&self, name: &str, code: i32) {
        self.fault(0, name, 1, code, true);
    }

    /// Makes the task of the n-th call from now fail when its stream executes it.
    pub fn fail_task(&self, name: &str, nth: u64, code: i32) {
        self.fault(1, name, nth, code, false);
    }

    /// Makes the task of the n-th call from now hang until it is released.
    pub fn hang_task(&self, name: &str, nth: u64) {
        self.fault(2, name, nth, 0, false);
    }

    /// Makes the task of the n-th call from now write infinity into its first output.
    pub fn overflow_task(&self, name: &str, nth: u64) {
        self.fault(3, name, nth, 0, false);
    }

    fn fault(&self, kind: i32, name: &str, nth: u64, code: i32, is_lasting: bool) {
        let text = c_text(name);
        type Fault = extern "C" fn(i32, *const c_char, u64, i32, i32) -> i32;
        // SAFETY: the type is that of the function.
        let fault = unsafe { self.function::<Fault>(c"ascend_sim_fault") };
        assert_eq!(fault(kind, text.as_ptr(), nth, code, i32::from(is_lasting)), 0, "a known kind of fault");
    }

    /// Makes every call return the code from now on; 0 restores the device.
    pub fn lose_device(&self, code: i32) {
        // SAFETY: the type is that of the function.
        unsafe { self.function::<extern "C" fn(i32)>(c"ascend_sim_lose_device")(code) };
    }

    /// Releases hanging tasks.
    pub fn release(&self) {
        // SAFETY: the type is that of the function.
        unsafe { self.function::<extern "C" fn()>(c"ascend_sim_release")() };
    }

    /// Number of calls of a function so far; `*` counts all functions.
    pub fn count(&self, name: &str) -> u64 {
        let text = c_text(name);
        // SAFETY: the type is that of the function.
        unsafe { self.function::<extern "C" fn(*const c_char) -> u64>(c"ascend_sim_count")(text.as_ptr()) }
    }

    /// Number of live objects of a kind: `device_blocks`, `device_bytes`, `pinned_blocks`, `pinned_bytes`, `streams`,
    /// `events`, `contexts`, `graphs`, `executors`, `descriptors`, `communicators`.
    ///
    /// # Panics
    /// For any other kind.
    pub fn live(&self, sort: &str) -> u64 {
        let text = c_text(sort);
        // SAFETY: the type is that of the function.
        let live = unsafe { self.function::<extern "C" fn(*const c_char) -> u64>(c"ascend_sim_live") };
        let count = live(text.as_ptr());
        assert_ne!(count, u64::MAX, "no sort {sort}");
        count
    }

    /// Modeled time.
    pub fn clock(&self) -> Clock {
        // SAFETY: the type is that of the function.
        let clock = unsafe { self.function::<extern "C" fn(i32) -> u64>(c"ascend_sim_clock") };
        let read = |which| Duration::from_nanos(clock(which));
        Clock { host: read(0), device: read(1), busy: read(2) }
    }

    /// Logged calls, one per line: name, kind, bytes, code. Requires the setting `log`.
    pub fn log(&self) -> Vec<String> {
        self.lines(c"ascend_sim_log")
    }

    /// Clears the log.
    pub fn clear_log(&self) {
        // SAFETY: the type is that of the function.
        unsafe { self.function::<extern "C" fn()>(c"ascend_sim_clear_log")() };
    }

    /// Misuse that the real runtime would have accepted.
    pub fn complaints(&self) -> Vec<String> {
        self.lines(c"ascend_sim_complaints")
    }

    fn lines(&self, name: &CStr) -> Vec<String> {
        // SAFETY: the type is that of the function.
        let read = unsafe { self.function::<extern "C" fn(*mut u8, u64) -> u64>(name) };
        let mut buffer = vec![0u8; usize::try_from(read(std::ptr::null_mut(), 0)).unwrap_or(0)];
        // Other threads may log in the meantime; text that does not fit is omitted.
        read(buffer.as_mut_ptr(), buffer.len() as u64);
        String::from_utf8_lossy(&buffer).lines().map(str::to_owned).collect()
    }

    /// # Safety
    /// `F` must be the type of the function with this name.
    unsafe fn function<F: Copy>(&self, name: &CStr) -> F {
        // SAFETY: the caller guarantees that `F` is the type of the function.
        let Ok(function) = (unsafe { self.library.get::<F>(name) }) else {
            panic!("{} has no {}", self.path.display(), name.to_string_lossy());
        };
        *function
    }
}

fn c_text(text: &str) -> CString {
    CString::new(text).unwrap_or_default()
}
