//! Output types: deltas while a request is running, and the complete [`Output`].

use serde::Serialize;
use serde::ser::{SerializeSeq as _, Serializer};

use crate::num::to_u32;
use crate::sampler::TokenLogprob;

use super::RequestId;

/// Token or string that ended a choice with [`FinishReason::Stop`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum StopMatch {
    /// One of the model's end-of-sequence tokens.
    Eos(u32),
    /// One of the request's `stop_token_ids`.
    Token(u32),
    /// One of the request's `stop` strings.
    Text(String),
}

/// Reason why a choice ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "reason", rename_all = "snake_case")]
#[non_exhaustive]
pub enum FinishReason {
    /// An end-of-sequence token, a stop token or a stop string.
    Stop {
        /// The token or string that matched.
        matched: StopMatch,
    },
    /// The choice reached a length limit.
    ///
    /// The limit is `max_tokens`, the model's maximum length, or the size of the whole KV pool.
    Length,
    /// The caller cancelled the request.
    Cancelled,
    /// The request's deadline passed.
    Deadline,
}

impl FinishReason {
    /// Returns the reason as one word: `stop`, `length`, `cancelled` or `deadline`.
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

/// Log-probabilities of consecutive tokens, in flat lists: each token's own, and those of the most likely tokens.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Logprobs {
    chosen: Vec<TokenLogprob>,
    ranks: Vec<u32>,
    top: Vec<TokenLogprob>,
    /// End of the slice of `top` that belongs to token `i`.
    ends: Vec<usize>,
}

/// Log-probabilities at one position.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LogprobsAt<'a> {
    /// The token at this position, with its log-probability.
    pub chosen: TokenLogprob,
    /// Rank of this token in the distribution; 1 = most likely.
    pub rank: u32,
    /// The most likely tokens at this position, most likely first; as many as the request asked for.
    pub top: &'a [TokenLogprob],
}

impl Logprobs {
    /// Returns the number of tokens.
    pub fn len(&self) -> usize {
        self.chosen.len()
    }

    /// Returns whether there are no tokens.
    pub fn is_empty(&self) -> bool {
        self.chosen.is_empty()
    }

    /// Returns the log-probabilities at a position, or `None` after the end.
    pub fn get(&self, index: usize) -> Option<LogprobsAt<'_>> {
        let end = *self.ends.get(index)?;
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        Some(LogprobsAt { chosen: self.chosen[index], rank: self.ranks[index], top: &self.top[start..end] })
    }

    /// Returns an iterator over the tokens in order, with one entry per token.
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

/// Serialized as a list with one entry per token, in order.
impl Serialize for Logprobs {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut list = serializer.serialize_seq(Some(self.len()))?;
        for entry in self.iter() {
            list.serialize_element(&entry)?;
        }
        list.end()
    }
}

/// Information that is available once the prompt has been computed.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct PromptInfo {
    /// Number of tokens of the prompt.
    pub prompt_tokens: u32,
    /// Number of those tokens whose keys and values came from the prefix cache.
    pub cached_tokens: u32,
    /// Time from submission to the first token of choice 0, in microseconds.
    pub time_to_first_token_us: u64,
    /// Log-probabilities of the prompt, if the request asked for them.
    ///
    /// Entry `i` belongs to prompt token `i + 1`, since no token precedes the first one.
    pub logprobs: Option<Logprobs>,
}

/// New output of one choice since its last delta.
///
/// Unread deltas are merged, so one delta may contain several tokens. The text of a token may arrive later than its id:
/// a character is published with its last byte, and text that may still grow into a stop string is held back.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Delta {
    /// Index of the choice, 0 to `n - 1`.
    pub index: u32,
    /// New text; empty if the engine has no vocabulary.
    pub text: String,
    /// New tokens.
    ///
    /// The token on which the choice ended is in the finish reason. It is not in this list, unless it is a stop token
    /// and the request includes stops in the output.
    pub token_ids: Vec<u32>,
    /// One entry for each of `token_ids`, if the request asked for log-probabilities.
    pub logprobs: Option<Logprobs>,
    /// Finish reason; set in the last delta of the choice.
    pub finish_reason: Option<FinishReason>,
    /// Information on the prompt; set in the first delta of choice 0 after the prompt has been computed.
    pub prompt: Option<PromptInfo>,
    /// Token counts and times; set in the last delta of the request.
    pub usage: Option<Usage>,
}

/// Complete output of one choice.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Choice {
    /// Index of the choice, 0 to `n - 1`.
    pub index: u32,
    /// Complete text.
    pub text: String,
    /// All output tokens.
    pub token_ids: Vec<u32>,
    /// One entry per token, if the request asked for log-probabilities.
    pub logprobs: Option<Logprobs>,
    /// Reason why the choice ended.
    pub finish_reason: FinishReason,
}

