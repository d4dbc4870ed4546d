//! The engine as a step function: no thread, no clock of its own, no I/O.
//!
//! [`EngineCore::step`] processes submissions, cancellations and deadlines, plans and launches as many steps as may be
//! in flight, and completes the oldest one: it samples, publishes and commits, in this order (see the head of
//! `pipeline.rs`). A host that calls `step` controls the whole engine; [`Engine`](super::Engine) is a thread around it.
//!
//! # Guarantees
//! - A request that was cancelled or whose handle was dropped is removed, with its blocks, before the next plan.
//! - A failure of a request ends this request only.
//! - A failed engine sends its error once to each open handle and rejects further requests.
//! - A step in which no request is admitted, ends or is preempted allocates no memory, except for log-probabilities.

use crate::num::to_u32;
use crate::sampler::ParamError;
use std::sync::Arc;

use crate::device::{Device, PeakRates};
use crate::kv_cache::BlockAllocator;
use crate::sampler::ParamLimits;
use crate::scheduler::{NewSequence, Scheduler, SchedulerConfig, Tick};
use crate::text::{ChatPrompt, ChatRenderer, Vocabulary};

use super::clock::{Clock, elapsed_us};
use super::config::{CacheBudget, EngineConfig};
use super::error::{BuildError, EngineError, RequestError, SubmitError};
use super::info::{EngineInfo, Health, ModelLimits, StepReport};
use super::metrics::utilization::{Utilization, UtilizationWindow};
use super::metrics::{Counters, Stats};
use super::request::admission::{Admission, AdmissionLimits, AdmittedRequest, Lifecycle};
use super::request::encoding::PromptEncoder;
use super::request::handle::RequestHandle;
use super::request::output::FinishReason;
use super::request::{Prompt, Request, RequestId};
use super::shared::{Shared, caller_methods};
use super::step::active_requests::{ActiveRequests, request_of};
use super::step::pipeline::{InFlightStep, Pipeline};
use super::step::sampling::{Fork, StepSampler};
use crate::runner::{ForwardOutput, LogitRows, ModelExecutor, RowOutcome};

/// Number of tokens per KV block if the configuration does not set it: the tile of the attention.
const DEFAULT_BLOCK_SIZE: u32 = 16;

/// Divisor for the watermark: the size of the pool divided by this number (vLLM's 1 %).
///
/// An admission leaves that many blocks free, so that running sequences can grow.
const WATERMARK_SHARE: u32 = 100;

/// Counts of the plans made in one step, in addition to their rows.
#[derive(Clone, Copy, Debug, Default)]
struct PlanCounts {
    preempted: usize,
    capped: usize,
}

/// Engine without a thread: the host calls [`step`](Self::step).
///
/// It guarantees:
/// - A request that was cancelled or whose handle was dropped is removed, with its blocks, before the next plan.
/// - A failure of a request ends this request only.
/// - A failed engine sends its error once to each open handle and rejects further requests.
pub struct EngineCore {
    shared: Arc<Shared>,
    executor: Box<dyn ModelExecutor>,
    scheduler: Scheduler,
    blocks: BlockAllocator,
    requests: ActiveRequests,
    pipeline: Pipeline,
    sampler: StepSampler,
    admitted: Vec<AdmittedRequest>,
    recent_steps: UtilizationWindow,
    utilization: Utilization,
    /// Time at which the model returned its last results; the model works on one step at a time.
    last_completed: Tick,
    /// Number of consecutive empty plans although there was work.
    empty_plans: u32,
    failed: Option<EngineError>,
}

