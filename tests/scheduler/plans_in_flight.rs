//! Tests that in-flight plans change when rows are computed, but not which.
//!
//! Each sequence gets the tokens that it would get in a batch of its own, rows computed ahead of a result become stale
//! if the result invalidates them, and no sequence reads a block of another one.
#![allow(clippy::cast_possible_truncation, reason = "the numbers of a test are small")]

use std::collections::{BTreeMap, VecDeque};

use crate::common::digest_model::{digest, oracle_output, root};
use ascend_llm::kv_cache::{BlockAllocator, SeqId};
use ascend_llm::scheduler::{
    Chunk, NewSequence, SchedulePolicy, Scheduler, SchedulerConfig, SeqResult, StepOutput, Tick,
};
use proptest::prelude::*;

/// State of a sequence as the test expects it.
#[derive(Clone, Debug)]
struct ExpectedSeq {
    prompt: Vec<u32>,
    output: Vec<u32>,
    max_tokens: u32,
    /// Number of output tokens after which the sequence stops, independent of its `max_tokens`.
    stops_at: usize,
    /// Number of planned rows; `committed` of them are no longer in flight.
    planned: u32,
    committed: u32,
    /// Tokens sampled in in-flight plans.
    ahead: Vec<u32>,
    ran_ahead: bool,
}

struct InFlightPlan {
    plan: u64,
    chunks: Vec<Chunk>,
    sampled: Vec<Option<u32>>,
    /// For each chunk, whether the test expects it to be stale.
    stale: Vec<bool>,
}

/// Scheduler, block pool and a device that runs plans in order and stores digests of prefixes in its slots.
struct Rig {
    scheduler: Scheduler,
    blocks: BlockAllocator,
    slots: Vec<u64>,
    live: BTreeMap<SeqId, ExpectedSeq>,
    ended: BTreeMap<SeqId, (ExpectedSeq, bool)>,
    in_flight: VecDeque<InFlightPlan>,
    wasted: u64,
    now: u64,
    preemptions: u64,
}

impl Rig {
    fn new(scheduler: Scheduler, blocks: BlockAllocator) -> Self {
        let slots = vec![0; (blocks.capacity() * blocks.block_size()) as usize];
        Self {
            scheduler,
            blocks,
            slots,
            live: BTreeMap::new(),
            ended: BTreeMap::new(),
            in_flight: VecDeque::new(),
            wasted: 0,
            now: 0,
            preemptions: 0,
        }
    }

    fn check(&self) {
        self.blocks.check().unwrap();
        self.scheduler.check(&self.blocks).unwrap();
        assert_eq!(self.scheduler.wasted_rows(), self.wasted);
    }

    fn add(&mut self, id: u64, prompt: Vec<u32>, max_tokens: u32, stops_at: usize, runs_ahead: bool) -> bool {
        let meta = NewSequence::new(prompt.clone(), max_tokens).with_allow_async_schedule(runs_ahead);
        if self.scheduler.add(SeqId(id), meta, Tick(self.now), &self.blocks).is_err() {
            return false;
        }
        let expected_seq = ExpectedSeq {
            prompt,
            output: Vec::new(),
            max_tokens,
            stops_at,
            planned: 0,
            committed: 0,
            ahead: Vec::new(),
            ran_ahead: false,
        };
        self.live.insert(SeqId(id), expected_seq);
        true
    }

    /// Marks the sequence's in-flight rows as stale.
    fn mark_stale(&mut self, seq: SeqId) {
        for in_flight_plan in &mut self.in_flight {
            for (chunk, stale) in in_flight_plan.chunks.iter().zip(&mut in_flight_plan.stale) {
                if chunk.seq == seq && !*stale {
                    *stale = true;
                    self.wasted += u64::from(chunk.len);
                }
            }
        }
        if let Some(expected_seq) = self.live.get_mut(&seq) {
            expected_seq.ahead.clear();
            expected_seq.planned = expected_seq.committed;
        }
    }

    fn end(&mut self, seq: SeqId, complete: bool) {
        self.mark_stale(seq);
        let expected_seq = self.live.remove(&seq).unwrap();
        self.ended.insert(seq, (expected_seq, complete));
    }

    fn abort(&mut self, seq: SeqId) {
        assert!(self.scheduler.abort(seq, &mut self.blocks));
        self.end(seq, false);
        assert!(self.blocks.table(seq).is_empty());
        self.check();
    }

