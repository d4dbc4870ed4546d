//! Weights in the layout that the kernels read: panels of 16 output columns, stored in K order.
//!
//! Prefill and decode use the same packed weights. Packing is lossless: quants, scales and minima keep the values of
//! the file and only change places, and [`PackedMatrix::row_f32`] returns exactly the values that dequantizing the
//! source gives. An incomplete last panel is filled with zero columns.
//!
//! ```text
//! float      panel = k × [16 columns]; bf16: k / 2 × [16 columns][2], a zero after the last of an odd K
//! quantized  panel = consecutive units; a unit is 32 k (256 for K-quants):
//!              quants      one group per 32 k: words of 16 columns × 4 consecutive k bytes
//!                8 bit     8 words of q + 128
//!                4 bit     4 words, low nibbles k = 4i.., high nibbles k = 16 + 4i..   (i = word)
//!                5 bit     4 words as above + 1 word, bit g of a byte = high bit of k = 4g + byte % 4
//!                6 bit     4 words as above + 2 words, two bits for each g % 4, word g / 4
//!              sub-scales  K-quants: [8][16 columns] (Q6_K [8][2][16]), then minima in the same layout
//!              scales      16 columns f16, then minima in the same layout
//! ```

#![forbid(unsafe_code)]

use crate::device::DeviceError;
use crate::device::cpu::kernels::q8_rows::BLOCK;
use crate::device::cpu::memory::{AlignedBytes, Partition, Slab};
use crate::device::cpu::thread_pool::ThreadPool;
use crate::weights::DType;
use half::{bf16, f16};

/// Number of output columns in a panel: the f32 lanes of an AVX-512 register.
pub const PANEL: usize = 16;

/// Layout of a unit of a quantized panel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scheme {
    /// Number of 32-blocks in a unit: 1, or 8 if they share scales.
    pub(crate) subs: usize,
    /// Bits per quant.
    pub(crate) bits: usize,
    /// Value subtracted from a stored quant.
    pub(crate) offset: i16,
    /// Number of integer scales per 32-block and column: 0, 1, or 2 (one per 16 k).
    pub(crate) sub_scales: usize,
    /// Whether the format has minima (integers if the scales are integers).
    pub(crate) minima: bool,
}

impl Scheme {
    pub(crate) const fn for_dtype(dtype: DType) -> Option<Self> {
        let (subs, bits, offset, sub_scales, minima) = match dtype {
            DType::F32 | DType::F16 | DType::BF16 => return None,
            DType::Q8_0 => (1, 8, 128, 0, false),
            DType::Q4_0 => (1, 4, 8, 0, false),
            DType::Q4_1 => (1, 4, 0, 0, true),
            DType::Q5_0 => (1, 5, 16, 0, false),
            DType::Q5_1 => (1, 5, 0, 0, true),
            DType::Q4_K => (8, 4, 0, 1, true),
            DType::Q5_K => (8, 5, 0, 1, true),
            DType::Q6_K => (8, 6, 32, 2, false),
        };
        Some(Self { subs, bits, offset, sub_scales, minima })
    }

    /// Bytes of the quants of 16 columns × 32 k.
    pub(crate) const fn group_bytes(self) -> usize {
        PANEL * BLOCK * self.bits / 8
    }

    pub(crate) const fn sub_scales_at(self) -> usize {
        self.subs * self.group_bytes()
    }

    pub(crate) const fn sub_minima_at(self) -> usize {
        self.sub_scales_at() + self.subs * self.sub_scales * PANEL
    }

    pub(crate) const fn scales_at(self) -> usize {
        self.sub_minima_at() + if self.minima { self.subs * self.sub_scales * PANEL } else { 0 }
    }

    pub(crate) const fn minima_at(self) -> usize {
        self.scales_at() + 2 * PANEL
    }

    pub(crate) const fn unit_bytes(self) -> usize {
        self.minima_at() + if self.minima { 2 * PANEL } else { 0 }
    }
}

