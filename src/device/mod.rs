//! Devices: the [`Device`] trait, which executes compiled plans, and its implementations.
//!
//! # Contract
//!
//! - **A device executes compiled plans.** The trait has no methods for single operations: the [`Plan`] contains the
//!   fused operations, the memory plan and the order of execution as data.
//! - **The caller validates.** The compiler checks plans, and the engine checks requests when they are submitted. A
//!   device reports only failures that cannot be foreseen: out of memory, a failed call, a lost device. If the caller
//!   violates the contract, a device returns [`DeviceError::Invalid`], and it never reads or writes outside a bound
//!   buffer.
//! - **Ids are opaque and belong to one device.** A stale id or an id of another device causes
//!   [`DeviceError::Invalid`].
//! - **Streams are queues**: work on one stream runs in the order in which it was queued. `record` and `wait` order
//!   streams against each other. `read` and the host wait for the event that they need. Events are increasing numbers,
//!   so "reached" means "reached or passed". A device that computes inline may finish all work within the call.
//! - **Dropping never fails.** Freeing an id twice has no effect.
//! - **`launch` is deterministic per row**: a row's results depend on the rows and the stored keys and values of its
//!   own sequence, never on the other sequences of the batch ([`DeviceCaps::batch_invariant`] reports whether the
//!   device guarantees this).

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
    /// Id of a device buffer.
    BufferId,
    /// Id of a stream: a queue of work.
    StreamId,
    /// Id of an event: a position in a stream's work. Ids of later events are larger.
    EventId,
    /// Id of a set of uploaded weights.
    WeightSetId,
    /// Id of a loaded program: the plans of all ranks.
    ProgramId
}

/// Kind of memory of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MemKind {
    /// The device's own memory.
    Device,
    /// Pinned host memory, from and to which the device copies asynchronously.
    Pinned,
}

/// Byte range of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The buffer.
    pub buffer: BufferId,
    /// First byte, counted from the start of the buffer.
    pub offset: u64,
    /// Number of bytes.
    pub bytes: u64,
}

/// Capabilities of a device.
#[derive(Clone, Debug, PartialEq)]
#[allow(clippy::struct_excessive_bools, reason = "the capabilities are independent of each other")]
#[non_exhaustive]
pub struct DeviceCaps {
    /// Short name, e.g. `cpu`.
    pub name: &'static str,
    /// Description for the user: processor, instruction set, threads.
    pub description: String,
    /// Target description for the graph compiler.
    pub target: Target,
    /// Supported element types of the KV cache.
    pub kv_dtypes: Vec<KvDType>,
    /// Step of the supported block sizes: the multiples of this number up to `max_block_size`.
    pub block_size_step: usize,
    /// Largest supported block size.
    pub max_block_size: usize,
    /// Default block size.
    pub default_block_size: usize,
    /// Whether the caller must pad launches to their bucket.
    pub static_shapes: bool,
    /// Whether the device's memory is host memory: reading results in place is as good as copying them out after the
    /// launch.
    pub unified_memory: bool,
    /// Default number of in-flight steps: 1 if the device computes inline, more if it computes while the host does
    /// other work.
    pub default_pipeline_depth: u32,
    /// Whether a row's result is bit-equal in every batch.
    pub batch_invariant: bool,
    /// Number of cards, each with its own memory. With several cards, each runs one rank, and every model must have as
    /// many ranks as there are cards.
    pub cards: u32,
    /// Largest number of ranks over which a model can be sharded.
    pub max_ranks: u32,
    /// Whether the device supports plans with f32 activations, the f32 fallback of sequences that overflow.
    pub retry_f32: bool,
    /// Whether a value that overflows its storage type saturates to the largest finite value and is counted. If false,
    /// such a value becomes infinite.
    pub clamps: bool,
    /// Number of bytes that the device can allocate, if known; on each card if there are several.
    pub memory_bytes: Option<u64>,
}

