//! State shared by all steps of a launch, and views of their operands.

use crate::device::cpu::Isa;
use crate::device::cpu::executor::RowStatusFlags;
use crate::device::cpu::kernels::attention::WorkSplit;
use crate::device::cpu::kernels::kv_cache::BatchRows;
use crate::device::cpu::thread_pool::ThreadPool;
use crate::device::{DeviceError, LaunchShape};
pub(super) fn broken(what: &str) -> DeviceError {
    DeviceError::Invalid { what: format!("plan: {what}") }
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

/// Bytes of a launch's bound buffers.
#[derive(Debug)]
pub(crate) struct IoBytes<'a> {
    pub token_ids: &'a [u32],
    pub positions: &'a [u32],
    pub block_tables: &'a [u32],
    pub logit_rows: &'a [u32],
    pub logits: &'a mut [u8],
    pub best: &'a mut [u8],
    pub row_status: &'a mut [u8],
    pub kv_pool: &'a mut [u8],
}

/// Scratch of attention steps.
#[derive(Debug)]
pub(super) struct AttentionBuffers {
    pub schedule: WorkSplit,
    /// Partial sums of split segments.
    pub partials: Vec<f32>,
}

/// State shared by all steps of a launch.
pub(super) struct Launch<'a> {
    pub threads: &'a ThreadPool,
    pub isa: Isa,
    pub token_ids: &'a [u32],
    pub positions: &'a [u32],
    pub logit_rows: &'a [u32],
    pub pool_bytes: usize,
    pub batch: BatchRows<'a>,
    pub shape: LaunchShape,
    pub flags: &'a RowStatusFlags,
}
