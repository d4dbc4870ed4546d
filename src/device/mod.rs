//! Devices: the [`Device`] trait, which runs compiled plans, and its implementations.
//!
//! # Contract
//!
//! - **A device executes compiled plans.** There are no methods for single operations: fusion, memory and order are in
//!   the [`Plan`] as data.
//! - **The caller validates.** Plans are checked when compiled, requests when submitted. A device reports only errors
//!   that
//!   cannot be foreseen: no memory, a failed call, a lost device. It returns [`DeviceError::Invalid`] if the contract is broken,
//!   and never reads or writes outside a bound buffer.
//! - **Ids are opaque and belong to one device.** A foreign or stale id is [`DeviceError::Invalid`].
//! - **Streams are queues**: work on one stream runs in the given order; `record` and `wait` order streams against each
//!   other; `read` and the host wait for the event they need. Events are increasing numbers, so "reached" means
//!   "reached or passed". A device that computes inline may finish everything within the call.
//! - **Dropping never fails.** Freeing an id twice has no effect.
//! - **`launch` is deterministic for each row**: a row's results depend on its own sequence's rows and stored keys and
//!   values,
//!   never on the other rows of the batch ([`DeviceCaps::batch_invariant`] reports whether the device guarantees this).

#[cfg(feature = "ascend")]
pub mod ascend;
pub mod cpu;
mod error;
mod handles;
mod peaks;
mod weight_bytes;

use std::fmt;

pub use error::DeviceError;
pub use handles::{OwnedBuffer, OwnedProgram, OwnedWeights};
pub use peaks::PeakRates;

use crate::graph::{CompileError, Plan, Target, Weight};
use crate::kv_cache::{BlockId, KvDType, KvGeometry};
use crate::settings::with_methods;
use crate::weights::WeightSource;

macro_rules! ids {
    ($($(#[$doc:meta])* $name:ident),*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(pub u64);
    )*};
}

ids! {
    /// A buffer of the device.
    BufferId,
    /// A queue of work.
    StreamId,
    /// A point in a stream's work; only grows.
    EventId,
    /// Uploaded weights.
    WeightSetId,
    /// A loaded plan.
    ProgramId
}

/// Kind of memory of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MemKind {
    /// The device's own memory.
    Device,
    /// Host memory the device can copy from and to without a stop.
    Pinned,
}

/// A stretch of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The buffer.
    pub buffer: BufferId,
    /// Bytes from its start.
    pub offset: u64,
    /// Bytes.
    pub bytes: u64,
}

/// Capabilities of a device.
#[derive(Clone, Debug, PartialEq)]
#[allow(clippy::struct_excessive_bools, reason = "facts of a machine, independent of each other")]
#[non_exhaustive]
pub struct DeviceCaps {
    /// Short name (`cpu`).
    pub name: &'static str,
    /// For people: processor, instruction set, threads.
    pub description: String,
    /// Target description for the compiler.
    pub target: Target,
    /// Types keys and values can be stored in.
    pub kv_dtypes: Vec<KvDType>,
    /// Block sizes it can run are the multiples of this up to `max_block_size`.
    pub block_size_step: usize,
    /// Largest block size.
    pub max_block_size: usize,
    /// Block size it prefers.
    pub default_block_size: usize,
    /// Whether launches must be padded to the bucket.
    pub static_shapes: bool,
    /// Whether the device shares the host's memory: results can be read in place instead of being copied out after the
    /// launch.
    pub unified_memory: bool,
    /// Steps in flight that it prefers: 1 if it computes inline, more if it works while the host does something else.
    pub default_pipeline_depth: u32,
    /// Whether a row's result is bit-equal in every batch.
    pub batch_invariant: bool,
    /// Number of cards with their own memory. If there are several, each runs one rank, and a model must have as many
    /// ranks.
    pub cards: u32,
    /// Maximum number of tensor-parallel ranks.
    pub max_ranks: u32,
    /// Whether it runs plans with f32 activations, so that sequences that overflow can go on in one.
    pub retry_f32: bool,
    /// Whether the device replaces a value that is too large for its type by the largest value of the type, and counts
    /// it. Otherwise such a value becomes infinite.
    pub clamps: bool,
    /// Bytes of memory that can be allocated, per card if there are several; `None` if unknown.
    pub memory_bytes: Option<u64>,
}

