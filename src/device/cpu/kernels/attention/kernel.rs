//! Attention of up to six queries over one segment: scores, softmax, weighted values. Written once over [`SimdVector`].
//!
//! Six queries by four tiles are 24 accumulators. Together with four loaded vectors and the broadcast query element
//! they fill the 32 registers of AVX-512, and each key is loaded once for six multiply-adds. The blocking of queries
//! does not change results: every accumulator belongs to one query.

use std::ops::Range;

use super::{AttentionDims, SEGMENT_TOKENS, TILES};
use crate::device::cpu::kernels::exp::{exp, tanh};
use crate::device::cpu::simd::vector::{LANES, SimdVector};

/// Largest number of queries that share a pass over the tiles.
pub(crate) const MAX_QUERIES: usize = 6;

/// Conversion of stored elements to f32 lanes.
pub(crate) trait Element: Copy {
    /// Bytes of 16 stored elements.
    type Chunk: Copy;
    const BYTES: usize;
    /// Whether elements are multiples of their token's scale. A tile then ends with the scales of its 16 tokens.
    const IS_SCALED: bool;
    fn chunks(bytes: &[u8]) -> &[Self::Chunk];
    fn load<L: SimdVector>(l: L, chunk: &Self::Chunk) -> L::F32;
    /// Loads fewer than 16 elements, padded with zeros.
    fn padded(bytes: &[u8]) -> Self::Chunk;
}

macro_rules! element {
    ($name:ident, $bytes:literal, $load:ident, $is_scaled:literal) => {
        #[derive(Clone, Copy)]
        pub(crate) struct $name;

        impl Element for $name {
            type Chunk = [u8; 16 * $bytes];
            const BYTES: usize = $bytes;
            const IS_SCALED: bool = $is_scaled;

            #[inline(always)]
            fn chunks(bytes: &[u8]) -> &[Self::Chunk] {
                bytes.as_chunks().0
            }
            #[inline(always)]
            fn load<L: SimdVector>(l: L, chunk: &Self::Chunk) -> L::F32 {
                l.$load(chunk)
            }
            #[inline(always)]
            fn padded(bytes: &[u8]) -> Self::Chunk {
                let mut chunk = [0; 16 * $bytes];
                chunk[..bytes.len()].copy_from_slice(bytes);
                chunk
            }
        }
    };
}
element!(F32, 4, load_f32_bytes, false);
element!(F16, 2, load_f16_bytes, false);
element!(BF16, 2, load_bf16_bytes, false);
element!(I8, 1, load_i8_bytes, true);

/// Bytes of a tile's scales.
const SCALES: usize = LANES * 4;

/// Loads the scales of a tile's tokens.
#[inline(always)]
fn scales<L: SimdVector>(l: L, tile: &[u8]) -> L::F32 {
    l.load_f32_bytes(tile.last_chunk::<SCALES>().expect("a tile ends with its scales"))
}

/// Number of tiles scored together.
pub(crate) const TOGETHER: usize = 4;

/// Keys and values of a segment of one KV head. Tiles that no query sees may have any content.
pub(crate) struct SegmentTiles<'a> {
    /// Keys of this segment, followed by keys of the next segment's first tiles; those are only prefetched, and empty
    /// if there is no next segment.
    pub k: [&'a [u8]; TILES + TOGETHER],
    pub v: [&'a [u8]; TILES],
    /// Byte offset from a tile's keys to its values.
    pub to_values: usize,
}

impl SegmentTiles<'_> {
    pub const NONE: Self = Self { k: [&[]; TILES + TOGETHER], v: [&[]; TILES], to_values: 0 };
}

/// Queries of one pass, and the tokens each one sees, counted from the segment's start.
pub(crate) struct Queries<'a> {
    pub q: [&'a [f32]; MAX_QUERIES],
    /// Row of the unit that each query belongs to.
    pub rows: [usize; MAX_QUERIES],
    pub seen: [(usize, usize); MAX_QUERIES],
    /// Number of queries.
    pub count: usize,
}

impl Queries<'_> {
    pub const NONE: Self =
        Self { q: [&[]; MAX_QUERIES], rows: [0; MAX_QUERIES], seen: [(0, 0); MAX_QUERIES], count: 0 };
}

/// Scores of one pass, and the partials of one or more passes.
#[derive(Debug)]
pub(crate) struct BlockScratch {
    scores: Box<[[f32; SEGMENT_TOKENS]; MAX_QUERIES]>,
    partials: Vec<f32>,
    stride: usize,
}

