//! Turns planned chunks into a batch for the model.

use crate::num::to_u32;
use std::ops::Range;

use crate::kv_cache::{BlockAllocator, SeqId};
use crate::scheduler::{Chunk, Placeholder, Scheduler};

use super::active_requests::ActiveRequests;
use crate::runner::{BatchId, DeferredToken, ForwardInput};

/// What a row of logits is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LogitUse {
    /// The next token of the sequence is drawn from it.
    Sample,
    /// It tells how likely the prompt's next token was.
    PromptLogprob,
}

/// One wanted row of logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LogitRequest {
    /// Index of the chunk in the plan.
    pub chunk: usize,
    pub seq: SeqId,
    /// Position in the sequence of the token whose row it is.
    pub position: u32,
    pub logit_use: LogitUse,
}

#[derive(Debug, Default)]
pub(crate) struct BatchBuilder {
    pub input: ForwardInput,
    /// One for each of `input.logit_rows`; nothing where nobody wants it any more.
    pub logit_requests: Vec<Option<LogitRequest>>,
    /// The row of logits that each chunk's token is drawn from.
    sampled_rows: Vec<Option<u32>>,
}

impl BatchBuilder {
    pub fn with_capacity(tokens: usize, seqs: usize, table_blocks: usize, wanted: usize) -> Self {
        Self {
            input: ForwardInput::with_capacity(tokens, seqs, table_blocks, wanted),
            logit_requests: Vec::with_capacity(wanted),
            sampled_rows: Vec::with_capacity(seqs),
        }
    }

    /// The row of logits that a chunk's token is drawn from.
    pub fn sampled_row(&self, chunk: usize) -> Option<u32> {
        self.sampled_rows.get(chunk).copied().flatten()
    }

    /// Fills in a plan, a sequence a chunk. `source` tells which batch in flight draws a placeholder, from which of its rows
    /// of logits.
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
            let end = chunk.start + chunk.len;
            let offset = to_u32(self.input.tokens.len());
            if let Some((ticket, logit_row)) = chunk.placeholder.and_then(&source) {
                self.input.tokens.push(0);
                self.input.deferred.push(DeferredToken { row: offset, batch_id: ticket, logit_row });
            } else {
                let tokens = &scheduler.tokens(chunk.seq)[chunk.start as usize..end as usize];
                self.input.tokens.extend_from_slice(tokens);
            }
            self.input.q_lens.push(chunk.len);
            self.input.kv_lens.push(end);
            self.input.f32_from.push(scheduler.f32_from(chunk.seq));
            let used = end.div_ceil(blocks.block_size()) as usize;
            self.input.tables.extend_from_slice(&blocks.table(chunk.seq)[..used]);

            let mut want = |position: u32, purpose, best_only| {
                self.input.logit_rows.push(offset + position - chunk.start);
                self.input.argmax_only.push(best_only);
                self.logit_requests.push(Some(LogitRequest {
                    chunk: index,
                    seq: chunk.seq,
                    position,
                    logit_use: purpose,
                }));
            };
            for position in prompt_rows(chunk, scheduler, requests) {
                want(position, LogitUse::PromptLogprob, false);
            }
            if chunk.samples {
                let takes_best = requests.get(chunk.seq).is_some_and(|(_, active)| active.is_argmax_only);
                want(end - 1, LogitUse::Sample, takes_best);
                self.sampled_rows.push(Some(to_u32(self.logit_requests.len() - 1)));
            } else {
                self.sampled_rows.push(None);
            }
        }
    }

    /// Forgets what was wanted of chunks whose results mean nothing any more.
    pub fn drop_stale(&mut self, void: &[bool]) {
        for want in &mut self.logit_requests {
            *want = want.filter(|want| !void[want.chunk]);
        }
    }
}

/// Positions of prompt rows in the chunk whose log-probabilities are still wanted.
fn prompt_rows(chunk: &Chunk, scheduler: &Scheduler, requests: &ActiveRequests) -> Range<u32> {
    // The last prompt row predicts the first output token, which is drawn, not looked up.
    let end = (chunk.start + chunk.len).min(scheduler.prompt_len(chunk.seq).saturating_sub(1));
    requests.prompt_rows_from(chunk.seq).map_or(end..end, |from| from.max(chunk.start)..end)
}
