//! Assigns steps to streams: independent branches run concurrently, with as few waits as their data needs.
//!
//! On a device with streams, a stream of the plan is a stream of the device. On the CPU, the whole thread pool runs the
//! plan in order, and adjacent independent steps share one barrier ([`Plan::groups`](crate::graph::Plan::groups)).

use super::happens_before::{HappensBefore, MAX_STREAMS, VectorClock};

/// Stream of a step, and the steps on other streams that it waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StreamPlacement {
    pub stream: u8,
    pub waits_on: Vec<usize>,
}

/// Assigns streams to steps; each step needs the earlier steps of its list. A step goes to the stream where a needed
/// step has just ended, else to a stream for which it would not have to wait, else to the stream that has been idle
/// longest.
pub(crate) fn assign_streams(needs: &[Vec<usize>], streams: usize) -> Vec<StreamPlacement> {
    let streams = streams.clamp(1, MAX_STREAMS);
    let mut order = HappensBefore::default();
    let mut stream_of: Vec<usize> = Vec::with_capacity(needs.len());
    let mut placed = Vec::with_capacity(needs.len());
    for needed in needs {
        let mut past = VectorClock::default();
        for &step in needed {
            past.join(order.clock(step));
        }
        let follows = |stream: &usize| order.tail(*stream).is_some_and(|tail| needed.contains(&tail));
        let is_free = |stream: &usize| order.tail(*stream).is_none_or(|tail| past.covers(order.clock(tail)));
        let stream = (0..streams)
            .find(follows)
            .or_else(|| (0..streams).find(is_free))
            .or_else(|| (0..streams).min_by_key(|&stream| order.tail(stream)))
            .unwrap_or(0);
        let mut waits_on: Vec<usize> = needed.iter().copied().filter(|&step| stream_of[step] != stream).collect();
        waits_on.sort_unstable();
        // A wait that another wait implies is redundant.
        for at in (0..waits_on.len()).rev() {
            let step = waits_on.remove(at);
            if !order.past_of(stream, &waits_on).covers(order.clock(step)) {
                waits_on.insert(at, step);
            }
        }
        order.push(stream, &waits_on);
        stream_of.push(stream);
        placed.push(StreamPlacement { stream: u8::try_from(stream).unwrap_or(0), waits_on });
    }
    placed
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn branches_of_one_value_go_side_by_side() {
        // 0 norm; 1 q, 2 k, 3 v of it; 4 rope q, 5 rope k; 6 write (5, 3); 7 attention (4, 6).
        let needs = [vec![], vec![0], vec![0], vec![0], vec![1], vec![2], vec![5, 3], vec![4, 6]];
        let streams =
            |most| assign_streams(&needs, most).into_iter().map(|p| (p.stream, p.waits_on)).collect::<Vec<_>>();
        let one = streams(1);
        assert!(one.iter().all(|(stream, waits)| *stream == 0 && waits.is_empty()));
        let none = Vec::new;
        let expected = [
            (0, none()),
            (0, none()),
            (1, vec![0]),
            (2, vec![0]),
            (0, none()),
            (1, none()),
            (1, vec![3]),
            (0, vec![6]),
        ];
        assert_eq!(streams(4), expected);
    }

    proptest! {
        #[test]
        fn every_need_is_met(recipe in prop::collection::vec(prop::collection::vec(1usize..9, 0..4), 1..60), streams in 1usize..5) {
            let needs: Vec<Vec<usize>> = recipe
                .iter()
                .enumerate()
                .map(|(at, backs)| backs.iter().filter_map(|back| at.checked_sub(*back)).collect())
                .collect();
            let placed = assign_streams(&needs, streams);
            let mut order = HappensBefore::default();
            for placement in &placed {
                prop_assert!(usize::from(placement.stream) < streams);
                order.push(usize::from(placement.stream), &placement.waits_on);
            }
            for (at, needed) in needs.iter().enumerate() {
                for &step in needed {
                    prop_assert!(order.before(step, at), "{step} before {at}");
                }
            }
        }
    }
}
