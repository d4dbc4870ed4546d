//! Time of each step of a plan, kept only when asked for.
//!
//! One [`StepTime`] a step of a loaded plan, reserved when the plan is loaded: a profile does not grow with the launches it
//! covers. Without one a launch pays a test of an option a step.

#![forbid(unsafe_code)]

use std::time::Instant;

use crate::graph::Plan;

/// What one step of a plan took since the profile was last taken.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct StepTime {
    /// Which step of its plan.
    pub step: usize,
    /// Its operation's name.
    pub op: &'static str,
    /// Layer it belongs to.
    pub layer: Option<u32>,
    /// How often it ran.
    pub runs: u32,
    /// When it last began, in microseconds since the plan was loaded.
    pub last_start_us: f64,
    /// All its runs together, in microseconds.
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

    /// Counts a run of a step that began at `start` and has just ended.
    pub(crate) fn add(&mut self, step: usize, start: Instant) {
        let us = |duration: std::time::Duration| duration.as_secs_f64() * 1e6;
        let time = &mut self.steps[step];
        time.runs += 1;
        time.last_start_us = us(start.duration_since(self.loaded));
        time.total_us += us(start.elapsed());
    }

    /// The steps that ran since the last call; counts from zero again.
    pub(crate) fn take(&mut self) -> Vec<StepTime> {
        let ran = self.steps.iter().filter(|time| time.runs > 0).cloned().collect();
        for time in &mut self.steps {
            (time.runs, time.total_us) = (0, 0.0);
        }
        ran
    }
}