impl DeviceCaps {
    /// Checks whether the device can store keys and values in this geometry.
    ///
    /// `element_bytes` is an upper bound for the bytes of one key element and one value element together, including
    /// their share of scales and padding.
    fn check_geometry(&self, geometry: &KvGeometry, element_bytes: usize) -> Result<(), DeviceError> {
        let invalid = |what: String| Err(DeviceError::Invalid { what });
        let KvGeometry { layers, kv_heads, head_dim, block_size, dtype } = *geometry;
        let (step, most) = (self.block_size_step, self.max_block_size);
        if block_size == 0 || !block_size.is_multiple_of(step) || block_size > most {
            return invalid(format!(
                "block size {block_size} is unsupported: expected a multiple of {step} up to {most}"
            ));
        }
        if !self.kv_dtypes.contains(&dtype) {
            return invalid(format!("KV type {dtype:?} is unsupported: expected one of {:?}", self.kv_dtypes));
        }
        let factors = [layers, kv_heads, head_dim, block_size, element_bytes];
        let bytes = factors.iter().try_fold(1usize, |n, &m| n.checked_mul(m));
        if bytes.is_none_or(|bytes| bytes == 0 || bytes > isize::MAX as usize) {
            return invalid(format!(
                "a KV block of {layers} layers of {kv_heads} heads of {head_dim} elements is empty or exceeds isize::MAX bytes"
            ));
        }
        Ok(())
    }
}

/// Layout of a block of the KV cache on a device.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct KvLayout {
    /// Id of the layout; part of the fingerprint of everything that stores blocks.
    pub id: String,
    /// Number of bytes of a block over all layers, on each card if there are several.
    pub bytes_per_block: u64,
    /// Alignment of a pool in bytes.
    pub alignment: u64,
    /// Number of additional blocks at the end of a pool, which only the device itself uses.
    pub reserved_blocks: u64,
}

impl KvLayout {
    /// Creates a layout without reserved blocks.
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

/// Buffers of one launch: eight different buffers. Each span has exactly the length that the launch's shape requires.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Bindings {
    /// `u32` token ids, one per row.
    pub token_ids: Span,
    /// `u32` positions, one per row.
    pub positions: Span,
    /// `u32` block ids, `table_stride` per sequence.
    pub block_tables: Span,
    /// `u32` indices of the rows whose logits are requested.
    pub logit_rows: Span,
    /// Output: `f32` logits.
    pub logits: Span,
    /// Output: `u32` argmax of each logit row, the lowest id wins a tie; [`NO_TOKEN`](crate::graph::NO_TOKEN) if a logit
    /// of the row is not finite.
    pub argmax: Span,
    /// Output: `u8` [`RowStatus`](crate::graph::RowStatus) of each row of the batch.
    pub row_status: Span,
    /// The KV pool.
    pub kv_pool: Span,
}

impl Bindings {
    /// Creates bindings that contain only the KV pool.
    ///
    /// [`Device::launch`] fails until the caller has set the spans that the launch's shape requires.
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

/// Sizes of one launch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LaunchShape {
    /// Number of rows of the batch.
    pub tokens: usize,
    /// Number of sequences of the batch.
    pub seqs: usize,
    /// Number of rows whose logits are requested.
    pub logit_rows: usize,
    /// Distance between the block tables of two sequences, in entries.
    pub table_stride: usize,
}

impl LaunchShape {
    /// Creates the sizes of a launch.
    pub const fn new(tokens: usize, seqs: usize, logit_rows: usize, table_stride: usize) -> Self {
        Self { tokens, seqs, logit_rows, table_stride }
    }
}

/// Arguments of a launch, in addition to the program.
///
/// The lengths are also passed on the host, because some devices read the lengths for attention there.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct LaunchArgs<'a> {
    /// Buffers of the launch.
    pub io: Bindings,
    /// Sizes of the launch.
    pub shape: LaunchShape,
    /// Number of rows of each sequence: at least 1 each, `shape.tokens` in all. No two sequences write to the same
    /// block.
    pub q_lens: &'a [u32],
    /// Number of tokens of each sequence after this launch.
    pub kv_lens: &'a [u32],
}

impl<'a> LaunchArgs<'a> {
    /// Creates the arguments of a launch.
    pub const fn new(io: Bindings, shape: LaunchShape, q_lens: &'a [u32], kv_lens: &'a [u32]) -> Self {
        Self { io, shape, q_lens, kv_lens }
    }
}

/// Failed call of a custom operation in a launch.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CustomFailure {
    /// Rows of the batch for which the operation was called.
    pub rows: std::ops::Range<usize>,
    /// Name of the operation.
    pub name: String,
    /// Error message or panic message of the operation.
    pub reason: String,
}

