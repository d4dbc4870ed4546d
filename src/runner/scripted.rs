//! A model defined by arithmetic, for tests and benches of the loop: no weights, no device.
//!
//! The model keeps its own KV pool in which each slot holds the token written there, and computes logits from the
//! history that it *finds through the block table*. A wrong table, position, length or copy, or a block given to two
//! sequences, changes the output; reading a slot that was never written is an error.
//!
//! Several batches may be in flight. They run at launch or, if [deferred](ScriptedForward::deferred), when their
//! results are collected: as late as a device may, in the order of the launches.

use crate::graph::NO_TOKEN;
use crate::num::to_u32;
use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use crate::device::DeviceError;
use crate::kv_cache::BlockId;
use crate::text::Vocabulary;

use super::{BatchId, ForwardInput, ForwardOutput, LogitRows, ModelExecutor};

/// Computes a row of logits from the tokens so far.
pub type Model = Box<dyn FnMut(&[u32], &mut [f32]) + Send>;
/// Inspects each call before it runs, and may refuse it.
pub type Watch = Box<dyn FnMut(&ForwardInput) -> Result<(), DeviceError> + Send>;

/// See the head of this file.
pub struct ScriptedForward {
    vocab_size: usize,
    block_size: usize,
    slots: Vec<Option<u32>>,
    model: Model,
    watch: Watch,
    history: Vec<u32>,
    batches: [Batch; KEPT],
    launched: u64,
    deferred: bool,
    /// Queued calls, oldest first.
    queue: VecDeque<Work>,
}

/// Batches in flight at most.
const MAX_IN_FLIGHT: usize = 3;

/// Number of remembered batches: the last batch to run may take a deferred token from one that was the oldest in flight
/// when it was collected, with others launched since.
const KEPT: usize = 2 * MAX_IN_FLIGHT - 1;

/// A batch in flight with its results.
#[derive(Default)]
struct Batch {
    ticket: Option<BatchId>,
    in_flight: bool,
    input: ForwardInput,
    logits: Vec<f32>,
    best: Vec<u32>,
    status: Vec<u8>,
    /// That it did not run, and why.
    failed: Option<DeviceError>,
}

enum Work {
    /// The batch in this place.
    Run(usize),
    Copy(Vec<(BlockId, BlockId)>),
}

impl ScriptedForward {
    /// A model whose logits are a hash of the whole history: any change of it changes all of them.
    pub fn hashed(vocab_size: u32, blocks: u32, block_size: u32) -> Self {
        Self::new(vocab_size, blocks, block_size, Box::new(hashed_logits))
    }

    /// A model of its own rule.
    pub fn new(vocab_size: u32, blocks: u32, block_size: u32, model: Model) -> Self {
        Self {
            vocab_size: vocab_size as usize,
            block_size: block_size as usize,
            slots: vec![None; blocks as usize * block_size as usize],
            model,
            watch: Box::new(|_| Ok(())),
            history: Vec::with_capacity(blocks as usize * block_size as usize),
            batches: std::array::from_fn(|_| Batch::default()),
            launched: 0,
            deferred: false,
            queue: VecDeque::with_capacity(2 * MAX_IN_FLIGHT),
        }
    }

    /// Defers all work until the results are collected.
    #[must_use]
    pub fn deferred(self) -> Self {
        Self { deferred: true, ..self }
    }

    /// Adds a watch that inspects each call.
    #[must_use]
    pub fn watched(self, watch: Watch) -> Self {
        Self { watch, ..self }
    }

    fn slot(&self, table: &[BlockId], position: usize) -> Result<usize, DeviceError> {
        let block = table.get(position / self.block_size).ok_or_else(|| invalid(&"position behind the table"))?;
        let slot = block.0 as usize * self.block_size + position % self.block_size;
        if slot < self.slots.len() { Ok(slot) } else { Err(invalid(&format_args!("no such block: {block:?}"))) }
    }
}

impl ScriptedForward {
    /// Runs the queue up to and including the batch at this index.
    fn run_up_to(&mut self, last: usize) {
        while let Some(work) = self.queue.pop_front() {
            match work {
                Work::Copy(pairs) => self.copy(&pairs),
                Work::Run(place) => {
                    let mut batch = std::mem::take(&mut self.batches[place]);
                    batch.failed = self.run(&mut batch).err();
                    self.batches[place] = batch;
                    if place == last {
                        return;
                    }
                }
            }
        }
    }

