//! Decides what each step computes: which sequences, which rows of them, and who has to give blocks back.
//!
//! Continuous batching under a token budget. In each step running sequences come first: those with one row to go
//! (decode), then those still in their prompt (chunks); what is left of the budget admits waiting sequences in order. A
//! sequence is admitted only if all its known tokens fit beside a watermark of blocks (or if it is alone), so its prefill
//! never runs out of room. When a decode cannot grow, the last sequence of the order is preempted: its blocks go back,
//! its tokens stay, and it is computed again later.
//!
//! Pure: no clock, no I/O, no device; equal calls give equal plans. A step without admission, finish or preemption
//! allocates nothing.
//!
//! # Plans in `in_flight_plan`
//!
//! Several plans may be made before the first of them is committed; they are committed in the order they were made. A
//! sequence's rows go on behind those in `in_flight_plan`. A row in `in_flight_plan` that samples makes a token that nobody knows yet, a
//! *placeholder*; sequences that [run ahead](NewSequence::allow_async_schedule) have the row behind it planned all the same, and whoever
//! runs the rows puts the token there. The others sit out until it is committed.
//!
//! ```text
//!   tokens   [ p p p p p a b ]         known: prompt and output
//!   computed [ p p p p p a   ]         committed: these may be published to the prefix cache
//!   in in_flight_plan             [ b | ? ]    plan 7 computes b and draws x; plan 8 computes x, wherever it comes from, and draws y
//!   pending                  [ x y ]   placeholders; one each for the rows in in_flight_plan that sample
//! ```
//!
//! What is committed of plan 7 may end the sequence, or show that what stands behind it was computed from something bad;
//! then its rows in later plans are *void*: they count as never planned, their results are ignored, and
//! [`Scheduler::wasted_rows`] counts them. A sequence with rows in `in_flight_plan` is never preempted and never exhausted: it sits
//! out, and with it those behind it that keep its room, until one that can give way is out of `in_flight_plan`.
//!
//! Blocks of a void row go back at once. That is sound if launches run in the order of their plans: whoever is given such a
//! block writes each of its slots behind the void row before anybody reads it, and a void row's block is in no index, since
//! only committed rows are published and a block is written by one sequence.
//!
//! Invariants ([`Scheduler::check`]): a sequence either waits (and holds no blocks), runs (and has room for all it has
//! computed and in `in_flight_plan`) or has just been reported exhausted; computed tokens are fewer than known ones; rows in `in_flight_plan`
//! end before the last placeholder; the order is strict.

#![forbid(unsafe_code)]

mod in_flight;
mod plan;
mod preempt;
mod queue;
mod schedule;
mod sequence;

use std::sync::Arc;

use crate::num::to_u32;
use crate::settings::with_methods;
pub use plan::{Chunk, Placeholder, SeqResult, StepOutput, StepPlan};
pub use queue::{PRIORITY_STEP_US, SchedulePolicy, Tick};

use crate::kv_cache::{BlockAllocator, IdMap, PrefixHit, SeqId};
use in_flight::InFlightPlans;
use queue::{QueueKey, WaitQueue};
use sequence::{SeqState, SeqStatus, max_tokens_held};

/// Limits of a scheduler.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SchedulerConfig {
    /// Rows a step may hold, over all sequences. At least `max_num_seqs`, so that every running sequence can decode in
    /// every step.
    pub max_num_batched_tokens: u32,
    /// Sequences that run at once.
    pub max_num_seqs: u32,
    /// Tokens a sequence may reach, prompt and output.
    pub max_model_len: u32,
    /// Blocks that an admission leaves available for the growth of those who run already.
    pub watermark_blocks: u32,
    /// Rows a step may hold whose logits are wanted: those that sample, and those of prompts that ask for them.
    pub max_logit_rows: u32,
    /// Order of sequences.
    pub policy: SchedulePolicy,
}

impl SchedulerConfig {
    /// First come, first served, without a watermark; as many logit rows as sequences run at once.
    pub const fn new(max_num_batched_tokens: u32, max_num_seqs: u32, max_model_len: u32) -> Self {
        Self {
            max_num_batched_tokens,
            max_num_seqs,
            max_model_len,
            watermark_blocks: 0,
            max_logit_rows: max_num_seqs,
            policy: SchedulePolicy::Fcfs,
        }
    }

    with_methods! {
        value {
            max_num_batched_tokens with_max_num_batched_tokens: u32,
            max_num_seqs with_max_num_seqs: u32,
            max_model_len with_max_model_len: u32,
            watermark_blocks with_watermark_blocks: u32,
            max_logit_rows with_max_logit_rows: u32,
            policy with_policy: SchedulePolicy,
        }
    }
}

