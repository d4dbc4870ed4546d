//! Converts weights from a file's format to the card's layouts, piece by piece on the calling thread, so that host
//! memory never holds a second copy of all weights.

#![forbid(unsafe_code)]

#[cfg(test)]
mod tests;

use ascend_sys::ElemType;
use half::{bf16, f16};

use super::layout::{GROUP, WeightLayout, zero_row_bytes};
use crate::device::DeviceError;
use crate::device::weight_bytes::tensor_part;
use crate::graph::Weight;
use crate::weights::convert::QuantGroup;
use crate::weights::{DType, WeightSource, convert};

/// Number of bytes converted at a time.
const CHUNK_BYTES: usize = 4 << 20;
/// Number of elements of a row that are converted together if rows become columns: a block of the largest format.
const UNIT: usize = 256;
/// Largest offset that is stored with quants; with a larger one, all elements of a group are equal in f16.
const MOST_OFFSET: f32 = 32_768.0;

/// Part of a weight's storage that a piece belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WeightSection {
    Values,
    Scales,
    Offsets,
}

/// Receives a piece and its byte offset in its section.
type Write<'a> = dyn FnMut(WeightSection, usize, Vec<u8>) -> Result<(), DeviceError> + 'a;

/// Converts one weight to a layout and passes it to `write` piece by piece.
///
/// # Errors
/// [`DeviceError::Invalid`] names a tensor that differs from the graph, or that has finite values out of the range of
/// f16.
pub(crate) fn pack(
    source: &dyn WeightSource,
    weight: &Weight,
    form: WeightLayout,
    elem: ElemType,
    write: &mut Write<'_>,
) -> Result<(), DeviceError> {
    let invalid = |what: &str| DeviceError::Invalid { what: format!("tensor {} {what}", weight.name) };
    let data = tensor_part(source, weight)?;
    let rank = if weight.role.is_matrix() { 2 } else { 1 };
    if weight.shape.len() != rank {
        return Err(invalid("has the wrong number of dimensions for its role"));
    }
    let too_large = || invalid("has values beyond f16's 65,504; open the device with bf16 activations");
    match form {
        WeightLayout::Rows | WeightLayout::Tiles => rows(weight.dtype, &data, elem, too_large, write),
        WeightLayout::Groups { elem: quants, has_offsets } => {
            let columns = Columns { elem, quants, has_offsets, n: weight.shape[0], k: weight.shape[1] };
            columns.pack(weight.dtype, &data, too_large, write)
        }
        WeightLayout::Channels { .. } => channels(weight.dtype, &data, weight.shape[1], write),
    }?;
    let zeros = zero_row_bytes(weight);
    if zeros > 0 {
        write(WeightSection::Values, 2 * weight.shape.iter().product::<usize>(), vec![0; zeros])?;
    }
    source.release(&weight.name);
    Ok(())
}

fn rows(
    dtype: DType,
    data: &[u8],
    elem: ElemType,
    too_large: impl Fn() -> DeviceError,
    write: &mut Write<'_>,
) -> Result<(), DeviceError> {
    let (block_len, block_bytes) = (dtype.block_len(), dtype.block_bytes());
    let blocks = (CHUNK_BYTES / 2 / block_len).max(1);
    let mut floats = Vec::new();
    for (index, chunk) in data.chunks(blocks * block_bytes).enumerate() {
        let at = index * blocks * block_len * 2;
        let is_same = matches!((dtype, elem), (DType::F16, ElemType::F16) | (DType::BF16, ElemType::BF16));
        if is_same {
            write(WeightSection::Values, at, chunk.to_vec())?;
            continue;
        }
        floats.resize(chunk.len() / block_bytes * block_len, 0.0);
        convert::dequantize(dtype, chunk, &mut floats);
        let mut bytes = Vec::with_capacity(2 * floats.len());
        for &value in &floats {
            if value.is_finite() && !narrow(value, elem).is_finite() {
                return Err(too_large());
            }
            bytes.extend_from_slice(&narrow_bytes(value, elem));
        }
        write(WeightSection::Values, at, bytes)?;
    }
    Ok(())
}

/// Packs int8 rows, each with the scale that maps its largest element to 127.
fn channels(dtype: DType, data: &[u8], k: usize, write: &mut Write<'_>) -> Result<(), DeviceError> {
    let row_bytes = k / dtype.block_len() * dtype.block_bytes();
    let rows = (CHUNK_BYTES / k.max(1)).max(1);
    let mut floats = vec![0.0f32; k];
    let mut scales = Vec::with_capacity(4 * data.len() / row_bytes.max(1));
    for (index, chunk) in data.chunks(rows * row_bytes).enumerate() {
        let mut quants = Vec::with_capacity(rows * k);
        for row in chunk.chunks_exact(row_bytes) {
            convert::dequantize(dtype, row, &mut floats);
            // Not `max`, which would hide a NaN.
            let largest = floats.iter().fold(0.0f32, |most, x| if x.abs() <= most { most } else { x.abs() });
            let scale = largest / 127.0;
            let factor = if scale > 0.0 { scale.recip() } else { 0.0 };
            quants.extend(floats.iter().map(|x| round_to_i8(x * factor).cast_unsigned()));
            scales.extend_from_slice(&scale.to_le_bytes());
        }
        write(WeightSection::Values, index * rows * k, quants)?;
    }
    write(WeightSection::Scales, 0, scales)
}

/// A matrix `[n, k]` that is stored as `[k, n]` with a scale per group of a column.
#[derive(Clone, Copy, Debug)]
struct Columns {
    elem: ElemType,
    quants: ElemType,
    has_offsets: bool,
    n: usize,
    k: usize,
}

