//! States what must hold of every plan; run after each compilation in debug builds and by tests.

use super::place::lives;
use super::plan::{Operand, Plan};
use super::{CompileError, Elem};

impl Plan {
    /// Checks the plan against its own rules: every value is written once before it is read, arena values lie inside the
    /// arena, aligned, and those alive at one step never overlap; a step that must wait for an earlier one waits.
    pub fn check(&self) -> Result<(), CompileError> {
        let fail = |what: String| Err(CompileError::Invalid(what));
        let mut written = vec![false; self.values.len()];
        for (at, step) in self.steps.iter().enumerate() {
            for &input in &step.inputs {
                if !written[input] {
                    return fail(format!("step {at} reads {} before it is written", self.values[input].name));
                }
            }
            for &output in step.outputs.iter().chain(&step.scratch) {
                if std::mem::replace(&mut written[output], true) {
                    return fail(format!("step {at} writes {} a second time", self.values[output].name));
                }
            }
        }

        let lives = lives(self.values.len(), &self.steps);
        let span = |v: usize| match self.values[v].operand {
            Operand::Arena { offset } => Some((offset, offset + self.values[v].bytes(&self.bucket))),
            _ => None,
        };
        for a in 0..self.values.len() {
            let (Some(life), Some((start, end))) = (lives[a], span(a)) else { continue };
            if end > self.arena_bytes || start % self.alignment != 0 {
                return fail(format!("{} at {start}..{end} is outside the arena or unaligned", self.values[a].name));
            }
            for b in a + 1..self.values.len() {
                let (Some(other), Some((start_b, end_b))) = (lives[b], span(b)) else { continue };
                if life.meets(other) && start < end_b && start_b < end {
                    return fail(format!("{} and {} overlap", self.values[a].name, self.values[b].name));
                }
            }
        }
        self.check_waits()
    }

    /// Every read happens after its write, and no region is written while a step of the same stretch uses it.
    fn check_waits(&self) -> Result<(), CompileError> {
        let mut stretch: Vec<usize> = Vec::new();
        for (at, step) in self.steps.iter().enumerate() {
            if step.waits {
                stretch.clear();
            }
            for &earlier in &stretch {
                if self.conflict(earlier, at) {
                    return Err(CompileError::Invalid(format!("step {at} does not wait for step {earlier}")));
                }
            }
            stretch.push(at);
        }
        Ok(())
    }

    /// Whether two steps must not run at the same time: one writes bytes (or an effect) the other touches.
    pub(super) fn conflict(&self, a: usize, b: usize) -> bool {
        let (a, b) = (&self.steps[a], &self.steps[b]);
        let writes = |s: &super::Step| s.outputs.iter().chain(&s.scratch).copied().collect::<Vec<_>>();
        let meets = |x: usize, y: usize| {
            if x == y {
                return true;
            }
            let (x, y) = (&self.values[x], &self.values[y]);
            match (&x.operand, &y.operand) {
                (Operand::Arena { offset: p }, Operand::Arena { offset: q }) => {
                    *p < q + y.bytes(&self.bucket) && *q < p + x.bytes(&self.bucket)
                }
                (Operand::Io(p), Operand::Io(q)) => p == q,
                _ => x.elem == Elem::Effect && y.elem == Elem::Effect && x.name == y.name,
            }
        };
        let clash = |written: &[usize], other: &super::Step| {
            written
                .iter()
                .any(|&w| other.inputs.iter().chain(&other.outputs).chain(&other.scratch).any(|&o| meets(w, o)))
        };
        clash(&writes(a), b) || clash(&writes(b), a)
    }
}
