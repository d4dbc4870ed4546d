//! The kernel shim as Rust sees it: its C functions, the table of operations, and an op's life.

#![allow(unsafe_code)]

use crate::abi::AclrtStream;
use crate::error::{AscendError, AscendErrorKind, SHIM_MISUSE, SHIM_NO_SYMBOL};
use crate::ffi::loader::Library;
use crate::memory::DeviceAddress;
use crate::runtime::Runtime;
use crate::stream::Stream;
use std::ffi::{CStr, c_char, c_void};
use std::ptr;
use std::sync::Arc;

/// `ascend_status`.
#[repr(C)]
pub(crate) struct Status {
    code: i32,
    call: *const c_char,
}

/// `ascend_op`.
#[repr(C)]
pub(crate) struct RawOp {
    private: [u8; 0],
}

unsafe extern "C" {
    fn ascend_table_bytes() -> usize;
    fn ascend_symbol_name(i: usize) -> *const c_char;
    fn ascend_table_set(table: *mut c_void, i: usize, address: *mut c_void);
    fn ascend_workspace_bytes(op: *const RawOp) -> u64;
    fn ascend_make_repeatable(op: *mut RawOp) -> Status;
    fn ascend_rebind(op: *mut RawOp, operand: u32, data: *mut c_void) -> Status;
    fn ascend_launch_op(op: *mut RawOp, workspace: *mut c_void, workspace_bytes: u64, stream: AclrtStream) -> Status;
    fn ascend_free_op(op: *mut RawOp);
}

/// Addresses of descriptors and operations; absent ones are null.
#[derive(Debug)]
pub(crate) struct Table {
    entries: Box<[*mut c_void]>,
    missing: Vec<&'static str>,
}

// SAFETY: addresses of functions, written once before the table is shared.
unsafe impl Send for Table {}
// SAFETY: as above.
unsafe impl Sync for Table {}

impl Table {
    /// Looks up all names that the shim gives.
    pub(crate) fn load(library: &Library) -> Self {
        // SAFETY: takes no argument.
        let words = unsafe { ascend_table_bytes() } / size_of::<*mut c_void>();
        let mut table = Self { entries: vec![ptr::null_mut(); words].into(), missing: Vec::new() };
        for i in 0..words {
            // SAFETY: any index may be asked for.
            let name = unsafe { ascend_symbol_name(i) };
            assert!(!name.is_null(), "a name for each of {words} entries");
            // SAFETY: not null, hence a literal of the shim.
            let name: &'static CStr = unsafe { CStr::from_ptr(name) };
            match library.find(name) {
                // SAFETY: the table has `words` entries.
                Some(address) => unsafe { ascend_table_set(table.as_mut_ptr(), i, address.as_ptr()) },
                None => table.missing.push(literal(name)),
            }
        }
        table
    }

    pub(crate) fn missing(&self) -> &[&'static str] {
        &self.missing
    }

    pub(crate) fn as_ptr(&self) -> *const c_void {
        self.entries.as_ptr().cast()
    }

    fn as_mut_ptr(&mut self) -> *mut c_void {
        self.entries.as_mut_ptr().cast()
    }
}

/// An operation after its first phase: checked, tiled, ready to be queued once, or repeatedly where it allows that.
///
/// It borrows no memory: whoever launches it keeps operands and workspace alive until the stream has passed it.
#[derive(Debug)]
pub struct Op {
    raw: *mut RawOp,
    table: Arc<Table>,
    runtime: Runtime,
}

// SAFETY: an op is used by one thread at a time; the libraries do not tie executors to threads.
unsafe impl Send for Op {}

impl Op {
    /// Runs a function of the shim that makes an op.
    ///
    /// # Safety
    /// `make` calls such a function with this table and place.
    pub(crate) unsafe fn make(
        table: &Arc<Table>,
        runtime: &Runtime,
        make: impl FnOnce(*const c_void, *mut *mut RawOp) -> Status,
    ) -> Result<Self, AscendError> {
        let mut raw = ptr::null_mut();
        check(runtime, make(table.as_ptr(), &raw mut raw))?;
        Ok(Self { raw, table: table.clone(), runtime: runtime.clone() })
    }

    /// Bytes of workspace its launch needs; consecutive ops of one stream may share a workspace.
    pub fn workspace_bytes(&self) -> usize {
        // SAFETY: a live op.
        usize::try_from(unsafe { ascend_workspace_bytes(self.raw) }).unwrap_or(usize::MAX)
    }

    /// Keeps the executor for more than one launch. Operations with copies of their own refuse; numbers and lengths stay as
    /// they are.
    pub fn make_repeatable(&mut self) -> Result<(), AscendError> {
        // SAFETY: a live op.
        check(&self.runtime, unsafe { ascend_make_repeatable(self.raw) })
    }

    /// Moves an operand of a repeatable op. Operands are numbered in the order of the method's tensors, absent ones
    /// included.
    pub fn rebind(&mut self, operand: u32, address: DeviceAddress) -> Result<(), AscendError> {
        // SAFETY: a live op; the address is the device's to check.
        check(&self.runtime, unsafe { ascend_rebind(self.raw, operand, address.as_ptr()) })
    }

    /// Queues it. A second launch of an op that is not repeatable is an error.
    pub fn launch(&mut self, workspace: DeviceAddress, workspace_bytes: usize, on: &Stream) -> Result<(), AscendError> {
        // SAFETY: a live op and a live stream; the workspace is the device's to check.
        let status = unsafe { ascend_launch_op(self.raw, workspace.as_ptr(), workspace_bytes as u64, on.handle()) };
        check(&self.runtime, status)
    }
}

impl Drop for Op {
    fn drop(&mut self) {
        debug_assert!(Arc::strong_count(&self.table) > 0, "an op holds its table");
        // SAFETY: made once, freed once, its table still alive.
        unsafe { ascend_free_op(self.raw) };
    }
}

/// Code of an operation for a runtime call that failed inside; the thread's last error is the runtime's own code.
const OP_RUNTIME_ERROR: i32 = 361_001;

/// A status of the shim as a result, with the library's words for a failure. A runtime failure inside an operation comes
/// out with the runtime's code.
pub(crate) fn check(runtime: &Runtime, status: Status) -> Result<(), AscendError> {
    if status.code == 0 {
        return Ok(());
    }
    // SAFETY: the shim gives the name of a function, a literal.
    let call = literal(unsafe { CStr::from_ptr(status.call) });
    let is_own = matches!(status.code, SHIM_NO_SYMBOL | SHIM_MISUSE);
    let message = if is_own { String::new() } else { runtime.recent_message() };
    let inner = runtime.last_error().filter(|&code| status.code == OP_RUNTIME_ERROR && code != 0);
    let code = inner.unwrap_or(status.code);
    Err(AscendError { call, code, kind: AscendErrorKind::from_code(code), message })
}

/// A literal of the shim: names of C functions, which are ASCII.
fn literal(text: &'static CStr) -> &'static str {
    text.to_str().unwrap_or("?")
}
