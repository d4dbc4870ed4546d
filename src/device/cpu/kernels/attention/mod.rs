//! Paged causal attention, with one definition for every length, batch, chunk and thread count.
//!
//! A row at position `p` sees tokens `[max(0, p + 1 − window), p]`. Tokens are split into segments of
//! [`SEGMENT_TOKENS`] and tiles of 16 at absolute positions. Within a segment: scores `q·k` are summed over the head in
//! index order, scaled and capped; their maximum is taken; then `exp(score − maximum)`; then their sum, in 16 lanes
//! over the tiles in order and finally by halving; then values are weighted and summed token by token. Keys and values
//! in int8 are multiplied as integers: each sum `q·k` is multiplied by the key's scale, and each weight by the value's.
//! Segments are merged strictly in order. No other additions take place, so a row's bits depend only on its own
//! sequence. Masked tokens are masked lane by lane and their values are never multiplied: stale memory, NaN included,
//! cannot change a result.
//!
//! The order in which segments and blocks of queries are traversed ([`AttentionSchedules`]) changes scratch and memory
//! traffic, but no addition: every order runs the same passes and the same merges.
//!
//! The driver only distributes work: [`WorkSplit::plan`] splits the step, and [`Attention::attend`] runs one worker's
//! share and passes finished pieces to the caller. If a step has too few rows and heads for the thread pool, segments
//! are distributed over workers and [`Attention::merge`] joins them after a barrier.

#![forbid(unsafe_code)]

mod kernel;
mod loop_order;
mod work_split;

use std::marker::PhantomData;
use std::ops::Range;

use super::exp::exp;
use super::kv_cache::{BatchRows, CpuKvLayout};
use crate::device::cpu::Isa;
use crate::device::cpu::simd::vector::{Kernel, LANES, SimdVector, dispatch};
pub use crate::graph::{AttentionSchedules, LoopOrder};
use crate::kv_cache::{BlockId, KvDType};
use kernel::{BF16, Element, F16, F32, I8, MAX_QUERIES, PassScratch, Queries, SegmentTiles, TOGETHER};
use work_split::Unit;
pub use work_split::WorkSplit;

/// Tokens per segment. Part of the definition: another value gives other bits. With 256 tokens the scores of six
/// queries take 6 KiB, and there is one merge per 256 tokens.
pub const SEGMENT_TOKENS: usize = 256;
const TILES: usize = SEGMENT_TOKENS / LANES;

/// Largest number of segments that `tokens` consecutive tokens overlap, wherever they start.
const fn segments_touched(tokens: usize) -> usize {
    tokens.saturating_sub(1).div_ceil(SEGMENT_TOKENS) + 1
}

/// Parameters of one attention layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionDims {
    /// Number of query heads, a multiple of `kv_heads`.
    pub heads: usize,
    /// Number of KV heads.
    pub kv_heads: usize,
    /// Number of elements of a head.
    pub head_dim: usize,
    /// Scale of `q·k`, usually `1 / √head_dim`.
    pub scale: f32,
    /// Sliding window: largest number of tokens a row sees, itself included.
    pub window: Option<u32>,
    /// Soft cap of scores: `cap · tanh(score / cap)`.
    pub softcap: Option<f32>,
    /// Loop orders by visible length; `None` = blocked at every length. They do not change the result.
    pub schedules: Option<AttentionSchedules>,
}

impl AttentionDims {
    /// Number of query heads per KV head.
    pub const fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Head size rounded up to whole vectors.
    const fn padded_head(&self) -> usize {
        self.head_dim.next_multiple_of(LANES)
    }

    /// Number of floats of one output piece: one row, all query heads of one KV head.
    pub const fn piece_len(&self) -> usize {
        self.group() * self.head_dim
    }

    /// Number of floats of one partial, the state of one query after one segment: weighted values, largest score, sum.
    pub const fn partial_len(&self) -> usize {
        self.padded_head() + LANES
    }

    /// Largest number of partials that a step of at most `max_kv_tokens` tokens per sequence needs with `workers`
    /// workers.
    pub const fn max_partials(&self, workers: usize, max_kv_tokens: usize) -> usize {
        // Steps with at least twice as many pieces as workers are not split.
        2 * workers * max_kv_tokens.div_ceil(SEGMENT_TOKENS) * self.group()
    }

    /// Loop order of a unit whose longest row sees `tokens` tokens.
    fn loop_order(&self, tokens: usize) -> LoopOrder {
        self.schedules.map_or(LoopOrder::Blocked, |schedules| schedules.choose(tokens))
    }

