//! Types and constants of the C interface: opaque handles, enumerations, structs.
//!
//! Every value is that of the headers from CANN 8.0 on; `check_abi.py` compares them with the headers that `torch-npu`
//! ships. Enumerations are C `int`s here: a library may answer with a value that is not known yet.

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

        /// Each constant with its value, for the check against the headers.
        pub const CONSTANTS: &[(&str, i64)] = &[$((stringify!($name), $name as i64)),*];
    };
}

constants! {
    /// Success.
    ACL_SUCCESS: c_int = 0;
    /// Somebody in this process has called `aclInit` before.
    ACL_ERROR_REPEAT_INITIALIZE: c_int = 100_002;
    /// A host wait for a stream ran out.
    ACL_ERROR_RT_STREAM_SYNC_TIMEOUT: c_int = 507_046;
    /// A host wait for an event ran out.
    ACL_ERROR_RT_EVENT_SYNC_TIMEOUT: c_int = 507_047;

    /// 32-bit float.
    ACL_FLOAT: c_int = 0;
    /// IEEE half.
    ACL_FLOAT16: c_int = 1;
    /// Signed byte.
    ACL_INT8: c_int = 2;
    /// Signed 32-bit.
    ACL_INT32: c_int = 3;
    /// Unsigned byte.
    ACL_UINT8: c_int = 4;
    /// Signed 64-bit.
    ACL_INT64: c_int = 9;
    /// A byte, 0 or 1.
    ACL_BOOL: c_int = 12;
    /// bfloat16.
    ACL_BF16: c_int = 27;
    /// Two signed 4-bit numbers a byte, the low half first.
    ACL_INT4: c_int = 29;

    /// Plain rows.
    ACL_FORMAT_ND: c_int = 2;
    /// Tiles of 16 rows by 32 bytes, column of tiles by column of tiles.
    ACL_FORMAT_FRACTAL_NZ: c_int = 29;

    /// 2 MiB pages above 1 MiB, small pages where there are none left.
    ACL_MEM_MALLOC_HUGE_FIRST: c_int = 0;
    /// 2 MiB pages or failure.
    ACL_MEM_MALLOC_HUGE_ONLY: c_int = 1;
    /// 4 KiB pages.
    ACL_MEM_MALLOC_NORMAL_ONLY: c_int = 2;

    /// Host to host; refused in queued copies.
    ACL_MEMCPY_HOST_TO_HOST: c_int = 0;
    /// Host to device.
    ACL_MEMCPY_HOST_TO_DEVICE: c_int = 1;
    /// Device to host.
    ACL_MEMCPY_DEVICE_TO_HOST: c_int = 2;
    /// Within a device.
    ACL_MEMCPY_DEVICE_TO_DEVICE: c_int = 3;

    /// The device's main memory.
    ACL_HBM_MEM: c_int = 1;

    /// The event orders streams.
    ACL_EVENT_SYNC: u32 = 1;
    /// The event carries a time.
    ACL_EVENT_TIME_LINE: u32 = 8;
    /// The event crosses a captured graph's border; stands alone.
    ACL_EVENT_EXTERNAL: u32 = 32;
    /// `aclrtQueryEventStatus`: not yet.
    ACL_EVENT_RECORDED_STATUS_NOT_READY: c_int = 0;
    /// `aclrtQueryEventStatus`: done.
    ACL_EVENT_RECORDED_STATUS_COMPLETE: c_int = 1;
    /// `aclrtStreamQuery`: done (the other way round than events).
    ACL_STREAM_STATUS_COMPLETE: c_int = 0;

    /// Launch resources are allocated with the stream.
    ACL_STREAM_FAST_LAUNCH: u32 = 1;
    /// The host spins in a synchronize.
    ACL_STREAM_FAST_SYNC: u32 = 2;
    /// After a failure nothing more runs in the context.
    ACL_STOP_ON_FAILURE: u64 = 1;

    /// No thread may call what capture forbids.
    ACL_MODEL_RI_CAPTURE_MODE_GLOBAL: c_int = 0;
    /// The capturing thread may not.
    ACL_MODEL_RI_CAPTURE_MODE_THREAD_LOCAL: c_int = 1;
    /// No check.
    ACL_MODEL_RI_CAPTURE_MODE_RELAXED: c_int = 2;

    /// Kernels whose sums do not depend on timing.
    ACL_OPT_DETERMINISTIC: c_int = 0;
    /// The error of this thread.
    ACL_RT_THREAD_LEVEL: c_int = 0;

    /// A collective's success.
    HCCL_SUCCESS: c_int = 0;
    /// A collective does not take this.
    HCCL_E_NOT_SUPPORT: c_int = 5;
    /// The runtime failed inside a collective.
    HCCL_E_RUNTIME: c_int = 15;
    /// Collective over bytes.
    HCCL_DATA_TYPE_INT8: c_int = 0;
    /// Collective over 32-bit integers.
    HCCL_DATA_TYPE_INT32: c_int = 2;
    /// Collective over halves.
    HCCL_DATA_TYPE_FP16: c_int = 3;
    /// Collective over floats.
    HCCL_DATA_TYPE_FP32: c_int = 4;
    /// Collective over bfloat16.
    HCCL_DATA_TYPE_BFP16: c_int = 11;
    /// Sum.
    HCCL_REDUCE_SUM: c_int = 0;
    /// Largest.
    HCCL_REDUCE_MAX: c_int = 2;

    /// MHz of the memory.
    DCMI_FREQ_HBM: c_int = 6;
    /// MHz of the AI cores now. The header's name ends in an underscore.
    DCMI_FREQ_AICORE_CURRENT_: c_int = 7;
    /// MHz of the AI cores at most.
    DCMI_FREQ_AICORE_MAX: c_int = 9;
    /// Percent of the AI cores in use.
    DCMI_UTILIZATION_RATE_AICORE: c_int = 2;
    /// Percent of memory in use.
    DCMI_UTILIZATION_RATE_HBM: c_int = 6;
    /// Percent of memory bandwidth in use.
    DCMI_UTILIZATION_RATE_HBM_BANDWIDTH: c_int = 10;
    /// Percent of the vector cores in use.
    DCMI_UTILIZATION_RATE_VECTORCORE: c_int = 12;
    /// Percent of the chip in use.
    DCMI_UTILIZATION_RATE_NPU: c_int = 13;
    /// Queries about power and clocks.
    DCMI_MAIN_CMD_LP: c_int = 8;
    /// Bits that say why the clock is reduced (`u64`).
    DCMI_LP_SUB_CMD_AICORE_FREQREDUC_CAUSE: c_uint = 9;
    /// Rated power (`DCMI_LP_POWER_INFO_STRU`).
    DCMI_LP_SUB_CMD_GET_POWER_INFO: c_uint = 10;
}

/// `aclrtUtilizationInfo`: percentages, -1 where the device does not say.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AclrtUtilizationInfo {
    /// Cube cores.
    pub cube: i32,
    /// Vector cores.
    pub vector: i32,
    /// AI CPU.
    pub aicpu: i32,
    /// Memory; always -1 so far.
    pub memory: i32,
    /// Reserved; null.
    pub extend: *mut c_void,
}

/// `HcclRootInfo`: what one rank makes and all ranks join with.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct HcclRootInfo {
    /// Opaque.
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
    /// MB.
    pub memory_size: c_ulonglong,
    /// MHz.
    pub freq: c_uint,
    /// MB in use.
    pub memory_usage: c_ulonglong,
    /// Degrees Celsius.
    pub temp: c_int,
    /// Percent.
    pub bandwidth_util_rate: c_uint,
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::{offset_of, size_of};

    /// Sizes and offsets as the headers have them on LP64.
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