impl CustomFailure {
    /// Creates a failure of the operation `name` for these rows of the batch.
    pub fn new(rows: std::ops::Range<usize>, name: impl Into<String>, reason: impl Into<String>) -> Self {
        Self { rows, name: name.into(), reason: reason.into() }
    }
}

/// Device that executes compiled plans. See the [module](self) for the contract.
///
/// Other crates can implement the trait, but it may change in any release before 1.0.
///
/// In addition to the errors listed below, each fallible call can return a failure of the device's runtime
/// ([`DeviceError::Call`]) and, once the device is lost, an error for which [`DeviceError::is_lost`] is true.
pub trait Device: Send + Sync + fmt::Debug {
    /// Returns the capabilities of the device.
    fn caps(&self) -> &DeviceCaps;

    /// Allocates zeroed memory.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] if too little memory is free.
    fn alloc(&self, bytes: u64, kind: MemKind) -> Result<BufferId, DeviceError>;
    /// Frees a buffer; an unknown id has no effect.
    fn free(&self, buffer: BufferId);
    /// Queues a copy from the host to the device; the caller may reuse `src` when the call returns.
    ///
    /// # Errors
    /// [`DeviceError::Invalid`] if the stream or the buffer is unknown, the span is out of bounds, or the lengths
    /// differ.
    fn write(&self, dst: Span, src: &[u8], on: StreamId) -> Result<(), DeviceError>;
    /// Copies to the host the contents that `src` has after the event, and waits for the copy.
    ///
    /// If `after` is `None`, the contents are those after all work that is queued on any stream at the time of the
    /// call. The call does not wait for work that is queued after the event, and such work must not write to `src`.
    ///
    /// # Errors
    /// [`DeviceError::Invalid`] if the event or the buffer is unknown, the span is out of bounds, or the lengths
    /// differ.
    fn read(&self, src: Span, dst: &mut [u8], after: Option<EventId>) -> Result<(), DeviceError>;
    /// Queues a copy inside the device.
    ///
    /// # Errors
    /// [`DeviceError::Invalid`] if the stream or a buffer is unknown, a span is out of bounds, or the lengths differ.
    fn copy(&self, dst: Span, src: Span, on: StreamId) -> Result<(), DeviceError>;
    /// Queues the copy of sampled ids into the deferred tokens of the next launch.
    ///
    /// For each pair `(to, from)` of `rows`, the `u32` at index `from` of `argmax` is copied to index `to` of `ids`. If
    /// that id is [`NO_TOKEN`](crate::graph::NO_TOKEN), the next launch must accept the copied id (the CPU device
    /// copies id 0 instead): the row's result is undefined and must be ignored.
    ///
    /// # Errors
    /// [`DeviceError::Invalid`] if the stream or a buffer is unknown, a span is out of bounds, or an index is outside
    /// its span.
    fn copy_sampled_tokens(
        &self,
        ids: Span,
        argmax: Span,
        rows: &[(u32, u32)],
        on: StreamId,
    ) -> Result<(), DeviceError>;

    /// Creates a stream.
    ///
    /// # Errors
    /// [`DeviceError::Call`] if a call of the device's runtime fails.
    fn stream(&self) -> Result<StreamId, DeviceError>;
    /// Records an event at the current end of a stream.
    ///
    /// # Errors
    /// [`DeviceError::Invalid`] if the stream is unknown.
    fn record(&self, on: StreamId) -> Result<EventId, DeviceError>;
    /// Orders all work that is queued on `on` from now on after the event.
    ///
    /// # Errors
    /// [`DeviceError::Invalid`] if the stream or the event is unknown.
    fn wait(&self, on: StreamId, event: EventId) -> Result<(), DeviceError>;
    /// Blocks the calling thread until the event is reached.
    ///
    /// # Errors
    /// [`DeviceError::Invalid`] if the event is unknown; [`DeviceError::TimedOut`] if the event is not reached in time.
    fn wait_host(&self, event: EventId) -> Result<(), DeviceError>;