    /// Tokens that a row at `position` sees.
    fn visible(&self, position: usize) -> Range<usize> {
        let end = position + 1;
        self.window.map_or(0, |w| end.saturating_sub(w as usize))..end
    }
}

/// One layer's attention over one step.
#[derive(Clone, Copy, Debug)]
pub struct Attention<'a> {
    /// Instruction-set path.
    pub isa: Isa,
    /// Parameters of the layer.
    pub shape: AttentionDims,
    /// Layout of the pool.
    pub layout: CpuKvLayout,
    /// Layer within the pool.
    pub layer: usize,
    /// The KV pool; the step's own keys and values are already written.
    pub pool: &'a [u8],
    /// Rows of the step.
    pub rows: BatchRows<'a>,
    /// Queries: row `r` starts at `r · q_stride` and holds all heads consecutively.
    pub q: &'a [f32],
    /// Number of elements from one row of queries to the next.
    pub q_stride: usize,
    /// Attention sinks: one score per head that is part of the softmax sum but has no value.
    pub sinks: Option<&'a [f32]>,
}

/// Scratch of one worker. Allocated once for the model's dimensions; layers may differ in their window.
#[derive(Debug)]
pub struct AttentionScratch {
    block: kernel::BlockScratch,
    /// Running states of the queries of an item, [`AttentionDims::partial_len`] floats each.
    state: Vec<f32>,
    /// One row's output.
    out: Vec<f32>,
}

impl AttentionScratch {
    /// Allocates scratch for layers of these dimensions.
    pub fn new(shape: &AttentionDims) -> Self {
        let queries = work_split::ROWS_PER_UNIT * shape.group();
        let segments_kept = shape.schedules.map_or(1, loop_order::segments_kept);
        Self {
            block: kernel::BlockScratch::new(shape.partial_len(), segments_kept),
            state: vec![0.0; queries * shape.partial_len()],
            out: vec![0.0; shape.piece_len()],
        }
    }
}

impl<'a> Attention<'a> {
    /// Runs the share of worker `worker`. `store` receives each finished piece once, with its index: an output (piece
    /// `row · kv_heads + kv_head` of [`AttentionDims::piece_len`] floats, so that pieces in order are the output matrix
    /// `rows × heads × head_dim`), or a partial of [`AttentionDims::partial_len`] floats if [`WorkSplit::needs_merge`].
    /// Indices are within the worker's part of [`WorkSplit::bounds`].
    pub fn attend(
        &self,
        schedule: &WorkSplit,
        worker: usize,
        scratch: &mut AttentionScratch,
        store: &mut dyn FnMut(usize, &[f32]),
    ) {
        schedule.for_worker(
            &self.shape,
            self.rows,
            self.layout.geometry().block_size,
            worker,
            &mut |unit, segments| self.run_unit(unit, segments, schedule.needs_merge(), scratch, store),
        );
    }

    /// Joins the partials of all workers into outputs, after a barrier. Does nothing unless [`WorkSplit::needs_merge`].
    /// Indices are within the worker's part of [`WorkSplit::merge_bounds`].
    pub fn merge(
        &self,
        schedule: &WorkSplit,
        worker: usize,
        partials: &[f32],
        scratch: &mut AttentionScratch,
        store: &mut dyn FnMut(usize, &[f32]),
    ) {
        schedule.for_merge(&self.shape, self.rows, self.layout.geometry().block_size, worker, &mut |unit| {
            debug_assert_eq!(unit.rows, 1, "only single rows are split");
            let (padded_head, stride) = (self.shape.padded_head(), self.shape.partial_len());
            let len = self.shape.group() * stride;
            let states = &mut scratch.state[..len];
            state_clear(padded_head, states);
            let partials = &partials[unit.first_partial * stride..][..unit.segments.len() * len];
            for partials in partials.chunks_exact(len) {
                dispatch(self.isa, Merge { padded_head, states, partials });
            }
            self.finish(unit, unit.first_row, states, &mut scratch.out, store);
        });
    }

