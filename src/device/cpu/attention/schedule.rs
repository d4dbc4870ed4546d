//! Who computes which piece of attention.
//!
//! A unit is a few rows of one sequence under one KV head. Units, and their segments when a step has too few units, are
//! dealt to the members in one fixed order, cut where the sum of costs passes each member's share. All of it is integer
//! arithmetic over the step's lengths, and none of it can show in a result.

use std::ops::Range;

use super::super::kv::{Rows, SeqRows};
use super::{AttentionShape, SEGMENT_TOKENS};

/// Rows of a unit at most: 16 rows share each tile that is read, and 512 rows of prompt still make 32 units a KV head.
pub(super) const ROWS_PER_UNIT: usize = 16;

/// Units that a split step has at most; with two units a member or more, units alone keep everyone busy.
pub(super) const fn max_split_units(members: usize) -> usize {
    2 * members
}

/// A few rows of one sequence under one KV head.
#[derive(Clone, Debug)]
pub(super) struct Unit<'a> {
    pub seq: SeqRows<'a>,
    /// First row of the step.
    pub first_row: usize,
    /// Its position.
    pub first_position: usize,
    pub rows: usize,
    pub kv_head: usize,
    /// Segments of which some row sees a token.
    pub segments: Range<usize>,
    /// Where its partials begin, if the step is split.
    pub partial_start: usize,
}

impl Unit<'_> {
    /// Tokens of a segment that some row sees, counted from the segment's start.
    pub fn visible(&self, shape: &AttentionShape, segment: usize) -> Range<usize> {
        let base = segment * SEGMENT_TOKENS;
        let start = shape.visible(self.first_position).start.max(base) - base;
        let end = shape.visible(self.first_position + self.rows - 1).end.min(base + SEGMENT_TOKENS) - base;
        start..end
    }

    fn partials_len(&self, shape: &AttentionShape) -> usize {
        self.segments.len() * self.rows * shape.group() * shape.partial_len()
    }

    fn cost(&self, shape: &AttentionShape, segment: usize) -> usize {
        // Eight tokens' worth for a segment's fixed work: softmax ends, merge.
        self.rows * (self.visible(shape, segment).len() + 8)
    }
}

/// How a step is cut for a team.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Schedule {
    members: usize,
    rows_per_unit: usize,
    split: bool,
    total_cost: usize,
    units: usize,
    partials_len: usize,
}

impl Schedule {
    pub(super) fn new(shape: &AttentionShape, rows: Rows<'_>, block_size: usize, members: usize) -> Self {
        let count = |rows_per_unit: usize| {
            shape.kv_heads * rows.q_lens.iter().map(|q| (*q as usize).div_ceil(rows_per_unit)).sum::<usize>()
        };
        // Fewer rows a unit reread the tiles more often but keep more members busy.
        let enough = 2 * members;
        let rows_per_unit =
            if members == 1 { ROWS_PER_UNIT } else { [16, 4, 1].into_iter().find(|r| count(*r) >= enough).unwrap_or(1) };
        let mut schedule =
            Self { members, rows_per_unit, split: false, total_cost: 0, units: count(rows_per_unit), partials_len: 0 };
        let (mut cost, mut most_segments, mut partials_len) = (0, 0, 0);
        schedule.for_units(shape, rows, block_size, &mut |unit| {
            cost += unit.segments.clone().map(|segment| unit.cost(shape, segment)).sum::<usize>();
            most_segments = most_segments.max(unit.segments.len());
            partials_len = unit.partial_start + unit.partials_len(shape);
        });
        schedule.total_cost = cost;
        schedule.split = members > 1 && schedule.units < enough && most_segments > 1;
        schedule.partials_len = if schedule.split { partials_len } else { 0 };
        schedule
    }

    /// Whether segments are split among members, so that [`Attention::merge`](super::Attention::merge) must follow.
    pub const fn needs_merge(&self) -> bool {
        self.split
    }

    /// Floats of partials this step writes; 0 without a merge.
    pub const fn partials_len(&self) -> usize {
        self.partials_len
    }

    /// The member whose share holds the middle of a piece that begins at `before`.
    fn owner(&self, before: usize, cost: usize) -> usize {
        (2 * before + cost) * self.members / (2 * self.total_cost).max(1)
    }

    /// Calls `run` with each piece of `member`: a unit and the segments of it to compute.
    pub(super) fn for_member<'a>(
        &self,
        shape: &AttentionShape,
        rows: Rows<'a>,
        block_size: usize,
        member: usize,
        run: &mut dyn FnMut(Unit<'a>, Range<usize>),
    ) {
        let mut before = 0;
        self.for_units(shape, rows, block_size, &mut |unit| {
            if self.split {
                for segment in unit.segments.clone() {
                    let cost = unit.cost(shape, segment);
                    if self.owner(before, cost) == member {
                        run(unit.clone(), segment..segment + 1);
                    }
                    before += cost;
                }
            } else {
                let cost = unit.segments.clone().map(|segment| unit.cost(shape, segment)).sum();
                if self.owner(before, cost) == member {
                    let segments = unit.segments.clone();
                    run(unit, segments);
                }
                before += cost;
            }
        });
    }

    /// Calls `run` with each unit whose partials `member` joins.
    pub(super) fn for_merge<'a>(
        &self,
        shape: &AttentionShape,
        rows: Rows<'a>,
        block_size: usize,
        member: usize,
        run: &mut dyn FnMut(Unit<'a>),
    ) {
        let mut index = 0;
        self.for_units(shape, rows, block_size, &mut |unit| {
            if index * self.members / self.units == member {
                run(unit);
            }
            index += 1;
        });
    }

    fn for_units<'a>(
        &self,
        shape: &AttentionShape,
        rows: Rows<'a>,
        block_size: usize,
        run: &mut dyn FnMut(Unit<'a>),
    ) {
        let mut partial_start = 0;
        for seq in rows.sequences(block_size) {
            for first in (0..seq.rows).step_by(self.rows_per_unit) {
                let count = self.rows_per_unit.min(seq.rows - first);
                let first_position = seq.first_position + first;
                let seen = shape.visible(first_position).start..first_position + count;
                for kv_head in 0..shape.kv_heads {
                    let unit = Unit {
                        seq,
                        first_row: seq.first_row + first,
                        first_position,
                        rows: count,
                        kv_head,
                        segments: seen.start / SEGMENT_TOKENS..seen.end.div_ceil(SEGMENT_TOKENS),
                        partial_start,
                    };
                    partial_start += unit.partials_len(shape);
                    run(unit);
                }
            }
        }
    }
}
