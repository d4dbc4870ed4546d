//! Sampling of one step: turns its logit rows into tokens and into log-probabilities of prompts.
//!
//! [`StepSampler`] owns the buffers of a step's sampling. It passes the results to [`ActiveRequests`] row by row. A row
//! that cannot be sampled fails only the request of its own sequence.

use crate::kv_cache::SeqId;
use crate::sampler::{SampleError, SampleRow, Sampled, Sampler, TokenLogprob};
use crate::scheduler::{Scheduler, SeqResult, StepOutput, Tick};

use super::active_requests::{ActiveRequests, request_of};
use super::batch_builder::{LogitRequest, LogitUse};
use crate::engine::error::RequestError;
use crate::engine::request::RequestId;
use crate::runner::LogitRows;

#[derive(Debug)]
pub(crate) struct StepSampler {
    sampler: Sampler,
    /// Empty between calls; kept for its capacity.
    rows: Vec<SampleRow<'static>>,
    /// For each of `rows`: its index in the requested logit rows, and the sequence that it is sampled for.
    targets: Vec<(usize, SeqId)>,
    sampled: Vec<Result<Sampled, SampleError>>,
    forks: Vec<Fork>,
    sampled_tokens: u32,
}

/// A choice that starts in this step; the scheduler receives it after the commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fork {
    /// `child` has sampled `token` from the same row as its choice 0, `parent`, and shares all computed blocks.
    Shared { parent: SeqId, child: SeqId, token: u32 },
    /// Choice 0 ended on its first token.
    ///
    /// The other choices cannot share its blocks, so they compute the prompt again.
    Unshared { request: RequestId },
}

impl StepSampler {
    pub fn new(vocab_size: usize, max_rows: usize) -> Self {
        Self {
            sampler: Sampler::new(vocab_size),
            rows: Vec::with_capacity(max_rows),
            targets: Vec::with_capacity(max_rows),
            sampled: Vec::with_capacity(max_rows),
            forks: Vec::new(),
            sampled_tokens: 0,
        }
    }

    /// Resets the results for a new step.
    pub fn begin(&mut self) {
        self.forks.clear();
        self.sampled_tokens = 0;
    }

    /// Returns the choices that started in this step.
    pub fn forks(&self) -> &[Fork] {
        &self.forks
    }

    /// Returns the number of tokens sampled in this step, for all choices.
    pub fn sampled_tokens(&self) -> u32 {
        self.sampled_tokens
    }

    /// Processes the logits of a step and enters the results into `output`, which has one result per chunk.
    pub fn process_logits(
        &mut self,
        logits: LogitRows<'_>,
        logit_requests: &[Option<LogitRequest>],
        scheduler: &Scheduler,
        requests: &mut ActiveRequests,
        now: Tick,
        output: &mut StepOutput,
    ) {
        for (row, logit_request) in rows_for(logit_requests, LogitUse::PromptLogprob) {
            self.prompt_logprob(logits, row, logit_request, scheduler, requests);
        }
        self.sample(logits, logit_requests, scheduler, requests);
        for (&(row, seq), sampled) in self.targets.iter().zip(&self.sampled) {
            let Some(logit_request) = logit_requests[row] else { continue };
            if seq == logit_request.seq {
                let result = apply_sample(seq, logit_request, sampled, scheduler, requests, now);
                self.sampled_tokens += u32::from(result.token.is_some());
                output.results[logit_request.chunk] = result;
                let (request, _) = request_of(seq);
                if result.finished && requests.waits_to_fork(request) {
                    self.forks.push(Fork::Unshared { request });
                }
            } else if !output.results[logit_request.chunk].finished {
                // Choice 0 continues, so this choice starts and shares its blocks.
                let result = apply_sample(seq, logit_request, sampled, scheduler, requests, now);
                self.sampled_tokens += u32::from(result.token.is_some());
                requests.mark_forked(seq);
                if let (Some(token), false) = (result.token, result.finished) {
                    self.forks.push(Fork::Shared { parent: logit_request.seq, child: seq, token });
                }
            }
        }
    }