/// Scratch of one pass.
pub(crate) struct PassScratch<'a> {
    scores: &'a mut [[f32; SEGMENT_TOKENS]; MAX_QUERIES],
    partials: &'a mut [f32],
    stride: usize,
}

impl BlockScratch {
    /// Allocates scratch for the partials of `passes` passes.
    pub fn new(partial_len: usize, passes: usize) -> Self {
        Self {
            scores: Box::new([[0.0; SEGMENT_TOKENS]; MAX_QUERIES]),
            partials: vec![0.0; passes * MAX_QUERIES * partial_len],
            stride: partial_len,
        }
    }

    pub fn scratch(&mut self, pass: usize) -> PassScratch<'_> {
        let len = MAX_QUERIES * self.stride;
        PassScratch { scores: &mut self.scores, partials: &mut self.partials[pass * len..][..len], stride: self.stride }
    }

    /// Partial results of the queries `of` in a pass: weighted values, then largest score and sum.
    pub fn partials(&self, pass: usize, of: Range<usize>) -> &[f32] {
        &self.partials[pass * MAX_QUERIES * self.stride..][of.start * self.stride..of.end * self.stride]
    }
}

/// Runs the queries over a segment.
#[inline(always)]
pub(crate) fn segment<L: SimdVector, E: Element>(
    l: L,
    shape: &AttentionDims,
    tiles: &SegmentTiles<'_>,
    queries: &Queries<'_>,
    prefetch: bool,
    scratch: &mut PassScratch<'_>,
) {
    if !L::HAS_32_REGISTERS {
        let mut query = 0;
        // Two queries by two tiles: 8 accumulators, 4 keys, 2 broadcasts.
        while !L::HOLDS_FOUR_ACCUMULATORS && query + 2 <= queries.count {
            pass::<L, E, 2, 2>(l, shape, tiles, queries, query, false, scratch);
            query += 2;
        }
        while query < queries.count {
            if L::HOLDS_FOUR_ACCUMULATORS {
                pass::<L, E, 1, TOGETHER>(l, shape, tiles, queries, query, false, scratch);
            } else {
                pass::<L, E, 1, 2>(l, shape, tiles, queries, query, false, scratch);
            }
            query += 1;
        }
        return;
    }
    match queries.count {
        1 => pass::<L, E, 1, TOGETHER>(l, shape, tiles, queries, 0, prefetch, scratch),
        2 => pass::<L, E, 2, TOGETHER>(l, shape, tiles, queries, 0, prefetch, scratch),
        3 => pass::<L, E, 3, TOGETHER>(l, shape, tiles, queries, 0, prefetch, scratch),
        4 => pass::<L, E, 4, TOGETHER>(l, shape, tiles, queries, 0, prefetch, scratch),
        5 => pass::<L, E, 5, TOGETHER>(l, shape, tiles, queries, 0, prefetch, scratch),
        _ => pass::<L, E, 6, TOGETHER>(l, shape, tiles, queries, 0, prefetch, scratch),
    }
}

