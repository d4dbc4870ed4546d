//! Table of times and costs by operation, with shares of a device's peak rates.

use std::fmt::Write as _;

use ascend_llm::device::PeakRates;
use ascend_llm::graph::Cost;

/// Rates of a cost over a time.
#[derive(Clone, Copy, Debug)]
pub struct Rates {
    /// Billions of operations a second.
    pub gflops_per_s: f64,
    /// Billions of bytes a second.
    pub gbytes_per_s: f64,
    /// Share of the peak arithmetic rate; `None` without a time or a peak.
    pub mfu: Option<f64>,
    /// Share of the peak memory bandwidth; `None` without a time or a peak.
    pub mbu: Option<f64>,
}

impl Rates {
    /// Rates of `cost` over `us` microseconds.
    pub fn of(cost: &Cost, us: f64, peaks: Option<&PeakRates>) -> Self {
        // Operations per microsecond are millions per second.
        let rate = |amount: u64| if us > 0.0 { amount as f64 / us / 1e3 } else { 0.0 };
        Self {
            gflops_per_s: rate(cost.flops),
            gbytes_per_s: rate(cost.bytes()),
            mfu: peaks.and_then(|peaks| peaks.mfu(cost.flops, cost.int8_flops, us / 1e6)),
            mbu: peaks.and_then(|peaks| peaks.mbu(cost.bytes(), us / 1e6)),
        }
    }
}

/// Times and costs of several launches, summed by operation.
#[derive(Clone, Debug, Default)]
pub struct OpTable {
    launches: u32,
    ops: Vec<(&'static str, f64, Cost)>,
}

impl OpTable {
    /// Adds the steps of a launch, each with its operation, microseconds and cost.
    pub fn add_launch(&mut self, steps: impl IntoIterator<Item = (&'static str, f64, Cost)>) {
        self.launches += 1;
        for (op, us, cost) in steps {
            if let Some((_, all_us, sum)) = self.ops.iter_mut().find(|(known, ..)| *known == op) {
                *all_us += us;
                *sum += cost;
            } else {
                self.ops.push((op, us, cost));
            }
        }
    }

    /// The table, longest operation first. Times, operations and bytes are means over the launches.
    pub fn text(&self, title: &str, peaks: Option<&PeakRates>) -> String {
        let launches = f64::from(self.launches.max(1));
        let all_us: f64 = self.ops.iter().map(|(_, us, _)| us).sum();
        let mut text = format!("{title}: {} launches, {:.2} ms each\n", self.launches, all_us / 1e3 / launches);
        let _ = writeln!(
            text,
            "{:<16} {:>10} {:>7} {:>10} {:>9} {:>9} {:>7} {:>7} {:>7}",
            "operation", "us", "share", "Mflop", "MB", "GFLOP/s", "GB/s", "MFU", "MBU"
        );
        let mut line = |op: &str, us: f64, cost: Cost| {
            let rates = Rates::of(&cost, us, peaks);
            let share = 100.0 * us / all_us.max(f64::MIN_POSITIVE);
            let (mflop, mb) = (cost.flops as f64 / 1e6 / launches, cost.bytes() as f64 / 1e6 / launches);
            let percent = |share: Option<f64>| share.map_or("-".to_owned(), |share| format!("{:.1}%", 100.0 * share));
            let _ = writeln!(
                text,
                "{op:<16} {:>10.1} {share:>6.1}% {mflop:>10.3} {mb:>9.3} {:>9.2} {:>7.2} {:>7} {:>7}",
                us / launches,
                rates.gflops_per_s,
                rates.gbytes_per_s,
                percent(rates.mfu),
                percent(rates.mbu),
            );
        };
        let mut ops = self.ops.clone();
        ops.sort_by(|a, b| b.1.total_cmp(&a.1));
        for (op, us, cost) in &ops {
            line(op, *us, *cost);
        }
        line("total", all_us, ops.iter().map(|(.., cost)| *cost).sum());
        text
    }
}