/// 32 weights of one column: `value = scale[k / 16] * q + min`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ColumnBlock {
    /// Quants after subtracting the offset.
    pub(crate) q: [i16; BLOCK],
    pub(crate) scale: [f32; 2],
    pub(crate) min: f32,
}

/// A packed linear weight of `n` output features (columns of the product) and `k` input features.
#[derive(Debug)]
pub struct PackedMatrix {
    dtype: DType,
    n: usize,
    k: usize,
    panel_bytes: usize,
    bytes: AlignedBytes,
}

impl PackedMatrix {
    /// Packs `data`, which holds `n` rows of `k` elements in the file's format. All workers of the thread pool take
    /// part.
    ///
    /// # Errors
    /// [`DeviceError`] if the type is unsupported, the size does not match, or memory is exhausted.
    pub fn pack(threads: &ThreadPool, dtype: DType, n: usize, k: usize, data: &[u8]) -> Result<Self, DeviceError> {
        Self::pack_into(&mut Slab::new(0)?, threads, dtype, n, k, data)
    }

    /// Bytes of all panels; `None` on integer overflow.
    pub fn packed_bytes(dtype: DType, n: usize, k: usize) -> Option<usize> {
        n.div_ceil(PANEL).checked_mul(panel_bytes(dtype, k)?)
    }

    /// Packs into memory of the slab; otherwise as [`pack`](Self::pack).
    pub(crate) fn pack_into(
        slab: &mut Slab,
        threads: &ThreadPool,
        dtype: DType,
        n: usize,
        k: usize,
        data: &[u8],
    ) -> Result<Self, DeviceError> {
        let invalid = |what: String| DeviceError::Invalid { what };
        let row_bytes = dtype.bytes_for(k).filter(|&row_bytes| row_bytes > 0 && n > 0).ok_or_else(|| {
            invalid(format!("a {dtype} weight of {n} × {k}: expected rows of whole blocks, at least one"))
        })?;
        if row_bytes.checked_mul(n) != Some(data.len()) {
            return Err(invalid(format!("a {dtype} weight of {n} × {k}: got {} bytes", data.len())));
        }
        let too_large = || invalid(format!("a {dtype} weight of {n} × {k} overflows the size in bytes"));
        let panel_bytes = panel_bytes(dtype, k).ok_or_else(too_large)?;
        let mut bytes = slab.take(Self::packed_bytes(dtype, n, k).ok_or_else(too_large)?)?;
        let parts = Partition::rows(bytes.as_mut_slice(), panel_bytes, threads.parts(), 1);
        threads.run_parallel(&|worker| {
            let mut tile = parts.claim(worker.index());
            for local in 0..tile.rows() {
                let first = (tile.first() + local) * PANEL;
                let rows = &data[first * row_bytes..(first + PANEL).min(n) * row_bytes];
                pack_panel(dtype, rows, row_bytes, tile.row_mut(local));
            }
        });
        Ok(Self { dtype, n, k, panel_bytes, bytes })
    }

    /// Storage type of the source.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Number of output features.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Number of input features.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Number of panels of [`PANEL`] output features.
    pub fn panels(&self) -> usize {
        self.n.div_ceil(PANEL)
    }

    /// Bytes of one panel.
    pub fn panel_bytes(&self) -> usize {
        self.panel_bytes
    }

    /// Bytes of all panels.
    pub fn bytes(&self) -> &[u8] {
        self.bytes.as_slice()
    }

    pub(crate) fn panel(&self, panel: usize) -> &[u8] {
        &self.bytes()[panel * self.panel_bytes..][..self.panel_bytes]
    }

    /// Dequantizes the weights of one output feature; for a tied embedding, this is one token's vector.
    pub fn row_f32(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.n && out.len() == self.k, "row {row} of {} × {}", self.n, self.k);
        let (panel, column) = (self.panel(row / PANEL), row % PANEL);
        if Scheme::for_dtype(self.dtype).is_some() {
            for (block, out) in out.chunks_exact_mut(BLOCK).enumerate() {
                let weights = column_block(self.dtype, panel, column, block);
                for (i, (out, q)) in out.iter_mut().zip(weights.q).enumerate() {
                    *out = weights.scale[i / 16] * f32::from(q) + weights.min;
                }
            }
        } else {
            for (k, out) in out.iter_mut().enumerate() {
                *out = float_at(self.dtype, panel, k, column);
            }
        }
    }
}

