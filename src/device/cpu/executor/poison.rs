//! A check of placement by running: fills what nothing may read with NaN, so that a value read too late, too early, or
//! past its rows shows in the logits.
//!
//! Off unless a test asks for it; then launches are slow and allocate.

use std::ops::Range;

use crate::graph::{Operand, Plan};

/// What is filled with NaN before each step.
#[cfg_attr(not(feature = "internals"), allow(dead_code, reason = "only tests ask for it"))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Poison {
    /// Nothing.
    #[default]
    Off,
    /// All of the arena but the rows that were written before and are read from now on.
    Dead,
    /// All of the arena: shows that a fill of what is alive does not pass unseen.
    All,
}

/// A program's poison with the lives of its plan's values.
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
    /// Fills what is dead when the group of steps that begins at `at` begins; its outputs and scratch are. `range` gives a
    /// value's bytes in this batch.
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
        // Bytes of ones are a NaN in every float type.
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
