//! Keys and values in the KV pool: the layout, and the only code that writes it.
//!
//! ```text
//! pool    [ block 0 | block 1 | … ]                                 block b at b · bytes_per_block
//! block   [ layer 0 | layer 1 | … ]    layer [ head 0 | head 1 | … ]    head [ K | V ]
//! K       [ tile = token / 16 ][ d ][ 16 tokens ]                   scores of a tile are the lanes
//! V       [ token ][ d ]                                            elements of a head are the lanes
//! int8    [ tile, padded to 64 | 16 × f32 ]                         a tile of K or V, and its tokens' scales
//! ```
//! int8 has one scale for the key and one for the value of each token and head: `scale = amax / 127`, `q = round(x ·
//! 127 / amax)`, ties to even. They are computed once, when the token is written. A row that is not finite has scale
//! NaN, so that every result that depends on it is NaN; a row whose amplitude is below 2^-119 counts as zero and has
//! scale 0.
//!
//! A block belongs to one sequence while it is written, so writes are split by block and two workers never write the
//! same byte. Bytes of a block after its sequence's last token are never read.

#![forbid(unsafe_code)]

use std::ops::Range;

use super::q8_rows::TINY;
use crate::device::cpu::Isa;
use crate::device::cpu::simd::map::padded;
use crate::device::cpu::simd::vector::{Kernel, LANES, SimdVector, dispatch};
use crate::kv_cache::{BlockId, KvDType, KvGeometry};

/// Layout of the KV pool. Offsets are in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuKvLayout {
    geometry: KvGeometry,
    /// First KV head of the rank that uses this view, and its number of heads; a block holds the heads of all ranks.
    first_head: usize,
    heads: usize,
}

impl CpuKvLayout {
    /// Creates the layout of a cache of this geometry. `block_size` must be a multiple of 16.
    pub fn new(geometry: KvGeometry) -> Self {
        debug_assert!(
            geometry.block_size > 0 && geometry.block_size.is_multiple_of(LANES),
            "attention's tiles are 16 tokens"
        );
        Self { geometry, first_head: 0, heads: geometry.kv_heads }
    }

    /// View of the same cache for a rank that has `heads` KV heads starting at `first_head`.
    #[must_use]
    pub const fn with_heads(self, first_head: usize, heads: usize) -> Self {
        Self { first_head, heads, ..self }
    }

    /// Number of KV heads of the rank.
    pub const fn heads(&self) -> usize {
        self.heads
    }

    /// Geometry of the cache.
    pub const fn geometry(&self) -> &KvGeometry {
        &self.geometry
    }

    /// Bytes per block; a multiple of 64.
    pub const fn bytes_per_block(&self) -> usize {
        self.geometry.layers * self.bytes_per_layer()
    }

    /// Bytes per layer of a block.
    pub const fn bytes_per_layer(&self) -> usize {
        self.geometry.kv_heads * 2 * self.part_bytes()
    }

    /// Byte range in the pool of the rank's heads of one layer of a block.
    pub const fn layer_range(&self, block: BlockId, layer: usize) -> Range<usize> {
        let before = layer * self.bytes_per_layer() + self.first_head * self.head_bytes();
        let start = block.0 as usize * self.bytes_per_block() + before;
        start..start + self.heads * self.head_bytes()
    }

    /// Offset of a head's keys, relative to the rank's first head in a layer of a block.
    pub const fn k_offset(&self, kv_head: usize) -> usize {
        kv_head * 2 * self.part_bytes()
    }

    /// Offset of a head's values, relative to the rank's first head in a layer of a block.
    pub const fn v_offset(&self, kv_head: usize) -> usize {
        self.k_offset(kv_head) + self.part_bytes()
    }

    /// Bytes of one tile of keys (or values) of one head. The scales, if any, are the last bytes.
    pub const fn tile_bytes(&self) -> usize {
        self.scales_at() + LANES * self.geometry.dtype.scale_bytes()
    }

    /// Offset of the scales in a tile.
    const fn scales_at(&self) -> usize {
        let elements = LANES * self.geometry.head_dim * self.geometry.dtype.bytes();
        if self.geometry.dtype.scale_bytes() > 0 { elements.next_multiple_of(64) } else { elements }
    }

    /// Bytes of one head (keys and values) of one layer of a block.
    pub const fn head_bytes(&self) -> usize {
        2 * self.part_bytes()
    }

    const fn part_bytes(&self) -> usize {
        self.geometry.block_size / LANES * self.tile_bytes()
    }
}

