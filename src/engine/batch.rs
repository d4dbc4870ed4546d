//! Turns planned chunks into calls of the model.
//!
//! Most steps are one call. A step that wants more rows of logits than the runner has room for (log-probabilities of a
//! long prompt) is cut into several calls; a row's numbers depend on its own sequence only, so the cuts cannot show.

use crate::kv_cache::{BlockAllocator, SeqId};
use crate::scheduler::{Chunk, Scheduler};

use super::forward::{ForwardInput, NEVER};

/// What a row of logits is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// The next token of the sequence is drawn from it.
    Sample,
    /// It tells how likely the prompt's next token was.
    PromptLogprob,
}

/// One wanted row of logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WantedRow {
    /// Index of the chunk in the plan.
    pub chunk: usize,
    pub seq: SeqId,
    /// Position in the sequence of the token whose row it is.
    pub position: u32,
    pub purpose: Purpose,
}

#[derive(Debug, Default)]
pub(crate) struct Batch {
    pub input: ForwardInput,
    /// One for each of `input.logit_rows`.
    pub wanted: Vec<WantedRow>,
    /// The chunk of the call's first sequence; its others follow.
    pub first_chunk: usize,
    next_chunk: usize,
    /// Rows of that chunk that earlier calls have taken.
    taken: u32,
}

impl Batch {
    pub fn with_room(tokens: usize, seqs: usize, table_blocks: usize, wanted: usize) -> Self {
        Self {
            input: ForwardInput {
                tokens: Vec::with_capacity(tokens),
                q_lens: Vec::with_capacity(seqs),
                kv_lens: Vec::with_capacity(seqs),
                tables: Vec::with_capacity(table_blocks),
                logit_rows: Vec::with_capacity(wanted),
                f32_from: Vec::with_capacity(seqs),
            },
            wanted: Vec::with_capacity(wanted),
            first_chunk: 0,
            next_chunk: 0,
            taken: 0,
        }
    }

    /// Starts a new plan.
    pub fn rewind(&mut self) {
        self.next_chunk = 0;
        self.taken = 0;
    }

    /// Fills in the next call of the plan; `false` when all of it has been called. `prompt_rows_from` tells from which
    /// position on a sequence wants the logits of its prompt's rows.
    pub fn fill(
        &mut self,
        chunks: &[Chunk],
        max_wanted: u32,
        scheduler: &Scheduler,
        blocks: &BlockAllocator,
        prompt_rows_from: impl Fn(SeqId) -> Option<u32>,
    ) -> bool {
        self.input.clear();
        self.wanted.clear();
        self.first_chunk = self.next_chunk;
        while let Some(chunk) = chunks.get(self.next_chunk) {
            let room = max_wanted - u32::try_from(self.wanted.len()).unwrap_or(max_wanted);
            let start = chunk.start + self.taken;
            let end = chunk.start + chunk.len;
            // The last prompt row predicts the first output token, which is drawn, not looked up.
            let last_prompt_row = scheduler.prompt_len(chunk.seq).saturating_sub(1);
            let first_wanted = prompt_rows_from(chunk.seq).map_or(end, |from| from.max(start));
            let wanted_prompt = end.min(last_prompt_row).saturating_sub(first_wanted);
            let whole = wanted_prompt + u32::from(chunk.samples) <= room;
            if !whole && room == 0 {
                break;
            }
            // Not whole: the prompt's rows alone fill the room, for beside them there is at most one to sample.
            let stop = if whole { end } else { first_wanted + room };
            self.add(chunk, start..stop, first_wanted..stop.min(last_prompt_row), whole, scheduler, blocks);
            if !whole {
                self.taken = stop - chunk.start;
                break;
            }
            self.next_chunk += 1;
            self.taken = 0;
        }
        !self.input.q_lens.is_empty()
    }

    fn add(
        &mut self,
        chunk: &Chunk,
        rows: std::ops::Range<u32>,
        prompt_rows: std::ops::Range<u32>,
        whole: bool,
        scheduler: &Scheduler,
        blocks: &BlockAllocator,
    ) {
        let tokens = &scheduler.tokens(chunk.seq)[rows.start as usize..rows.end as usize];
        let offset = u32::try_from(self.input.tokens.len()).unwrap_or(u32::MAX);
        self.input.tokens.extend_from_slice(tokens);
        self.input.q_lens.push(rows.end - rows.start);
        self.input.kv_lens.push(rows.end);
        self.input.f32_from.push(scheduler.f32_from(chunk.seq).unwrap_or(NEVER));
        let used = rows.end.div_ceil(blocks.block_size()) as usize;
        self.input.tables.extend_from_slice(&blocks.table(chunk.seq)[..used]);
        let (chunk_index, seq) = (self.next_chunk, chunk.seq);
        let mut want = |position: u32, purpose| {
            self.input.logit_rows.push(offset + position - rows.start);
            self.wanted.push(WantedRow { chunk: chunk_index, seq, position, purpose });
        };
        for position in prompt_rows {
            want(position, Purpose::PromptLogprob);
        }
        if whole && chunk.samples {
            want(rows.end - 1, Purpose::Sample);
        }
    }
}
