//! Locates a step's operands: ranges of the arena or of a bound buffer, limited to the batch's actual rows.

use super::group::GroupContext;
use crate::device::DeviceError;
use crate::device::cpu::executor::launch::{broken, overlap};
use crate::device::cpu::memory::ArenaBorrows;
use crate::graph::{Elem, Io, Operand, RowDim};

impl<'a> GroupContext<'a> {
    /// Number of rows of a value in this batch.
    pub(super) fn rows(&self, value: usize) -> usize {
        match self.plan.values[value].rows {
            RowDim::Tokens => self.launch.shape.tokens,
            RowDim::LogitRows => self.launch.shape.logit_rows,
        }
    }

    pub(super) fn cols(&self, value: usize) -> usize {
        self.plan.values[value].cols
    }

    pub(super) fn elem(&self, value: usize) -> Elem {
        self.plan.values[value].elem
    }

    /// Borrows a value's rows for reading.
    pub(super) fn read(&self, value: usize) -> Result<&'a [u8], DeviceError> {
        let (borrows, range) = self.place(value)?;
        borrows.read(range).ok_or_else(overlap)
    }

    /// Borrows a value's rows for writing.
    #[allow(clippy::mut_from_ref)] // every byte is lent once
    pub(super) fn write(&self, value: usize) -> Result<&'a mut [u8], DeviceError> {
        let (borrows, range) = self.place(value)?;
        borrows.write(range).ok_or_else(overlap)
    }

    fn place(&self, value: usize) -> Result<(&ArenaBorrows<'a>, std::ops::Range<usize>), DeviceError> {
        let bytes = self.rows(value) * self.plan.values[value].row_bytes();
        match self.plan.values[value].operand {
            Operand::Arena { offset } => Ok((&self.arena, offset..offset + bytes)),
            Operand::Io(Io::Logits) => Ok((&self.logits, 0..bytes)),
            Operand::Io(Io::ArgMax) => Ok((&self.best, 0..bytes)),
            _ => Err(broken("an operand is not in a buffer that steps read and write")),
        }
    }
}
