//! What the card says of itself: energy from its own meter, and what it can do at most.

#![forbid(unsafe_code)]

use crate::device::Peaks;

/// Chips with what they do at most: cube operations a second at f16 (cores · 8192 · clock, from the platform files of CANN
/// 8.1.RC1; int8 does twice as much) and bytes a second from memory (0.85 TB/s achievable by Huawei's own analysis; the
/// card with half the memory channels half of that).
const CHIPS: [(&str, u64, u64); 5] =
    [("910B1", 364, 850), ("910B2", 354, 850), ("910B3", 295, 850), ("910B4-1", 246, 850), ("910B4", 246, 425)];

/// The card's own figures.
///
/// The meter is the management library's (`libdcmi.so`), which containers often lack; without it there is no energy.
#[derive(Debug, Default)]
pub(super) struct Telemetry {}

impl Telemetry {
    /// Energy used since some fixed moment, in microjoules.
    #[allow(clippy::unused_self)] // the meter's reader goes here
    pub(super) fn energy_uj(&self) -> Option<u64> {
        None
    }

    /// What `cards` of the chip named in `description` do at most; none for one that is not known.
    #[allow(clippy::unused_self)]
    pub(super) fn peaks(&self, description: &str, cards: u32) -> Option<Peaks> {
        let cards = u64::from(cards);
        let (_, tflops, gb_per_s) = CHIPS.iter().find(|(name, _, _)| description.contains(name))?;
        Some(Peaks {
            f32_flops_per_s: cards * tflops * 1_000_000_000_000,
            int8_ops_per_s: cards * 2 * tflops * 1_000_000_000_000,
            read_bytes_per_s: cards * gb_per_s * 1_000_000_000,
        })
    }
}
