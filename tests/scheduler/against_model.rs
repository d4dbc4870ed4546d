//! Tests that each step keeps to its token budget and each request completes, under any traffic.
#![allow(clippy::cast_possible_truncation, reason = "the numbers of a test are small")]

use std::collections::BTreeMap;

use crate::common::digest_model::{End, Rig, oracle_output};
use ascend_llm::kv_cache::{BlockAllocator, SeqId};
use ascend_llm::scheduler::{
    NewSequence, PRIORITY_STEP_US, ScheduleError, SchedulePolicy, Scheduler, SchedulerConfig, SeqResult, StepOutput,
    Tick,
};
use proptest::prelude::*;
use serde::Deserialize;

#[derive(Deserialize)]
struct Scenarios {
    cases: Vec<Scenario>,
}

#[derive(Clone, Deserialize)]
struct Scenario {
    id: String,
    pool_blocks: Option<u32>,
    block: Option<u32>,
    max_model_len: Option<u32>,
    max_batched_tokens: Option<u32>,
    max_seqs: Option<u32>,
    #[serde(default)]
    arrivals: Vec<ArrivingRequest>,
}

#[derive(Clone, Deserialize)]
struct ArrivingRequest {
    at: Option<u64>,
    every: Option<u64>,
    until: Option<u64>,
    count: Option<u32>,
    prompt: u32,
    max_tokens: u32,
}

fn scenario(id: &str) -> Scenario {
    let all: Scenarios = serde_json::from_str(include_str!("../data/cases/scheduler_scenarios.json")).unwrap();
    all.cases.iter().find(|case| case.id == id).unwrap().clone()
}

fn config() -> SchedulerConfig {
    SchedulerConfig::new(512, 8, 100_000).with_max_logit_rows(u32::MAX)
}

impl Scenario {
    fn rig(&self, prefix_cache: bool, watermark_blocks: u32) -> Rig {
        let budget = self.max_batched_tokens.unwrap_or(512);
        let config = config()
            .with_max_num_batched_tokens(budget)
            .with_max_num_seqs(self.max_seqs.unwrap_or(16).min(budget))
            .with_max_model_len(self.max_model_len.unwrap_or(100_000))
            .with_watermark_blocks(watermark_blocks);
        let mut blocks = BlockAllocator::new(self.pool_blocks.unwrap(), self.block.unwrap());
        if prefix_cache {
            blocks = blocks.with_prefix_cache(1);
        }
        let mut rig = Rig::new(Scheduler::new(config).unwrap(), blocks);
        rig.constant_token = Some(1);
        rig
    }

    /// Adds the requests that arrive before the current step; ids count the arrivals over all steps.
    fn arrive(&self, rig: &mut Rig, next_id: &mut u64) -> Vec<ScheduleError> {
        let mut refused = Vec::new();
        for arrival in &self.arrivals {
            let now = match (arrival.at, arrival.every) {
                (Some(at), _) => at == rig.step,
                (None, Some(every)) => rig.step.is_multiple_of(every) && rig.step < arrival.until.unwrap(),
                (None, None) => panic!("{}: an arrival has no time", self.id),
            };
            for _ in 0..if now { arrival.count.unwrap_or(1) } else { 0 } {
                // Prompts differ in their first token, so no prefix is shared.
                let prompt: Vec<u32> = (0..arrival.prompt).map(|i| (*next_id as u32) << 16 | i).collect();
                let meta = NewSequence::new(prompt, arrival.max_tokens);
                refused.extend(rig.add(*next_id, meta).err());
                *next_id += 1;
            }
        }
        refused
    }

    fn last_arrival(&self) -> u64 {
        self.arrivals.iter().map(|arrival| arrival.at.unwrap_or(0).max(arrival.until.unwrap_or(0))).max().unwrap()
    }

    /// Runs the scenario to its end; the rig checks the invariants of each step.
    fn run(&self, rig: &mut Rig) -> Vec<ScheduleError> {
        let (mut refused, mut next_id) = (Vec::new(), 0);
        while rig.step <= self.last_arrival() || !rig.scheduler.is_idle() {
            refused.extend(self.arrive(rig, &mut next_id));
            rig.step();
            assert!(rig.step < 10_000, "{}: the scenario does not end", self.id);
        }
        rig.assert_empty();
        refused
    }
}

