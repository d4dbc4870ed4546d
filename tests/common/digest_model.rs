//! Fake model and device that only check the bookkeeping: the KV slots contain digests instead of keys and values.
//!
//! The content of a slot is a digest of the salt and all tokens up to and including its own. Before a row writes its
//! slot, it checks that the slots of all earlier positions contain the expected digests. Each sampled token is a
//! function of the whole visible prefix. So a block that is wrongly evicted, shared, overwritten, copied or found in
//! the prefix cache causes a failure at once.
#![allow(dead_code, reason = "each test that includes this uses a part of it")]
#![allow(clippy::cast_possible_truncation, reason = "the numbers of a test are small")]

use std::collections::{BTreeMap, BTreeSet};

use ascend_llm::kv_cache::{BlockAllocator, SeqId};
use ascend_llm::scheduler::{NewSequence, Scheduler, SeqResult, StepOutput, Tick};

pub fn digest(before: u64, token: u32) -> u64 {
    let mixed = (before ^ u64::from(token)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed ^ (mixed >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9) ^ (mixed >> 32)
}

pub fn root(salt: &[u8]) -> u64 {
    salt.iter().fold(0x5eed, |before, &byte| digest(before, u32::from(byte)))
}

/// State of a sequence as the test expects it, computed without the scheduler.
#[derive(Clone, Debug)]
pub struct ExpectedSeq {
    pub prompt: Vec<u32>,
    pub max_tokens: u32,
    pub salt: Box<[u8]>,
    pub output: Vec<u32>,
    /// Number of rows computed since the sequence last started.
    pub computed: u32,
    pub added_at: u64,
    /// Step in which each output token was sampled.
    pub token_steps: Vec<u64>,
    pub admissions: u32,
    pub cached_tokens: u32,
    /// Number of prompt rows whose logits were read; `None` if the request does not ask for prompt logits.
    pub seen_logits: Option<u32>,
}

/// Scheduler, block pool and fake device.
pub struct Rig {
    pub scheduler: Scheduler,
    pub blocks: BlockAllocator,
    pub slots: Vec<u64>,
    pub live: BTreeMap<SeqId, ExpectedSeq>,
    pub done: BTreeMap<SeqId, (ExpectedSeq, End)>,
    pub step: u64,
    pub preempted: Vec<SeqId>,
    /// If set, the fake model always samples this token.
    pub constant_token: Option<u32>,
    budget: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Finished,
    Exhausted,
    Aborted,
}

impl Rig {
    pub fn new(scheduler: Scheduler, blocks: BlockAllocator) -> Self {
        let slots = vec![0; (blocks.capacity() * blocks.block_size()) as usize];
        let budget = scheduler.config().max_num_batched_tokens;
        Self {
            scheduler,
            blocks,
            slots,
            live: BTreeMap::new(),
            done: BTreeMap::new(),
            step: 0,
            preempted: Vec::new(),
            constant_token: None,
            budget,
        }
    }

    pub fn add(&mut self, id: u64, meta: NewSequence) -> Result<(), ascend_llm::scheduler::ScheduleError> {
        let expected_seq = ExpectedSeq {
            prompt: meta.prompt.to_vec(),
            max_tokens: meta.max_tokens,
            salt: meta.salt.clone(),
            output: Vec::new(),
            computed: 0,
            added_at: self.step,
            token_steps: Vec::new(),
            admissions: 0,
            cached_tokens: 0,
            seen_logits: meta.prompt_logits.then_some(0),
        };
        self.scheduler.add(SeqId(id), meta, Tick(self.step * 1_000), &self.blocks)?;
        self.live.insert(SeqId(id), expected_seq);
        Ok(())
    }

    pub fn abort(&mut self, id: u64) -> bool {
        let known = self.scheduler.abort(SeqId(id), &mut self.blocks);
        assert_eq!(known, self.live.contains_key(&SeqId(id)));
        if let Some(expected_seq) = self.live.remove(&SeqId(id)) {
            self.done.insert(SeqId(id), (expected_seq, End::Aborted));
        }
        assert!(self.blocks.table(SeqId(id)).is_empty());
        self.check();
        known
    }

    pub fn check(&self) {
        self.blocks.check().unwrap();
        self.scheduler.check(&self.blocks).unwrap();
    }

    /// Runs one step and checks the invariants of all steps; `between` runs after the plan and before the results.
    pub fn step_with(&mut self, between: impl FnOnce(&mut Self)) -> usize {
        let plan = self.scheduler.schedule(Tick(self.step * 1_000), &mut self.blocks).clone();
        self.check();
        assert!(
            plan.rows() <= self.budget.min(self.scheduler.step_budget_tokens()),
            "the plan exceeds the token budget: {plan:?}"
        );
        for seq in &plan.preempted {
            self.preempted.push(*seq);
            self.live.get_mut(seq).unwrap().computed = 0;
            assert!(self.blocks.table(*seq).is_empty());
        }
        for seq in &plan.capped {
            let expected_seq = self.live.remove(seq).unwrap();
            assert_eq!(self.scheduler.tokens(*seq), [&expected_seq.prompt[..], &expected_seq.output].concat());
            assert!(self.blocks.table(*seq).is_empty());
            self.done.insert(*seq, (expected_seq, End::Exhausted));
        }
        let block_size = self.blocks.block_size() as usize;
        for &(from, to) in &plan.copies {
            let start = from.0 as usize * block_size;
            self.slots.copy_within(start..start + block_size, to.0 as usize * block_size);
        }
        let mut written = BTreeSet::new();
        let mut results = Vec::new();
        let mut logit_rows = 0;
        for chunk in &plan.chunks {
            let expected_seq = self.live.get_mut(&chunk.seq).expect("the plan contains only live sequences");
            let tokens = [&expected_seq.prompt[..], &expected_seq.output].concat();
            assert_eq!(self.scheduler.tokens(chunk.seq), tokens);
            assert_eq!(self.scheduler.sequence(chunk.seq).unwrap().prompt_tokens as usize, expected_seq.prompt.len());
            assert!(chunk.len > 0);
            if expected_seq.computed == 0 {
                expected_seq.admissions += 1;
                expected_seq.cached_tokens = self.scheduler.sequence(chunk.seq).unwrap().cached_tokens;
                assert_eq!(
                    chunk.start % self.blocks.block_size(),
                    0,
                    "the hit is not a multiple of the block size: {chunk:?}"
                );
                assert_eq!(expected_seq.cached_tokens, chunk.start.min(expected_seq.prompt.len() as u32));
            } else {
                assert_eq!(
                    chunk.start, expected_seq.computed,
                    "the chunk does not start at the next row to compute: {chunk:?}"
                );
            }
            let end = (chunk.start + chunk.len) as usize;
            assert!(end <= tokens.len());
            assert_eq!(chunk.samples, end == tokens.len());
            let table = self.blocks.table(chunk.seq);
            let slot = |position: usize| table[position / block_size].0 as usize * block_size + position % block_size;
            let mut expected = root(&expected_seq.salt);
            for (position, &token) in tokens[..end].iter().enumerate() {
                expected = digest(expected, token);
                if position < chunk.start as usize {
                    assert_eq!(
                        self.slots[slot(position)],
                        expected,
                        "{:?} reads a wrong row at position {position}",
                        chunk.seq
                    );
                } else {
                    self.slots[slot(position)] = expected;
                    assert!(written.insert(slot(position)), "two rows write slot {}", slot(position));
                }
            }
            expected_seq.computed = end as u32;
            logit_rows += u32::from(chunk.samples);
            if let Some(seen) = &mut expected_seq.seen_logits {
                let last = (end as u32).min(expected_seq.prompt.len() as u32 - 1);
                assert!(*seen >= chunk.start.min(last), "the logits of prompt rows are missing: {chunk:?}");
                logit_rows += last.saturating_sub(*seen);
                *seen = last.max(*seen);
            }
            let token = chunk.samples.then(|| self.constant_token.unwrap_or(expected as u32 % 5));
            let finished = token.is_some() && expected_seq.output.len() + 1 == expected_seq.max_tokens as usize;
            results.push((SeqResult::new(chunk.seq, token, finished), chunk.seq));
        }
        assert!(
            logit_rows <= self.scheduler.config().max_logit_rows,
            "{logit_rows} logit rows exceed max_logit_rows: {plan:?}"
        );
        // No sequence may have a block that another sequence writes in the same step.
        for chunk in &plan.chunks {
            for other in plan.chunks.iter().filter(|other| other.seq != chunk.seq) {
                let range =
                    other.start as usize / block_size..(other.start + other.len).div_ceil(block_size as u32) as usize;
                for block in &self.blocks.table(other.seq)[range] {
                    assert!(
                        !self.blocks.table(chunk.seq).contains(block),
                        "{block:?} is shared although a sequence writes it"
                    );
                }
            }
        }
        between(self);
        let results: Vec<_> = results.into_iter().map(|(result, _)| result).collect();
        for result in &results {
            let Some(expected_seq) = self.live.get_mut(&result.seq) else { continue };
            if let Some(token) = result.token {
                expected_seq.output.push(token);
                expected_seq.token_steps.push(self.step);
            }
            if result.finished {
                let expected_seq = self.live.remove(&result.seq).unwrap();
                self.done.insert(result.seq, (expected_seq, End::Finished));
            }
        }
        let rows = plan.chunks.len();
        self.scheduler.commit(&StepOutput::from(results), &mut self.blocks);
        self.check();
        self.step += 1;
        rows
    }

    pub fn step(&mut self) -> usize {
        self.step_with(|_| ())
    }

    /// Runs steps until no work is left, and checks that each step makes progress.
    pub fn drain(&mut self) {
        while !self.scheduler.is_idle() {
            let ended = self.done.len();
            assert!(self.step() > 0 || self.done.len() > ended, "the step made no progress although work is left");
        }
        self.assert_empty();
    }

    pub fn assert_empty(&self) {
        assert!(self.live.is_empty());
        let stats = self.blocks.stats();
        assert_eq!(stats.live_blocks, 0);
        assert_eq!(stats.free_blocks + stats.cached_blocks, stats.capacity_blocks);
    }

    pub fn finished(&self, id: u64) -> &ExpectedSeq {
        let (expected_seq, end) = &self.done[&SeqId(id)];
        assert_eq!(*end, End::Finished);
        expected_seq
    }
}

/// Returns the fake model's output for a prompt, computed without any cache.
pub fn oracle_output(prompt: &[u32], salt: &[u8], tokens: u32) -> Vec<u32> {
    let mut state = prompt.iter().fold(root(salt), |before, &token| digest(before, token));
    (0..tokens)
        .map(|_| {
            let token = state as u32 % 5;
            state = digest(state, token);
            token
        })
        .collect()
}
