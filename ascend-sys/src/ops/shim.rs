//! Rust side of the kernel shim: its C functions, the table of operations, and the ownership of an op.

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

/// Addresses of descriptor functions and operations; null for absent ones.
#[derive(Debug)]
pub(crate) struct Table {
    entries: Box<[*mut c_void]>,
    missing: Vec<&'static str>,
}

// SAFETY: The table contains addresses of functions, which any thread may use.
unsafe impl Send for Table {}
// SAFETY: The table is written only in `load`, before it is shared.
unsafe impl Sync for Table {}

impl Table {
    /// Looks up all names that the shim lists.
    pub(crate) fn load(library: &Library) -> Self {
        // SAFETY: `ascend_table_bytes` takes no argument.
        let words = unsafe { ascend_table_bytes() } / size_of::<*mut c_void>();
        let mut table = Self { entries: vec![ptr::null_mut(); words].into(), missing: Vec::new() };
        for i in 0..words {
            // SAFETY: `ascend_symbol_name` accepts any index.
            let name = unsafe { ascend_symbol_name(i) };
            assert!(!name.is_null(), "entry {i} of the shim's table has no name, expected {words} names");
            // SAFETY: `name` is not null, hence a string literal of the shim.
            let name: &'static CStr = unsafe { CStr::from_ptr(name) };
            match library.find(name) {
                // SAFETY: `i` is less than `words`, the number of entries of the table.
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

/// Operation after its first phase: checked and tiled, ready for one launch, or for several if it is repeatable.
///
/// An op borrows no memory: the caller of [`Op::launch`] must keep operands and workspace allocated until the stream
/// has executed the op.
#[derive(Debug)]
pub struct Op {
    raw: *mut RawOp,
    table: Arc<Table>,
    runtime: Runtime,
}

// SAFETY: `Op` is not `Sync`, so only one thread at a time uses it.
// SAFETY: The libraries do not bind executors to threads.
unsafe impl Send for Op {}

impl Op {
    /// Creates an op by calling a function of the shim.
    ///
    /// # Safety
    /// `make` must call a function of the shim that creates an op, with the table and the output pointer that it
    /// receives.
    pub(crate) unsafe fn make(
        table: &Arc<Table>,
        runtime: &Runtime,
        make: impl FnOnce(*const c_void, *mut *mut RawOp) -> Status,
    ) -> Result<Self, AscendError> {
        let mut raw = ptr::null_mut();
        check(runtime, make(table.as_ptr(), &raw mut raw))?;
        Ok(Self { raw, table: table.clone(), runtime: runtime.clone() })
    }

    /// Returns the bytes of workspace that a launch needs; consecutive ops of one stream may share a workspace.
    pub fn workspace_bytes(&self) -> usize {
        // SAFETY: `self` owns the op, which is alive.
        usize::try_from(unsafe { ascend_workspace_bytes(self.raw) }).unwrap_or(usize::MAX)
    }

    /// Keeps the executor for more than one launch.
    ///
    /// Later launches use the scalars and lengths with which the op was created.
    ///
    /// # Errors
    /// [`AscendError`] with the library's code if the operation cannot be repeated because its executor contains
    /// copies; of kind [`Unsupported`](AscendErrorKind::Unsupported) if the libraries lack
    /// `aclSetAclOpExecutorRepeatable`; of kind [`Usage`](AscendErrorKind::Usage) if the op has already been launched
    /// without being repeatable.
    pub fn make_repeatable(&mut self) -> Result<(), AscendError> {
        // SAFETY: `self` owns the op, which is alive and borrowed exclusively.
        check(&self.runtime, unsafe { ascend_make_repeatable(self.raw) })
    }

    /// Changes the address of an operand of a repeatable op.
    ///
    /// `operand` is the index among the tensor parameters of the method that created the op, absent ones included.
    ///
    /// # Errors
    /// [`AscendError`] of kind [`Usage`](AscendErrorKind::Usage) if the op is not repeatable, or if the operand does
    /// not exist, is absent or is an output list; of kind [`Unsupported`](AscendErrorKind::Unsupported) if the
    /// libraries lack the function; with the library's code if the call fails.
    pub fn rebind(&mut self, operand: u32, address: DeviceAddress) -> Result<(), AscendError> {
        // SAFETY: `self` owns the op, which is alive and borrowed exclusively.
        // SAFETY: The host does not access `address`: a wrong device address makes the stream fail.
        check(&self.runtime, unsafe { ascend_rebind(self.raw, operand, address.as_ptr()) })
    }

    /// Queues the op on a stream.
    ///
    /// # Errors
    /// [`AscendError`] of kind [`Usage`](AscendErrorKind::Usage) if `workspace_bytes` is less than
    /// [`Op::workspace_bytes`], or if the op has already been launched and is not repeatable; with the library's code
    /// if the launch fails.
    pub fn launch(&mut self, workspace: DeviceAddress, workspace_bytes: usize, on: &Stream) -> Result<(), AscendError> {
        // SAFETY: `self` owns the op, which is alive and borrowed exclusively; `on` keeps the stream alive during the
        // call.
        // SAFETY: The host does not access `workspace`: a wrong device address makes the stream fail.
        let status = unsafe { ascend_launch_op(self.raw, workspace.as_ptr(), workspace_bytes as u64, on.handle()) };
        check(&self.runtime, status)
    }
}

impl Drop for Op {
    fn drop(&mut self) {
        debug_assert!(Arc::strong_count(&self.table) > 0, "the table was dropped before its op");
        // SAFETY: The op comes from a successful creation and is freed only here.
        // SAFETY: `self.table`, to which the op refers, is dropped after this call.
        unsafe { ascend_free_op(self.raw) };
    }
}

/// Code of an operation whose runtime call failed; the code of that call is the thread's last error.
const OP_RUNTIME_ERROR: i32 = 361_001;

/// Converts a status of the shim into a result; the error contains the library's message.
///
/// If a runtime call failed inside an operation, the error contains the code of that call.
pub(crate) fn check(runtime: &Runtime, status: Status) -> Result<(), AscendError> {
    if status.code == 0 {
        return Ok(());
    }
    // SAFETY: `status.call` is the name of a function, a string literal of the shim.
    let call = literal(unsafe { CStr::from_ptr(status.call) });
    let is_own = matches!(status.code, SHIM_NO_SYMBOL | SHIM_MISUSE);
    let message = if is_own { String::new() } else { runtime.recent_message() };
    let inner = runtime.last_error().filter(|&code| status.code == OP_RUNTIME_ERROR && code != 0);
    let code = inner.unwrap_or(status.code);
    Err(AscendError { call, code, kind: AscendErrorKind::from_code(code), message })
}

/// Converts a string literal of the shim, the name of a C function, which is ASCII.
fn literal(text: &'static CStr) -> &'static str {
    text.to_str().unwrap_or("?")
}
