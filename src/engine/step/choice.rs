//! State of one choice: its output so far, and when it ends.
//!
//! [`ChoiceState`] accepts sampled tokens one at a time and decides which text may be published. It publishes only
//! complete characters, no text that may still become a stop string, and no text of the token on which the choice ends.
//! These rules end a choice, in this order:
//!
//! 1. an end-of-sequence token of the model, unless `ignore_eos` is set;
//! 2. one of `stop_token_ids`;
//! 3. a stop string whose last byte comes from a token after the first `min_tokens` tokens;
//! 4. the maximum length.
//!
//! At the end, the text that was held back is published. A matched stop string is the exception: it truncates the text.

use crate::kv_cache::SeqId;
use crate::num::to_u32;
use crate::sampler::{Sampled, SamplingParams, TokenLogprob};
use crate::text::{Detokenizer, Vocabulary};

use super::stop::StopChecker;
use crate::engine::request::output::{FinishReason, Logprobs, StopMatch};

/// Capacity for the text of one token, in bytes; a longer text costs one allocation.
const TOKEN_TEXT_BYTES: usize = 256;

/// Rules that decide whether a sequence ends.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StopRules<'a> {
    pub params: &'a SamplingParams,
    /// End-of-sequence tokens of the model; empty if the request ignores them.
    pub eos_ids: &'a [u32],
    pub max_tokens: u32,
    pub vocabulary: Option<&'a dyn Vocabulary>,
}

/// The part of a sampled token that is published, in addition to the text in [`ChoiceState::text`].
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Accepted {
    pub token: Option<u32>,
    pub finish: Option<FinishReason>,
}

/// Phase of a choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// The choice is not scheduled yet.
    ///
    /// It forks from choice 0 at that choice's first token, so that the prompt is computed once.
    Unforked,
    Open,
    Ended,
}

#[derive(Debug)]
pub(crate) struct ChoiceState {
    pub seq: SeqId,
    pub choice: u32,
    pub phase: Phase,
    /// Whether the choice has been part of a step.
    pub started: bool,
    /// Number of published tokens.
    generated_tokens: u32,
    /// Whether no token has been sampled yet.
    no_token_yet: bool,
    text: Option<TextStream>,
    logprobs: Logprobs,
    prompt_logprobs: Option<Logprobs>,
}

/// Text that is decoded but not published yet.
#[derive(Debug)]
struct TextStream {
    detokenizer: Detokenizer,
    stops: StopChecker,
    decoded: String,
    publishable: String,
}

impl ChoiceState {
    pub fn new(seq: SeqId, choice: u32, phase: Phase, params: &SamplingParams, with_text: bool) -> Self {
        Self {
            seq,
            choice,
            phase,
            started: false,
            generated_tokens: 0,
            no_token_yet: true,
            text: with_text.then(|| TextStream {
                detokenizer: Detokenizer::continuing(params.skip_special_tokens),
                stops: StopChecker::new(&params.stop, params.include_stop_str_in_output),
                decoded: String::with_capacity(TOKEN_TEXT_BYTES),
                publishable: String::with_capacity(TOKEN_TEXT_BYTES),
            }),
            logprobs: Logprobs::default(),
            // All choices have the same prompt, so only choice 0 computes its log-probabilities.
            prompt_logprobs: (choice == 0 && params.prompt_logprobs.is_some()).then(Logprobs::default),
        }
    }

    pub fn generated_tokens(&self) -> u32 {
        self.generated_tokens
    }

    /// Returns whether the next token is the first one; the prompt's results are published with it.
    pub fn is_first_token(&self) -> bool {
        self.no_token_yet
    }

    /// Returns the position of the first prompt row whose logits are still needed; `None` if no more are needed.
    pub fn prompt_rows_from(&self) -> Option<u32> {
        self.prompt_logprobs.as_ref().map(|done| to_u32(done.len()))
    }

