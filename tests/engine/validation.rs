//! Tests that bad requests are rejected with the name of the field, and that the next request works.
//!
//! The cases are those of `data/cases/request_validation.json`.

use crate::common::scripted_engine::{BLOCK, Rig, assert_at_rest, drain};
use ascend_llm::engine::{EngineCore, FinishReason, Output, Request, SubmitError};
use ascend_llm::runner::scripted::ListedVocabulary;
use ascend_llm::sampler::SamplingParams;
use ascend_llm::text::ChatMessage;
use serde_json::{Map, Value};

/// The model of the case file: a vocabulary of 1000 ids, 990 of them in the tokenizer, and sequences of up to 64
/// tokens.
fn core() -> EngineCore {
    let mut rig = Rig::new(1000, 16);
    rig.model.max_model_len = 64;
    rig.vocabulary = Some(ListedVocabulary::new((0..990).map(|id| format!("<{id}>"))).shared());
    rig.core(rig.hashed())
}

fn run(core: &mut EngineCore, request: Request) -> Result<Output, SubmitError> {
    let handle = core.submit(request)?;
    drain(core);
    Ok(handle.collect_output().unwrap())
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| u32::try_from(id.as_u64().unwrap()).unwrap()).collect()
}

/// Returns the field of the file's request that the error should name.
fn suspect(fields: &Map<String, Value>) -> &str {
    fields.keys().map(String::as_str).find(|key| !key.starts_with("prompt")).unwrap_or("prompt")
}

#[test]
fn cases_of_the_file() {
    let file: Value = serde_json::from_str(include_str!("../data/cases/request_validation.json")).unwrap();
    let mut core = core();
    let (mut errors, mut oks) = (0, 0);
    for case in file["cases"].as_array().unwrap() {
        let (id, expect) = (case["id"].as_str().unwrap(), case["expect"].as_str().unwrap());
        let mut fields = case["request"].as_object().unwrap().clone();
        let suspect = suspect(&fields).to_owned();
        let request = match (fields.remove("prompt_ids"), fields.remove("prompt")) {
            (Some(prompt), None) => Request::tokens(ids(&prompt)),
            (None, Some(prompt)) => Request::text(prompt.as_str().unwrap()),
            both => panic!("{id}: {both:?}"),
        };
        let params: SamplingParams = serde_json::from_value(Value::Object(fields)).unwrap();
        match run(&mut core, request.with_sampling(params)) {
            Ok(output) => {
                assert!(expect.contains("ok"), "{id} was accepted");
                assert!(!output.choices[0].token_ids.is_empty(), "{id}");
                oks += 1;
            }
            Err(SubmitError::Param(error)) => {
                assert!(expect.contains("error"), "{id}: {error}");
                assert_eq!(error.field, suspect, "{id}: {error}");
                errors += 1;
            }
            Err(SubmitError::TooLong { prompt_tokens, limit_tokens }) => {
                assert_eq!((id, prompt_tokens, limit_tokens), ("v04", 64, 63));
                errors += 1;
            }
            Err(error) => panic!("{id}: {error}"),
        }
        assert_at_rest(&core);
        let normal = run(&mut core, Request::tokens(vec![1, 2])).unwrap();
        assert_eq!(normal.choices[0].token_ids.len(), 62, "{id}: the normal request after it failed");
    }
    assert_eq!((errors, oks), (11, 2), "v05 and v10 must succeed and the others be rejected");
}

#[test]
fn v05_finishes_with_length_after_one_token() {
    let mut params = SamplingParams::default();
    params.max_tokens = Some(10);
    let output = run(&mut core(), Request::tokens(vec![1; 63]).with_sampling(params)).unwrap();
    assert_eq!(output.choices[0].token_ids.len(), 1);
    assert_eq!(output.choices[0].finish_reason, FinishReason::Length);
}

#[test]
fn what_can_never_fit_is_refused_with_the_sizes() {
    let rig = Rig::new(100, 4);
    let core = rig.core(rig.hashed());
    let error = core.submit(Request::tokens(vec![1; 65])).unwrap_err();
    let SubmitError::NeverFits { prompt_tokens, needed_blocks, pool_blocks, block_size } = error else {
        panic!("{error}")
    };
    assert_eq!((prompt_tokens, needed_blocks, pool_blocks, block_size), (65, 5, 4, BLOCK));
    assert!(core.submit(Request::tokens(vec![1; 64])).is_ok());
}

#[test]
fn min_tokens_must_fit_after_the_prompt() {
    let mut params = SamplingParams::default();
    params.min_tokens = 4;
    let core = core();
    let error = core.submit(Request::tokens(vec![1; 61]).with_sampling(params.clone())).unwrap_err();
    let SubmitError::Param(error) = error else { panic!("{error}") };
    assert_eq!(
        error.to_string(),
        "min_tokens: got 4, expected at most 3, the number of tokens that fit after a prompt of 61 tokens"
    );
    assert!(core.submit(Request::tokens(vec![1; 60]).with_sampling(params)).is_ok());
}

#[test]
fn without_a_vocabulary_texts_are_refused() {
    let rig = Rig::new(100, 4);
    let core = rig.core(rig.hashed());
    let with = |change: fn(&mut SamplingParams)| {
        let mut params = SamplingParams::default();
        change(&mut params);
        Request::tokens(vec![1]).with_sampling(params)
    };
    let chat = vec![ChatMessage::new("user", "hello")];
    for (field, request) in [
        ("prompt", Request::text("hello")),
        ("prompt", Request::chat(chat)),
        ("stop", with(|params| params.stop = vec!["x".to_owned()])),
        ("bad_words", with(|params| params.bad_words = vec!["x".to_owned()])),
    ] {
        let error = core.submit(request).unwrap_err();
        assert!(matches!(&error, SubmitError::Param(error) if error.field == field), "{field}: {error}");
    }
}

#[test]
fn a_text_the_tokenizer_refuses_is_an_error_of_its_own() {
    let mut core = core();
    let error = core.submit(Request::text("<1>?")).unwrap_err();
    assert_eq!(error.to_string(), "cannot encode the prompt: no piece for \"?\"");
    assert_eq!(run(&mut core, Request::text("<1><2>")).unwrap().prompt_token_ids, [1, 2]);
}
