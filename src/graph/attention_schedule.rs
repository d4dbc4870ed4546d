//! Which loop order attention uses for how many visible tokens. All orders make the same additions in the same order, so
//! none of it can show in a result; a device may have others, or one for all.

use serde::{Deserialize, Serialize};

/// Up to which visible length a row is served by which loop order, in tokens.
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
    /// Full up to 512 visible tokens, partial up to 2048.
    pub const DEFAULT: Self = Self { full_max: 512, partial_max: 2048 };

    /// The partial order keeps a partial for each segment, so its scratch grows with `partial_max`. This bounds it: at
    /// heads of 128 to less than a MiB for each member of the team.
    pub const LARGEST_PARTIAL_MAX: u32 = 65_536;

    /// Whether `full_max ≤ partial_max ≤ LARGEST_PARTIAL_MAX`.
    pub const fn is_valid(&self) -> bool {
        self.full_max <= self.partial_max && self.partial_max <= Self::LARGEST_PARTIAL_MAX
    }

    /// The order for a row that sees `visible_tokens`.
    pub const fn choose(&self, visible_tokens: usize) -> LoopOrder {
        if visible_tokens <= self.full_max as usize {
            LoopOrder::Full
        } else if visible_tokens <= self.partial_end() {
            LoopOrder::Partial
        } else {
            LoopOrder::Blocked
        }
    }

    /// Most tokens of the partial order. Values that are not valid only ever choose another order, with the same bits.
    pub(crate) const fn partial_end(self) -> usize {
        if self.partial_max < Self::LARGEST_PARTIAL_MAX {
            self.partial_max as usize
        } else {
            Self::LARGEST_PARTIAL_MAX as usize
        }
    }
}

/// How attention walks the segments of a sequence and the blocks of queries that see them.
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