/// A sequence to schedule.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct NewSequence {
    /// Token ids of the prompt.
    pub prompt: Arc<[u32]>,
    /// Tokens it may generate.
    pub max_tokens: u32,
    /// Higher goes first under [`SchedulePolicy::Priority`].
    pub priority: i32,
    /// Separates what may share cached prefixes (tenant, adapter).
    pub salt: Box<[u8]>,
    /// False computes the whole prompt (its log-probabilities are wanted); its blocks are published all the same.
    pub read_prefix_cache: bool,
    /// Whether logits of the prompt's rows are wanted, each once: chunks are cut so that a step has no more of them than
    /// [`SchedulerConfig::max_logit_rows`].
    pub prompt_logits: bool,
    /// Whether the row behind a token that is not known yet may be planned.
    pub allow_async_schedule: bool,
}

impl NewSequence {
    /// A sequence of priority 0, without salt, that reads the prefix cache, needs no logits of its prompt and is not
    /// scheduled ahead.
    pub fn new(prompt: impl Into<Arc<[u32]>>, max_tokens: u32) -> Self {
        Self {
            prompt: prompt.into(),
            max_tokens,
            priority: 0,
            salt: Box::default(),
            read_prefix_cache: true,
            prompt_logits: false,
            allow_async_schedule: false,
        }
    }

    with_methods! {
        value {
            priority with_priority: i32,
            salt with_salt: Box<[u8]>,
            read_prefix_cache with_read_prefix_cache: bool,
            prompt_logits with_prompt_logits: bool,
            allow_async_schedule with_allow_async_schedule: bool,
        }
    }
}

/// Why a call was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ScheduleError {
    /// A limit of 0.
    #[error("{field} is 0, expected at least 1")]
    Zero {
        /// Name of the limit.
        field: &'static str,
    },
    /// Running sequences could not all decode in one step.
    #[error(
        "max_num_batched_tokens is {max_num_batched_tokens}, expected at least max_num_seqs ({max_num_seqs}): each \
         running sequence needs a row a step"
    )]
    BudgetBelowSeqs {
        /// The step's token budget.
        max_num_batched_tokens: u32,
        /// Sequences that run at once.
        max_num_seqs: u32,
    },
    /// A prompt without tokens.
    #[error("the prompt of {0:?} is empty, expected at least 1 token")]
    EmptyPrompt(SeqId),
    /// The id is in use.
    #[error("{0:?} is scheduled already")]
    SeqExists(SeqId),
    /// The id is not in use, or not in the state that the call needs.
    #[error("{0:?} is not running")]
    NotRunning(SeqId),
    /// The prompt leaves no room for a token under `max_model_len`.
    #[error("the prompt has {prompt_tokens} tokens, expected fewer than max_model_len ({max_model_len})")]
    PromptTooLong {
        /// Tokens of the prompt.
        prompt_tokens: usize,
        /// The limit.
        max_model_len: u32,
    },
    /// The prompt does not fit into the pool even when it is alone.
    #[error(
        "the prompt has {prompt_tokens} tokens and needs {needed_blocks} blocks of {block_size}, the whole pool has \
         {pool_blocks}"
    )]
    NeverFits {
        /// Tokens of the prompt.
        prompt_tokens: u32,
        /// Blocks they fill.
        needed_blocks: u32,
        /// Blocks there are.
        pool_blocks: u32,
        /// Tokens a block.
        block_size: u32,
    },
    /// A step budget outside the configured limit.
    #[error("the step budget is {tokens} tokens, expected 1..={max_num_batched_tokens}")]
    StepBudget {
        /// The budget asked for.
        tokens: u32,
        /// The configured limit.
        max_num_batched_tokens: u32,
    },
}

/// What the scheduler knows of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SequenceView<'a> {
    /// Prompt and output so far.
    pub tokens: &'a [u32],
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Prompt tokens that the prefix cache served when the sequence was last admitted.
    pub cached_tokens: u32,
    /// Position from which on the sequence runs in the f32 fallback plan.
    pub f32_from: Option<u32>,
}

#[derive(Clone, Copy, Debug)]
struct RunningSeq {
    key: QueueKey,
    seq: SeqId,
}

