//! Scratch that workers keep from step to step, and the type of their tasks.

use crate::device::DeviceError;
use crate::device::cpu::executor::launch::AttentionBuffers;
use crate::device::cpu::kernels::argmax::Argmax;
use crate::device::cpu::kernels::attention::AttentionScratch;
use crate::device::cpu::thread_pool::WorkerCtx;
use std::cell::RefCell;
use std::sync::atomic::AtomicU64;

/// Work of one worker for a step.
pub(super) type Task<'w> = dyn Fn(&WorkerCtx<'_>, &mut WorkerScratch) + Sync + 'w;

/// Receives a step's task and runs it, by itself or chained with others.
pub(super) type Continuation<'t> = &'t mut dyn FnMut(&Task<'_>) -> Result<(), DeviceError>;

/// Scratch of one worker.
#[derive(Debug)]
pub(super) struct WorkerScratch {
    pub attention: Option<AttentionScratch>,
    /// Sized for the widest row.
    pub row: Vec<f32>,
}

/// Scratch of a step that shares a group with steps of other streams.
#[derive(Debug, Default)]
pub(super) struct StreamScratch {
    /// One bit per piece of work that workers claim.
    pub claims: Vec<AtomicU64>,
    /// Start of each worker's share of several matrices.
    pub bounds: Vec<Vec<usize>>,
    /// Argmax of each row over each worker's columns.
    pub bests: Vec<Argmax>,
}

/// Scratch of steps in addition to the arena.
#[derive(Debug)]
pub(super) struct Scratch {
    pub workers: RefCell<Vec<WorkerScratch>>,
    pub streams: Vec<RefCell<StreamScratch>>,
    pub attention: RefCell<AttentionBuffers>,
}