    fn query(&self, row: usize, head: usize) -> &'a [f32] {
        &self.q[row * self.q_stride + head * self.shape.head_dim..][..self.shape.head_dim]
    }

    /// Finds the tiles of a segment that some row of the unit sees.
    fn find_tiles(&self, unit: &Unit<'_>, segment: usize, found: &mut SegmentTiles<'a>) {
        let seen = unit.visible(&self.shape, segment);
        let tiles = seen.start / LANES..seen.end.div_ceil(LANES);
        let layout = &self.layout;
        let (block_bytes, tile_bytes) = (layout.bytes_per_block(), layout.tile_bytes());
        let tiles_per_block = layout.geometry().block_size / LANES;
        found.to_values = layout.v_offset(0) - layout.k_offset(0);
        let in_block = layout.layer_range(BlockId(0), self.layer).start + layout.k_offset(unit.kv_head);
        // The block index is incremented instead of divided again: full and partial orders call this for every block of
        // queries.
        let first = segment * TILES + tiles.start;
        let (mut block, mut skipped) = (first / tiles_per_block, first % tiles_per_block);
        for tile in tiles.start..TILES + TOGETHER {
            let Some(id) = unit.seq.table.get(block) else {
                found.k[tile..].fill(&[]);
                break;
            };
            let start = id.0 as usize * block_bytes + in_block + skipped * tile_bytes;
            found.k[tile] = &self.pool[start..][..tile_bytes];
            if tile < tiles.end {
                found.v[tile] = &self.pool[start + found.to_values..][..tile_bytes];
            }
            skipped += 1;
            if skipped == tiles_per_block {
                (block, skipped) = (block + 1, 0);
            }
        }
    }

    /// Runs the passes of a unit over some of its segments, and stores its rows, or its partials if the step is split.
    fn run_unit(
        &self,
        unit: &Unit<'_>,
        segments: Range<usize>,
        is_split: bool,
        scratch: &mut AttentionScratch,
        store: &mut dyn FnMut(usize, &[f32]),
    ) {
        let shape = &self.shape;
        let (group, stride) = (shape.group(), shape.partial_len());
        let queries = unit.rows * group;
        // Rows of a unit may be on both sides of a limit; the longest decides for all, since the order does not change
        // bits.
        let order = shape.loop_order(unit.longest(shape));
        let AttentionScratch { block: scratch, state, out } = scratch;
        let states = &mut state[..queries * stride];
        state_clear(shape.padded_head(), states);
        let (mut tiles, mut tiles_of) = (SegmentTiles::NONE, None);
        let (mut pass, mut queries_of) = (Queries::NONE, None);
        for (index, block) in order.walk(segments.len(), queries.div_ceil(MAX_QUERIES)) {
            if tiles_of != Some(index) {
                self.find_tiles(unit, segments.start + index, &mut tiles);
                tiles_of = Some(index);
            }
            if queries_of != Some(block) {
                self.find_queries(unit, block * MAX_QUERIES, &mut pass);
                queries_of = Some(block);
            }
            for (seen, row) in pass.seen.iter_mut().zip(pass.rows).take(pass.count) {
                *seen = unit.row_sees(shape, row, segments.start + index);
            }
            // The first block prefetches a segment for the others.
            self.pass(&tiles, &pass, block == 0, scratch.scratch(order.slot(index)));
            let block = block * MAX_QUERIES..block * MAX_QUERIES + pass.count;
            for index in order.due(index, segments.len()) {
                let segment = segments.start + index;
                let seeing = unit.queries_seeing(shape, segment, block.clone());
                let partials =
                    scratch.partials(order.slot(index), seeing.start - block.start..seeing.end - block.start);
                if is_split {
                    let first = unit.first_partial + (segment - unit.segments.start) * queries;
                    for (query, partial) in seeing.zip(partials.chunks_exact(stride)) {
                        store(first + query, partial);
                    }
                } else {
                    let states = &mut states[seeing.start * stride..seeing.end * stride];
                    dispatch(self.isa, Merge { padded_head: shape.padded_head(), states, partials });
                }
            }
        }
        if !is_split {
            for (row, states) in states.chunks_exact_mut(group * stride).enumerate() {
                self.finish(unit, unit.first_row + row, states, out, store);
            }
        }
    }

    /// Finds the queries of a block.
    fn find_queries(&self, unit: &Unit<'_>, first: usize, found: &mut Queries<'a>) {
        let group = self.shape.group();
        found.count = (unit.rows * group - first).min(MAX_QUERIES);
        let (mut row, mut head) = (first / group, first % group);
        for (q, its_row) in found.q.iter_mut().zip(&mut found.rows).take(found.count) {
            *q = self.query(unit.first_row + row, unit.kv_head * group + head);
            *its_row = row;
            head += 1;
            if head == group {
                (row, head) = (row + 1, 0);
            }
        }
    }

    /// Runs the queries of a block over a segment.
    fn pass(&self, tiles: &SegmentTiles<'_>, queries: &Queries<'_>, prefetch: bool, scratch: PassScratch<'_>) {
        let shape = &self.shape;
        match self.layout.geometry().dtype {
            KvDType::F32 => {
                dispatch(self.isa, Pass { shape, tiles, queries, prefetch, scratch, element: PhantomData::<F32> });
            }
            KvDType::F16 => {
                dispatch(self.isa, Pass { shape, tiles, queries, prefetch, scratch, element: PhantomData::<F16> });
            }
            KvDType::BF16 => {
                dispatch(self.isa, Pass { shape, tiles, queries, prefetch, scratch, element: PhantomData::<BF16> });
            }
            KvDType::I8 => {
                dispatch(self.isa, Pass { shape, tiles, queries, prefetch, scratch, element: PhantomData::<I8> });
            }
        }
    }

    /// Divides a row's weighted values by their sums and stores it.
    fn finish(
        &self,
        unit: &Unit<'_>,
        row: usize,
        states: &mut [f32],
        out: &mut [f32],
        store: &mut dyn FnMut(usize, &[f32]),
    ) {
        let shape = &self.shape;
        let sinks = self.sinks.map(|sinks| &sinks[unit.kv_head * shape.group()..][..shape.group()]);
        dispatch(self.isa, Finish { shape, sinks, states, out });
        store(row * shape.kv_heads + unit.kv_head, out);
    }
}