/// The continuous-batching scheduler.
///
/// A plan is made, run, and its results are committed; the next plan may be made before that, or after.
#[derive(Clone, Debug)]
pub struct Scheduler {
    config: SchedulerConfig,
    step_budget_tokens: u32,
    sequences: IdMap<SeqId, SeqState>,
    waiting: WaitQueue,
    /// By key.
    running: Vec<RunningSeq>,
    plan: StepPlan,
    /// What has been planned and not committed.
    in_flight: InFlightPlans,
    /// Where admissions look prefixes up.
    hit: PrefixHit,
    clock: Tick,
    arrivals: u64,
    preemptions: u64,
    wasted_rows: u64,
}

impl Scheduler {
    /// A scheduler without sequences.
    pub fn new(config: SchedulerConfig) -> Result<Self, ScheduleError> {
        let limits = [
            ("max_num_batched_tokens", config.max_num_batched_tokens),
            ("max_num_seqs", config.max_num_seqs),
            ("max_model_len", config.max_model_len),
            ("max_logit_rows", config.max_logit_rows),
        ];
        if let Some(&(field, _)) = limits.iter().find(|(_, limit)| *limit == 0) {
            return Err(ScheduleError::Zero { field });
        }
        let SchedulerConfig { max_num_batched_tokens, max_num_seqs, .. } = config;
        if max_num_batched_tokens < max_num_seqs {
            return Err(ScheduleError::BudgetBelowSeqs { max_num_batched_tokens, max_num_seqs });
        }
        Ok(Self {
            step_budget_tokens: max_num_batched_tokens,
            config,
            sequences: IdMap::default(),
            waiting: WaitQueue::default(),
            running: Vec::new(),
            plan: StepPlan::default(),
            in_flight: InFlightPlans::default(),
            hit: PrefixHit::default(),
            clock: Tick(0),
            arrivals: 0,
            preemptions: 0,
            wasted_rows: 0,
        })
    }

    /// Takes a sequence into the queue, or says why it can never run.
    ///
    /// A prompt that fills the pool to the last slot is taken: its first token is sampled from rows that fit, and that
    /// token needs no slot unless another follows it.
    pub fn add(
        &mut self,
        seq: SeqId,
        meta: NewSequence,
        now: Tick,
        blocks: &BlockAllocator,
    ) -> Result<(), ScheduleError> {
        self.require_unused(seq)?;
        let NewSequence { prompt, max_tokens, priority, salt, read_prefix_cache, prompt_logits, allow_async_schedule } =
            meta;
        let max_model_len = self.config.max_model_len;
        let prompt_len = match u32::try_from(prompt.len()) {
            Ok(0) => return Err(ScheduleError::EmptyPrompt(seq)),
            Ok(len) if len < max_model_len => len,
            _ => return Err(ScheduleError::PromptTooLong { prompt_tokens: prompt.len(), max_model_len }),
        };
        let needed_blocks = blocks.blocks_for(prompt_len);
        if needed_blocks > blocks.capacity() {
            return Err(ScheduleError::NeverFits {
                prompt_tokens: prompt_len,
                needed_blocks,
                pool_blocks: blocks.capacity(),
                block_size: blocks.block_size(),
            });
        }
        self.clock = self.clock.max(now);
        let key = QueueKey::new(self.config.policy, priority, self.clock, self.arrivals);
        let sequence = SeqState {
            tokens: prompt.to_vec(),
            prompt_len,
            limit_tokens: prompt_len.saturating_add(max_tokens).min(max_model_len),
            key,
            salt,
            read_prefix_cache,
            allow_async_schedule,
            logits_from: prompt_logits.then_some(0),
            status: SeqStatus::Waiting,
            computed: 0,
            in_flight: 0,
            pending: 0,
            newest_placeholder: Placeholder::default(),
            first_valid_plan: self.in_flight.next_plan(),
            recompute: false,
            cached_tokens: 0,
            f32_from: None,
        };
        self.enqueue(seq, sequence, blocks);
        Ok(())
    }

