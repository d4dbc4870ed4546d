//! Scheduling a step and committing its results, without a model: the cost that scheduling adds to each step.
//!
//! `elem/s` are sequences in the step.

use ascend_llm::kv_cache::{BlockAllocator, SeqId};
use ascend_llm::scheduler::{NewSequence, Scheduler, SchedulerConfig, SeqResult, StepOutput, Tick};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};

use ascend_llm_benches::{Noise, bench_aging};

const BLOCK_SIZE: u32 = 16;
const SEQS: u32 = 64;
const MAX_MODEL_LEN: u32 = 4096;
const SHORT_PROMPT: u32 = 32;
/// Number of steps until the sequences get near their limit.
const LIFE: u64 = 4000;
/// Length of the prompts that arrive in the mixed case, and number of rows in a step.
const LONG_PROMPT: u32 = 1024;
const STEP_TOKENS: u32 = 512;

struct Loop {
    scheduler: Scheduler,
    blocks: BlockAllocator,
    output: StepOutput,
    noise: Noise,
    now: u64,
    next: u64,
}

impl Loop {
    /// `seqs` sequences whose prompts have been computed.
    fn new(seqs: u32) -> Self {
        let config = SchedulerConfig::new(STEP_TOKENS.max(SEQS * SHORT_PROMPT), SEQS + 1, MAX_MODEL_LEN)
            .with_watermark_blocks(64)
            .with_max_logit_rows(u32::MAX);
        let pool_blocks = (SEQS + 2) * MAX_MODEL_LEN / BLOCK_SIZE;
        let mut new = Self {
            scheduler: Scheduler::new(config).expect("a configuration"),
            blocks: BlockAllocator::new(pool_blocks, BLOCK_SIZE).with_prefix_cache(1),
            output: StepOutput::default(),
            noise: Noise(1),
            now: 0,
            next: 0,
        };
        for _ in 0..seqs {
            new.add(SHORT_PROMPT, MAX_MODEL_LEN - SHORT_PROMPT);
        }
        new.step();
        assert_eq!(new.scheduler.running(), seqs as usize);
        new.scheduler.set_step_budget_tokens(STEP_TOKENS).expect("the budget covers every sequence");
        new
    }

    fn add(&mut self, prompt_tokens: u32, max_tokens: u32) {
        let prompt = self.noise.ids(prompt_tokens as usize, 49_152);
        let meta = NewSequence::new(prompt, max_tokens);
        self.scheduler.add(SeqId(self.next), meta, Tick(self.now), &self.blocks).expect("it fits");
        self.next += 1;
    }

    /// Schedules a step, returns a token for every chunk that needs one, and commits. Long prompts end with their first
    /// token.
    fn step(&mut self) {
        self.now += 1;
        let plan = self.scheduler.schedule(Tick(self.now), &mut self.blocks);
        assert!(plan.preempted.is_empty() && plan.capped.is_empty(), "the pool holds all");
        self.output.results.clear();
        self.output.results.extend(plan.chunks.iter().map(|chunk| {
            SeqResult::new(chunk.seq, chunk.samples.then_some(7), chunk.samples && chunk.seq.0 >= u64::from(SEQS))
        }));
        self.scheduler.commit(&self.output, &mut self.blocks);
    }
}

fn steps(c: &mut Criterion) {
    let mut group = c.benchmark_group("scheduler");
    group.throughput(Throughput::Elements(u64::from(SEQS)));
    group.bench_function("decode/64_sequences", |b| bench_aging(b, LIFE, || Loop::new(SEQS), Loop::step));

    // Along with the 64 sequences there is always a prompt of 1,024 tokens, in chunks of the remaining budget; its
    // arrival is part of the measured time.
    group.throughput(Throughput::Elements(u64::from(SEQS + 1)));
    group.bench_function("mixed/64_sequences_and_prompts", |b| {
        bench_aging(
            b,
            LIFE,
            || Loop::new(SEQS),
            |state| {
                if state.scheduler.running() + state.scheduler.waiting() == SEQS as usize {
                    state.add(LONG_PROMPT, 1);
                }
                state.step();
            },
        );
    });
    group.finish();
}

criterion_group!(name = benches; config = ascend_llm_benches::criterion(); targets = steps);
criterion_main!(benches);
