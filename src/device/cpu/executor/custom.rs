//! Executes custom operations: one call per sequence, on the launching thread.

use crate::num::to_u32;
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::group::GroupContext;
use super::launch::{broken, floats, floats_mut};
use crate::device::{CustomFailure, DeviceError};
use crate::graph::{CustomCall, Step};
use crate::panic_message::panic_message;

impl GroupContext<'_> {
    /// Calls the operation for each sequence. If a call fails or panics, the sequence's rows pass through unchanged and
    /// are marked.
    pub(super) fn custom(&self, index: usize, step: &Step) -> Result<(), DeviceError> {
        let registered = self.plan.customs.get(index).ok_or_else(|| broken("there is no such custom operation"))?;
        let width = self.cols(step.inputs[0]);
        let (x, out) = (floats(self.read(step.inputs[0])?), floats_mut(self.write(step.outputs[0])?));
        out.copy_from_slice(x);
        let block_size = self.kv.geometry().block_size;
        for sequence in self.launch.batch.sequences(block_size) {
            let rows = sequence.first_row..sequence.first_row + sequence.rows;
            let elements = rows.start * width..rows.end * width;
            let (x, out) = (&x[elements.clone()], &mut out[elements]);
            let first_position = to_u32(sequence.first_position);
            let call = CustomCall::new(&self.launch.token_ids[rows.clone()], first_position, width);
            // A panic may leave `out` half written, so it is overwritten below; the state of the operation itself is up
            // to its author.
            let outcome = catch_unwind(AssertUnwindSafe(|| registered.op.run(&call, x, out)));
            let reason = match outcome {
                Ok(Ok(())) => continue,
                Ok(Err(error)) => error.to_string(),
                Err(panic) => format!("panicked: {}", panic_message(panic.as_ref())),
            };
            out.copy_from_slice(x);
            let name = registered.op.name().to_owned();
            self.flags().custom_failure(CustomFailure { rows, name, reason });
        }
        Ok(())
    }
}