/// Assignment of a step's rows to sequences; see [`ForwardInput`](crate::runner::ForwardInput).
#[derive(Clone, Copy, Debug)]
pub struct BatchRows<'a> {
    /// Number of rows of each sequence.
    pub q_lens: &'a [u32],
    /// Number of tokens in each sequence's cache, including its rows of this step.
    pub kv_lens: &'a [u32],
    /// Concatenated block tables, `ceil(kv_len / block_size)` blocks per sequence.
    pub tables: &'a [BlockId],
}

/// One sequence of a step.
#[derive(Clone, Copy, Debug)]
pub struct SeqRows<'a> {
    /// Index of its first row in the step.
    pub first_row: usize,
    /// Number of its rows.
    pub rows: usize,
    /// Position of its first row.
    pub first_position: usize,
    /// Its block table.
    pub table: &'a [BlockId],
}

impl<'a> BatchRows<'a> {
    /// Iterates over the sequences in order.
    pub fn sequences(self, block_size: usize) -> impl Iterator<Item = SeqRows<'a>> {
        let (mut row, mut entry) = (0, 0);
        self.q_lens.iter().zip(self.kv_lens).map(move |(q_len, kv_len)| {
            let (rows, kv_len) = (*q_len as usize, *kv_len as usize);
            let blocks = kv_len.div_ceil(block_size);
            let seq = SeqRows {
                first_row: row,
                rows,
                first_position: kv_len - rows,
                table: &self.tables[entry..entry + blocks],
            };
            row += rows;
            entry += blocks;
            seq
        })
    }

    /// Number of rows of the whole step.
    pub fn total(self) -> usize {
        self.q_lens.iter().map(|q| *q as usize).sum()
    }
}

/// Rows of one sequence in one block: the unit in which keys and values are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvWrite {
    /// The block.
    pub block: BlockId,
    /// First row of the step to write.
    pub first_row: usize,
    /// Slot of that row in the block.
    pub first_slot: usize,
    /// Number of rows to write.
    pub rows: usize,
}

/// Iterates over the writes of worker `worker` of `workers`. Together the workers cover every row once, and each block
/// belongs to one worker.
pub fn kv_writes(
    rows: BatchRows<'_>,
    block_size: usize,
    worker: usize,
    workers: usize,
) -> impl Iterator<Item = KvWrite> + '_ {
    let total = rows.total();
    rows.sequences(block_size)
        .flat_map(move |seq| {
            let first_block = seq.first_position / block_size;
            let end = seq.first_position + seq.rows;
            (first_block..end.div_ceil(block_size)).map(move |index| {
                let start = seq.first_position.max(index * block_size);
                KvWrite {
                    block: seq.table[index],
                    first_row: seq.first_row + (start - seq.first_position),
                    first_slot: start - index * block_size,
                    rows: end.min((index + 1) * block_size) - start,
                }
            })
        })
        .filter(move |write| write.first_row * workers / total.max(1) == worker)
}

/// Keys and values of a step, as the projections computed them.
#[derive(Clone, Copy, Debug)]
pub struct KvRows<'a> {
    /// Keys: row `r` starts at `r · k_stride` and holds all KV heads consecutively.
    pub k: &'a [f32],
    /// Number of elements from one row of keys to the next.
    pub k_stride: usize,
    /// Values, in the same form.
    pub v: &'a [f32],
    /// Number of elements from one row of values to the next.
    pub v_stride: usize,
}

