//! Invariants of plans; checked after each compilation in debug builds, by devices before they load a plan, and by
//! tests.
//!
//! A plan that passes is safe to run: each index is in range, each operand has the shape that its operation needs and
//! does not overlap with other values while it may be alive, and of two steps that access the same bytes, one of them
//! writing, the vector clocks show that one has ended before the other begins.

use super::happens_before::{HappensBefore, MAX_STREAMS};
use super::memory::lifetimes;
use super::{Operand, Plan, PlanValue, Step};
use crate::graph::op_signature::Operands;
use crate::graph::{Bucket, CompileError, Elem, Io, Op, op_signature, row_bytes};

/// Largest size of a value: sums of many such sizes do not overflow, and no machine has this much memory.
const MOST_BYTES: usize = 1 << 48;
/// Largest number of columns, the same bound as in model descriptions.
const MOST_COLS: usize = 1 << 28;
/// Positions and sequences are counted in 32 bits.
const MOST_COUNTED: usize = u32::MAX as usize;

/// Whether the bucket's numbers fit in 32 bits.
pub(crate) const fn counts(bucket: &Bucket) -> bool {
    bucket.seqs <= MOST_COUNTED && bucket.kv_tokens <= MOST_COUNTED
}

/// Whether a value of this size can be placed.
pub(crate) fn fits(value: &PlanValue, bucket: &Bucket) -> bool {
    value.cols <= MOST_COLS
        && bucket.rows(value.rows).checked_mul(row_bytes(value.elem, value.cols)).is_some_and(|n| n <= MOST_BYTES)
}

fn invalid(what: String) -> CompileError {
    CompileError::Invalid(what)
}

impl Plan {
    /// Checks the invariants of the plan.
    ///
    /// Operands match their operations. Each value is written once, before it is read. Arena values are inside the
    /// arena and aligned, and values that may be alive at the same time never overlap (without memory reuse, no two
    /// values do). Steps that access the same bytes are ordered by their streams and waits.
    ///
    /// # Errors
    /// [`CompileError::Invalid`] with the first violated invariant.
    pub fn check(&self) -> Result<(), CompileError> {
        self.check_indices()?;
        self.check_values()?;
        self.check_operands()?;
        self.check_order()?;
        self.check_places()?;
        self.check_races()
    }

    fn check_indices(&self) -> Result<(), CompileError> {
        for (at, step) in self.steps.iter().enumerate() {
            if let Some(value) = touched(step).find(|&value| value >= self.values.len()) {
                return Err(invalid(format!("step {at} names value {value} of {}", self.values.len())));
            }
            if usize::from(step.stream) >= usize::from(self.streams).min(MAX_STREAMS) {
                return Err(invalid(format!("step {at} is on stream {} of {}", step.stream, self.streams)));
            }
            if let Some(other) = step.waits_on.iter().find(|&&other| other >= at) {
                return Err(invalid(format!("step {at} waits for step {other}, which is not before it")));
            }
            if matches!(step.op, Op::Custom(index) if index >= self.customs.len()) {
                return Err(invalid(format!("step {at} names a custom operation of {}", self.customs.len())));
            }
        }
        Ok(())
    }

    fn check_values(&self) -> Result<(), CompileError> {
        if !self.alignment.is_power_of_two() || self.alignment < 64 {
            return Err(invalid(format!("alignment {} is not a power of two of at least 64", self.alignment)));
        }
        if !counts(&self.bucket) {
            return Err(invalid(format!("{:?} exceeds 32-bit counts", self.bucket)));
        }
        for value in &self.values {
            let name = &value.name;
            if !fits(value, &self.bucket) {
                return Err(invalid(format!("{name} of {} columns is too large for the bucket", value.cols)));
            }
            let placed = match value.operand {
                Operand::Arena { .. } => matches!(value.elem, Elem::F32 | Elem::BF16 | Elem::Q8),
                Operand::Io(Io::Logits) => value.elem == Elem::F32,
                Operand::Io(Io::ArgMax) => value.elem == Elem::U32,
                Operand::Io(_) => false,
                Operand::Effect => value.elem == Elem::Effect,
            };
            if !placed {
                return Err(invalid(format!("{name} of {:?} cannot be stored at {:?}", value.elem, value.operand)));
            }
        }
        Ok(())
    }

    fn check_operands(&self) -> Result<(), CompileError> {
        let operand = |v: &usize| {
            let PlanValue { rows, cols, elem, .. } = self.values[*v];
            op_signature::Operand { rows, cols, elem }
        };
        for (at, step) in self.steps.iter().enumerate() {
            let operands = Operands {
                inputs: step.inputs.iter().map(operand).collect(),
                outputs: step.outputs.iter().map(operand).collect(),
                scratch: step.scratch.as_ref().map(operand),
                weights: &self.weights,
                ropes: &self.ropes,
                vocab_size: self.vocab_size,
            };
            operands.check(&step.op).map_err(|what| invalid(format!("step {at} {}: {what}", step.op.name())))?;
            self.check_leaving(at, step)?;
        }
        let count = |is: fn(&Op) -> bool| self.steps.iter().filter(|step| is(&step.op)).count();
        let endings = [
            ("write the row status", count(|op| *op == Op::RowStatus)),
            ("compute the argmax", count(|op| matches!(op, Op::ArgMax | Op::LinearArgMax(_)))),
        ];
        match endings.iter().find(|(_, n)| *n != 1) {
            None => Ok(()),
            Some((what, n)) => Err(invalid(format!("{n} steps {what}, expected 1"))),
        }
    }

