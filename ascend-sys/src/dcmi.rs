//! Metrics of a card (DCMI, the driver's management library): power, clocks, temperature, health, memory.
//!
//! All functions only read: a user cannot set any power limit, clock or level of a 910B. The library comes with the
//! driver, and works with or without a loaded runtime. If the library or one of its functions is missing, the error is
//! typed.

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

/// Path where the driver installs the library; containers must mount it.
pub const DCMI_LIBRARY: &str = "/usr/local/dcmi/libdcmi.so";

/// Smallest temperature that is an error code: 0x7ffd means invalid, 0x7fff not readable.
const NO_TEMPERATURE: c_int = 0x7ffd;

/// Initialized DCMI library. Copies are equivalent.
#[derive(Clone, Copy, Debug)]
pub struct Dcmi {
    symbols: DcmiSymbols,
}

impl Dcmi {
    /// Opens and initializes the library at `path`, or at [`DCMI_LIBRARY`] if `path` is `None`.
    ///
    /// # Errors
    /// [`LoadError::NoCardFigures`] if the file does not exist, cannot be loaded or fails to initialize;
    /// [`LoadError::MissingSymbol`] if it lacks a required function. Either error only means that no card metrics are
    /// available: a program can run without them.
    pub fn open(path: Option<&Path>) -> Result<Self, LoadError> {
        let path = path.unwrap_or(Path::new(DCMI_LIBRARY));
        let unavailable = |reason| LoadError::NoCardFigures { path: path.to_owned(), reason };
        let library = Library::open_alone(path).map_err(unavailable)?;
        let symbols = DcmiSymbols::load(&library)?;
        // SAFETY: `dcmi_init` takes no argument and may be called more than once.
        match unsafe { (symbols.dcmi_init)() } {
            0 => Ok(Self { symbols }),
            code => Err(unavailable(format!("dcmi_init failed with code {code}: {}", description(code)))),
        }
    }

    /// Returns the card of a device of this process, i.e. of an index into `ASCEND_RT_VISIBLE_DEVICES` if that is set.
    ///
    /// # Errors
    /// [`AscendError`] with code -8007 (invalid device id) if `ASCEND_RT_VISIBLE_DEVICES` has no entry for the device;
    /// with the code of `dcmi_get_card_id_device_id_from_logicid` if that call fails.
    pub fn card_of_device(&self, device: u32) -> Result<DcmiCard, AscendError> {
        let visible = std::env::var("ASCEND_RT_VISIBLE_DEVICES").ok();
        match logic_id(device, visible.as_deref()) {
            Some(logic_id) => self.card(logic_id),
            None => Err(AscendError {
                call: "dcmi_get_card_id_device_id_from_logicid",
                code: INVALID_DEVICE_ID,
                kind: AscendErrorKind::from_dcmi(INVALID_DEVICE_ID),
                message: format!("ASCEND_RT_VISIBLE_DEVICES has no entry for device {device}"),
            }),
        }
    }

    /// Returns the card of a logical device number of the host.
    ///
    /// # Errors
    /// [`AscendError`] if `dcmi_get_card_id_device_id_from_logicid` fails, e.g. because the device does not exist.
    pub fn card(&self, logic_id: u32) -> Result<DcmiCard, AscendError> {
        let (mut card_id, mut device_id) = (0, 0);
        // SAFETY: `card_id` and `device_id` are local `int` variables; the call only writes to them.
        let code = unsafe {
            (self.symbols.dcmi_get_card_id_device_id_from_logicid)(&raw mut card_id, &raw mut device_id, logic_id)
        };
        check("dcmi_get_card_id_device_id_from_logicid", code)?;
        Ok(DcmiCard { symbols: self.symbols, logic_id, ids: (card_id, device_id) })
    }
}

/// Returns the host's logical number of a device of this process; `visible` is a comma-separated list of logical
/// numbers.
///
/// The list ends at the first entry that is not a number.
fn logic_id(device: u32, visible: Option<&str>) -> Option<u32> {
    let Some(list) = visible.filter(|list| !list.trim().is_empty()) else { return Some(device) };
    let ids = list.split(',').map_while(|id| id.trim().parse().ok());
    ids.into_iter().nth(usize::try_from(device).ok()?)
}

/// Unit whose utilization a card reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Unit {
    /// AI cores; the utilization is 0 while a profiler runs.
    AiCore,
    /// Vector cores; the utilization is 0 while a profiler runs.
    VectorCore,
    /// Memory capacity.
    Hbm,
    /// Memory bandwidth.
    HbmBandwidth,
    /// The whole chip.
    Npu,
}

/// Health of a card.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Health {
    /// No alarm.
    Normal,
    /// Minor alarm.
    Minor,
    /// Major alarm.
    Major,
    /// Critical alarm: take the card out of service.
    Critical,
    /// The device is absent or has not been started.
    Absent,
    /// Undocumented value.
    Unknown(u32),
}

