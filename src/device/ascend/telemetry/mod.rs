//! Telemetry of cards: energy from their own meters, and peak rates.

#![forbid(unsafe_code)]

pub(super) mod energy;

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use ascend_sys::{AscendError, Dcmi};

use super::notes::Diagnostics;
use crate::device::PeakRates;
use energy::Meter;

/// Peak rates of chips: cube operations per second for f16 (cores · 8192 · clock, from the platform files of CANN
/// 8.1.RC1; twice as many for int8), and memory bandwidth in bytes per second (Huawei's own analysis gives 0.85 TB/s as
/// achievable; half of that for the card with half the memory channels).
const CHIPS: [(&str, u64, u64); 5] =
    [("910B1", 364, 850), ("910B2", 354, 850), ("910B3", 295, 850), ("910B4-1", 246, 850), ("910B4", 246, 425)];

/// Figures of a device's cards.
///
/// The meters belong to the management library (`libdcmi.so`), which containers often lack. It is opened at the first
/// query for energy; without it, or without the power of all cards, there is no energy, and a note gives the reason.
#[derive(Debug)]
pub(super) struct CardTelemetry {
    /// The management library; `None` = the location of the driver.
    library: Option<PathBuf>,
    /// Cards by the runtime's numbers.
    cards: Vec<u32>,
    notes: Arc<Diagnostics>,
    meter: OnceLock<Option<Meter>>,
}

impl CardTelemetry {
    pub(super) fn new(library: Option<PathBuf>, cards: Vec<u32>, notes: Arc<Diagnostics>) -> Self {
        Self { library, cards, notes, meter: OnceLock::new() }
    }

    /// Energy that all cards together have used since the first query, in microjoules.
    pub(super) fn energy_uj(&self) -> Option<u64> {
        self.meter.get_or_init(|| self.open()).as_ref().map(Meter::energy_uj)
    }

    fn open(&self) -> Option<Meter> {
        let dcmi = Dcmi::open(self.library.as_deref()).map_err(|error| error.to_string());
        let meter = dcmi.and_then(|dcmi| {
            let cards = self.cards.iter().map(|card| dcmi.card_of_device(*card)).collect::<Result<Vec<_>, _>>();
            cards.and_then(Meter::new).map_err(|error: AscendError| error.to_string())
        });
        meter.map_err(|reason| self.notes.add(format!("no energy: {reason}"))).ok()
    }

    /// Peak rates of `cards` cards of the chip named in `description`; `None` for an unknown chip.
    pub(super) fn peak_rates(description: &str, cards: u32) -> Option<PeakRates> {
        let cards = u64::from(cards);
        let (_, tflops, gb_per_s) = CHIPS.iter().find(|(name, _, _)| description.contains(name))?;
        Some(PeakRates {
            f32_flops_per_s: cards * tflops * 1_000_000_000_000,
            int8_ops_per_s: cards * 2 * tflops * 1_000_000_000_000,
            read_bytes_per_s: cards * gb_per_s * 1_000_000_000,
        })
    }
}
