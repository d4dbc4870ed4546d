//! State of one choice of a request: its output so far, and its stop rules.
//!
//! Accepts sampled tokens one by one and reports what may be published: text of whole characters only, without text
//! that may still become a stop string, and without the token that ends the choice. Stop rules, in this order:
//!
//! 1. an end-of-sequence token of the model ends the choice, unless `ignore_eos`;
//! 2. one of `stop_token_ids` ends it;
//! 3. a stop string that ends in the text of a token after the first `min_tokens` ends it;
//! 4. the length limit ends it.
//!
//! Held-back text is flushed at every end except a matched stop string, which truncates the text.

use crate::kv_cache::SeqId;
use crate::num::to_u32;
use crate::sampler::{Sampled, SamplingParams, TokenLogprob};
use crate::text::{Detokenizer, Vocabulary};

use super::stop::StopChecker;
use crate::engine::request::output::{FinishReason, Logprobs, StopMatch};

/// Bytes of one token's text that are decoded without an allocation; longer tokens cost one.
const TOKEN_TEXT_BYTES: usize = 256;

/// Rules that end a choice.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StopRules<'a> {
    pub params: &'a SamplingParams,
    /// End-of-sequence tokens of the model; empty if the request ignores them.
    pub eos_ids: &'a [u32],
    pub max_tokens: u32,
    pub vocabulary: Option<&'a dyn Vocabulary>,
}

/// Parts of a sampled token to publish, in addition to [`ChoiceState::text`].
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Accepted {
    pub token: Option<u32>,
    pub finish: Option<FinishReason>,
}

/// How far a choice is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Not scheduled yet: the choice forks off choice 0 at the first token, so that the prompt is computed once.
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
    /// Tokens published.
    generated_tokens: u32,
    /// Whether no token has been sampled yet.
    no_token_yet: bool,
    text: Option<TextStream>,
    logprobs: Logprobs,
    prompt_logprobs: Option<Logprobs>,
}

/// End of the text: decoded but not published.
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
            // All choices share the prompt, so only choice 0 collects its log-probabilities.
            prompt_logprobs: (choice == 0 && params.prompt_logprobs.is_some()).then(Logprobs::default),
        }
    }

    pub fn generated_tokens(&self) -> u32 {
        self.generated_tokens
    }

    /// Whether the next token is the first, with which the prompt's own results are published.
    pub fn is_first_token(&self) -> bool {
        self.no_token_yet
    }

    /// Position of the first prompt row whose logits are still needed; `None` if there is none.
    pub fn prompt_rows_from(&self) -> Option<u32> {
        self.prompt_logprobs.as_ref().map(|done| to_u32(done.len()))
    }

    pub fn reserve_prompt_logprobs(&mut self, tokens: usize, top: usize) {
        if let Some(logprobs) = &mut self.prompt_logprobs {
            logprobs.reserve(tokens, top);
        }
    }

    /// Records the prompt's next log-probability.
    pub fn push_prompt_logprob(&mut self, chosen: TokenLogprob, rank: u32, top: &[TokenLogprob]) {
        if let Some(logprobs) = &mut self.prompt_logprobs {
            logprobs.push(chosen, rank, top);
        }
    }

    /// The prompt's log-probabilities, once all of them are there.
    pub fn take_prompt_logprobs(&mut self) -> Option<Logprobs> {
        self.prompt_logprobs.take()
    }

    /// Text to publish now.
    pub fn text(&self) -> &str {
        self.text.as_ref().map_or("", |text| &text.publishable)
    }

    /// Log-probabilities of the token to publish now.
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

    /// Ends the choice for a reason other than its tokens; the held-back text becomes publishable.
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
            // A match here truncates the flushed text; the finish reason stays the first one found.
            if text.stops.push(&text.decoded, &mut text.publishable).is_none() {
                text.stops.flush(&mut text.publishable);
            }
        }
    }
}

impl TextStream {
    /// Passes decoded text on without looking for stop strings.
    fn pass_through(&mut self) {
        self.stops.pass(&self.decoded, &mut self.publishable);
    }
}