    fn copy(&mut self, pairs: &[(BlockId, BlockId)]) {
        for &(from, to) in pairs {
            for offset in 0..self.block_size {
                let from = from.0 as usize * self.block_size + offset;
                self.slots[to.0 as usize * self.block_size + offset] = self.slots[from];
            }
        }
    }

    /// The token that a batch in flight samples for a row.
    fn drawn(&self, ticket: BatchId, logit_row: u32) -> Result<u32, DeviceError> {
        let batch = self.batches.iter().find(|batch| batch.ticket == Some(ticket));
        let best = batch.and_then(|batch| batch.best.get(logit_row as usize)).copied();
        best.ok_or_else(|| invalid(&"a row is fed by a batch that has not run"))
    }

    fn run(&mut self, batch: &mut Batch) -> Result<(), DeviceError> {
        let Batch { input, logits, best, status, .. } = batch;
        (self.watch)(input)?;
        logits.clear();
        best.clear();
        status.clear();
        for fed in &input.deferred {
            let token = self.drawn(fed.batch_id, fed.logit_row)?;
            *input.tokens.get_mut(fed.row as usize).ok_or_else(|| invalid(&"a fed row is none"))? = token;
        }
        if input.q_lens.len() != input.kv_lens.len() {
            return Err(invalid(&"q_lens and kv_lens differ in length"));
        }
        // Written first for all sequences, as a device would: a slot shared by mistake shows.
        let (mut row, mut at) = (0, 0);
        for (&q_len, &kv_len) in input.q_lens.iter().zip(&input.kv_lens) {
            let blocks = (kv_len as usize).div_ceil(self.block_size);
            let table = input.tables.get(at..at + blocks).ok_or_else(|| invalid(&"tables are too short"))?;
            for offset in 0..q_len {
                let token = *input.tokens.get(row).ok_or_else(|| invalid(&"tokens are too few"))?;
                let slot = self.slot(table, (kv_len - q_len + offset) as usize)?;
                self.slots[slot] = Some(token);
                row += 1;
            }
            at += blocks;
        }
        if row != input.tokens.len() || at != input.tables.len() || row == 0 {
            return Err(invalid(&"lists do not add up"));
        }
        let mut wanted = input.logit_rows.iter().map(|&row| row as usize).peekable();
        let (mut row, mut at) = (0, 0);
        for (&q_len, &kv_len) in input.q_lens.iter().zip(&input.kv_lens) {
            let blocks = (kv_len as usize).div_ceil(self.block_size);
            let table = &input.tables[at..at + blocks];
            while let Some(want) = wanted.next_if(|&want| want < row + q_len as usize) {
                let visible = (kv_len - q_len) as usize + (want - row) + 1;
                self.history.clear();
                for position in 0..visible {
                    let token = self.slots[self.slot(table, position)?];
                    self.history.push(token.ok_or_else(|| invalid(&"a slot is read that nobody wrote"))?);
                }
                let start = logits.len();
                logits.resize(start + self.vocab_size, 0.0);
                (self.model)(&self.history, &mut logits[start..]);
                best.push(largest(&logits[start..]));
                status.push(u8::from(!logits[start..].iter().all(|logit| logit.is_finite())));
            }
            row += q_len as usize;
            at += blocks;
        }
        if wanted.next().is_some() {
            return Err(invalid(&"logit_rows are not ascending rows of the batch"));
        }
        Ok(())
    }
}

impl ModelExecutor for ScriptedForward {
    fn launch(&mut self, input: ForwardInput) -> Result<BatchId, DeviceError> {
        let ticket = BatchId(self.launched);
        let place = usize::try_from(ticket.0 % self.batches.len() as u64).unwrap_or(0);
        if self.batches.iter().filter(|batch| batch.in_flight).count() == MAX_IN_FLIGHT {
            return Err(invalid(&"more batches are in flight than there may be"));
        }
        self.batches[place].input = input;
        self.queue.push_back(Work::Run(place));
        if !self.deferred {
            self.run_up_to(place);
            if let Some(error) = self.batches[place].failed.take() {
                return Err(error);
            }
        }
        (self.batches[place].ticket, self.batches[place].in_flight) = (Some(ticket), true);
        self.launched += 1;
        Ok(ticket)
    }