impl DeviceCaps {
    /// Checks whether keys and values of this geometry can be stored. `element_bytes` is the largest size of one
    /// element with its share of scales and padding, keys and values together.
    ///
    /// # Errors
    /// [`DeviceError::Invalid`] names the part of the geometry that the device does not support.
    fn check_geometry(&self, geometry: &KvGeometry, element_bytes: usize) -> Result<(), DeviceError> {
        let invalid = |what: String| Err(DeviceError::Invalid { what });
        let KvGeometry { layers, kv_heads, head_dim, block_size, dtype } = *geometry;
        let (step, most) = (self.block_size_step, self.max_block_size);
        if block_size == 0 || !block_size.is_multiple_of(step) || block_size > most {
            return invalid(format!("block size {block_size} is no multiple of {step} up to {most}"));
        }
        if !self.kv_dtypes.contains(&dtype) {
            return invalid(format!("KV type {dtype:?} is not available"));
        }
        let factors = [layers, kv_heads, head_dim, block_size, element_bytes];
        let bytes = factors.iter().try_fold(1usize, |n, &m| n.checked_mul(m));
        if bytes.is_none_or(|bytes| bytes == 0 || bytes > isize::MAX as usize) {
            return invalid(format!("no KV block has {layers} layers of {kv_heads} heads of {head_dim}"));
        }
        Ok(())
    }
}

/// Layout of a block of the KV cache on a device.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct KvLayout {
    /// Names the layout; part of the fingerprint of anything that stores blocks.
    pub id: String,
    /// Bytes of a block over all layers, per card if there are several.
    pub bytes_per_block: u64,
    /// Alignment of a pool.
    pub alignment: u64,
    /// Blocks at the end of a pool that the device uses itself, in addition to those of the caller.
    pub reserved_blocks: u64,
}

impl KvLayout {
    /// A layout without reserved blocks.
    pub fn new(id: impl Into<String>, bytes_per_block: u64, alignment: u64) -> Self {
        Self { id: id.into(), bytes_per_block, alignment, reserved_blocks: 0 }
    }

    with_methods! {
        value {
            bytes_per_block with_bytes_per_block: u64,
            reserved_blocks with_reserved_blocks: u64,
        }
    }
}

/// Buffers of one launch: eight different ones, each span exactly as long as the launch's shape requires.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Bindings {
    /// `u32` ids, one per row.
    pub token_ids: Span,
    /// `u32` positions, one per row.
    pub positions: Span,
    /// `u32` block ids, `table_stride` a sequence.
    pub block_tables: Span,
    /// `u32` rows whose logits are requested.
    pub logit_rows: Span,
    /// `f32` logits out.
    pub logits: Span,
    /// `u32` id of the largest logit of each row of logits out: the lowest of equals, [`NO_TOKEN`](crate::graph::NO_TOKEN)
    /// where one is not finite.
    pub argmax: Span,
    /// `u8` [`RowStatus`](crate::graph::RowStatus) of each row of the batch out.
    pub row_status: Span,
    /// The KV pool.
    pub kv_pool: Span,
}

impl Bindings {
    /// Only the KV pool. A launch is refused until the spans that its shape needs are set.
    pub const fn new(kv_pool: Span) -> Self {
        let none = Span { bytes: 0, ..kv_pool };
        Self {
            token_ids: none,
            positions: none,
            block_tables: none,
            logit_rows: none,
            logits: none,
            argmax: none,
            row_status: none,
            kv_pool,
        }
    }

    with_methods! {
        value {
            token_ids with_token_ids: Span,
            positions with_positions: Span,
            block_tables with_block_tables: Span,
            logit_rows with_logit_rows: Span,
            logits with_logits: Span,
            argmax with_argmax: Span,
            row_status with_row_status: Span,
        }
    }
}

