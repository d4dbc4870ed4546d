//! Decode steps before the first request, so that what a device does once for each bucket (such as capturing a graph) is
//! not paid for by whoever comes first.
//!
//! A step writes keys and values into blocks that nobody holds, as every free block may be written: whoever gets one writes
//! each of its slots before it is read. Nothing of a step's results is looked at.

use std::time::Duration;

use crate::device::DeviceError;
use crate::engine::clock::{Clock, elapsed_us, micros};
use crate::kv_cache::BlockId;
use crate::runner::{ForwardInput, ModelExecutor as _, ModelRunner};

/// Runs one step of each of these numbers of rows, ascending, until `budget` is spent: each row is the first of a sequence
/// of its own. `report` is told how many have run.
///
/// # Errors
/// What the device failed with.
pub(crate) fn warm_up(
    runner: &mut ModelRunner,
    buckets: &[u32],
    clock: &dyn Clock,
    budget: Duration,
    mut report: impl FnMut(u32),
) -> Result<(), DeviceError> {
    let start = clock.now();
    let mut input = ForwardInput::default();
    for (ran, &rows) in (1..).zip(buckets) {
        if elapsed_us(start, clock.now()) >= micros(budget) {
            break;
        }
        input.clear();
        for row in 0..rows {
            input.tokens.push(0);
            input.q_lens.push(1);
            input.kv_lens.push(1);
            input.tables.push(BlockId(row));
            input.logit_rows.push(row);
            input.argmax_only.push(true);
        }
        input = runner.forward(input)?.input;
        report(ran);
    }
    Ok(())
}
