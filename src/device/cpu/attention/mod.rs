//! Paged causal attention, one definition for every length, batch, chunk and thread count.
//!
//! A row at position `p` sees tokens `[max(0, p + 1 − window), p]`. Tokens are cut into segments of [`SEGMENT_TOKENS`] and
//! tiles of 16 at absolute positions. In a segment: scores `q·k` summed over the head in index order, times the scale,
//! capped; the largest; `exp(score − largest)`; their sum, 16 lanes over the tiles in order and then by halving; values
//! weighted and summed token by token. Segments are merged strictly in order. Nothing else is ever added, so a row's bits
//! depend on its own sequence only. Hidden tokens are masked lane by lane and their values are never multiplied: what
//! stale memory holds, NaN included, cannot show.
//!
//! In which order segments and blocks of queries are walked ([`AttentionSchedules`]) changes scratch and memory traffic, not
//! one addition: every order runs the same passes and the same merges.
//!
//! The driver only decides who does what: [`Schedule::plan`] cuts the step, [`Attention::attend`] runs one member's share and
//! hands finished pieces to the caller, and when a step has too few rows and heads for the team, segments go to different
//! members and [`Attention::merge`] joins them after a barrier.

#![forbid(unsafe_code)]

mod kernel;
mod order;
mod schedule;

use std::ops::Range;

use super::Isa;
use super::exp::exp;
use super::kv::{KvLayout, Rows};
use super::simd::lanes::{Kernel, LANES, Lanes, dispatch};
use crate::kv_cache::KvDType;
use kernel::{BF16, Element, F16, F32, MAX_QUERIES, SegmentTiles, TOGETHER};
pub use order::{AttentionSchedules, LoopOrder};
pub use schedule::Schedule;
use schedule::Unit;

/// Tokens of a segment. Part of the definition: another value gives other bits. 256 tokens keep the scores of six
/// queries in 6 KiB and make the merge one step in 256.
pub const SEGMENT_TOKENS: usize = 256;
const TILES: usize = SEGMENT_TOKENS / LANES;

/// Segments that `tokens` in a row touch at most, wherever they start.
const fn segments_touched(tokens: usize) -> usize {
    tokens.saturating_sub(1).div_ceil(SEGMENT_TOKENS) + 1
}

/// What one attention layer computes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape {
    /// Query heads, a multiple of `kv_heads`.
    pub heads: usize,
    /// KV heads.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Factor of `q·k`, usually `1 / √head_dim`.
    pub scale: f32,
    /// Tokens a row sees at most, itself included.
    pub window: Option<u32>,
    /// `cap · tanh(score / cap)`.
    pub softcap: Option<f32>,
    /// Loop orders by visible length; blocked at every length if there are none. Not part of what is computed.
    pub schedules: Option<AttentionSchedules>,
}

impl AttentionShape {
    /// Query heads that share a KV head.
    pub const fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Elements of a head rounded up to whole vectors.
    const fn padded_head(&self) -> usize {
        self.head_dim.next_multiple_of(LANES)
    }

    /// Floats of one output piece: one row, all query heads of one KV head.
    pub const fn piece_len(&self) -> usize {
        self.group() * self.head_dim
    }

    /// Floats of one partial, the state of one query after one segment: weighted values, then largest score and sum.
    pub const fn partial_len(&self) -> usize {
        self.padded_head() + LANES
    }

    /// Partials that any step of at most `max_kv_tokens` a sequence can need with a team of `members`.
    pub const fn max_partials(&self, members: usize, max_kv_tokens: usize) -> usize {
        // Steps of twice as many pieces as members are not split.
        2 * members * max_kv_tokens.div_ceil(SEGMENT_TOKENS) * self.group()
    }

    /// The order of a unit whose longest row sees `tokens`.
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
    /// What is computed.
    pub shape: AttentionShape,
    /// Layout of the pool.
    pub layout: KvLayout,
    /// Layer within the pool.
    pub layer: usize,
    /// The pool; the step's own keys and values are already written.
    pub pool: &'a [u8],
    /// The step.
    pub rows: Rows<'a>,
    /// Queries: row `r` at `r · q_stride`, all heads one after the other.
    pub q: &'a [f32],
    /// Elements from one row of queries to the next.
    pub q_stride: usize,
    /// One score a head that takes part in the sum without a value (attention sinks).
    pub sinks: Option<&'a [f32]>,
}

/// Room that one member needs. Made once, at the model's shape; layers may differ in their window.
#[derive(Debug)]
pub struct AttentionScratch {
    block: kernel::BlockScratch,
    /// Running state of the queries of an item, [`AttentionShape::partial_len`] each.
    state: Vec<f32>,
    /// One row's output.
    out: Vec<f32>,
}

