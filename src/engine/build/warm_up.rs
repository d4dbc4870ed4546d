//! Warm-up: decode steps before the first request, so that work that a device does once per bucket (such as graph
//! capture) does not delay a request.
//!
//! A warm-up step writes keys and values into free blocks. This is safe, because each later owner of a block writes a
//! slot before it reads it. The results of the step are ignored.

use std::time::Duration;

use crate::device::DeviceError;
use crate::engine::clock::{Clock, elapsed_us, micros};
use crate::kv_cache::BlockId;
use crate::runner::{ForwardInput, ModelExecutor as _, ModelRunner};

/// Runs one step for each of these row counts, ascending, until `budget` is spent. Each row is the first of a sequence
/// of its own. `report` receives the number of finished steps.
///
/// # Errors
/// The error of the device.
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
