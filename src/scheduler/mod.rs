//! Continuous-batching scheduler: selects the sequences and rows that each step computes.
//!
//! A row is one token position of one sequence. Each step has a token budget, a maximum number of rows over all
//! sequences ([`SchedulerConfig::max_num_batched_tokens`]). The scheduler spends the budget in this order:
//!
//! 1. Running sequences with one row left to compute (decode).
//! 2. Running sequences with several rows left to compute (chunked prefill).
//! 3. Waiting sequences, which the scheduler admits in queue order.
//!
//! The scheduler admits a sequence only if the pool has blocks for all known tokens of the sequence and keeps a
//! watermark of available blocks, so a prefill never runs out of blocks. The watermark does not apply while no sequence
//! is running. If a running sequence cannot get a block for its next row, the scheduler preempts the last sequence of
//! the order by recompute: it frees the blocks of that sequence, keeps the tokens, and computes the keys and values
//! again later.
//!
//! The scheduler reads no clock, performs no I/O and uses no device, so equal calls produce equal plans. A step that
//! admits, finishes and preempts no sequence does not allocate memory.
//!
//! # In-flight plans
//!
//! Async scheduling: the caller may make several plans before it commits the first of them. The caller commits plans in
//! the order in which the scheduler made them. The next rows of a sequence follow its rows in in-flight plans.
//!
//! An in-flight row that samples produces a token whose id is not known yet. Such a token is a *placeholder*. For a
//! sequence that allows [async scheduling](NewSequence::allow_async_schedule), the scheduler plans the row of a
//! placeholder (a deferred token); the code that runs the plan copies the sampled id into that row. The scheduler skips
//! any other sequence until its placeholder is committed.
//!
//! ```text
//!   tokens    [ p p p p p a b ]          known tokens: prompt and output
//!   computed  [ p p p p p a   ]          committed rows; these may be published to the prefix cache
//!   in flight             [ b | x ]      plan 7 computes the row of b and samples x; plan 8 computes the row of x,
//!                                        a deferred token, and samples y
//!   pending                 [ x y ]      placeholders: one for each in-flight row that samples
//! ```
//!
//! The commit of plan 7 may finish the sequence, or show that the later in-flight rows were computed from an invalid
//! row. The rows of the sequence in later plans are then *stale*: they count as never planned, [`Scheduler::commit`]
//! ignores their results, and [`Scheduler::wasted_rows`] counts them.
//!
//! The scheduler never preempts or caps a sequence that has in-flight rows. If a sequence needs a block and neither it
//! nor a later sequence of the order can be preempted, the scheduler skips it in this step. If earlier plans are in
//! flight, the scheduler also skips the later sequences and admits none, so that the in-flight plans drain until a
//! sequence can be preempted.
//!
//! The scheduler frees the blocks of stale rows at once. This is sound if the device runs steps in the order of their
//! plans: the next owner of such a block writes each slot after the stale row has run, and before any row reads the
//! slot. The prefix cache never contains a block of a stale row: only committed rows are published, and only one
//! sequence writes a block.
//!
//! # Invariants
//!
//! [`Scheduler::check`] verifies them:
//!
//! - A sequence is in one of three states. A waiting sequence holds no blocks. A running sequence has blocks for all
//!   its computed and in-flight rows. A capped sequence was reported in the last plan and holds no blocks.
//! - A running sequence has fewer computed tokens than known tokens.
//! - No in-flight row belongs to the newest placeholder.
//! - The order of sequences is strict.

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

/// Limits and policy of a [`Scheduler`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SchedulerConfig {
    /// Token budget: maximum number of rows in one step, over all sequences.
    ///
    /// At least `max_num_seqs`, so that each running sequence can decode in every step.
    pub max_num_batched_tokens: u32,
    /// Maximum number of running sequences.
    pub max_num_seqs: u32,
    /// Maximum number of tokens of a sequence, prompt and output together.
    pub max_model_len: u32,
    /// Watermark: blocks that an admission leaves available, so that running sequences can grow.
    pub watermark_blocks: u32,
    /// Maximum number of logit rows in one step: rows that sample, and prompt rows whose logits are requested.
    pub max_logit_rows: u32,
    /// Order in which sequences are admitted; preemption uses the reverse order.
    pub policy: SchedulePolicy,
}

