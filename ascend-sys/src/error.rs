//! What can go wrong: loading the library, and calling it.
//!
//! A runtime code is sorted into a kind by what its receiver can do about it; the code itself and the runtime's own
//! words are always kept.

#![forbid(unsafe_code)]

use std::fmt;
use std::path::PathBuf;

/// Code of the kernel shim: the libraries lack the operation.
pub const SHIM_NO_SYMBOL: i32 = -1;
/// Code of the kernel shim: a descriptor could not be made.
pub const SHIM_NO_DESCRIPTOR: i32 = -2;
/// Code of the kernel shim: it was used against its rules.
pub const SHIM_MISUSE: i32 = -3;

/// Why `AscendCL` could not be loaded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The library is in none of the places it could be in.
    #[error(
        "AscendCL not found; tried {}; install the Ascend driver and the CANN toolkit and run its set_env.sh \
         (it sets ASCEND_HOME_PATH), or give the path of libascendcl.so",
        List(tried)
    )]
    NotFound {
        /// Each place, in the order tried, with the reason it was not taken.
        tried: Vec<Attempt>,
    },
    /// The file is there, but the system's loader refuses it. No other place is tried then: using another install than
    /// the one that was pointed to would be worse.
    #[error(
        "{} cannot be loaded: {reason}; if it names another library, the driver's libraries are missing from the \
         loader path (usually /usr/local/Ascend/driver/lib64)",
        path.display()
    )]
    Unloadable {
        /// The file.
        path: PathBuf,
        /// The system loader's words.
        reason: String,
    },
    /// The driver's library of the cards' own figures is absent or does not work.
    #[error(
        "no figures of the cards: {} cannot be used: {reason}; it comes with the Ascend driver, and containers need \
         /usr/local/dcmi and the driver's folders mounted",
        path.display()
    )]
    NoCardFigures {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// The library lacks a function that is needed.
    #[error("{} has no symbol {symbol}: another library, or a version before CANN 8.0", library.display())]
    MissingSymbol {
        /// The library.
        library: PathBuf,
        /// The function.
        symbol: &'static str,
    },
}

/// A place the library was looked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attempt {
    /// The path, or a bare name for the system loader's own search.
    pub path: PathBuf,
    /// Why it was not taken.
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

/// A call of the runtime that failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call} failed with code {code} ({kind}){}{message}", if message.is_empty() { "" } else { ": " })]
pub struct AscendError {
    /// The call.
    pub call: &'static str,
    /// The runtime's code.
    pub code: i32,
    /// What sort of failure the code is.
    pub kind: AscendErrorKind,
    /// The runtime's own words, empty if it had none.
    pub message: String,
}

/// Sorts of failures, by what can be done about them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum AscendErrorKind {
    /// No memory: free some and try again, nothing was launched.
    OutOfMemory,
    /// No streams, events or the like: destroy graphs or streams and try again.
    ResourceExhausted,
    /// A value overflowed in saturation mode: the stream can still be used.
    Overflow,
    /// The host's own wait ran out while the work goes on: wait again.
    WaitTimeout,
    /// A kernel ran too long: the device's state is in doubt.
    KernelTimeout,
    /// A kernel crashed.
    KernelException,
    /// The device or its driver is gone.
    DeviceLost,
    /// The device's memory is faulty: take it out of service.
    HardwareMemory,
    /// A link between devices failed: once more with a new communicator.
    Link,
    /// A rule of graph capture was broken: end the capture, run without.
    Capture,
    /// An abort is going on: try again after it.
    Aborted,
    /// The caller's mistake: no context on the thread, a stale handle, a bad argument.
    Usage,
    /// The operation does not take these shapes, types or attributes: nothing ran, another operation may do it.
    Refused,
    /// The chip or the installed version does not have this.
    Unsupported,
    /// Initialized before: as good as success.
    AlreadyInitialized,
    /// Any other code.
    Other,
}

impl AscendErrorKind {
    /// The kind of a code of the runtime, of an operation, or of the kernel shim (-1 to -3).
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

    /// The kind of a collective's result. That other ranks did not come in time (9) is a failure of the link to them.
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

    /// The kind of a result of the driver's management library.
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
            Self::Capture => "capture rule broken",
            Self::Aborted => "aborted",
            Self::Usage => "wrong use",
            Self::Refused => "operation refused",
            Self::Unsupported => "unsupported",
            Self::AlreadyInitialized => "already initialized",
            Self::Other => "unclassified",
        })
    }
}