/// Checks the scenario with the prefix cache off and on, and with watermark 0 and 1.
fn each_setting(id: &str, check: impl Fn(Scenario, Rig)) {
    for (prefix_cache, watermark) in [(false, 0), (true, 0), (false, 1), (true, 1)] {
        let scenario = scenario(id);
        let rig = scenario.rig(prefix_cache, watermark);
        check(scenario, rig);
    }
}

#[test]
fn d01_what_can_never_fit_is_refused_with_the_sizes() {
    each_setting("d01", |scenario, mut rig| {
        let refused = scenario.run(&mut rig);
        let expected = ScheduleError::NeverFits { prompt_tokens: 40, needed_blocks: 10, pool_blocks: 8, block_size: 4 };
        assert_eq!(refused, std::slice::from_ref(&expected));
        let text = "the prompt has 40 tokens and needs 10 blocks of 4 tokens, but the whole pool has 8 blocks";
        assert_eq!(expected.to_string(), text);
        assert!(*rig.finished(1).token_steps.last().unwrap() < 6);
    });
}

#[test]
fn d02_output_that_outgrows_the_pool_ends_with_length() {
    each_setting("d02", |scenario, mut rig| {
        scenario.run(&mut rig);
        let (expected_seq, end) = &rig.done[&SeqId(0)];
        // The pool has 16 slots: 12 of the prompt and 4 of computed output tokens. The fifth output token is sampled
        // and needs no slot.
        assert_eq!((*end, expected_seq.output.len()), (End::Exhausted, 5));
        assert!(rig.step < 10);
    });
}

#[test]
fn d03_a_prompt_above_the_step_budget_is_chunked() {
    each_setting("d03", |scenario, mut rig| {
        scenario.run(&mut rig);
        // Steps count from 0: the 7th step samples the first token, the 8th the second.
        assert_eq!(rig.finished(0).token_steps, [6, 7]);
    });
}

#[test]
fn d04_a_long_prompt_never_stalls_the_streams() {
    each_setting("d04", |scenario, mut rig| {
        scenario.run(&mut rig);
        for id in 0..8 {
            let steps = &rig.finished(id).token_steps;
            assert_eq!(steps.len(), 200);
            assert!(
                steps.windows(2).all(|pair| pair[1] - pair[0] == 1),
                "sequence {id} is skipped in a step: {steps:?}"
            );
        }
        assert_eq!(rig.finished(8).output.len(), 1);
        assert!(rig.finished(8).token_steps[0] < 60, "2000 rows take 36 steps of 56 rows");
    });
}

#[test]
fn d05_a_long_prompt_gets_through_a_stream_of_short_ones() {
    each_setting("d05", |scenario, mut rig| {
        scenario.run(&mut rig);
        assert!(*rig.finished(0).token_steps.last().unwrap() < 150);
        assert_eq!(rig.done.len(), 401);
    });
}

#[test]
fn d05_also_when_the_long_one_comes_late_and_the_pool_is_busy() {
    each_setting("d05", |mut scenario, mut rig| {
        scenario.arrivals[0].at = Some(20);
        scenario.arrivals[0].prompt = 250;
        // Id of the request: one short request arrives in each step before it; that of step 20 arrives after it.
        scenario.run(&mut rig);
        let long = rig.done.values().find(|(expected_seq, _)| expected_seq.prompt.len() == 250).unwrap();
        assert_eq!(long.0.added_at, 20);
        assert!(*long.0.token_steps.last().unwrap() < 20 + 150);
    });
}

