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
    /// Never closed: the runtime under test has it open, too.
    library: ManuallyDrop<Library>,
}

/// Modelled time since the last reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Clock {
    /// What the host's latest thread has spent on calls, and waited for.
    pub host: Duration,
    /// The latest moment a stream has come to.
    pub device: Duration,
    /// Time the devices worked, all together.
    pub busy: Duration,
}

impl Simulator {
    /// Opens the shared library that was built beside the running binary.
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
    pub fn open(path: &Path) -> io::Result<Self> {
        // SAFETY: the library has no start-up code of its own.
        let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) };
        let library = library.map_err(|_| io::Error::other(format!("{} cannot be loaded", path.display())))?;
        Ok(Self { path: path.to_owned(), library: ManuallyDrop::new(library) })
    }

    /// The shared library's file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A copy of the shared library that lacks some functions, as older versions do.
    pub fn without(&self, symbols: &[&str], file: &Path) -> io::Result<()> {
        strip_symbols::copy_without(&self.path, symbols, file)
    }

    /// Everything as at the start.
    pub fn reset(&self) {
        // SAFETY: the function's type.
        unsafe { self.function::<extern "C" fn()>(c"ascend_sim_reset")() };
    }

    /// Sets a number by name.
    ///
    /// # Panics
    /// If there is no such setting.
    pub fn set(&self, name: &str, value: i64) {
        let text = c_text(name);
        // SAFETY: the function's type.
        let set = unsafe { self.function::<extern "C" fn(*const c_char, i64) -> i32>(c"ascend_sim_set") };
        assert_eq!(set(text.as_ptr(), value), 0, "no setting {name}");
    }

    /// The present value of a setting.
    ///
    /// # Panics
    /// If there is no such setting.
    pub fn setting(&self, name: &str) -> i64 {
        let text = c_text(name);
        // SAFETY: the function's type.
        let value =
            unsafe { self.function::<extern "C" fn(*const c_char) -> i64>(c"ascend_sim_setting")(text.as_ptr()) };
        assert_ne!(value, i64::MIN, "no setting {name}");
        value
    }

    /// The n-th call of a function from now (`*` for any) answers a code and does nothing.
    pub fn fail_call(&self, name: &str, nth: u64, code: i32) {
        self.fault(0, name, nth, code, false);
    }

    /// Every call of a function answers a code.
    pub fn fail_always(&self, name: &str, code: i32) {
        self.fault(0, name, 1, code, true);
    }

    /// The task of the n-th call from now fails when its stream comes to it.
    pub fn fail_task(&self, name: &str, nth: u64, code: i32) {
        self.fault(1, name, nth, code, false);
    }

    /// The task of the n-th call from now does not end by itself.
    pub fn hang_task(&self, name: &str, nth: u64) {
        self.fault(2, name, nth, 0, false);
    }

    /// The task of the n-th call from now writes infinity into its first output.
    pub fn overflow_task(&self, name: &str, nth: u64) {
        self.fault(3, name, nth, 0, false);
    }

    fn fault(&self, kind: i32, name: &str, nth: u64, code: i32, is_lasting: bool) {
        let text = c_text(name);
        type Fault = extern "C" fn(i32, *const c_char, u64, i32, i32) -> i32;
        // SAFETY: the function's type.
        let fault = unsafe { self.function::<Fault>(c"ascend_sim_fault") };
        assert_eq!(fault(kind, text.as_ptr(), nth, code, i32::from(is_lasting)), 0, "a known kind of fault");
    }

    /// Every call answers the code from now on; 0 brings the device back.
    pub fn lose_device(&self, code: i32) {
        // SAFETY: the function's type.
        unsafe { self.function::<extern "C" fn(i32)>(c"ascend_sim_lose_device")(code) };
    }

    /// Lets hung tasks go on.
    pub fn release(&self) {
        // SAFETY: the function's type.
        unsafe { self.function::<extern "C" fn()>(c"ascend_sim_release")() };
    }

    /// Calls of a function so far, or of all for `*`.
    pub fn count(&self, name: &str) -> u64 {
        let text = c_text(name);
        // SAFETY: the function's type.
        unsafe { self.function::<extern "C" fn(*const c_char) -> u64>(c"ascend_sim_count")(text.as_ptr()) }
    }

    /// Live things: `device_blocks`, `device_bytes`, `pinned_blocks`, `pinned_bytes`, `streams`, `events`, `contexts`,
    /// `graphs`, `executors`, `descriptors`, `communicators`.
    ///
    /// # Panics
    /// For any other sort.
    pub fn live(&self, sort: &str) -> u64 {
        let text = c_text(sort);
        // SAFETY: the function's type.
        let live = unsafe { self.function::<extern "C" fn(*const c_char) -> u64>(c"ascend_sim_live") };
        let count = live(text.as_ptr());
        assert_ne!(count, u64::MAX, "no sort {sort}");
        count
    }

    /// Modelled time.
    pub fn clock(&self) -> Clock {
        // SAFETY: the function's type.
        let clock = unsafe { self.function::<extern "C" fn(i32) -> u64>(c"ascend_sim_clock") };
        let read = |which| Duration::from_nanos(clock(which));
        Clock { host: read(0), device: read(1), busy: read(2) }
    }

    /// Logged calls, a line each: name, kind, bytes, code. Needs the setting `log`.
    pub fn log(&self) -> Vec<String> {
        self.lines(c"ascend_sim_log")
    }

    /// Empties the log.
    pub fn clear_log(&self) {
        // SAFETY: the function's type.
        unsafe { self.function::<extern "C" fn()>(c"ascend_sim_clear_log")() };
    }

    /// Use that the real runtime would let pass and that is wrong all the same.
    pub fn complaints(&self) -> Vec<String> {
        self.lines(c"ascend_sim_complaints")
    }

    fn lines(&self, name: &CStr) -> Vec<String> {
        // SAFETY: the function's type.
        let read = unsafe { self.function::<extern "C" fn(*mut u8, u64) -> u64>(name) };
        let mut buffer = vec![0u8; usize::try_from(read(std::ptr::null_mut(), 0)).unwrap_or(0)];
        // Others may log meanwhile: what does not fit is left out.
        read(buffer.as_mut_ptr(), buffer.len() as u64);
        String::from_utf8_lossy(&buffer).lines().map(str::to_owned).collect()
    }

    /// # Safety
    /// `F` is the type of the function with this name.
    unsafe fn function<F: Copy>(&self, name: &CStr) -> F {
        // SAFETY: `F` is the type of the function, which the caller promises.
        let Ok(function) = (unsafe { self.library.get::<F>(name) }) else {
            panic!("{} has no {}", self.path.display(), name.to_string_lossy());
        };
        *function
    }
}

fn c_text(text: &str) -> CString {
    CString::new(text).unwrap_or_default()
}