impl Columns {
    /// Packs some rows of `[k, n]` at a time: one unit of every row of the file.
    fn pack(
        self,
        dtype: DType,
        data: &[u8],
        too_large: impl Fn() -> DeviceError,
        write: &mut Write<'_>,
    ) -> Result<(), DeviceError> {
        let Self { elem, quants, has_offsets, n, k } = self;
        let bytes_of = |elements: usize| elements / dtype.block_len() * dtype.block_bytes();
        let row_bytes = bytes_of(k);
        let bits = quants.bits();
        for first in (0..k).step_by(UNIT) {
            let len = UNIT.min(k - first);
            let mut values = vec![0u8; len * n * bits / 8];
            let mut scales = vec![0u8; 2 * len / GROUP * n];
            let mut offsets = vec![0u8; if has_offsets { scales.len() } else { 0 }];
            for (column, row) in data.chunks_exact(row_bytes).enumerate() {
                let mut group = 0;
                let mut is_sound = true;
                convert::groups(dtype, &row[bytes_of(first)..bytes_of(first + len)], |stored| {
                    let packed = Packed::new(&stored, quants, has_offsets, elem);
                    is_sound &= elem != ElemType::F16 || fits_f16(&stored);
                    for (i, quant) in packed.quants.iter().enumerate() {
                        let place = (group * GROUP + i) * n + column;
                        if bits == 4 {
                            // The low half of a byte is first.
                            values[place / 2] |= (quant.cast_unsigned() & 0xf) << (4 * (place % 2));
                        } else {
                            values[place] = quant.cast_unsigned();
                        }
                    }
                    let place = 2 * (group * n + column);
                    scales[place..place + 2].copy_from_slice(&narrow_bytes(packed.scale, elem));
                    if has_offsets {
                        offsets[place..place + 2].copy_from_slice(&narrow_bytes(packed.offset, elem));
                    }
                    group += 1;
                });
                if !is_sound {
                    return Err(too_large());
                }
            }
            write(WeightSection::Values, first * n * bits / 8, values)?;
            write(WeightSection::Scales, 2 * first / GROUP * n, scales)?;
            if has_offsets {
                write(WeightSection::Offsets, 2 * first / GROUP * n, offsets)?;
            }
        }
        Ok(())
    }
}

/// 32 elements in the form that the card's product reads: `(quant + offset) · scale`.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Packed {
    quants: [i8; GROUP],
    scale: f32,
    offset: f32,
}

impl Packed {
    /// Packs a group; scale and offset are rounded to `elem`.
    fn new(group: &QuantGroup, quants: ElemType, has_offsets: bool, elem: ElemType) -> Self {
        if has_offsets {
            return Self::with_offset(group, if quants == ElemType::I4 { 8 } else { 0 }, elem);
        }
        let [first, second] = group.scales;
        if first == second || !(first.is_finite() && second.is_finite()) {
            // A NaN or an infinity must stay one.
            let scale = if first.is_finite() { second } else { first };
            return Self { quants: group.quants, scale: narrow(scale, elem), offset: 0.0 };
        }
        // Two scales, six bits: quarters of the larger scale represent its half exactly, and are the nearest values for
        // the other.
        let scale = if first.abs() >= second.abs() { first } else { second } / 4.0;
        let mut packed = Self { quants: [0; GROUP], scale: narrow(scale, elem), offset: 0.0 };
        for (i, quant) in packed.quants.iter_mut().enumerate() {
            *quant = round_to_i8(f32::from(group.quants[i]) * (group.scales[2 * i / GROUP] / scale));
        }
        packed
    }

    /// Shifts unsigned quants down by `shift`; the offset shifts them back up and includes the minimum.
    fn with_offset(group: &QuantGroup, shift: i8, elem: ElemType) -> Self {
        let scale = narrow(group.scales[0], elem);
        let offset = narrow(group.min / scale + f32::from(shift), elem);
        if !group.scales[0].is_finite() || offset.abs() <= MOST_OFFSET {
            return Self { quants: group.quants.map(|quant| quant - shift), scale, offset };
        }
        // The step is zero, or too small relative to the minimum to show in 11 bits: every element is the minimum.
        Self { quants: [0; GROUP], scale: narrow(group.min, elem), offset: 1.0 }
    }
}

/// Whether all finite elements stay finite in f16.
fn fits_f16(group: &QuantGroup) -> bool {
    let largest_quant = group.quants.iter().map(|quant| quant.unsigned_abs()).max().unwrap_or(0);
    let scale = group.scales[0].abs().max(group.scales[1].abs());
    let largest = scale * f32::from(largest_quant) + group.min.abs();
    !largest.is_finite() || f16::from_f32(largest).is_finite()
}

/// Rounds to the nearest of -128 to 127; NaN becomes 0.
#[allow(clippy::cast_possible_truncation)]
fn round_to_i8(value: f32) -> i8 {
    value.round_ties_even() as i8
}

/// Rounds to the nearest f16 or bf16, ties to even.
fn narrow(value: f32, elem: ElemType) -> f32 {
    if elem == ElemType::BF16 { bf16::from_f32(value).to_f32() } else { f16::from_f32(value).to_f32() }
}

fn narrow_bytes(value: f32, elem: ElemType) -> [u8; 2] {
    if elem == ElemType::BF16 { bf16::from_f32(value).to_le_bytes() } else { f16::from_f32(value).to_le_bytes() }
}