    /// Plans a step and runs it at once, like a device that is faster than the host; returns the number of chunks.
    fn launch(&mut self) -> usize {
        self.now += 1_000;
        let plan = self.scheduler.schedule(Tick(self.now), &mut self.blocks).clone();
        self.check();
        for seq in &plan.preempted {
            let expected_seq = self.live.get_mut(seq).unwrap();
            assert_eq!(
                expected_seq.planned, expected_seq.committed,
                "{seq:?} is preempted although it has in-flight rows"
            );
            (expected_seq.planned, expected_seq.committed) = (0, 0);
            self.preemptions += 1;
        }
        for seq in &plan.capped {
            let expected_seq = &self.live[seq];
            assert_eq!(
                expected_seq.planned, expected_seq.committed,
                "{seq:?} is capped although it has in-flight rows"
            );
            self.end(*seq, true);
        }
        let block_size = self.blocks.block_size() as usize;
        for &(from, to) in &plan.copies {
            let start = from.0 as usize * block_size;
            self.slots.copy_within(start..start + block_size, to.0 as usize * block_size);
        }
        let mut sampled = Vec::new();
        for chunk in &plan.chunks {
            let expected_seq = self.live.get_mut(&chunk.seq).expect("the plan contains only live sequences");
            let known = [&expected_seq.prompt[..], &expected_seq.output].concat();
            assert_eq!(self.scheduler.tokens(chunk.seq), known, "the scheduler's tokens contain placeholders");
            if expected_seq.planned > 0 {
                assert_eq!(
                    chunk.start, expected_seq.planned,
                    "the chunk does not start at the next row to compute: {chunk:?}"
                );
            }
            let end = (chunk.start + chunk.len) as usize;
            assert_eq!(chunk.placeholder.is_some(), chunk.start as usize >= known.len(), "{chunk:?}");
            if let Some(from) = chunk.placeholder {
                assert_eq!(chunk.len, 1);
                let in_flight_plan = self
                    .in_flight
                    .iter()
                    .find(|in_flight_plan| in_flight_plan.plan == from.plan)
                    .expect("the plan of the placeholder is in flight");
                assert_eq!(
                    (in_flight_plan.chunks[from.chunk].seq, in_flight_plan.stale[from.chunk]),
                    (chunk.seq, false)
                );
                assert_eq!(
                    in_flight_plan.sampled[from.chunk],
                    expected_seq.ahead.last().copied(),
                    "the placeholder does not refer to the newest token"
                );
                expected_seq.ran_ahead = true;
            }
            let all = [&known[..], &expected_seq.ahead].concat();
            assert!(end <= all.len());
            let table = self.blocks.table(chunk.seq);
            let slot = |position: usize| table[position / block_size].0 as usize * block_size + position % block_size;
            let mut state = root(b"");
            for (position, &token) in all[..end].iter().enumerate() {
                state = digest(state, token);
                if position < chunk.start as usize {
                    assert_eq!(
                        self.slots[slot(position)],
                        state,
                        "{:?} reads a wrong row at position {position}",
                        chunk.seq
                    );
                } else {
                    self.slots[slot(position)] = state;
                }
            }
            expected_seq.planned = end as u32;
            if chunk.placeholder.is_none() {
                expected_seq.committed = expected_seq.committed.max(chunk.start);
            }
            sampled.push(chunk.samples.then_some(state as u32 % 5));
            if chunk.samples {
                expected_seq.ahead.push(state as u32 % 5);
            }
        }
        let rows = plan.chunks.len();
        if rows > 0 {
            let stale = vec![false; rows];
            self.in_flight.push_back(InFlightPlan { plan: plan.number, chunks: plan.chunks, sampled, stale });
        }
        rows
    }

