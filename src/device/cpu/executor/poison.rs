//! Run-time check of the memory plan: fills dead memory with NaN, so that a value read too late, too early or past its
//! rows shows up in the logits.
//!
//! Off unless a test enables it; launches are then slow and allocate.

use std::ops::Range;

use crate::graph::{Operand, Plan};

/// Which part of the arena is filled with NaN before each step.
#[cfg_attr(not(feature = "internals"), allow(dead_code, reason = "only tests use it"))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Poison {
    /// Nothing.
    #[default]
    Off,
    /// All of the arena except rows that were written before and are still to be read.
    Dead,
    /// All of the arena; proves that overwriting live values is detected.
    All,
}

/// A program's poison mode and the live ranges of its plan's values.
#[derive(Debug)]
pub(super) struct ArenaPoison {
    what: Poison,
    lives: Vec<Option<(usize, usize)>>,
}

impl ArenaPoison {
    pub(super) fn new(what: Poison, plan: &Plan) -> Self {
        Self { what, lives: if what == Poison::Off { Vec::new() } else { plan.lives() } }
    }
}

impl ArenaPoison {
    /// Fills all memory that is dead when the group of steps at `at` begins, which includes its outputs and scratch.
    /// `range` returns a value's bytes in this batch.
    pub(super) fn fill(&self, plan: &Plan, at: usize, range: impl Fn(usize) -> Range<usize>, arena: &mut [u8]) {
        let keep = match self.what {
            Poison::Off => return,
            Poison::Dead => true,
            Poison::All => false,
        };
        let mut alive = Vec::new();
        for (value, life) in self.lives.iter().enumerate() {
            let placed = matches!(plan.values[value].operand, Operand::Arena { .. });
            if keep && placed && life.is_some_and(|(first, last)| first < at && at <= last) {
                alive.push(range(value));
            }
        }
        alive.sort_unstable_by_key(|range| range.start);
        // Bytes of all ones are a NaN in every float type.
        let mut start = 0;
        for range in alive {
            if start < range.start {
                arena[start..range.start].fill(0xff);
            }
            start = start.max(range.end);
        }
        arena[start..].fill(0xff);
    }
}