#[test]
fn d06_preempted_sequences_finish_with_every_token_once() {
    each_setting("d06", |scenario, mut rig| {
        scenario.run(&mut rig);
        for id in 0..4 {
            assert_eq!(rig.finished(id).output.len(), 24);
        }
        assert!(rig.scheduler.preemptions() > 0);
        assert!(!rig.preempted.contains(&SeqId(0)), "the oldest sequence is never preempted");
        let mut ends: Vec<_> = (0..4).map(|id| *rig.finished(id).token_steps.last().unwrap()).collect();
        assert!(ends.is_sorted(), "the sequences do not end in order of arrival: {ends:?}");
        ends.dedup();
        assert_eq!(rig.blocks.available(), 10);
    });
}

#[test]
fn d07_a_prompt_of_exactly_the_pool_fits() {
    each_setting("d07", |scenario, mut rig| {
        assert_eq!(scenario.run(&mut rig), []);
        assert_eq!((rig.finished(0).output.len(), rig.finished(1).output.len()), (1, 1));
        let one_more = NewSequence::new(vec![1; 17], 1);
        assert!(matches!(rig.add(9, one_more), Err(ScheduleError::NeverFits { needed_blocks: 5, pool_blocks: 4, .. })));
    });
}

#[test]
fn d28_the_live_gauge_is_zero_when_idle() {
    assert_eq!(scenario("d28").pool_blocks, None);
    for id in ["d04", "d05", "d06"] {
        let scenario = scenario(id);
        let mut rig = scenario.rig(true, 0);
        scenario.run(&mut rig);
        let stats = rig.blocks.stats();
        assert_eq!(stats.live_blocks, 0);
        assert!(stats.cached_blocks > 0, "{id}: no block is cached");
    }
}

fn rig(config: SchedulerConfig, pool: u32, block_size: u32) -> Rig {
    Rig::new(Scheduler::new(config).unwrap(), BlockAllocator::new(pool, block_size))
}

fn meta(prompt: usize, max_tokens: u32) -> NewSequence {
    NewSequence::new(vec![3; prompt], max_tokens)
}

#[test]
fn configs_that_cannot_work_are_refused() {
    let zero = |field| Err::<(), _>(ScheduleError::Zero { field });
    let try_new = |config| Scheduler::new(config).map(|_| ());
    assert_eq!(try_new(config().with_max_num_batched_tokens(0)), zero("max_num_batched_tokens"));
    assert_eq!(try_new(config().with_max_num_seqs(0)), zero("max_num_seqs"));
    assert_eq!(try_new(config().with_max_model_len(0)), zero("max_model_len"));
    let below = ScheduleError::BudgetBelowSeqs { max_num_batched_tokens: 7, max_num_seqs: 8 };
    assert_eq!(try_new(config().with_max_num_batched_tokens(7)), Err(below));
}

#[test]
fn sequences_that_cannot_work_are_refused() {
    let mut rig = rig(config().with_max_model_len(20), 64, 4);
    assert_eq!(rig.add(0, meta(0, 1)), Err(ScheduleError::EmptyPrompt(SeqId(0))));
    let too_long = ScheduleError::PromptTooLong { prompt_tokens: 20, max_model_len: 20 };
    assert_eq!(rig.add(0, meta(20, 1)), Err(too_long));
    rig.add(0, meta(19, 9)).unwrap();
    assert_eq!(rig.add(0, meta(1, 1)), Err(ScheduleError::SeqExists(SeqId(0))));
    rig.drain();
    let (expected_seq, end) = &rig.done[&SeqId(0)];
    assert_eq!(
        (expected_seq.output.len(), *end),
        (1, End::Exhausted),
        "the sequence reaches max_model_len after one token"
    );
}

#[test]
fn unknown_sequences_are_harmless() {
    let mut rig = rig(config(), 8, 4);
    assert!(!rig.abort(5));
    assert!(rig.scheduler.tokens(SeqId(5)).is_empty());
    rig.add(0, meta(3, 1)).unwrap();
    let foreign = SeqResult::new(SeqId(77), Some(1), true);
    rig.scheduler.commit(&StepOutput::from(vec![foreign]), &mut rig.blocks);
    rig.drain();
    assert!(!rig.abort(0), "the sequence has already finished");
}