    /// Only a linear operation or an all-gather writes logits, and only the argmax reads them, whose output the row
    /// status reads.
    fn check_leaving(&self, at: usize, step: &Step) -> Result<(), CompileError> {
        let is = |v: &usize, io| self.values[*v].operand == Operand::Io(io);
        let reads = |io| step.inputs.iter().any(|v| is(v, io));
        let writes = |io| step.outputs.iter().chain(&step.scratch).any(|v| is(v, io));
        let sound = match &step.op {
            Op::ArgMax => reads(Io::Logits) && !reads(Io::ArgMax) && !writes(Io::Logits) && writes(Io::ArgMax),
            Op::RowStatus => reads(Io::ArgMax) && !reads(Io::Logits),
            Op::LinearArgMax(_) => {
                let [logits, best] = step.outputs.as_slice() else { return Ok(()) };
                is(logits, Io::Logits) && is(best, Io::ArgMax) && !reads(Io::Logits) && !reads(Io::ArgMax)
            }
            op => {
                let may_write = matches!(op, Op::Linear(_) | Op::AllGather);
                !reads(Io::Logits) && !reads(Io::ArgMax) && !writes(Io::ArgMax) && (may_write || !writes(Io::Logits))
            }
        };
        let rule = "only a linear operation or an all-gather writes logits, and only the argmax reads them";
        if sound { Ok(()) } else { Err(invalid(format!("step {at} {}: {rule}", step.op.name()))) }
    }

    /// Each value is written once and before it is read, and attention reads the layer that its effect input has
    /// stored.
    fn check_order(&self) -> Result<(), CompileError> {
        let mut writer: Vec<Option<&Op>> = vec![None; self.values.len()];
        for (at, step) in self.steps.iter().enumerate() {
            for &input in &step.inputs {
                let name = &self.values[input].name;
                let Some(written_by) = writer[input] else {
                    return Err(invalid(format!("step {at} reads {name} before it is written")));
                };
                if let (Op::Attention(shape), Op::KvWrite { layer } | Op::RopeKvWrite { layer, .. }) =
                    (&step.op, written_by)
                    && shape.layer != *layer
                {
                    return Err(invalid(format!(
                        "step {at} reads layer {} after {name} of layer {layer}",
                        shape.layer
                    )));
                }
            }
            for &output in step.outputs.iter().chain(&step.scratch) {
                if writer[output].replace(&step.op).is_some() {
                    return Err(invalid(format!("step {at} writes {} a second time", self.values[output].name)));
                }
            }
        }
        Ok(())
    }

    fn check_places(&self) -> Result<(), CompileError> {
        let lives = lifetimes(self.values.len(), &self.steps);
        let span = |v: usize| match self.values[v].operand {
            Operand::Arena { offset } => Some((offset, offset.saturating_add(self.values[v].bytes(&self.bucket)))),
            _ => None,
        };
        for a in 0..self.values.len() {
            let (Some(life), Some((start, end))) = (lives[a], span(a)) else { continue };
            if end > self.arena_bytes || !start.is_multiple_of(self.alignment) {
                let name = &self.values[a].name;
                return Err(invalid(format!("{name} at {start}..{end} is outside the arena or unaligned")));
            }
            for (b, other) in lives.iter().enumerate().skip(a + 1) {
                let (Some(other), Some((start_b, end_b))) = (*other, span(b)) else { continue };
                if (life.overlaps(&other) || !self.memory_reuse) && start < end_b && start_b < end {
                    return Err(invalid(format!("{} and {} overlap", self.values[a].name, self.values[b].name)));
                }
            }
        }
        Ok(())
    }

    /// If two steps access the same bytes and one of them writes, one has ended when the other begins.
    fn check_races(&self) -> Result<(), CompileError> {
        let order = HappensBefore::from_steps(&self.steps);
        for at in 0..self.steps.len() {
            for earlier in 0..at {
                if !order.before(earlier, at) && self.conflict(earlier, at) {
                    return Err(invalid(format!("step {at} does not wait for step {earlier}")));
                }
            }
        }
        Ok(())
    }

    /// Whether two steps must not run at the same time: one writes bytes (or an effect) that the other accesses.
    fn conflict(&self, a: usize, b: usize) -> bool {
        let (a, b) = (&self.steps[a], &self.steps[b]);
        let meets = |x: usize, y: usize| {
            if x == y {
                return true;
            }
            let (x, y) = (&self.values[x], &self.values[y]);
            match (x.operand, y.operand) {
                (Operand::Arena { offset: p }, Operand::Arena { offset: q }) => {
                    p < q + y.bytes(&self.bucket) && q < p + x.bytes(&self.bucket)
                }
                (Operand::Io(p), Operand::Io(q)) => p == q,
                _ => false,
            }
        };
        let clash = |writer: &Step, other: &Step| {
            writer.outputs.iter().chain(&writer.scratch).any(|&w| touched(other).any(|o| meets(w, o)))
        };
        clash(a, b) || clash(b, a)
    }
}

/// All values that a step reads, writes or uses as scratch.
fn touched(step: &Step) -> impl Iterator<Item = usize> + '_ {
    step.inputs.iter().chain(&step.outputs).chain(&step.scratch).copied()
}
