//! What a card says of itself (DCMI, the driver's management library): power, clocks, temperature, health, memory.
//!
//! Everything here is read only: no cap, clock or level of a 910B can be set by a user. The library comes with the driver and
//! works beside the runtime and without it; where it or one of its functions is absent that is a typed error.

#![allow(unsafe_code)]

use crate::abi::{
    DCMI_FREQ_AICORE_CURRENT_, DCMI_FREQ_AICORE_MAX, DCMI_FREQ_HBM, DCMI_LP_SUB_CMD_AICORE_FREQREDUC_CAUSE,
    DCMI_LP_SUB_CMD_GET_POWER_INFO, DCMI_MAIN_CMD_LP, DCMI_UTILIZATION_RATE_AICORE, DCMI_UTILIZATION_RATE_HBM,
    DCMI_UTILIZATION_RATE_HBM_BANDWIDTH, DCMI_UTILIZATION_RATE_NPU, DCMI_UTILIZATION_RATE_VECTORCORE, DcmiHbmInfo,
};
use crate::error::{AscendError, AscendErrorKind, LoadError, SHIM_NO_SYMBOL};
use crate::ffi::loader::Library;
use crate::ffi::symbols::DcmiSymbols;
use std::ffi::{c_int, c_uint};
use std::path::Path;

/// Where the driver puts the library; containers must have it mounted.
pub const DCMI_LIBRARY: &str = "/usr/local/dcmi/libdcmi.so";

/// Temperatures from here on are codes: 0x7ffd invalid, 0x7fff not readable.
const NO_TEMPERATURE: c_int = 0x7ffd;

/// The library, initialized. Copies are the same.
#[derive(Clone, Copy, Debug)]
pub struct Dcmi {
    symbols: DcmiSymbols,
}

impl Dcmi {
    /// Opens and initializes the library at `path`, or where the driver puts it.
    ///
    /// Any [`LoadError`] means that cards say nothing of themselves here; a program works without.
    pub fn open(path: Option<&Path>) -> Result<Self, LoadError> {
        let path = path.unwrap_or(Path::new(DCMI_LIBRARY));
        let unavailable = |reason| LoadError::NoCardFigures { path: path.to_owned(), reason };
        let library = Library::open_alone(path).map_err(unavailable)?;
        let symbols = DcmiSymbols::load(&library)?;
        // SAFETY: takes no argument; a second time is harmless.
        match unsafe { (symbols.dcmi_init)() } {
            0 => Ok(Self { symbols }),
            code => Err(unavailable(format!("dcmi_init answers {code}: {}", words(code)))),
        }
    }

    /// The card of a device as the runtime counts them in this process, which `ASCEND_RT_VISIBLE_DEVICES` changes.
    pub fn card_of_device(&self, device: u32) -> Result<DcmiCard, AscendError> {
        let visible = std::env::var("ASCEND_RT_VISIBLE_DEVICES").ok();
        match logic_id(device, visible.as_deref()) {
            Some(logic_id) => self.card(logic_id),
            None => Err(AscendError {
                call: "dcmi_get_card_id_device_id_from_logicid",
                code: INVALID_DEVICE_ID,
                kind: AscendErrorKind::from_dcmi(INVALID_DEVICE_ID),
                message: format!("ASCEND_RT_VISIBLE_DEVICES shows no device {device}"),
            }),
        }
    }

    /// The card of a logical device number, as the host counts them.
    pub fn card(&self, logic_id: u32) -> Result<DcmiCard, AscendError> {
        let (mut card_id, mut device_id) = (0, 0);
        // SAFETY: two valid places for an int.
        let code = unsafe {
            (self.symbols.dcmi_get_card_id_device_id_from_logicid)(&raw mut card_id, &raw mut device_id, logic_id)
        };
        check("dcmi_get_card_id_device_id_from_logicid", code)?;
        Ok(DcmiCard { symbols: self.symbols, logic_id, ids: (card_id, device_id) })
    }
}

/// The logical number behind a device of this process: a list, of which the first entry that is no number ends what counts.
fn logic_id(device: u32, visible: Option<&str>) -> Option<u32> {
    let Some(list) = visible.filter(|list| !list.trim().is_empty()) else { return Some(device) };
    let ids = list.split(',').map_while(|id| id.trim().parse().ok());
    ids.into_iter().nth(usize::try_from(device).ok()?)
}

/// What is busy to some percentage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Unit {
    /// AI cores; reads 0 while a profiler runs.
    AiCore,
    /// Vector cores; reads 0 while a profiler runs.
    VectorCore,
    /// Memory capacity.
    Hbm,
    /// Memory bandwidth.
    HbmBandwidth,
    /// The whole chip.
    Npu,
}