    fn prompt_logprob(
        &mut self,
        logits: LogitRows<'_>,
        row: usize,
        logit_request: LogitRequest,
        scheduler: &Scheduler,
        requests: &mut ActiveRequests,
    ) {
        let Some((choice, active)) = requests.get(logit_request.seq) else { return };
        let choice = choice.choice;
        let top = active.params.prompt_logprobs.unwrap_or(0);
        let next = scheduler.tokens(logit_request.seq)[logit_request.position as usize + 1];
        let result = if logits.status[row] == 0 {
            self.sampler.prompt_logprobs(&logits.logits[row * logits.vocab..][..logits.vocab], next, top)
        } else {
            Err(SampleError::NonFinite { row, token: None })
        };
        match result {
            Ok((logprob, rank, top)) => {
                requests.prompt_logprob(logit_request.seq, TokenLogprob { token: next, logprob }, rank, &top);
            }
            Err(error) => {
                requests.fail(request_of(logit_request.seq).0, request_error(error, choice, logit_request.position, 0));
            }
        }
    }

    fn sample(
        &mut self,
        logits: LogitRows<'_>,
        logit_requests: &[Option<LogitRequest>],
        scheduler: &Scheduler,
        requests: &ActiveRequests,
    ) {
        self.targets.clear();
        let mut rows: Vec<SampleRow<'_>> = std::mem::take(&mut self.rows);
        for (row, logit_request) in rows_for(logit_requests, LogitUse::Sample) {
            let Some((sequence, active)) = requests.get(logit_request.seq) else { continue };
            let tokens = scheduler.tokens(logit_request.seq);
            let (prompt, output) = tokens.split_at(active.prompt_tokens as usize);
            let own = SampleRow {
                row,
                params: &active.params,
                prompt,
                output,
                eos_ids: requests.eos_ids(&active.params),
                bad_words: &active.bad_words,
                seed: active.seed,
                choice: sequence.choice,
            };
            self.targets.push((row, logit_request.seq));
            rows.push(own);
            for sibling in active.unforked() {
                self.targets.push((row, sibling.seq));
                rows.push(SampleRow { choice: sibling.choice, ..own });
            }
        }
        self.sampler.sample(logits, &rows, &mut self.sampled);
        self.rows = clear_rows(rows);
    }
}

/// Returns the rows that are requested for `purpose`, each with its index among the logit rows.
fn rows_for(logit_requests: &[Option<LogitRequest>], purpose: LogitUse) -> impl Iterator<Item = (usize, LogitRequest)> {
    let rows = logit_requests.iter().enumerate().filter_map(|(row, logit_request)| Some((row, (*logit_request)?)));
    rows.filter(move |(_, logit_request)| logit_request.logit_use == purpose)
}

/// Applies a sampled token to its sequence, and returns the sequence's result of the step.
fn apply_sample(
    seq: SeqId,
    logit_request: LogitRequest,
    sampled: &Result<Sampled, SampleError>,
    scheduler: &Scheduler,
    requests: &mut ActiveRequests,
    now: Tick,
) -> SeqResult {
    match sampled {
        Ok(sampled) => {
            let cached_tokens = || scheduler.sequence(seq).map_or(0, |sequence| sequence.cached_tokens);
            let finished = requests.accept(seq, sampled, cached_tokens, now);
            SeqResult { seq, token: Some(sampled.token), finished }
        }
        Err(error) => {
            if let Some((choice, _)) = requests.get(seq) {
                let (choice, done) = (choice.choice, choice.generated_tokens());
                requests.fail(request_of(seq).0, request_error(error.clone(), choice, logit_request.position, done));
            }
            SeqResult { seq, token: None, finished: true }
        }
    }
}

fn request_error(error: SampleError, choice: u32, position: u32, generated_tokens: u32) -> RequestError {
    match error {
        SampleError::NonFinite { .. } => RequestError::NonFinite { choice, position },
        cause => RequestError::Sample { choice, generated_tokens, cause },
    }
}

/// Returns the same vector without its rows and with another lifetime. `collect` works in place, so the capacity stays.
fn clear_rows(mut rows: Vec<SampleRow<'_>>) -> Vec<SampleRow<'static>> {
    rows.clear();
    rows.into_iter().map(|_| unreachable!("cleared above")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clearing_keeps_the_capacity() {
        let rows: Vec<SampleRow<'_>> = Vec::with_capacity(64);
        let at = rows.as_ptr() as usize;
        let rows = clear_rows(rows);
        assert_eq!((rows.capacity(), rows.as_ptr() as usize), (64, at));
    }
}
