//! Places the values of a plan in one arena, so that values that may be alive at the same time never overlap. Without
//! memory reuse, no two values overlap.

use std::cmp::Reverse;

use super::happens_before::{HappensBefore, VectorClock};
use super::{Operand, PlanValue};
use crate::graph::{Bucket, Step};

/// Lifetime of a value: from the beginning of the first step that uses it to the end of all steps that use it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Lifetime {
    /// First and last step that use it, in plan order.
    pub first: usize,
    pub last: usize,
    /// Steps that have ended when the first user begins.
    born: VectorClock,
    /// Clock of all steps that use it.
    users: VectorClock,
}

impl Lifetime {
    /// Whether both values may be alive at the same time: for neither is it certain that it has ended when the other
    /// begins. With one stream, this is an overlap of their ranges of steps.
    pub(crate) fn overlaps(&self, other: &Self) -> bool {
        !self.born.covers(&other.users) && !other.born.covers(&self.users)
    }
}

/// Lifetime of each value of the step list; `None` for values that no step uses.
pub(crate) fn lifetimes(values: usize, steps: &[Step]) -> Vec<Option<Lifetime>> {
    let order = HappensBefore::from_steps(steps);
    let mut lives: Vec<Option<Lifetime>> = vec![None; values];
    for (at, step) in steps.iter().enumerate() {
        for &value in step.inputs.iter().chain(&step.outputs).chain(&step.scratch) {
            let unborn = Lifetime { first: at, last: at, born: *order.past(at), users: VectorClock::default() };
            let life = lives[value].get_or_insert(unborn);
            life.last = at;
            // Waiting for a step of a stream includes all steps before it, so only the latest of each stream counts.
            life.users.join(&order.own(at));
        }
    }
    lives
}

/// Largest sum of bytes alive at one step, a lower bound of every placement.
pub(crate) fn lower_bound_bytes(values: &[PlanValue], steps: &[Step], bucket: &Bucket, alignment: usize) -> usize {
    let lives = lifetimes(values.len(), steps);
    (0..steps.len())
        .map(|at| {
            let alive = |life: &Option<Lifetime>| life.is_some_and(|life| life.first <= at && at <= life.last);
            (0..values.len())
                .filter(|&v| alive(&lives[v]) && matches!(values[v].operand, Operand::Arena { .. }))
                .map(|v| values[v].bytes(bucket).next_multiple_of(alignment))
                .sum()
        })
        .max()
        .unwrap_or(0)
}

/// Sets the offset of each arena value and returns the size of the arena. Three orders are tried (largest first, oldest
/// first, longest-lived first), and each value goes to the lowest gap that fits; the smallest arena wins.
pub(crate) fn plan_arena(values: &mut [PlanValue], steps: &[Step], bucket: &Bucket, alignment: usize) -> usize {
    let lives = lifetimes(values.len(), steps);
    let mut wanted: Vec<(usize, usize, Lifetime)> = (0..values.len())
        .filter(|&v| matches!(values[v].operand, Operand::Arena { .. }))
        .filter_map(|v| Some((v, values[v].bytes(bucket).next_multiple_of(alignment), lives[v]?)))
        .collect();

    wanted.sort_by_key(|&(v, bytes, life)| (Reverse(bytes), life.first, v));
    let largest_first = lowest_gaps(&wanted);
    wanted.sort_by_key(|&(v, bytes, life)| (life.first, Reverse(bytes), v));
    let oldest_first = lowest_gaps(&wanted);
    wanted.sort_by_key(|&(v, bytes, life)| (Reverse(life.last - life.first), Reverse(bytes), v));
    let longest_first = lowest_gaps(&wanted);

    let best = [largest_first, oldest_first, longest_first].into_iter().min_by_key(|(_, bytes)| *bytes);
    let Some(best) = best else { return 0 };
    for (value, offset) in best.0 {
        values[value].operand = Operand::Arena { offset };
    }
    best.1
}

/// Sets the arena offset of every arena value so that no two share a byte, in the order in which they are first written,
/// and returns the arena's size.
pub(crate) fn plan_without_reuse(values: &mut [PlanValue], steps: &[Step], bucket: &Bucket, alignment: usize) -> usize {
    let lives = lifetimes(values.len(), steps);
    let mut order: Vec<(usize, usize)> =
        lives.iter().enumerate().filter_map(|(v, life)| Some((life.as_ref()?.first, v))).collect();
    order.sort_unstable();
    let mut end = 0;
    for (_, v) in order {
        if let Operand::Arena { offset } = &mut values[v].operand {
            *offset = end;
            end += values[v].bytes(bucket).next_multiple_of(alignment);
        }
    }
    end
}

