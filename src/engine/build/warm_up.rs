//! Warm-up: decode steps before the first request. The work that a device does once for each bucket, such as graph
//! capture, then does not delay the first requests.
//!
//! The steps write keys and values into free blocks. That is allowed, since the sequence that allocates a block writes
//! each of its slots before it reads the slot. The results of the steps are ignored.

use std::time::Duration;

use crate::device::DeviceError;
use crate::engine::clock::{Clock, elapsed_us, micros};
use crate::kv_cache::BlockId;
use crate::runner::{ForwardInput, ModelExecutor as _, ModelRunner};

/// Runs one step for each of the `buckets`, in ascending order, until `budget` is spent.
///
/// Each row of a step is the first row of a sequence of its own. `report` receives the number of steps that have run.
///
/// # Errors
/// The [`DeviceError`] of the device.
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
