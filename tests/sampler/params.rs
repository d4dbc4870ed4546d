//! Tests that each parameter out of range is rejected with its name and the valid values, and each one in range
//! accepted.

use ascend_llm::sampler::{LogprobsMode, ParamLimits, SamplingParams};
use serde_json::{Value, json};

fn limits() -> ParamLimits {
    ParamLimits::new(1000, 64).with_max_logprobs(20).with_has_vocabulary(true)
}

/// Returns the field that the error names, or "" if the parameters are valid. "nan" and "inf" replace values that JSON
/// lacks.
fn refused(request: &Value, limits: &ParamLimits) -> String {
    let params: SamplingParams = serde_json::from_value(request.clone()).expect("readable");
    params.validate(limits).err().map(|error| error.field.to_owned()).unwrap_or_default()
}

#[test]
fn public_cases_about_parameters() {
    let file: Value =
        serde_json::from_str(include_str!("../data/sampler/request_validation.json")).expect("a case file");
    let mut seen = 0;
    for case in file["cases"].as_array().expect("cases") {
        let mut request = case["request"].as_object().expect("a request").clone();
        request.remove("prompt");
        request.remove("prompt_ids");
        // Field that each case tests; the other cases of the file are about prompts.
        let field = match case["id"].as_str().expect("an id") {
            "v06" => "max_tokens",
            "v07" => "temperature",
            "v08" | "v09" => "top_p",
            "v11" => "logit_bias",
            "v12" => "n",
            "v13" => "stop",
            "v05" | "v10" => "",
            _ => continue,
        };
        assert_eq!(refused(&Value::Object(request), &limits()), field, "{}", case["id"]);
        seen += 1;
    }
    assert_eq!(seen, 9);
}

#[test]
fn each_rule_at_its_edge() {
    // Field, valid values, invalid values.
    let table = [
        ("temperature", json!([0, 1e-7, 2]), json!([-0.1, 2.1])),
        ("top_p", json!([1e-9, 0.5, 1]), json!([0, -0.5, 1.5])),
        ("top_k", json!([-1, 0, 1, 5000]), json!([-2])),
        ("min_p", json!([0, 1]), json!([-0.1, 1.1])),
        ("repetition_penalty", json!([0.1, 1, 5]), json!([0, -1])),
        ("presence_penalty", json!([-2, 2]), json!([-2.1, 2.1])),
        ("frequency_penalty", json!([-2, 2]), json!([-2.1, 2.1])),
        ("n", json!([1, 16384]), json!([0, 16385])),
        ("max_tokens", json!([null, 1, 1000]), json!([0])),
        ("min_tokens", json!([0, 63]), json!([64])),
        ("stop", json!([[], ["a"]]), json!([[""], ["a", ""]])),
        ("bad_words", json!([[], ["a"]]), json!([[""]])),
        ("stop_token_ids", json!([[], [0, 999]]), json!([[1000], [0, 4_000_000_000u32]])),
        ("allowed_token_ids", json!([null, [999]]), json!([[], [1000]])),
        (
            "logit_bias",
            json!([[], [[999, 100.0]], {"0": -100}]),
            json!([[[1000, 1.0]], {"5": 100.5}, [[1, 1.0], [1, 2.0]]]),
        ),
        ("logprobs", json!([null, 0, 20]), json!([21])),
        ("prompt_logprobs", json!([null, 0, 20]), json!([21])),
    ];
    for (field, good, bad) in table {
        for value in good.as_array().expect("a list") {
            assert_eq!(refused(&json!({ field: value }), &limits()), "", "{field}: {value}");
        }
        for value in bad.as_array().expect("a list") {
            assert_eq!(refused(&json!({ field: value }), &limits()), field, "{field}: {value}");
        }
    }
}

