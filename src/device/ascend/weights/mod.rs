//! Weights on the card in one allocation: the values of all, then the scales, then the offsets of those that have them.

#![forbid(unsafe_code)]

pub(super) mod layout;
pub(super) mod pack;

use ascend_sys::{AscendError, DeviceBuffer, ElemType, TensorDesc};

use super::memory::{ALIGNMENT, TypedAddress};
use super::options::Activations;
use super::program::context::ExecContext;
use crate::graph::{Weight, WeightId};
use crate::kv_cache::KvDType;
use crate::weights::DType;
use layout::{Matrix, WeightLayout, is_refusal};
use pack::WeightSection;

/// All weights of one model, in the order of its graph.
#[derive(Debug)]
pub(super) struct WeightSet {
    buffer: DeviceBuffer,
    pub elem: ElemType,
    held: Vec<Held>,
}

/// One weight.
#[derive(Debug)]
struct Held {
    shape: Vec<usize>,
    dtype: DType,
    form: WeightLayout,
    /// Offsets of its values, scales and offsets in the allocation.
    at: [usize; 3],
}

/// Element type of the activations of a model.
pub(super) fn activation_elem(asked: Activations, weights: &[Weight]) -> ElemType {
    let elements = |is_bf16: bool| -> usize {
        let matrices = weights.iter().filter(|weight| weight.role.is_matrix());
        let of_type = matrices.filter(|weight| (weight.dtype == DType::BF16) == is_bf16);
        // Sizes are not validated yet, so the product must not overflow.
        let count = |weight: &Weight| weight.shape.iter().fold(1usize, |n, &dim| n.saturating_mul(dim));
        of_type.map(count).fold(0, usize::saturating_add)
    };
    match asked {
        Activations::BF16 => ElemType::BF16,
        Activations::Auto if elements(true) > elements(false) => ElemType::BF16,
        Activations::F16 | Activations::Auto => ElemType::F16,
    }
}

/// Element type of keys and values for these activations.
pub(super) const fn kv_dtype(elem: ElemType) -> KvDType {
    if matches!(elem, ElemType::BF16) { KvDType::BF16 } else { KvDType::F16 }
}

/// Offsets of the values, scales and offsets of each weight, and the bytes of the allocation.
pub(super) fn place(sizes: &[[usize; 3]]) -> Option<(Vec<[usize; 3]>, usize)> {
    let mut end = 0usize;
    let mut places = vec![[0; 3]; sizes.len()];
    for stretch in 0..3 {
        for (place, bytes) in places.iter_mut().zip(sizes) {
            place[stretch] = end;
            // Without gaps between tensors: consecutive ones may be multiplied as one.
            end = end.checked_add(bytes[stretch])?.checked_next_multiple_of(ALIGNMENT)?;
        }
    }
    Some((places, end))
}

impl WeightSet {
    pub(super) fn new(
        buffer: DeviceBuffer,
        elem: ElemType,
        weights: &[Weight],
        forms: impl Iterator<Item = WeightLayout>,
        places: Vec<[usize; 3]>,
    ) -> Self {
        let held = weights.iter().zip(forms).zip(places);
        let held = held.map(|((weight, form), at)| Held { shape: weight.shape.clone(), dtype: weight.dtype, form, at });
        Self { buffer, elem, held: held.collect() }
    }

    /// Writes a piece of a weight, without synchronizing with streams.
    pub(super) fn write(
        &self,
        index: usize,
        stretch: WeightSection,
        at: usize,
        bytes: &[u8],
    ) -> Result<(), AscendError> {
        self.buffer.write(self.held[index].at[stretch as usize] + at, bytes)
    }

    /// Converts a weight written by rows into tiles, if that is its layout, and waits. If the operation refuses, the
    /// weight stays in rows, and a note reports it.
    pub(super) fn tile(&mut self, index: usize, exec: &mut ExecContext) -> Result<(), AscendError> {
        let Held { shape, form, at, .. } = &self.held[index];
        let (&WeightLayout::Tiles | &WeightLayout::Channels { in_tiles: true }) = form else { return Ok(()) };
        let elem = if *form == WeightLayout::Tiles { self.elem } else { ElemType::I8 };
        let rows = TypedAddress::new(self.buffer.address().offset(at[0]), elem).tensor(shape);
        match exec.ops.tile_weight(&rows) {
            Ok(op) => exec.run_alone(op),
            Err(error) if is_refusal(&error) => {
                exec.diagnostics.add(format!("matrices of {} by {} stay in rows: {error}", shape[0], shape[1]));
                self.held[index].form = form.untiled();
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// Length of the longest rows that products take in int8; 0 if none does.
    pub(super) fn int8_cols(&self) -> usize {
        let int8 = self.held.iter().filter(|held| matches!(held.form, WeightLayout::Channels { .. }));
        int8.map(|held| held.shape[1]).max().unwrap_or(0)
    }

    /// A whole tensor by rows: a vector or a table.
    pub(super) fn tensor(&self, id: WeightId) -> TensorDesc {
        let Held { shape, at, .. } = &self.held[id.0 as usize];
        TypedAddress::new(self.buffer.address().offset(at[0]), self.elem).tensor(shape)
    }

    /// Operand of a product.
    pub(super) fn matrix(&self, id: WeightId) -> Matrix {
        let Held { shape, form, at, .. } = &self.held[id.0 as usize];
        let dims = [0, 1].map(|dim| shape.get(dim).copied().unwrap_or(1));
        Matrix::new(*form, self.elem, dims, at.map(|at| self.buffer.address().offset(at)))
    }

    /// An embedding table, including the row of zeros after it.
    pub(super) fn table_with_zeros(&self, id: WeightId) -> TensorDesc {
        let Held { shape, at, .. } = &self.held[id.0 as usize];
        TypedAddress::new(self.buffer.address().offset(at[0]), self.elem).tensor(&[shape[0] + 1, shape[1]])
    }

    /// Number of rows of a matrix.
    pub(super) fn rows(&self, id: WeightId) -> usize {
        self.held[id.0 as usize].shape[0]
    }

    /// Describes several matrices of one width as one, if they are stored by rows and consecutive without a gap.
    pub(super) fn fused(&self, ids: &[WeightId]) -> Option<Matrix> {
        let held = |id: &WeightId| &self.held[id.0 as usize];
        let first = held(ids.first()?);
        let (row_bytes, scale_bytes) = match first.form {
            WeightLayout::Rows => (2 * first.shape.get(1)?, 0),
            WeightLayout::Channels { in_tiles: false } => (*first.shape.get(1)?, 4),
            _ => return None,
        };
        let mut rows = 0;
        for Held { shape, form, at, .. } in ids.iter().map(held) {
            let follows = at[0] == first.at[0] + rows * row_bytes && at[1] == first.at[1] + rows * scale_bytes;
            if *form != first.form || shape[1..] != first.shape[1..] || (!follows && rows > 0) {
                return None;
            }
            rows += shape[0];
        }
        Some(Matrix::new(
            first.form,
            self.elem,
            [rows, first.shape[1]],
            first.at.map(|at| self.buffer.address().offset(at)),
        ))
    }

    /// Whether the set holds the weights of a plan.
    pub(super) fn serves(&self, weights: &[Weight]) -> bool {
        let is_same = |(weight, held): (&Weight, &Held)| (&weight.shape, weight.dtype) == (&held.shape, held.dtype);
        self.held.len() == weights.len() && weights.iter().zip(&self.held).all(is_same)
    }
}