/// Runs one pass over the tiles for `Q` queries starting at `query`, `T` tiles at a time.
#[inline(always)]
fn pass<L: SimdVector, E: Element, const Q: usize, const T: usize>(
    l: L,
    shape: &AttentionDims,
    tiles: &SegmentTiles<'_>,
    queries: &Queries<'_>,
    query: usize,
    prefetch: bool,
    scratch: &mut PassScratch<'_>,
) {
    let q: [&[f32]; Q] = std::array::from_fn(|i| queries.q[query + i]);
    let seen: [(usize, usize); Q] = std::array::from_fn(|i| queries.seen[query + i]);
    let first = seen.iter().map(|s| s.0).min().unwrap_or(0) / LANES;
    let last = seen.iter().map(|s| s.1).max().unwrap_or(0).div_ceil(LANES);
    let scores: &mut [[f32; SEGMENT_TOKENS]; Q] =
        scratch.scores.first_chunk_mut::<Q>().expect("a pass has at most MAX_QUERIES queries");

    let mut largest = [l.splat(f32::NEG_INFINITY); Q];
    let mut tile = first;
    while tile < last {
        if tile + T <= last {
            let k: [&[u8]; T] = std::array::from_fn(|t| tiles.k[tile + t]);
            let ahead = prefetch.then(|| {
                let ahead = std::array::from_fn(|t| {
                    let next = tiles.k[tile + T + t];
                    if next.is_empty() { k[t] } else { next }
                });
                (ahead, tiles.to_values)
            });
            score_tiles::<L, E, Q, T>(l, shape, &q, &seen, &k, ahead, tile, scores, &mut largest);
            tile += T;
        } else {
            score_tiles::<L, E, Q, 1>(l, shape, &q, &seen, &[tiles.k[tile]], None, tile, scores, &mut largest);
            tile += 1;
        }
    }

    let stride = scratch.stride;
    let partials = &mut scratch.partials[query * stride..];
    let padded_head = stride - LANES;
    for i in 0..Q {
        let (lo, hi) = seen[i];
        if lo >= hi {
            continue;
        }
        let largest = l.max_lane(largest[i]);
        let subtracted = l.splat(largest);
        let mut sums = l.splat(0.0);
        let seen_tiles = lo / LANES..hi.div_ceil(LANES);
        let chunks = &mut scores[i].as_chunks_mut::<LANES>().0[seen_tiles.clone()];
        for (chunk, values) in chunks.iter_mut().zip(&tiles.v[seen_tiles]) {
            let p = exp(l, l.sub(l.load(chunk), subtracted));
            sums = l.add(sums, p);
            // Stale scales may turn masked lanes into any value, but masked lanes are not summed.
            l.store(if E::IS_SCALED { l.mul(p, scales(l, values)) } else { p }, chunk);
        }
        let partial = &mut partials[i * stride..][..stride];
        partial[..padded_head].fill(0.0);
        partial[padded_head] = largest;
        partial[padded_head + 1] = l.sum(sums);
    }

    // Tokens that all queries see are processed in one loop; before and after them each query is processed separately.
    // Every query still adds its tokens in order.
    let common = (seen.iter().map(|s| s.0).max().unwrap_or(0), seen.iter().map(|s| s.1).min().unwrap_or(0));
    if Q == 1 || common.0 >= common.1 {
        for i in 0..Q {
            weigh_one::<L, E>(l, shape.head_dim, tiles, &scores[i], seen[i], &mut partials[i * stride..]);
        }
        return;
    }
    for i in 0..Q {
        let before = (seen[i].0, common.0);
        weigh_one::<L, E>(l, shape.head_dim, tiles, &scores[i], before, &mut partials[i * stride..]);
    }
    weigh::<L, E, Q>(l, shape.head_dim, tiles, scores, common, partials, stride);
    for i in 0..Q {
        let behind = (common.1, seen[i].1);
        weigh_one::<L, E>(l, shape.head_dim, tiles, &scores[i], behind, &mut partials[i * stride..]);
    }
}

/// Scores `Q` queries against `T` tiles; masked lanes are minus infinity. Lines of the tiles `ahead` are prefetched
/// between the multiply-adds: a decode step is bound by memory, and tiles are too short for the hardware prefetcher.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
fn score_tiles<L: SimdVector, E: Element, const Q: usize, const T: usize>(
    l: L,
    shape: &AttentionDims,
    q: &[&[f32]; Q],
    seen: &[(usize, usize); Q],
    k: &[&[u8]; T],
    ahead: Option<([&[u8]; T], usize)>,
    first_tile: usize,
    scores: &mut [[f32; SEGMENT_TOKENS]; Q],
    largest: &mut [L::F32; Q],
) {
    let head_dim = shape.head_dim;
    let mut sums = [[l.splat(0.0); T]; Q];
    // Process a T-th of the head at a time and prefetch one tile in each: more live pointers would not fit in
    // registers.
    for part in 0..T {
        let elements = part * head_dim / T..(part + 1) * head_dim / T;
        let len = elements.len();
        let q: [&[f32]; Q] = std::array::from_fn(|i| &q[i][elements.clone()][..len]);
        let k: [&[E::Chunk]; T] = std::array::from_fn(|t| &E::chunks(k[t])[elements.clone()][..len]);
        for d in 0..len {
            if let Some((ahead, to_values)) = ahead {
                for line in d * E::BYTES..(d + 1) * E::BYTES {
                    l.prefetch(ahead[part], line * 64);
                    l.prefetch(ahead[part], line * 64 + to_values);
                }
            }
            let keys: [L::F32; T] = std::array::from_fn(|t| E::load(l, &k[t][d]));
            for i in 0..Q {
                let x = l.splat(q[i][d]);
                for t in 0..T {
                    sums[i][t] = l.fma(x, keys[t], sums[i][t]);
                }
            }
        }
        if E::IS_SCALED
            && let Some((ahead, to_values)) = ahead
        {
            let scales = ahead[part].len() - SCALES;
            l.prefetch(ahead[part], scales);
            l.prefetch(ahead[part], scales + to_values);
        }
    }
    let scale = l.splat(shape.scale);
    for i in 0..Q {
        for (t, sum) in sums[i].iter().enumerate() {
            let tile = first_tile + t;
            let sum = if E::IS_SCALED { l.mul(*sum, scales(l, k[t])) } else { *sum };
            let mut score = l.mul(sum, scale);
            if let Some(cap) = shape.softcap {
                score = l.mul(l.splat(cap), tanh(l, l.mul(score, l.splat(1.0 / cap))));
            }
            let start = tile * LANES;
            let (lo, hi) =
                (seen[i].0.clamp(start, start + LANES) - start, seen[i].1.clamp(start, start + LANES) - start);
            if lo > 0 || hi < LANES {
                score = l.keep(score, lo, hi, f32::NEG_INFINITY);
            }
            largest[i] = l.max(score, largest[i]);
            l.store(score, &mut scores[i].as_chunks_mut::<LANES>().0[tile]);
        }
    }
}