#[test]
fn rules_between_fields() {
    assert_eq!(refused(&json!({"n": 2, "temperature": 0}), &limits()), "n");
    assert_eq!(refused(&json!({"n": 2, "temperature": 1e-6}), &limits()), "n", "temperature 1e-6 is greedy too");
    assert_eq!(refused(&json!({"n": 2, "temperature": 0.01}), &limits()), "");
    assert_eq!(refused(&json!({"min_tokens": 5, "max_tokens": 4}), &limits()), "min_tokens");
    assert_eq!(refused(&json!({"min_tokens": 4, "max_tokens": 4}), &limits()), "");
    let bare = limits().with_has_vocabulary(false);
    assert_eq!(refused(&json!({"stop": ["a"]}), &bare), "stop");
    assert_eq!(refused(&json!({"bad_words": ["a"]}), &bare), "bad_words");
    assert_eq!(refused(&json!({"stop_token_ids": [1]}), &bare), "");
    let small = limits().with_vocab_size(10);
    assert_eq!(refused(&json!({"logprobs": 11}), &small), "logprobs", "logprobs exceeds the vocabulary");
}

#[test]
fn nan_and_infinity_are_refused_everywhere() {
    type Setter = fn(&mut SamplingParams, f32);
    let setters: [(&str, Setter); 7] = [
        ("temperature", |p, v| p.temperature = v),
        ("top_p", |p, v| p.top_p = v),
        ("min_p", |p, v| p.min_p = v),
        ("repetition_penalty", |p, v| p.repetition_penalty = v),
        ("presence_penalty", |p, v| p.presence_penalty = v),
        ("frequency_penalty", |p, v| p.frequency_penalty = v),
        ("logit_bias", |p, v| p.logit_bias = vec![(0, v)]),
    ];
    for (field, set) in setters {
        for value in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut params = SamplingParams::default();
            set(&mut params, value);
            let error = params.validate(&limits()).expect_err(field);
            assert_eq!(error.field, field);
        }
    }
}

#[test]
fn errors_say_what_would_be_right() {
    let params = with(SamplingParams::default(), |p| {
        p.temperature = f32::NAN;
    });
    let error = params.validate(&limits()).expect_err("NaN");
    assert_eq!(error.to_string(), "temperature: got NaN, expected a finite number in 0..=2");
    let params = with(SamplingParams::default(), |p| {
        p.logit_bias = vec![(7, 250.0)];
    });
    let error = params.validate(&limits()).expect_err("too much");
    assert_eq!(error.to_string(), "logit_bias: got 250 for id 7, expected finite numbers in -100..=100");
}

#[test]
fn json_reads_back_and_refuses_what_it_does_not_know() {
    let default: SamplingParams = serde_json::from_str("{}").expect("all fields have defaults");
    assert_eq!(default, SamplingParams::default());
    assert!(default.validate(&limits()).is_ok() && !default.is_greedy());
    assert!(SamplingParams::greedy().validate(&limits()).is_ok() && SamplingParams::greedy().is_greedy());
    let full: SamplingParams = serde_json::from_value(json!({
        "temperature": 0.5, "seed": u64::MAX, "logprobs_mode": "processed_logprobs", "logit_bias": {"3": 1.5, "4": -2},
        "allowed_token_ids": [3, 4], "stop": ["x"], "max_tokens": 5,
    }))
    .expect("readable");
    assert_eq!(full.logit_bias, [(3, 1.5), (4, -2.0)]);
    assert_eq!(full.logprobs_mode, LogprobsMode::Processed);
    let text = serde_json::to_string(&full).expect("writable");
    assert_eq!(serde_json::from_str::<SamplingParams>(&text).expect("reads back"), full);
    for bad in [r#"{"top_kk": 1}"#, r#"{"n": -1}"#, r#"{"logit_bias": {"-1": 1}}"#, r#"{"max_tokens": 1.5}"#] {
        assert!(serde_json::from_str::<SamplingParams>(bad).is_err(), "{bad}");
    }
}

fn with(mut params: SamplingParams, change: impl FnOnce(&mut SamplingParams)) -> SamplingParams {
    change(&mut params);
    params
}
