//! What the members of the team keep from step to step, and the form of their work.

use crate::device::DeviceError;
use crate::device::cpu::executor::launch::AttentionRoom;
use crate::device::cpu::kernels::argmax::Best;
use crate::device::cpu::kernels::attention::AttentionScratch;
use crate::device::cpu::thread_pool::Member;
use std::cell::RefCell;
use std::sync::atomic::AtomicU64;

/// What one member does for a step.
pub(super) type Work<'w> = dyn Fn(&Member<'_>, &mut MemberScratch) + Sync + 'w;

/// What becomes of a step's work: it is run, alone or with others.
pub(super) type Then<'t> = &'t mut dyn FnMut(&Work<'_>) -> Result<(), DeviceError>;

/// Room of one member.
#[derive(Debug)]
pub(super) struct MemberScratch {
    pub attention: Option<AttentionScratch>,
    /// The widest row.
    pub row: Vec<f32>,
}

/// Room of a step that shares a group with others, one a lane.
#[derive(Debug, Default)]
pub(super) struct LaneScratch {
    /// A bit for each piece that members claim.
    pub claims: Vec<AtomicU64>,
    /// Where members' shares of several matrices begin.
    pub bounds: Vec<Vec<usize>>,
    /// The largest logit of each row in each member's columns.
    pub bests: Vec<Best>,
}

/// Room that steps need besides the arena.
#[derive(Debug)]
pub(super) struct Scratch {
    pub members: RefCell<Vec<MemberScratch>>,
    pub lanes: Vec<RefCell<LaneScratch>>,
    pub attention: RefCell<AttentionRoom>,
}
