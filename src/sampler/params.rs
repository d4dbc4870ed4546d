//! Sampling parameters of a request, and the rules that they must satisfy.
//!
//! Names and defaults are those of vLLM. Each field either has its full effect or causes an error: no value is silently
//! clamped, rounded or ignored. [`SamplingParams::validate`] returns an error with the field, its value and the
//! expected value; it never panics.

use serde::de::{Deserializer, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};
use std::fmt::{self, Display};

use crate::settings::{deserialize_settings, with_methods};

/// Temperatures below this value mean greedy, as in vLLM.
pub const GREEDY_EPSILON: f32 = 1e-5;

/// Largest number of choices of a request: vLLM's default limit.
pub const MAX_N: u32 = 16_384;

/// Sampling parameters and stop conditions of a request.
///
/// The sampler applies them in this order, for every row and in every code path: non-finite check → `allowed_token_ids`
/// → bad words → `min_tokens` → `logit_bias` → repetition, frequency, presence penalty → greedy, or temperature →
/// `min_p` → `top_k` → `top_p` → sampling → log-probabilities. The temperature comes *before* the filters (vLLM's
/// order; llama.cpp applies it last by default). Each filter works on the tokens that the previous one kept, and
/// `top_p` works on their distribution, renormalized to a sum of 1.
///
/// Equal logits are ordered by id: greedy selects the lowest id, and `top_k` keeps exactly `top_k` tokens, lowest ids
/// first.
///
/// In JSON, the fields have the same names. Absent fields keep their defaults, and unknown keys are an error, even if
/// the struct is flattened into a struct of the application (`#[serde(flatten)]`, at most once per struct):
///
/// ```
/// # use ascend_llm::SamplingParams;
/// #[derive(serde::Deserialize)]
/// struct Body {
///     prompt: String,
///     #[serde(flatten)]
///     sampling: SamplingParams,
/// }
/// let body: Body = serde_json::from_str(r#"{"prompt": "Once", "temperature": 0.2}"#).unwrap();
/// assert_eq!(body.sampling, SamplingParams::default().with_temperature(0.2));
/// let error = serde_json::from_str::<Body>(r#"{"prompt": "Once", "temprature": 0.2}"#).err().unwrap();
/// assert!(error.to_string().contains("unknown field `temprature`"));
/// ```
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct SamplingParams {
    /// Temperature, `0..=2`; below [`GREEDY_EPSILON`] the argmax is selected, and `top_k`, `top_p`, `min_p` and `seed`
    /// have no effect.
    pub temperature: f32,
    /// Keeps the `top_k` most likely tokens; 0 and −1 mean off.
    pub top_k: i32,
    /// Keeps the most likely tokens until their probabilities sum to `top_p`; above 0 and up to 1, 1 means off.
    pub top_p: f32,
    /// Keeps the tokens that are at least `min_p` times as likely as the most likely one; `0..=1`, 0 means off.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens in the prompt or the output, once per id; above 0, 1
    /// means off.
    pub repetition_penalty: f32,
    /// Subtracted from the logit of each token that occurs in the output; `-2..=2`.
    pub presence_penalty: f32,
    /// Subtracted from the logit of a token once per occurrence in the output; `-2..=2`.
    pub frequency_penalty: f32,
    /// Seed that makes sampling reproducible; if it is `None`, the engine chooses one.
    pub seed: Option<u64>,
    /// Number of choices; must be 1 if the request is greedy, because greedy choices are all equal.
    pub n: u32,
    /// Largest number of output tokens; `None` means up to the model's length limit.
    pub max_tokens: Option<u32>,
    /// Smallest number of output tokens: until it is reached, end-of-sequence ids and `stop_token_ids` are masked.
    pub min_tokens: u32,
    /// Stop strings: texts that end the output.
    pub stop: Vec<String>,
    /// Whether the stop string is part of the output.
    pub include_stop_str_in_output: bool,
    /// Token ids that end the output, in addition to the model's end-of-sequence ids.
    pub stop_token_ids: Vec<u32>,
    /// Whether the model's end-of-sequence ids do not end the output.
    pub ignore_eos: bool,
    /// Requests log-probabilities for each output token: of the token itself, and of this number of most likely tokens.
    pub logprobs: Option<u32>,
    /// Requests the same log-probabilities for each token of the prompt.
    pub prompt_logprobs: Option<u32>,
    /// Distribution from which `logprobs` are computed.
    pub logprobs_mode: LogprobsMode,
    /// Numbers added to the logits of ids, each in `-100..=100`, at most one per id. JSON: a list of pairs or an
    /// object.
    pub logit_bias: Vec<(u32, f32)>,
    /// The only ids that can be sampled; all other ids are masked.
    pub allowed_token_ids: Option<Vec<u32>>,
    /// Texts that must not be generated: the last token of such a text is masked when the output ends with the tokens
    /// before it.
    pub bad_words: Vec<String>,
    /// Whether special tokens are left out of the output text.
    pub skip_special_tokens: bool,
}