impl SchedulerConfig {
    /// Limits with the policy first come, first served and no watermark; `max_logit_rows` is `max_num_seqs`.
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
    /// Maximum number of tokens to generate.
    pub max_tokens: u32,
    /// Priority under [`SchedulePolicy::Priority`]: a higher value goes first.
    pub priority: i32,
    /// Salt of the prefix cache (tenant, adapter): only sequences with equal salts share cached blocks.
    pub salt: Box<[u8]>,
    /// Whether the sequence may reuse cached blocks of its prompt.
    ///
    /// If false, the whole prompt is computed, for example because its log-probabilities are requested. The blocks of
    /// the sequence are published to the prefix cache in both cases.
    pub read_prefix_cache: bool,
    /// Whether the logits of the prompt's rows are requested, each row once.
    ///
    /// The scheduler splits chunks so that a step has at most [`SchedulerConfig::max_logit_rows`] logit rows.
    pub prompt_logits: bool,
    /// Whether the row of a token whose id is not known yet (a deferred token) may be planned.
    pub allow_async_schedule: bool,
}

impl NewSequence {
    /// Sequence of priority 0 with default settings.
    ///
    /// It has no salt, reads the prefix cache, requests no logits of its prompt, and does not allow async scheduling.
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

/// Reason why a call on the scheduler failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ScheduleError {
    /// A limit is 0.
    #[error("{field} is 0, expected at least 1")]
    Zero {
        /// Name of the limit.
        field: &'static str,
    },
    /// The token budget is smaller than the number of sequences that may run: they could not all decode in one step.
    #[error(
        "max_num_batched_tokens is {max_num_batched_tokens}, expected at least max_num_seqs ({max_num_seqs}): each \
         running sequence needs a row a step"
    )]
    BudgetBelowSeqs {
        /// Token budget of a step.
        max_num_batched_tokens: u32,
        /// Maximum number of running sequences.
        max_num_seqs: u32,
    },
    /// The prompt has no tokens.
    #[error("the prompt of {0:?} is empty, expected at least 1 token")]
    EmptyPrompt(SeqId),
    /// The id belongs to a sequence that is waiting or running.
    #[error("{0:?} is already scheduled")]
    SeqExists(SeqId),
    /// No running sequence that can be forked has this id.
    #[error("{0:?} cannot be forked: expected a running sequence with only its last token left to compute")]
    NotRunning(SeqId),
    /// The prompt leaves no token for the output under `max_model_len`.
    #[error("the prompt has {prompt_tokens} tokens, expected fewer than max_model_len ({max_model_len})")]
    PromptTooLong {
        /// Number of tokens in the prompt.
        prompt_tokens: usize,
        /// The limit.
        max_model_len: u32,
    },
    /// The prompt needs more blocks than the whole pool has.
    #[error(
        "the prompt has {prompt_tokens} tokens and needs {needed_blocks} blocks of {block_size} tokens, but the whole pool has \
         {pool_blocks} blocks"
    )]
    NeverFits {
        /// Number of tokens in the prompt.
        prompt_tokens: u32,
        /// Number of blocks that the prompt needs.
        needed_blocks: u32,
        /// Number of blocks in the pool.
        pool_blocks: u32,
        /// Tokens per block.
        block_size: u32,
    },
    /// The requested step budget is 0 or above the configured limit.
    #[error("the step budget is {tokens} tokens, expected 1..={max_num_batched_tokens}")]
    StepBudget {
        /// The requested budget.
        tokens: u32,
        /// The configured limit.
        max_num_batched_tokens: u32,
    },
}

