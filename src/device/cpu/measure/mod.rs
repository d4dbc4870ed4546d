//! Measurements of the machine and of runs: peak rates, energy counters, step times.

pub(super) mod peak_rates;
pub(super) mod profile;
pub(super) mod rapl;