/// Distribution from which log-probabilities are computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum LogprobsMode {
    /// The model's distribution: log-softmax of the unmodified logits.
    #[default]
    #[serde(alias = "raw_logprobs")]
    Raw,
    /// The sampled distribution: after masks, bias, penalties, temperature and filters. For a greedy request, after
    /// masks, bias and penalties only.
    #[serde(alias = "processed_logprobs")]
    Processed,
}

/// Limits of the engine against which [`SamplingParams::validate`] checks a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ParamLimits {
    /// Number of ids in the model's vocabulary.
    pub vocab_size: u32,
    /// Largest length of a sequence in tokens, prompt and output together.
    pub max_model_len: u32,
    /// Largest number of log-probabilities per token.
    pub max_logprobs: u32,
    /// Whether the engine has a tokenizer, which converts text to tokens and back.
    pub has_vocabulary: bool,
}

impl ParamLimits {
    /// Creates the limits of an engine without a tokenizer and without log-probabilities.
    pub const fn new(vocab_size: u32, max_model_len: u32) -> Self {
        Self { vocab_size, max_model_len, max_logprobs: 0, has_vocabulary: false }
    }

    with_methods! {
        value {
            vocab_size with_vocab_size: u32,
            max_model_len with_max_model_len: u32,
            max_logprobs with_max_logprobs: u32,
            has_vocabulary with_has_vocabulary: bool,
        }
    }
}

/// Parameter that violates a rule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: got {value}, expected {expected}")]
#[non_exhaustive]
pub struct ParamError {
    /// Name of the field, as in [`SamplingParams`].
    pub field: &'static str,
    /// Value of the field.
    pub value: String,
    /// Description of the valid values.
    pub expected: String,
}

impl ParamError {
    /// Creates an error for the value of `field`; `expected` describes the valid values.
    pub fn new(field: &'static str, value: impl ToString, expected: impl Into<String>) -> Self {
        Self { field, value: value.to_string(), expected: expected.into() }
    }
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            seed: None,
            n: 1,
            max_tokens: None,
            min_tokens: 0,
            stop: Vec::new(),
            include_stop_str_in_output: false,
            stop_token_ids: Vec::new(),
            ignore_eos: false,
            logprobs: None,
            prompt_logprobs: None,
            logprobs_mode: LogprobsMode::Raw,
            logit_bias: Vec::new(),
            allowed_token_ids: None,
            bad_words: Vec::new(),
            skip_special_tokens: true,
        }
    }
}

