//! Utilization: work and time of the last steps.

use crate::device::PeakRates;
use crate::graph::Cost;

/// Steps that a window looks back on.
const STEPS: usize = 64;

/// Work of the last 64 steps that computed rows, by the cost model of the plan (see [`Cost`]), and the time of the
/// model's calls.
///
/// Scheduling and sampling are excluded, so the figures show how well the device is used while it runs. Time comes from
/// the engine's clock. The work is zero for a [`ModelExecutor`](crate::runner::ModelExecutor) that does not report its
/// cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct Utilization {
    /// Steps in it, at most 64.
    pub steps: u32,
    /// Time the model took for them.
    pub elapsed_us: u64,
    /// Arithmetic operations, integer ones included.
    pub flops: u64,
    /// Of these, operations on int8.
    pub int8_flops: u64,
    /// Bytes of weights, activations, keys and values read and written.
    pub bytes: u64,
}

impl Utilization {
    /// Compute density (model FLOPs utilization).
    ///
    /// The share of the time that the operations need at the peak rates: `(f32 operations / f32 peak + int8 operations
    /// / int8 peak) / time`. `None` while the window is empty or covers no time.
    pub fn mfu(&self, peaks: &PeakRates) -> Option<f64> {
        peaks.mfu(self.flops, self.int8_flops, self.seconds()?)
    }

    /// Memory utilization (model bandwidth utilization).
    ///
    /// The share of the time that the bytes need at the peak rate: `bytes / (time · bandwidth)`. See [`PeakRates::mbu`]
    /// for the effect of caches. `None` as for [`mfu`](Self::mfu).
    pub fn mbu(&self, peaks: &PeakRates) -> Option<f64> {
        peaks.mbu(self.bytes, self.seconds()?)
    }

    fn seconds(&self) -> Option<f64> {
        (self.steps > 0).then_some(self.elapsed_us as f64 / 1e6)
    }

    /// Adds a call of the model.
    pub(crate) fn add_call(&mut self, cost: &Cost, elapsed_us: u64) {
        let Self { elapsed_us: us, flops, int8_flops, bytes, .. } = self;
        let sums = [(us, elapsed_us), (flops, cost.flops), (int8_flops, cost.int8_flops), (bytes, cost.bytes())];
        for (sum, more) in sums {
            *sum = sum.saturating_add(more);
        }
    }
}

/// The last steps one by one.
#[derive(Debug)]
pub(crate) struct UtilizationWindow {
    steps: [Utilization; STEPS],
    next: usize,
}

impl UtilizationWindow {
    /// Replaces the oldest step with a new one, and returns the sum over the window.
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
        // In 10 us: 3 f32 operations of the 10 that could be, 8 of 40 int8 ones, 5 of 20 bytes.
        let window = Utilization { steps: 2, elapsed_us: 10, flops: 11, int8_flops: 8, bytes: 5 };
        let (mfu, mbu) = shares(window);
        assert!((mfu.unwrap() - 0.5).abs() < 1e-12 && (mbu.unwrap() - 0.25).abs() < 1e-12, "{mfu:?} {mbu:?}");
    }
}