impl EngineCore {
    /// Assembles an engine from a model that is ready to run.
    ///
    /// `config.kv_cache` must be [`CacheBudget::Blocks`]: only the owner of the device's memory can compute how many
    /// blocks fit.
    ///
    /// # Errors
    /// [`BuildError::Config`] if the configuration is out of range or does not suit the model;
    /// [`BuildError::VocabSize`] if the vocabulary sizes of the executor and the model differ.
    pub fn from_parts(
        config: EngineConfig,
        executor: Box<dyn ModelExecutor>,
        model: ModelLimits,
        vocabulary: Option<Arc<dyn Vocabulary>>,
        chat: Option<Arc<dyn ChatRenderer>>,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, BuildError> {
        Self::assemble(config, executor, model, PromptEncoder::new(vocabulary, chat), clock, None)
    }

    /// Does the same as [`from_parts`](Self::from_parts), with the device and the information that only a builder has.
    pub(super) fn assemble(
        config: EngineConfig,
        executor: Box<dyn ModelExecutor>,
        model: ModelLimits,
        encoder: PromptEncoder,
        clock: Arc<dyn Clock>,
        on_device: Option<(Arc<dyn Device>, EngineInfo)>,
    ) -> Result<Self, BuildError> {
        let config = resolve_config(config, &model, executor.max_in_flight())?;
        if executor.vocab_size() != model.vocab_size as usize {
            return Err(BuildError::VocabSize { model: model.vocab_size, runner: executor.vocab_size() });
        }
        let CacheBudget::Blocks(pool_blocks) = config.kv_cache else {
            let expected = "a number of blocks, since only a builder can resolve bytes or `auto`".to_owned();
            return Err(ParamError::new("kv_cache", format!("{:?}", config.kv_cache), expected).into());
        };
        let block_size = config.block_size.unwrap_or(DEFAULT_BLOCK_SIZE);
        let max_model_len = config.max_model_len.unwrap_or(model.max_model_len);
        if pool_blocks.checked_mul(block_size).is_none() {
            let expected = format!("at most {} blocks of {block_size} tokens", u32::MAX / block_size);
            return Err(ParamError::new("kv_cache.blocks", pool_blocks, expected).into());
        }

        let limits = SchedulerConfig::new(config.max_num_batched_tokens, config.max_num_seqs, max_model_len);
        let scheduler = Scheduler::new(
            limits
                .with_watermark_blocks(pool_blocks / WATERMARK_SHARE)
                .with_max_logit_rows(model.max_logit_rows)
                .with_policy(config.policy),
        )?;
        let mut blocks = BlockAllocator::new(pool_blocks, block_size);
        if config.prefix_caching {
            blocks = blocks.with_prefix_cache(model.fingerprint);
        }
        let params = ParamLimits {
            vocab_size: model.vocab_size,
            max_model_len,
            max_logprobs: config.max_logprobs,
            has_vocabulary: encoder.vocabulary().is_some(),
        };
        let limits = AdmissionLimits {
            params,
            block_size,
            pool_blocks,
            max_queue: config.max_queue,
            policy: config.policy,
            seed: config.seed,
        };
        let (device, info) = on_device.map_or_else(
            || (None, EngineInfo::without_device(model.vocab_size, max_model_len, block_size, pool_blocks)),
            |(device, info)| (Some(device), info),
        );
        let counters = Arc::new(Counters::default());
        let vocabulary = encoder.shared_vocabulary();
        let mut core = Self {
            pipeline: Pipeline::with_capacity(
                config.pipeline_depth.unwrap_or(1),
                &config,
                max_model_len.div_ceil(block_size),
                pool_blocks,
                model.max_logit_rows,
            ),
            sampler: StepSampler::new(model.vocab_size as usize, config.max_num_seqs as usize),
            requests: ActiveRequests::new(model.eos_ids, vocabulary, Arc::clone(&counters)),
            shared: Arc::new(Shared {
                admission: Admission::new(limits, encoder, Arc::clone(&clock)),
                config,
                info,
                counters,
                clock,
                device,
            }),
            executor,
            scheduler,
            blocks,
            admitted: Vec::new(),
            recent_steps: UtilizationWindow::default(),
            utilization: Utilization::default(),
            last_completed: Tick(0),
            empty_plans: 0,
            failed: None,
        };
        core.publish_metrics();
        Ok(core)
    }

    caller_methods!();

    /// Returns whether there is no work, or the engine has failed.
    ///
    /// There is no work while no request waits or runs and no step is in flight.
    pub fn is_idle(&self) -> bool {
        self.failed.is_some()
            || (self.requests.is_empty()
                && self.pipeline.is_empty()
                && !self.shared.admission.doorbell().has_notification())
    }

    /// Plans and launches as many steps as may be in flight, and completes the oldest one.
    ///
    /// # Errors
    /// The [`EngineError`] that ended the engine. Each open handle has then received it, and each further call returns
    /// it again.
    pub fn step(&mut self) -> Result<StepReport, EngineError> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        self.run_step().inspect_err(|error| self.fail(error))
    }