impl SamplingParams {
    with_methods! {
        value {
            temperature with_temperature: f32,
            top_k with_top_k: i32,
            top_p with_top_p: f32,
            min_p with_min_p: f32,
            repetition_penalty with_repetition_penalty: f32,
            presence_penalty with_presence_penalty: f32,
            frequency_penalty with_frequency_penalty: f32,
            n with_n: u32,
            min_tokens with_min_tokens: u32,
            include_stop_str_in_output with_include_stop_str_in_output: bool,
            ignore_eos with_ignore_eos: bool,
            logprobs_mode with_logprobs_mode: LogprobsMode,
            skip_special_tokens with_skip_special_tokens: bool,
        }
        option {
            seed with_seed: u64,
            max_tokens with_max_tokens: u32,
            logprobs with_logprobs: u32,
            prompt_logprobs with_prompt_logprobs: u32,
        }
        list {
            stop_token_ids with_stop_token_ids: u32,
            logit_bias with_logit_bias: (u32, f32),
        }
        optional_list { allowed_token_ids with_allowed_token_ids: u32 }
        texts {
            stop with_stop: String,
            bad_words with_bad_words: String,
        }
    }

    /// Creates parameters that select the argmax at each step; all other fields have their defaults.
    pub fn greedy() -> Self {
        Self { temperature: 0.0, ..Self::default() }
    }

    /// Returns whether the request is greedy: the argmax is selected, no token is sampled.
    pub fn is_greedy(&self) -> bool {
        self.temperature < GREEDY_EPSILON
    }

    /// Checks every rule against the limits of an engine.
    ///
    /// # Errors
    /// A [`ParamError`] for the first rule that a field violates.
    pub fn validate(&self, limits: &ParamLimits) -> Result<(), ParamError> {
        self.check_numbers()?;
        self.check_lengths(limits)?;
        self.check_ids(limits)?;
        self.check_texts(limits)?;
        let most = limits.max_logprobs.min(limits.vocab_size);
        for (field, requested) in [("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)] {
            if let Some(requested) = requested {
                require(requested <= most, field, requested, || format!("at most {most}"))?;
            }
        }
        Ok(())
    }

    /// Checks the rules that do not depend on the engine; cheap enough for every step.
    pub(super) fn check_numbers(&self) -> Result<(), ParamError> {
        for &(id, bias) in &self.logit_bias {
            require((-100.0..=100.0).contains(&bias), "logit_bias", format_args!("{bias} for id {id}"), || {
                "finite numbers in -100..=100".into()
            })?;
        }
        // A range contains no NaN, so each of these checks rejects NaN.
        for (field, value, low, high) in [
            ("temperature", self.temperature, 0.0, 2.0),
            ("min_p", self.min_p, 0.0, 1.0),
            ("presence_penalty", self.presence_penalty, -2.0, 2.0),
            ("frequency_penalty", self.frequency_penalty, -2.0, 2.0),
        ] {
            require((low..=high).contains(&value), field, value, || format!("a finite number in {low}..={high}"))?;
        }
        require(self.top_p > 0.0 && self.top_p <= 1.0, "top_p", self.top_p, || {
            "a number above 0 and up to 1 (1 means off; to select the argmax, set temperature to 0)".into()
        })?;
        require(self.top_k >= -1, "top_k", self.top_k, || "-1 or 0 (off), or the number of tokens to keep".into())?;
        let repetition = self.repetition_penalty;
        require(repetition.is_finite() && repetition > 0.0, "repetition_penalty", repetition, || {
            "a finite number above 0 (1 means off)".into()
        })
    }

    fn check_lengths(&self, limits: &ParamLimits) -> Result<(), ParamError> {
        require((1..=MAX_N).contains(&self.n), "n", self.n, || format!("1..={MAX_N}"))?;
        require(self.n == 1 || !self.is_greedy(), "n", self.n, || {
            "1 when the temperature is 0 (greedy choices are all equal)".into()
        })?;
        if let Some(max) = self.max_tokens {
            require(max >= 1, "max_tokens", max, || {
                "at least 1 (leave it out to generate up to the model's length limit)".into()
            })?;
            require(self.min_tokens <= max, "min_tokens", self.min_tokens, || format!("at most max_tokens, {max}"))?;
        }
        // A prompt has at least one token.
        let capacity = limits.max_model_len.saturating_sub(1);
        require(self.min_tokens <= capacity, "min_tokens", self.min_tokens, || {
            format!("at most {capacity}, the largest number of output tokens under max_model_len")
        })
    }

    fn check_ids(&self, limits: &ParamLimits) -> Result<(), ParamError> {
        let size = limits.vocab_size;
        let known =
            |field, id| require(id < size, field, id, || format!("ids below {size}, the size of the vocabulary"));
        for &id in &self.stop_token_ids {
            known("stop_token_ids", id)?;
        }
        if let Some(allowed) = &self.allowed_token_ids {
            require(!allowed.is_empty(), "allowed_token_ids", "[]", || {
                "at least one id (leave it out to allow all)".into()
            })?;
            for &id in allowed {
                known("allowed_token_ids", id)?;
            }
        }
        for &(id, _) in &self.logit_bias {
            known("logit_bias", id)?;
        }
        let mut ids: Vec<u32> = self.logit_bias.iter().map(|&(id, _)| id).collect();
        ids.sort_unstable();
        for pair in ids.windows(2) {
            require(pair[0] != pair[1], "logit_bias", format_args!("id {} twice", pair[0]), || "each id once".into())?;
        }
        Ok(())
    }

    fn check_texts(&self, limits: &ParamLimits) -> Result<(), ParamError> {
        for (field, texts) in [("stop", &self.stop), ("bad_words", &self.bad_words)] {
            let Some(first) = texts.first() else { continue };
            require(limits.has_vocabulary, field, format_args!("{first:?}"), || {
                "no texts: the engine has no tokenizer (use token ids, or configure a tokenizer)".into()
            })?;
            require(texts.iter().all(|text| !text.is_empty()), field, "\"\"", || "texts that are not empty".into())?;
        }
        Ok(())
    }
}

fn require(
    holds: bool,
    field: &'static str,
    value: impl Display,
    expected: impl FnOnce() -> String,
) -> Result<(), ParamError> {
    if holds { Ok(()) } else { Err(ParamError::new(field, value, expected())) }
}

/// Deserializes `[[id, bias], …]` or, as in the `OpenAI` API, `{"id": bias, …}`.
struct PairsOrMap(Vec<(u32, f32)>);

impl<'de> Deserialize<'de> for PairsOrMap {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(PairsVisitor).map(Self)
    }
}

