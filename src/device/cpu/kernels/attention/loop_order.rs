//! Loop order within a unit of attention work.
//!
//! A unit is a grid of segments by blocks of queries; one pass of the kernel computes one cell. An order defines how
//! the grid is traversed and when partials are merged. Every order runs the same passes and merges each query's
//! partials by the same function in segment order, so the order does not change results.

use std::ops::Range;

use super::segments_touched;
use super::work_split::ROWS_PER_UNIT;
use crate::graph::{AttentionSchedules, LoopOrder};

/// Number of segments whose partials a worker keeps at the same time.
pub(crate) const fn segments_kept(schedules: AttentionSchedules) -> usize {
    if schedules.partial_end() <= schedules.full_max as usize {
        return 1;
    }
    // The longest row of a unit is within the limit, and the unit's other rows start at most that much earlier.
    segments_touched(schedules.partial_end() + ROWS_PER_UNIT - 1)
}

/// Traversal and merging of a unit.
impl LoopOrder {
    /// Iterates over every cell (segment, block) of the grid once.
    pub(crate) fn walk(self, segments: usize, blocks: usize) -> impl Iterator<Item = (usize, usize)> {
        let is_blocked = self == Self::Blocked;
        let (outer, inner) = if is_blocked { (segments, blocks) } else { (blocks, segments) };
        (0..outer).flat_map(move |o| (0..inner).map(move |i| if is_blocked { (o, i) } else { (i, o) }))
    }

    /// Segments of a block to merge after pass `segment` of `segments`.
    pub(crate) fn due(self, segment: usize, segments: usize) -> Range<usize> {
        match self {
            Self::Full | Self::Blocked => segment..segment + 1,
            Self::Partial if segment + 1 == segments => 0..segments,
            Self::Partial => 0..0,
        }
    }

    /// Slot that keeps a segment's partials until they are merged.
    pub(crate) fn slot(self, segment: usize) -> usize {
        if self == Self::Partial { segment } else { 0 }
    }
}