    /// Checks every invariant of the engine and of its parts; for tests.
    ///
    /// # Errors
    /// A description of the first violated invariant.
    pub fn check(&self) -> Result<(), String> {
        self.blocks.check()?;
        self.scheduler.check(&self.blocks)?;
        self.requests.check()?;
        let scheduled = self.scheduler.running() + self.scheduler.waiting();
        let expected = self.requests.choices() - self.requests.unscheduled();
        if self.failed.is_none() && scheduled != expected {
            return Err(format!("{scheduled} sequences are scheduled, expected {expected}"));
        }
        Ok(())
    }

    fn run_step(&mut self) -> Result<StepReport, EngineError> {
        self.poll_requests(self.shared.clock.now());
        let mut planned = PlanCounts::default();
        while self.pipeline.has_capacity() && self.launch(&mut planned)? {}
        let mut report = match self.pipeline.pop() {
            Some(step) => self.complete_step(step)?,
            None => StepReport::default(),
        };
        report.preempted = to_u32(planned.preempted);
        self.detect_stall(report.sequences > 0 || planned.capped > 0)?;
        self.publish_metrics();
        Ok(report)
    }

    /// Processes submissions and cancellations since the last step, and expired deadlines.
    fn poll_requests(&mut self, now: Tick) {
        if self.shared.admission.doorbell().take_notification() {
            let mut arrivals = std::mem::take(&mut self.admitted);
            self.shared.admission.take_admitted(&mut arrivals);
            for admitted in arrivals.drain(..) {
                self.admit(admitted, now);
            }
            self.admitted = arrivals;
            while let Some(request) = self.requests.next_cancelled() {
                self.finish_request(request, &FinishReason::Cancelled, now);
            }
        }
        while let Some(request) = self.requests.next_expired(now) {
            self.finish_request(request, &FinishReason::Deadline, now);
        }
    }

    fn admit(&mut self, admitted: AdmittedRequest, now: Tick) {
        let request = admitted.id;
        let meta = NewSequence {
            prompt: Arc::clone(&admitted.prompt),
            max_tokens: admitted.max_tokens,
            priority: admitted.priority,
            salt: admitted.salt.clone(),
            // Rows from the prefix cache have no logits.
            read_prefix_cache: admitted.params.prompt_logprobs.is_none(),
            prompt_logits: admitted.params.prompt_logprobs.is_some(),
            allow_async_schedule: self.requests.is_argmax_only(&admitted),
        };
        let sibling =
            (admitted.params.n > 1).then(|| meta.clone().with_read_prefix_cache(true).with_prompt_logits(false));
        let seq = self.requests.admit(admitted, sibling);
        if let Err(error) = self.scheduler.add(seq, meta, now, &self.blocks) {
            // The scheduler rejected a request that passed the checks at submission. Fail the request, so that its
            // handle does not wait forever.
            self.requests.fail(request, RequestError::Schedule(error));
            self.shared.admission.leave_queue();
            self.remove_failed();
        }
    }

    /// Schedules the choices whose choice 0 has just sampled its first token.
    fn fork_choices(&mut self, now: Tick) {
        for index in 0..self.sampler.forks().len() {
            let fork = self.sampler.forks()[index];
            let forked = match fork {
                Fork::Shared { parent, child, token } => {
                    self.scheduler.fork(parent, child, token, &mut self.blocks).map_err(|error| (child, error))
                }
                Fork::Unshared { request } => self.requests.take_unforked(request).map_or(Ok(()), |(choices, meta)| {
                    choices.into_iter().try_for_each(|seq| {
                        self.scheduler.add(seq, meta.clone(), now, &self.blocks).map_err(|error| (seq, error))
                    })
                }),
            };
            if let Err((seq, error)) = forked {
                self.requests.fail(request_of(seq).0, RequestError::Schedule(error));
            }
        }
    }

