//! Work of the last steps, and the time that it took.

use crate::device::PeakRates;
use crate::graph::Cost;

/// Number of steps in a window.
const STEPS: usize = 64;

/// Work of the last 64 steps that computed rows, and the time of their model calls.
///
/// The work is estimated with the cost model of the plan (see [`Cost`]). The time excludes scheduling and sampling, so
/// the utilization shows how well the device is used while it is computing. The engine's clock measures the time. The
/// work is 0 for a [`ModelExecutor`](crate::runner::ModelExecutor) that does not report its cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct Utilization {
    /// Number of steps, at most 64.
    pub steps: u32,
    /// Time of their model calls in microseconds.
    pub elapsed_us: u64,
    /// Number of arithmetic operations, including integer ones.
    pub flops: u64,
    /// Number of those operations that are int8 operations.
    pub int8_flops: u64,
    /// Number of bytes of weights, activations, keys and values read and written.
    pub bytes: u64,
}

impl Utilization {
    /// Returns the model FLOPs utilization (MFU).
    ///
    /// MFU is the time of the operations at peak rates, as a share of the measured time.
    ///
    /// `MFU = (f32 operations / f32 peak + int8 operations / int8 peak) / time`. `None` while the window is empty or
    /// its time is 0.
    pub fn mfu(&self, peaks: &PeakRates) -> Option<f64> {
        peaks.mfu(self.flops, self.int8_flops, self.seconds()?)
    }

    /// Returns the model bandwidth utilization (MBU).
    ///
    /// MBU is the time of the memory traffic at peak rate, as a share of the measured time.
    ///
    /// `MBU = bytes / (time · bandwidth)`; see [`PeakRates::mbu`] for the effect of caches. `None` under the same
    /// conditions as for [`mfu`](Self::mfu).
    pub fn mbu(&self, peaks: &PeakRates) -> Option<f64> {
        peaks.mbu(self.bytes, self.seconds()?)
    }

    fn seconds(&self) -> Option<f64> {
        (self.steps > 0).then_some(self.elapsed_us as f64 / 1e6)
    }

    /// Adds one call of the model.
    pub(crate) fn add_call(&mut self, cost: &Cost, elapsed_us: u64) {
        let Self { elapsed_us: us, flops, int8_flops, bytes, .. } = self;
        let sums = [(us, elapsed_us), (flops, cost.flops), (int8_flops, cost.int8_flops), (bytes, cost.bytes())];
        for (sum, more) in sums {
            *sum = sum.saturating_add(more);
        }
    }
}

/// Ring buffer of the last steps.
#[derive(Debug)]
pub(crate) struct UtilizationWindow {
    steps: [Utilization; STEPS],
    next: usize,
}

impl UtilizationWindow {
    /// Replaces the oldest step, and returns the sum over all steps.
    pub fn push(&mut self, step: Utilization) -> Utilization {
        self.steps[self.next] = Utilization { steps: 1, ..step };
        self.next = (self.next + 1) % STEPS;
        let mut window = Utilization::default();
        for step in &self.steps {
            window.steps += step.steps;
            window.elapsed_us = window.elapsed_us.saturating_add(step.elapsed_us);
            window.flops = window.flops.saturating_add(step.flops);
            window.int8_flops = window.int8_flops.saturating_add(step.int8_flops);
            window.bytes = window.bytes.saturating_add(step.bytes);
        }
        window
    }
}

impl Default for UtilizationWindow {
    fn default() -> Self {
        Self { steps: [Utilization::default(); STEPS], next: 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_holds_the_last_64_steps() {
        let mut recent = UtilizationWindow::default();
        for step in 1..=100 {
            let cost = Cost { flops: 10 * step, int8_flops: step, kv_bytes: 3, weight_bytes: 4, ..Cost::default() };
            let mut work = Utilization::default();
            work.add_call(&cost, 1);
            work.add_call(&cost, 2);
            let window = recent.push(work);
            let first = step.saturating_sub(63).max(1);
            let steps = step - first + 1;
            assert_eq!(window.steps, u32::try_from(steps).unwrap());
            assert_eq!((window.elapsed_us, window.bytes), (3 * steps, 14 * steps));
            let sum: u64 = (first..=step).sum();
            assert_eq!((window.flops, window.int8_flops), (20 * sum, 2 * sum));
        }
    }

    #[test]
    fn an_empty_window_and_one_without_time_have_no_shares() {
        let peaks = PeakRates { f32_flops_per_s: 1_000_000, int8_ops_per_s: 4_000_000, read_bytes_per_s: 2_000_000 };
        let shares = |window: Utilization| (window.mfu(&peaks), window.mbu(&peaks));
        assert_eq!(shares(Utilization::default()), (None, None));
        assert_eq!(shares(Utilization { steps: 1, flops: 5, ..Utilization::default() }), (None, None));
        // In 10 µs, peak rates allow 10 f32 operations, 40 int8 operations and 20 bytes; the window has 3, 8 and 5.
        let window = Utilization { steps: 2, elapsed_us: 10, flops: 11, int8_flops: 8, bytes: 5 };
        let (mfu, mbu) = shares(window);
        assert!((mfu.unwrap() - 0.5).abs() < 1e-12 && (mbu.unwrap() - 0.25).abs() < 1e-12, "{mfu:?} {mbu:?}");
    }
}