fn lowest_gaps(wanted: &[(usize, usize, Lifetime)]) -> (Vec<(usize, usize)>, usize) {
    let mut placed: Vec<(usize, usize, usize, Lifetime)> = Vec::new();
    let mut arena_bytes = 0;
    for &(value, bytes, life) in wanted {
        // `placed` is sorted by offset: the first gap between values that are alive at the same time.
        let mut offset = 0;
        for &(_, start, len, other) in &placed {
            if !life.overlaps(&other) {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::plan::streams::assign_streams;
    use crate::graph::{Elem, Op, RowDim};
    use proptest::prelude::*;

    const BUCKET: Bucket = Bucket { tokens: 7, logit_rows: 2, seqs: 2, kv_tokens: 16 };

    /// Description of a step: values it writes (columns, kind), distance of its reads, whether it has scratch.
    type StepSpec = (Vec<(usize, u8)>, Vec<usize>, Option<usize>);

    fn step_specs() -> impl Strategy<Value = Vec<StepSpec>> {
        let written = prop::collection::vec((0usize..300, 0u8..8), 1..4);
        let read = prop::collection::vec(0usize..12, 0..4);
        prop::collection::vec((written, read, prop::option::of(0usize..300)), 1..40)
    }

    fn build(step_specs: &[StepSpec]) -> (Vec<PlanValue>, Vec<Step>) {
        let (mut values, mut steps) = (Vec::<PlanValue>::new(), Vec::new());
        for (written, read, scratch) in step_specs {
            let inputs: Vec<usize> = read.iter().filter_map(|back| values.len().checked_sub(back + 1)).collect();
            let mut add = |cols: usize, kind: u8| {
                let elem = [Elem::F32, Elem::F32, Elem::F32, Elem::Q8, Elem::Effect][usize::from(kind) % 5];
                let operand = if elem == Elem::Effect { Operand::Effect } else { Operand::Arena { offset: 0 } };
                let rows = if kind < 6 { RowDim::Tokens } else { RowDim::LogitRows };
                values.push(PlanValue { name: values.len().to_string(), rows, cols, elem, operand });
                values.len() - 1
            };
            let outputs = written.iter().map(|(cols, kind)| add(*cols, *kind)).collect();
            let scratch = scratch.map(|cols| add(cols, 0));
            steps.push(Step { op: Op::Add, inputs, outputs, scratch, layer: None, stream: 0, waits_on: Vec::new() });
        }
        (values, steps)
    }

    /// Reference for values alive at a step: written at or before it, used at or after it.
    fn alive(steps: &[Step], value: usize, at: usize) -> bool {
        let touches = |step: &Step| step.inputs.iter().chain(&step.outputs).chain(&step.scratch).any(|v| *v == value);
        steps[..=at].iter().any(touches) && steps[at..].iter().any(touches)
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn live_values_never_share_a_byte(step_specs in step_specs(), alignment in prop::sample::select(vec![64usize, 128, 512])) {
            let (mut values, steps) = build(&step_specs);
            let bound = lower_bound_bytes(&values, &steps, &BUCKET, alignment);
            let arena = plan_arena(&mut values, &steps, &BUCKET, alignment);
            let span = |v: usize| match values[v].operand {
                Operand::Arena { offset } => Some((offset, offset + values[v].bytes(&BUCKET))),
                _ => None,
            };
            let rounded = |v: usize| values[v].bytes(&BUCKET).next_multiple_of(alignment);
            let (mut least, mut sum) = (0, 0);
            for at in 0..steps.len() {
                let live: Vec<usize> =
                    (0..values.len()).filter(|&v| span(v).is_some() && alive(&steps, v, at)).collect();
                least = least.max(live.iter().map(|&v| rounded(v)).sum());
                for (i, &a) in live.iter().enumerate() {
                    let (start, end) = span(a).unwrap();
                    prop_assert!(start.is_multiple_of(alignment) && end <= arena);
                    for &b in &live[..i] {
                        let (other, other_end) = span(b).unwrap();
                        prop_assert!(end <= other || other_end <= start, "{a} and {b} at step {at}");
                    }
                }
            }
            for v in (0..values.len()).filter(|&v| span(v).is_some()) {
                sum += rounded(v);
            }
            prop_assert_eq!(bound, least);
            prop_assert!(bound <= arena && arena <= sum, "{} <= {} <= {}", bound, arena, sum);
            let mut apart = build(&step_specs).0;
            prop_assert_eq!(plan_without_reuse(&mut apart, &steps, &BUCKET, alignment), sum);
            let mut rooms: Vec<(usize, usize)> = (0..apart.len())
                .filter_map(|v| match apart[v].operand {
                    Operand::Arena { offset } => Some((offset, offset + apart[v].bytes(&BUCKET))),
                    _ => None,
                })
                .collect();
            rooms.sort_unstable();
            prop_assert!(rooms.iter().all(|(start, end)| start.is_multiple_of(alignment) && *end <= sum));
            prop_assert!(rooms.windows(2).all(|pair| pair[0].1 <= pair[1].0), "{:?}", rooms);
            let mut again = build(&step_specs).0;
            prop_assert_eq!(plan_arena(&mut again, &steps, &BUCKET, alignment), arena);
            prop_assert_eq!(again, values);
        }
    }

    /// Assigns steps to streams by their reads.
    fn assign_to_streams(steps: &mut [Step], streams: usize) {
        let writes = |step: &Step, value| step.outputs.iter().chain(&step.scratch).any(|&written| written == value);
        let writer = |value: usize, steps: &[Step]| steps.iter().position(|step| writes(step, value));
        let needs: Vec<Vec<usize>> =
            steps.iter().map(|step| step.inputs.iter().filter_map(|&v| writer(v, steps)).collect()).collect();
        for (step, placed) in steps.iter_mut().zip(assign_streams(&needs, streams)) {
            (step.stream, step.waits_on) = (placed.stream, placed.waits_on);
        }
    }

    /// An order in which streams and events allow the steps to run; it depends on the seed.
    fn some_execution(steps: &[Step], mut seed: u64) -> Vec<usize> {
        let mut done = vec![false; steps.len()];
        let mut order = Vec::new();
        while order.len() < steps.len() {
            let of_stream = |stream: u8| (0..steps.len()).find(|&at| !done[at] && steps[at].stream == stream);
            let ready = |at: &usize| steps[*at].waits_on.iter().all(|&other| done[other]);
            let next: Vec<usize> = (0..4).filter_map(of_stream).filter(ready).collect();
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let at = next[(seed >> 33) as usize % next.len()];
            done[at] = true;
            order.push(at);
        }
        order
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 100, failure_persistence: None, ..ProptestConfig::default() })]

        /// In any order of the streams, no step overwrites a value that is still read.
        #[test]
        fn no_order_of_streams_overwrites_what_is_still_read(step_specs in step_specs(), streams in 1usize..5, seed in any::<u64>()) {
            let (mut values, mut steps) = build(&step_specs);
            assign_to_streams(&mut steps, streams);
            plan_arena(&mut values, &steps, &BUCKET, 64);
            let span = |v: usize| match values[v].operand {
                Operand::Arena { offset } => offset..offset + values[v].bytes(&BUCKET),
                _ => 0..0,
            };
            for round in 0..20u64 {
                let order = some_execution(&steps, seed.wrapping_add(round * 7919));
                // Last writer of each byte, by value.
                let mut owner: Vec<(std::ops::Range<usize>, usize)> = Vec::new();
                for &at in &order {
                    let step = &steps[at];
                    for &read in &step.inputs {
                        let range = span(read);
                        let whole = range.is_empty() || owner.iter().any(|(other, value)| *other == range && *value == read);
                        prop_assert!(whole, "{read} is gone at step {at} in {order:?}");
                    }
                    for &written in step.outputs.iter().chain(&step.scratch) {
                        let range = span(written);
                        owner.retain(|(other, _)| other.end <= range.start || range.end <= other.start);
                        owner.push((range, written));
                    }
                }
            }
        }
    }

    #[test]
    fn what_is_alive_once_takes_its_room_once() {
        // In a chain, each value is read by the next step only, so two buffers suffice.
        let step_specs: Vec<StepSpec> =
            (0..10).map(|i| (vec![(64, 0)], if i == 0 { vec![] } else { vec![0] }, None)).collect();
        let (mut values, steps) = build(&step_specs);
        let one = values[0].bytes(&BUCKET).next_multiple_of(64);
        assert_eq!(plan_arena(&mut values, &steps, &BUCKET, 64), 2 * one);
    }
}