    pub fn reserve_prompt_logprobs(&mut self, tokens: usize, top: usize) {
        if let Some(logprobs) = &mut self.prompt_logprobs {
            logprobs.reserve(tokens, top);
        }
    }

    /// Records the next log-probability of the prompt.
    pub fn push_prompt_logprob(&mut self, chosen: TokenLogprob, rank: u32, top: &[TokenLogprob]) {
        if let Some(logprobs) = &mut self.prompt_logprobs {
            logprobs.push(chosen, rank, top);
        }
    }

    /// Takes the log-probabilities of the prompt. Call it once they are complete.
    pub fn take_prompt_logprobs(&mut self) -> Option<Logprobs> {
        self.prompt_logprobs.take()
    }

    /// Returns the text to publish now.
    pub fn text(&self) -> &str {
        self.text.as_ref().map_or("", |text| &text.publishable)
    }

    /// Returns the log-probabilities of the token to publish now.
    pub fn logprobs(&self) -> &Logprobs {
        &self.logprobs
    }

    /// Accepts the next sampled token.
    pub fn accept(&mut self, rules: &StopRules<'_>, sampled: &Sampled) -> Accepted {
        self.no_token_yet = false;
        self.logprobs.clear();
        self.clear_text();
        let token = sampled.token;
        if rules.eos_ids.contains(&token) {
            self.flush();
            return Accepted { token: None, finish: Some(FinishReason::Stop { matched: StopMatch::Eos(token) }) };
        }
        if rules.params.stop_token_ids.contains(&token) {
            let finish = Some(FinishReason::Stop { matched: StopMatch::Token(token) });
            if !rules.params.include_stop_str_in_output {
                self.flush();
                return Accepted { token: None, finish };
            }
            self.record(sampled, rules);
            if let Some(text) = &mut self.text {
                text.pass_through();
            }
            self.flush();
            return Accepted { token: Some(token), finish };
        }

        self.record(sampled, rules);
        let mut finish = None;
        if let Some(text) = &mut self.text {
            if self.generated_tokens <= rules.params.min_tokens {
                text.pass_through();
            } else if let Some(index) = text.stops.push(&text.decoded, &mut text.publishable) {
                let matched = StopMatch::Text(rules.params.stop[index].clone());
                return Accepted { token: Some(token), finish: Some(FinishReason::Stop { matched }) };
            }
        }
        if self.generated_tokens >= rules.max_tokens {
            finish = Some(FinishReason::Length);
            self.flush();
        }
        Accepted { token: Some(token), finish }
    }

    /// Ends the sequence for a reason other than its output: text that was held back becomes publishable.
    pub fn close(&mut self) {
        self.logprobs.clear();
        self.clear_text();
        self.flush();
    }

    fn record(&mut self, sampled: &Sampled, rules: &StopRules<'_>) {
        self.generated_tokens += 1;
        if let Some(logprob) = sampled.logprob.filter(|_| rules.params.logprobs.is_some()) {
            self.logprobs.push(TokenLogprob { token: sampled.token, logprob }, sampled.rank, &sampled.top);
        }
        if let (Some(text), Some(vocabulary)) = (&mut self.text, rules.vocabulary) {
            text.detokenizer.push(vocabulary, sampled.token, &mut text.decoded);
        }
    }

    fn clear_text(&mut self) {
        if let Some(text) = &mut self.text {
            text.decoded.clear();
            text.publishable.clear();
        }
    }

    fn flush(&mut self) {
        if let Some(text) = &mut self.text {
            text.decoded.clear();
            text.detokenizer.flush(&mut text.decoded);
            // A stop string that matches here truncates the flushed text, but the finish reason stays the one found
            // first.
            if text.stops.push(&text.decoded, &mut text.publishable).is_none() {
                text.stops.flush(&mut text.publishable);
            }
        }
    }
}

impl TextStream {
    /// Makes the decoded text publishable without searching it for stop strings.
    fn pass_through(&mut self) {
        self.stops.pass(&self.decoded, &mut self.publishable);
    }
}