    /// Adds `child`, which shares all that running `parent` has computed and goes on with `token` in place of the parent's
    /// last one (the other choices of a request, or a beam). Call it between the `commit` that brought that token and the
    /// next `schedule`; a parent with rows in `in_flight_plan` is refused.
    ///
    /// Without a free `running_seq` the child waits, and computes the shared part again when its turn comes.
    pub fn fork(
        &mut self,
        parent: SeqId,
        child: SeqId,
        token: u32,
        blocks: &mut BlockAllocator,
    ) -> Result<(), ScheduleError> {
        self.require_unused(child)?;
        let ready = |sequence: &&SeqState| {
            sequence.status == SeqStatus::Running && sequence.in_flight == 0 && sequence.rows_left() == 1
        };
        let mut sequence = self.sequences.get(&parent).filter(ready).ok_or(ScheduleError::NotRunning(parent))?.clone();
        sequence.key = sequence.key.sibling(self.arrivals);
        sequence.first_valid_plan = self.in_flight.next_plan();
        if let Some(last) = sequence.tokens.last_mut() {
            *last = token;
        }
        let seated = self.running.len() < self.config.max_num_seqs as usize && blocks.fork(parent, child).is_ok();
        if seated {
            let tokens = max_tokens_held(&sequence, blocks);
            sequence.tokens.reserve_exact((tokens as usize).saturating_sub(sequence.tokens.len()));
            // The child holds blocks since the line above, so its table is there.
            let reserved = blocks.reserve_table(child, tokens);
            debug_assert!(reserved.is_ok());
            self.start_running(child, sequence.key);
            self.arrivals += 1;
            self.sequences.insert(child, sequence);
        } else {
            sequence.status = SeqStatus::Waiting;
            (sequence.computed, sequence.f32_from) = (0, None);
            sequence.cached_tokens = 0;
            self.enqueue(child, sequence, blocks);
        }
        Ok(())
    }

    /// Forgets a sequence at once, wherever it is, and gives its blocks back. False if it is not known (any more): aborting
    /// twice, or after the end, does nothing.
    ///
    /// Rows of the sequence in `in_flight_plan` are void: their results are ignored by `commit`. The blocks can be given out again
    /// from the next `schedule` on.
    pub fn abort(&mut self, seq: SeqId, blocks: &mut BlockAllocator) -> bool {
        let Some(sequence) = self.sequences.remove(&seq) else { return false };
        self.wasted_rows += u64::from(sequence.in_flight);
        match sequence.status {
            SeqStatus::Waiting => self.waiting.remove(sequence.key),
            SeqStatus::Running => self.stop_running(seq, sequence.key, blocks),
            SeqStatus::Capped => {}
        }
        true
    }

    /// Prompt and output so far; empty for a sequence that is not known.
    pub fn tokens(&self, seq: SeqId) -> &[u32] {
        self.sequences.get(&seq).map_or(&[], |sequence| &sequence.tokens)
    }

