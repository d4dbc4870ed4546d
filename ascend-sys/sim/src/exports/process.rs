//! `libascendcl`: the process, devices, contexts, errors.

#![allow(unsafe_code, non_snake_case)]

use crate::codes::{INVALID_PARAM, REPEAT_INITIALIZE, RT_INVALID_HANDLE, RT_PARAM_INVALID, UNINITIALIZED, rule};
use crate::control;
use crate::ffi::{Out, Text, plain, recent_message};
use crate::registry::Handle;
use crate::runtime::context;
use crate::runtime::stream::KERNEL_LIMIT_S;
use crate::settings::Setting;
use std::ffi::c_char;
use std::sync::atomic::{AtomicBool, Ordering};

static IS_INITIALIZED: AtomicBool = AtomicBool::new(false);

/// Version of the ACL interface, which is independent of CANN's.
const ACL_VERSION: (i32, i32, i32) = (1, 14, 0);

/// `aclrtUtilizationInfo`.
#[repr(C)]
pub struct Utilization {
    cube: i32,
    vector: i32,
    aicpu: i32,
    memory: i32,
    extend: usize,
}

#[unsafe(no_mangle)]
pub extern "C" fn aclInit(_config: Text) -> i32 {
    plain("aclInit", || {
        let is_repeated = IS_INITIALIZED.swap(true, Ordering::Relaxed);
        rule!(!is_repeated, REPEAT_INITIALIZE, "initialized before");
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn aclFinalize() -> i32 {
    plain("aclFinalize", || {
        rule!(IS_INITIALIZED.swap(false, Ordering::Relaxed), UNINITIALIZED, "not initialized");
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn aclFinalizeReference(count: Out<u64>) -> i32 {
    plain("aclFinalizeReference", || {
        rule!(IS_INITIALIZED.swap(false, Ordering::Relaxed), UNINITIALIZED, "not initialized");
        count.put_if_asked(0);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn aclGetRecentErrMsg() -> *const c_char {
    recent_message()
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtGetVersion(major: Out<i32>, minor: Out<i32>, patch: Out<i32>) -> i32 {
    plain("aclrtGetVersion", || {
        major.put(ACL_VERSION.0)?;
        minor.put(ACL_VERSION.1)?;
        patch.put(ACL_VERSION.2)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn aclsysGetVersionNum(package: Text, version: Out<i32>) -> i32 {
    plain("aclsysGetVersionNum", || {
        let package = package.get().unwrap_or_default();
        rule!(package == "runtime", INVALID_PARAM, "no package {package}");
        version.put(i32::try_from(Setting::cann.get()).unwrap_or(0))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtSetDevice(device: i32) -> i32 {
    plain("aclrtSetDevice", || {
        rule!(IS_INITIALIZED.load(Ordering::Relaxed), UNINITIALIZED, "aclInit was not called");
        context::set_device(device)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtResetDevice(device: i32) -> i32 {
    plain("aclrtResetDevice", || context::reset_device(device, false))
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtResetDeviceForce(device: i32) -> i32 {
    plain("aclrtResetDeviceForce", || context::reset_device(device, true))
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtGetDevice(device: Out<i32>) -> i32 {
    plain("aclrtGetDevice", || device.put(context::current()?.device))
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtGetDeviceCount(count: Out<u32>) -> i32 {
    plain("aclrtGetDeviceCount", || count.put(u32::try_from(Setting::devices.get()).unwrap_or(0)))
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtGetSocName() -> *const c_char {
    c"Ascend910B3".as_ptr()
}

/// 0 normal, 1 abnormal.
#[unsafe(no_mangle)]
pub extern "C" fn aclrtQueryDeviceStatus(_device: i32, status: Out<i32>) -> i32 {
    plain("aclrtQueryDeviceStatus", || status.put(i32::from(control::is_lost().is_some())))
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtGetDeviceUtilizationRate(_device: i32, utilization: Out<Utilization>) -> i32 {
    plain("aclrtGetDeviceUtilizationRate", || {
        utilization.put(Utilization { cube: 0, vector: 0, aicpu: 0, memory: -1, extend: 0 })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtCreateContext(handle: Out<Handle>, device: i32) -> i32 {
    plain("aclrtCreateContext", || handle.put(context::create(device)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtDestroyContext(handle: Handle) -> i32 {
    plain("aclrtDestroyContext", || context::destroy(handle))
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtSetCurrentContext(handle: Handle) -> i32 {
    plain("aclrtSetCurrentContext", || context::set_current(handle))
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtGetCurrentContext(handle: Out<Handle>) -> i32 {
    plain("aclrtGetCurrentContext", || {
        context::current()?;
        handle.put(context::current_handle())
    })
}

/// Accepts any option: all kernels of the simulator are deterministic.
#[unsafe(no_mangle)]
pub extern "C" fn aclrtCtxSetSysParamOpt(option: i32, value: i64) -> i32 {
    plain("aclrtCtxSetSysParamOpt", || {
        context::current()?;
        rule!((0..=3).contains(&option) && (0..=1).contains(&value), RT_PARAM_INVALID, "option {option} = {value}");
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtSetOpExecuteTimeOut(seconds: u32) -> i32 {
    plain("aclrtSetOpExecuteTimeOut", || {
        KERNEL_LIMIT_S.store(u64::from(seconds), Ordering::Relaxed);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtSetOpWaitTimeout(_seconds: u32) -> i32 {
    plain("aclrtSetOpWaitTimeout", || Ok(()))
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtPeekAtLastError(level: i32) -> i32 {
    if level == 0 { control::last_error(false) } else { RT_INVALID_HANDLE }
}

#[unsafe(no_mangle)]
pub extern "C" fn aclrtGetLastError(level: i32) -> i32 {
    if level == 0 { control::last_error(true) } else { RT_INVALID_HANDLE }
}

/// Resets the initialization state, for tests.
pub(crate) fn reset() {
    IS_INITIALIZED.store(false, Ordering::Relaxed);
    KERNEL_LIMIT_S.store(1091, Ordering::Relaxed);
}