/// Merges a segment's state into a running one; both are rescaled to the larger of their maximum scores. `rest` is the
/// running `[largest, sum]`, `other` the segment's, `other_values` the segment's values (empty for a sink).
#[inline(always)]
fn values_merge<L: SimdVector>(
    l: L,
    values: &mut [f32],
    rest: &mut [f32],
    other_values: Option<&[f32]>,
    other: [f32; 2],
) {
    let largest = if other[0] > rest[0] { other[0] } else { rest[0] };
    let mut differences = [0.0; 16];
    differences[0] = rest[0] - largest;
    differences[1] = other[0] - largest;
    let mut factors = [0.0; 16];
    l.store(exp(l, l.load(&differences)), &mut factors);
    let (keep, take) = (factors[0], factors[1]);
    rest[0] = largest;
    rest[1] = other[1].mul_add(take, rest[1] * keep);
    match other_values {
        Some(other_values) => {
            for (y, x) in values.iter_mut().zip(other_values) {
                *y = x.mul_add(take, *y * keep);
            }
        }
        None => {
            for y in values {
                *y *= keep;
            }
        }
    }
}

/// Merges a segment's whole state into a running one.
#[inline(always)]
fn state_merge<L: SimdVector>(l: L, padded_head: usize, state: &mut [f32], partial: &[f32]) {
    let (values, rest) = state.split_at_mut(padded_head);
    let (other_values, other) = partial.split_at(padded_head);
    values_merge(l, values, rest, Some(other_values), [other[0], other[1]]);
}

/// Sets the states before the first segment.
#[inline(always)]
fn state_clear(padded_head: usize, states: &mut [f32]) {
    for state in states.chunks_exact_mut(padded_head + LANES) {
        state.fill(0.0);
        state[padded_head] = f32::NEG_INFINITY;
    }
}

/// SIMD body of one pass: the queries of a block over a segment.
struct Pass<'a, E> {
    shape: &'a AttentionDims,
    tiles: &'a SegmentTiles<'a>,
    queries: &'a Queries<'a>,
    prefetch: bool,
    scratch: PassScratch<'a>,
    element: PhantomData<E>,
}

impl<E: Element> Kernel for Pass<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<L: SimdVector>(mut self, l: L) {
        kernel::segment::<L, E>(l, self.shape, self.tiles, self.queries, self.prefetch, &mut self.scratch);
    }
}

/// SIMD body that merges the partials of several queries after one segment into their running states.
struct Merge<'a> {
    padded_head: usize,
    states: &'a mut [f32],
    partials: &'a [f32],
}

impl Kernel for Merge<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: SimdVector>(self, l: L) {
        let len = self.padded_head + LANES;
        for (state, partial) in self.states.chunks_exact_mut(len).zip(self.partials.chunks_exact(len)) {
            state_merge(l, self.padded_head, state, partial);
        }
    }
}

/// SIMD body that divides a row's weighted values by their sums.
struct Finish<'a> {
    shape: &'a AttentionDims,
    /// Sinks of the row's heads.
    sinks: Option<&'a [f32]>,
    states: &'a mut [f32],
    out: &'a mut [f32],
}

impl Kernel for Finish<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: SimdVector>(self, l: L) {
        let Finish { shape, sinks, states, out } = self;
        for (index, state) in states.chunks_exact_mut(shape.partial_len()).enumerate() {
            let (values, rest) = state.split_at_mut(shape.padded_head());
            if let Some(sinks) = sinks {
                values_merge(l, values, rest, None, [sinks[index], 1.0]);
            }
            let inverse = 1.0 / rest[1];
            for (y, x) in out[index * shape.head_dim..][..shape.head_dim].iter_mut().zip(&*values) {
                *y = x * inverse;
            }
        }
    }
}
