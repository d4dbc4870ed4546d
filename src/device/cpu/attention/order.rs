//! In which order a unit's work is done.
//!
//! A unit is a grid of segments by blocks of queries, and one pass of the kernel fills one field of it. An order says how
//! the grid is walked and when partials are merged. Every order runs the same passes, and merges each query's partials by
//! the same function in the order of their segments, so none of it can show in a result.

use std::ops::Range;

use super::schedule::ROWS_PER_UNIT;
use super::segments_touched;

/// Which loop order serves how many visible tokens. Bits never depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionSchedules {
    /// Visible tokens up to which [`LoopOrder::Full`] is used.
    pub full_max: u32,
    /// Visible tokens up to which [`LoopOrder::Partial`] is used: at least `full_max`, and at most
    /// [`LARGEST_PARTIAL_MAX`](Self::LARGEST_PARTIAL_MAX).
    pub partial_max: u32,
}

impl Default for AttentionSchedules {
    fn default() -> Self {
        Self::DEFAULT
    }
}

impl AttentionSchedules {
    /// Full up to 512 visible tokens, partial up to 2048.
    pub const DEFAULT: Self = Self { full_max: 512, partial_max: 2048 };

    /// The partial order keeps a partial for each segment, so its scratch grows with `partial_max`. This bounds it: at
    /// heads of 128 to less than a MiB for each member of the team.
    pub const LARGEST_PARTIAL_MAX: u32 = 65_536;

    /// Whether `full_max ≤ partial_max ≤ LARGEST_PARTIAL_MAX`.
    pub const fn is_valid(self) -> bool {
        self.full_max <= self.partial_max && self.partial_max <= Self::LARGEST_PARTIAL_MAX
    }

    /// The order for a row that sees `visible_tokens`.
    pub const fn choose(self, visible_tokens: usize) -> LoopOrder {
        if visible_tokens <= self.full_max as usize {
            LoopOrder::Full
        } else if visible_tokens <= self.partial_end() {
            LoopOrder::Partial
        } else {
            LoopOrder::Blocked
        }
    }

    /// Segments whose partials a member keeps at the same time.
    pub(super) const fn segments_kept(self) -> usize {
        if self.partial_end() <= self.full_max as usize {
            return 1;
        }
        // The last row of a unit is within the limit. With a window, each row before it starts one token earlier.
        segments_touched(self.partial_end() + ROWS_PER_UNIT - 1)
    }

    /// Most tokens of the partial order. Values that are not valid only ever choose another order, with the same bits.
    const fn partial_end(self) -> usize {
        if self.partial_max < Self::LARGEST_PARTIAL_MAX {
            self.partial_max as usize
        } else {
            Self::LARGEST_PARTIAL_MAX as usize
        }
    }
}

/// How a unit's segments and blocks of queries are walked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LoopOrder {
    /// Block by block, each through all its segments: the block's queries and running state stay in the first-level cache.
    Full,
    /// The same in two passes a block: the partials of all segments, then their merge.
    Partial,
    /// Segment by segment, each for all blocks: what is read of a long sequence at a time is one segment. Right for any
    /// length.
    Blocked,
}

impl LoopOrder {
    /// Every field (segment, block) of the grid once.
    pub(super) fn walk(self, segments: usize, blocks: usize) -> impl Iterator<Item = (usize, usize)> {
        let is_blocked = self == Self::Blocked;
        let (outer, inner) = if is_blocked { (segments, blocks) } else { (blocks, segments) };
        (0..outer).flat_map(move |o| (0..inner).map(move |i| if is_blocked { (o, i) } else { (i, o) }))
    }

    /// Segments of a block that are merged when pass `segment` of `segments` is done.
    pub(super) fn due(self, segment: usize, segments: usize) -> Range<usize> {
        match self {
            Self::Full | Self::Blocked => segment..segment + 1,
            Self::Partial if segment + 1 == segments => 0..segments,
            Self::Partial => 0..0,
        }
    }

    /// Where a segment's partials are kept until they are merged.
    pub(super) fn room(self, segment: usize) -> usize {
        if self == Self::Partial { segment } else { 0 }
    }
}
