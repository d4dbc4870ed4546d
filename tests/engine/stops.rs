//! Tests of the end of a choice: stop strings, end-of-sequence tokens and stop tokens, through the whole engine.
//!
//! No character after the end is ever sent. The tests read the output token by token, at the end, and as ids without
//! text. The cases are those of `data/cases/stop_strings.json` and `data/cases/eos.json`.

use crate::common::scripted_engine::{BLOCK, Rig, drain, finish};
use ascend_llm::engine::{EngineCore, FinishReason, Logprobs, Output, Request, StopMatch, default_stop_ids};
use ascend_llm::runner::scripted::{ListedVocabulary, ScriptedForward, reciting};
use ascend_llm::sampler::SamplingParams;
use serde_json::Value;

const EOS: u32 = 0;

fn texts(value: &Value) -> Vec<String> {
    value.as_array().unwrap().iter().map(|text| text.as_str().unwrap().to_owned()).collect()
}

/// Returns an engine that generates the token texts `pieces` (ids 1 and up), then end-of-sequence; `prompt` is one more
/// token text.
fn speaker(pieces: &[String], prompt: &str, script: Vec<u32>, prompt_tokens: usize) -> EngineCore {
    let all = [String::new()].iter().chain(pieces).cloned().chain([prompt.to_owned()]).collect::<Vec<_>>();
    let vocab = u32::try_from(all.len()).unwrap();
    let mut rig = Rig::new(vocab, 400);
    rig.model.max_model_len = 6000;
    rig.config.max_num_batched_tokens = 4096;
    rig.model.eos_ids = vec![EOS];
    rig.vocabulary = Some(ListedVocabulary::new(all).with_special(&[EOS]).shared());
    rig.core(ScriptedForward::new(vocab, 400, BLOCK, reciting(prompt_tokens, script)))
}

struct Case {
    id: String,
    pieces: Vec<String>,
    prompt: String,
    params: SamplingParams,
    script: Vec<u32>,
    expect: Value,
}

fn case(value: &Value) -> Case {
    let pieces = texts(&value["pieces"]);
    let count = u32::try_from(pieces.len()).unwrap();
    let mut params = SamplingParams::greedy();
    params.stop = texts(&value["stop"]);
    params.include_stop_str_in_output = value["include"].as_bool().unwrap_or(false);
    let mut script: Vec<u32> = (1..=count).collect();
    if value["eos_at"].is_null() {
        let max = value["max_tokens"].as_u64().map_or(count, |max| u32::try_from(max).unwrap());
        params.max_tokens = Some(max);
    } else {
        script.push(EOS);
    }
    Case {
        id: value["id"].as_str().unwrap().to_owned(),
        pieces,
        prompt: value["prompt"].as_str().unwrap_or("p").to_owned(),
        params,
        script,
        expect: value["expect"].clone(),
    }
}

fn check(case: &Case, output: &Output, mode: &str) {
    let (id, choice, expect) = (&case.id, &output.choices[0], &case.expect);
    assert_eq!(choice.text, expect["text"].as_str().unwrap(), "{id} {mode}");
    assert_eq!(choice.finish_reason.as_str(), expect["finish_reason"].as_str().unwrap(), "{id} {mode}");
    if let Some(tokens) = expect["completion_tokens"].as_u64() {
        assert_eq!(u64::from(output.usage.generated_tokens), tokens, "{id} {mode}");
    }
    let matched = match &choice.finish_reason {
        FinishReason::Stop { matched: StopMatch::Text(text) } => Some(text.as_str()),
        _ => None,
    };
    assert_eq!(matched, expect["matched_stop"].as_str(), "{id} {mode}");
}

