//! Promise: plans in flight change when rows are computed, never which: every sequence gets the tokens it would have had
//! alone, rows ahead of a result are void if it turns out otherwise, and nobody reads a block that is not its own.
#![allow(clippy::cast_possible_truncation, reason = "the numbers of a test are small")]

use std::collections::{BTreeMap, VecDeque};

use crate::common::digest_model::{digest, oracle_output, root};
use ascend_llm::kv_cache::{BlockAllocator, SeqId};
use ascend_llm::scheduler::{
    Chunk, NewSequence, SchedulePolicy, Scheduler, SchedulerConfig, SeqResult, StepOutput, Tick,
};
use proptest::prelude::*;

/// A sequence as the test knows it.
#[derive(Clone, Debug)]
struct Twin {
    prompt: Vec<u32>,
    output: Vec<u32>,
    max_tokens: u32,
    /// Output tokens at which it stops, whatever its length.
    stops_at: usize,
    /// Rows planned, of which `committed` are no longer in flight.
    planned: u32,
    committed: u32,
    /// Tokens drawn in plans that are in flight.
    ahead: Vec<u32>,
    ran_ahead: bool,
}

struct Flight {
    plan: u64,
    chunks: Vec<Chunk>,
    drawn: Vec<Option<u32>>,
    /// By chunk: whether the test holds it void.
    void: Vec<bool>,
}