/// Read-only view of a sequence in the scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SequenceView<'a> {
    /// Tokens of the prompt and of the output so far.
    pub tokens: &'a [u32],
    /// Number of tokens in the prompt.
    pub prompt_tokens: u32,
    /// Prompt tokens that came from the prefix cache at the last admission of the sequence.
    pub cached_tokens: u32,
    /// First position that was computed in the f32 fallback plan; `None` if there is none since the last admission.
    pub f32_fallback_from: Option<u32>,
}

#[derive(Clone, Copy, Debug)]
struct RunningSeq {
    key: QueueKey,
    seq: SeqId,
}

/// Continuous-batching scheduler: decides which rows of which sequences each step computes.
///
/// The caller makes a plan with [`schedule`](Self::schedule), runs it, and commits its results with
/// [`commit`](Self::commit). It may make the next plan before or after that commit.
#[derive(Clone, Debug)]
pub struct Scheduler {
    config: SchedulerConfig,
    step_budget_tokens: u32,
    sequences: IdMap<SeqId, SeqState>,
    waiting: WaitQueue,
    /// Sorted by key.
    running: Vec<RunningSeq>,
    plan: StepPlan,
    /// Plans that are not committed yet.
    in_flight: InFlightPlans,
    /// Reused result of prefix cache lookups at admission.
    hit: PrefixHit,
    clock: Tick,
    arrivals: u64,
    preemptions: u64,
    wasted_rows: u64,
}

impl Scheduler {
    /// Creates a scheduler without sequences.
    ///
    /// # Errors
    /// [`ScheduleError::Zero`] if a limit other than the watermark is 0; [`ScheduleError::BudgetBelowSeqs`] if
    /// `max_num_batched_tokens` is below `max_num_seqs`.
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