#[test]
fn an_id_aborted_and_added_again_in_flight_starts_fresh() {
    let mut rig = rig(config(), 8, 4);
    rig.add(0, meta(6, 3)).unwrap();
    rig.step_with(|rig| {
        rig.abort(0);
        rig.scheduler.add(SeqId(0), meta(5, 2), Tick(0), &rig.blocks).unwrap();
    });
    assert_eq!(rig.scheduler.tokens(SeqId(0)), [3; 5]);
    assert_eq!((rig.scheduler.running(), rig.scheduler.waiting()), (0, 1));
}

#[test]
fn a_failed_row_runs_again_and_a_missing_result_counts_as_not_run() {
    let mut blocks = BlockAllocator::new(8, 4).with_prefix_cache(1);
    let mut scheduler = Scheduler::new(config()).unwrap();
    scheduler.add(SeqId(0), meta(8, 4), Tick(0), &blocks).unwrap();
    let result = |token, finished| StepOutput::from(vec![SeqResult::new(SeqId(0), token, finished)]);

    let first = scheduler.schedule(Tick(0), &mut blocks).chunks.clone();
    assert_eq!((first[0].start, first[0].len, first[0].samples), (0, 8, true));
    scheduler.commit(&StepOutput::default(), &mut blocks);
    assert_eq!(scheduler.schedule(Tick(1), &mut blocks).chunks, first);
    scheduler.commit(&result(None, false), &mut blocks);
    assert_eq!(blocks.lookup(&[3; 9], b"").tokens(), 4, "the block of the failed row is not published");
    let again = scheduler.schedule(Tick(2), &mut blocks).chunks[0];
    assert_eq!((again.start, again.len, again.samples), (7, 1, true));
    scheduler.commit(&result(None, true), &mut blocks);
    assert_eq!(blocks.lookup(&[3; 9], b"").tokens(), 4);
    assert!(scheduler.is_idle());
    scheduler.check(&blocks).unwrap();
    assert_eq!(blocks.stats().live_blocks, 0);
}

#[test]
fn the_newest_of_the_lowest_priority_is_preempted_and_readmitted_first() {
    let policy = SchedulePolicy::Priority;
    let mut rig = rig(config().with_policy(policy).with_max_num_seqs(3), 6, 4);
    for (id, priority) in [(0, 1), (1, 0), (2, 0), (3, 0)] {
        rig.add(id, meta(7, 9).with_priority(priority)).unwrap();
    }
    // 7 + 1 rows fill two blocks of each sequence; the ninth token of each needs a third block.
    while rig.preempted.is_empty() {
        rig.step();
    }
    assert_eq!(rig.preempted, [SeqId(2)]);
    assert_eq!(rig.scheduler.waiting(), 2);
    while rig.live[&SeqId(2)].admissions < 2 {
        assert_eq!(rig.live[&SeqId(3)].admissions, 0, "the preempted sequence is the first of its priority");
        rig.step();
    }
    let planned: Vec<_> = rig.scheduler.plan().chunks.iter().map(|chunk| chunk.seq.0).collect();
    assert!(!planned.contains(&3) || planned.ends_with(&[2, 3]), "{planned:?}");
    rig.drain();
    for id in 0..4 {
        assert_eq!(rig.finished(id).output, oracle_output(&[3; 7], b"", 9));
    }
}

#[test]
fn admission_respects_the_watermark_unless_no_sequence_is_running() {
    for (watermark_blocks, admitted) in [(0, 2), (2, 2), (3, 1)] {
        let mut rig = rig(config().with_watermark_blocks(watermark_blocks), 6, 4);
        rig.add(0, meta(8, 1)).unwrap();
        rig.add(1, meta(8, 1)).unwrap();
        rig.step();
        assert_eq!(
            rig.scheduler.plan().chunks.len(),
            admitted,
            "wrong number of admissions with watermark_blocks = {watermark_blocks}"
        );
        rig.drain();
    }
    let mut rig = rig(config().with_watermark_blocks(3), 6, 4);
    rig.add(0, meta(24, 1)).unwrap();
    assert_eq!(rig.step(), 1, "in a batch of its own the sequence may use the whole pool");
}

