//! Executes independent steps as one run of the thread pool.
//!
//! Each step submits a closure for the workers, bound to its operands. The closures of a group are chained on the
//! stack; each worker runs them in sequence, with one barrier at the end. [`ArenaBorrows`] lends the operands, so two
//! steps that would race are refused, whatever the plan says.

use crate::device::cpu::executor::scratch::{Continuation, Task};
use crate::device::cpu::executor::{Scratch, StreamScratch, WorkerScratch};

use super::launch::{Launch, broken};
use super::row_status::RowStatusFlags;
use crate::device::DeviceError;
use crate::device::cpu::Isa;
use crate::device::cpu::kernels::kv_cache::CpuKvLayout;
use crate::device::cpu::memory::{ArenaBorrows, Partition};
use crate::device::cpu::thread_pool::WorkerCtx;
use crate::device::cpu::weights::WeightSet;
use crate::graph::{Op, Plan, Step};

/// Number of elements read and written up to which the caller executes all parts itself. Starting a parallel run and
/// waiting for its end takes 2 to 3 µs, in which one thread normalizes or rotates about this many elements.
const SMALL_ELEMENTS: usize = 8192;

/// All memory that a group of steps may access, borrowed for the run.
pub(super) struct GroupContext<'a> {
    pub launch: &'a Launch<'a>,
    pub plan: &'a Plan,
    pub weights: &'a WeightSet,
    pub kv: CpuKvLayout,
    pub scratch: &'a Scratch,
    pub arena: ArenaBorrows<'a>,
    pub logits: ArenaBorrows<'a>,
    pub best: ArenaBorrows<'a>,
    pub row_status: ArenaBorrows<'a>,
    pub kv_pool: ArenaBorrows<'a>,
}

/// Linked list of tasks that run together, last one first.
struct TaskChain<'c> {
    work: &'c Task<'c>,
    elements: usize,
    before: Option<&'c TaskChain<'c>>,
}

impl TaskChain<'_> {
    fn run(&self, worker: &WorkerCtx<'_>, scratch: &mut WorkerScratch) {
        if let Some(before) = self.before {
            before.run(worker, scratch);
        }
        (self.work)(worker, scratch);
    }

    fn elements(&self) -> usize {
        self.before.map_or(0, Self::elements).saturating_add(self.elements)
    }
}

