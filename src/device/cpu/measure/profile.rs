//! Time of each step of a plan, collected only if enabled.
//!
//! A loaded plan has one [`StepTime`] per step, allocated when the plan is loaded: a profile does not grow with the
//! number of launches. Without a profile, a launch only tests an option per step.

#![forbid(unsafe_code)]

use std::time::Instant;

use crate::graph::Plan;

/// Time spent in one step of a plan since the profile was last read.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct StepTime {
    /// Index of the step in its plan.
    pub step: usize,
    /// Name of its operation.
    pub op: &'static str,
    /// Layer of the step.
    pub layer: Option<u32>,
    /// Number of runs.
    pub runs: u32,
    /// Start of its last run, in microseconds since the plan was loaded.
    pub last_start_us: f64,
    /// Total time of all runs, in microseconds.
    pub total_us: f64,
}

/// Collects the times of one plan.
#[derive(Debug)]
pub(crate) struct StepTimes {
    loaded: Instant,
    steps: Vec<StepTime>,
}

impl StepTimes {
    pub(crate) fn new(plan: &Plan) -> Self {
        let steps = plan.steps.iter().enumerate().map(|(step, planned)| StepTime {
            step,
            op: planned.op.name(),
            layer: planned.layer,
            runs: 0,
            last_start_us: 0.0,
            total_us: 0.0,
        });
        Self { loaded: Instant::now(), steps: steps.collect() }
    }

    /// Records a run of a step that began at `start` and has just ended.
    pub(crate) fn add(&mut self, step: usize, start: Instant) {
        let us = |duration: std::time::Duration| duration.as_secs_f64() * 1e6;
        let time = &mut self.steps[step];
        time.runs += 1;
        time.last_start_us = us(start.duration_since(self.loaded));
        time.total_us += us(start.elapsed());
    }

    /// Returns the times of the steps that ran since the last call, and resets them.
    pub(crate) fn take(&mut self) -> Vec<StepTime> {
        let ran = self.steps.iter().filter(|time| time.runs > 0).cloned().collect();
        for time in &mut self.steps {
            (time.runs, time.total_us) = (0, 0.0);
        }
        ran
    }
}
