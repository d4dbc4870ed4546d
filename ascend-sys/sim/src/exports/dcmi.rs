//! `libdcmi`: figures that a card reports. Constant, except for those that a setting controls.

#![allow(unsafe_code, non_snake_case)]

use crate::ffi::Out;
use crate::runtime::memory::memory;
use crate::settings::Setting;

const INVALID_PARAMETER: i32 = -8001;
const INVALID_DEVICE: i32 = -8007;
const NOT_SUPPORTED: i32 = -8255;

/// `struct dcmi_hbm_info`.
#[repr(C)]
#[derive(Default)]
pub struct HbmInfo {
    memory_mb: u64,
    mhz: u32,
    used_mb: u64,
    celsius: i32,
    bandwidth_percent: u32,
}

const CELSIUS: i32 = 45;
const HBM_MHZ: u32 = 1600;
/// Rated frequency of the AI cores of a 910B3.
const RATED_MHZ: u32 = 1800;
/// Assumed: 150 to 600 W are documented.
const RATED_MW: u32 = 400_000;

fn check(device: i32) -> i32 {
    if (0..Setting::devices.get()).contains(&i64::from(device)) { 0 } else { INVALID_DEVICE }
}

fn answer<T>(device: i32, place: Out<T>, value: T) -> i32 {
    match check(device) {
        0 if place.put(value).is_err() => INVALID_PARAMETER,
        code => code,
    }
}

fn setting_u32(setting: Setting) -> u32 {
    u32::try_from(setting.get()).unwrap_or(0)
}

#[unsafe(no_mangle)]
pub extern "C" fn dcmi_init() -> i32 {
    0
}

/// One chip per card, with the same numbers.
#[unsafe(no_mangle)]
pub extern "C" fn dcmi_get_card_id_device_id_from_logicid(card: Out<i32>, device: Out<i32>, logic: u32) -> i32 {
    let logic = i32::try_from(logic).unwrap_or(-1);
    match answer(logic, card, logic) {
        0 => answer(logic, device, 0),
        code => code,
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn dcmi_get_device_power_info(card: i32, _device: i32, decawatts: Out<i32>) -> i32 {
    answer(card, decawatts, i32::try_from(Setting::power_dw.get()).unwrap_or(0))
}

#[unsafe(no_mangle)]
pub extern "C" fn dcmi_get_device_utilization_rate(card: i32, _device: i32, kind: i32, percent: Out<u32>) -> i32 {
    match kind {
        2 | 3 | 4 | 6 | 10 | 12 | 13 => answer(card, percent, 0),
        _ => NOT_SUPPORTED,
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn dcmi_get_device_frequency(card: i32, _device: i32, kind: i32, mhz: Out<u32>) -> i32 {
    match kind {
        6 => answer(card, mhz, HBM_MHZ),
        7 | 12 => answer(card, mhz, setting_u32(Setting::aicore_mhz)),
        9 => answer(card, mhz, RATED_MHZ),
        _ => NOT_SUPPORTED,
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn dcmi_get_device_hbm_info(card: i32, _device: i32, info: Out<HbmInfo>) -> i32 {
    let used_mb = memory().used_bytes(card.unsigned_abs()) >> 20;
    let memory_mb = Setting::hbm_bytes.size() >> 20;
    answer(card, info, HbmInfo { memory_mb, mhz: HBM_MHZ, used_mb, celsius: CELSIUS, bandwidth_percent: 0 })
}

#[unsafe(no_mangle)]
pub extern "C" fn dcmi_get_device_temperature(card: i32, _device: i32, celsius: Out<i32>) -> i32 {
    answer(card, celsius, CELSIUS)
}

#[unsafe(no_mangle)]
pub extern "C" fn dcmi_get_device_health(card: i32, _device: i32, health: Out<u32>) -> i32 {
    answer(card, health, setting_u32(Setting::health))
}

/// Reason for a reduced clock (none), and the rated power. The result has the size of its struct.
#[unsafe(no_mangle)]
pub extern "C" fn dcmi_get_device_info(
    card: i32,
    _device: i32,
    main: i32,
    sub: u32,
    buffer: Out<u32>,
    bytes: Out<u32>,
) -> i32 {
    const LOW_POWER: i32 = 8;
    const FREQUENCY_REDUCED_BY: u32 = 9;
    const POWER_INFO: u32 = 10;
    let values: &[u32] = match (main, sub) {
        (LOW_POWER, FREQUENCY_REDUCED_BY) => &[0, 0],
        (LOW_POWER, POWER_INFO) => &[RATED_MW, 0, 0, 0, 0, 0, 0, 0, 0],
        _ => return NOT_SUPPORTED,
    };
    match check(card) {
        0 if buffer.put_all(values).is_err() => INVALID_PARAMETER,
        0 => answer(card, bytes, u32::try_from(size_of_val(values)).unwrap_or(0)),
        code => code,
    }
}
