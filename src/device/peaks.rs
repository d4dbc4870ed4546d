//! Peak rates of a device, and the utilization (MFU, MBU) of a computation relative to them.

/// Peak rates of a device, per second.
///
/// The figures are rates that programs reach, not those of data sheets: the CPU device measures them
/// ([`Telemetry::peak_rates`](super::Telemetry::peak_rates)).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct PeakRates {
    /// f32 operations per second; a fused multiply-add counts as two.
    pub f32_flops_per_s: u64,
    /// int8 operations per second; a product and its addition count as two.
    pub int8_ops_per_s: u64,
    /// Bytes per second read from memory, not from a cache.
    pub read_bytes_per_s: u64,
}

impl PeakRates {
    /// Creates the rates: f32 operations, int8 operations and bytes read per second.
    pub const fn new(f32_flops_per_s: u64, int8_ops_per_s: u64, read_bytes_per_s: u64) -> Self {
        Self { f32_flops_per_s, int8_ops_per_s, read_bytes_per_s }
    }

    /// Returns the model FLOPs utilization (MFU, compute density).
    ///
    /// It is the share of `seconds` that the operations would need at the peak rates: `(f32 operations / f32 peak +
    /// int8 operations / int8 peak) / seconds`.
    ///
    /// `int8_flops` is a part of `flops`, as in [`Cost`](crate::graph::Cost). The result is `None` if `seconds` is not
    /// above 0, or if a peak rate that the formula needs is 0.
    pub fn mfu(&self, flops: u64, int8_flops: u64, seconds: f64) -> Option<f64> {
        let f32_seconds = at(flops.saturating_sub(int8_flops), self.f32_flops_per_s);
        share(f32_seconds + at(int8_flops, self.int8_ops_per_s), seconds)
    }

    /// Returns the model bandwidth utilization (MBU, memory utilization).
    ///
    /// It is the share of `seconds` that moving the bytes would need at the peak rate: `bytes / (seconds · bandwidth)`.
    ///
    /// The cost model counts a byte each time a step reads or writes it. Bytes that a cache holds between steps count
    /// too, so the result can be larger than the traffic of the memory, and can exceed 1 if most of a model fits into
    /// the caches. The result is `None` under the same conditions as for [`mfu`](Self::mfu).
    pub fn mbu(&self, bytes: u64, seconds: f64) -> Option<f64> {
        share(at(bytes, self.read_bytes_per_s), seconds)
    }
}

/// Returns the seconds that an amount takes at a rate; infinite if the rate is 0.
fn at(amount: u64, per_s: u64) -> f64 {
    if amount == 0 { 0.0 } else { amount as f64 / per_s as f64 }
}

fn share(needed_seconds: f64, seconds: f64) -> Option<f64> {
    (seconds > 0.0 && needed_seconds.is_finite()).then(|| needed_seconds / seconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PEAKS: PeakRates = PeakRates { f32_flops_per_s: 100, int8_ops_per_s: 400, read_bytes_per_s: 50 };

    #[test]
    fn shares_are_of_the_time_that_the_peaks_would_need() {
        // 60 f32 operations take 0.6 s, 80 int8 ones 0.2 s.
        assert_eq!(PEAKS.mfu(140, 80, 2.0), Some(0.4));
        assert_eq!(PEAKS.mbu(25, 2.0), Some(0.25));
        assert_eq!((PEAKS.mfu(0, 0, 1.0), PEAKS.mbu(0, 1.0)), (Some(0.0), Some(0.0)));
    }

    #[test]
    fn undefined_utilization_is_none() {
        let none = PeakRates { f32_flops_per_s: 0, int8_ops_per_s: 0, read_bytes_per_s: 0 };
        assert_eq!((PEAKS.mfu(1, 0, 0.0), PEAKS.mbu(1, 0.0)), (None, None));
        assert_eq!((none.mfu(1, 0, 1.0), none.mfu(1, 1, 1.0), none.mbu(1, 1.0)), (None, None, None));
        assert_eq!(none.mfu(0, 0, 1.0), Some(0.0));
    }
}
