//! Error codes and enumeration values of the C interface that the simulator returns or reads.

/// A failed call: the error code, and the message that `aclGetRecentErrMsg` returns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fail {
    pub(crate) code: i32,
    pub(crate) message: String,
}

impl Fail {
    pub(crate) fn new(code: i32, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }
}

/// Result of a simulated call.
pub(crate) type Done<T = ()> = Result<T, Fail>;

/// Returns early with a failure: a code and a formatted message.
macro_rules! fail {
    ($code:expr, $($text:tt)+) => {
        return Err($crate::codes::Fail::new($code, format!($($text)+)))
    };
}

/// Returns early with a failure unless a condition holds.
macro_rules! rule {
    ($holds:expr, $code:expr, $($text:tt)+) => {
        if !$holds {
            $crate::codes::fail!($code, $($text)+);
        }
    };
}

pub(crate) use {fail, rule};

pub(crate) const INVALID_PARAM: i32 = 100_000;
pub(crate) const UNINITIALIZED: i32 = 100_001;
pub(crate) const REPEAT_INITIALIZE: i32 = 100_002;
pub(crate) const RT_PARAM_INVALID: i32 = 107_000;
pub(crate) const RT_INVALID_DEVICE: i32 = 107_001;
pub(crate) const RT_CONTEXT_NULL: i32 = 107_002;
pub(crate) const RT_STREAM_CONTEXT: i32 = 107_003;
pub(crate) const RT_INVALID_HANDLE: i32 = 107_017;
pub(crate) const RT_STREAM_ABORT: i32 = 107_023;
pub(crate) const RT_CAPTURE_DEPENDENCY: i32 = 107_024;
pub(crate) const RT_STREAM_UNJOINED: i32 = 107_025;
pub(crate) const RT_STREAM_CAPTURED: i32 = 107_027;
pub(crate) const RT_EVENT_CAPTURED: i32 = 107_028;
pub(crate) const RT_STREAM_NOT_CAPTURED: i32 = 107_029;
pub(crate) const RT_CAPTURE_MODE: i32 = 107_030;
pub(crate) const RT_CAPTURE_IMPLICIT: i32 = 107_031;
pub(crate) const TASK_GROUP_STATUS: i32 = 107_033;
pub(crate) const RT_MODEL_RUNNING: i32 = 107_037;
pub(crate) const RT_CAPTURE_WRONG_THREAD: i32 = 107_038;
pub(crate) const RT_UPDATE_FAILED: i32 = 107_040;
pub(crate) const RT_FEATURE_NOT_SUPPORTED: i32 = 207_000;
pub(crate) const RT_MEMORY_ALLOCATION: i32 = 207_001;
pub(crate) const RT_NO_EVENT: i32 = 207_007;
pub(crate) const RT_NO_STREAM: i32 = 207_008;
pub(crate) const INTERNAL_ERROR: i32 = 500_000;
pub(crate) const RT_TASK_TYPE_NOT_SUPPORTED: i32 = 507_009;
pub(crate) const RT_AICORE_TIMEOUT: i32 = 507_014;
pub(crate) const RT_AICORE_EXCEPTION: i32 = 507_015;
pub(crate) const RT_VECTOR_CORE_EXCEPTION: i32 = 507_035;
pub(crate) const RT_STREAM_SYNC_TIMEOUT: i32 = 507_046;
pub(crate) const RT_EVENT_SYNC_TIMEOUT: i32 = 507_047;
/// Timeout of a collective: "hccl fftsplus task timeout".
pub(crate) const RT_FFTS_PLUS_TIMEOUT: i32 = 507_048;
pub(crate) const RT_CAPTURE_INVALIDATED: i32 = 507_903;

/// A required pointer is null.
pub(crate) const OP_NULL: i32 = 161_001;
/// Types, shapes or formats do not match.
pub(crate) const OP_INVALID: i32 = 161_002;
/// No tiling exists for these shapes and attributes.
pub(crate) const OP_TILING: i32 = 561_002;
/// Internal null pointer: the executor no longer exists.
pub(crate) const OP_INNER_NULL: i32 = 561_103;

pub(crate) const FORMAT_ND: i32 = 2;
pub(crate) const FORMAT_NZ: i32 = 29;

pub(crate) const EVENT_SYNC: u32 = 1;
pub(crate) const EVENT_TIME_LINE: u32 = 8;
pub(crate) const EVENT_EXTERNAL: u32 = 32;
