//! What a caller gets back: deltas while a request runs, and the whole of it as an [`Output`].

use std::time::Duration;

use crate::sampler::TokenLogprob;

use super::RequestId;

/// What a choice ended on when it ended with [`FinishReason::Stop`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StopMatch {
    /// One of the model's own end-of-sequence tokens.
    Eos(u32),
    /// One of the request's `stop_token_ids`.
    Token(u32),
    /// One of the request's `stop` strings.
    Text(String),
}

/// Why a choice ended.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FinishReason {
    /// An end-of-sequence token, a stop token or a stop string.
    Stop {
        /// Which.
        matched: StopMatch,
    },
    /// `max_tokens`, the model's length or the whole KV pool was used up.
    Length,
    /// The caller cancelled the request.
    Cancelled,
    /// The request's deadline passed.
    Deadline,
}

impl FinishReason {
    /// The reason as one word: `stop`, `length`, `cancelled` or `deadline`.
    #[must_use]
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::Stop { .. } => "stop",
            Self::Length => "length",
            Self::Cancelled => "cancelled",
            Self::Deadline => "deadline",
        }
    }
}

/// Log-probabilities of a run of tokens, kept flat: each token's own, and the most likely ones in its place.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Logprobs {
    chosen: Vec<TokenLogprob>,
    ranks: Vec<u32>,
    top: Vec<TokenLogprob>,
    /// End of token i's slice of `top`.
    ends: Vec<usize>,
}

/// Log-probabilities in one place.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogprobsAt<'a> {
    /// The token that stands there.
    pub chosen: TokenLogprob,
    /// Its rank in the distribution, 1 = most likely.
    pub rank: u32,
    /// The most likely tokens there, best first, as many as were asked for.
    pub top: &'a [TokenLogprob],
}

impl Logprobs {
    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.chosen.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.chosen.is_empty()
    }

    /// The token's log-probabilities, `None` past the end.
    pub fn get(&self, index: usize) -> Option<LogprobsAt<'_>> {
        let end = *self.ends.get(index)?;
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        Some(LogprobsAt { chosen: self.chosen[index], rank: self.ranks[index], top: &self.top[start..end] })
    }

    /// One entry a token, in order.
    pub fn iter(&self) -> impl Iterator<Item = LogprobsAt<'_>> {
        (0..self.len()).filter_map(|index| self.get(index))
    }

    pub(crate) fn reserve(&mut self, tokens: usize, top: usize) {
        self.chosen.reserve(tokens);
        self.ranks.reserve(tokens);
        self.ends.reserve(tokens);
        self.top.reserve(tokens.saturating_mul(top));
    }

    pub(crate) fn push(&mut self, chosen: TokenLogprob, rank: u32, top: &[TokenLogprob]) {
        self.chosen.push(chosen);
        self.ranks.push(rank);
        self.top.extend_from_slice(top);
        self.ends.push(self.top.len());
    }

    pub(crate) fn append(&mut self, other: &Self) {
        let before = self.top.len();
        self.chosen.extend_from_slice(&other.chosen);
        self.ranks.extend_from_slice(&other.ranks);
        self.top.extend_from_slice(&other.top);
        self.ends.extend(other.ends.iter().map(|end| before + end));
    }

    pub(crate) fn clear(&mut self) {
        self.chosen.clear();
        self.ranks.clear();
        self.top.clear();
        self.ends.clear();
    }
}

/// What is known once the prompt has been computed.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct PromptInfo {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Of these, tokens whose keys and values came from the prefix cache.
    pub cached_tokens: u32,
    /// From submission to the first token of choice 0.
    pub time_to_first_token: Duration,
    /// If asked for: entry `i` belongs to prompt token `i + 1`, since nothing precedes the first.
    pub logprobs: Option<Logprobs>,
}

/// What came since the last delta of the same choice.
///
/// Deltas that nobody has read yet are merged, so one may hold several tokens. The text of a token may come later than
/// its id: a character is sent with its last byte, and text that may still grow into a stop string is held back.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Delta {
    /// The choice, 0 to `n - 1`.
    pub index: u32,
    /// New text; empty without a vocabulary.
    pub text: String,
    /// New tokens. The token a choice ended on is named in the finish reason and is not among them, unless it is a stop
    /// token and the request includes stops in the output.
    pub token_ids: Vec<u32>,
    /// One entry for each of `token_ids`, if the request asked for any.
    pub logprobs: Option<Logprobs>,
    /// Set on the last delta of the choice.
    pub finish_reason: Option<FinishReason>,
    /// Set on the first delta of choice 0 that comes of a computed prompt.
    pub prompt: Option<PromptInfo>,
}

/// One finished answer.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Choice {
    /// 0 to `n - 1`.
    pub index: u32,
    /// The whole text.
    pub text: String,
    /// All its tokens.
    pub token_ids: Vec<u32>,
    /// One entry a token, if asked for.
    pub logprobs: Option<Logprobs>,
    /// Why it ended.
    pub finish_reason: FinishReason,
}

/// What a request cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Of these, tokens from the prefix cache.
    pub cached_tokens: u32,
    /// Tokens of all choices together, as many as their `token_ids` hold.
    pub generated_tokens: u32,
    /// From submission to the first token; `None` if there was none.
    pub time_to_first_token: Option<Duration>,
}

/// A whole answered request.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Output {
    /// The request.
    pub id: RequestId,
    /// The prompt as the model saw it.
    pub prompt_token_ids: Vec<u32>,
    /// If asked for: entry `i` belongs to prompt token `i + 1`.
    pub prompt_logprobs: Option<Logprobs>,
    /// The answers, by index.
    pub choices: Vec<Choice>,
    /// What it cost.
    pub usage: Usage,
}
