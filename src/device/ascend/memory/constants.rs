//! Constants that all programs of a card read: a few numbers, the causal mask, a table of ids.

#![forbid(unsafe_code)]

use ascend_sys::{AscendError, Context, DeviceBuffer, ElemType, MASK_SIDE, TensorDesc};

use super::{ALIGNMENT, alloc_zeroed};

/// Numbers, one per aligned unit.
const NUMBERS: [i32; 4] = [1, -1, 2, -2];

/// Constant tensors in device memory.
#[derive(Debug)]
pub(crate) struct Constants {
    numbers: DeviceBuffer,
    mask: DeviceBuffer,
    /// `ids[i + 1] = i`, and 0 at the index of "no token".
    ids: DeviceBuffer,
    known_ids: usize,
}

impl Constants {
    pub(crate) fn new(context: &Context) -> Result<Self, AscendError> {
        let numbers = alloc_zeroed(context, NUMBERS.len() * ALIGNMENT)?;
        for (index, number) in NUMBERS.iter().enumerate() {
            numbers.write(index * ALIGNMENT, &number.to_le_bytes())?;
        }
        let mask = alloc_zeroed(context, MASK_SIDE * MASK_SIDE)?;
        let mut rows = vec![0u8; MASK_SIDE * MASK_SIDE];
        for (row, columns) in rows.chunks_exact_mut(MASK_SIDE).enumerate() {
            columns[row + 1..].fill(1);
        }
        mask.write(0, &rows)?;
        Ok(Self { numbers, mask, ids: alloc_zeroed(context, 4)?, known_ids: 0 })
    }

    fn number(&self, index: usize) -> TensorDesc {
        TensorDesc::new(self.numbers.address().offset(index * ALIGNMENT), ElemType::I32, &[1])
    }

    pub(crate) fn one(&self) -> TensorDesc {
        self.number(0)
    }

    pub(crate) fn minus_one(&self) -> TensorDesc {
        self.number(1)
    }

    pub(crate) fn two(&self) -> TensorDesc {
        self.number(2)
    }

    pub(crate) fn minus_two(&self) -> TensorDesc {
        self.number(3)
    }

    /// Causal mask of type bool: 1 above the diagonal.
    pub(crate) fn mask(&self) -> TensorDesc {
        TensorDesc::new(self.mask.address(), ElemType::Bool, &[MASK_SIDE, MASK_SIDE])
    }

    /// Row `argmax + 1` holds the id to copy: 0 if there is no argmax.
    pub(crate) fn id_table(&self) -> TensorDesc {
        TensorDesc::new(self.ids.address(), ElemType::I32, &[self.known_ids + 1])
    }

    /// Grows the table to a vocabulary; the streams must be idle.
    pub(crate) fn grow_id_table(&mut self, context: &Context, count: usize) -> Result<(), AscendError> {
        if count <= self.known_ids {
            return Ok(());
        }
        let ids = alloc_zeroed(context, 4 * (count + 1))?;
        let id = |i: usize| u32::try_from(i.saturating_sub(1)).unwrap_or(0).to_le_bytes();
        let bytes: Vec<u8> = (0..=count).flat_map(id).collect();
        ids.write(0, &bytes)?;
        (self.ids, self.known_ids) = (ids, count);
        Ok(())
    }
}