#[test]
fn waiting_outweighs_priority_in_bounded_time() {
    let policy = SchedulePolicy::Priority;
    let config = config().with_policy(policy).with_max_num_seqs(1);
    let mut blocks = BlockAllocator::new(8, 4);
    let mut scheduler = Scheduler::new(config).unwrap();
    let add = |scheduler: &mut Scheduler, blocks: &BlockAllocator, id, priority, now| {
        let meta = meta(2, 1).with_priority(priority);
        scheduler.add(SeqId(id), meta, now, blocks).unwrap();
    };
    add(&mut scheduler, &blocks, 0, 0, Tick(0));
    // Four requests of priority 3 arrive per second, and the scheduler serves four requests per second.
    let mut served_at = None;
    for step in 0..40u64 {
        let now = Tick(step * PRIORITY_STEP_US / 4);
        add(&mut scheduler, &blocks, step + 1, 3, now);
        let seq = scheduler.schedule(now, &mut blocks).chunks[0].seq;
        if seq == SeqId(0) {
            served_at = served_at.or(Some(step));
        }
        let results = vec![SeqResult::new(seq, Some(1), true)];
        scheduler.commit(&StepOutput::from(results), &mut blocks);
    }
    assert_eq!(served_at, Some(12), "three priority levels equal three seconds of waiting");
}

#[test]
fn a_fork_shares_blocks_until_a_write() {
    let mut rig = rig(config(), 16, 4);
    rig.add(0, meta(6, 8)).unwrap();
    rig.step();
    let live = rig.blocks.stats().live_blocks;
    for child in 1..4u64 {
        rig.scheduler.fork(SeqId(0), SeqId(child), child as u32, &mut rig.blocks).unwrap();
        let mut expected_seq = rig.live[&SeqId(0)].clone();
        expected_seq.output[0] = child as u32;
        rig.live.insert(SeqId(child), expected_seq);
    }
    rig.check();
    assert_eq!(rig.blocks.stats().live_blocks, live);
    let unknown = rig.scheduler.fork(SeqId(9), SeqId(10), 1, &mut rig.blocks);
    assert_eq!(unknown, Err(ScheduleError::NotRunning(SeqId(9))));
    let taken = rig.scheduler.fork(SeqId(0), SeqId(1), 1, &mut rig.blocks);
    assert_eq!(taken, Err(ScheduleError::SeqExists(SeqId(1))));
    rig.step();
    assert_eq!(rig.scheduler.plan().copies.len(), 3, "three sequences copy the block, the last one keeps the original");
    rig.drain();
    for id in 0..4 {
        let expected_seq = rig.finished(id);
        let continued = [&expected_seq.prompt[..], &expected_seq.output[..1]].concat();
        assert_eq!(expected_seq.output[1..], oracle_output(&continued, b"", 7));
    }
}

#[test]
fn a_lowered_step_budget_holds_at_once() {
    let mut rig = rig(config(), 64, 4);
    let refused = ScheduleError::StepBudget { tokens: 513, max_num_batched_tokens: 512 };
    assert_eq!(rig.scheduler.set_step_budget_tokens(513), Err(refused));
    assert!(rig.scheduler.set_step_budget_tokens(0).is_err());
    for id in 0..8 {
        rig.add(id, meta(10, 6)).unwrap();
    }
    rig.step();
    rig.scheduler.set_step_budget_tokens(3).unwrap();
    rig.drain();
    for id in 0..8 {
        assert_eq!(rig.finished(id).output.len(), 6);
    }
}

#[derive(Clone, Debug)]
enum Event {
    Add { prompt: usize, max_tokens: u32, priority: i32, kind: u32, cached: bool, prompt_logits: bool },
    Abort { nth: usize },
    AbortInFlight { nth: usize },
    Fork { nth: usize },
    Step,
}

