//! Scripted model for tests and benchmarks of the loop: it needs neither weights nor a device.
//!
//! The model has a KV pool of its own, in which each slot contains the token that was written there. It computes logits
//! from the history that it *reads through the block table*. A wrong block table, position, length or copy, or a block
//! allocated to two sequences, therefore changes the output. Reading a slot before it is written is an error.
//!
//! Several batches may be in flight. They run at their launch or, with [`deferred`](ScriptedForward::deferred), only
//! when they are collected: as late as a device is allowed to run them, in the order of their launches.

use crate::graph::NO_TOKEN;
use crate::num::to_u32;
use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use crate::device::DeviceError;
use crate::kv_cache::BlockId;
use crate::text::Vocabulary;

use super::{BatchId, ForwardInput, ForwardOutput, LogitRows, ModelExecutor};

/// Function that computes a logit row from the tokens so far.
pub type Model = Box<dyn FnMut(&[u32], &mut [f32]) + Send>;
/// Function that receives each batch before it runs, and may reject it with an error.
pub type Watch = Box<dyn FnMut(&ForwardInput) -> Result<(), DeviceError> + Send>;

/// Scripted [`ModelExecutor`]; see the module documentation.
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
    /// Launches and copies that have not run yet, oldest first.
    queue: VecDeque<Work>,
}

/// Maximum number of in-flight batches.
const MAX_IN_FLIGHT: usize = 3;

/// Number of batches whose results are kept. The last batch to run may have a deferred token from a batch that was
/// collected as the oldest in-flight batch, with other batches launched since.
const KEPT: usize = 2 * MAX_IN_FLIGHT - 1;

/// In-flight batch and its results.
#[derive(Default)]
struct Batch {
    id: Option<BatchId>,
    in_flight: bool,
    input: ForwardInput,
    logits: Vec<f32>,
    argmax: Vec<u32>,
    status: Vec<u8>,
    /// Error of the batch, if it failed.
    failed: Option<DeviceError>,
}

enum Work {
    /// Runs the batch at this index.
    Run(usize),
    Copy(Vec<(BlockId, BlockId)>),
}

impl ScriptedForward {
    /// Creates a model whose logits are a hash of the whole history.
    ///
    /// Any change of the history changes all logits.
    pub fn hashed(vocab_size: u32, blocks: u32, block_size: u32) -> Self {
        Self::new(vocab_size, blocks, block_size, Box::new(hashed_logits))
    }

    /// Creates a model that computes its logits with `model`.
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

    /// Defers each batch until its results are collected.
    #[must_use]
    pub fn deferred(self) -> Self {
        Self { deferred: true, ..self }
    }

    /// Calls `watch` with each batch before it runs.
    #[must_use]
    pub fn watched(self, watch: Watch) -> Self {
        Self { watch, ..self }
    }

    fn slot(&self, table: &[BlockId], position: usize) -> Result<usize, DeviceError> {
        let block =
            table.get(position / self.block_size).ok_or_else(|| invalid(&"a position is beyond the block table"))?;
        let slot = block.0 as usize * self.block_size + position % self.block_size;
        if slot < self.slots.len() { Ok(slot) } else { Err(invalid(&format_args!("{block:?} is not in the pool"))) }
    }
}