impl AttentionScratch {
    /// Room for layers of this shape.
    pub fn new(shape: &AttentionShape) -> Self {
        let queries = schedule::ROWS_PER_UNIT * shape.group();
        let segments_kept = shape.schedules.map_or(1, |schedules| schedules.segments_kept());
        Self {
            block: kernel::BlockScratch::new(shape.partial_len(), segments_kept),
            state: vec![0.0; queries * shape.partial_len()],
            out: vec![0.0; shape.piece_len()],
        }
    }
}

impl Attention<'_> {
    /// Runs what `schedule` gives `member`. `store` gets each finished piece once, with its index: outputs (piece
    /// `row · kv_heads + kv_head` of [`AttentionShape::piece_len`] floats, so that pieces in order are the output matrix
    /// `rows × heads × head_dim`), or partials of [`AttentionShape::partial_len`] floats if [`Schedule::needs_merge`].
    /// Indices are within the member's part of [`Schedule::bounds`].
    pub fn attend(
        &self,
        schedule: &Schedule,
        member: usize,
        scratch: &mut AttentionScratch,
        store: &mut dyn FnMut(usize, &[f32]),
    ) {
        schedule.for_member(
            &self.shape,
            self.rows,
            self.layout.geometry().block_size,
            member,
            &mut |unit, segments| {
                let order = self.shape.loop_order(unit.longest(&self.shape));
                let is_split = schedule.needs_merge();
                let body = Item { attention: self, unit, segments, order, scratch, store, is_split };
                match self.layout.geometry().dtype {
                    KvDType::F32 => dispatch(self.isa, Typed(body, F32)),
                    KvDType::F16 => dispatch(self.isa, Typed(body, F16)),
                    KvDType::BF16 => dispatch(self.isa, Typed(body, BF16)),
                }
            },
        );
    }

    /// Joins the partials of all members into outputs, after a barrier. Does nothing unless [`Schedule::needs_merge`].
    /// Indices are within the member's part of [`Schedule::merge_bounds`].
    pub fn merge(
        &self,
        schedule: &Schedule,
        member: usize,
        partials: &[f32],
        scratch: &mut AttentionScratch,
        store: &mut dyn FnMut(usize, &[f32]),
    ) {
        schedule.for_merge(&self.shape, self.rows, self.layout.geometry().block_size, member, &mut |unit| {
            dispatch(self.isa, Merge { attention: self, unit, partials, scratch, store });
        });
    }

    fn query(&self, row: usize, head: usize) -> &[f32] {
        &self.q[row * self.q_stride + head * self.shape.head_dim..][..self.shape.head_dim]
    }

    /// Tiles `tiles` of segment `segment` of a sequence.
    fn tiles(&self, unit: &Unit<'_>, segment: usize, tiles: Range<usize>) -> SegmentTiles<'_> {
        let layout = &self.layout;
        let block_size = layout.geometry().block_size;
        let to_values = layout.v_offset(0) - layout.k_offset(0);
        let mut found = SegmentTiles { to_values, ..SegmentTiles::NONE };
        for tile in tiles.start..TILES + TOGETHER {
            let token = segment * SEGMENT_TOKENS + tile * LANES;
            let Some(block) = unit.seq.table.get(token / block_size) else { break };
            let layer = &self.pool[layout.layer_range(*block, self.layer)];
            let skipped = token % block_size / LANES * layout.tile_bytes();
            found.k[tile] = &layer[layout.k_offset(unit.kv_head) + skipped..][..layout.tile_bytes()];
            if tiles.contains(&tile) {
                found.v[tile] = &layer[layout.v_offset(unit.kv_head) + skipped..][..layout.tile_bytes()];
            }
        }
        found
    }

    /// Divides a row's sums and hands it over.
    #[inline(always)]
    fn finish<L: Lanes>(
        &self,
        l: L,
        unit: &Unit<'_>,
        row: usize,
        states: &mut [f32],
        out: &mut [f32],
        store: &mut dyn FnMut(usize, &[f32]),
    ) {
        let shape = &self.shape;
        let first_head = unit.kv_head * shape.group();
        for (index, state) in states.chunks_exact_mut(shape.partial_len()).enumerate() {
            let (values, rest) = state.split_at_mut(shape.padded_head());
            if let Some(sinks) = self.sinks {
                let sink = [sinks[first_head + index], 1.0];
                values_merge(l, values, rest, None, sink);
            }
            let inverse = 1.0 / rest[1];
            for (y, x) in out[index * shape.head_dim..][..shape.head_dim].iter_mut().zip(&*values) {
                *y = x * inverse;
            }
        }
        store(row * shape.kv_heads + unit.kv_head, out);
    }
}

