//! From a row of logits to the next token.
//!
//! A [`Sampler`] is scratch space and nothing more: what a row gives depends on that row, its parameters, its history
//! and its seed, never on other rows, on calls before, on a clock or on a machine's vector width. The order of work
//! stands at [`SamplingParams`]. A row that cannot be sampled (non-finite logits, everything masked) gives an error in
//! its place and leaves the others alone. After [`Sampler::new`] nothing is allocated, except the lists of
//! log-probabilities people ask for, which are taken over from the previous call's answers where these are passed in.

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

/// One token to sample.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct SampleRow<'a> {
    /// Row of the logits.
    pub row: usize,
    /// How to sample. Ids and lengths are the engine's to check; numbers out of range give an error.
    pub params: &'a SamplingParams,
    /// Tokens of the prompt.
    pub prompt: &'a [u32],
    /// Tokens put out so far. Their number is the position of the draw.
    pub output: &'a [u32],
    /// The model's end-of-sequence ids; masked while `output` is shorter than `min_tokens`, as are `stop_token_ids`.
    pub eos_ids: &'a [u32],
    /// Token sequences that must not come out.
    pub bad_words: &'a [Vec<u32>],
    /// Seed of the request.
    pub seed: u64,
    /// Which of the request's `n` answers this is.
    pub choice: u32,
}

impl<'a> SampleRow<'a> {
    /// The first choice of a request with seed 0, without end-of-sequence ids and bad words.
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

/// Whether every token of a request is the one with the largest logit, the lowest id of equals, and nothing else of its rows
/// is looked at: greedy, and neither edited nor asked for log-probabilities, whatever has been put out.
pub(crate) fn is_argmax_only(params: &SamplingParams, eos_ids: &[u32], bad_words: &[Vec<u32>]) -> bool {
    params.is_greedy() && params.logprobs.is_none() && Penalties::never_wanted(params, eos_ids, bad_words)
}

/// A sampled token.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Sampled {
    /// The token.
    pub token: u32,
    /// Its log-probability, if asked for.
    pub logprob: Option<f32>,
    /// The best tokens with theirs, best first, as many as asked for; masked ones are left out.
    pub top: Vec<TokenLogprob>,
    /// The token's place in the distribution `logprob` speaks of, 1 for the best; 0 unless log-probabilities were asked
    /// for.
    pub rank: u32,
}

/// Why a row gives no token.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SampleError {
    /// A logit is infinite or NaN: the model's arithmetic overflowed.
    #[error("logits of row {row} are not finite{}", IdSuffix(*.token))]
    NonFinite {
        /// The row.
        row: usize,
        /// First such entry, if the sampler found it; `None` if the device reported it.
        token: Option<u32>,
    },
    /// A parameter breaks a rule.
    #[error(transparent)]
    Params(#[from] ParamError),
    /// Masks leave no token.
    #[error("no token is left: allowed_token_ids, bad_words and min_tokens mask the whole vocabulary")]
    NoTokenLeft,
    /// The logits have no such row, or no status for it.
    #[error("row {row} asked for, but there are {rows} rows of logits")]
    NoSuchRow {
        /// The row.
        row: usize,
        /// Rows there are.
        rows: usize,
    },
    /// The logits are of another vocabulary.
    #[error("rows of {got} logits, expected {expected}, the vocabulary the sampler was made for")]
    WrongWidth {
        /// Width given.
        got: usize,
        /// Width wanted.
        expected: usize,
    },
    /// A token past the vocabulary.
    #[error("token {token} is past the vocabulary of {vocab_size}")]
    NoSuchToken {
        /// The token.
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

/// Samples rows of logits; holds scratch of the vocabulary's size and no state.
#[derive(Debug)]
pub struct Sampler {
    vocab_size: usize,
    /// The edited copy of the row at hand.
    row: Vec<f32>,
    penalties: Penalties,
    filter: Filter,
    /// Lists of log-probabilities to use again.
    spare: Vec<Vec<TokenLogprob>>,
}

impl Sampler {
    /// A sampler for one vocabulary; about 25 bytes a token of it.
    pub fn new(vocab_size: usize) -> Self {
        Self {
            vocab_size,
            row: vec![0.0; vocab_size],
            penalties: Penalties::new(vocab_size),
            filter: Filter::new(vocab_size),
            spare: Vec::new(),
        }
    }

    /// Samples `rows`; `out` is emptied and gets one answer a row, in the same order.
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

    /// Log-probability and rank of the prompt's `next_token` after the row's token, and the `top` best tokens.
    ///
    /// Always of the untouched logits, whatever the request's parameters are.
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
        let edited = Penalties::wanted(row);
        let plain = params.is_greedy() && params.logprobs.is_none() && !edited;
        // The model has looked at every logit of the row: no need to do so again.
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
        let best = softmax::top_logit(processed).ok_or(SampleError::NoTokenLeft)?;

        let mut kept = None;
        let token = if params.is_greedy() {
            best.id
        } else {
            let narrowed = self.filter.narrow(processed, best, params);
            kept = Some(narrowed);
            self.filter.draw(narrowed, rng::uniform(row.seed, row.choice, row.output.len() as u64))
        };

        let mut sampled = Sampled { token, logprob: None, top: Vec::new(), rank: 0 };
        if let Some(top) = params.logprobs {
            let top = (top as usize).min(self.vocab_size);
            if top > 0 {
                sampled.top = self.spare.pop().unwrap_or_default();
                sampled.top.clear();
                sampled.top.reserve(top);
            }
            let (of, temperature): (&[f32], f32) = match (params.logprobs_mode, kept) {
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
            let (logprob, rank) = logprobs::gather(of, temperature, token, top, keys, &mut sampled.top);
            sampled.logprob = Some(logprob);
            sampled.rank = rank;
        }
        Ok(sampled)
    }

    /// The row, if there is one and every entry can be used.
    fn finite_row<'a>(&self, logits: LogitRows<'a>, row: usize) -> Result<&'a [f32], SampleError> {
        let raw = self.check_row(logits, row)?;
        softmax::first_non_finite(raw).map_or(Ok(raw), |token| Err(SampleError::NonFinite { row, token: Some(token) }))
    }

    /// The row, if there is one and its status allows its use.
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