    /// A sequence in here.
    pub fn sequence(&self, seq: SeqId) -> Option<SequenceView<'_>> {
        let SeqState { tokens, prompt_len, cached_tokens, f32_from, .. } = self.sequences.get(&seq)?;
        Some(SequenceView { tokens, prompt_tokens: *prompt_len, cached_tokens: *cached_tokens, f32_from: *f32_from })
    }

    /// Chunks of a plan that has not been committed; empty for any other number.
    pub fn in_flight_chunks(&self, plan: u64) -> &[Chunk] {
        self.in_flight.chunks(plan)
    }

    /// Says that the rows of a sequence from `position` on are computed in another arithmetic than usual, as it turned out
    /// when the oldest plan in `in_flight_plan` was run. Their keys and values go to no other sequence; once the sequence has lost its
    /// blocks it begins as usual again. Its rows in later plans become void with the next `commit`.
    pub fn set_f32_from(&mut self, seq: SeqId, position: u32) {
        if let Some(sequence) = self.sequences.get_mut(&seq) {
            sequence.f32_from = Some(sequence.f32_from.map_or(position, |known| known.min(position)));
            sequence.recompute = sequence.in_flight > 0;
        }
    }

    /// Sequences that hold blocks.
    pub fn running(&self) -> usize {
        self.running.len()
    }

    /// Sequences in the queue, preempted ones included.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Whether nothing runs and nothing waits.
    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.len() == 0
    }

    /// Preemptions since the start.
    pub fn preemptions(&self) -> u64 {
        self.preemptions
    }

    /// Rows planned and then void since the start: of sequences that had ended by the time, or that had to be computed again.
    pub fn wasted_rows(&self) -> u64 {
        self.wasted_rows
    }

    /// The limits it was made with.
    pub fn config(&self) -> &SchedulerConfig {
        &self.config
    }

    /// Rows the next steps may hold.
    pub fn step_budget_tokens(&self) -> u32 {
        self.step_budget_tokens
    }

    /// Lowers (or raises again) the rows a step may hold, within the configured limit. Below the number of running
    /// sequences the first of the order decode and the others sit out.
    pub fn set_step_budget_tokens(&mut self, tokens: u32) -> Result<(), ScheduleError> {
        let max_num_batched_tokens = self.config.max_num_batched_tokens;
        if !(1..=max_num_batched_tokens).contains(&tokens) {
            return Err(ScheduleError::StepBudget { tokens, max_num_batched_tokens });
        }
        self.step_budget_tokens = tokens;
        Ok(())
    }

    /// Every invariant named at the head of this module; the error says which one broke.
    pub fn check(&self, blocks: &BlockAllocator) -> Result<(), String> {
        if !self.running.windows(2).all(|pair| pair[0].key < pair[1].key) {
            return Err(format!("the running sequences are out of order: {:?}", self.running));
        }
        if self.running.len() > self.config.max_num_seqs as usize {
            return Err(format!("{} run, max_num_seqs is {}", self.running.len(), self.config.max_num_seqs));
        }
        let (mut waiting, mut running) = (0, 0);
        for (seq, sequence) in &self.sequences {
            let table = to_u32(blocks.table(*seq).len());
            let space = table * blocks.block_size();
            match sequence.status {
                SeqStatus::Waiting => {
                    waiting += 1;
                    if self.waiting.get(sequence.key) != Some(*seq) {
                        return Err(format!("{seq:?} waits outside of the queue"));
                    }
                }
                SeqStatus::Running => {
                    running += 1;
                    if !self
                        .running
                        .iter()
                        .any(|running_seq| running_seq.seq == *seq && running_seq.key == sequence.key)
                    {
                        return Err(format!("{seq:?} runs without a running_seq"));
                    }
                    if sequence.next_row() > space || sequence.computed >= sequence.len() {
                        return Err(format!("{seq:?} has room for {space} tokens: {sequence:?}"));
                    }
                    if sequence.next_row() >= sequence.len() + sequence.pending.max(1) {
                        return Err(format!("{seq:?} has rows of tokens that nobody draws: {sequence:?}"));
                    }
                }
                SeqStatus::Capped => {}
            }
            if sequence.status != SeqStatus::Running && (table > 0 || sequence.next_row() > 0) {
                return Err(format!("{seq:?} does not run and holds {table} blocks: {sequence:?}"));
            }
            let planned = self.in_flight.rows_of(*seq, sequence.first_valid_plan);
            if planned != (sequence.in_flight, sequence.pending) {
                return Err(format!("{seq:?} has {planned:?} rows in plans that count: {sequence:?}"));
            }
        }
        if (waiting, running) != (self.waiting.len(), self.running.len()) {
            return Err(format!("{waiting} wait and {running} run, lists say {:?}", (self.waiting(), self.running())));
        }
        let rows: u64 = self.plan.chunks.iter().map(|chunk| u64::from(chunk.len)).sum();
        if rows > u64::from(self.config.max_num_batched_tokens) {
            return Err(format!("the plan has {rows} rows, the budget is {}", self.config.max_num_batched_tokens));
        }
        Ok(())
    }

    fn require_unused(&mut self, seq: SeqId) -> Result<(), ScheduleError> {
        match self.sequences.get(&seq).map(|sequence| sequence.status) {
            None => Ok(()),
            Some(SeqStatus::Capped) => {
                self.sequences.remove(&seq);
                Ok(())
            }
            Some(SeqStatus::Waiting | SeqStatus::Running) => Err(ScheduleError::SeqExists(seq)),
        }
    }

    fn enqueue(&mut self, seq: SeqId, sequence: SeqState, blocks: &BlockAllocator) {
        // A blocked head is looked up in every step: its hit must not allocate.
        let tokens = max_tokens_held(&sequence, blocks);
        self.hit.reserve(blocks.blocks_for(tokens) as usize, sequence.salt.len());
        self.arrivals += 1;
        self.waiting.push(sequence.key, seq);
        self.sequences.insert(seq, sequence);
    }

    fn start_running(&mut self, seq: SeqId, key: QueueKey) {
        let at = self.running.partition_point(|running_seq| running_seq.key < key);
        self.running.insert(at, RunningSeq { key, seq });
        // A step plans a running sequence once and copies at most its last block.
        let StepPlan { chunks, copies, .. } = &mut self.plan;
        chunks.reserve(self.running.len().saturating_sub(chunks.len()));
        copies.reserve(self.running.len().saturating_sub(copies.len()));
        self.in_flight.reserve(self.running.len());
    }

    /// Takes a sequence off its `running_seq` and its blocks back.
    fn stop_running(&mut self, seq: SeqId, key: QueueKey, blocks: &mut BlockAllocator) {
        if let Ok(at) = self.running.binary_search_by_key(&key, |running_seq| running_seq.key) {
            self.running.remove(at);
        }
        let released = blocks.release(seq);
        debug_assert!(released.is_ok(), "{seq:?} ran without blocks");
    }
}