/// Rounds the rows of one write to the stored type and stores them in their block, for KV heads `heads` only. `bytes`
/// are those heads' bytes in the pool: `heads.len() · head_bytes` from [`layer_range`](CpuKvLayout::layer_range)` +
/// `[`k_offset`](CpuKvLayout::k_offset). f16 saturates at ±65504; NaN stays NaN, in int8 as the row's scale.
pub fn kv_write(
    isa: Isa,
    layout: &CpuKvLayout,
    write: KvWrite,
    heads: Range<usize>,
    rows: KvRows<'_>,
    bytes: &mut [u8],
) {
    struct Body<'a> {
        layout: &'a CpuKvLayout,
        write: KvWrite,
        heads: Range<usize>,
        rows: KvRows<'a>,
        bytes: &'a mut [u8],
    }
    impl Kernel for Body<'_> {
        type Output = ();
        #[inline(always)]
        fn run<L: SimdVector>(self, l: L) {
            let KvGeometry { head_dim, dtype, .. } = *self.layout.geometry();
            let (tile_bytes, row_bytes) = (self.layout.tile_bytes(), head_dim * dtype.bytes());
            for (head, bytes) in self.heads.zip(self.bytes.chunks_exact_mut(self.layout.head_bytes())) {
                let (keys, values) = bytes.split_at_mut(self.layout.part_bytes());
                for index in 0..self.write.rows {
                    let (row, slot) = (self.write.first_row + index, self.write.first_slot + index);
                    let k = &self.rows.k[row * self.rows.k_stride + head * head_dim..][..head_dim];
                    let v = &self.rows.v[row * self.rows.v_stride + head * head_dim..][..head_dim];
                    let (tile, lane) = (slot / LANES, slot % LANES);
                    let (tile, k_scales) =
                        keys[tile * tile_bytes..][..tile_bytes].split_at_mut(self.layout.scales_at());
                    let tile = &mut tile[..LANES * row_bytes];
                    let (row, v_scales) =
                        values[slot / LANES * tile_bytes..][..tile_bytes].split_at_mut(self.layout.scales_at());
                    let row = &mut row[lane * row_bytes..][..row_bytes];
                    match dtype {
                        KvDType::F32 => {
                            scatter(tile, lane, k, |x| x.map(f32::to_le_bytes));
                            copy(row, v, |x| x.map(f32::to_le_bytes));
                        }
                        KvDType::F16 => {
                            scatter(tile, lane, k, |x| half_bytes(l.to_f16(l.load(x))));
                            copy(row, v, |x| half_bytes(l.to_f16(l.load(x))));
                        }
                        KvDType::BF16 => {
                            scatter(tile, lane, k, |x| half_bytes(l.to_bf16(l.load(x))));
                            copy(row, v, |x| half_bytes(l.to_bf16(l.load(x))));
                        }
                        KvDType::I8 => {
                            let (scale, inverse) = scale_of(k);
                            scatter(tile, lane, k, |x| steps(l, x, inverse));
                            k_scales.as_chunks_mut().0[lane] = scale.to_le_bytes();
                            let (scale, inverse) = scale_of(v);
                            copy(row, v, |x| steps(l, x, inverse));
                            v_scales.as_chunks_mut().0[lane] = scale.to_le_bytes();
                        }
                    }
                }
            }
        }
    }
    debug_assert_eq!(bytes.len(), heads.len() * layout.head_bytes(), "the heads' bytes of one layer of one block");
    dispatch(isa, Body { layout, write, heads, rows, bytes });
}

#[inline(always)]
fn half_bytes(x: [u16; 16]) -> [[u8; 2]; 16] {
    x.map(u16::to_le_bytes)
}

/// Scale of an int8 row and its inverse, which is 0 if all elements are stored as 0.
#[inline(always)]
fn scale_of(row: &[f32]) -> (f32, f32) {
    // Compared as integers, absolute values have the order of the floats, and NaN is above infinity.
    let amax = f32::from_bits(row.iter().fold(0, |most, x| (x.to_bits() & 0x7fff_ffff).max(most)));
    if !amax.is_finite() {
        (f32::NAN, 0.0)
    } else if amax < TINY {
        (0.0, 0.0)
    } else {
        (amax / 127.0, 127.0 / amax)
    }
}

/// Rounds elements to multiples of their row's scale, ties to even.
#[inline(always)]
fn steps<L: SimdVector>(l: L, x: &[f32; 16], inverse: f32) -> [[u8; 1]; 16] {
    // 1.5 · 2^23: adding it leaves the nearest integer in the low bits, in two's complement.
    const ROUNDER: f32 = 12_582_912.0;
    let mut out = [[0]; 16];
    if inverse > 0.0 {
        let mut rounded = [0.0; 16];
        l.store(l.add(l.mul(l.load(x), l.splat(inverse)), l.splat(ROUNDER)), &mut rounded);
        for (byte, rounded) in out.iter_mut().zip(rounded) {
            *byte = [rounded.to_bits().to_le_bytes()[0]];
        }
    }
    out
}

/// Stores a head's keys in lane `lane` of a tile.
#[inline(always)]
fn scatter<const B: usize>(tile: &mut [u8], lane: usize, k: &[f32], store: impl Fn(&[f32; 16]) -> [[u8; B]; 16]) {
    for (chunk, lines) in k.chunks(16).zip(tile.chunks_mut(16 * 16 * B)) {
        let stored = store(&padded(chunk));
        for (element, line) in stored.iter().zip(lines.chunks_exact_mut(16 * B)) {
            line[lane * B..][..B].copy_from_slice(element);
        }
    }
}

/// Stores a head's values in their row.
#[inline(always)]
fn copy<const B: usize>(row: &mut [u8], v: &[f32], store: impl Fn(&[f32; 16]) -> [[u8; B]; 16]) {
    for (chunk, out) in v.chunks(16).zip(row.chunks_mut(16 * B)) {
        let stored = store(&padded(chunk));
        out.copy_from_slice(&stored.as_flattened()[..out.len()]);
    }
}
