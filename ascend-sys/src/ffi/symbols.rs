//! Declarations of the C functions that this crate uses, and their lookup.
//!
//! The signatures have been stable from CANN 8.0 to 9.2; the C prototype precedes each function. Functions that all
//! versions have are required: a library without one of them fails to load, instead of failing in the middle of a step.
//! Later or supplementary functions are optional: [`Symbols::missing`] lists the absent ones. The kernel shim declares
//! the operations of `aclnn`.

use crate::abi::{
    AclmdlRI, AclrtContext, AclrtEvent, AclrtStream, AclrtTaskGrp, AclrtUtilizationInfo, DcmiHbmInfo, HcclComm,
    HcclRootInfo,
};
use crate::error::LoadError;
use crate::ffi::loader::Library;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

/// Expands to the C string of a symbol's name.
macro_rules! c_name {
    ($symbol:literal) => {
        const {
            match CStr::from_bytes_with_nul(concat!($symbol, "\0").as_bytes()) {
                Ok(name) => name,
                Err(_) => panic!("a symbol name contains a NUL byte"),
            }
        }
    };
}

/// Declares a struct of function pointers with one field per C function.
macro_rules! symbols {
    (
        $(#[$meta:meta])*
        pub struct $name:ident {
            required { $($(#[$doc:meta])* $field:ident: $symbol:literal fn($($arg:ty),*) -> $ret:ty,)* }
            optional { $($(#[$odoc:meta])* $ofield:ident: $osymbol:literal fn($($oarg:ty),*) -> $oret:ty,)* }
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug)]
        pub struct $name {
            $($(#[$doc])* pub $field: unsafe extern "C" fn($($arg),*) -> $ret,)*
            $($(#[$odoc])* pub $ofield: Option<unsafe extern "C" fn($($oarg),*) -> $oret>,)*
        }

        impl $name {
            /// Looks up all functions.
            ///
            /// # Errors
            /// [`LoadError::MissingSymbol`] with the first required function that the library lacks.
            #[allow(unsafe_code)]
            pub fn load(library: &Library) -> Result<Self, LoadError> {
                Ok(Self {
                    $($field: {
                        let address = library.address(c_name!($symbol), $symbol)?.as_ptr();
                        // SAFETY: The address is that of the function `$symbol`, in a library that is never unloaded.
                        // SAFETY: The type is that of the function in the headers of all versions since CANN 8.0.
                        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($arg),*) -> $ret>(address) }
                    },)*
                    $($ofield: library.find(c_name!($osymbol)).map(|address| {
                        // SAFETY: The address is that of the function `$osymbol`, in a library that is never unloaded.
                        // SAFETY: The type is that of the function in the headers of all versions that have it.
                        unsafe {
                            std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($oarg),*) -> $oret>(address.as_ptr())
                        }
                    }),)*
                })
            }

            /// Returns the names of the optional functions that the library lacks.
            pub fn missing(&self) -> Vec<&'static str> {
                let optional = [$((self.$ofield.is_none(), $osymbol)),*];
                optional.into_iter().filter_map(|(is_missing, name)| is_missing.then_some(name)).collect()
            }
        }
    };
}

symbols! {
    /// Functions of the runtime. Calling one is unsafe: the caller must pass the arguments that the C function
    /// requires.
    pub struct Symbols {
        required {
            /// `aclError aclInit(const char *configPath)`.
            acl_init: "aclInit" fn(*const c_char) -> c_int,
            /// `aclError aclFinalize(void)`.
            acl_finalize: "aclFinalize" fn() -> c_int,
            /// `const char *aclGetRecentErrMsg(void)`.
            acl_get_recent_err_msg: "aclGetRecentErrMsg" fn() -> *const c_char,
            /// `aclError aclrtSetDevice(int32_t deviceId)`.
            aclrt_set_device: "aclrtSetDevice" fn(i32) -> c_int,
            /// `aclError aclrtResetDevice(int32_t deviceId)`.
            aclrt_reset_device: "aclrtResetDevice" fn(i32) -> c_int,
            /// `aclError aclrtGetDevice(int32_t *deviceId)`.
            aclrt_get_device: "aclrtGetDevice" fn(*mut i32) -> c_int,
            /// `aclError aclrtGetDeviceCount(uint32_t *count)`.
            aclrt_get_device_count: "aclrtGetDeviceCount" fn(*mut u32) -> c_int,
            /// `const char *aclrtGetSocName(void)`.
            aclrt_get_soc_name: "aclrtGetSocName" fn() -> *const c_char,
            /// `aclError aclrtCreateContext(aclrtContext *context, int32_t deviceId)`.
            aclrt_create_context: "aclrtCreateContext" fn(*mut AclrtContext, i32) -> c_int,
            /// `aclError aclrtDestroyContext(aclrtContext context)`.
            aclrt_destroy_context: "aclrtDestroyContext" fn(AclrtContext) -> c_int,
            /// `aclError aclrtSetCurrentContext(aclrtContext context)`.
            aclrt_set_current_context: "aclrtSetCurrentContext" fn(AclrtContext) -> c_int,
            /// `aclError aclrtGetCurrentContext(aclrtContext *context)`.
            aclrt_get_current_context: "aclrtGetCurrentContext" fn(*mut AclrtContext) -> c_int,
            /// `aclError aclrtCreateStream(aclrtStream *stream)`.
            aclrt_create_stream: "aclrtCreateStream" fn(*mut AclrtStream) -> c_int,
            /// `aclError aclrtCreateStreamWithConfig(aclrtStream *stream, uint32_t priority, uint32_t flag)`.
            aclrt_create_stream_with_config: "aclrtCreateStreamWithConfig" fn(*mut AclrtStream, u32, u32) -> c_int,
            /// `aclError aclrtDestroyStream(aclrtStream stream)`.
            aclrt_destroy_stream: "aclrtDestroyStream" fn(AclrtStream) -> c_int,
            /// `aclError aclrtSynchronizeStream(aclrtStream stream)`.
            aclrt_synchronize_stream: "aclrtSynchronizeStream" fn(AclrtStream) -> c_int,
            /// `aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t timeout)`.
            aclrt_synchronize_stream_with_timeout: "aclrtSynchronizeStreamWithTimeout" fn(AclrtStream, i32) -> c_int,
            /// `aclError aclrtSynchronizeDevice(void)`.
            aclrt_synchronize_device: "aclrtSynchronizeDevice" fn() -> c_int,
            /// `aclError aclrtCreateEventWithFlag(aclrtEvent *event, uint32_t flag)`.
            aclrt_create_event_with_flag: "aclrtCreateEventWithFlag" fn(*mut AclrtEvent, u32) -> c_int,
            /// `aclError aclrtCreateEventExWithFlag(aclrtEvent *event, uint32_t flag)`.
            aclrt_create_event_ex_with_flag: "aclrtCreateEventExWithFlag" fn(*mut AclrtEvent, u32) -> c_int,
            /// `aclError aclrtDestroyEvent(aclrtEvent event)`.
            aclrt_destroy_event: "aclrtDestroyEvent" fn(AclrtEvent) -> c_int,
            /// `aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream)`.
            aclrt_record_event: "aclrtRecordEvent" fn(AclrtEvent, AclrtStream) -> c_int,
            /// `aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event)`.
            aclrt_stream_wait_event: "aclrtStreamWaitEvent" fn(AclrtStream, AclrtEvent) -> c_int,
            /// `aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus *status)`.
            aclrt_query_event_status: "aclrtQueryEventStatus" fn(AclrtEvent, *mut c_int) -> c_int,
            /// `aclError aclrtSynchronizeEvent(aclrtEvent event)`.
            aclrt_synchronize_event: "aclrtSynchronizeEvent" fn(AclrtEvent) -> c_int,
            /// `aclError aclrtMalloc(void **devPtr, size_t size, aclrtMemMallocPolicy policy)`.
            aclrt_malloc: "aclrtMalloc" fn(*mut *mut c_void, usize, c_int) -> c_int,
            /// `aclError aclrtFree(void *devPtr)`.
            aclrt_free: "aclrtFree" fn(*mut c_void) -> c_int,
            /// `aclError aclrtMallocHost(void **hostPtr, size_t size)`.
            aclrt_malloc_host: "aclrtMallocHost" fn(*mut *mut c_void, usize) -> c_int,
            /// `aclError aclrtFreeHost(void *hostPtr)`.
            aclrt_free_host: "aclrtFreeHost" fn(*mut c_void) -> c_int,
            /// `aclError aclrtMemcpy(void *dst, size_t destMax, const void *src, size_t count, aclrtMemcpyKind kind)`.
            aclrt_memcpy: "aclrtMemcpy" fn(*mut c_void, usize, *const c_void, usize, c_int) -> c_int,
            /// `aclError aclrtMemcpyAsync(void *dst, size_t destMax, const void *src, size_t count, aclrtMemcpyKind kind, aclrtStream stream)`.
            aclrt_memcpy_async: "aclrtMemcpyAsync" fn(*mut c_void, usize, *const c_void, usize, c_int, AclrtStream) -> c_int,
            /// `aclError aclrtMemset(void *devPtr, size_t maxCount, int32_t value, size_t count)`.
            aclrt_memset: "aclrtMemset" fn(*mut c_void, usize, i32, usize) -> c_int,
            /// `aclError aclrtMemsetAsync(void *devPtr, size_t maxCount, int32_t value, size_t count, aclrtStream stream)`.
            aclrt_memset_async: "aclrtMemsetAsync" fn(*mut c_void, usize, i32, usize, AclrtStream) -> c_int,
            /// `aclError aclrtGetMemInfo(aclrtMemAttr attr, size_t *free, size_t *total)`.
            aclrt_get_mem_info: "aclrtGetMemInfo" fn(c_int, *mut usize, *mut usize) -> c_int,
        }
        optional {
            /// `aclError aclFinalizeReference(uint64_t *refCount)`.
            acl_finalize_reference: "aclFinalizeReference" fn(*mut u64) -> c_int,
            /// `aclError aclsysGetVersionNum(char *pkgName, int32_t *versionNum)`.
            aclsys_get_version_num: "aclsysGetVersionNum" fn(*mut c_char, *mut i32) -> c_int,
            /// `aclError aclrtGetVersion(int32_t *majorVersion, int32_t *minorVersion, int32_t *patchVersion)`.
            aclrt_get_version: "aclrtGetVersion" fn(*mut i32, *mut i32, *mut i32) -> c_int,
            /// `aclError aclrtResetDeviceForce(int32_t deviceId)`.
            aclrt_reset_device_force: "aclrtResetDeviceForce" fn(i32) -> c_int,
            /// `aclError aclrtQueryDeviceStatus(int32_t deviceId, aclrtDeviceStatus *deviceStatus)`.
            aclrt_query_device_status: "aclrtQueryDeviceStatus" fn(i32, *mut c_int) -> c_int,
            /// `aclError aclrtGetDeviceUtilizationRate(int32_t deviceId, aclrtUtilizationInfo *utilizationInfo)`.
            aclrt_get_device_utilization_rate: "aclrtGetDeviceUtilizationRate" fn(i32, *mut AclrtUtilizationInfo) -> c_int,
            /// `aclError aclrtCtxSetSysParamOpt(aclSysParamOpt opt, int64_t value)`.
            aclrt_ctx_set_sys_param_opt: "aclrtCtxSetSysParamOpt" fn(c_int, i64) -> c_int,
            /// `aclError aclrtDestroyStreamForce(aclrtStream stream)`.
            aclrt_destroy_stream_force: "aclrtDestroyStreamForce" fn(AclrtStream) -> c_int,
            /// `aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus *status)`.
            aclrt_stream_query: "aclrtStreamQuery" fn(AclrtStream, *mut c_int) -> c_int,
            /// `aclError aclrtStreamAbort(aclrtStream stream)`.
            aclrt_stream_abort: "aclrtStreamAbort" fn(AclrtStream) -> c_int,
            /// `aclError aclrtGetStreamAvailableNum(uint32_t *streamCount)`.
            aclrt_get_stream_available_num: "aclrtGetStreamAvailableNum" fn(*mut u32) -> c_int,
            /// `aclError aclrtSetStreamFailureMode(aclrtStream stream, uint64_t mode)`.
            aclrt_set_stream_failure_mode: "aclrtSetStreamFailureMode" fn(AclrtStream, u64) -> c_int,
            /// `aclError aclrtSynchronizeEventWithTimeout(aclrtEvent event, int32_t timeout)`.
            aclrt_synchronize_event_with_timeout: "aclrtSynchronizeEventWithTimeout" fn(AclrtEvent, i32) -> c_int,
            /// `aclError aclrtSynchronizeDeviceWithTimeout(int32_t timeout)`.
            aclrt_synchronize_device_with_timeout: "aclrtSynchronizeDeviceWithTimeout" fn(i32) -> c_int,
            /// `aclError aclrtResetEvent(aclrtEvent event, aclrtStream stream)`.
            aclrt_reset_event: "aclrtResetEvent" fn(AclrtEvent, AclrtStream) -> c_int,
            /// `aclError aclrtEventElapsedTime(float *ms, aclrtEvent startEvent, aclrtEvent endEvent)`.
            aclrt_event_elapsed_time: "aclrtEventElapsedTime" fn(*mut f32, AclrtEvent, AclrtEvent) -> c_int,
            /// `aclError aclrtSetOpExecuteTimeOut(uint32_t timeout)`.
            aclrt_set_op_execute_time_out: "aclrtSetOpExecuteTimeOut" fn(u32) -> c_int,
            /// `aclError aclrtSetOpWaitTimeout(uint32_t timeout)`.
            aclrt_set_op_wait_timeout: "aclrtSetOpWaitTimeout" fn(u32) -> c_int,
            /// `aclError aclrtPeekAtLastError(aclrtLastErrLevel level)`.
            aclrt_peek_at_last_error: "aclrtPeekAtLastError" fn(c_int) -> c_int,
            /// `aclError aclrtGetLastError(aclrtLastErrLevel level)`.
            aclrt_get_last_error: "aclrtGetLastError" fn(c_int) -> c_int,
            /// `aclError aclmdlRICaptureBegin(aclrtStream stream, aclmdlRICaptureMode mode)`.
            aclmdl_ri_capture_begin: "aclmdlRICaptureBegin" fn(AclrtStream, c_int) -> c_int,
            /// `aclError aclmdlRICaptureEnd(aclrtStream stream, aclmdlRI *modelRI)`.
            aclmdl_ri_capture_end: "aclmdlRICaptureEnd" fn(AclrtStream, *mut AclmdlRI) -> c_int,
            /// `aclError aclmdlRICaptureGetInfo(aclrtStream stream, aclmdlRICaptureStatus *status, aclmdlRI *modelRI)`.
            aclmdl_ri_capture_get_info: "aclmdlRICaptureGetInfo" fn(AclrtStream, *mut c_int, *mut AclmdlRI) -> c_int,
            /// `aclError aclmdlRICaptureTaskGrpBegin(aclrtStream stream)`.
            aclmdl_ri_capture_task_grp_begin: "aclmdlRICaptureTaskGrpBegin" fn(AclrtStream) -> c_int,
            /// `aclError aclmdlRICaptureTaskGrpEnd(aclrtStream stream, aclrtTaskGrp *handle)`.
            aclmdl_ri_capture_task_grp_end: "aclmdlRICaptureTaskGrpEnd" fn(AclrtStream, *mut AclrtTaskGrp) -> c_int,
            /// `aclError aclmdlRICaptureTaskUpdateBegin(aclrtStream stream, aclrtTaskGrp handle)`.
            aclmdl_ri_capture_task_update_begin: "aclmdlRICaptureTaskUpdateBegin" fn(AclrtStream, AclrtTaskGrp) -> c_int,
            /// `aclError aclmdlRICaptureTaskUpdateEnd(aclrtStream stream)`.
            aclmdl_ri_capture_task_update_end: "aclmdlRICaptureTaskUpdateEnd" fn(AclrtStream) -> c_int,
            /// `aclError aclmdlRIExecuteAsync(aclmdlRI modelRI, aclrtStream stream)`.
            aclmdl_ri_execute_async: "aclmdlRIExecuteAsync" fn(AclmdlRI, AclrtStream) -> c_int,
            /// `aclError aclmdlRIDestroy(aclmdlRI modelRI)`.
            aclmdl_ri_destroy: "aclmdlRIDestroy" fn(AclmdlRI) -> c_int,
        }
    }
}

symbols! {
    /// Functions of the collectives library (HCCL).
    pub struct HcclSymbols {
        required {
            /// `HcclResult HcclGetRootInfo(HcclRootInfo *rootInfo)`.
            hccl_get_root_info: "HcclGetRootInfo" fn(*mut HcclRootInfo) -> c_int,
            /// `HcclResult HcclCommInitRootInfo(uint32_t nRanks, const HcclRootInfo *rootInfo, uint32_t rank, HcclComm *comm)`.
            hccl_comm_init_root_info: "HcclCommInitRootInfo" fn(u32, *const HcclRootInfo, u32, *mut HcclComm) -> c_int,
            /// `HcclResult HcclCommDestroy(HcclComm comm)`.
            hccl_comm_destroy: "HcclCommDestroy" fn(HcclComm) -> c_int,
            /// `HcclResult HcclAllReduce(void *sendBuf, void *recvBuf, uint64_t count, HcclDataType dataType, HcclReduceOp op, HcclComm comm, aclrtStream stream)`.
            hccl_all_reduce: "HcclAllReduce" fn(*mut c_void, *mut c_void, u64, c_int, c_int, HcclComm, AclrtStream) -> c_int,
            /// `HcclResult HcclAllGather(void *sendBuf, void *recvBuf, uint64_t sendCount, HcclDataType dataType, HcclComm comm, aclrtStream stream)`.
            hccl_all_gather: "HcclAllGather" fn(*mut c_void, *mut c_void, u64, c_int, HcclComm, AclrtStream) -> c_int,
            /// `HcclResult HcclReduceScatter(void *sendBuf, void *recvBuf, uint64_t recvCount, HcclDataType dataType, HcclReduceOp op, HcclComm comm, aclrtStream stream)`.
            hccl_reduce_scatter: "HcclReduceScatter" fn(*mut c_void, *mut c_void, u64, c_int, c_int, HcclComm, AclrtStream) -> c_int,
            /// `HcclResult HcclBroadcast(void *buf, uint64_t count, HcclDataType dataType, uint32_t root, HcclComm comm, aclrtStream stream)`.
            hccl_broadcast: "HcclBroadcast" fn(*mut c_void, u64, c_int, u32, HcclComm, AclrtStream) -> c_int,
        }
        optional {
            /// `HcclResult HcclCommInitAll(uint32_t ndev, int32_t *devices, HcclComm *comms)`.
            hccl_comm_init_all: "HcclCommInitAll" fn(u32, *mut i32, *mut HcclComm) -> c_int,
            /// `const char *HcclGetErrorString(HcclResult code)`.
            hccl_get_error_string: "HcclGetErrorString" fn(c_int) -> *const c_char,
            /// `HcclResult HcclGetCommAsyncError(HcclComm comm, HcclResult *asyncError)`.
            hccl_get_comm_async_error: "HcclGetCommAsyncError" fn(HcclComm, *mut c_int) -> c_int,
        }
    }
}

symbols! {
    /// Functions of the device management library (DCMI): power, clocks, temperature, health.
    pub struct DcmiSymbols {
        required {
            /// `int dcmi_init(void)`.
            dcmi_init: "dcmi_init" fn() -> c_int,
            /// `int dcmi_get_card_id_device_id_from_logicid(int *card_id, int *device_id, unsigned int device_logic_id)`.
            dcmi_get_card_id_device_id_from_logicid: "dcmi_get_card_id_device_id_from_logicid" fn(*mut c_int, *mut c_int, c_uint) -> c_int,
            /// `int dcmi_get_device_power_info(int card_id, int device_id, int *power)`.
            dcmi_get_device_power_info: "dcmi_get_device_power_info" fn(c_int, c_int, *mut c_int) -> c_int,
        }
        optional {
            /// `int dcmi_get_device_utilization_rate(int card_id, int device_id, int input_type, unsigned int *utilization_rate)`.
            dcmi_get_device_utilization_rate: "dcmi_get_device_utilization_rate" fn(c_int, c_int, c_int, *mut c_uint) -> c_int,
            /// `int dcmi_get_device_frequency(int card_id, int device_id, enum dcmi_freq_type input_type, unsigned int *frequency)`.
            dcmi_get_device_frequency: "dcmi_get_device_frequency" fn(c_int, c_int, c_int, *mut c_uint) -> c_int,
            /// `int dcmi_get_device_hbm_info(int card_id, int device_id, struct dcmi_hbm_info *hbm_info)`.
            dcmi_get_device_hbm_info: "dcmi_get_device_hbm_info" fn(c_int, c_int, *mut DcmiHbmInfo) -> c_int,
            /// `int dcmi_get_device_temperature(int card_id, int device_id, int *temperature)`.
            dcmi_get_device_temperature: "dcmi_get_device_temperature" fn(c_int, c_int, *mut c_int) -> c_int,
            /// `int dcmi_get_device_health(int card_id, int device_id, unsigned int *health)`.
            dcmi_get_device_health: "dcmi_get_device_health" fn(c_int, c_int, *mut c_uint) -> c_int,
            /// `int dcmi_get_device_info(int card_id, int device_id, enum dcmi_main_cmd main_cmd, unsigned int sub_cmd, void *buf, unsigned int *size)`.
            dcmi_get_device_info: "dcmi_get_device_info" fn(c_int, c_int, c_int, c_uint, *mut c_void, *mut c_uint) -> c_int,
        }
    }
}
