//! Weights on the card: matrices by rows and vectors, all in the type of the activations, in one allocation.
//!
//! Tensors are converted one after the other on the caller's thread and their source pages released behind them, so that
//! no second copy of the weights stands in host memory.

#![forbid(unsafe_code)]

use ascend_sys::{DeviceBuffer, ElemType, TensorDesc};
use half::{bf16, f16};

use super::memory::{GRANULE, Place};
use super::options::Activations;
use crate::device::DeviceError;
use crate::device::tensor_part::tensor_part;
use crate::graph::{Weight, WeightId, WeightRole};
use crate::kv_cache::KvDType;
use crate::weights::{DType, WeightSource, convert};

/// Bytes converted at a time.
const CHUNK_BYTES: usize = 4 << 20;

/// All weights of one model, numbered as its graph numbers them.
#[derive(Debug)]
pub(super) struct WeightSet {
    buffer: DeviceBuffer,
    pub elem: ElemType,
    offsets: Vec<usize>,
    shapes: Vec<Vec<usize>>,
    dtypes: Vec<DType>,
}

/// What activations are held in for a model.
pub(super) fn activation_elem(asked: Activations, weights: &[Weight]) -> ElemType {
    let elements = |is_bf16: bool| -> usize {
        let matrices = weights.iter().filter(|weight| weight.role.is_matrix());
        let of_type = matrices.filter(|weight| (weight.dtype == DType::BF16) == is_bf16);
        of_type.map(|weight| weight.shape.iter().product::<usize>()).sum()
    };
    match asked {
        Activations::BF16 => ElemType::BF16,
        Activations::Auto if elements(true) > elements(false) => ElemType::BF16,
        Activations::F16 | Activations::Auto => ElemType::F16,
    }
}

/// The type of keys and values that goes with it.
pub(super) const fn kv_dtype(elem: ElemType) -> KvDType {
    if matches!(elem, ElemType::BF16) { KvDType::BF16 } else { KvDType::F16 }
}

/// Offsets of the tensors, and bytes of all of them.
pub(super) fn place(weights: &[Weight]) -> Option<(Vec<usize>, usize)> {
    let mut end = 0usize;
    let mut offsets = Vec::with_capacity(weights.len());
    for weight in weights {
        offsets.push(end);
        let mut elements = weight.shape.iter().try_fold(2usize, |n, &dim| n.checked_mul(dim))?;
        if weight.role == WeightRole::Table {
            elements = elements.checked_add(zero_row_bytes(weight))?;
        }
        // Nothing is left between tensors: those that follow each other may be multiplied as one.
        end = end.checked_add(elements)?.checked_next_multiple_of(GRANULE)?;
    }
    Some((offsets, end))
}

/// Bytes of the row of zeros behind a table.
fn zero_row_bytes(weight: &Weight) -> usize {
    2 * weight.shape.last().copied().unwrap_or(0)
}

impl WeightSet {
    pub(super) fn new(buffer: DeviceBuffer, elem: ElemType, offsets: Vec<usize>, weights: &[Weight]) -> Self {
        let shapes = weights.iter().map(|weight| weight.shape.clone()).collect();
        let dtypes = weights.iter().map(|weight| weight.dtype).collect();
        Self { buffer, elem, offsets, shapes, dtypes }
    }

    pub(super) fn buffer(&self) -> &DeviceBuffer {
        &self.buffer
    }

    fn place_of(&self, id: WeightId) -> Place {
        Place::new(self.buffer.address().offset(self.offsets[id.0 as usize]), self.elem)
    }

    /// The whole tensor.
    pub(super) fn tensor(&self, id: WeightId) -> TensorDesc {
        self.place_of(id).tensor(&self.shapes[id.0 as usize])
    }

    /// An embedding table with the row of zeros behind it.
    pub(super) fn table_with_zeros(&self, id: WeightId) -> TensorDesc {
        let shape = &self.shapes[id.0 as usize];
        self.place_of(id).tensor(&[shape[0] + 1, shape[1]])
    }

    /// Rows of a matrix.
    pub(super) fn rows(&self, id: WeightId) -> usize {
        self.shapes[id.0 as usize][0]
    }

    /// Several matrices of one width as one, where they follow each other without a gap.
    pub(super) fn joined(&self, ids: &[WeightId]) -> Option<TensorDesc> {
        let (first, cols) = (*ids.first()?, *self.shapes[ids.first()?.0 as usize].get(1)?);
        let mut rows = 0;
        for id in ids {
            let &[n, k] = &self.shapes[id.0 as usize][..] else { return None };
            if k != cols || self.offsets[id.0 as usize] != self.offsets[first.0 as usize] + rows * cols * 2 {
                return None;
            }
            rows += n;
        }
        Some(self.place_of(first).tensor(&[rows, cols]))
    }

    /// Whether it holds the weights a plan names.
    pub(super) fn serves(&self, weights: &[Weight]) -> bool {
        self.shapes.len() == weights.len()
            && weights.iter().zip(&self.shapes).all(|(weight, shape)| weight.shape == *shape)
            && weights.iter().zip(&self.dtypes).all(|(weight, dtype)| weight.dtype == *dtype)
    }
}

/// Converts one tensor and hands it to `write` in pieces, with the byte each begins at.
pub(super) fn convert_tensor(
    source: &dyn WeightSource,
    weight: &Weight,
    elem: ElemType,
    write: &mut dyn FnMut(usize, Vec<u8>) -> Result<(), DeviceError>,
) -> Result<(), DeviceError> {
    let name = &weight.name;
    let invalid = |what: &str| DeviceError::Invalid { what: format!("tensor {name} {what}") };
    let data = tensor_part(source, weight)?;
    let rank = if weight.role.is_matrix() { 2 } else { 1 };
    if weight.shape.len() != rank {
        return Err(invalid("has the wrong number of dimensions for its role"));
    }
    let (block_len, block_bytes) = (weight.dtype.block_len(), weight.dtype.block_bytes());
    let blocks = (CHUNK_BYTES / 2 / block_len).max(1);
    let mut floats = Vec::new();
    for (index, chunk) in data.chunks(blocks * block_bytes).enumerate() {
        let at = index * blocks * block_len * 2;
        let is_same = matches!((weight.dtype, elem), (DType::F16, ElemType::F16) | (DType::BF16, ElemType::BF16));
        if is_same {
            write(at, chunk.to_vec())?;
            continue;
        }
        floats.resize(chunk.len() / block_bytes * block_len, 0.0);
        convert::dequantise(weight.dtype, chunk, &mut floats);
        let bytes = narrowed(&floats, elem);
        write(
            at,
            bytes.ok_or_else(|| invalid("has values beyond f16's 65,504; open the device with bf16 activations"))?,
        )?;
    }
    if weight.role == WeightRole::Table {
        write(2 * weight.shape.iter().product::<usize>(), vec![0; zero_row_bytes(weight)])?;
    }
    source.release(name);
    Ok(())
}

/// 16-bit values, ties to even; none if a finite one becomes infinite.
fn narrowed(values: &[f32], elem: ElemType) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(2 * values.len());
    for &value in values {
        let (bits, is_finite) = if elem == ElemType::BF16 {
            let narrow = bf16::from_f32(value);
            (narrow.to_bits(), narrow.is_finite())
        } else {
            let narrow = f16::from_f32(value);
            (narrow.to_bits(), narrow.is_finite())
        };
        if value.is_finite() && !is_finite {
            return None;
        }
        bytes.extend_from_slice(&bits.to_le_bytes());
    }
    Some(bytes)
}
