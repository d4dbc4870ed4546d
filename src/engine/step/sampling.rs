//! Sampling of one step: from logits to tokens and the log-probabilities of the prompt.
//!
//! Owns the sampling buffers of a step and passes each result to [`ActiveRequests`]. A row that cannot be sampled fails
//! its own request only.

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
    /// Empty between calls; the capacity is reused.
    rows: Vec<SampleRow<'static>>,
    /// For each of `rows`: the index of its logit request, and the choice that it is sampled for.
    targets: Vec<(usize, SeqId)>,
    sampled: Vec<Result<Sampled, SampleError>>,
    forks: Vec<Fork>,
    sampled_tokens: u32,
}

/// A choice that begins in this step; the scheduler receives it after the commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fork {
    /// `child` has sampled `token` from the same row as choice 0 (`parent`) and shares all computed blocks.
    Shared { parent: SeqId, child: SeqId, token: u32 },
    /// Choice 0 ended at its first token, so there are no blocks to share: the other choices compute the prompt
    /// themselves.
    Alone { request: RequestId },
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

    /// Resets the counters for a new step.
    pub fn begin(&mut self) {
        self.forks.clear();
        self.sampled_tokens = 0;
    }

    /// Choices that began in this step.
    pub fn forks(&self) -> &[Fork] {
        &self.forks
    }

    /// Number of tokens sampled in this step, over all choices.
    pub fn sampled_tokens(&self) -> u32 {
        self.sampled_tokens
    }

    /// Processes the logits of a step and writes the results to `output`, which has one entry per chunk.
    pub fn process_logits(
        &mut self,
        logits: LogitRows<'_>,
        wanted: &[Option<LogitRequest>],
        scheduler: &Scheduler,
        requests: &mut ActiveRequests,
        now: Tick,
        output: &mut StepOutput,
    ) {
        for (row, want) in rows_for(wanted, LogitUse::PromptLogprob) {
            self.prompt_logprob(logits, row, want, scheduler, requests);
        }
        self.sample(logits, wanted, scheduler, requests);
        for (&(row, seq), sampled) in self.targets.iter().zip(&self.sampled) {
            let Some(want) = wanted[row] else { continue };
            if seq == want.seq {
                let result = apply_sample(seq, want, sampled, scheduler, requests, now);
                self.sampled_tokens += u32::from(result.token.is_some());
                output.results[want.chunk] = result;
                let (request, _) = request_of(seq);
                if result.finished && requests.waits_to_fork(request) {
                    self.forks.push(Fork::Alone { request });
                }
            } else if !output.results[want.chunk].finished {
                // Choice 0 continues; this choice starts with the same blocks.
                let result = apply_sample(seq, want, sampled, scheduler, requests, now);
                self.sampled_tokens += u32::from(result.token.is_some());
                requests.mark_forked(seq);
                if let (Some(token), false) = (result.token, result.finished) {
                    self.forks.push(Fork::Shared { parent: want.seq, child: seq, token });
                }
            }
        }
    }

    fn prompt_logprob(
        &mut self,
        logits: LogitRows<'_>,
        row: usize,
        want: LogitRequest,
        scheduler: &Scheduler,
        requests: &mut ActiveRequests,
    ) {
        let Some((choice, active)) = requests.get(want.seq) else { return };
        let choice = choice.choice;
        let top = active.params.prompt_logprobs.unwrap_or(0);
        let next = scheduler.tokens(want.seq)[want.position as usize + 1];
        let answer = if logits.status[row] == 0 {
            self.sampler.prompt_logprobs(&logits.logits[row * logits.vocab..][..logits.vocab], next, top)
        } else {
            Err(SampleError::NonFinite { row, token: None })
        };
        match answer {
            Ok((logprob, rank, top)) => {
                requests.prompt_logprob(want.seq, TokenLogprob { token: next, logprob }, rank, &top);
            }
            Err(error) => requests.fail(request_of(want.seq).0, request_error(error, choice, want.position, 0)),
        }
    }

    fn sample(
        &mut self,
        logits: LogitRows<'_>,
        wanted: &[Option<LogitRequest>],
        scheduler: &Scheduler,
        requests: &ActiveRequests,
    ) {
        self.targets.clear();
        let mut rows: Vec<SampleRow<'_>> = std::mem::take(&mut self.rows);
        for (row, want) in rows_for(wanted, LogitUse::Sample) {
            let Some((sequence, active)) = requests.get(want.seq) else { continue };
            let tokens = scheduler.tokens(want.seq);
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
            self.targets.push((row, want.seq));
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

/// The requested rows of a purpose, with their indices among the logits.
fn rows_for(wanted: &[Option<LogitRequest>], purpose: LogitUse) -> impl Iterator<Item = (usize, LogitRequest)> {
    let rows = wanted.iter().enumerate().filter_map(|(row, want)| Some((row, (*want)?)));
    rows.filter(move |(_, want)| want.logit_use == purpose)
}

/// Applies one sampled token to its sequence.
fn apply_sample(
    seq: SeqId,
    want: LogitRequest,
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
                requests.fail(request_of(seq).0, request_error(error.clone(), choice, want.position, done));
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

/// Clears the rows and releases their borrows. The collection is in place, so the capacity is kept.
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