fn panel_bytes(dtype: DType, k: usize) -> Option<usize> {
    match Scheme::for_dtype(dtype) {
        None if dtype == DType::BF16 => k.checked_next_multiple_of(2)?.checked_mul(PANEL * 2),
        None => k.checked_mul(PANEL * dtype.block_bytes()),
        Some(scheme) => (k / (scheme.subs * BLOCK)).checked_mul(scheme.unit_bytes()),
    }
}

/// Returns one weight of a float panel.
pub(crate) fn float_at(dtype: DType, panel: &[u8], k: usize, column: usize) -> f32 {
    let half = |at: usize| u16::from_le_bytes([panel[2 * at], panel[2 * at + 1]]);
    let at = k * PANEL + column;
    match dtype {
        DType::F16 => f16::from_bits(half(at)).to_f32(),
        DType::BF16 => bf16::from_bits(half((k / 2 * PANEL + column) * 2 + k % 2)).to_f32(),
        _ => f32::from_le_bytes([panel[4 * at], panel[4 * at + 1], panel[4 * at + 2], panel[4 * at + 3]]),
    }
}

/// Returns the weights of one column and 32-block of a quantized panel.
pub(crate) fn column_block(dtype: DType, panel: &[u8], column: usize, block: usize) -> ColumnBlock {
    let mut out = ColumnBlock { q: [0; BLOCK], scale: [0.0; 2], min: 0.0 };
    let Some(scheme) = Scheme::for_dtype(dtype) else { return out };
    let unit = &panel[block / scheme.subs * scheme.unit_bytes()..][..scheme.unit_bytes()];
    let sub = block % scheme.subs;
    let group = &unit[sub * scheme.group_bytes()..][..scheme.group_bytes()];
    for (k, q) in out.q.iter_mut().enumerate() {
        let (word, byte) = (k / 4, column * 4 + k % 4);
        let stored = if scheme.bits == 8 {
            group[word * 64 + byte]
        } else {
            let low = group[word % 4 * 64 + byte] >> (word / 4 * 4) & 15;
            let high = match scheme.bits {
                5 => group[256 + byte] >> word & 1,
                6 => group[256 + word / 4 * 64 + byte] >> (word % 4 * 2) & 3,
                _ => 0,
            };
            low | high << 4
        };
        *q = i16::from(stored) - scheme.offset;
    }
    let half = |at: usize| f16::from_le_bytes([unit[at + 2 * column], unit[at + 2 * column + 1]]).to_f32();
    let scale = half(scheme.scales_at());
    out.scale = match scheme.sub_scales {
        0 => [scale; 2],
        1 => [scale * f32::from(unit[scheme.sub_scales_at() + sub * PANEL + column]); 2],
        _ => [0, 1].map(|part| {
            scale * f32::from(unit[scheme.sub_scales_at() + (2 * sub + part) * PANEL + column].cast_signed())
        }),
    };
    if scheme.minima {
        out.min = match scheme.sub_scales {
            0 => half(scheme.minima_at()),
            _ => -(half(scheme.minima_at()) * f32::from(unit[scheme.sub_minima_at() + sub * PANEL + column])),
        };
    }
    out
}

