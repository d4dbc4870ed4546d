//! Types and constants of the C interface: opaque handles, enumerations, structs.
//!
//! All values are those of the headers from CANN 8.0 on; `check_abi.py` compares them with the headers that `torch-npu`
//! ships. C enumerations are `c_int` here, because a library may return a value that this crate does not know yet.

use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};

/// `aclrtStream`.
pub type AclrtStream = *mut c_void;
/// `aclrtEvent`.
pub type AclrtEvent = *mut c_void;
/// `aclrtContext`.
pub type AclrtContext = *mut c_void;
/// `aclmdlRI`: a captured graph.
pub type AclmdlRI = *mut c_void;
/// `aclrtTaskGrp`: a group of tasks inside a captured graph.
pub type AclrtTaskGrp = *mut c_void;
/// `HcclComm`.
pub type HcclComm = *mut c_void;

macro_rules! constants {
    ($($(#[$doc:meta])* $name:ident: $ty:ty = $value:expr;)*) => {
        $($(#[$doc])* pub const $name: $ty = $value;)*

        /// Name and value of each constant, for the comparison with the headers.
        pub const CONSTANTS: &[(&str, i64)] = &[$((stringify!($name), $name as i64)),*];
    };
}

constants! {
    /// Success.
    ACL_SUCCESS: c_int = 0;
    /// `aclInit` has already been called in this process.
    ACL_ERROR_REPEAT_INITIALIZE: c_int = 100_002;
    /// A host wait for a stream timed out.
    ACL_ERROR_RT_STREAM_SYNC_TIMEOUT: c_int = 507_046;
    /// A host wait for an event timed out.
    ACL_ERROR_RT_EVENT_SYNC_TIMEOUT: c_int = 507_047;

    /// 32-bit float.
    ACL_FLOAT: c_int = 0;
    /// 16-bit IEEE float (half).
    ACL_FLOAT16: c_int = 1;
    /// Signed 8-bit integer.
    ACL_INT8: c_int = 2;
    /// Signed 32-bit integer.
    ACL_INT32: c_int = 3;
    /// Unsigned 8-bit integer.
    ACL_UINT8: c_int = 4;
    /// Signed 64-bit integer.
    ACL_INT64: c_int = 9;
    /// Boolean: a byte with the value 0 or 1.
    ACL_BOOL: c_int = 12;
    /// bfloat16.
    ACL_BF16: c_int = 27;
    /// Signed 4-bit integers, two per byte, the first in the low half.
    ACL_INT4: c_int = 29;

    /// Row-major layout.
    ACL_FORMAT_ND: c_int = 2;
    /// Tiled layout: tiles of 16 rows by 32 bytes, stored one column of tiles after the other.
    ACL_FORMAT_FRACTAL_NZ: c_int = 29;

    /// Uses 2 MiB pages for allocations above 1 MiB, or small pages if no 2 MiB page is available.
    ACL_MEM_MALLOC_HUGE_FIRST: c_int = 0;
    /// Uses 2 MiB pages, or fails.
    ACL_MEM_MALLOC_HUGE_ONLY: c_int = 1;
    /// Uses 4 KiB pages.
    ACL_MEM_MALLOC_NORMAL_ONLY: c_int = 2;

    /// Host to host; not allowed in queued copies.
    ACL_MEMCPY_HOST_TO_HOST: c_int = 0;
    /// Host to device.
    ACL_MEMCPY_HOST_TO_DEVICE: c_int = 1;
    /// Device to host.
    ACL_MEMCPY_DEVICE_TO_HOST: c_int = 2;
    /// Device to device, within one device.
    ACL_MEMCPY_DEVICE_TO_DEVICE: c_int = 3;

    /// The device's main memory.
    ACL_HBM_MEM: c_int = 1;

    /// The event orders work across streams.
    ACL_EVENT_SYNC: u32 = 1;
    /// The event records a timestamp.
    ACL_EVENT_TIME_LINE: u32 = 8;
    /// The event synchronizes a captured graph with work outside the graph; cannot be combined with other flags.
    ACL_EVENT_EXTERNAL: u32 = 32;
    /// `aclrtQueryEventStatus`: the recorded work is not complete.
    ACL_EVENT_RECORDED_STATUS_NOT_READY: c_int = 0;
    /// `aclrtQueryEventStatus`: the recorded work is complete.
    ACL_EVENT_RECORDED_STATUS_COMPLETE: c_int = 1;
    /// `aclrtStreamQuery`: the queued work is complete (note that events use 1 for complete, streams use 0).
    ACL_STREAM_STATUS_COMPLETE: c_int = 0;

    /// Launch resources are allocated when the stream is created.
    ACL_STREAM_FAST_LAUNCH: u32 = 1;
    /// The host busy-waits when it synchronizes with the stream.
    ACL_STREAM_FAST_SYNC: u32 = 2;
    /// After a failure, no further work runs in the context.
    ACL_STOP_ON_FAILURE: u64 = 1;

    /// During the capture, no thread may make calls that capture forbids.
    ACL_MODEL_RI_CAPTURE_MODE_GLOBAL: c_int = 0;
    /// During the capture, the capturing thread may not make calls that capture forbids.
    ACL_MODEL_RI_CAPTURE_MODE_THREAD_LOCAL: c_int = 1;
    /// During the capture, no call is forbidden.
    ACL_MODEL_RI_CAPTURE_MODE_RELAXED: c_int = 2;

    /// Option: use kernels whose sums do not depend on timing.
    ACL_OPT_DETERMINISTIC: c_int = 0;
    /// Selects the last error of the calling thread.
    ACL_RT_THREAD_LEVEL: c_int = 0;

    /// Success of a collective.
    HCCL_SUCCESS: c_int = 0;
    /// A collective does not support the arguments.
    HCCL_E_NOT_SUPPORT: c_int = 5;
    /// A runtime call inside a collective failed.
    HCCL_E_RUNTIME: c_int = 15;
    /// 8-bit integer elements of a collective.
    HCCL_DATA_TYPE_INT8: c_int = 0;
    /// 32-bit integer elements of a collective.
    HCCL_DATA_TYPE_INT32: c_int = 2;
    /// f16 elements of a collective.
    HCCL_DATA_TYPE_FP16: c_int = 3;
    /// f32 elements of a collective.
    HCCL_DATA_TYPE_FP32: c_int = 4;
    /// bfloat16 elements of a collective.
    HCCL_DATA_TYPE_BFP16: c_int = 11;
    /// Reduction: sum.
    HCCL_REDUCE_SUM: c_int = 0;
    /// Reduction: maximum.
    HCCL_REDUCE_MAX: c_int = 2;

    /// Clock of the memory, in MHz.
    DCMI_FREQ_HBM: c_int = 6;
    /// Current clock of the AI cores, in MHz. The name ends in an underscore in the header too.
    DCMI_FREQ_AICORE_CURRENT_: c_int = 7;
    /// Maximum clock of the AI cores, in MHz.
    DCMI_FREQ_AICORE_MAX: c_int = 9;
    /// Utilization of the AI cores, in percent.
    DCMI_UTILIZATION_RATE_AICORE: c_int = 2;
    /// Utilization of the memory capacity, in percent.
    DCMI_UTILIZATION_RATE_HBM: c_int = 6;
    /// Utilization of the memory bandwidth, in percent.
    DCMI_UTILIZATION_RATE_HBM_BANDWIDTH: c_int = 10;
    /// Utilization of the vector cores, in percent.
    DCMI_UTILIZATION_RATE_VECTORCORE: c_int = 12;
    /// Utilization of the whole chip, in percent.
    DCMI_UTILIZATION_RATE_NPU: c_int = 13;
    /// Main command: queries about power and clocks.
    DCMI_MAIN_CMD_LP: c_int = 8;
    /// Subcommand: bit mask of the reasons for a reduced AI core clock (`u64`).
    DCMI_LP_SUB_CMD_AICORE_FREQREDUC_CAUSE: c_uint = 9;
    /// Subcommand: rated power (`DCMI_LP_POWER_INFO_STRU`).
    DCMI_LP_SUB_CMD_GET_POWER_INFO: c_uint = 10;
}

/// `aclrtUtilizationInfo`: utilization in percent; -1 if the device does not report it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AclrtUtilizationInfo {
    /// Cube cores.
    pub cube: i32,
    /// Vector cores.
    pub vector: i32,
    /// AI CPU.
    pub aicpu: i32,
    /// Memory; has always been -1 so far.
    pub memory: i32,
    /// Reserved; must be null.
    pub extend: *mut c_void,
}

/// `HcclRootInfo`: created by one rank and used by all ranks to join a communicator.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct HcclRootInfo {
    /// Opaque content.
    pub internal: [c_char; 4108],
}

impl std::fmt::Debug for HcclRootInfo {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("HcclRootInfo")
    }
}

/// `struct dcmi_hbm_info`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct DcmiHbmInfo {
    /// Memory size, in MB.
    pub memory_size: c_ulonglong,
    /// Memory clock, in MHz.
    pub freq: c_uint,
    /// Memory in use, in MB.
    pub memory_usage: c_ulonglong,
    /// Memory temperature, in degrees Celsius.
    pub temp: c_int,
    /// Utilization of the memory bandwidth, in percent.
    pub bandwidth_util_rate: c_uint,
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::{offset_of, size_of};

    /// Sizes and offsets in the headers on LP64.
    #[test]
    fn structs_have_the_headers_layout() {
        assert_eq!(size_of::<AclrtUtilizationInfo>(), 24);
        assert_eq!(offset_of!(AclrtUtilizationInfo, extend), 16);
        assert_eq!(size_of::<HcclRootInfo>(), 4108);
        assert_eq!(size_of::<DcmiHbmInfo>(), 32);
        assert_eq!(offset_of!(DcmiHbmInfo, memory_usage), 16);
        assert_eq!(offset_of!(DcmiHbmInfo, bandwidth_util_rate), 28);
    }
}
