//! What the members of the team keep from step to step, and the form of their work.

use crate::device::DeviceError;
use crate::device::cpu::executor::launch::AttentionBuffers;
use crate::device::cpu::kernels::argmax::Argmax;
use crate::device::cpu::kernels::attention::AttentionScratch;
use crate::device::cpu::thread_pool::WorkerCtx;
use std::cell::RefCell;
use std::sync::atomic::AtomicU64;

/// What one member does for a step.
pub(super) type Task<'w> = dyn Fn(&WorkerCtx<'_>, &mut WorkerScratch) + Sync + 'w;

/// What becomes of a step's work: it is run, alone or with others.
pub(super) type Continuation<'t> = &'t mut dyn FnMut(&Task<'_>) -> Result<(), DeviceError>;

/// Room of one member.
#[derive(Debug)]
pub(super) struct WorkerScratch {
    pub attention: Option<AttentionScratch>,
    /// The widest row.
    pub row: Vec<f32>,
}

/// Room of a step that shares a group with others, one a lane.
#[derive(Debug, Default)]
pub(super) struct StreamScratch {
    /// A bit for each piece that members claim.
    pub claims: Vec<AtomicU64>,
    /// Where members' shares of several matrices begin.
    pub bounds: Vec<Vec<usize>>,
    /// The largest logit of each row in each member's columns.
    pub bests: Vec<Argmax>,
}

/// Room that steps need besides the arena.
#[derive(Debug)]
pub(super) struct Scratch {
    pub workers: RefCell<Vec<WorkerScratch>>,
    pub streams: Vec<RefCell<StreamScratch>>,
    pub attention: RefCell<AttentionBuffers>,
}
