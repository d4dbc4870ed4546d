//! Distribution of attention work over workers.
//!
//! Pieces have one order: sequence, row, KV head (and segment, if a step has too few of the others to keep all workers
//! busy). The order is split where the sum of costs passes each worker's share, so that every worker's results are one
//! contiguous range. The split uses integer arithmetic over the step's lengths and does not change results.

use std::ops::Range;

use super::{AttentionDims, SEGMENT_TOKENS};
use crate::device::cpu::kernels::kv_cache::{BatchRows, SeqRows};

/// Largest number of rows of a unit: 16 rows share each tile that is read, and the tiles of a segment stay in the L2
/// cache meanwhile.
pub(crate) const ROWS_PER_UNIT: usize = 16;

/// A few rows of one sequence and one KV head.
#[derive(Clone, Debug)]
pub(crate) struct Unit<'a> {
    pub seq: SeqRows<'a>,
    /// First row of the step.
    pub first_row: usize,
    /// Position of the first row.
    pub first_position: usize,
    pub rows: usize,
    pub kv_head: usize,
    /// Segments of which at least one row sees a token.
    pub segments: Range<usize>,
    /// Index of the unit's first partial, if the step is split.
    pub first_partial: usize,
}

impl Unit<'_> {
    /// Tokens of a segment that at least one row sees, counted from the segment's start.
    pub fn visible(&self, shape: &AttentionDims, segment: usize) -> Range<usize> {
        let base = segment * SEGMENT_TOKENS;
        let start = shape.visible(self.first_position).start.max(base) - base;
        let end = shape.visible(self.first_position + self.rows - 1).end.min(base + SEGMENT_TOKENS) - base;
        start..end
    }

    /// Tokens of a segment that one of its rows sees, as start and end.
    pub fn row_sees(&self, shape: &AttentionDims, row: usize, segment: usize) -> (usize, usize) {
        let base = segment * SEGMENT_TOKENS;
        let within = |token: usize| token.clamp(base, base + SEGMENT_TOKENS) - base;
        let visible = shape.visible(self.first_position + row);
        (within(visible.start), within(visible.end))
    }

    /// Queries of a block that see a token of a segment; they are contiguous because rows are in order.
    pub fn queries_seeing(&self, shape: &AttentionDims, segment: usize, block: Range<usize>) -> Range<usize> {
        let sees = |query: &usize| {
            let (start, end) = self.row_sees(shape, query / shape.group(), segment);
            start < end
        };
        match (block.clone().find(sees), block.clone().rfind(sees)) {
            (Some(first), Some(last)) => first..last + 1,
            _ => block.start..block.start,
        }
    }

    /// Number of tokens that the last row sees, which is the largest of all rows.
    pub fn longest(&self, shape: &AttentionDims) -> usize {
        shape.visible(self.first_position + self.rows - 1).len()
    }

    fn cost(&self, shape: &AttentionDims, segment: usize) -> usize {
        // A segment's fixed work (softmax, merge) costs about as much as eight tokens.
        self.rows * (self.visible(shape, segment).len() + 8)
    }

    fn total_cost(&self, shape: &AttentionDims) -> usize {
        self.segments.clone().map(|segment| self.cost(shape, segment)).sum()
    }

    fn partials(&self, shape: &AttentionDims) -> usize {
        self.segments.len() * self.rows * shape.group()
    }
}

/// Split of a step over workers. Computed once per step for each set of attention parameters (window) of a model; later
/// calls reuse its buffers.
#[derive(Clone, Debug)]
pub struct WorkSplit {
    /// Parts that one thread starts with. A step of few rows is split over the first of them only: it has little to balance.
    parts_per_thread: usize,
    rows_per_unit: usize,
    is_split: bool,
    bounds: Vec<usize>,
    merge_bounds: Vec<usize>,
}

impl WorkSplit {
    /// Creates a split for `workers` workers, with nothing planned.
    pub fn new(workers: usize) -> Self {
        Self {
            parts_per_thread: 1,
            rows_per_unit: ROWS_PER_UNIT,
            is_split: false,
            bounds: vec![0; workers + 1],
            merge_bounds: vec![0; workers + 1],
        }
    }

    /// Sets how many neighboring workers' parts each thread starts with.
    #[must_use]
    pub fn parts_per_thread(mut self, parts: usize) -> Self {
        debug_assert!(parts > 0 && self.workers().is_multiple_of(parts));
        self.parts_per_thread = parts;
        self
    }