fn event() -> impl Strategy<Value = Event> {
    let flags = (prop::bool::weighted(0.8), prop::bool::weighted(0.3));
    let add = (1usize..40, 1u32..16, -2i32..3, 0u32..3, flags).prop_map(
        |(prompt, max_tokens, priority, kind, (cached, prompt_logits))| Event::Add {
            prompt,
            max_tokens,
            priority,
            kind,
            cached,
            prompt_logits,
        },
    );
    prop_oneof![
        4 => add,
        1 => (0usize..8).prop_map(|nth| Event::Abort { nth }),
        1 => (0usize..8).prop_map(|nth| Event::AbortInFlight { nth }),
        1 => (0usize..8).prop_map(|nth| Event::Fork { nth }),
        6 => Just(Event::Step),
    ]
}

#[derive(Clone, Debug)]
struct Setting {
    pool: u32,
    block_size: u32,
    max_num_seqs: u32,
    spare_budget: u32,
    watermark_blocks: u32,
    max_logit_rows: u32,
    priority: bool,
    prefix_cache: bool,
}

fn setting() -> impl Strategy<Value = Setting> {
    let rows = (0u32..20, prop_oneof![Just(u32::MAX), 1u32..8]);
    (4u32..30, 1u32..6, 1u32..6, rows, 0u32..3, any::<bool>(), any::<bool>()).prop_map(
        |(pool, block_size, max_num_seqs, (spare_budget, max_logit_rows), watermark_blocks, priority, prefix_cache)| {
            Setting {
                pool,
                block_size,
                max_num_seqs,
                spare_budget,
                watermark_blocks,
                max_logit_rows,
                priority,
                prefix_cache,
            }
        },
    )
}

impl Setting {
    fn rig(&self) -> Rig {
        let config = SchedulerConfig::new(self.max_num_seqs + self.spare_budget, self.max_num_seqs, 64)
            .with_watermark_blocks(self.watermark_blocks)
            .with_max_logit_rows(self.max_logit_rows)
            .with_policy(if self.priority { SchedulePolicy::Priority } else { SchedulePolicy::Fcfs });
        let mut blocks = BlockAllocator::new(self.pool, self.block_size);
        if self.prefix_cache {
            blocks = blocks.with_prefix_cache(4);
        }
        Rig::new(Scheduler::new(config).unwrap(), blocks)
    }

    fn slots(&self) -> u32 {
        self.pool * self.block_size
    }
}