    /// Commits the oldest plan. For each chunk, `odd` selects an irregular outcome, or none.
    fn collect(&mut self, mut odd: impl FnMut() -> u8) {
        let Some(in_flight_plan) = self.in_flight.pop_front() else { return };
        let mut results = Vec::new();
        let mut redo = Vec::new();
        for ((chunk, sampled), stale) in
            in_flight_plan.chunks.iter().zip(&in_flight_plan.sampled).zip(&in_flight_plan.stale)
        {
            assert_eq!(self.scheduler.is_stale(in_flight_plan.plan, chunk.seq), *stale, "{chunk:?}");
            let mut result = SeqResult::new(chunk.seq, *sampled, false);
            if *stale {
                // The result of a stale chunk is ignored.
                result.finished = true;
                results.push(result);
                continue;
            }
            let expected_seq = self.live.get_mut(&chunk.seq).unwrap();
            match odd() {
                // The rows ran in the f32 fallback plan, so the in-flight rows after them are stale.
                0 => {
                    self.scheduler.set_f32_from(chunk.seq, chunk.start);
                    redo.push(chunk.seq);
                }
                // The sampling row failed, and runs again.
                1 if sampled.is_some() => {
                    result.token = None;
                    expected_seq.ahead.remove(0);
                    expected_seq.committed = chunk.start + chunk.len - 1;
                    redo.push(chunk.seq);
                    results.push(result);
                    continue;
                }
                // The chunk did not run.
                2 => {
                    expected_seq.committed = chunk.start;
                    if sampled.is_some() {
                        expected_seq.ahead.remove(0);
                    }
                    redo.push(chunk.seq);
                    continue;
                }
                _ => {}
            }
            expected_seq.committed = chunk.start + chunk.len;
            if let Some(token) = *sampled {
                assert_eq!(expected_seq.ahead.remove(0), token);
                expected_seq.output.push(token);
                result.finished =
                    expected_seq.output.len() == (expected_seq.max_tokens as usize).min(expected_seq.stops_at);
            }
            results.push(result);
        }
        for seq in redo {
            self.mark_stale(seq);
        }
        for result in &results {
            let ended = self.live.get(&result.seq).is_some_and(|expected_seq| {
                result.finished
                    && expected_seq.output.len() == (expected_seq.max_tokens as usize).min(expected_seq.stops_at)
            });
            let own = in_flight_plan.chunks.iter().position(|chunk| chunk.seq == result.seq).unwrap();
            if ended && !in_flight_plan.stale[own] {
                self.end(result.seq, true);
            }
        }
        self.scheduler.commit(&StepOutput::from(results), &mut self.blocks);
        self.check();
    }
}

#[derive(Clone, Debug)]
enum Event {
    Add {
        prompt: u32,
        max_tokens: u32,
        stops_at: usize,
        kind: u32,
        runs_ahead: bool,
    },
    Abort {
        nth: usize,
    },
    /// Aborts a sequence and adds another one with the same id at once.
    Replace {
        nth: usize,
    },
    Launch,
    Collect {
        odd: u8,
    },
}

fn event() -> impl Strategy<Value = Event> {
    let add = (1u32..30, 1u32..16, 1usize..16, 0u32..3, prop::bool::weighted(0.7)).prop_map(
        |(prompt, max_tokens, stops_at, kind, runs_ahead)| Event::Add {
            prompt,
            max_tokens,
            stops_at,
            kind,
            runs_ahead,
        },
    );
    prop_oneof![
        4 => add,
        1 => (0usize..8).prop_map(|nth| Event::Abort { nth }),
        1 => (0usize..8).prop_map(|nth| Event::Replace { nth }),
        8 => Just(Event::Launch),
        6 => (0u8..24).prop_map(|odd| Event::Collect { odd }),
    ]
}

