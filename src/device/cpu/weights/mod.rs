//! Weights in the CPU device's layout: matrices in panels, vectors in f32.

pub mod pack;

use super::memory::{ALIGNMENT, Slab};
use super::thread_pool::ThreadPool;
use crate::device::DeviceError;
use crate::device::weight_bytes::tensor_part;
use crate::graph::{Weight, WeightId, WeightRole};
use crate::weights::{WeightSource, convert};
use pack::PackedMatrix;

#[derive(Debug)]
enum Packed {
    Matrix(PackedMatrix),
    Vector(Vec<f32>),
}

/// All weights of one model, in the order of its graph.
#[derive(Debug)]
pub(super) struct WeightSet {
    packed: Vec<Packed>,
}

impl WeightSet {
    /// Packs the weights tensor by tensor and releases the source's pages of each, so that memory never holds a second
    /// copy of all weights.
    pub(super) fn pack(
        threads: &ThreadPool,
        source: &dyn WeightSource,
        weights: &[Weight],
    ) -> Result<Self, DeviceError> {
        let mut packed = Vec::with_capacity(weights.len());
        let mut slab = Slab::new(slab_bytes(weights))?;
        for weight in weights {
            let name = &weight.name;
            let invalid = |what: &str| DeviceError::Invalid { what: format!("tensor {name} {what}") };
            let data = tensor_part(source, weight)?;
            packed.push(match (weight.role, weight.shape.as_slice()) {
                (WeightRole::Matrix | WeightRole::Table, &[n, k]) => {
                    Packed::Matrix(PackedMatrix::pack_into(&mut slab, threads, weight.dtype, n, k, &data)?)
                }
                (WeightRole::Vector, &[len]) => {
                    let mut values = vec![0.0; len];
                    convert::dequantize(weight.dtype, &data, &mut values);
                    Packed::Vector(values)
                }
                _ => return Err(invalid("has the wrong number of dimensions for its role")),
            });
            source.release(name);
        }
        Ok(Self { packed })
    }

    /// # Panics
    /// If the weight is not a matrix; checked when the program was loaded.
    pub(super) fn matrix(&self, id: WeightId) -> &PackedMatrix {
        match &self.packed[id.0 as usize] {
            Packed::Matrix(matrix) => matrix,
            Packed::Vector(_) => panic!("weight {} is a vector", id.0),
        }
    }

    /// # Panics
    /// If the weight is not a vector; checked when the program was loaded.
    pub(super) fn vector(&self, id: WeightId) -> &[f32] {
        match &self.packed[id.0 as usize] {
            Packed::Vector(vector) => vector,
            Packed::Matrix(_) => panic!("weight {} is a matrix", id.0),
        }
    }

    /// Whether the set holds the weights of a plan, in their roles.
    pub(super) fn serves(&self, weights: &[Weight]) -> bool {
        self.packed.len() == weights.len()
            && self.packed.iter().zip(weights).all(|(packed, weight)| match (packed, weight.role) {
                (Packed::Matrix(matrix), WeightRole::Matrix | WeightRole::Table) => {
                    [matrix.n(), matrix.k()] == weight.shape[..] && matrix.dtype() == weight.dtype
                }
                (Packed::Vector(vector), WeightRole::Vector) => [vector.len()] == weight.shape[..],
                _ => false,
            })
    }
}

/// Bytes of all matrices. A matrix whose size overflows counts as 0 here and is refused when it is packed.
fn slab_bytes(weights: &[Weight]) -> usize {
    let bytes = |weight: &Weight| match (weight.role, weight.shape.as_slice()) {
        (WeightRole::Matrix | WeightRole::Table, &[n, k]) => {
            PackedMatrix::packed_bytes(weight.dtype, n, k)?.checked_next_multiple_of(ALIGNMENT)
        }
        _ => Some(0),
    };
    weights.iter().try_fold(0usize, |sum, weight| sum.checked_add(bytes(weight)?)).unwrap_or(0)
}