/// State of the device memory of a card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hbm {
    /// Size in bytes; DCMI reports it in MB of 2^20 bytes.
    pub total_bytes: u64,
    /// Bytes in use by all processes; DCMI reports them in MB of 2^20 bytes.
    pub used_bytes: u64,
    /// Clock in MHz.
    pub mhz: u32,
    /// Temperature in degrees Celsius.
    pub celsius: i32,
    /// Bandwidth in use, in percent.
    pub bandwidth_percent: u32,
}

/// Chip on a card, and its metrics. Any thread can query it.
#[derive(Clone, Copy, Debug)]
pub struct DcmiCard {
    symbols: DcmiSymbols,
    logic_id: u32,
    /// Card number, and index of the chip on the card.
    ids: (c_int, c_int),
}

impl DcmiCard {
    /// Returns the logical device number on the host.
    pub fn logic_id(&self) -> u32 {
        self.logic_id
    }

    /// Returns the card number and the index of the chip on the card, as `npu-smi` shows them.
    pub fn card_and_device(&self) -> (i32, i32) {
        self.ids
    }

    /// Returns the current power consumption in milliwatts; the resolution is 0.1 W.
    ///
    /// # Errors
    /// [`AscendError`] if `dcmi_get_device_power_info` fails.
    pub fn power_mw(&self) -> Result<u32, AscendError> {
        let mut tenths = 0;
        // SAFETY: `tenths` is a local `int` variable; the call only writes to it.
        let code = unsafe { (self.symbols.dcmi_get_device_power_info)(self.ids.0, self.ids.1, &raw mut tenths) };
        check("dcmi_get_device_power_info", code)?;
        Ok(u32::try_from(tenths).unwrap_or(0).saturating_mul(100))
    }

    /// Returns the rated power in milliwatts.
    ///
    /// # Errors
    /// [`AscendError`] of kind [`Unsupported`](AscendErrorKind::Unsupported) if the driver lacks
    /// `dcmi_get_device_info`; with the code of the call if it fails.
    pub fn rated_power_mw(&self) -> Result<u32, AscendError> {
        // `DCMI_LP_POWER_INFO_STRU`: the power and 32 reserved bytes.
        let mut info = [0u32; 9];
        self.info(DCMI_LP_SUB_CMD_GET_POWER_INFO, &mut info)?;
        Ok(info[0])
    }

    /// Returns a bit mask of the reasons why the AI core clock is reduced; 0 if it is not reduced.
    ///
    /// The driver's documentation defines the bits.
    ///
    /// # Errors
    /// [`AscendError`] of kind [`Unsupported`](AscendErrorKind::Unsupported) if the driver lacks
    /// `dcmi_get_device_info`; with the code of the call if it fails.
    pub fn clock_reduction_causes(&self) -> Result<u64, AscendError> {
        let mut causes = [0u32; 2];
        self.info(DCMI_LP_SUB_CMD_AICORE_FREQREDUC_CAUSE, &mut causes)?;
        Ok(u64::from(causes[0]) | u64::from(causes[1]) << 32)
    }

    /// Returns the current clock of the AI cores in MHz.
    ///
    /// # Errors
    /// [`AscendError`] of kind [`Unsupported`](AscendErrorKind::Unsupported) if the driver lacks
    /// `dcmi_get_device_frequency`; with the code of the call if it fails.
    pub fn aicore_mhz(&self) -> Result<u32, AscendError> {
        self.frequency(DCMI_FREQ_AICORE_CURRENT_)
    }

    /// Returns the rated clock of the AI cores in MHz.
    ///
    /// # Errors
    /// [`AscendError`] of kind [`Unsupported`](AscendErrorKind::Unsupported) if the driver lacks
    /// `dcmi_get_device_frequency`; with the code of the call if it fails.
    pub fn aicore_rated_mhz(&self) -> Result<u32, AscendError> {
        self.frequency(DCMI_FREQ_AICORE_MAX)
    }

    /// Returns the clock of the memory in MHz.
    ///
    /// # Errors
    /// [`AscendError`] of kind [`Unsupported`](AscendErrorKind::Unsupported) if the driver lacks
    /// `dcmi_get_device_frequency`; with the code of the call if it fails.
    pub fn hbm_mhz(&self) -> Result<u32, AscendError> {
        self.frequency(DCMI_FREQ_HBM)
    }