    fn collect(&mut self, ticket: BatchId, _void: &[bool]) -> Result<ForwardOutput<'_>, DeviceError> {
        let Some(place) = self.batches.iter().position(|batch| batch.in_flight && batch.ticket == Some(ticket)) else {
            return Err(invalid(&"a batch is collected that is not in flight"));
        };
        if self.queue.iter().any(|work| matches!(work, Work::Run(queued) if *queued == place)) {
            self.run_up_to(place);
        }
        let batch = &mut self.batches[place];
        batch.in_flight = false;
        if let Some(error) = batch.failed.take() {
            return Err(error);
        }
        let logits = LogitRows { logits: &batch.logits, vocab: self.vocab_size, status: &batch.status, argmax: &[] };
        Ok(ForwardOutput::new(logits, std::mem::take(&mut batch.input)))
    }

    fn max_in_flight(&self) -> u32 {
        to_u32(MAX_IN_FLIGHT)
    }

    fn copy_blocks(&mut self, pairs: &[(BlockId, BlockId)]) -> Result<(), DeviceError> {
        if self.queue.is_empty() {
            self.copy(pairs);
        } else {
            self.queue.push_back(Work::Copy(pairs.to_vec()));
        }
        Ok(())
    }

    fn vocab_size(&self) -> usize {
        self.vocab_size
    }
}

impl fmt::Debug for ScriptedForward {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ScriptedForward").field("vocab_size", &self.vocab_size).finish_non_exhaustive()
    }
}

/// Logits in -4..4, a pure function of the history.
pub fn hashed_logits(history: &[u32], logits: &mut [f32]) {
    let seed = history.iter().fold(0x243f_6a88_85a3_08d3, |state, &token| mix(state ^ u64::from(token)));
    for (id, logit) in logits.iter_mut().enumerate() {
        let bits = mix(seed ^ (id as u64) << 32) >> 40;
        *logit = bits as f32 / (1u64 << 21) as f32 - 4.0;
    }
}

/// Lowest id of the largest logit; [`NO_TOKEN`] if one is not finite.
fn largest(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (id, logit) in logits.iter().enumerate() {
        if !logit.is_finite() {
            return NO_TOKEN;
        }
        if *logit > logits[best] {
            best = id;
        }
    }
    to_u32(best)
}

fn mix(mut bits: u64) -> u64 {
    bits = bits.wrapping_add(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

/// A model that outputs `script` after a prompt of `prompt_tokens` tokens, then repeats its last token.
pub fn reciting(prompt_tokens: usize, script: Vec<u32>) -> Model {
    Box::new(move |history, logits| {
        let said = history.len() - prompt_tokens;
        let next = script.get(said).or(script.last()).copied().unwrap_or(0);
        logits.fill(0.0);
        logits[next as usize] = 50.0;
    })
}

fn invalid(what: &dyn fmt::Display) -> DeviceError {
    DeviceError::Invalid { what: what.to_string() }
}

/// A vocabulary of listed strings; a text is encoded greedily by the longest string.
#[derive(Clone, Debug, Default)]
pub struct Pieces {
    by_id: Vec<Vec<u8>>,
    special: Vec<u32>,
    bos: Option<u32>,
}

impl Pieces {
    /// A vocabulary of these strings, by id.
    pub fn new<P: AsRef<[u8]>>(pieces: impl IntoIterator<Item = P>) -> Self {
        Self { by_id: pieces.into_iter().map(|piece| piece.as_ref().to_vec()).collect(), ..Self::default() }
    }

    /// Marks ids as special.
    #[must_use]
    pub fn with_special(mut self, ids: &[u32]) -> Self {
        self.special.extend_from_slice(ids);
        self
    }

    /// Adds a token before each encoded prompt.
    #[must_use]
    pub fn with_bos(mut self, id: u32) -> Self {
        self.bos = Some(id);
        self
    }

    /// For an engine.
    pub fn shared(self) -> Arc<dyn Vocabulary> {
        Arc::new(self)
    }
}

impl Vocabulary for Pieces {
    fn len(&self) -> usize {
        self.by_id.len()
    }

    fn token_bytes(&self, id: u32, _first: bool, out: &mut Vec<u8>) {
        if let Some(piece) = self.by_id.get(id as usize) {
            out.extend_from_slice(piece);
        }
    }

    fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, String> {
        let mut ids = Vec::from_iter(self.bos.filter(|_| add_special));
        let mut rest = text.as_bytes();
        while !rest.is_empty() {
            let fits = |(_, piece): &(u32, &Vec<u8>)| !piece.is_empty() && rest.starts_with(piece);
            let longest = (0..).zip(&self.by_id).filter(fits).max_by_key(|(_, piece)| piece.len());
            let (id, piece) = longest.ok_or_else(|| format!("no piece for {:?}", String::from_utf8_lossy(rest)))?;
            ids.push(id);
            rest = &rest[piece.len()..];
        }
        Ok(ids)
    }

    fn is_special(&self, id: u32) -> bool {
        self.special.contains(&id)
    }
}
