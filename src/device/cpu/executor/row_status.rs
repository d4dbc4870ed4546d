//! Row status flags that workers set while a plan runs.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::device::CustomFailure;
use crate::graph::{Op, OverflowPolicy, RowStatus};

/// Status of a launch's rows, and the number of elements that overflowed in each operation.
#[derive(Debug)]
pub(super) struct RowStatusFlags {
    rows: Vec<AtomicU8>,
    overflows: [AtomicU64; Op::NAMES.len()],
    policy: OverflowPolicy,
    custom_failures: Mutex<Vec<CustomFailure>>,
}

impl RowStatusFlags {
    /// Creates flags for launches of at most `rows` rows.
    pub(super) fn new(rows: usize, policy: OverflowPolicy) -> Self {
        let overflows = [const { AtomicU64::new(0) }; Op::NAMES.len()];
        Self {
            rows: (0..rows).map(|_| AtomicU8::new(0)).collect(),
            overflows,
            policy,
            custom_failures: Mutex::default(),
        }
    }

    /// Resets the flags for a launch.
    pub(super) fn clear(&mut self, rows: usize) {
        self.custom_failures.get_mut().clear();
        self.rows[..rows].iter_mut().for_each(|row| *row.get_mut() = RowStatus::Ok as u8);
    }

    /// Marks a row; a more severe mark stays.
    pub(super) fn mark(&self, row: usize, status: RowStatus) {
        self.rows[row].fetch_max(status as u8, Ordering::Relaxed);
    }

    /// Marks the rows of a custom operation call that failed.
    pub(super) fn custom_failure(&self, failure: CustomFailure) {
        failure.rows.clone().for_each(|row| self.mark(row, RowStatus::CustomOpFailed));
        self.custom_failures.lock().push(failure);
    }

    /// Custom operation calls that failed in this launch.
    pub(super) fn custom_failures(&self) -> Vec<CustomFailure> {
        self.custom_failures.lock().clone()
    }

    /// Counts elements that saturated where activations are rounded, and marks their row unless the policy is to clamp.
    pub(super) fn overflow(&self, op: &Op, row: usize, elements: usize) {
        if elements > 0 {
            self.count(op, elements);
            if self.policy != OverflowPolicy::Clamp {
                self.mark(row, RowStatus::Overflow);
            }
        }
    }

    /// Does the same for stored keys and values. The f32 fallback would not help them, so under the retry policy the
    /// row is not marked.
    pub(super) fn store_overflow(&self, op: &Op, row: usize, elements: usize) {
        if elements > 0 {
            self.count(op, elements);
            if self.policy == OverflowPolicy::Error {
                self.mark(row, RowStatus::Overflow);
            }
        }
    }

    fn count(&self, op: &Op, elements: usize) {
        self.overflows[op.index()].fetch_add(elements as u64, Ordering::Relaxed);
    }

    /// Status of a row.
    pub(super) fn status_of(&self, row: usize) -> u8 {
        self.rows[row].load(Ordering::Relaxed)
    }

    /// Number of elements that overflowed since the plan was loaded, by operation; operations without overflow are
    /// omitted.
    pub(super) fn overflows(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        let counts = self.overflows.iter().map(|count| count.load(Ordering::Relaxed));
        Op::NAMES.into_iter().zip(counts).filter(|(_, count)| *count > 0)
    }
}