#[inline(always)]
fn weigh_one<L: SimdVector, E: Element>(
    l: L,
    head_dim: usize,
    tiles: &SegmentTiles<'_>,
    weights: &[f32; SEGMENT_TOKENS],
    tokens: (usize, usize),
    partial: &mut [f32],
) {
    if tokens.0 < tokens.1 {
        weigh::<L, E, 1>(l, head_dim, tiles, std::array::from_ref(weights), tokens, partial, 0);
    }
}

/// Adds the weighted values of `tokens` to the first elements of `Q` partials that are `stride` elements apart.
#[inline(always)]
fn weigh<L: SimdVector, E: Element, const Q: usize>(
    l: L,
    head_dim: usize,
    tiles: &SegmentTiles<'_>,
    weights: &[[f32; SEGMENT_TOKENS]; Q],
    tokens: (usize, usize),
    partials: &mut [f32],
    stride: usize,
) {
    let vectors = head_dim / LANES;
    let mut vector = 0;
    while L::HAS_32_REGISTERS && vector + 4 <= vectors {
        weigh_columns::<L, E, Q, 4>(l, head_dim, vector, tiles, weights, tokens, partials, stride);
        vector += 4;
    }
    while vector + 2 <= vectors {
        weigh_columns::<L, E, Q, 2>(l, head_dim, vector, tiles, weights, tokens, partials, stride);
        vector += 2;
    }
    while vector < head_dim.div_ceil(LANES) {
        weigh_columns::<L, E, Q, 1>(l, head_dim, vector, tiles, weights, tokens, partials, stride);
        vector += 1;
    }
}

/// Adds the weighted values of `D` vectors of the head, starting at vector `vector`. The last vector of a head may be
/// partial if `D` is 1.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
fn weigh_columns<L: SimdVector, E: Element, const Q: usize, const D: usize>(
    l: L,
    head_dim: usize,
    vector: usize,
    tiles: &SegmentTiles<'_>,
    weights: &[[f32; SEGMENT_TOKENS]; Q],
    tokens: (usize, usize),
    partials: &mut [f32],
    stride: usize,
) {
    let from = |i: usize| i * stride + vector * LANES;
    let mut sums: [[L::F32; D]; Q] = std::array::from_fn(|i| {
        let chunks = partials[from(i)..][..D * LANES].as_chunks::<LANES>().0;
        std::array::from_fn(|d| l.load(&chunks[d]))
    });
    let row_bytes = head_dim * E::BYTES;
    let column = vector * LANES * E::BYTES;
    let width = (D * LANES * E::BYTES).min(row_bytes - column);
    let is_partial = width < D * LANES * E::BYTES;
    for tile in tokens.0 / LANES..tokens.1.div_ceil(LANES) {
        let start = tile * LANES;
        let (lo, hi) = (tokens.0.max(start) - start, tokens.1.min(start + LANES) - start);
        let rows = tiles.v[tile];
        for t in lo..hi {
            let bytes = &rows[t * row_bytes + column..][..width];
            let values: [L::F32; D] = if is_partial {
                [E::load(l, &E::padded(bytes)); D]
            } else {
                let chunks = E::chunks(bytes);
                std::array::from_fn(|d| E::load(l, &chunks[d]))
            };
            for i in 0..Q {
                let weight = l.splat(weights[i][(start + t) % SEGMENT_TOKENS]);
                for d in 0..D {
                    sums[i][d] = l.fma(weight, values[d], sums[i][d]);
                }
            }
        }
    }
    for (i, sums) in sums.iter().enumerate() {
        let chunks = partials[from(i)..][..D * LANES].as_chunks_mut::<LANES>().0;
        for d in 0..D {
            l.store(sums[d], &mut chunks[d]);
        }
    }
}
