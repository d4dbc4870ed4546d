//! Where a step's operands are: ranges of the arena, cut to the batch's actual rows.

use std::ops::Range;

use super::Frame;
use crate::device::DeviceError;
use crate::graph::{Elem, Io, Operand, Rows};

pub(super) fn broken(what: &str) -> DeviceError {
    DeviceError::Invalid { what: format!("plan: {what}") }
}

impl Frame<'_> {
    /// Rows that a value has in this batch.
    pub(super) fn rows(&self, value: usize) -> usize {
        match self.plan.values[value].rows {
            Rows::Tokens => self.shape.tokens,
            Rows::LogitRows => self.shape.logit_rows,
        }
    }

    pub(super) fn cols(&self, value: usize) -> usize {
        self.plan.values[value].cols
    }

    pub(super) fn elem(&self, value: usize) -> Elem {
        self.plan.values[value].elem
    }

    /// Bytes of the arena that hold a value's rows.
    pub(super) fn range(&self, value: usize) -> Result<Range<usize>, DeviceError> {
        match self.plan.values[value].operand {
            Operand::Arena { offset } => Ok(offset..offset + self.rows(value) * self.plan.values[value].row_bytes()),
            _ => Err(broken("an operand is not in the arena")),
        }
    }

    pub(super) fn is_logits(&self, value: usize) -> bool {
        self.plan.values[value].operand == Operand::Io(Io::Logits)
    }
}

pub(super) fn floats(bytes: &[u8]) -> &[f32] {
    bytemuck::cast_slice(bytes)
}

pub(super) fn floats_mut(bytes: &mut [u8]) -> &mut [f32] {
    bytemuck::cast_slice_mut(bytes)
}

pub(super) fn overlap() -> DeviceError {
    broken("operands overlap or lie outside the arena")
}