/// Actual sizes of one launch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LaunchShape {
    /// Rows of the batch.
    pub tokens: usize,
    /// Sequences of the batch.
    pub seqs: usize,
    /// Number of rows whose logits are requested.
    pub logit_rows: usize,
    /// Entries from one sequence's block table to the next.
    pub table_stride: usize,
}

impl LaunchShape {
    /// Sizes of a launch.
    pub const fn new(tokens: usize, seqs: usize, logit_rows: usize, table_stride: usize) -> Self {
        Self { tokens, seqs, logit_rows, table_stride }
    }
}

/// Arguments of a launch in addition to the program. Lengths are passed on the host as well, because some devices take
/// the lengths of attention there.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct LaunchArgs<'a> {
    /// Buffers.
    pub io: Bindings,
    /// Sizes.
    pub shape: LaunchShape,
    /// Rows each sequence brings; at least 1 each, `shape.tokens` in all. No two sequences write into one block.
    pub q_lens: &'a [u32],
    /// Tokens each sequence has after this launch.
    pub kv_lens: &'a [u32],
}

impl<'a> LaunchArgs<'a> {
    /// Arguments of a launch.
    pub const fn new(io: Bindings, shape: LaunchShape, q_lens: &'a [u32], kv_lens: &'a [u32]) -> Self {
        Self { io, shape, q_lens, kv_lens }
    }
}

/// A custom operation that failed in a launch.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CustomFailure {
    /// Rows of the batch it was called for.
    pub rows: std::ops::Range<usize>,
    /// The operation's name.
    pub name: String,
    /// Message of the operation or its panic.
    pub reason: String,
}

impl CustomFailure {
    /// The call of operation `name` for these rows of the batch failed.
    pub fn new(rows: std::ops::Range<usize>, name: impl Into<String>, reason: impl Into<String>) -> Self {
        Self { rows, name: name.into(), reason: reason.into() }
    }
}

/// A machine that executes plans. See the [module](self) for the contract.
///
/// The trait is open, but it may change in any release before 1.0.
pub trait Device: Send + Sync + fmt::Debug {
    /// Capabilities of the device.
    fn caps(&self) -> &DeviceCaps;

    /// Reserves zeroed memory.
    fn alloc(&self, bytes: u64, kind: MemKind) -> Result<BufferId, DeviceError>;
    /// Frees a buffer; an unknown id has no effect.
    fn free(&self, buffer: BufferId);
    /// Queues a copy from the host; `src` may be reused when the call returns.
    fn write(&self, dst: Span, src: &[u8], on: StreamId) -> Result<(), DeviceError>;
    /// Copies the contents of `src` to the host once the event is reached; without an event, once all work queued so
    /// far on any stream has run. Work queued after the event is not waited for, and must not write to `src`.
    ///
    /// # Errors
    /// [`DeviceError::Invalid`] for an unknown id or lengths that differ, otherwise the failure of the device.
    fn read(&self, src: Span, dst: &mut [u8], after: Option<EventId>) -> Result<(), DeviceError>;
    /// Queues a copy inside the device.
    fn copy(&self, dst: Span, src: Span, on: StreamId) -> Result<(), DeviceError>;
    /// Queues copies of sampled tokens to the rows of the next launch (deferred tokens).
    ///
    /// For each `(to, from)`, number `from` of `best` replaces the `u32` number `to` of `ids`. If it is
    /// [`NO_TOKEN`](crate::graph::NO_TOKEN), the launch must accept the copied id (the CPU copies id 0): the row's
    /// result is undefined and must be ignored.
    ///
    /// # Errors
    /// [`DeviceError::Invalid`] for an unknown id or an index out of range, otherwise the failure of the device.
    fn copy_sampled_tokens(&self, ids: Span, best: Span, rows: &[(u32, u32)], on: StreamId) -> Result<(), DeviceError>;

