//! Promise: a step without admission, finish or preemption allocates nothing in scheduler and block allocator.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use ascend_llm::kv_cache::{BlockAllocator, SeqId};
use ascend_llm::scheduler::{SchedulePolicy, Scheduler, SchedulerConfig, SeqMeta, SeqResult, StepOutput, Tick};

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

/// Counts the calls of this thread, so that the test runner's own threads do not show.
struct Counting;

// SAFETY: every call goes to the system allocator unchanged; the counter does not allocate.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, old: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        count();
        // SAFETY: the caller's promises are passed on.
        unsafe { System.realloc(old, layout, new_size) }
    }

    unsafe fn dealloc(&self, old: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(old, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

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
    step: u64,
}

impl Loop {
    fn new(blocks: BlockAllocator, budget: u32) -> Self {
        let config = SchedulerConfig {
            max_num_batched_tokens: budget,
            max_num_seqs: 8,
            max_model_len: 4_096,
            watermark_blocks: 1,
            policy: SchedulePolicy::Priority,
        };
        let output = StepOutput { results: Vec::with_capacity(16) };
        Self { scheduler: Scheduler::new(config).unwrap(), blocks, output, step: 0 }
    }

    fn add(&mut self, id: u64, prompt: u32, max_tokens: u32) {
        let prompt = (0..prompt).map(|i| id as u32 * 1_000 + i).collect();
        let meta = SeqMeta { prompt, max_tokens, salt: vec![1, 2].into(), ..SeqMeta::default() };
        self.scheduler.add(SeqId(id), meta, Tick(self.step), &self.blocks).unwrap();
    }

    fn step(&mut self) -> u32 {
        self.step += 1;
        let plan = self.scheduler.schedule(Tick(self.step), &mut self.blocks);
        assert!(plan.preempted.is_empty() && plan.exhausted.is_empty());
        self.output.results.clear();
        for chunk in &plan.chunks {
            let token = chunk.samples.then_some((self.step % 97) as u32);
            self.output.results.push(SeqResult { seq: chunk.seq, token, finished: false });
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
        assert_eq!(counted, 0, "prefix cache {prefix_cache}");
        engine.scheduler.check(&engine.blocks).unwrap();
        engine.blocks.check().unwrap();
    }
}

#[test]
fn chunks_of_a_long_prompt_beside_decodes_allocate_nothing() {
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
fn a_blocked_queue_and_evictions_allocate_nothing() {
    // 40 blocks of cached leftovers are eaten while a request too large for now waits at the head.
    let mut engine = Loop::new(BlockAllocator::new(100, 4).with_prefix_cache(1), 512);
    engine.add(50, 160, 1);
    engine.step();
    assert!(engine.scheduler.abort(SeqId(50), &mut engine.blocks));
    assert_eq!(engine.blocks.stats().cached_blocks, 40);
    engine.add(0, 8, 300);
    engine.add(1, 396, 5);
    engine.step();
    assert_eq!(engine.scheduler.waiting(), 1);
    let counted = allocations(|| {
        for _ in 0..280 {
            assert_eq!(engine.step(), 1);
        }
    });
    assert_eq!(engine.scheduler.waiting(), 1);
    assert!(engine.blocks.stats().evicted_blocks > 5);
    assert_eq!(counted, 0);
}