    /// Splits a step.
    pub fn plan(&mut self, shape: &AttentionDims, rows: BatchRows<'_>, block_size: usize) {
        let workers = self.workers();
        let groups = |rows_per_unit| rows.q_lens.iter().map(|q| (*q as usize).div_ceil(rows_per_unit)).sum::<usize>();
        // Splits are between units of several rows; four units per worker keep the shares balanced.
        self.rows_per_unit = match workers {
            1 => ROWS_PER_UNIT,
            _ => [ROWS_PER_UNIT, 4].into_iter().find(|r| groups(*r) >= 4 * workers).unwrap_or(1),
        };
        let stride = if self.rows_per_unit == 1 { self.parts_per_thread } else { 1 };
        let shares = workers / stride;
        let (mut cost, mut most_segments) = (0, 0);
        self.for_units(shape, rows, block_size, &mut |unit| {
            cost += unit.total_cost(shape);
            most_segments = most_segments.max(unit.segments.len());
        });
        let few = shares > 1 && self.rows_per_unit == 1 && rows.total() * shape.kv_heads < 2 * shares;
        self.is_split = few && most_segments > 1;

        let (is_split, rows_per_unit) = (self.is_split, self.rows_per_unit);
        let mut bounds = std::mem::take(&mut self.bounds);
        bounds.fill(0);
        let mut before = 0;
        let mut cut = |end: usize, piece: usize| {
            // A piece belongs to the worker whose share contains its midpoint.
            let owner = ((2 * before + piece) * shares / (2 * cost).max(1)).min(shares - 1);
            bounds[owner * stride + 1] = end;
            before += piece;
        };
        let mut pending = 0;
        self.for_units(shape, rows, block_size, &mut |unit| {
            if is_split {
                for (index, segment) in unit.segments.clone().enumerate() {
                    cut(unit.first_partial + (index + 1) * shape.group(), unit.cost(shape, segment));
                }
                return;
            }
            pending += unit.total_cost(shape);
            if rows_per_unit == 1 || unit.kv_head + 1 == shape.kv_heads {
                cut((unit.first_row + unit.rows - 1) * shape.kv_heads + unit.kv_head + 1, pending);
                pending = 0;
            }
        });
        for worker in 0..workers {
            bounds[worker + 1] = bounds[worker + 1].max(bounds[worker]);
        }
        self.bounds = bounds;
        let pieces = rows.total() * shape.kv_heads;
        for (worker, bound) in self.merge_bounds.iter_mut().enumerate() {
            *bound = if is_split { pieces * worker.div_ceil(stride) / shares } else { 0 };
        }
    }

    /// Number of workers.
    pub fn workers(&self) -> usize {
        self.bounds.len() - 1
    }

    /// Whether segments are distributed over workers, so that [`Attention::merge`](super::Attention::merge) must
    /// follow.
    pub fn needs_merge(&self) -> bool {
        self.is_split
    }

    /// Pieces that each worker stores in [`Attention::attend`](super::Attention::attend): worker `m` those from
    /// `bounds[m]` to `bounds[m + 1]`. They are outputs, or partials if [`needs_merge`](Self::needs_merge).
    pub fn bounds(&self) -> &[usize] {
        &self.bounds
    }

    /// Outputs that each worker stores in [`Attention::merge`](super::Attention::merge), in the same form.
    pub fn merge_bounds(&self) -> &[usize] {
        &self.merge_bounds
    }

    /// Calls `run` with the work of `worker`: a unit and its segments.
    pub(crate) fn for_worker<'a>(
        &self,
        shape: &AttentionDims,
        rows: BatchRows<'a>,
        block_size: usize,
        worker: usize,
        run: &mut dyn FnMut(&Unit<'a>, Range<usize>),
    ) {
        let mine = self.bounds[worker]..self.bounds[worker + 1];
        self.for_units(shape, rows, block_size, &mut |unit| {
            if self.is_split {
                let first = |index: usize| unit.first_partial + index * shape.group();
                for (index, segment) in unit.segments.clone().enumerate() {
                    if mine.contains(&first(index)) {
                        run(unit, segment..segment + 1);
                    }
                }
            } else if mine.contains(&(unit.first_row * shape.kv_heads + unit.kv_head)) {
                run(unit, unit.segments.clone());
            }
        });
    }

    /// Calls `run` with each unit whose partials `worker` merges.
    pub(crate) fn for_merge<'a>(
        &self,
        shape: &AttentionDims,
        rows: BatchRows<'a>,
        block_size: usize,
        worker: usize,
        run: &mut dyn FnMut(&Unit<'a>),
    ) {
        let mine = self.merge_bounds[worker]..self.merge_bounds[worker + 1];
        self.for_units(shape, rows, block_size, &mut |unit| {
            if mine.contains(&(unit.first_row * shape.kv_heads + unit.kv_head)) {
                run(unit);
            }
        });
    }

    fn for_units<'a>(
        &self,
        shape: &AttentionDims,
        rows: BatchRows<'a>,
        block_size: usize,
        run: &mut dyn FnMut(&Unit<'a>),
    ) {
        let mut first_partial = 0;
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
                        first_partial,
                    };
                    first_partial += unit.partials(shape);
                    run(&unit);
                }
            }
        }
    }
}