/// How a card does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Health {
    /// Well.
    Normal,
    /// A general alarm.
    Minor,
    /// An important alarm.
    Major,
    /// An urgent alarm: take it out of service.
    Critical,
    /// Not there, or not started.
    Absent,
    /// A value that is not documented.
    Unknown(u32),
}

/// The device memory of a card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hbm {
    /// Bytes there are; counted in MB of 2^20 bytes.
    pub total_bytes: u64,
    /// Bytes in use, by any process; counted likewise.
    pub used_bytes: u64,
    /// Its clock.
    pub mhz: u32,
    /// Its temperature.
    pub celsius: i32,
    /// Percent of its bandwidth in use.
    pub bandwidth_percent: u32,
}

/// A chip, and what it says of itself. It may be asked from any thread.
#[derive(Clone, Copy, Debug)]
pub struct DcmiCard {
    symbols: DcmiSymbols,
    logic_id: u32,
    /// Card number, and chip on the card.
    ids: (c_int, c_int),
}

impl DcmiCard {
    /// Logical device number on the host.
    pub fn logic_id(&self) -> u32 {
        self.logic_id
    }

    /// Card number, and chip on the card, as `npu-smi` shows them.
    pub fn card_and_device(&self) -> (i32, i32) {
        self.ids
    }

    /// Milliwatts it draws now; the resolution is 0.1 W.
    pub fn power_mw(&self) -> Result<u32, AscendError> {
        let mut tenths = 0;
        // SAFETY: a valid place for an int.
        let code = unsafe { (self.symbols.dcmi_get_device_power_info)(self.ids.0, self.ids.1, &raw mut tenths) };
        check("dcmi_get_device_power_info", code)?;
        Ok(u32::try_from(tenths).unwrap_or(0).saturating_mul(100))
    }

    /// Milliwatts it is rated for.
    pub fn rated_power_mw(&self) -> Result<u32, AscendError> {
        // `DCMI_LP_POWER_INFO_STRU`: the power and 32 reserved bytes.
        let mut info = [0u32; 9];
        self.info(DCMI_LP_SUB_CMD_GET_POWER_INFO, &mut info)?;
        Ok(info[0])
    }

    /// Bits that say why the AI cores' clock is reduced, 0 if it is not. Their meaning is in the driver's documentation.
    pub fn clock_reduction_causes(&self) -> Result<u64, AscendError> {
        let mut causes = [0u32; 2];
        self.info(DCMI_LP_SUB_CMD_AICORE_FREQREDUC_CAUSE, &mut causes)?;
        Ok(u64::from(causes[0]) | u64::from(causes[1]) << 32)
    }

    /// MHz of the AI cores now.
    pub fn aicore_mhz(&self) -> Result<u32, AscendError> {
        self.frequency(DCMI_FREQ_AICORE_CURRENT_)
    }

    /// MHz the AI cores are rated for.
    pub fn aicore_rated_mhz(&self) -> Result<u32, AscendError> {
        self.frequency(DCMI_FREQ_AICORE_MAX)
    }

    /// MHz of the memory.
    pub fn hbm_mhz(&self) -> Result<u32, AscendError> {
        self.frequency(DCMI_FREQ_HBM)
    }

    /// Degrees Celsius of the chip.
    pub fn celsius(&self) -> Result<i32, AscendError> {
        const CALL: &str = "dcmi_get_device_temperature";
        let function = optional(CALL, self.symbols.dcmi_get_device_temperature)?;
        let mut celsius = 0;
        // SAFETY: a valid place for an int.
        check(CALL, unsafe { function(self.ids.0, self.ids.1, &raw mut celsius) })?;
        // No temperature can be read: as good as a device that does not support it.
        if celsius >= NO_TEMPERATURE { check(CALL, NOT_SUPPORT).map(|()| celsius) } else { Ok(celsius) }
    }

    /// How it does.
    pub fn health(&self) -> Result<Health, AscendError> {
        const CALL: &str = "dcmi_get_device_health";
        let function = optional(CALL, self.symbols.dcmi_get_device_health)?;
        let mut health: c_uint = 0;
        // SAFETY: a valid place for an unsigned int.
        check(CALL, unsafe { function(self.ids.0, self.ids.1, &raw mut health) })?;
        Ok(match health {
            0 => Health::Normal,
            1 => Health::Minor,
            2 => Health::Major,
            3 => Health::Critical,
            c_uint::MAX => Health::Absent,
            other => Health::Unknown(other),
        })
    }