    /// Ends a request for a reason other than its output: all its choices end, and their blocks are freed.
    fn finish_request(&mut self, request: RequestId, reason: &FinishReason, now: Tick) {
        let (open, queued) = self.requests.open_choices(request);
        if queued {
            self.shared.admission.leave_queue();
        }
        for seq in open {
            self.scheduler.abort(seq, &mut self.blocks);
            self.requests.end_choice(seq, reason.clone(), now);
        }
    }

    /// Plans a step and launches it; returns false if there is nothing to compute.
    fn launch(&mut self, planned: &mut PlanCounts) -> Result<bool, EngineError> {
        let now = self.shared.clock.now();
        self.scheduler.schedule(now, &mut self.blocks);
        let plan = self.scheduler.plan();
        planned.preempted += plan.preempted.len();
        planned.capped += plan.capped.len();
        Counters::add(&self.shared.counters.preemptions, plan.preempted.len() as u64);
        for &seq in &plan.capped {
            self.requests.end_choice(seq, FinishReason::Length, now);
        }
        for chunk in &plan.chunks {
            if self.requests.mark_started(chunk.seq, now) {
                self.shared.admission.leave_queue();
            }
        }
        if !plan.copies.is_empty() {
            self.executor.copy_blocks(&plan.copies)?;
        }
        if plan.chunks.is_empty() {
            return Ok(false);
        }
        let mut step = self.pipeline.prepare(now, &self.scheduler, &self.blocks, &self.requests);
        step.cost = self.executor.cost(&step.batch.input);
        step.launched_at = self.shared.clock.now();
        step.batch_id = self.executor.launch(std::mem::take(&mut step.batch.input))?;
        self.pipeline.push(step);
        Ok(true)
    }

    /// Waits for the oldest in-flight step, samples its tokens, publishes and commits them.
    fn complete_step(&mut self, mut step: InFlightStep) -> Result<StepReport, EngineError> {
        let Self { scheduler, blocks, requests, sampler, executor, shared, .. } = self;
        step.mark_stale(scheduler);
        let ForwardOutput { logits, outcomes, input } = executor.collect(step.batch_id, &step.stale)?;
        step.batch.input = input;
        let end = shared.clock.now();
        let InFlightStep { plan, batch, output, .. } = &mut step;
        check_shape(&logits, batch.logit_requests.len())?;
        let report = StepReport {
            sequences: to_u32(scheduler.in_flight_chunks(*plan).len()),
            rows: to_u32(batch.input.tokens.len()),
            ..StepReport::default()
        };
        for outcome in outcomes {
            let Some(seq) = scheduler.in_flight_chunks(*plan).get(outcome.sequence).map(|chunk| chunk.seq) else {
                continue;
            };
            if outcome.outcome == RowOutcome::Retried {
                scheduler.set_f32_from(seq, outcome.position);
                Counters::add(&shared.counters.retried_sequences, 1);
            } else {
                requests.fail_sequence(seq, outcome);
            }
        }
        sampler.begin();
        sampler.process_logits(logits, &batch.logit_requests, scheduler, requests, end, output);
        step.discard_failed(requests);
        scheduler.commit(&step.output, blocks);

        let mut work = Utilization::default();
        work.add_call(&step.cost, elapsed_us(step.launched_at.max(self.last_completed), end));
        self.utilization = self.recent_steps.push(work);
        self.last_completed = end;
        let report = StepReport { sampled_tokens: self.sampler.sampled_tokens(), finished: step.finished(), ..report };
        self.fork_choices(step.planned_at);
        self.remove_failed();
        Counters::add(&self.shared.counters.computed_rows, u64::from(report.rows));
        Counters::add(&self.shared.counters.steps, 1);
        self.shared.counters.step_time.record(elapsed_us(step.planned_at, self.shared.clock.now()));
        self.pipeline.reuse(step);
        Ok(report)
    }

    /// Removes the requests that failed in this step.
    fn remove_failed(&mut self) {
        while let Some(open) = self.requests.next_failed() {
            for seq in open {
                self.scheduler.abort(seq, &mut self.blocks);
            }
        }
    }

