//! Errors of loading the library and of calling it.
//!
//! Each code of the runtime belongs to a kind, which reflects how a caller can handle the failure. The error also
//! contains the code itself and the runtime's own message.

#![forbid(unsafe_code)]

use std::fmt;
use std::path::PathBuf;

/// Code of the kernel shim: the libraries lack the operation.
pub const SHIM_NO_SYMBOL: i32 = -1;
/// Code of the kernel shim: a descriptor could not be created.
pub const SHIM_NO_DESCRIPTOR: i32 = -2;
/// Code of the kernel shim: the call violates a rule of the shim.
pub const SHIM_MISUSE: i32 = -3;

/// Reason why a vendor library could not be loaded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// No searched path contains the library.
    #[error(
        "AscendCL was not found; tried {}; install the Ascend driver and the CANN toolkit and run its set_env.sh \
         (it sets ASCEND_HOME_PATH), or pass the path of libascendcl.so",
        List(tried)
    )]
    NotFound {
        /// Each path in search order, with the reason why it was not used.
        tried: Vec<Attempt>,
    },
    /// The file exists, but the system's loader cannot load it.
    ///
    /// The search stops at such a file: it must not silently use another install than the requested one.
    #[error(
        "{} cannot be loaded: {reason}; if the reason names another library, the driver's libraries are missing \
         from the loader path (usually /usr/local/Ascend/driver/lib64)",
        path.display()
    )]
    Unloadable {
        /// Path of the library.
        path: PathBuf,
        /// Message of the system's loader.
        reason: String,
    },
    /// The driver's library for card metrics (DCMI) is missing or does not work.
    #[error(
        "no card metrics: {} cannot be used: {reason}; it comes with the Ascend driver, and containers need \
         /usr/local/dcmi and the driver's folders mounted",
        path.display()
    )]
    NoCardFigures {
        /// Path of the library.
        path: PathBuf,
        /// Reason of the failure.
        reason: String,
    },
    /// The library lacks a required function.
    #[error("{} has no symbol {symbol}: it is another library, or older than CANN 8.0", library.display())]
    MissingSymbol {
        /// Path of the library.
        library: PathBuf,
        /// Name of the function.
        symbol: &'static str,
    },
}

/// Path where the library was searched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attempt {
    /// The path, or a bare file name that the system's loader searched.
    pub path: PathBuf,
    /// Reason why the file was not used.
    pub reason: String,
}

struct List<'a>(&'a [Attempt]);

impl fmt::Display for List<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, Attempt { path, reason }) in self.0.iter().enumerate() {
            let comma = if at == 0 { "" } else { ", " };
            write!(f, "{comma}{} ({reason})", path.display())?;
        }
        Ok(())
    }
}

/// Failed call of the runtime.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call} failed with code {code} ({kind}){}{message}", if message.is_empty() { "" } else { ": " })]
pub struct AscendError {
    /// Name of the C function.
    pub call: &'static str,
    /// Code returned by the function.
    pub code: i32,
    /// Kind of the code.
    pub kind: AscendErrorKind,
    /// Message of the runtime; empty if it has none.
    pub message: String,
}

/// Kinds of failures, by how a caller can handle them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum AscendErrorKind {
    /// Out of memory: nothing was launched; free memory and try again.
    OutOfMemory,
    /// Out of streams, events or similar resources: destroy graphs or streams and try again.
    ResourceExhausted,
    /// A value overflowed in saturation mode: the stream is still usable.
    Overflow,
    /// The host's wait timed out, while the work continues: wait again.
    WaitTimeout,
    /// A kernel exceeded its time limit: the state of the device is undefined.
    KernelTimeout,
    /// A kernel crashed.
    KernelException,
    /// The device or its driver is lost.
    DeviceLost,
    /// The device memory is faulty: take the device out of service.
    HardwareMemory,
    /// A link between devices failed: try again with a new communicator.
    Link,
    /// A call violated a rule of graph capture: end the capture and run without a graph.
    Capture,
    /// An abort is in progress: try again after it.
    Aborted,
    /// Mistake of the caller: no current context on the thread, a stale handle or an invalid argument.
    Usage,
    /// The operation does not support the shapes, types or attributes: nothing ran; another operation may support them.
    Refused,
    /// The chip or the installed version does not support the call.
    Unsupported,
    /// The runtime has already been initialized; equivalent to success.
    AlreadyInitialized,
    /// Any other code.
    Other,
}