    /// Returns the temperature of the chip in degrees Celsius.
    ///
    /// # Errors
    /// [`AscendError`] of kind [`Unsupported`](AscendErrorKind::Unsupported) if the driver lacks
    /// `dcmi_get_device_temperature` or the temperature cannot be read; with the code of the call if it fails.
    pub fn celsius(&self) -> Result<i32, AscendError> {
        const CALL: &str = "dcmi_get_device_temperature";
        let function = optional(CALL, self.symbols.dcmi_get_device_temperature)?;
        let mut celsius = 0;
        // SAFETY: `celsius` is a local `int` variable; the call only writes to it.
        check(CALL, unsafe { function(self.ids.0, self.ids.1, &raw mut celsius) })?;
        // An unreadable temperature is reported like that of a device that does not support the query.
        if celsius >= NO_TEMPERATURE { check(CALL, NOT_SUPPORT).map(|()| celsius) } else { Ok(celsius) }
    }

    /// Returns the health of the card.
    ///
    /// # Errors
    /// [`AscendError`] of kind [`Unsupported`](AscendErrorKind::Unsupported) if the driver lacks
    /// `dcmi_get_device_health`; with the code of the call if it fails.
    pub fn health(&self) -> Result<Health, AscendError> {
        const CALL: &str = "dcmi_get_device_health";
        let function = optional(CALL, self.symbols.dcmi_get_device_health)?;
        let mut health: c_uint = 0;
        // SAFETY: `health` is a local `unsigned int` variable; the call only writes to it.
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

    /// Returns the utilization of a unit in percent.
    ///
    /// # Errors
    /// [`AscendError`] of kind [`Unsupported`](AscendErrorKind::Unsupported) if the driver lacks
    /// `dcmi_get_device_utilization_rate`; with the code of the call if it fails.
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
        // SAFETY: `percent` is a local `unsigned int` variable; the call only writes to it.
        check(CALL, unsafe { function(self.ids.0, self.ids.1, unit, &raw mut percent) })?;
        Ok(percent)
    }

    /// Returns the state of the device memory.
    ///
    /// # Errors
    /// [`AscendError`] of kind [`Unsupported`](AscendErrorKind::Unsupported) if the driver lacks
    /// `dcmi_get_device_hbm_info`; with the code of the call if it fails.
    pub fn hbm(&self) -> Result<Hbm, AscendError> {
        const CALL: &str = "dcmi_get_device_hbm_info";
        let function = optional(CALL, self.symbols.dcmi_get_device_hbm_info)?;
        let mut info = DcmiHbmInfo::default();
        // SAFETY: `info` is a local variable with the layout of `struct dcmi_hbm_info`; the call only writes to it.
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
        // SAFETY: `mhz` is a local `unsigned int` variable; the call only writes to it.
        check(CALL, unsafe { function(self.ids.0, self.ids.1, kind, &raw mut mhz) })?;
        Ok(mhz)
    }

    /// Queries power or clock information; `answer` has the size of the query's result.
    fn info(&self, query: c_uint, answer: &mut [u32]) -> Result<(), AscendError> {
        const CALL: &str = "dcmi_get_device_info";
        let function = optional(CALL, self.symbols.dcmi_get_device_info)?;
        let mut bytes = u32::try_from(size_of_val(answer)).unwrap_or(0);
        let place = answer.as_mut_ptr().cast();
        // SAFETY: `place` points to a buffer of `bytes` bytes, and the call writes at most that many.
        // SAFETY: `bytes` is a local variable; the call replaces it by the size of the answer.
        let code = unsafe { function(self.ids.0, self.ids.1, DCMI_MAIN_CMD_LP, query, place, &raw mut bytes) };
        check(CALL, code)
    }
}

const INVALID_DEVICE_ID: i32 = -8007;
const NOT_SUPPORT: i32 = -8255;

fn check(call: &'static str, code: i32) -> Result<(), AscendError> {
    match code {
        0 => Ok(()),
        code => Err(AscendError {
            call,
            code,
            kind: AscendErrorKind::from_dcmi(code),
            message: description(code).to_owned(),
        }),
    }
}

/// Returns a function that some driver versions lack, or an error.
fn optional<F>(call: &'static str, function: Option<F>) -> Result<F, AscendError> {
    function.ok_or_else(|| AscendError {
        call,
        code: SHIM_NO_SYMBOL,
        kind: AscendErrorKind::Unsupported,
        message: "the installed driver does not have this function".to_owned(),
    })
}

/// Returns the driver documentation's text for a code; the library has no function for it.
fn description(code: i32) -> &'static str {
    match code {
        -8001 => "invalid parameter",
        -8002 => "operation not permitted",
        -8003 => "a memory operation failed",
        -8005 => "internal error",
        -8006 => "timed out",
        INVALID_DEVICE_ID => "invalid device id",
        -8008 => "the device does not exist",
        -8009 => "the driver call failed",
        -8012 => "the device is not ready",
        -8013 => "not supported in a container",
        -8015 => "the reset failed",
        -8017 => "the device is being upgraded",
        -8020 => "the resource is in use",
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
