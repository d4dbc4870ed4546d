//! Order of sequences.
//!
//! One strict total order covers waiting and running sequences. The key of a sequence never changes while the scheduler
//! contains it. Admission starts at the front of the order, preemption at the back.
//!
//! Under [`SchedulePolicy::Priority`], sequences are ordered by *virtual arrival*: each level of priority moves the
//! arrival [`PRIORITY_STEP_US`] earlier. This ages waiting sequences without bookkeeping: only sequences that arrive
//! within a bounded time after a waiting sequence can pass it, so no sequence starves.

use std::collections::BTreeMap;

use crate::kv_cache::SeqId;

/// Point in time of an injected clock, in microseconds. The scheduler itself reads no clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tick(pub u64);

/// Policy that orders sequences.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum SchedulePolicy {
    /// First come, first served: ignores priorities.
    #[default]
    Fcfs,
    /// Higher priority first, with aging: one level equals [`PRIORITY_STEP_US`] of waiting time.
    Priority,
}

/// Waiting time that equals one level of priority: one second.
///
/// It is longer than a step, so that levels matter under load. It is short enough that ten levels delay a sequence only
/// by sequences that arrive within ten seconds after it.
pub const PRIORITY_STEP_US: u64 = 1_000_000;

/// Sort key of a sequence; a smaller key goes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct QueueKey {
    virtual_us: i128,
    /// Number of the sequence in the order of `add`: breaks ties, so that keys are unique.
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

    /// Returns the key of a forked sequence with arrival number `arrival`.
    pub(super) fn sibling(self, arrival: u64) -> Self {
        Self { arrival, ..self }
    }
}

/// Waiting queue: new and preempted sequences, which hold no blocks.
///
/// A preempted sequence keeps its key. Sequences of one class are admitted in order, so that key is at the front of its
/// class.
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
        assert!(key(policy, 2, PRIORITY_STEP_US, 1) < old, "arrives one second later, two levels higher");
        assert!(
            key(policy, 2, 2 * PRIORITY_STEP_US, 1) > old,
            "arrives two seconds later, two levels higher: the older goes first"
        );
        assert!(key(policy, 2, 3 * PRIORITY_STEP_US, 1) > old);
        assert!(key(policy, 0, 0, 1) > old);
    }

    #[test]
    fn extreme_inputs_keep_their_order() {
        let policy = SchedulePolicy::Priority;
        assert!(key(policy, i32::MAX, u64::MAX, 1) < key(policy, i32::MIN, u64::MAX, 0));
    }
}
