//! Gives every value of a plan room in one arena, so that values alive at the same time never overlap.

use super::plan::{Operand, PlanValue};
use super::{Bucket, Step};

/// First and last step at which a value's bytes matter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Life {
    pub first: usize,
    pub last: usize,
}

impl Life {
    pub(super) const fn meets(self, other: Self) -> bool {
        self.first <= other.last && other.first <= self.last
    }
}

/// Life of every value of the step list; none for values no step touches.
pub(super) fn lives(values: usize, steps: &[Step]) -> Vec<Option<Life>> {
    let mut lives: Vec<Option<Life>> = vec![None; values];
    for (at, step) in steps.iter().enumerate() {
        for &value in step.inputs.iter().chain(&step.outputs).chain(&step.scratch) {
            let life = lives[value].get_or_insert(Life { first: at, last: at });
            life.last = at;
        }
    }
    lives
}

/// Largest sum of bytes alive at one step: no placement can be smaller.
pub(super) fn lower_bound_bytes(values: &[PlanValue], steps: &[Step], bucket: &Bucket, alignment: usize) -> usize {
    let lives = lives(values.len(), steps);
    (0..steps.len())
        .map(|at| {
            let alive = |life: &Option<Life>| life.is_some_and(|life| life.first <= at && at <= life.last);
            (0..values.len())
                .filter(|&v| alive(&lives[v]) && matches!(values[v].operand, Operand::Arena { .. }))
                .map(|v| values[v].bytes(bucket).next_multiple_of(alignment))
                .sum()
        })
        .max()
        .unwrap_or(0)
}

/// Sets the arena offset of every arena value and returns the arena's size. Two orders are tried (largest first, oldest
/// first), each value going to the lowest gap that fits; the smaller arena wins.
pub(super) fn place(values: &mut [PlanValue], steps: &[Step], bucket: &Bucket, alignment: usize) -> usize {
    let lives = lives(values.len(), steps);
    let mut wanted: Vec<(usize, usize, Life)> = (0..values.len())
        .filter(|&v| matches!(values[v].operand, Operand::Arena { .. }))
        .filter_map(|v| Some((v, values[v].bytes(bucket).next_multiple_of(alignment), lives[v]?)))
        .collect();

    wanted.sort_by_key(|&(v, bytes, life)| (std::cmp::Reverse(bytes), life.first, v));
    let largest_first = lowest_gaps(&wanted);
    wanted.sort_by_key(|&(v, bytes, life)| (life.first, std::cmp::Reverse(bytes), v));
    let oldest_first = lowest_gaps(&wanted);

    let best = if oldest_first.1 < largest_first.1 { oldest_first } else { largest_first };
    for (value, offset) in best.0 {
        values[value].operand = Operand::Arena { offset };
    }
    best.1
}

fn lowest_gaps(wanted: &[(usize, usize, Life)]) -> (Vec<(usize, usize)>, usize) {
    let mut placed: Vec<(usize, usize, usize, Life)> = Vec::new();
    let mut arena_bytes = 0;
    for &(value, bytes, life) in wanted {
        // `placed` is sorted by offset: walk the neighbours in time and take the first gap.
        let mut offset = 0;
        for &(_, start, len, other) in &placed {
            if !life.meets(other) {
                continue;
            }
            if offset + bytes <= start {
                break;
            }
            offset = offset.max(start + len);
        }
        let at = placed.partition_point(|&(_, start, ..)| start <= offset);
        placed.insert(at, (value, offset, bytes, life));
        arena_bytes = arena_bytes.max(offset + bytes);
    }
    (placed.into_iter().map(|(value, offset, ..)| (value, offset)).collect(), arena_bytes)
}