fn nth_live(rig: &Rig, nth: usize) -> Option<u64> {
    let ids: Vec<_> = rig.live.keys().collect();
    (!ids.is_empty()).then(|| ids[nth % ids.len()].0)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    /// Random requests complete in bounded time, with the tokens that each would get in a batch of its own.
    ///
    /// The rig checks the invariants of each step.
    #[test]
    fn random_traffic(setting in setting(), events in prop::collection::vec(event(), 1..60)) {
        let mut rig = setting.rig();
        let (mut next_id, mut forks) = (0u64, BTreeMap::new());
        let mut work_rows = 0u64;
        for event in events {
            match event {
                Event::Add { prompt, max_tokens, priority, kind, cached, prompt_logits } => {
                    let tokens: Vec<u32> = (0..prompt as u32).map(|i| if i < 6 { kind } else { kind + i % 2 }).collect();
                    let salt = vec![(kind % 2) as u8].into();
                    let read_prefix_cache = cached && !prompt_logits;
                    let meta =
                        NewSequence::new(tokens, max_tokens).with_priority(priority).with_salt(salt).with_read_prefix_cache(read_prefix_cache).with_prompt_logits(prompt_logits);
                    let fits = (prompt as u32).div_ceil(setting.block_size) <= setting.pool;
                    let added = rig.add(next_id, meta);
                    prop_assert_eq!(added.is_ok(), fits);
                    if fits {
                        work_rows += prompt as u64 + u64::from(max_tokens);
                    }
                    next_id += 1;
                }
                Event::Abort { nth } => {
                    if let Some(id) = nth_live(&rig, nth) {
                        rig.abort(id);
                    }
                }
                Event::AbortInFlight { nth } => {
                    rig.step_with(|rig| {
                        if let Some(id) = nth_live(rig, nth) {
                            rig.abort(id);
                        }
                    });
                }
                Event::Fork { nth } => {
                    let Some(parent) = nth_live(&rig, nth) else { continue };
                    if rig.scheduler.fork(SeqId(parent), SeqId(next_id), 9, &mut rig.blocks).is_ok() {
                        let mut expected_seq = rig.live[&SeqId(parent)].clone();
                        prop_assert!(!expected_seq.output.is_empty() || expected_seq.prompt.len() as u32 == expected_seq.computed + 1);
                        if let Some(last) = expected_seq.output.last_mut() {
                            *last = 9;
                        } else {
                            *expected_seq.prompt.last_mut().unwrap() = 9;
                        }
                        if rig.blocks.table(SeqId(next_id)).is_empty() {
                            expected_seq.computed = 0;
                        }
                        work_rows += u64::from(expected_seq.prompt.len() as u32 + expected_seq.max_tokens);
                        forks.insert(SeqId(next_id), expected_seq.output.len());
                        rig.live.insert(SeqId(next_id), expected_seq);
                        rig.check();
                        next_id += 1;
                    }
                }
                Event::Step => {
                    rig.step();
                }
            }
        }
        // Bound on the waiting time: a step without preemption computes at least one lasting row, and each preemption
        // allows one decode row of an older sequence. So the square of the work is a safe bound, which a livelock
        // exceeds.
        let bound = rig.step + 100 + work_rows * work_rows;
        while !rig.scheduler.is_idle() {
            let ended = rig.done.len();
            prop_assert!(rig.step() > 0 || rig.done.len() > ended, "the step made no progress although work is left");
            prop_assert!(rig.step < bound, "the sequences do not end within the bound");
        }
        rig.assert_empty();
        for (seq, (expected_seq, end)) in &rig.done {
            let from = forks.get(seq).copied().unwrap_or(0);
            let known = [&expected_seq.prompt[..], &expected_seq.output[..from]].concat();
            let capacity = setting.slots() + 1 - expected_seq.prompt.len() as u32;
            let limit = expected_seq.max_tokens.min(64 - expected_seq.prompt.len() as u32);
            let expected_len = match end {
                End::Aborted => expected_seq.output.len(),
                End::Finished => expected_seq.max_tokens as usize,
                End::Exhausted => capacity.min(limit) as usize,
            };
            prop_assert_eq!(expected_seq.output.len(), expected_len, "{:?} {:?}", seq, end);
            let expected = oracle_output(&known, &expected_seq.salt, (expected_len - from) as u32);
            prop_assert_eq!(&expected_seq.output[from..], &expected);
        }
    }

    /// The same calls yield the same plans.
    #[test]
    fn plans_are_a_function_of_the_calls(setting in setting(), prompts in prop::collection::vec(1usize..30, 1..10)) {
        let run = || {
            let (mut rig, mut plans) = (setting.rig(), Vec::new());
            for (id, &prompt) in prompts.iter().enumerate() {
                let added = rig.add(id as u64, meta(prompt, 7)).is_ok();
                plans.push((added, String::new()));
            }
            while !rig.scheduler.is_idle() {
                rig.step();
                let tables: Vec<_> = rig.live.keys().map(|seq| rig.blocks.table(*seq).to_vec()).collect();
                plans.push((true, format!("{:?} {tables:?}", rig.scheduler.plan())));
            }
            plans
        };
        prop_assert_eq!(run(), run());
    }

    /// First come, first served: no sequence is first admitted before an older one.
    #[test]
    fn fcfs_admits_in_order_of_arrival(setting in setting(), prompts in prop::collection::vec(1usize..30, 1..12)) {
        let mut rig = Setting { priority: false, ..setting }.rig();
        let mut added = Vec::new();
        for (id, &prompt) in prompts.iter().enumerate() {
            if rig.add(id as u64, meta(prompt, 5)).is_ok() {
                added.push(SeqId(id as u64));
            }
        }
        let mut admitted = Vec::new();
        while !rig.scheduler.is_idle() {
            rig.step();
            for chunk in &rig.scheduler.plan().chunks {
                if !admitted.contains(&chunk.seq) {
                    admitted.push(chunk.seq);
                }
            }
        }
        prop_assert_eq!(admitted, added);
    }
}
