//! Builds the model's batch from the chunks of a plan.

use crate::kv_cache::{BlockAllocator, SeqId};
use crate::num::to_u32;
use crate::scheduler::{Chunk, Placeholder, Scheduler};

use super::active_requests::ActiveRequests;
use crate::runner::{BatchId, DeferredToken, ForwardInput};

/// Purpose of a logit row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LogitUse {
    /// Sample the next token of the sequence from the row.
    Sample,
    /// Compute the log-probability of the prompt's next token.
    PromptLogprob,
}

/// Request for one logit row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LogitRequest {
    /// Index of the chunk in the plan.
    pub chunk: usize,
    pub seq: SeqId,
    /// Position in the sequence of the token that the row belongs to.
    pub position: u32,
    pub logit_use: LogitUse,
}

#[derive(Debug, Default)]
pub(crate) struct BatchBuilder {
    pub input: ForwardInput,
    /// One entry for each of `input.logit_rows`; `None` if its result is no longer needed.
    pub logit_requests: Vec<Option<LogitRequest>>,
    /// For each chunk: index of the logit row from which its token is sampled.
    sampled_rows: Vec<Option<u32>>,
}

impl BatchBuilder {
    pub fn with_capacity(tokens: usize, seqs: usize, table_blocks: usize, logit_rows: usize) -> Self {
        Self {
            input: ForwardInput::with_capacity(tokens, seqs, table_blocks, logit_rows),
            logit_requests: Vec::with_capacity(logit_rows),
            sampled_rows: Vec::with_capacity(seqs),
        }
    }

    /// Returns the index of the logit row from which a chunk's token is sampled.
    pub fn sampled_row(&self, chunk: usize) -> Option<u32> {
        self.sampled_rows.get(chunk).copied().flatten()
    }

    /// Fills the batch from a plan, with one sequence per chunk.
    ///
    /// `source` returns the in-flight batch that samples the token of a placeholder, and the index of its logit row.
    pub fn build(
        &mut self,
        chunks: &[Chunk],
        scheduler: &Scheduler,
        blocks: &BlockAllocator,
        requests: &ActiveRequests,
        source: impl Fn(Placeholder) -> Option<(BatchId, u32)>,
    ) {
        self.input.clear();
        self.logit_requests.clear();
        self.sampled_rows.clear();
        for (index, chunk) in chunks.iter().enumerate() {
            let Some(sequence) = scheduler.sequence(chunk.seq) else { continue };
            let end = chunk.start + chunk.len;
            let first_row = to_u32(self.input.tokens.len());
            if let Some((batch_id, logit_row)) = chunk.placeholder.and_then(&source) {
                self.input.tokens.push(0);
                self.input.deferred.push(DeferredToken { row: first_row, batch_id, logit_row });
            } else {
                self.input.tokens.extend_from_slice(&sequence.tokens[chunk.start as usize..end as usize]);
            }
            self.input.q_lens.push(chunk.len);
            self.input.kv_lens.push(end);
            self.input.f32_fallback_from.push(sequence.f32_fallback_from);
            let used = end.div_ceil(blocks.block_size()) as usize;
            self.input.tables.extend_from_slice(&blocks.table(chunk.seq)[..used]);

            let mut request = |position: u32, logit_use, argmax_only| {
                self.input.logit_rows.push(first_row + position - chunk.start);
                self.input.argmax_only.push(argmax_only);
                self.logit_requests.push(Some(LogitRequest { chunk: index, seq: chunk.seq, position, logit_use }));
            };
            let active = requests.get(chunk.seq);
            if let Some(from) = active.and_then(|(choice, _)| choice.prompt_rows_from()) {
                // The last prompt row predicts the first output token: it has no prompt log-probability.
                let prompt_end = end.min(sequence.prompt_tokens.saturating_sub(1));
                for position in from.max(chunk.start)..prompt_end {
                    request(position, LogitUse::PromptLogprob, false);
                }
            }
            if chunk.samples {
                request(end - 1, LogitUse::Sample, active.is_some_and(|(_, active)| active.is_argmax_only));
                self.sampled_rows.push(Some(to_u32(self.logit_requests.len() - 1)));
            } else {
                self.sampled_rows.push(None);
            }
        }
    }

    /// Drops the logit requests of stale chunks, whose results are ignored.
    pub fn drop_stale(&mut self, stale: &[bool]) {
        for request in &mut self.logit_requests {
            *request = request.filter(|request| !stale[request.chunk]);
        }
    }
}
