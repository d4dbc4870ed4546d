//! A model that is only bookkeeping: it runs plans over a pool whose slots hold digests instead of keys and values.
//!
//! Slot content = digest of (salt, every token up to and with that one). Each row checks, before it writes, that the slots
//! of all earlier positions hold what they must; each sampled token is a function of the whole visible prefix. So a block
//! that was evicted, shared, overwritten, copied or hit wrongly shows at once.
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

/// A sequence as the test knows it, from outside of the scheduler.
#[derive(Clone, Debug)]
pub struct Twin {
    pub prompt: Vec<u32>,
    pub max_tokens: u32,
    pub salt: Box<[u8]>,
    pub output: Vec<u32>,
    /// Rows computed since the last (re)start.
    pub computed: u32,
    pub added_at: u64,
    /// Step of each output token.
    pub token_steps: Vec<u64>,
    pub admissions: u32,
    pub cached_tokens: u32,
    /// Prompt rows whose logits have been looked at; `None` if nobody wants them.
    pub seen_logits: Option<u32>,
}

/// Scheduler, pool and fake device together.
pub struct Rig {
    pub scheduler: Scheduler,
    pub blocks: BlockAllocator,
    pub slots: Vec<u64>,
    pub live: BTreeMap<SeqId, Twin>,
    pub done: BTreeMap<SeqId, (Twin, End)>,
    pub step: u64,
    pub preempted: Vec<SeqId>,
    /// Tokens are this constant instead of a digest.
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
        let twin = Twin {
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
        self.live.insert(SeqId(id), twin);
        Ok(())
    }

    pub fn abort(&mut self, id: u64) -> bool {
        let known = self.scheduler.abort(SeqId(id), &mut self.blocks);
        assert_eq!(known, self.live.contains_key(&SeqId(id)));
        if let Some(twin) = self.live.remove(&SeqId(id)) {
            self.done.insert(SeqId(id), (twin, End::Aborted));
        }
        assert!(self.blocks.table(SeqId(id)).is_empty());
        self.check();
        known
    }

    pub fn check(&self) {
        self.blocks.check().unwrap();
        self.scheduler.check(&self.blocks).unwrap();
    }

    /// One step with every property that holds in any step; `between` runs after the plan, before the results.
    pub fn step_with(&mut self, between: impl FnOnce(&mut Self)) -> usize {
        let plan = self.scheduler.schedule(Tick(self.step * 1_000), &mut self.blocks).clone();
        self.check();
        assert!(plan.rows() <= self.budget.min(self.scheduler.step_budget_tokens()), "over budget: {plan:?}");
        for seq in &plan.preempted {
            self.preempted.push(*seq);
            self.live.get_mut(seq).unwrap().computed = 0;
            assert!(self.blocks.table(*seq).is_empty());
        }
        for seq in &plan.capped {
            let twin = self.live.remove(seq).unwrap();
            assert_eq!(self.scheduler.tokens(*seq), [&twin.prompt[..], &twin.output].concat());
            assert!(self.blocks.table(*seq).is_empty());
            self.done.insert(*seq, (twin, End::Exhausted));
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
            let twin = self.live.get_mut(&chunk.seq).expect("only live sequences are planned");
            let tokens = [&twin.prompt[..], &twin.output].concat();
            assert_eq!(self.scheduler.tokens(chunk.seq), tokens);
            assert_eq!(self.scheduler.sequence(chunk.seq).unwrap().prompt_tokens as usize, twin.prompt.len());
            assert!(chunk.len > 0);
            if twin.computed == 0 {
                twin.admissions += 1;
                twin.cached_tokens = self.scheduler.sequence(chunk.seq).unwrap().cached_tokens;
                assert_eq!(chunk.start % self.blocks.block_size(), 0, "hits are whole blocks: {chunk:?}");
                assert_eq!(twin.cached_tokens, chunk.start.min(twin.prompt.len() as u32));
            } else {
                assert_eq!(chunk.start, twin.computed, "a gap or a repetition: {chunk:?}");
            }
            let end = (chunk.start + chunk.len) as usize;
            assert!(end <= tokens.len());
            assert_eq!(chunk.samples, end == tokens.len());
            let table = self.blocks.table(chunk.seq);
            let slot = |position: usize| table[position / block_size].0 as usize * block_size + position % block_size;
            let mut expected = root(&twin.salt);
            for (position, &token) in tokens[..end].iter().enumerate() {
                expected = digest(expected, token);
                if position < chunk.start as usize {
                    assert_eq!(self.slots[slot(position)], expected, "{:?} reads a wrong row {position}", chunk.seq);
                } else {
                    self.slots[slot(position)] = expected;
                    assert!(written.insert(slot(position)), "two rows write slot {}", slot(position));
                }
            }
            twin.computed = end as u32;
            logit_rows += u32::from(chunk.samples);
            if let Some(seen) = &mut twin.seen_logits {
                let last = (end as u32).min(twin.prompt.len() as u32 - 1);
                assert!(*seen >= chunk.start.min(last), "rows of the prompt are missed: {chunk:?}");
                logit_rows += last.saturating_sub(*seen);
                *seen = last.max(*seen);
            }
            let token = chunk.samples.then(|| self.constant_token.unwrap_or(expected as u32 % 5));
            let finished = token.is_some() && twin.output.len() + 1 == twin.max_tokens as usize;
            results.push((SeqResult::new(chunk.seq, token, finished), chunk.seq));
        }
        assert!(logit_rows <= self.scheduler.config().max_logit_rows, "{logit_rows} rows of logits: {plan:?}");
        // Nobody may read a slot that somebody else writes in the same step.
        for chunk in &plan.chunks {
            for other in plan.chunks.iter().filter(|other| other.seq != chunk.seq) {
                let range =
                    other.start as usize / block_size..(other.start + other.len).div_ceil(block_size as u32) as usize;
                for block in &self.blocks.table(other.seq)[range] {
                    assert!(!self.blocks.table(chunk.seq).contains(block), "{block:?} is shared and written");
                }
            }
        }
        between(self);
        let results: Vec<_> = results.into_iter().map(|(result, _)| result).collect();
        for result in &results {
            let Some(twin) = self.live.get_mut(&result.seq) else { continue };
            if let Some(token) = result.token {
                twin.output.push(token);
                twin.token_steps.push(self.step);
            }
            if result.finished {
                let twin = self.live.remove(&result.seq).unwrap();
                self.done.insert(result.seq, (twin, End::Finished));
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

    /// Steps until nothing is left; every step does something.
    pub fn drain(&mut self) {
        while !self.scheduler.is_idle() {
            let ended = self.done.len();
            assert!(self.step() > 0 || self.done.len() > ended, "an empty step with work left");
        }
        self.assert_empty();
    }

    pub fn assert_empty(&self) {
        assert!(self.live.is_empty());
        let stats = self.blocks.stats();
        assert_eq!(stats.live_blocks, 0);
        assert_eq!(stats.free_blocks + stats.cached_blocks, stats.capacity_blocks);
    }

    pub fn finished(&self, id: u64) -> &Twin {
        let (twin, end) = &self.done[&SeqId(id)];
        assert_eq!(*end, End::Finished);
        twin
    }
}

/// What the fake model answers to a prompt, computed without any cache.
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