#[test]
fn stop_strings_in_every_mode_and_after_any_prompt() {
    let file: Value = serde_json::from_str(include_str!("../data/cases/stop_strings.json")).unwrap();
    let cases = file["cases"].as_array().unwrap().iter().chain(file["prompt_cases"].as_array().unwrap());
    for value in cases {
        let case = case(value);
        for prompt_tokens in [1, 100, 5000] {
            let prompt = vec![u32::try_from(case.pieces.len()).unwrap() + 1; prompt_tokens];
            let request = || Request::tokens(prompt.clone()).with_sampling(case.params.clone());

            let mut core = speaker(&case.pieces, &case.prompt, case.script.clone(), prompt_tokens);
            let handle = core.submit(request()).unwrap();
            check(&case, &finish(&mut core, handle), "at the end");

            let mut handle = core.submit(request()).unwrap();
            let (mut sent, mut pieces) = (String::new(), 0);
            while !handle.is_ended() {
                core.step().unwrap();
                while let Some(delta) = handle.try_recv().unwrap() {
                    sent.push_str(&delta.text);
                    pieces += delta.token_ids.len();
                    let full_text: String = case.pieces[..pieces].concat();
                    let held = value["max_chars_held_after_each_piece"].get(pieces.saturating_sub(1));
                    if let Some(held) = held.filter(|_| delta.finish_reason.is_none()) {
                        let held_back = full_text.chars().count() - sent.chars().count();
                        assert!(
                            held_back as u64 <= held.as_u64().unwrap(),
                            "{} holds back {held_back} characters",
                            case.id
                        );
                    }
                    assert!(case.expect["text"].as_str().unwrap().starts_with(&sent), "{} sent {sent:?}", case.id);
                }
            }
            assert_eq!(sent, case.expect["text"].as_str().unwrap(), "{}, read token by token", case.id);
        }
    }
}

#[test]
fn held_text_is_flushed_when_the_request_is_cancelled() {
    let pieces = vec!["see <E".to_owned(), "N".to_owned()];
    let mut core = speaker(&pieces, "p", vec![1, 2], 1);
    let mut params = SamplingParams::greedy();
    params.stop = vec!["<END>".to_owned()];
    let handle = core.submit(Request::text("p").with_sampling(params)).unwrap();
    core.step().unwrap();
    core.step().unwrap();
    handle.cancel();
    let output = finish(&mut core, handle);
    assert_eq!(output.choices[0].text, "see <EN");
    assert_eq!(output.choices[0].finish_reason, FinishReason::Cancelled);
}

#[test]
fn stop_text_is_found_in_any_tokenization() {
    // STP-08: each token whose text ends in T stops.
    let pieces: Vec<String> = ["T", " T", "aT", "xyzT"].map(str::to_owned).to_vec();
    for id in 1..=4 {
        let mut core = speaker(&pieces, "p", vec![id], 1);
        let mut params = SamplingParams::greedy();
        (params.stop, params.max_tokens) = (vec!["T".to_owned()], Some(5));
        let handle = core.submit(Request::text("p").with_sampling(params)).unwrap();
        let output = finish(&mut core, handle);
        let piece = &pieces[id as usize - 1];
        assert_eq!(output.choices[0].text, piece[..piece.len() - 1]);
        assert_eq!(output.usage.generated_tokens, 1);
    }
}

#[test]
fn stop_strings_wait_for_min_tokens() {
    let pieces: Vec<String> = ["stop", "a", "stop"].map(str::to_owned).to_vec();
    let mut core = speaker(&pieces, "p", vec![1, 2, 3], 1);
    let mut params = SamplingParams::greedy();
    (params.stop, params.min_tokens) = (vec!["stop".to_owned()], 2);
    let handle = core.submit(Request::text("p").with_sampling(params)).unwrap();
    let output = finish(&mut core, handle);
    assert_eq!(output.choices[0].text, "stopa");
    assert_eq!(output.usage.generated_tokens, 3);
}

fn id_list(value: &Value) -> Vec<u32> {
    match value {
        Value::Array(ids) => ids.iter().map(|id| u32::try_from(id.as_u64().unwrap()).unwrap()).collect(),
        Value::Number(id) => vec![u32::try_from(id.as_u64().unwrap()).unwrap()],
        _ => Vec::new(),
    }
}

/// Returns an engine with the stop ids of a case of `eos.json`, and a vocabulary of 12 letters.
fn eos_rig(case: &Value) -> Rig {
    let mut rig = Rig::new(12, 16);
    let (generation, config) = (id_list(&case["gen"]["eos_token_id"]), id_list(&case["cfg"]["eos_token_id"]));
    let tokenizer = case["tok"].as_u64().map(|id| u32::try_from(id).unwrap());
    rig.model.eos_ids = default_stop_ids(&generation, &config, tokenizer.as_slice());
    rig.vocabulary = Some(ListedVocabulary::new(["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l"]).shared());
    rig
}