impl ScriptedForward {
    /// Runs all queued work up to and including the batch at index `last`.
    fn run_up_to(&mut self, last: usize) {
        while let Some(work) = self.queue.pop_front() {
            match work {
                Work::Copy(pairs) => self.copy(&pairs),
                Work::Run(index) => {
                    let mut batch = std::mem::take(&mut self.batches[index]);
                    batch.failed = self.run(&mut batch).err();
                    self.batches[index] = batch;
                    if index == last {
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

    /// Returns the token that an in-flight batch samples from a logit row.
    fn sampled_token(&self, id: BatchId, logit_row: u32) -> Result<u32, DeviceError> {
        let batch = self.batches.iter().find(|batch| batch.id == Some(id));
        let argmax = batch.and_then(|batch| batch.argmax.get(logit_row as usize)).copied();
        argmax.ok_or_else(|| invalid(&"a deferred token refers to a batch that has not run"))
    }

    fn run(&mut self, batch: &mut Batch) -> Result<(), DeviceError> {
        let Batch { input, logits, argmax, status, .. } = batch;
        (self.watch)(input)?;
        logits.clear();
        argmax.clear();
        status.clear();
        for deferred in &input.deferred {
            let token = self.sampled_token(deferred.batch_id, deferred.logit_row)?;
            let no_row = || invalid(&"the row of a deferred token is not a row of the batch");
            *input.tokens.get_mut(deferred.row as usize).ok_or_else(no_row)? = token;
        }
        if input.q_lens.len() != input.kv_lens.len() {
            return Err(invalid(&"q_lens and kv_lens differ in length"));
        }
        // Write the tokens of all sequences first, as a device does: this exposes a slot shared by mistake.
        let (mut row, mut at) = (0, 0);
        for (&q_len, &kv_len) in input.q_lens.iter().zip(&input.kv_lens) {
            let blocks = (kv_len as usize).div_ceil(self.block_size);
            let table = input.tables.get(at..at + blocks).ok_or_else(|| invalid(&"the block tables are too short"))?;
            for offset in 0..q_len {
                let token = *input.tokens.get(row).ok_or_else(|| invalid(&"the batch has too few tokens"))?;
                let slot = self.slot(table, (kv_len - q_len + offset) as usize)?;
                self.slots[slot] = Some(token);
                row += 1;
            }
            at += blocks;
        }
        if row != input.tokens.len() || at != input.tables.len() || row == 0 {
            return Err(invalid(&"the lists of the batch do not add up"));
        }
        let mut logit_rows = input.logit_rows.iter().map(|&row| row as usize).peekable();
        let (mut row, mut at) = (0, 0);
        for (&q_len, &kv_len) in input.q_lens.iter().zip(&input.kv_lens) {
            let blocks = (kv_len as usize).div_ceil(self.block_size);
            let table = &input.tables[at..at + blocks];
            while let Some(logit_row) = logit_rows.next_if(|&logit_row| logit_row < row + q_len as usize) {
                let visible = (kv_len - q_len) as usize + (logit_row - row) + 1;
                self.history.clear();
                for position in 0..visible {
                    let token = self.slots[self.slot(table, position)?];
                    self.history.push(token.ok_or_else(|| invalid(&"a slot is read before it is written"))?);
                }
                let start = logits.len();
                logits.resize(start + self.vocab_size, 0.0);
                (self.model)(&self.history, &mut logits[start..]);
                argmax.push(largest(&logits[start..]));
                status.push(u8::from(!logits[start..].iter().all(|logit| logit.is_finite())));
            }
            row += q_len as usize;
            at += blocks;
        }
        if logit_rows.next().is_some() {
            return Err(invalid(&"logit_rows are not ascending rows of the batch"));
        }
        Ok(())
    }
}

impl ModelExecutor for ScriptedForward {
    fn launch(&mut self, input: ForwardInput) -> Result<BatchId, DeviceError> {
        let id = BatchId(self.launched);
        let index = usize::try_from(id.0 % self.batches.len() as u64).unwrap_or(0);
        if self.batches.iter().filter(|batch| batch.in_flight).count() == MAX_IN_FLIGHT {
            return Err(invalid(&format_args!("{MAX_IN_FLIGHT} batches are in flight already, which is the maximum")));
        }
        self.batches[index].input = input;
        self.queue.push_back(Work::Run(index));
        if !self.deferred {
            self.run_up_to(index);
            if let Some(error) = self.batches[index].failed.take() {
                return Err(error);
            }
        }
        (self.batches[index].id, self.batches[index].in_flight) = (Some(id), true);
        self.launched += 1;
        Ok(id)
    }

    fn collect(&mut self, id: BatchId, _stale: &[bool]) -> Result<ForwardOutput<'_>, DeviceError> {
        let Some(index) = self.batches.iter().position(|batch| batch.in_flight && batch.id == Some(id)) else {
            return Err(invalid(&"the collected batch is not in flight"));
        };
        if self.queue.iter().any(|work| matches!(work, Work::Run(queued) if *queued == index)) {
            self.run_up_to(index);
        }
        let batch = &mut self.batches[index];
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

/// Computes logits in -4..4, as a pure function of the history.
pub fn hashed_logits(history: &[u32], logits: &mut [f32]) {
    let seed = history.iter().fold(0x243f_6a88_85a3_08d3, |state, &token| mix(state ^ u64::from(token)));
    for (id, logit) in logits.iter_mut().enumerate() {
        let bits = mix(seed ^ (id as u64) << 32) >> 40;
        *logit = bits as f32 / (1u64 << 21) as f32 - 4.0;
    }
}

/// Returns the argmax, the lowest id wins a tie, or [`NO_TOKEN`] if a logit is not finite.
fn largest(logits: &[f32]) -> u32 {
    let mut argmax = 0;
    for (id, logit) in logits.iter().enumerate() {
        if !logit.is_finite() {
            return NO_TOKEN;
        }
        if *logit > logits[argmax] {
            argmax = id;
        }
    }
    to_u32(argmax)
}

fn mix(mut bits: u64) -> u64 {
    bits = bits.wrapping_add(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

/// Returns a model that outputs `script` after a prompt of `prompt_tokens` tokens, and then repeats its last token.
pub fn reciting(prompt_tokens: usize, script: Vec<u32>) -> Model {
    Box::new(move |history, logits| {
        let generated = history.len() - prompt_tokens;
        let next = script.get(generated).or(script.last()).copied().unwrap_or(0);
        logits.fill(0.0);
        logits[next as usize] = 50.0;
    })
}

fn invalid(what: &dyn fmt::Display) -> DeviceError {
    DeviceError::Invalid { what: what.to_string() }
}

/// Vocabulary of listed pieces; it encodes a text with the longest matching pieces, from left to right.
#[derive(Clone, Debug, Default)]
pub struct ListedVocabulary {
    by_id: Vec<Vec<u8>>,
    special: Vec<u32>,
    bos: Option<u32>,
}

impl ListedVocabulary {
    /// Creates a vocabulary from its pieces, ordered by id.
    pub fn new<P: AsRef<[u8]>>(pieces: impl IntoIterator<Item = P>) -> Self {
        Self { by_id: pieces.into_iter().map(|piece| piece.as_ref().to_vec()).collect(), ..Self::default() }
    }

    /// Marks ids as special.
    #[must_use]
    pub fn with_special(mut self, ids: &[u32]) -> Self {
        self.special.extend_from_slice(ids);
        self
    }

    /// Sets the token that precedes each encoded prompt.
    #[must_use]
    pub fn with_bos(mut self, id: u32) -> Self {
        self.bos = Some(id);
        self
    }

    /// Wraps the vocabulary in an [`Arc`], as an engine needs it.
    pub fn shared(self) -> Arc<dyn Vocabulary> {
        Arc::new(self)
    }
}

impl Vocabulary for ListedVocabulary {
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
