//! Loop orders of attention by number of visible tokens. All orders perform the same additions in the same order, so
//! the choice never changes a result. A device may have other orders, or only one.

use serde::{Deserialize, Serialize};

/// Visible lengths in tokens up to which each loop order is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
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
    /// Full up to 512 visible tokens, partial up to 2048, blocked for longer rows.
    pub const DEFAULT: Self = Self { full_max: 512, partial_max: 2048 };

    /// Upper bound of `partial_max`. The partial order keeps a partial result for each segment, so its scratch grows
    /// with `partial_max`; with heads of 128 this bound keeps it below 1 MiB per worker.
    pub const LARGEST_PARTIAL_MAX: u32 = 65_536;

    /// Whether `full_max ≤ partial_max ≤ LARGEST_PARTIAL_MAX`.
    pub const fn is_valid(&self) -> bool {
        self.full_max <= self.partial_max && self.partial_max <= Self::LARGEST_PARTIAL_MAX
    }

    /// Returns the loop order for a row with `visible_tokens` visible tokens.
    pub const fn choose(&self, visible_tokens: usize) -> LoopOrder {
        if visible_tokens <= self.full_max as usize {
            LoopOrder::Full
        } else if visible_tokens <= self.partial_end() {
            LoopOrder::Partial
        } else {
            LoopOrder::Blocked
        }
    }

    /// Largest number of visible tokens of the partial order. An invalid setting only selects another order, which
    /// gives the same bits.
    pub(crate) const fn partial_end(self) -> usize {
        if self.partial_max < Self::LARGEST_PARTIAL_MAX {
            self.partial_max as usize
        } else {
            Self::LARGEST_PARTIAL_MAX as usize
        }
    }
}

/// Order in which attention traverses the segments of a sequence and the blocks of queries that see them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LoopOrder {
    /// Block by block, each through all its segments: the block's queries and running state stay in the L1 cache.
    Full,
    /// Block by block, in two passes: the partials of all segments, then their merge.
    Partial,
    /// Segment by segment, each for all blocks: a long sequence is read only one segment at a time. Suitable for any
    /// length.
    Blocked,
}
