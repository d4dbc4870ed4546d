//! Tests that a bad request or configuration returns a typed error with the field, its value and the valid values.
//!
//! A rejected request leaves nothing in the engine, which continues to return correct outputs.
#![cfg(feature = "text")]

use std::error::Error;
use std::path::Path;

use crate::common::fable::{Seen, VOCAB, alone, assert_at_rest, builder, core, drain, float, plain_config, quantized};
use ascend_llm::device::DeviceError;
use ascend_llm::device::cpu::{CpuDevice, CpuOptions};
use ascend_llm::engine::{
    BuildError, CacheBudget, Engine, EngineConfig, GenerateError, Health, Prompt, Request, SubmitError,
};
use ascend_llm::graph::{CompileError, Numerics, Precision};
use ascend_llm::kv_cache::KvDType;
use ascend_llm::sampler::{ParamError, SamplingParams};
use ascend_llm::text::ChatMessage;

/// Returns the error as a host prints it. The message must contain the messages of all its sources.
fn sentence(error: &dyn Error) -> String {
    let text = error.to_string();
    for cause in std::iter::successors(error.source(), |cause| (*cause).source()) {
        assert!(text.contains(&cause.to_string()), "{text} does not contain the cause {cause}");
    }
    text
}

/// Configuration of a small engine: eight blocks of 16 tokens.
fn small_config() -> EngineConfig {
    let mut config = plain_config();
    config.kv_cache = CacheBudget::Blocks(8);
    config.prefix_caching = true;
    config.max_queue = 4;
    config
}

fn good() -> Request {
    let mut params = SamplingParams::default();
    (params.seed, params.max_tokens, params.logprobs) = (Some(5), Some(10), Some(2));
    Request::text("Once upon a time").with_sampling(params)
}

/// Engine that must keep working after each rejected request.
struct CheckedEngine {
    engine: Engine,
    expected: Seen,
}

impl CheckedEngine {
    fn new(model: &Path) -> Self {
        let expected = alone(model, &plain_config(), good());
        Self { engine: builder(model, small_config()).build().unwrap(), expected }
    }

    fn refuse(&self, request: Request) -> SubmitError {
        let before = self.engine.stats();
        let error = self.engine.submit(request).expect_err("the engine must reject it");
        assert_eq!(self.engine.stats().queued_requests, before.queued_requests, "{error}");
        self.check();
        error
    }

    fn check(&self) {
        assert_eq!(self.engine.health(), Health::Ready);
        let output = self.engine.submit(good()).unwrap().collect_output().unwrap();
        assert_eq!(Seen::of(&output), self.expected);
    }
}

#[track_caller]
fn assert_param(error: &SubmitError, field: &str, value: &str, expected: &str) {
    let SubmitError::Param(param) = error else { panic!("{error:?} is not a parameter error") };
    assert_eq!((param.field, param.value.as_str()), (field, value), "{param}");
    assert!(param.expected.contains(expected), "{param}");
    assert_eq!(sentence(error), format!("{field}: got {value}, expected {}", param.expected));
}

#[test]
fn bad_prompts() {
    for model in [float(), quantized()] {
        let checked = CheckedEngine::new(&model);
        let refuse = |prompt: Prompt| checked.refuse(Request::new(prompt));
        assert_param(&refuse(Prompt::Tokens(vec![])), "prompt", "no tokens", "at least one token");
        assert_param(&refuse(Prompt::Text(String::new())), "prompt", "no tokens", "at least one token");
        assert_param(&refuse(Prompt::Tokens(vec![1, VOCAB, 2])), "prompt", "768", "ids below 768");
        assert_param(&refuse(Prompt::Tokens(vec![u32::MAX])), "prompt", "4294967295", "ids below 768");

        let error = refuse(Prompt::Tokens(vec![1; 512]));
        assert!(matches!(error, SubmitError::TooLong { prompt_tokens: 512, limit_tokens: 511 }), "{error:?}");
        assert!(sentence(&error).contains("512 tokens, expected at most 511"), "{error}");
        let error = refuse(Prompt::Text("the ".repeat(5_000)));
        assert!(matches!(error, SubmitError::TooLong { prompt_tokens, .. } if prompt_tokens >= 5_000), "{error:?}");
        let error = refuse(Prompt::Tokens(vec![1; 129]));
        assert!(
            matches!(
                error,
                SubmitError::NeverFits { prompt_tokens: 129, needed_blocks: 9, pool_blocks: 8, block_size: 16 }
            ),
            "{error:?}"
        );
        assert!(
            sentence(&error).contains("129 tokens and needs 9 KV blocks of 16 tokens, but the whole pool has 8"),
            "{error}"
        );

        // The longest prompt that fits succeeds, and uses the pool to its end.
        let longest = checked.engine.submit(Request::tokens(vec![1; 128])).unwrap().collect_output().unwrap();
        assert_eq!(longest.choices[0].token_ids.len(), 1);
        checked.check();
    }
}