    /// Percent of a unit in use.
    pub fn utilization(&self, unit: Unit) -> Result<u32, AscendError> {
        const CALL: &str = "dcmi_get_device_utilization_rate";
        let function = optional(CALL, self.symbols.dcmi_get_device_utilization_rate)?;
        let unit = match unit {
            Unit::AiCore => DCMI_UTILIZATION_RATE_AICORE,
            Unit::VectorCore => DCMI_UTILIZATION_RATE_VECTORCORE,
            Unit::Hbm => DCMI_UTILIZATION_RATE_HBM,
            Unit::HbmBandwidth => DCMI_UTILIZATION_RATE_HBM_BANDWIDTH,
            Unit::Npu => DCMI_UTILIZATION_RATE_NPU,
        };
        let mut percent = 0;
        // SAFETY: a valid place for an unsigned int.
        check(CALL, unsafe { function(self.ids.0, self.ids.1, unit, &raw mut percent) })?;
        Ok(percent)
    }

    /// Its memory.
    pub fn hbm(&self) -> Result<Hbm, AscendError> {
        const CALL: &str = "dcmi_get_device_hbm_info";
        let function = optional(CALL, self.symbols.dcmi_get_device_hbm_info)?;
        let mut info = DcmiHbmInfo::default();
        // SAFETY: a valid place for the struct.
        check(CALL, unsafe { function(self.ids.0, self.ids.1, &raw mut info) })?;
        Ok(Hbm {
            total_bytes: info.memory_size << 20,
            used_bytes: info.memory_usage << 20,
            mhz: info.freq,
            celsius: info.temp,
            bandwidth_percent: info.bandwidth_util_rate,
        })
    }

    fn frequency(&self, kind: c_int) -> Result<u32, AscendError> {
        const CALL: &str = "dcmi_get_device_frequency";
        let function = optional(CALL, self.symbols.dcmi_get_device_frequency)?;
        let mut mhz = 0;
        // SAFETY: a valid place for an unsigned int.
        check(CALL, unsafe { function(self.ids.0, self.ids.1, kind, &raw mut mhz) })?;
        Ok(mhz)
    }

    /// A query about power and clocks, answered into a buffer of its own size.
    fn info(&self, query: c_uint, answer: &mut [u32]) -> Result<(), AscendError> {
        const CALL: &str = "dcmi_get_device_info";
        let function = optional(CALL, self.symbols.dcmi_get_device_info)?;
        let mut bytes = u32::try_from(size_of_val(answer)).unwrap_or(0);
        let place = answer.as_mut_ptr().cast();
        // SAFETY: a buffer of the size that is said, and a place for the size of the answer.
        let code = unsafe { function(self.ids.0, self.ids.1, DCMI_MAIN_CMD_LP, query, place, &raw mut bytes) };
        check(CALL, code)
    }
}

const INVALID_DEVICE_ID: i32 = -8007;
const NOT_SUPPORT: i32 = -8255;

fn check(call: &'static str, code: i32) -> Result<(), AscendError> {
    match code {
        0 => Ok(()),
        code => {
            Err(AscendError { call, code, kind: AscendErrorKind::from_dcmi(code), message: words(code).to_owned() })
        }
    }
}

/// A function that not every driver has.
fn optional<F>(call: &'static str, function: Option<F>) -> Result<F, AscendError> {
    function.ok_or_else(|| AscendError {
        call,
        code: SHIM_NO_SYMBOL,
        kind: AscendErrorKind::Unsupported,
        message: "the installed driver has no such function".to_owned(),
    })
}

/// What the driver's documentation says of a code; the library has no words of its own.
fn words(code: i32) -> &'static str {
    match code {
        -8001 => "invalid parameter",
        -8002 => "operation not permitted",
        -8003 => "a memory operation failed",
        -8005 => "inner error",
        -8006 => "timed out",
        INVALID_DEVICE_ID => "invalid device id",
        -8008 => "the device does not exist",
        -8009 => "the call of the driver failed",
        -8012 => "the device is not ready",
        -8013 => "not supported in a container",
        -8015 => "the reset failed",
        -8017 => "the device is being upgraded",
        -8020 => "the resource is occupied",
        NOT_SUPPORT => "not supported",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::logic_id;

    #[test]
    fn visible_devices_are_counted_from_zero() {
        assert_eq!(logic_id(3, None), Some(3));
        assert_eq!(logic_id(3, Some(" ")), Some(3));
        assert_eq!(logic_id(0, Some("4, 6")), Some(4));
        assert_eq!(logic_id(1, Some("4, 6")), Some(6));
        assert_eq!(logic_id(2, Some("4, 6")), None);
        assert_eq!(logic_id(1, Some("4,x,6")), None);
    }
}