    /// Returns the device's layout of KV blocks of this geometry.
    ///
    /// # Errors
    /// [`DeviceError::Invalid`] if the device does not support the block size, the element type or the shape.
    fn kv_layout(&self, geometry: &KvGeometry) -> Result<KvLayout, DeviceError>;
    /// Returns the default element type of the KV cache for a model with these weights.
    ///
    /// It applies if the user configures no type. `None` leaves the choice to the numerics.
    fn kv_dtype(&self, _weights: &[Weight]) -> Option<KvDType> {
        None
    }
    /// Packs and uploads weights tensor by tensor.
    ///
    /// After each tensor is packed, the device releases the source's pages of that tensor. A program refers to weights
    /// by their index in this list. `rank` is the rank of the weights, 0 if the model is not sharded.
    ///
    /// # Errors
    /// [`DeviceError::Invalid`] if a tensor is missing or differs from its weight in the graph;
    /// [`DeviceError::OutOfMemory`] if too little memory is free.
    fn upload(&self, source: &dyn WeightSource, weights: &[Weight], rank: u32) -> Result<WeightSetId, DeviceError>;
    /// Releases a weight set. Its memory is freed when no program uses it any longer.
    fn release_weights(&self, weights: WeightSetId);
    /// Prepares plans for launches: resolves their operations and allocates their arenas.
    ///
    /// `plans` contains one plan per rank of the model, in order, and `weights` the weight set of each rank's graph.
    /// `kv` contains the heads of all ranks.
    ///
    /// # Errors
    /// A [`CompileError`] if a plan is invalid, a weight set is unknown or belongs to another plan, the KV geometry is
    /// not supported, or too little memory is free.
    fn load(&self, plans: &[Plan], weights: &[WeightSetId], kv: &KvGeometry) -> Result<ProgramId, CompileError>;
    /// Returns the number of elements that overflowed their storage type and saturated, per operation.
    ///
    /// The count begins when the program is loaded. Operations without overflow are left out.
    fn overflows(&self, program: ProgramId) -> Vec<(&'static str, u64)>;
    /// Returns the failed calls of custom operations in the program's last launch.
    fn custom_failures(&self, program: ProgramId) -> Vec<CustomFailure>;
    /// Unloads a program; an unknown id has no effect.
    fn unload(&self, program: ProgramId);
    /// Queues the launch of a program on one batch.
    ///
    /// # Errors
    /// [`DeviceError::Invalid`] if the stream, the program or a buffer is unknown, or if the arguments violate a rule
    /// of [`LaunchArgs`] or [`Bindings`].
    fn launch(&self, program: ProgramId, args: &LaunchArgs<'_>, on: StreamId) -> Result<(), DeviceError>;
    /// Queues copies of whole KV blocks between two pools or within one pool.
    ///
    /// `pairs` contains `(from, to)`, in the order of the copies.
    ///
    /// # Errors
    /// [`DeviceError::Invalid`] if the stream or a buffer is unknown, or a block is outside its pool; no block is
    /// copied then.
    fn copy_blocks(
        &self,
        layout: &KvLayout,
        src_pool: Span,
        dst_pool: Span,
        pairs: &[(BlockId, BlockId)],
        on: StreamId,
    ) -> Result<(), DeviceError>;

    /// Returns the device's telemetry, if it has any; the contract does not cover it.
    fn telemetry(&self) -> Option<&dyn Telemetry> {
        None
    }
}

/// Telemetry of a device: observations on which no result of a plan depends.
pub trait Telemetry {
    /// Returns diagnostics for the user, e.g. why a fallback is in use.
    fn notes(&self) -> Vec<String> {
        Vec::new()
    }

    /// Returns the peak rates, if they are known or can be measured.
    ///
    /// A device that measures them does so in the first call, which occupies all its threads for some tens of
    /// milliseconds. Make this call while the device is idle: concurrent work lowers the measured rates and is delayed
    /// by the measurement.
    fn peak_rates(&self) -> Option<PeakRates> {
        None
    }

    /// Returns the number of free bytes of the device's own memory, on the card with the fewest.
    ///
    /// Returns `None` if the device's memory is host memory.
    fn free_bytes(&self) -> Option<u64> {
        None
    }

    /// Returns the energy in microjoules that the device has used since the first call.
    ///
    /// The energy is that of all programs on the device. Returns `None` without a meter. Only differences between two
    /// calls are meaningful, so call this method before and after the work. A device whose meter reports power instead
    /// of energy samples the power, as long as there is a call at least every two minutes; for other times it assumes
    /// the lowest power that it has measured.
    fn energy_uj(&self) -> Option<u64> {
        None
    }
}