/// Token counts and times of a request. The engine's clock measures the times.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Usage {
    /// Number of tokens of the prompt.
    pub prompt_tokens: u32,
    /// Number of those tokens that came from the prefix cache.
    pub cached_tokens: u32,
    /// Number of tokens of all choices together: the sum of the lengths of their `token_ids`.
    pub generated_tokens: u32,
    /// Time from submission to the request's first step, in microseconds; to its end if it never ran.
    pub queue_us: u64,
    /// Time from the first step to the first token, in microseconds; 0 if the request never ran.
    pub prefill_us: u64,
    /// Time from the first token to the end of the last choice, in microseconds; 0 without a token.
    pub decode_us: u64,
    /// Time from submission to the first token, in microseconds; `None` without a token.
    pub time_to_first_token_us: Option<u64>,
}

/// Complete output of a request.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Output {
    /// Id of the request.
    pub id: RequestId,
    /// Prompt as the model received it.
    pub prompt_token_ids: Vec<u32>,
    /// Log-probabilities of the prompt, if the request asked for them; entry `i` belongs to prompt token `i + 1`.
    pub prompt_logprobs: Option<Logprobs>,
    /// Output of the choices, by index.
    pub choices: Vec<Choice>,
    /// Token counts and times.
    pub usage: Usage,
}

/// Builds an [`Output`] from deltas, for a host that streams and also needs the complete output.
///
/// ```
/// # use ascend_llm::{Engine, Request, SamplingParams};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # if cfg!(not(feature = "text")) { return Ok(()); }
/// # let engine = Engine::builder("examples/models/fable-f16.gguf").build()?;
/// let mut handle = engine.submit(Request::text("Once").with_sampling(SamplingParams::greedy().with_max_tokens(8)))?;
/// let mut output = handle.output_builder();
/// while let Some(delta) = handle.recv() {
///     let delta = delta?;
///     print!("{}", delta.text);
///     output.push(&delta);
/// }
/// assert_eq!(output.finish().choices[0].token_ids.len(), 8);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct OutputBuilder {
    id: RequestId,
    prompt_token_ids: Vec<u32>,
    choices: Vec<Delta>,
}

impl OutputBuilder {
    pub(super) fn new(id: RequestId, prompt_token_ids: Vec<u32>, choices: usize) -> Self {
        let choices = (0..to_u32(choices)).map(|index| Delta { index, ..Delta::default() }).collect();
        Self { id, prompt_token_ids, choices }
    }

    /// Adds a delta.
    ///
    /// The deltas of a choice must be added in the order in which they were received. A delta whose index is not one of
    /// the request's choices is ignored.
    pub fn push(&mut self, delta: &Delta) {
        let Some(whole) = self.choices.get_mut(delta.index as usize) else { return };
        whole.text.push_str(&delta.text);
        whole.token_ids.extend_from_slice(&delta.token_ids);
        if let Some(logprobs) = &delta.logprobs {
            whole.logprobs.get_or_insert_default().append(logprobs);
        }
        if delta.finish_reason.is_some() {
            whole.finish_reason.clone_from(&delta.finish_reason);
        }
        if delta.prompt.is_some() {
            whole.prompt.clone_from(&delta.prompt);
        }
        whole.usage = delta.usage.or(whole.usage);
    }

    /// Returns the output so far.
    ///
    /// A choice without its last delta counts as cancelled. Without the request's last delta, the usage contains the
    /// counts and the time to first token that are known, and no other times.
    #[must_use]
    pub fn finish(mut self) -> Output {
        let prompt = self.choices.first_mut().and_then(|choice| choice.prompt.take());
        let usage = self.choices.iter().find_map(|choice| choice.usage).unwrap_or_else(|| Usage {
            prompt_tokens: to_u32(self.prompt_token_ids.len()),
            cached_tokens: prompt.as_ref().map_or(0, |prompt| prompt.cached_tokens),
            generated_tokens: self.choices.iter().map(|choice| to_u32(choice.token_ids.len())).sum(),
            time_to_first_token_us: prompt.as_ref().map(|prompt| prompt.time_to_first_token_us),
            ..Usage::default()
        });
        let choices = self.choices.into_iter().map(|whole| Choice {
            index: whole.index,
            text: whole.text,
            token_ids: whole.token_ids,
            logprobs: whole.logprobs,
            finish_reason: whole.finish_reason.unwrap_or(FinishReason::Cancelled),
        });
        Output {
            id: self.id,
            prompt_token_ids: self.prompt_token_ids,
            prompt_logprobs: prompt.and_then(|prompt| prompt.logprobs),
            choices: choices.collect(),
            usage,
        }
    }
}