/// Scheduler, pool and a device that keeps digests of prefixes in its slots and runs plans in order.
struct Rig {
    scheduler: Scheduler,
    blocks: BlockAllocator,
    slots: Vec<u64>,
    live: BTreeMap<SeqId, Twin>,
    ended: BTreeMap<SeqId, (Twin, bool)>,
    flights: VecDeque<Flight>,
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
            flights: VecDeque::new(),
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
        let twin = Twin {
            prompt,
            output: Vec::new(),
            max_tokens,
            stops_at,
            planned: 0,
            committed: 0,
            ahead: Vec::new(),
            ran_ahead: false,
        };
        self.live.insert(SeqId(id), twin);
        true
    }

    /// Its rows in flight mean nothing any more.
    fn void(&mut self, seq: SeqId) {
        for flight in &mut self.flights {
            for (chunk, void) in flight.chunks.iter().zip(&mut flight.void) {
                if chunk.seq == seq && !*void {
                    *void = true;
                    self.wasted += u64::from(chunk.len);
                }
            }
        }
        if let Some(twin) = self.live.get_mut(&seq) {
            twin.ahead.clear();
            twin.planned = twin.committed;
        }
    }

    fn end(&mut self, seq: SeqId, whole: bool) {
        self.void(seq);
        let twin = self.live.remove(&seq).unwrap();
        self.ended.insert(seq, (twin, whole));
    }

    fn abort(&mut self, seq: SeqId) {
        assert!(self.scheduler.abort(seq, &mut self.blocks));
        self.end(seq, false);
        assert!(self.blocks.table(seq).is_empty());
        self.check();
    }

    /// Plans a step and runs it at once, as a device does that is ahead of everybody; its rows.
    fn launch(&mut self) -> usize {
        self.now += 1_000;
        let plan = self.scheduler.schedule(Tick(self.now), &mut self.blocks).clone();
        self.check();
        for seq in &plan.preempted {
            let twin = self.live.get_mut(seq).unwrap();
            assert_eq!(twin.planned, twin.committed, "{seq:?} is preempted in flight");
            (twin.planned, twin.committed) = (0, 0);
            self.preemptions += 1;
        }
        for seq in &plan.capped {
            let twin = &self.live[seq];
            assert_eq!(twin.planned, twin.committed, "{seq:?} is exhausted in flight");
            self.end(*seq, true);
        }
        let block_size = self.blocks.block_size() as usize;
        for &(from, to) in &plan.copies {
            let start = from.0 as usize * block_size;
            self.slots.copy_within(start..start + block_size, to.0 as usize * block_size);
        }
        let mut drawn = Vec::new();
        for chunk in &plan.chunks {
            let twin = self.live.get_mut(&chunk.seq).expect("only live sequences are planned");
            let known = [&twin.prompt[..], &twin.output].concat();
            assert_eq!(self.scheduler.tokens(chunk.seq), known, "placeholders are no tokens");
            if twin.planned > 0 {
                assert_eq!(chunk.start, twin.planned, "a gap or a repetition: {chunk:?}");
            }
            let end = (chunk.start + chunk.len) as usize;
            assert_eq!(chunk.placeholder.is_some(), chunk.start as usize >= known.len(), "{chunk:?}");
            if let Some(from) = chunk.placeholder {
                assert_eq!(chunk.len, 1);
                let flight = self.flights.iter().find(|flight| flight.plan == from.plan).expect("it is in flight");
                assert_eq!((flight.chunks[from.chunk].seq, flight.void[from.chunk]), (chunk.seq, false));
                assert_eq!(flight.drawn[from.chunk], twin.ahead.last().copied(), "the newest token feeds");
                twin.ran_ahead = true;
            }
            let all = [&known[..], &twin.ahead].concat();
            assert!(end <= all.len());
            let table = self.blocks.table(chunk.seq);
            let slot = |position: usize| table[position / block_size].0 as usize * block_size + position % block_size;
            let mut state = root(b"");
            for (position, &token) in all[..end].iter().enumerate() {
                state = digest(state, token);
                if position < chunk.start as usize {
                    assert_eq!(self.slots[slot(position)], state, "{:?} reads a wrong row {position}", chunk.seq);
                } else {
                    self.slots[slot(position)] = state;
                }
            }
            twin.planned = end as u32;
            if chunk.placeholder.is_none() {
                twin.committed = twin.committed.max(chunk.start);
            }
            drawn.push(chunk.samples.then_some(state as u32 % 5));
            if chunk.samples {
                twin.ahead.push(state as u32 % 5);
            }
        }
        let rows = plan.chunks.len();
        if rows > 0 {
            let void = vec![false; rows];
            self.flights.push_back(Flight { plan: plan.number, chunks: plan.chunks, drawn, void });
        }
        rows
    }

    /// Commits the oldest plan. `odd` says what else may happen to a chunk, if it is to happen.
    fn collect(&mut self, mut odd: impl FnMut() -> u8) {
        let Some(flight) = self.flights.pop_front() else { return };
        let mut results = Vec::new();
        let mut redo = Vec::new();
        for ((chunk, drawn), void) in flight.chunks.iter().zip(&flight.drawn).zip(&flight.void) {
            assert_eq!(self.scheduler.is_stale(flight.plan, chunk.seq), *void, "{chunk:?}");
            let mut result = SeqResult::new(chunk.seq, *drawn, false);
            if *void {
                // Whatever it says is ignored.
                result.finished = true;
                results.push(result);
                continue;
            }
            let twin = self.live.get_mut(&chunk.seq).unwrap();
            match odd() {
                // Its rows turn out to be right only once they have run again: what is behind them is not.
                0 => {
                    self.scheduler.set_f32_from(chunk.seq, chunk.start);
                    redo.push(chunk.seq);
                }
                // The row that samples failed, and runs again.
                1 if drawn.is_some() => {
                    result.token = None;
                    twin.ahead.remove(0);
                    twin.committed = chunk.start + chunk.len - 1;
                    redo.push(chunk.seq);
                    results.push(result);
                    continue;
                }
                // It did not run.
                2 => {
                    twin.committed = chunk.start;
                    if drawn.is_some() {
                        twin.ahead.remove(0);
                    }
                    redo.push(chunk.seq);
                    continue;
                }
                _ => {}
            }
            twin.committed = chunk.start + chunk.len;
            if let Some(token) = *drawn {
                assert_eq!(twin.ahead.remove(0), token);
                twin.output.push(token);
                result.finished = twin.output.len() == (twin.max_tokens as usize).min(twin.stops_at);
            }
            results.push(result);
        }
        for seq in redo {
            self.void(seq);
        }
        for result in &results {
            let ended = self.live.get(&result.seq).is_some_and(|twin| {
                result.finished && twin.output.len() == (twin.max_tokens as usize).min(twin.stops_at)
            });
            let own = flight.chunks.iter().position(|chunk| chunk.seq == result.seq).unwrap();
            if ended && !flight.void[own] {
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
    /// Aborted, and another one under the same id at once.
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
    fn plans_in_flight_do_not_show(
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
                Event::Launch if rig.flights.len() < depth => {
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
        while !rig.scheduler.is_idle() || !rig.flights.is_empty() {
            let (before, ended) = (rig.flights.len(), rig.ended.len());
            while rig.flights.len() < depth && rig.launch() > 0 {}
            let moved = !rig.flights.is_empty() || rig.ended.len() > ended;
            prop_assert!(moved || before > 0, "an empty plan with work left");
            rig.collect(|| 9);
            steps += 1;
            prop_assert!(steps < 100 + 4 * work * work, "no end in sight");
        }
        prop_assert!(rig.live.is_empty());
        prop_assert_eq!(rig.blocks.stats().live_blocks, 0);
        prop_assert_eq!(rig.scheduler.preemptions(), rig.preemptions);
        for (seq, (twin, whole)) in &rig.ended {
            let slots = pool * block_size;
            let room = (slots + 1).saturating_sub(twin.prompt.len() as u32).min(64 - twin.prompt.len() as u32);
            let said = room.min(twin.max_tokens).min(twin.stops_at as u32) as usize;
            prop_assert!(!whole || twin.output.len() == said, "{:?} {:?} said {}", seq, twin, said);
            let expected = oracle_output(&twin.prompt, b"", twin.output.len() as u32);
            prop_assert_eq!(&twin.output, &expected);
            prop_assert!(depth > 1 || !twin.ran_ahead);
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
                while rig.flights.len() < depth && rig.launch() > 0 {}
                rig.collect(|| 9);
            }
            assert_eq!(rig.scheduler.wasted_rows(), wasted, "depth {depth}, stops at {stops_at}");
            assert_eq!(rig.ended[&SeqId(0)].0.ran_ahead, depth > 1);
        }
    }
}

/// Whoever needs a block gets it from a younger one within the plans in flight, also if that one could go on for long.
#[test]
fn a_younger_one_in_flight_gives_way_soon() {
    for depth in 1..=3usize {
        let config = SchedulerConfig::new(64, 4, 64).with_max_logit_rows(u32::MAX);
        let mut rig = Rig::new(Scheduler::new(config).unwrap(), BlockAllocator::new(2, 16));
        assert!(rig.add(0, prompt(15, 1), 9, 99, true) && rig.add(1, prompt(2, 2), 14, 99, true));
        let mut launches = 0;
        while rig.preemptions == 0 {
            while rig.flights.len() < depth && rig.launch() > 0 {
                launches += 1;
            }
            rig.collect(|| 9);
            assert!(launches < 20, "depth {depth}: the older one starves");
        }
        // The older one fills its block with the second plan and asks for another with the third.
        assert!(launches <= 2 + depth, "depth {depth}: after {launches} plans");
        while !rig.scheduler.is_idle() {
            while rig.flights.len() < depth && rig.launch() > 0 {}
            rig.collect(|| 9);
        }
        assert_eq!(rig.ended[&SeqId(1)].0.output, oracle_output(&prompt(2, 2), b"", 14));
    }
}
