//! Sampler: selects the next token from a row of logits.
//!
//! A [`Sampler`] contains only scratch memory. The result of a row depends on that row, its parameters, its history and
//! its seed. It does not depend on other rows, on earlier calls, on a clock or on the vector width of the machine.
//! [`SamplingParams`] documents the order of the operations.
//!
//! A row that cannot be sampled (non-finite logits, all tokens masked) yields an error in its place and does not affect
//! the other rows. After [`Sampler::new`], the sampler allocates memory only for requested lists of log-probabilities,
//! and it reuses the lists of the previous results if the caller passes them in.

#![forbid(unsafe_code)]

mod filter;
mod logit_rows;
mod logprobs;
mod params;
mod penalties;
mod ranking;
mod rng;
mod softmax;

use crate::settings::with_methods;
use filter::Filter;
use penalties::Penalties;
use std::fmt;

pub use logit_rows::LogitRows;
pub use logprobs::TokenLogprob;
pub use params::{GREEDY_EPSILON, LogprobsMode, MAX_N, ParamError, ParamLimits, SamplingParams};

/// Input for sampling one token.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct SampleRow<'a> {
    /// Index of the row in the logits.
    pub row: usize,
    /// Sampling parameters. The engine checks ids and lengths; the sampler returns an error for numbers out of range.
    pub params: &'a SamplingParams,
    /// Tokens of the prompt.
    pub prompt: &'a [u32],
    /// Tokens generated so far. Their number is the position in the random stream.
    pub output: &'a [u32],
    /// The model's end-of-sequence ids. They and `stop_token_ids` are masked while `output` is shorter than
    /// `min_tokens`.
    pub eos_ids: &'a [u32],
    /// Token sequences that must not be generated.
    pub bad_words: &'a [Vec<u32>],
    /// Seed of the request.
    pub seed: u64,
    /// Index of the choice among the request's `n` choices.
    pub choice: u32,
}

impl<'a> SampleRow<'a> {
    /// Creates the input for the first choice of a request with seed 0, without end-of-sequence ids and bad words.
    pub const fn new(row: usize, params: &'a SamplingParams, prompt: &'a [u32], output: &'a [u32]) -> Self {
        Self { row, params, prompt, output, eos_ids: &[], bad_words: &[], seed: 0, choice: 0 }
    }

    with_methods! {
        value {
            row with_row: usize,
            output with_output: &'a [u32],
            eos_ids with_eos_ids: &'a [u32],
            bad_words with_bad_words: &'a [Vec<u32>],
            seed with_seed: u64,
            choice with_choice: u32,
        }
    }
}

/// Returns whether a request uses only the argmax of its logits (the lowest id wins a tie).
///
/// This holds if the request is greedy, edits no logits for any output, and requests no log-probabilities.
pub(crate) fn is_argmax_only(params: &SamplingParams, eos_ids: &[u32], bad_words: &[Vec<u32>]) -> bool {
    params.is_greedy() && params.logprobs.is_none() && Penalties::never_needed(params, eos_ids, bad_words)
}

/// Result of sampling one token.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Sampled {
    /// The token.
    pub token: u32,
    /// Its log-probability, if requested.
    pub logprob: Option<f32>,
    /// The tokens with the highest log-probabilities, highest first, up to the requested number. Masked tokens are left
    /// out.
    pub top: Vec<TokenLogprob>,
    /// Rank of the token in the distribution of `logprob`, 1 for the highest; 0 if no log-probabilities were requested.
    pub rank: u32,
}

/// Reason why a row yields no token.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SampleError {
    /// A logit is infinite or NaN: the model's computation overflowed.
    #[error("logits of row {row} are not finite{}", IdSuffix(*.token))]
    NonFinite {
        /// Index of the row.
        row: usize,
        /// First such token; `None` if the device reported the row.
        token: Option<u32>,
    },
    /// A sampling parameter violates a rule.
    #[error(transparent)]
    Params(#[from] ParamError),
    /// All tokens are masked.
    #[error("no token can be sampled: allowed_token_ids, bad_words and min_tokens mask the whole vocabulary")]
    NoTokenLeft,
    /// The logits contain no such row, or no status for it.
    #[error("row {row} is requested, but there are only {rows} rows of logits")]
    NoSuchRow {
        /// Index of the requested row.
        row: usize,
        /// Number of rows.
        rows: usize,
    },
    /// The width of the logits differs from the vocabulary of the sampler.
    #[error("logit rows have width {got}, expected {expected}, the vocabulary size of the sampler")]
    WrongWidth {
        /// Width of the logits.
        got: usize,
        /// Vocabulary size of the sampler.
        expected: usize,
    },
    /// A token id is outside the vocabulary.
    #[error("token {token} is outside the vocabulary of {vocab_size} tokens")]
    NoSuchToken {
        /// The token id.
        token: u32,
        /// Size of the vocabulary.
        vocab_size: usize,
    },
}

struct IdSuffix(Option<u32>);

impl fmt::Display for IdSuffix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |token| write!(f, " (first at token {token})"))
    }
}

/// Samples tokens from rows of logits; contains scratch memory of the vocabulary's size and no state.
#[derive(Debug)]
pub struct Sampler {
    vocab_size: usize,
    /// Edited copy of the current row.
    row: Vec<f32>,
    penalties: Penalties,
    filter: Filter,
    /// Lists of log-probabilities to reuse.
    spare: Vec<Vec<TokenLogprob>>,
}

impl Sampler {
    /// Creates a sampler for one vocabulary size; it uses about 25 bytes per token of the vocabulary.
    pub fn new(vocab_size: usize) -> Self {
        Self {
            vocab_size,
            row: vec![0.0; vocab_size],
            penalties: Penalties::new(vocab_size),
            filter: Filter::new(vocab_size),
            spare: Vec::new(),
        }
    }

