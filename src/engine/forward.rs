//! The narrow waist between the loop and the device: one batch of rows in, logits out.
//!
//! Hosts with a loop of their own call this and [`Sampler`](crate::sampler) directly; the engine's tests drive the loop
//! with a scripted model behind the same trait.

use crate::device::DeviceError;
use crate::graph::Cost;
use crate::kv_cache::BlockId;
pub use crate::sampler::LogitRows;

/// One step's batch: rows of all sequences concatenated, sequence after sequence.
///
/// ```text
/// tokens     [ s0 s0 s0 | s1 | s2 s2 ]      one row a token
/// q_lens     [ 3          1    2     ]      rows a sequence brings in this step
/// kv_lens    [ 3          40   18    ]      tokens in its cache after this step, its own rows included
/// tables     [ b7 | b1 b4 b9 | b2 b3 ]      ceil(kv_len / block_size) blocks a sequence, concatenated
/// logit_rows [ 2, 3, 5 ]                    rows whose logits are wanted, ascending
/// ```
/// Row `r` of sequence `s` stands at position `kv_lens[s] - q_lens[s] + r`.
#[derive(Clone, Debug, Default)]
pub struct ForwardInput {
    /// Token ids of all rows.
    pub tokens: Vec<u32>,
    /// Rows each sequence brings, at least 1.
    pub q_lens: Vec<u32>,
    /// Visible length of each sequence after this step.
    pub kv_lens: Vec<u32>,
    /// Block tables, concatenated.
    pub tables: Vec<BlockId>,
    /// Rows whose logits are wanted, ascending.
    pub logit_rows: Vec<u32>,
}

impl ForwardInput {
    /// Empties every list, keeping the room.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.q_lens.clear();
        self.kv_lens.clear();
        self.tables.clear();
        self.logit_rows.clear();
    }
}

/// Runs the model over a batch. One call writes the keys and values of its rows and returns logits.
pub trait Forward: Send {
    /// Runs one batch; the answer borrows buffers that the next call overwrites.
    fn forward(&mut self, input: &ForwardInput) -> Result<LogitRows<'_>, DeviceError>;
    /// Copies whole KV blocks `(from, to)` before the next batch (copy on write).
    fn copy_blocks(&mut self, pairs: &[(BlockId, BlockId)]) -> Result<(), DeviceError>;
    /// Width of a row of logits.
    fn vocab_size(&self) -> usize;
    /// What running this batch costs; zero if the model cannot tell. Called before each batch, so it must be cheap.
    fn cost(&self, input: &ForwardInput) -> Cost {
        let _ = input;
        Cost::default()
    }
}