/// Packs up to 16 rows into a zeroed panel, one piece of K at a time, so that the written part stays in cache.
fn pack_panel(dtype: DType, rows: &[u8], row_bytes: usize, panel: &mut [u8]) {
    let (blocks, piece_bytes) = match Scheme::for_dtype(dtype) {
        None => (BLOCK, BLOCK * PANEL * dtype.block_bytes()),
        Some(scheme) => (1, scheme.unit_bytes()),
    };
    let piece_of_row = blocks * dtype.block_bytes();
    for (i, piece) in panel.chunks_mut(piece_bytes).enumerate() {
        for (column, row) in rows.chunks_exact(row_bytes).enumerate() {
            let source = &row[i * piece_of_row..row_bytes.min((i + 1) * piece_of_row)];
            match (Scheme::for_dtype(dtype), dtype.block_bytes()) {
                (Some(scheme), _) => pack_unit(dtype, scheme, column, source, piece),
                (None, 2) if dtype == DType::BF16 => pack_pairs(column, source, piece),
                (None, 2) => pack_floats::<2>(column, source, piece),
                (None, _) => pack_floats::<4>(column, source, piece),
            }
        }
    }
}

fn pack_floats<const BYTES: usize>(column: usize, source: &[u8], piece: &mut [u8]) {
    let places = piece.as_chunks_mut::<BYTES>().0.chunks_exact_mut(PANEL);
    for (place, element) in places.zip(source.as_chunks::<BYTES>().0) {
        place[column] = *element;
    }
}

/// Packs two-byte elements, with those of k and k + 1 next to each other.
fn pack_pairs(column: usize, source: &[u8], piece: &mut [u8]) {
    let (pairs, last) = source.as_chunks::<4>();
    let mut places = piece.as_chunks_mut::<4>().0.chunks_exact_mut(PANEL);
    for (pair, place) in pairs.iter().zip(&mut places) {
        place[column] = *pair;
    }
    if let (&[low, high], Some(place)) = (last, places.next()) {
        place[column] = [low, high, 0, 0];
    }
}

/// Copies one block of one column from the file's layout to its places in a unit.
fn pack_unit(dtype: DType, scheme: Scheme, column: usize, block: &[u8], unit: &mut [u8]) {
    // Sets the 4 bytes of a column in one word of a group.
    let word = |unit: &mut [u8], at: usize, bytes: [u8; 4]| unit[at + 4 * column..][..4].copy_from_slice(&bytes);
    let four = |bytes: &[u8], at: usize| [bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]];
    let f16_at = |unit: &mut [u8], at: usize, from: usize| {
        unit[at + 2 * column..][..2].copy_from_slice(&block[from..from + 2]);
    };
    match dtype {
        DType::Q8_0 => {
            f16_at(unit, scheme.scales_at(), 0);
            each_word(column, &block[2..], unit, |q| q ^ 0x8080_8080);
        }
        DType::Q4_0 | DType::Q4_1 | DType::Q5_0 | DType::Q5_1 => {
            // Like the panel, ggml stores k and k + 16 in the two nibbles of a byte.
            f16_at(unit, scheme.scales_at(), 0);
            let mut at = 2;
            if scheme.minima {
                f16_at(unit, scheme.minima_at(), at);
                at += 2;
            }
            if scheme.bits == 5 {
                let bits = u32::from_le_bytes(four(block, at));
                word(unit, 256, plane(|k| (bits >> k & 1) as u8));
                at += 4;
            }
            each_word(column, &block[at..], unit, |q| q);
        }
        _ => {
            let raw = super_block(dtype, block);
            f16_at(unit, scheme.scales_at(), raw.scale_at);
            if scheme.minima {
                f16_at(unit, scheme.minima_at(), 2);
            }
            for sub in 0..scheme.subs {
                let q: &[u8] = &raw.q[sub * BLOCK..][..BLOCK];
                let at = sub * scheme.group_bytes();
                for i in 0..4 {
                    word(unit, at + 64 * i, std::array::from_fn(|j| q[4 * i + j] & 15 | q[16 + 4 * i + j] << 4));
                }
                match scheme.bits {
                    5 => word(unit, at + 256, plane(|k| q[k] >> 4)),
                    6 => {
                        for h in 0..2 {
                            let pairs =
                                |j: usize| (0..4).fold(0, |byte, g| byte | q[16 * h + 4 * g + j] >> 4 << (2 * g));
                            word(unit, at + 256 + 64 * h, std::array::from_fn(pairs));
                        }
                    }
                    _ => {}
                }
                for part in 0..scheme.sub_scales {
                    let i = sub * scheme.sub_scales + part;
                    unit[scheme.sub_scales_at() + i * PANEL + column] = raw.scales[i];
                }
                if scheme.minima {
                    unit[scheme.sub_minima_at() + sub * PANEL + column] = raw.minima[sub];
                }
            }
        }
    }
}

