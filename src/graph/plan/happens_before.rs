//! Happens-before order of steps: vector clocks over streams.
//!
//! Steps of one stream run in order; a step also waits for the steps of other streams in its wait list. There is no
//! other order. The clock of a step counts, for each stream, the steps that have ended when it ends; so `a` happens
//! before `b` exactly if `b`'s past counts `a`. See Fidge (1988) and Mattern (1989).

use crate::graph::Step;

/// Maximum number of streams of a plan.
pub(crate) const MAX_STREAMS: usize = 4;

/// Number of ended steps per stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct VectorClock([u32; MAX_STREAMS]);

impl VectorClock {
    /// Whether all steps counted by `other` are counted here as well.
    pub(crate) fn covers(&self, other: &Self) -> bool {
        self.0.iter().zip(&other.0).all(|(mine, others)| mine >= others)
    }

    pub(crate) fn join(&mut self, other: &Self) {
        self.0.iter_mut().zip(&other.0).for_each(|(mine, others)| *mine = (*mine).max(*others));
    }
}

/// Order of a plan's steps, built step by step.
#[derive(Clone, Debug, Default)]
pub(crate) struct HappensBefore {
    /// For each step, the steps that have ended when it begins.
    pasts: Vec<VectorClock>,
    /// For each step, the steps that have ended when it ends.
    clocks: Vec<VectorClock>,
    /// The last step of each stream.
    tails: [Option<usize>; MAX_STREAMS],
}

impl HappensBefore {
    /// Builds the order of a whole plan. Streams and awaited steps must be in range.
    pub(crate) fn from_steps(steps: &[Step]) -> Self {
        let mut order = Self::default();
        for step in steps {
            order.push(usize::from(step.stream), &step.waits_on);
        }
        order
    }

    /// Adds the next step.
    pub(crate) fn push(&mut self, stream: usize, waits_on: &[usize]) {
        let past = self.past_of(stream, waits_on);
        let mut clock = past;
        clock.0[stream] += 1;
        self.tails[stream] = Some(self.clocks.len());
        self.pasts.push(past);
        self.clocks.push(clock);
    }

    /// Steps that would have ended if a step began now on this stream.
    pub(crate) fn past_of(&self, stream: usize, waits_on: &[usize]) -> VectorClock {
        let mut past = self.tails[stream].map_or(VectorClock::default(), |tail| self.clocks[tail]);
        for &step in waits_on {
            past.join(&self.clocks[step]);
        }
        past
    }

    /// The last step of a stream.
    pub(crate) const fn tail(&self, stream: usize) -> Option<usize> {
        self.tails[stream]
    }

    /// Steps that have ended when `step` begins.
    pub(crate) fn past(&self, step: usize) -> &VectorClock {
        &self.pasts[step]
    }

    /// Steps that have ended when `step` has ended.
    pub(crate) fn clock(&self, step: usize) -> &VectorClock {
        &self.clocks[step]
    }

    /// A clock that counts only `step` and the earlier steps of its stream: if a step's past covers it, `step` has
    /// ended.
    pub(crate) fn own(&self, step: usize) -> VectorClock {
        let mut own = VectorClock::default();
        for stream in 0..MAX_STREAMS {
            // A step counts itself on its own stream only.
            if self.clocks[step].0[stream] > self.pasts[step].0[stream] {
                own.0[stream] = self.clocks[step].0[stream];
            }
        }
        own
    }

    /// Whether `a` has ended when `b` begins.
    pub(crate) fn before(&self, a: usize, b: usize) -> bool {
        a != b && self.pasts[b].covers(&self.own(a))
    }

    /// Whether one of two steps has ended when the other begins.
    pub(crate) fn are_ordered(&self, a: usize, b: usize) -> bool {
        self.before(a, b) || self.before(b, a)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks_know_which_steps_have_ended() {
        // ```text
        // stream 0: 0 ─ 1 ───── 4
        // stream 1:      └ 2 ─ 3 ┘     (4 waits on 3, 2 waits on 0)
        // ```
        let mut order = HappensBefore::default();
        order.push(0, &[]);
        order.push(0, &[]);
        order.push(1, &[0]);
        order.push(1, &[]);
        order.push(0, &[3]);
        assert!(order.before(0, 1) && order.before(0, 3) && order.before(2, 4) && order.before(1, 4));
        assert!(!order.are_ordered(1, 2) && !order.are_ordered(1, 3) && !order.before(4, 0) && !order.before(2, 2));
    }
}