fn prompt(len: u32, kind: u32) -> Vec<u32> {
    (0..len).map(|i| if i < 6 { kind } else { kind + i % 2 }).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]

    #[test]
    fn plans_in_flight_do_not_change_outputs(
        depth in 1usize..4, pool in 4u32..24, block_size in 1u32..6, max_num_seqs in 1u32..6, spare_rows in 0u32..20,
        watermark_blocks in 0u32..3, prefix_cache in any::<bool>(), priority in any::<bool>(),
        max_logit_rows in prop_oneof![Just(u32::MAX), 1u32..6],
        events in prop::collection::vec(event(), 1..80),
    ) {
        let config = SchedulerConfig::new(max_num_seqs + spare_rows, max_num_seqs, 64).with_watermark_blocks(watermark_blocks).with_max_logit_rows(max_logit_rows).with_policy(if priority { SchedulePolicy::Priority } else { SchedulePolicy::Fcfs });
        let mut blocks = BlockAllocator::new(pool, block_size);
        if prefix_cache {
            blocks = blocks.with_prefix_cache(4);
        }
        let mut rig = Rig::new(Scheduler::new(config).unwrap(), blocks);
        let nth_live = |rig: &Rig, nth: usize| {
            let ids: Vec<_> = rig.live.keys().copied().collect();
            (!ids.is_empty()).then(|| ids[nth % ids.len()])
        };
        let (mut next_id, mut work) = (0, 0);
        for event in events {
            match event {
                Event::Add { prompt: len, max_tokens, stops_at, kind, runs_ahead } => {
                    if rig.add(next_id, prompt(len, kind), max_tokens, stops_at, runs_ahead) {
                        work += u64::from(len + max_tokens);
                    }
                    next_id += 1;
                }
                Event::Abort { nth } => {
                    if let Some(seq) = nth_live(&rig, nth) {
                        rig.abort(seq);
                    }
                }
                Event::Replace { nth } => {
                    if let Some(seq) = nth_live(&rig, nth) {
                        rig.abort(seq);
                        work += 20;
                        prop_assert!(rig.add(seq.0, prompt(4, 1), 9, 5, true));
                        rig.ended.remove(&seq);
                    }
                }
                Event::Launch if rig.in_flight.len() < depth => {
                    rig.launch();
                }
                Event::Launch => rig.collect(|| 9),
                Event::Collect { odd } => {
                    let mut turn = 0;
                    rig.collect(|| { turn += 1; if turn == 1 { odd } else { 9 } });
                }
            }
        }
        let mut steps = 0;
        while !rig.scheduler.is_idle() || !rig.in_flight.is_empty() {
            let (before, ended) = (rig.in_flight.len(), rig.ended.len());
            while rig.in_flight.len() < depth && rig.launch() > 0 {}
            let moved = !rig.in_flight.is_empty() || rig.ended.len() > ended;
            prop_assert!(moved || before > 0, "the plan is empty although work is left");
            rig.collect(|| 9);
            steps += 1;
            prop_assert!(steps < 100 + 4 * work * work, "the sequences do not end within the bound");
        }
        prop_assert!(rig.live.is_empty());
        prop_assert_eq!(rig.blocks.stats().live_blocks, 0);
        prop_assert_eq!(rig.scheduler.preemptions(), rig.preemptions);
        for (seq, (expected_seq, complete)) in &rig.ended {
            let slots = pool * block_size;
            let capacity = (slots + 1).saturating_sub(expected_seq.prompt.len() as u32).min(64 - expected_seq.prompt.len() as u32);
            let expected_len = capacity.min(expected_seq.max_tokens).min(expected_seq.stops_at as u32) as usize;
            prop_assert!(!complete || expected_seq.output.len() == expected_len, "{:?} {:?} has another output length than {}", seq, expected_seq, expected_len);
            let expected = oracle_output(&expected_seq.prompt, b"", expected_seq.output.len() as u32);
            prop_assert_eq!(&expected_seq.output, &expected);
            prop_assert!(depth > 1 || !expected_seq.ran_ahead);
        }
    }
}

#[test]
fn a_stop_wastes_a_row_a_plan_in_flight_and_a_length_none() {
    for depth in 1..=3usize {
        for (stops_at, wasted) in [(4, depth as u64 - 1), (99, 0)] {
            let config = SchedulerConfig::new(64, 4, 64).with_max_logit_rows(u32::MAX);
            let mut rig = Rig::new(Scheduler::new(config).unwrap(), BlockAllocator::new(16, 4));
            assert!(rig.add(0, prompt(9, 1), 9, stops_at, true));
            while !rig.scheduler.is_idle() {
                while rig.in_flight.len() < depth && rig.launch() > 0 {}
                rig.collect(|| 9);
            }
            assert_eq!(
                rig.scheduler.wasted_rows(),
                wasted,
                "wasted rows at depth {depth}, stopping at {stops_at} tokens"
            );
            assert_eq!(rig.ended[&SeqId(0)].0.ran_ahead, depth > 1);
        }
    }
}

/// An older sequence that needs a block gets it from a younger one within the in-flight plans, even if the younger one
/// could continue for long.
#[test]
fn a_younger_sequence_in_flight_is_preempted_soon() {
    for depth in 1..=3usize {
        let config = SchedulerConfig::new(64, 4, 64).with_max_logit_rows(u32::MAX);
        let mut rig = Rig::new(Scheduler::new(config).unwrap(), BlockAllocator::new(2, 16));
        assert!(rig.add(0, prompt(15, 1), 9, 99, true) && rig.add(1, prompt(2, 2), 14, 99, true));
        let mut launches = 0;
        while rig.preemptions == 0 {
            while rig.in_flight.len() < depth && rig.launch() > 0 {
                launches += 1;
            }
            rig.collect(|| 9);
            assert!(launches < 20, "depth {depth}: the older sequence gets no block");
        }
        // The older sequence fills its block in the second plan and needs another block in the third.
        assert!(launches <= 2 + depth, "depth {depth}: the preemption came only after {launches} plans");
        while !rig.scheduler.is_idle() {
            while rig.in_flight.len() < depth && rig.launch() > 0 {}
            rig.collect(|| 9);
        }
        assert_eq!(rig.ended[&SeqId(1)].0.output, oracle_output(&prompt(2, 2), b"", 14));
    }
}
