//! Who comes before whom.
//!
//! One total order covers waiting and running sequences, and it never changes while a sequence lives: admission goes from
//! its front, preemption from its back. Under priorities the order is that of a *virtual arrival*: each level of priority
//! counts as having come [`PRIORITY_STEP_US`] earlier. That is ageing without any bookkeeping: whoever waits is passed only
//! by sequences that arrive within a bounded time after it, so nothing starves.

use std::collections::BTreeMap;

use crate::kv_cache::SeqId;

/// A moment of an injected clock, in microseconds. The scheduler never reads a clock itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tick(pub u64);

/// How sequences are ordered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum SchedulePolicy {
    /// First come, first served; priorities are ignored.
    #[default]
    Fcfs,
    /// Higher priority first, with ageing: one level is worth [`PRIORITY_STEP_US`] of waiting.
    Priority,
}

/// Waiting that outweighs one level of priority. One second: longer than a step, so levels matter under load; short
/// enough that ten levels delay nobody by more than ten seconds of other people's arrivals.
pub const PRIORITY_STEP_US: u64 = 1_000_000;

/// Place of a sequence in the order; smaller goes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct QueueKey {
    virtual_us: i128,
    /// Number of the sequence in order of `add`: decides among equals, and makes ranks unique.
    arrival: u64,
}

impl QueueKey {
    pub(super) fn new(policy: SchedulePolicy, priority: i32, arrived: Tick, arrival: u64) -> Self {
        let virtual_us = match policy {
            SchedulePolicy::Fcfs => 0,
            SchedulePolicy::Priority => i128::from(arrived.0) - i128::from(priority) * i128::from(PRIORITY_STEP_US),
        };
        Self { virtual_us, arrival }
    }

    /// The place of a sibling that arrives as number `arrival`.
    pub(super) fn sibling(self, arrival: u64) -> Self {
        Self { arrival, ..self }
    }
}

/// Sequences that hold no blocks: new ones and preempted ones. A preempted sequence keeps its key, and since sequences of
/// one class are admitted in order, that is the front of its class.
#[derive(Clone, Debug, Default)]
pub(super) struct WaitQueue(BTreeMap<QueueKey, SeqId>);

impl WaitQueue {
    pub(super) fn push(&mut self, key: QueueKey, seq: SeqId) {
        self.0.insert(key, seq);
    }

    pub(super) fn first(&self) -> Option<(QueueKey, SeqId)> {
        self.0.first_key_value().map(|(&key, &seq)| (key, seq))
    }

    pub(super) fn remove(&mut self, key: QueueKey) {
        self.0.remove(&key);
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn get(&self, key: QueueKey) -> Option<SeqId> {
        self.0.get(&key).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(policy: SchedulePolicy, priority: i32, at_us: u64, arrival: u64) -> QueueKey {
        QueueKey::new(policy, priority, Tick(at_us), arrival)
    }

    #[test]
    fn fcfs_ignores_priority() {
        let policy = SchedulePolicy::Fcfs;
        assert!(key(policy, -5, 9, 0) < key(policy, 5, 0, 1));
    }

    #[test]
    fn higher_priority_goes_first_until_the_other_has_waited_its_levels() {
        let policy = SchedulePolicy::Priority;
        let old = key(policy, 0, 0, 0);
        assert!(key(policy, 2, PRIORITY_STEP_US, 1) < old, "a second late, two levels up");
        assert!(key(policy, 2, 2 * PRIORITY_STEP_US, 1) > old, "two seconds late, two levels up: the older wins");
        assert!(key(policy, 2, 3 * PRIORITY_STEP_US, 1) > old);
        assert!(key(policy, 0, 0, 1) > old);
    }

    #[test]
    fn extreme_inputs_keep_their_order() {
        let policy = SchedulePolicy::Priority;
        assert!(key(policy, i32::MAX, u64::MAX, 1) < key(policy, i32::MIN, u64::MAX, 0));
    }
}