/// Copies the quants of one column, four at a time, to their places in the words of a group. Packing spends most of its
/// time here.
#[inline(always)]
fn each_word(column: usize, quants: &[u8], group: &mut [u8], change: impl Fn(u32) -> u32) {
    for (word, quants) in group.as_chunks_mut::<{ 4 * PANEL }>().0.iter_mut().zip(quants.as_chunks::<4>().0) {
        word.as_chunks_mut::<4>().0[column] = change(u32::from_le_bytes(*quants)).to_le_bytes();
    }
}

/// Returns one column's bytes of the bit plane: bit `g` of byte `j` belongs to k = 4g + j.
fn plane(bit: impl Fn(usize) -> u8) -> [u8; 4] {
    std::array::from_fn(|j| (0..8).fold(0, |byte, g| byte | bit(4 * g + j) << g))
}

/// The 256 weights of a K-quant block, unpacked.
struct SuperBlock {
    q: [u8; 256],
    scales: [u8; 16],
    minima: [u8; 8],
    /// Offset of the block's f16 scale.
    scale_at: usize,
}

/// Unpacks a block of `Q4_K`, `Q5_K` or `Q6_K` (layouts: ggml `ggml-common.h`, `dequantize_row_q*_K` in `ggml-quants.c`).
fn super_block(dtype: DType, block: &[u8]) -> SuperBlock {
    let mut out = SuperBlock { q: [0; 256], scales: [0; 16], minima: [0; 8], scale_at: 0 };
    if dtype == DType::Q6_K {
        // 128 bytes of low nibbles, 64 of high bit pairs, 16 scales, d; stored in halves of 128 weights.
        let (low, high) = block.split_at(128);
        for (half, q) in out.q.as_chunks_mut::<128>().0.iter_mut().enumerate() {
            let (low, high) = (&low[64 * half..][..64], &high[32 * half..][..32]);
            for l in 0..32 {
                q[l] = low[l] & 15 | (high[l] & 3) << 4;
                q[l + 32] = low[l + 32] & 15 | (high[l] >> 2 & 3) << 4;
                q[l + 64] = low[l] >> 4 | (high[l] >> 4 & 3) << 4;
                q[l + 96] = low[l + 32] >> 4 | (high[l] >> 6) << 4;
            }
        }
        out.scales.copy_from_slice(&block[192..208]);
        out.scale_at = 208;
        return out;
    }
    // d, dmin, 12 bytes of 6-bit scales and minima, (Q5_K: 32 bytes of high bits), 128 bytes of nibbles.
    let packed = &block[4..16];
    for j in 0..4 {
        out.scales[j] = packed[j] & 63;
        out.minima[j] = packed[j + 4] & 63;
        out.scales[j + 4] = packed[j + 8] & 15 | packed[j] >> 6 << 4;
        out.minima[j + 4] = packed[j + 8] >> 4 | packed[j + 4] >> 6 << 4;
    }
    let (high, nibbles) = block[16..].split_at(block.len() - 16 - 128);
    for (pair, q) in out.q.as_chunks_mut::<64>().0.iter_mut().enumerate() {
        let nibbles = &nibbles[32 * pair..][..32];
        for l in 0..32 {
            q[l] = nibbles[l] & 15;
            q[l + 32] = nibbles[l] >> 4;
        }
        if dtype == DType::Q5_K {
            for l in 0..32 {
                q[l] |= (high[l] >> (2 * pair) & 1) << 4;
                q[l + 32] |= (high[l] >> (2 * pair + 1) & 1) << 4;
            }
        }
    }
    out
}