    /// Returns an error after two consecutive empty plans with work to do. One empty plan is normal: the scheduler
    /// may only have ended or preempted sequences in it.
    fn detect_stall(&mut self, moved: bool) -> Result<(), EngineError> {
        let idle = self.scheduler.is_idle();
        self.empty_plans = if moved || idle { 0 } else { self.empty_plans + 1 };
        if self.empty_plans < 2 {
            return Ok(());
        }
        Err(EngineError::Stalled { waiting: self.scheduler.waiting(), running: self.scheduler.running() })
    }

    fn publish_metrics(&mut self) {
        let (stats, counters) = (self.blocks.stats(), &self.shared.counters);
        Counters::set(&counters.running, self.scheduler.running() as u64);
        Counters::set(&counters.waiting, self.scheduler.waiting() as u64);
        Counters::set(&counters.live_blocks, u64::from(stats.live_blocks));
        Counters::set(&counters.cached_blocks, u64::from(stats.cached_blocks));
        Counters::set(&counters.free_blocks, u64::from(stats.free_blocks));
        Counters::set(&counters.wasted_rows, self.scheduler.wasted_rows());
        Counters::set(&counters.prefix_queries, stats.queried_tokens);
        Counters::set(&counters.prefix_hits, stats.hit_tokens);
        Counters::set(&counters.padded_rows, self.executor.padded_rows());
        for (op, count) in self.executor.overflows() {
            counters.set_overflow(op, count);
        }
        counters.set_utilization(self.utilization);
    }

    /// Ends the engine: it rejects further requests, and each open handle receives the error.
    pub(crate) fn fail(&mut self, error: &EngineError) {
        self.failed = Some(error.clone());
        self.shared.admission.advance(Lifecycle::Ended(Some(error.clone())));
        self.fail_all(&RequestError::Engine(error.clone()));
    }

    pub(super) fn shared_arc(&self) -> &Arc<Shared> {
        &self.shared
    }

    fn shared(&self) -> &Shared {
        &self.shared
    }

    fn fail_all(&mut self, error: &RequestError) {
        self.shared.admission.take_admitted(&mut self.admitted);
        for admitted in self.admitted.drain(..) {
            admitted.mailbox.fail(error.clone());
        }
        self.requests.clear(error);
    }
}

/// Sends [`RequestError::Closed`] to the handles that are still open.
impl Drop for EngineCore {
    fn drop(&mut self) {
        self.shared.admission.advance(Lifecycle::Ended(None));
        self.fail_all(&RequestError::Closed);
    }
}

impl std::fmt::Debug for EngineCore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EngineCore")
            .field("config", &self.shared.config)
            .field("running", &self.scheduler.running())
            .field("waiting", &self.scheduler.waiting())
            .field("failed", &self.failed)
            .finish_non_exhaustive()
    }
}

/// Checks the configuration and sets the fields that depend on the model.
fn resolve_config(
    mut config: EngineConfig,
    model: &ModelLimits,
    max_in_flight: u32,
) -> Result<EngineConfig, BuildError> {
    config.validate()?;
    if model.max_logit_rows == 0 {
        return Err(ParamError::new("max_logit_rows", 0, "at least 1 row".to_owned()).into());
    }
    config.resolve_max_model_len(model.max_model_len)?;
    let depth = *config.pipeline_depth.get_or_insert(1);
    if depth > max_in_flight {
        let expected =
            format!("at most {max_in_flight}, the maximum number of in-flight batches of the model's runner");
        return Err(ParamError::new("pipeline_depth", depth, expected).into());
    }
    config.block_size = Some(config.block_size.unwrap_or(DEFAULT_BLOCK_SIZE));
    Ok(config)
}

fn check_shape(logits: &LogitRows<'_>, rows: usize) -> Result<(), EngineError> {
    let bad = |what, got, expected| Err(EngineError::BadAnswer { what, got, expected });
    if logits.status.len() != rows {
        return bad("status bytes", logits.status.len(), rows);
    }
    if logits.logits.len() != rows * logits.vocab {
        return bad("logits", logits.logits.len(), rows * logits.vocab);
    }
    Ok(())
}