impl AscendErrorKind {
    /// Returns the kind of a code of the runtime, of an operation, or of the kernel shim (-1 to -3).
    pub fn from_code(code: i32) -> Self {
        match code {
            161_002 | 561_001 | 561_002 => Self::Refused,
            200_000 | 207_001 | 207_018 => Self::OutOfMemory,
            207_005 | 207_007..=207_011 => Self::ResourceExhausted,
            207_003 | 207_016 | 207_017 => Self::Overflow,
            107_019 | 507_046 | 507_047 => Self::WaitTimeout,
            107_020 | 207_020 | 507_012 | 507_014 | 507_017 | 507_034 | 507_048 => Self::KernelTimeout,
            507_000
            | 507_001
            | 507_011
            | 507_015
            | 507_016
            | 507_018
            | 507_035
            | 507_036
            | 507_042..=507_045
            | 507_049
            | 507_050 => Self::KernelException,
            507_010 | 507_013 | 507_033 | 507_899 | 507_901 => Self::DeviceLost,
            507_053..=507_055 | 507_057 => Self::HardwareMemory,
            507_056 | 507_904 => Self::Link,
            107_024..=107_034 | 107_036..=107_041 | 107_045 | 507_903 => Self::Capture,
            107_022 | 107_023 | 107_035 => Self::Aborted,
            SHIM_NO_DESCRIPTOR
            | SHIM_MISUSE
            | 100_000
            | 100_001
            | 107_000..=107_003
            | 107_008
            | 107_017
            | 161_001
            | 561_103 => Self::Usage,
            SHIM_NO_SYMBOL | 200_001 | 207_000 | 207_019 | 507_009 | 561_003 | 561_107 | 561_108 | 561_112 => {
                Self::Unsupported
            }
            100_002 => Self::AlreadyInitialized,
            _ => Self::Other,
        }
    }

    /// Returns the kind of a collective's result.
    ///
    /// Code 9 (the other ranks did not respond in time) belongs to [`Link`](Self::Link).
    pub fn from_hccl(code: i32) -> Self {
        match code {
            1 | 2 => Self::Usage,
            3 | 24 => Self::OutOfMemory,
            5 | 6 => Self::Unsupported,
            7 | 16 => Self::DeviceLost,
            9 | 11..=14 | 19 | 21 | 23 => Self::Link,
            20 | 22 => Self::Aborted,
            _ => Self::Other,
        }
    }

    /// Returns the kind of a result of DCMI, the driver's management library.
    pub fn from_dcmi(code: i32) -> Self {
        match code {
            -8001 | -8007 => Self::Usage,
            -8003 => Self::OutOfMemory,
            -8002 | -8013 | -8255 => Self::Unsupported,
            -8006 => Self::WaitTimeout,
            -8008 | -8009 => Self::DeviceLost,
            -8020 => Self::ResourceExhausted,
            _ => Self::Other,
        }
    }
}

impl fmt::Display for AscendErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::OutOfMemory => "out of memory",
            Self::ResourceExhausted => "streams or events exhausted",
            Self::Overflow => "overflow",
            Self::WaitTimeout => "wait timed out",
            Self::KernelTimeout => "kernel timed out",
            Self::KernelException => "kernel exception",
            Self::DeviceLost => "device lost",
            Self::HardwareMemory => "faulty device memory",
            Self::Link => "link failure",
            Self::Capture => "capture rule violated",
            Self::Aborted => "aborted",
            Self::Usage => "incorrect use",
            Self::Refused => "operation refused",
            Self::Unsupported => "unsupported",
            Self::AlreadyInitialized => "already initialized",
            Self::Other => "unclassified",
        })
    }
}