    /// Adds a sequence to the waiting queue.
    ///
    /// A prompt may fill the pool to the last slot: its first output token is sampled from rows that fit, and that
    /// token needs a slot only if another token follows it.
    ///
    /// # Errors
    /// [`ScheduleError::SeqExists`] if the id belongs to a waiting or running sequence; [`ScheduleError::EmptyPrompt`]
    /// for a prompt without tokens; [`ScheduleError::PromptTooLong`] if the prompt leaves no token under
    /// `max_model_len`; [`ScheduleError::NeverFits`] if the prompt needs more blocks than the pool has.
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
            f32_fallback_from: None,
        };
        self.enqueue(seq, sequence, blocks);
        Ok(())
    }

    /// Adds `child`, a copy of the running sequence `parent` with another last token.
    ///
    /// The child shares all blocks of the parent and continues with `token` in place of the parent's last token
    /// (another choice of a request, or a beam). Call this method after the `commit` that appended that last token and
    /// before the next `schedule`. If `max_num_seqs` sequences are running, the child waits, and its shared tokens are
    /// computed again when it is admitted.
    ///
    /// # Errors
    /// [`ScheduleError::SeqExists`] if the child's id belongs to a waiting or running sequence;
    /// [`ScheduleError::NotRunning`] if the parent is not running, has in-flight rows, or has other rows left to
    /// compute than that of its last token.
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
        let can_run = self.running.len() < self.config.max_num_seqs as usize && blocks.fork(parent, child).is_ok();
        if can_run {
            let tokens = max_tokens_held(&sequence, blocks);
            sequence.tokens.reserve_exact((tokens as usize).saturating_sub(sequence.tokens.len()));
            // `blocks.fork` succeeded above, so the child has a block table.
            let reserved = blocks.reserve_table(child, tokens);
            debug_assert!(reserved.is_ok());
            self.start_running(child, sequence.key);
            self.arrivals += 1;
            self.sequences.insert(child, sequence);
        } else {
            sequence.status = SeqStatus::Waiting;
            (sequence.computed, sequence.f32_fallback_from) = (0, None);
            sequence.cached_tokens = 0;
            self.enqueue(child, sequence, blocks);
        }
        Ok(())
    }

    /// Removes a sequence at once and frees its blocks.
    ///
    /// Returns false if the scheduler does not contain the sequence (any longer): aborting a sequence twice, or after
    /// its end, has no effect.
    ///
    /// In-flight rows of the sequence become stale: `commit` ignores their results. The next `schedule` may already
    /// allocate the freed blocks.
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

    /// Returns the tokens of the prompt and of the output so far; empty for an unknown sequence.
    pub fn tokens(&self, seq: SeqId) -> &[u32] {
        self.sequences.get(&seq).map_or(&[], |sequence| &sequence.tokens)
    }

    /// Returns a view of a sequence, or `None` for an unknown sequence.
    pub fn sequence(&self, seq: SeqId) -> Option<SequenceView<'_>> {
        let SeqState { tokens, prompt_len, cached_tokens, f32_fallback_from, .. } = self.sequences.get(&seq)?;
        Some(SequenceView {
            tokens,
            prompt_tokens: *prompt_len,
            cached_tokens: *cached_tokens,
            f32_fallback_from: *f32_fallback_from,
        })
    }

    /// Returns the chunks of an in-flight plan; empty for the number of any other plan.
    pub fn in_flight_chunks(&self, plan: u64) -> &[Chunk] {
        self.in_flight.chunks(plan)
    }

    /// Marks the rows of a sequence from `position` on as computed in the f32 fallback plan.
    ///
    /// Call this method after the oldest in-flight plan has run and before its commit. The keys and values of these
    /// rows are not published to the prefix cache. The mark ends when the sequence is preempted. In-flight rows of the
    /// sequence in later plans become stale at the next `commit`.
    pub fn set_f32_from(&mut self, seq: SeqId, position: u32) {
        if let Some(sequence) = self.sequences.get_mut(&seq) {
            sequence.f32_fallback_from = Some(sequence.f32_fallback_from.map_or(position, |known| known.min(position)));
            sequence.recompute = sequence.in_flight > 0;
        }
    }

    /// Returns the number of running sequences, which hold blocks.
    pub fn running(&self) -> usize {
        self.running.len()
    }

    /// Returns the number of waiting sequences, preempted ones included.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Returns whether no sequence is running or waiting.
    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.len() == 0
    }

    /// Returns the number of preemptions since the scheduler was created.
    pub fn preemptions(&self) -> u64 {
        self.preemptions
    }

    /// Returns the number of planned rows that became stale since the scheduler was created.
    ///
    /// These are rows of sequences that had ended in the meantime, and rows that had to be computed again.
    pub fn wasted_rows(&self) -> u64 {
        self.wasted_rows
    }

    /// Returns the limits with which the scheduler was created.
    pub fn config(&self) -> &SchedulerConfig {
        &self.config
    }

    /// Returns the current token budget of a step.
    pub fn step_budget_tokens(&self) -> u32 {
        self.step_budget_tokens
    }

    /// Sets the token budget of the next steps, within the configured limit.
    ///
    /// If the budget is below the number of running sequences, the first sequences of the order decode and the others
    /// are skipped.
    ///
    /// # Errors
    /// [`ScheduleError::StepBudget`] if `tokens` is 0 or above `max_num_batched_tokens`.
    pub fn set_step_budget_tokens(&mut self, tokens: u32) -> Result<(), ScheduleError> {
        let max_num_batched_tokens = self.config.max_num_batched_tokens;
        if !(1..=max_num_batched_tokens).contains(&tokens) {
            return Err(ScheduleError::StepBudget { tokens, max_num_batched_tokens });
        }
        self.step_budget_tokens = tokens;
        Ok(())
    }

    /// Checks every invariant listed in the module documentation.
    ///
    /// # Errors
    /// A description of the first violated invariant.
    pub fn check(&self, blocks: &BlockAllocator) -> Result<(), String> {
        if !self.running.windows(2).all(|pair| pair[0].key < pair[1].key) {
            return Err(format!("the running sequences are out of order: {:?}", self.running));
        }
        if self.running.len() > self.config.max_num_seqs as usize {
            return Err(format!(
                "{} sequences are running, expected at most max_num_seqs ({})",
                self.running.len(),
                self.config.max_num_seqs
            ));
        }
        let (mut waiting, mut running) = (0, 0);
        for (seq, sequence) in &self.sequences {
            let table = to_u32(blocks.table(*seq).len());
            let space = table * blocks.block_size();
            match sequence.status {
                SeqStatus::Waiting => {
                    waiting += 1;
                    if self.waiting.get(sequence.key) != Some(*seq) {
                        return Err(format!("{seq:?} has the status waiting but is not in the waiting queue"));
                    }
                }
                SeqStatus::Running => {
                    running += 1;
                    if !self
                        .running
                        .iter()
                        .any(|running_seq| running_seq.seq == *seq && running_seq.key == sequence.key)
                    {
                        return Err(format!("{seq:?} has the status running but is not in the running list"));
                    }
                    if sequence.next_row() > space || sequence.computed >= sequence.len() {
                        return Err(format!(
                            "{seq:?} has blocks for {space} tokens, which do not cover its rows, or no token left to compute: {sequence:?}"
                        ));
                    }
                    if sequence.next_row() >= sequence.len() + sequence.pending.max(1) {
                        return Err(format!("{seq:?} has in-flight rows beyond its placeholders: {sequence:?}"));
                    }
                }
                SeqStatus::Capped => {}
            }
            if sequence.status != SeqStatus::Running && (table > 0 || sequence.next_row() > 0) {
                return Err(format!("{seq:?} is not running but holds {table} blocks or in-flight rows: {sequence:?}"));
            }
            let planned = self.in_flight.rows_of(*seq, sequence.first_valid_plan);
            if planned != (sequence.in_flight, sequence.pending) {
                return Err(format!(
                    "{seq:?} has {planned:?} (rows, sampling rows) in plans that are not stale, but counts others: {sequence:?}"
                ));
            }
        }
        if (waiting, running) != (self.waiting.len(), self.running.len()) {
            return Err(format!(
                "{waiting} sequences are waiting and {running} are running, but the lists have lengths {:?}",
                (self.waiting(), self.running())
            ));
        }
        let rows: u64 = self.plan.chunks.iter().map(|chunk| u64::from(chunk.len)).sum();
        if rows > u64::from(self.config.max_num_batched_tokens) {
            return Err(format!(
                "the plan has {rows} rows, expected at most max_num_batched_tokens ({})",
                self.config.max_num_batched_tokens
            ));
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
        // Each step looks up the prefix of the first waiting sequence until it is admitted: this lookup must not
        // allocate.
        let tokens = max_tokens_held(&sequence, blocks);
        self.hit.reserve(blocks.blocks_for(tokens) as usize, sequence.salt.len());
        self.arrivals += 1;
        self.waiting.push(sequence.key, seq);
        self.sequences.insert(seq, sequence);
    }

    fn start_running(&mut self, seq: SeqId, key: QueueKey) {
        let at = self.running.partition_point(|running_seq| running_seq.key < key);
        self.running.insert(at, RunningSeq { key, seq });
        // A step plans each running sequence at most once and copies at most the last block of each.
        let StepPlan { chunks, copies, .. } = &mut self.plan;
        chunks.reserve(self.running.len().saturating_sub(chunks.len()));
        copies.reserve(self.running.len().saturating_sub(copies.len()));
        self.in_flight.reserve(self.running.len());
    }

    /// Removes a sequence from the running list and frees its blocks.
    fn stop_running(&mut self, seq: SeqId, key: QueueKey, blocks: &mut BlockAllocator) {
        if let Ok(at) = self.running.binary_search_by_key(&key, |running_seq| running_seq.key) {
            self.running.remove(at);
        }
        let released = blocks.release(seq);
        debug_assert!(released.is_ok(), "running sequence {seq:?} held no blocks");
    }
}
