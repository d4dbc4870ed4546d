//! Tests that a step without admission, finish or preemption allocates no memory in scheduler and block allocator.
#![allow(clippy::cast_possible_truncation, reason = "the numbers of a test are small")]

#[path = "common/counting_allocator.rs"]
mod counting_allocator;

use std::cell::Cell;

use ascend_llm::kv_cache::{BlockAllocator, SeqId};
use ascend_llm::scheduler::{NewSequence, SchedulePolicy, Scheduler, SchedulerConfig, SeqResult, StepOutput, Tick};

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

/// Counts only the allocations of this thread, and not those of the test runner's threads.
fn count() {
    let _ = ALLOCATIONS.try_with(|allocations| allocations.set(allocations.get() + 1));
}

fn allocations(work: impl FnOnce()) -> u64 {
    let before = ALLOCATIONS.get();
    work();
    ALLOCATIONS.get() - before
}

struct Loop {
    scheduler: Scheduler,
    blocks: BlockAllocator,
    output: StepOutput,
    token: u32,
    step: u64,
}

impl Loop {
    fn new(blocks: BlockAllocator, budget: u32) -> Self {
        let config = SchedulerConfig::new(budget, 8, 4_096)
            .with_watermark_blocks(1)
            .with_max_logit_rows(u32::MAX)
            .with_policy(SchedulePolicy::Priority);
        let output = StepOutput::from(Vec::with_capacity(16));
        Self { scheduler: Scheduler::new(config).unwrap(), blocks, output, token: 1, step: 0 }
    }

    fn add(&mut self, id: u64, prompt: u32, max_tokens: u32) {
        let prompt: Vec<u32> = (0..prompt).map(|i| id as u32 * 1_000 + i).collect();
        let meta = NewSequence::new(prompt, max_tokens).with_salt(vec![1, 2].into());
        self.scheduler.add(SeqId(id), meta, Tick(self.step), &self.blocks).unwrap();
    }

    fn step(&mut self) -> u32 {
        self.step += 1;
        let plan = self.scheduler.schedule(Tick(self.step), &mut self.blocks);
        assert!(plan.preempted.is_empty() && plan.capped.is_empty());
        self.output.results.clear();
        for chunk in &plan.chunks {
            let token = chunk.samples.then_some(self.token);
            self.output.results.push(SeqResult::new(chunk.seq, token, false));
        }
        let rows = plan.rows();
        self.scheduler.commit(&self.output, &mut self.blocks);
        rows
    }
}

#[test]
fn the_counter_counts() {
    assert!(allocations(|| drop(std::hint::black_box(vec![1u8; 100]))) >= 1);
}

#[test]
fn decode_steps_allocate_nothing() {
    for prefix_cache in [false, true] {
        let blocks = BlockAllocator::new(800, 16);
        let blocks = if prefix_cache { blocks.with_prefix_cache(1) } else { blocks };
        let mut engine = Loop::new(blocks, 64);
        for id in 0..8 {
            engine.add(id, 5 + id as u32, 1_200);
        }
        engine.step();
        let mut rows = 0;
        let counted = allocations(|| {
            for _ in 0..1_000 {
                rows += engine.step();
            }
        });
        assert!(rows >= 8_000 - 64);
        assert_eq!(counted, 0, "allocations with prefix_cache = {prefix_cache}");
        engine.scheduler.check(&engine.blocks).unwrap();
        engine.blocks.check().unwrap();
    }
}

#[test]
fn chunks_of_a_long_prompt_alongside_decodes_allocate_nothing() {
    let mut engine = Loop::new(BlockAllocator::new(800, 16).with_prefix_cache(1), 20);
    for id in 0..4 {
        engine.add(id, 8, 1_000);
    }
    engine.step();
    engine.step();
    engine.add(9, 3_000, 10);
    engine.step();
    let counted = allocations(|| {
        for _ in 0..100 {
            assert_eq!(engine.step(), 20);
        }
    });
    assert_eq!(counted, 0);
}

#[test]
fn a_blocked_queue_with_growing_hits_and_evictions_allocates_nothing() {
    // The index uses the full capacity of its hash table (112 entries), and stays full while cached blocks are evicted
    // for decode rows. The first waiting sequence shares its prefix with the decoding sequence, so its hit grows with
    // every block; it never fits into the pool.
    let mut engine = Loop::new(BlockAllocator::new(112, 4).with_prefix_cache(1), 512);
    engine.add(50, 440, 1);
    engine.step();
    assert!(engine.scheduler.abort(SeqId(50), &mut engine.blocks));
    assert_eq!(engine.blocks.stats().cached_blocks, 110);
    engine.add(0, 8, 440);
    engine.step();
    let shared = engine.scheduler.tokens(SeqId(0))[..8].iter().copied();
    let prompt: Vec<u32> = shared.chain(std::iter::repeat_n(engine.token, 440)).collect();
    let meta = NewSequence::new(prompt, 5).with_salt(vec![1, 2].into());
    engine.scheduler.add(SeqId(1), meta, Tick(9), &engine.blocks).unwrap();
    engine.step();
    assert_eq!(engine.scheduler.waiting(), 1);
    let counted = allocations(|| {
        for _ in 0..400 {
            assert_eq!(engine.step(), 1);
        }
    });
    assert_eq!(engine.scheduler.waiting(), 1);
    let stats = engine.blocks.stats();
    assert!(stats.evicted_blocks > 90, "{stats:?}");
    assert_eq!(counted, 0);
}

#[test]
fn the_step_after_a_fork_allocates_nothing() {
    let mut engine = Loop::new(BlockAllocator::new(100, 4), 64);
    engine.add(0, 6, 20);
    engine.step();
    for child in 1..8 {
        engine.scheduler.fork(SeqId(0), SeqId(child), 5, &mut engine.blocks).unwrap();
    }
    let counted = allocations(|| {
        for _ in 0..15 {
            assert_eq!(engine.step(), 8);
        }
    });
    assert_eq!(counted, 0);
}