    /// A new queue.
    fn stream(&self) -> Result<StreamId, DeviceError>;
    /// Marks the present end of a queue.
    fn record(&self, on: StreamId) -> Result<EventId, DeviceError>;
    /// Work queued on `on` from now runs after the event.
    fn wait(&self, on: StreamId, event: EventId) -> Result<(), DeviceError>;
    /// Blocks the host until the event is reached.
    fn wait_host(&self, event: EventId) -> Result<(), DeviceError>;

    /// Layout of blocks of this geometry.
    ///
    /// # Errors
    /// [`DeviceError::Invalid`] for a geometry that the device does not support.
    fn kv_layout(&self, geometry: &KvGeometry) -> Result<KvLayout, DeviceError>;
    /// Default type of keys and values for a model with these weights; `None` leaves the choice to the numerics.
    fn kv_dtype(&self, _weights: &[Weight]) -> Option<KvDType> {
        None
    }
    /// Packs weights tensor by tensor, and releases the pages of each tensor after it is packed. A program refers to
    /// weights by their index in this list. `rank` is the rank of the shards: 0 without tensor parallelism.
    ///
    /// # Errors
    /// [`DeviceError::Invalid`] for a tensor that is missing or of another shape or type, [`DeviceError::OutOfMemory`]
    /// if memory is exhausted, otherwise the failure of the device.
    fn upload(&self, source: &dyn WeightSource, weights: &[Weight], rank: u32) -> Result<WeightSetId, DeviceError>;
    /// Frees a weight set that no program uses any longer.
    fn release_weights(&self, weights: WeightSetId);
    /// Prepares plans for launching, one a rank of the model in order, each with the weights its graph names: resolves
    /// operations, allocates arenas. `kv` has the heads of all ranks.
    fn load(&self, plans: &[Plan], weights: &[WeightSetId], kv: &KvGeometry) -> Result<ProgramId, CompileError>;
    /// Elements that were too large for the type they are stored in and were clamped, by operation, since the program was
    /// loaded; operations without any are left out.
    fn overflows(&self, program: ProgramId) -> Vec<(&'static str, u64)>;
    /// Calls of custom operations that failed in the program's last launch.
    fn custom_failures(&self, program: ProgramId) -> Vec<CustomFailure>;
    /// Frees a program.
    fn unload(&self, program: ProgramId);
    /// Queues one batch.
    fn launch(&self, program: ProgramId, args: &LaunchArgs<'_>, on: StreamId) -> Result<(), DeviceError>;
    /// Queues copies of whole KV blocks `(from, to)` from one pool to another (or within one), in the order given. A block
    /// outside its pool fails the call before anything is copied.
    fn copy_blocks(
        &self,
        layout: &KvLayout,
        src_pool: Span,
        dst_pool: Span,
        pairs: &[(BlockId, BlockId)],
        on: StreamId,
    ) -> Result<(), DeviceError>;

    /// Observations of the device, if it has any; not part of the contract.
    fn telemetry(&self) -> Option<&dyn Telemetry> {
        None
    }
}

/// Observations of a device: nothing that a plan's results depend on.
pub trait Telemetry {
    /// Diagnostics for the user, such as why a fallback is in use.
    fn notes(&self) -> Vec<String> {
        Vec::new()
    }

    /// Peak rates, if they are known or can be measured.
    ///
    /// A device that measures does so in the first call, for some tens of milliseconds on all its threads. Call it
    /// while the device is idle: running work would lower the figures and be delayed.
    fn peak_rates(&self) -> Option<PeakRates> {
        None
    }

    /// Free bytes of the device's own memory, on the card with the least; `None` if it uses the host's memory.
    fn free_bytes(&self) -> Option<u64> {
        None
    }

    /// Energy used since the first call by everything that runs on the device, in microjoules; `None` without a meter.
    ///
    /// Use the difference of two calls. A device whose meter shows power instead of energy samples it as long as there
    /// is a call every two minutes, and counts other times at the lowest power seen.
    fn energy_uj(&self) -> Option<u64> {
        None
    }
}