#[test]
fn every_listed_id_ends_and_no_other() {
    let file: Value = serde_json::from_str(include_str!("../data/cases/eos.json")).unwrap();
    let mut seen = 0;
    for case in file["cases"].as_array().unwrap().iter().filter(|case| case["expect_stop_ids"].is_array()) {
        let rig = eos_rig(case);
        let stops = id_list(&case["expect_stop_ids"]);
        for id in 0..12 {
            let mut core = rig.core(ScriptedForward::new(12, 16, BLOCK, reciting(1, vec![1, 2, id, 3])));
            let mut params = SamplingParams::greedy();
            params.max_tokens = Some(4);
            params.ignore_eos = case["request"]["ignore_eos"].as_bool().unwrap_or(false);
            params.stop_token_ids = id_list(&case["request"]["stop_token_ids"]);
            let user = params.stop_token_ids.contains(&id);
            let handle = core.submit(Request::tokens(vec![0]).with_sampling(params)).unwrap();
            let choice = finish(&mut core, handle).choices.remove(0);
            if stops.contains(&id) {
                let matched = if user { StopMatch::Token(id) } else { StopMatch::Eos(id) };
                assert_eq!(choice.finish_reason, FinishReason::Stop { matched }, "{} {id}", case["id"]);
                assert_eq!(
                    (choice.text.as_str(), choice.token_ids),
                    ("bc", vec![1, 2]),
                    "the text of the stop token must not be sent"
                );
            } else {
                assert_eq!(choice.finish_reason, FinishReason::Length, "{} {id}", case["id"]);
                assert_eq!(choice.token_ids, [1, 2, id, 3]);
            }
            seen += 1;
        }
    }
    assert!(seen >= 5 * 12);
}

#[test]
fn e05_exactly_min_tokens_others_come_before_eos() {
    let file: Value = serde_json::from_str(include_str!("../data/cases/eos.json")).unwrap();
    let case = file["cases"].as_array().unwrap().iter().find(|case| case["id"] == "e05").unwrap();
    let rig = eos_rig(case);
    let params: SamplingParams = serde_json::from_value(case["request"].clone()).unwrap();
    for seed in 0..20 {
        let mut core = rig.core(rig.hashed());
        let mut params = params.clone();
        params.seed = Some(seed);
        let handle = core.submit(Request::tokens(vec![0]).with_sampling(params)).unwrap();
        let choice = finish(&mut core, handle).choices.remove(0);
        assert_eq!(choice.token_ids.len(), 3, "{choice:?}");
        assert!(!choice.token_ids.iter().any(|id| [7, 9].contains(id)), "{choice:?}");
        assert!(matches!(choice.finish_reason, FinishReason::Stop { matched: StopMatch::Eos(7 | 9) }));
    }
}

#[test]
fn a_stop_token_stays_in_the_output_if_asked() {
    let rig = eos_rig(&Value::Null);
    let mut core = rig.core(ScriptedForward::new(12, 16, BLOCK, reciting(1, vec![1, 2, 4, 3])));
    let mut params = SamplingParams::greedy();
    (params.stop_token_ids, params.include_stop_str_in_output, params.logprobs) = (vec![4], true, Some(1));
    let handle = core.submit(Request::tokens(vec![0]).with_sampling(params)).unwrap();
    let choice = finish(&mut core, handle).choices.remove(0);
    assert_eq!((choice.text.as_str(), choice.token_ids.as_slice()), ("bce", [1, 2, 4].as_slice()));
    assert_eq!(choice.logprobs.map(|logprobs| logprobs.len()), Some(3), "expected one entry per token");
}

#[test]
fn an_answer_may_be_empty() {
    let rig = eos_rig(&serde_json::json!({"cfg": {"eos_token_id": 7}}));
    let mut core = rig.core(ScriptedForward::new(12, 16, BLOCK, reciting(1, vec![7])));
    let mut params = SamplingParams::greedy();
    params.logprobs = Some(0);
    let handle = core.submit(Request::tokens(vec![0]).with_sampling(params)).unwrap();
    let output = finish(&mut core, handle);
    assert_eq!((output.choices[0].text.as_str(), output.usage.generated_tokens), ("", 0));
    assert_eq!(output.choices[0].logprobs.as_ref().map(Logprobs::len), Some(0));
    assert!(output.usage.time_to_first_token_us.is_some());
    drain(&mut core);
}
