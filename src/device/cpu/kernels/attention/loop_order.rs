//! In which order a unit's work is done.
//!
//! A unit is a grid of segments by blocks of queries, and one pass of the kernel fills one field of it. An order says how
//! the grid is walked and when partials are merged. Every order runs the same passes, and merges each query's partials by
//! the same function in the order of their segments, so none of it can show in a result.

use std::ops::Range;

use super::segments_touched;
use super::work_split::ROWS_PER_UNIT;
use crate::graph::{AttentionSchedules, LoopOrder};

/// Segments whose partials a member keeps at the same time.
pub(crate) const fn segments_kept(schedules: AttentionSchedules) -> usize {
    if schedules.partial_end() <= schedules.full_max as usize {
        return 1;
    }
    // The longest row of a unit is within the limit, and its other rows start that much earlier.
    segments_touched(schedules.partial_end() + ROWS_PER_UNIT - 1)
}

/// What an order does with a unit.
impl LoopOrder {
    /// Every field (segment, block) of the grid once.
    pub(crate) fn walk(self, segments: usize, blocks: usize) -> impl Iterator<Item = (usize, usize)> {
        let is_blocked = self == Self::Blocked;
        let (outer, inner) = if is_blocked { (segments, blocks) } else { (blocks, segments) };
        (0..outer).flat_map(move |o| (0..inner).map(move |i| if is_blocked { (o, i) } else { (i, o) }))
    }

    /// Segments of a block that are merged when pass `segment` of `segments` is done.
    pub(crate) fn due(self, segment: usize, segments: usize) -> Range<usize> {
        match self {
            Self::Full | Self::Blocked => segment..segment + 1,
            Self::Partial if segment + 1 == segments => 0..segments,
            Self::Partial => 0..0,
        }
    }

    /// Where a segment's partials are kept until they are merged.
    pub(crate) fn slot(self, segment: usize) -> usize {
        if self == Self::Partial { segment } else { 0 }
    }
}