impl GroupContext<'_> {
    pub(super) fn workers(&self) -> usize {
        self.launch.threads.parts()
    }

    pub(super) const fn isa(&self) -> Isa {
        self.launch.isa
    }

    pub(super) const fn flags(&self) -> &RowStatusFlags {
        self.launch.flags
    }

    /// Scratch of the step's stream.
    pub(super) fn stream_scratch(&self, step: &Step) -> Result<std::cell::RefMut<'_, StreamScratch>, DeviceError> {
        let lane = self.scratch.streams.get(usize::from(step.stream)).and_then(|lane| lane.try_borrow_mut().ok());
        lane.ok_or_else(|| broken("two steps of one group are on one stream"))
    }

    /// Runs the steps of a group in a single run of the thread pool, except for steps that need several runs.
    pub(super) fn run_group(&self, steps: &[Step]) -> Result<(), DeviceError> {
        self.chain(steps, None)
    }

    fn chain(&self, steps: &[Step], before: Option<&TaskChain<'_>>) -> Result<(), DeviceError> {
        let Some((step, rest)) = steps.split_first() else {
            return before
                .map_or(Ok(()), |chain| self.start(chain.elements(), &|worker, scratch| chain.run(worker, scratch)));
        };
        // A batch whose rows all lie inside their prompts has no rows of logits.
        let rows_at = step.outputs.iter().chain(&step.inputs).next();
        if rows_at.is_some_and(|&value| self.rows(value) == 0) {
            return self.chain(rest, before);
        }
        if matches!(step.op, Op::Attention(_) | Op::SwigluLinear { .. } | Op::LinearArgMax(_) | Op::Custom(_)) {
            self.run_unfused(step)?;
            return self.chain(rest, before);
        }
        let elements = self.elements(step);
        self.prepare(step, &mut |work| self.chain(rest, Some(&TaskChain { work, elements, before })))
    }

    /// Number of elements that a step reads and writes; `usize::MAX` for a matrix product.
    pub(super) fn elements(&self, step: &Step) -> usize {
        if matches!(step.op, Op::Linear(_) | Op::LinearMulti(_)) {
            return usize::MAX;
        }
        step.inputs.iter().chain(&step.outputs).map(|&value| self.rows(value) * self.cols(value)).sum()
    }

    /// Runs a task on the thread pool, or on the calling thread if that is faster.
    pub(super) fn start(&self, elements: usize, work: &Task<'_>) -> Result<(), DeviceError> {
        let mut workers =
            self.scratch.workers.try_borrow_mut().map_err(|_| broken("a step started a run within a run"))?;
        let scratches = Partition::rows(&mut workers, 1, self.workers(), 1);
        let part = |worker: &WorkerCtx<'_>| {
            let mut scratch = scratches.claim(worker.index());
            work(worker, &mut scratch.row_mut(0)[0]);
        };
        if elements <= SMALL_ELEMENTS {
            self.launch.threads.run_inline(&part);
        } else {
            self.launch.threads.run_parallel(&part);
        }
        Ok(())
    }

    /// Builds the task of a step that needs one run and passes it to `then`.
    fn prepare(&self, step: &Step, then: Continuation<'_>) -> Result<(), DeviceError> {
        match &step.op {
            Op::Embed { table, first_id } => self.embed(*table, *first_id, step, then),
            Op::RopeAngles { rope } => self.rope_angles(*rope, step, then),
            Op::RmsNorm(norm) => self.rms_norm(norm, step, then),
            Op::Add => self.add(step, then),
            Op::Mul => self.mul(step, then),
            Op::Activation(kind) => self.activation(*kind, step, then),
            Op::Scale(factor) => self.scale(*factor, step, then),
            Op::Cast(to) => self.cast(*to, step, then),
            Op::Linear(part) => self.linear(part, step.inputs[0], step.outputs[0], then),
            Op::Rope { head_dim, style } => self.rope((*head_dim, *style), None, step, then),
            Op::KvWrite { layer } => self.kv_write(*layer, None, step, then),
            Op::GatherRows => self.gather_rows(step, then),
            Op::ArgMax => self.argmax(step, then),
            Op::RowStatus => self.row_status(step, then),
            Op::AddRmsNorm { norm, to } => self.add_rms_norm(norm, *to, step, then),
            Op::NormCast { norm, to } => self.norm_cast(norm, *to, step, then),
            Op::QkNormRope { norm, head_dim, style } => self.rope((*head_dim, *style), Some(norm), step, then),
            Op::RopeKvWrite { layer, head_dim, style, norm } => {
                self.kv_write(*layer, Some((*head_dim, *style, norm.as_ref())), step, then)
            }
            Op::ActMul(kind) => self.act_mul(*kind, step, then),
            Op::LinearMulti(parts) => self.linear_multi(parts, step, then),
            Op::Attention(_)
            | Op::SwigluLinear { .. }
            | Op::LinearArgMax(_)
            | Op::Custom(_)
            | Op::AllReduce
            | Op::AllGather => Err(broken("a step that needs several runs is in a group")),
        }
    }

    /// Executes a step that needs several runs, or none.
    fn run_unfused(&self, step: &Step) -> Result<(), DeviceError> {
        match &step.op {
            Op::Attention(shape) => self.attention(shape, step),
            Op::SwigluLinear { activation, part, to } => {
                let scratch = step.scratch.ok_or_else(|| broken("a fused MLP step has no scratch"))?;
                self.swiglu_linear((*activation, *to), part, scratch, step)
            }
            Op::LinearArgMax(part) => self.linear_argmax(part, step),
            Op::Custom(index) => self.custom(*index, step),
            op => Err(broken(&format!("{} cannot run by itself", op.name()))),
        }
    }
}