/// Key of the object: a token id, which JSON writes as a string.
struct IdKey(u32);

impl<'de> Deserialize<'de> for IdKey {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        use serde::de::Error as _;
        let key = std::borrow::Cow::<'_, str>::deserialize(from)?;
        key.parse().map(Self).map_err(|_| D::Error::invalid_value(serde::de::Unexpected::Str(&key), &"a token id"))
    }
}

struct PairsVisitor;

impl<'de> Visitor<'de> for PairsVisitor {
    type Value = Vec<(u32, f32)>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of [id, bias] pairs or an object from id to bias")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut from: A) -> Result<Self::Value, A::Error> {
        let mut pairs = Vec::new();
        while let Some(pair) = from.next_element()? {
            pairs.push(pair);
        }
        Ok(pairs)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut from: A) -> Result<Self::Value, A::Error> {
        let mut pairs = Vec::new();
        while let Some((IdKey(id), bias)) = from.next_entry()? {
            pairs.push((id, bias));
        }
        Ok(pairs)
    }
}

deserialize_settings!(SamplingParams {
    temperature,
    top_k,
    top_p,
    min_p,
    repetition_penalty,
    presence_penalty,
    frequency_penalty,
    seed,
    n,
    max_tokens,
    min_tokens,
    stop,
    include_stop_str_in_output,
    stop_token_ids,
    ignore_eos,
    logprobs,
    prompt_logprobs,
    logprobs_mode,
    logit_bias as PairsOrMap,
    allowed_token_ids,
    bad_words,
    skip_special_tokens,
});