    /// Samples `rows` and replaces the contents of `out` with one result per row, in the same order.
    pub fn sample(
        &mut self,
        logits: LogitRows<'_>,
        rows: &[SampleRow<'_>],
        out: &mut Vec<Result<Sampled, SampleError>>,
    ) {
        self.spare.extend(out.drain(..).filter_map(Result::ok).map(|old| old.top).filter(|top| top.capacity() > 0));
        for row in rows {
            out.push(self.sample_row(logits, row));
        }
        self.spare.clear();
    }

    /// Returns the log-probability and the rank of `next_token`, and the `top` tokens with the highest
    /// log-probabilities.
    ///
    /// `logits_row` is the row of the prompt token before `next_token`. The values are those of the untouched logits,
    /// whatever the parameters of the request are.
    ///
    /// # Errors
    /// [`SampleError::WrongWidth`] if the row's width is not the vocabulary size; [`SampleError::NoSuchToken`] if
    /// `next_token` is outside the vocabulary; [`SampleError::NonFinite`] if a logit is infinite or NaN.
    pub fn prompt_logprobs(
        &mut self,
        logits_row: &[f32],
        next_token: u32,
        top: u32,
    ) -> Result<(f32, u32, Vec<TokenLogprob>), SampleError> {
        let vocab_size = self.vocab_size;
        if logits_row.len() != vocab_size {
            return Err(SampleError::WrongWidth { got: logits_row.len(), expected: vocab_size });
        }
        if next_token as usize >= vocab_size {
            return Err(SampleError::NoSuchToken { token: next_token, vocab_size });
        }
        if let Some(token) = softmax::first_non_finite(logits_row) {
            return Err(SampleError::NonFinite { row: 0, token: Some(token) });
        }
        let mut list = Vec::with_capacity((top as usize).min(vocab_size));
        let keys = &mut self.filter.keys;
        let (logprob, rank) = logprobs::gather(logits_row, 1.0, next_token, top as usize, keys, &mut list);
        Ok((logprob, rank, list))
    }

    fn sample_row(&mut self, logits: LogitRows<'_>, row: &SampleRow<'_>) -> Result<Sampled, SampleError> {
        let params = row.params;
        let edited = Penalties::is_needed(row);
        let plain = params.is_greedy() && params.logprobs.is_none() && !edited;
        // The model has already checked every logit of the row.
        if let Some(&token) = logits.argmax.get(row.row).filter(|&&token| plain && (token as usize) < self.vocab_size) {
            self.check_row(logits, row.row)?;
            params.check_numbers()?;
            return Ok(Sampled { token, logprob: None, top: Vec::new(), rank: 0 });
        }
        let raw = self.finite_row(logits, row.row)?;
        params.check_numbers()?;
        if edited {
            self.penalties.apply(row, raw, &mut self.row);
        }
        let processed: &[f32] = if edited { &self.row } else { raw };
        let argmax = softmax::top_logit(processed).ok_or(SampleError::NoTokenLeft)?;

        let mut kept = None;
        let token = if params.is_greedy() {
            argmax.id
        } else {
            let narrowed = self.filter.narrow(processed, argmax, params);
            kept = Some(narrowed);
            self.filter.sample(narrowed, rng::uniform(row.seed, row.choice, row.output.len() as u64))
        };

        let mut sampled = Sampled { token, logprob: None, top: Vec::new(), rank: 0 };
        if let Some(top) = params.logprobs {
            let top = (top as usize).min(self.vocab_size);
            if top > 0 {
                sampled.top = self.spare.pop().unwrap_or_default();
                sampled.top.clear();
                sampled.top.reserve(top);
            }
            let (distribution, temperature): (&[f32], f32) = match (params.logprobs_mode, kept) {
                (LogprobsMode::Raw, _) => (raw, 1.0),
                (LogprobsMode::Processed, None) => (processed, 1.0),
                (LogprobsMode::Processed, Some(kept)) => {
                    if !edited {
                        self.row.copy_from_slice(raw);
                    }
                    self.filter.mask_rest(kept, params, &mut self.row);
                    (&self.row, params.temperature)
                }
            };
            let keys = &mut self.filter.keys;
            let (logprob, rank) = logprobs::gather(distribution, temperature, token, top, keys, &mut sampled.top);
            sampled.logprob = Some(logprob);
            sampled.rank = rank;
        }
        Ok(sampled)
    }

    /// Returns the row if it exists and each of its logits is finite.
    fn finite_row<'a>(&self, logits: LogitRows<'a>, row: usize) -> Result<&'a [f32], SampleError> {
        let raw = self.check_row(logits, row)?;
        softmax::first_non_finite(raw).map_or(Ok(raw), |token| Err(SampleError::NonFinite { row, token: Some(token) }))
    }

    /// Returns the row if it exists and its status allows its use.
    fn check_row<'a>(&self, logits: LogitRows<'a>, row: usize) -> Result<&'a [f32], SampleError> {
        let LogitRows { logits, vocab, status, .. } = logits;
        if vocab != self.vocab_size || vocab == 0 {
            return Err(SampleError::WrongWidth { got: vocab, expected: self.vocab_size });
        }
        let rows = (logits.len() / vocab).min(status.len());
        if row >= rows {
            return Err(SampleError::NoSuchRow { row, rows });
        }
        if status[row] != 0 {
            return Err(SampleError::NonFinite { row, token: None });
        }
        Ok(&logits[row * vocab..][..vocab])
    }
}