/// Joins a segment's state into a running one: both rescaled to the larger of their largest scores.
/// `rest` is the running `[largest, sum]`, `other` the segment's, `other_values` its values (none for a sink).
#[inline(always)]
fn values_merge<L: Lanes>(l: L, values: &mut [f32], rest: &mut [f32], other_values: Option<&[f32]>, other: [f32; 2]) {
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

/// Joins a segment's whole state into a running one.
#[inline(always)]
fn state_merge<L: Lanes>(l: L, padded_head: usize, state: &mut [f32], partial: &[f32]) {
    let (values, rest) = state.split_at_mut(padded_head);
    let (other_values, other) = partial.split_at(padded_head);
    values_merge(l, values, rest, Some(other_values), [other[0], other[1]]);
}

/// The state before the first segment.
#[inline(always)]
fn state_clear(padded_head: usize, states: &mut [f32]) {
    for state in states.chunks_exact_mut(padded_head + LANES) {
        state.fill(0.0);
        state[padded_head] = f32::NEG_INFINITY;
    }
}

struct Item<'a, 'b, 'c> {
    attention: &'a Attention<'b>,
    unit: &'a Unit<'b>,
    segments: Range<usize>,
    order: LoopOrder,
    scratch: &'a mut AttentionScratch,
    store: &'a mut (dyn FnMut(usize, &[f32]) + 'c),
    is_split: bool,
}

struct Typed<'a, 'b, 'c, E>(Item<'a, 'b, 'c>, E);

impl<E: Element> Kernel for Typed<'_, '_, '_, E> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let Item { attention, unit, segments, order, scratch, store, is_split } = self.0;
        let shape = &attention.shape;
        let (group, padded, stride) = (shape.group(), shape.padded_head(), shape.partial_len());
        let queries = unit.rows * group;
        let states = &mut scratch.state[..queries * stride];
        if !is_split {
            state_clear(padded, states);
        }
        let first_head = unit.kv_head * group;
        let mut tiles = SegmentTiles::NONE;
        let mut tiles_of = None;
        // One call of the kernel serves all orders: it is most of the code, and compiled for each path and type.
        for (index, block) in order.walk(segments.len(), queries.div_ceil(MAX_QUERIES)) {
            let segment = segments.start + index;
            if tiles_of != Some(segment) {
                let seen = unit.visible(shape, segment);
                tiles = attention.tiles(unit, segment, seen.start / LANES..seen.end.div_ceil(LANES));
                tiles_of = Some(segment);
            }
            let first = block * MAX_QUERIES;
            let count = (queries - first).min(MAX_QUERIES);
            let mut pass = kernel::Queries { q: [&[]; MAX_QUERIES], seen: [(0, 0); MAX_QUERIES], count };
            for i in 0..count {
                let (row, head) = ((first + i) / group, (first + i) % group);
                pass.q[i] = attention.query(unit.first_row + row, first_head + head);
                pass.seen[i] = unit.row_sees(shape, row, segment);
            }
            // The first block brings a segment in for the others.
            let prefetch = block == 0;
            kernel::segment::<L, E>(l, shape, &tiles, &pass, prefetch, &mut scratch.block.room(order.room(index)));
            for index in order.due(index, segments.len()) {
                let segment = segments.start + index;
                for i in 0..count {
                    let seen = unit.row_sees(shape, (first + i) / group, segment);
                    if seen.0 >= seen.1 {
                        continue;
                    }
                    let partial = scratch.block.partial(order.room(index), i);
                    if is_split {
                        store(unit.first_partial + (segment - unit.segments.start) * queries + first + i, partial);
                    } else {
                        state_merge(l, padded, &mut states[(first + i) * stride..][..stride], partial);
                    }
                }
            }
        }
        if !is_split {
            for (row, states) in states.chunks_exact_mut(group * stride).enumerate() {
                attention.finish(l, unit, unit.first_row + row, states, &mut scratch.out, store);
            }
        }
    }
}

struct Merge<'a, 'b, 'c> {
    attention: &'a Attention<'b>,
    unit: &'a Unit<'b>,
    partials: &'a [f32],
    scratch: &'a mut AttentionScratch,
    store: &'a mut (dyn FnMut(usize, &[f32]) + 'c),
}

impl Kernel for Merge<'_, '_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let shape = &self.attention.shape;
        let unit = self.unit;
        debug_assert_eq!(unit.rows, 1, "only single rows are split");
        let len = shape.group() * shape.partial_len();
        let states = &mut self.scratch.state[..len];
        state_clear(shape.padded_head(), states);
        let first = unit.first_partial * shape.partial_len();
        for partials in self.partials[first..][..unit.segments.len() * len].chunks_exact(len) {
            for (state, partial) in
                states.chunks_exact_mut(shape.partial_len()).zip(partials.chunks_exact(shape.partial_len()))
            {
                state_merge(l, shape.padded_head(), state, partial);
            }
        }
        self.attention.finish(l, unit, unit.first_row, states, &mut self.scratch.out, self.store);
    }
}