type Change = fn(&mut SamplingParams);

#[test]
fn bad_parameters() {
    let cases: [(&str, &str, &str, Change); 37] = [
        ("temperature", "NaN", "0..=2", |p| p.temperature = f32::NAN),
        ("temperature", "inf", "0..=2", |p| p.temperature = f32::INFINITY),
        ("temperature", "-0.5", "0..=2", |p| p.temperature = -0.5),
        ("temperature", "2.5", "0..=2", |p| p.temperature = 2.5),
        ("top_k", "-2", "-1 or 0 (off)", |p| p.top_k = -2),
        ("top_p", "NaN", "above 0", |p| p.top_p = f32::NAN),
        ("top_p", "0", "above 0", |p| p.top_p = 0.0),
        ("top_p", "1.5", "up to 1", |p| p.top_p = 1.5),
        ("min_p", "NaN", "0..=1", |p| p.min_p = f32::NAN),
        ("min_p", "-0.1", "0..=1", |p| p.min_p = -0.1),
        ("min_p", "1.1", "0..=1", |p| p.min_p = 1.1),
        ("repetition_penalty", "NaN", "above 0", |p| p.repetition_penalty = f32::NAN),
        ("repetition_penalty", "0", "above 0", |p| p.repetition_penalty = 0.0),
        ("repetition_penalty", "inf", "finite", |p| p.repetition_penalty = f32::INFINITY),
        ("presence_penalty", "NaN", "-2..=2", |p| p.presence_penalty = f32::NAN),
        ("presence_penalty", "3", "-2..=2", |p| p.presence_penalty = 3.0),
        ("frequency_penalty", "-3", "-2..=2", |p| p.frequency_penalty = -3.0),
        ("n", "0", "1..=", |p| p.n = 0),
        ("n", "4294967295", "1..=16384", |p| p.n = u32::MAX),
        ("n", "2", "1 when the temperature is 0", |p| (p.n, p.temperature) = (2, 0.0)),
        ("max_tokens", "0", "at least 1", |p| p.max_tokens = Some(0)),
        ("min_tokens", "6", "at most max_tokens, 5", |p| (p.min_tokens, p.max_tokens) = (6, Some(5))),
        ("min_tokens", "512", "at most 511", |p| p.min_tokens = 512),
        ("min_tokens", "511", "after a prompt of 2 tokens", |p| p.min_tokens = 511),
        ("stop", "\"\"", "not empty", |p| p.stop = vec!["a".to_owned(), String::new()]),
        ("stop_token_ids", "768", "ids below 768", |p| p.stop_token_ids = vec![1, 768]),
        ("logprobs", "21", "at most 20", |p| p.logprobs = Some(21)),
        ("prompt_logprobs", "4294967295", "at most 20", |p| p.prompt_logprobs = Some(u32::MAX)),
        ("logit_bias", "NaN for id 3", "-100..=100", |p| p.logit_bias = vec![(3, f32::NAN)]),
        ("logit_bias", "101 for id 3", "-100..=100", |p| p.logit_bias = vec![(3, 101.0)]),
        ("logit_bias", "768", "ids below 768", |p| p.logit_bias = vec![(768, 1.0)]),
        ("logit_bias", "id 3 twice", "each id once", |p| p.logit_bias = vec![(3, 1.0), (3, 2.0)]),
        ("allowed_token_ids", "[]", "at least one id", |p| p.allowed_token_ids = Some(vec![])),
        ("allowed_token_ids", "9999", "ids below 768", |p| p.allowed_token_ids = Some(vec![1, 9_999])),
        ("bad_words", "\"\"", "not empty", |p| p.bad_words = vec![String::new()]),
        ("temperature", "NaN", "0..=2", |p| (p.temperature, p.n, p.top_p) = (f32::NAN, 3, 0.5)),
        ("min_p", "inf", "0..=1", |p| (p.temperature, p.min_p) = (0.0, f32::INFINITY)),
    ];
    let checked = CheckedEngine::new(&float());
    for (field, value, expected, change) in cases {
        let mut params = SamplingParams::default();
        change(&mut params);
        assert_param(&checked.refuse(Request::tokens(vec![4, 5]).with_sampling(params)), field, value, expected);
    }
    assert_param(&checked.refuse(good().with_priority(-1)), "priority", "-1", "first come, first served");
    let Err(GenerateError::Submit(error)) = checked.engine.generate("Once", &{
        let mut params = SamplingParams::default();
        params.n = 2;
        params
    }) else {
        panic!("generate accepts n = 2")
    };
    assert_param(&error, "n", "2", "use `submit`");
    let unknown = serde_json::from_str::<SamplingParams>(r#"{"temprature": 1}"#).unwrap_err().to_string();
    assert!(unknown.contains("temprature"), "{unknown}");
}

/// A request that passes all checks but leaves no token to sample ends with its own error; other requests continue.
#[test]
fn a_request_that_masks_all_tokens_fails_without_affecting_others() {
    let checked = CheckedEngine::new(&quantized());
    let mut params = SamplingParams::greedy();
    (params.allowed_token_ids, params.stop_token_ids, params.min_tokens) = (Some(vec![7]), vec![7], 3);
    let error =
        checked.engine.submit(Request::tokens(vec![4]).with_sampling(params)).unwrap().collect_output().unwrap_err();
    let text = sentence(&error);
    assert!(text.contains("cannot sample token 0 of choice 0: no token can be sampled"), "{text}");
    checked.check();
    assert_eq!(checked.engine.stats().finished_error, 1);
}

#[test]
fn a_full_queue_gives_the_request_back() {
    let mut core = core(&float(), small_config());
    let handles: Vec<_> = (0..4).map(|_| core.submit(good()).unwrap()).collect();
    assert_eq!(core.health(), Health::NotAccepting);
    let error = core.submit(good()).unwrap_err();
    assert_eq!(sentence(&error), "the queue is full");
    let SubmitError::QueueFull(request) = error else { panic!("{error:?}") };
    assert_eq!(*request, good());
    drain(&mut core);
    let expected = alone(&float(), &plain_config(), good());
    for handle in handles {
        assert_eq!(Seen::of(&handle.collect_output().unwrap()), expected);
    }
    let handle = core.submit(*request).unwrap();
    drain(&mut core);
    assert_eq!(Seen::of(&handle.collect_output().unwrap()), expected);
    assert_at_rest(&core);
}

#[test]
fn text_and_chat_need_their_files() {
    // A conformance model has neither a tokenizer nor a chat template.
    let bare = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/conformance/qwen2");
    let engine = builder(&bare, plain_config()).build().unwrap();
    let submit = |request: Request| engine.submit(request).unwrap_err();
    assert_param(&submit(Request::text("Hello")), "prompt", "text", "token ids: the engine has no vocabulary");
    assert_param(
        &submit(Request::chat(vec![ChatMessage::new("user", "Hello")])),
        "prompt",
        "chat messages",
        "no chat template",
    );
    let with = |change: Change| {
        let mut params = SamplingParams::greedy();
        params.max_tokens = Some(3);
        change(&mut params);
        Request::tokens(vec![5, 6]).with_sampling(params)
    };
    assert_param(&submit(with(|p| p.stop = vec!["x".to_owned()])), "stop", "\"x\"", "no tokenizer");
    assert_param(&submit(with(|p| p.bad_words = vec!["x".to_owned()])), "bad_words", "\"x\"", "no tokenizer");
    let output = engine.submit(with(|_| {})).unwrap().collect_output().unwrap();
    assert_eq!((output.choices[0].text.as_str(), output.choices[0].token_ids.len()), ("", 3));
}

fn build_error(change: impl FnOnce(&mut EngineConfig)) -> BuildError {
    let mut config = plain_config();
    change(&mut config);
    builder(&float(), config).build().expect_err("the engine must reject it")
}

#[test]
fn bad_configurations() {
    type Change = fn(&mut EngineConfig);
    let cases: [(&str, &str, &str, Change); 27] = [
        ("max_num_seqs", "0", "at least 1", |c| c.max_num_seqs = 0),
        ("max_num_batched_tokens", "3", "at least max_num_seqs (4)", |c| c.max_num_batched_tokens = 3),
        ("max_model_len", "1", "at least 2", |c| c.max_model_len = Some(1)),
        ("max_model_len", "513", "2..=512", |c| c.max_model_len = Some(513)),
        ("block_size", "0", "a multiple of 16", |c| c.block_size = Some(0)),
        ("block_size", "24", "a multiple of 16", |c| c.block_size = Some(24)),
        ("block_size", "2048", "up to 1024 on device cpu", |c| c.block_size = Some(2048)),
        ("kv_cache.blocks", "0", "at least 1", |c| c.kv_cache = CacheBudget::Blocks(0)),
        ("kv_cache.bytes", "0", "at least one block", |c| c.kv_cache = CacheBudget::Bytes(0)),
        ("kv_dtype", "F16", "F32 with numerics", |c| {
            (c.numerics, c.kv_dtype) = (Numerics::Exact, Some(KvDType::F16));
        }),
        ("kv_dtype", "I8", "F32 with numerics", |c| {
            (c.numerics, c.kv_dtype) = (Numerics::Exact, Some(KvDType::I8));
        }),
        ("max_queue", "0", "at least 1", |c| c.max_queue = 0),
        ("compile.opt_level", "4", "a level from 0 to 3", |c| c.compile.opt_level = Some(4)),
        ("compile.fusion", "4", "a level from 0 to 3", |c| c.compile.fusion = Some(4)),
        ("compile.parallel_ops", "5", "a number from 1 to 4", |c| c.compile.parallel_ops = Some(5)),
        ("compile.parallel_ops", "0", "a number from 1 to 4", |c| c.compile.parallel_ops = Some(0)),
        ("compile.precision", "bf16", "f32, or numerics `fast`", |c| {
            (c.numerics, c.compile.precision) = (Numerics::Exact, Some(Precision::BF16));
        }),
        ("compile.precision_overrides", "q_proj: f16", "f32, or numerics `fast`", |c| {
            c.numerics = Numerics::Exact;
            c.compile.precision_overrides.insert("q_proj".to_owned(), Precision::F16);
        }),
        ("compile.attention", "full_max 600 above partial_max 500", "full_max of at most partial_max", |c| {
            (c.compile.attention.full_max, c.compile.attention.partial_max) = (600, 500);
        }),
        ("compile.attention", "partial_max 65537", "at most 65536 tokens", |c| {
            c.compile.attention.partial_max = 65_537;
        }),
        ("compile.token_buckets", "[]", "ascending, at least 1", |c| c.compile.token_buckets = Some(vec![])),
        ("compile.token_buckets", "[4, 2]", "ascending, at least 1", |c| c.compile.token_buckets = Some(vec![4, 2])),
        ("tensor_parallel_size", "0", "at least 1", |c| c.tensor_parallel_size = 0),
        ("tensor_parallel_size", "17", "at most 16 on device cpu", |c| c.tensor_parallel_size = 17),
        ("compile.precision", "mix", "f32, or numerics `fast`", |c| {
            (c.numerics, c.compile.precision) = (Numerics::Exact, Some(Precision::Mix));
        }),
        ("threads", "0", "at least 1", |c| c.threads = Some(0)),
        ("kv_cache.blocks", "4294967295", "at most", |c| c.kv_cache = CacheBudget::Blocks(u32::MAX)),
    ];
    for (field, value, expected, change) in cases {
        let error = build_error(change);
        let BuildError::Config(ParamError { .. }) = &error else { panic!("{field} {value}: {error:?}") };
        let text = sentence(&error);
        assert!(text.starts_with(&format!("configuration: {field}: got {value}, expected ")), "{text}");
        assert!(text.contains(expected), "{text}");
    }

    let error = build_error(|c| c.kv_cache = CacheBudget::Bytes(100));
    assert!(matches!(error, BuildError::CacheDoesNotFit { budget_bytes: 100, .. }), "{error:?}");
    assert!(sentence(&error).contains("the budget is 100 bytes"), "{error}");
}

/// Sizes that no machine has return an error and do not abort the process.
#[test]
fn impossible_sizes() {
    let error = build_error(|c| c.kv_cache = CacheBudget::Blocks(1 << 27));
    assert!(matches!(error, BuildError::Device(DeviceError::OutOfMemory { .. })), "{error:?}");
    assert!(sentence(&error).contains("out of host memory: requested "), "{}", sentence(&error));

    let error = build_error(|c| c.kv_cache = CacheBudget::Bytes(u64::MAX));
    assert!(matches!(error, BuildError::Device(DeviceError::OutOfMemory { .. })), "{error:?}");

    let error = build_error(|c| c.max_num_batched_tokens = u32::MAX);
    assert!(matches!(error, BuildError::Compile(CompileError::Memory(_))), "{error:?}");
    assert!(sentence(&error).contains("cannot allocate an arena"), "{}", sentence(&error));

    let error = build_error(|c| (c.max_num_seqs, c.max_num_batched_tokens) = (u32::MAX, u32::MAX));
    assert!(matches!(error, BuildError::Compile(CompileError::Memory(_))), "{error:?}");

    let mut options = CpuOptions::default();
    options.threads = Some(usize::MAX);
    let error = CpuDevice::new(options).unwrap_err();
    assert!(sentence(&error).contains("threads"), "{error}");
    let error = build_error(|c| c.threads = Some(1 << 20));
    assert!(matches!(error, BuildError::Device(DeviceError::Invalid { .. })), "{error:?}");
}
