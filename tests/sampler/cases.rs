//! Tests that one sampling step returns the results of the public case files.
//!
//! All cases use the order `temp_first`: penalties and bias, then temperature, `min_p`, `top_k`, `top_p`. The tests
//! read the probabilities through the public API, as processed log-probabilities of the whole vocabulary.

#![allow(clippy::cast_possible_truncation)]

use ascend_llm::runner::LogitRows;
use ascend_llm::sampler::{LogprobsMode, SampleError, SampleRow, Sampled, Sampler, SamplingParams};
use serde_json::Value;

fn cases(text: &str) -> Value {
    serde_json::from_str(text).expect("a case file")
}

fn sampling() -> Value {
    cases(include_str!("../data/sampler/sampling.json"))
}

fn floats(value: &Value) -> Vec<f32> {
    value.as_array().expect("a list").iter().map(|v| v.as_f64().expect("a number") as f32).collect()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().map(|list| list.iter().map(|v| v.as_u64().expect("an id") as u32).collect()).unwrap_or_default()
}

fn sample(logits: &[f32], row: SampleRow<'_>) -> Result<Sampled, SampleError> {
    let mut out = Vec::new();
    let rows = LogitRows::new(logits, logits.len(), &[0]);
    Sampler::new(logits.len()).sample(rows, &[row], &mut out);
    out.remove(0)
}

fn row<'a>(params: &'a SamplingParams, prompt: &'a [u32], output: &'a [u32], seed: u64) -> SampleRow<'a> {
    SampleRow::new(0, params, prompt, output).with_seed(seed)
}

/// Converts the parameters of a case file.
fn params(case: &Value) -> SamplingParams {
    let mut params = SamplingParams::default();
    for (name, value) in case["params"].as_object().expect("params") {
        let number = value.as_f64().unwrap_or_default() as f32;
        match name.as_str() {
            "temperature" => params.temperature = number,
            "top_k" => params.top_k = number as i32,
            "top_p" => params.top_p = number,
            "min_p" => params.min_p = number,
            "rep" => params.repetition_penalty = number,
            "pres" => params.presence_penalty = number,
            "freq" => params.frequency_penalty = number,
            "bias" => {
                params.logit_bias =
                    serde_json::from_value::<SamplingParams>(serde_json::json!({ "logit_bias": value }))
                        .expect("a bias")
                        .logit_bias;
            }
            "prompt" | "output" => {}
            other => panic!("the test does not support the parameter {other}"),
        }
    }
    params
}

#[test]
fn every_case_gives_its_probabilities_in_one_order() {
    let file = sampling();
    let list = file["cases"].as_array().expect("cases");
    assert_eq!(list.len(), 14);
    for case in list {
        let id = &case["id"];
        let logits = floats(&case["logits"]);
        let mut params = params(case);
        params.logprobs = Some(logits.len() as u32);
        params.logprobs_mode = LogprobsMode::Processed;
        let (prompt, output) = (ids(&case["params"]["prompt"]), ids(&case["params"]["output"]));
        let expected = case.get("expect_probs").unwrap_or(&case["expect_probs_by_order"]["temp_first"]);
        let expected: Vec<(u32, f64)> = expected
            .as_object()
            .expect("probabilities")
            .iter()
            .map(|(id, p)| (id.parse().expect("an id"), p.as_f64().expect("a probability")))
            .collect();

        let first = sample(&logits, row(&params, &prompt, &output, 0)).expect("a token");
        if params.is_greedy() {
            assert_eq!(expected.len(), 1, "{id}");
            assert_eq!(first.token, expected[0].0, "{id}");
            continue;
        }
        let got = |token: u32| first.top.iter().find(|e| e.token == token).map_or(0.0, |e| f64::from(e.logprob).exp());
        for token in 0..logits.len() as u32 {
            let expected = expected.iter().find(|e| e.0 == token).map_or(0.0, |e| e.1);
            assert!(
                (got(token) - expected).abs() < 1e-5,
                "{id}: token {token} has probability {}, expected {expected}",
                got(token)
            );
        }
        // No seed samples a token that should have no probability.
        for seed in 0..50 {
            let token = sample(&logits, row(&params, &prompt, &output, seed)).expect("a token").token;
            assert!(got(token) > 0.0, "{id}: seed {seed} sampled token {token}, which has no probability");
        }
    }
}

#[test]
fn bad_logits_end_their_row_only() {
    let list = sampling()["bad_inputs"].as_array().expect("bad inputs").len();
    assert_eq!(list, 2, "expected the cases m60 and m61");
    let nan = [0.5, f32::NAN, 2.0];
    let infinite = [f32::NEG_INFINITY; 3];
    let good = [0.0, 3.0, 1.0];
    for params in [SamplingParams::greedy(), SamplingParams::default()] {
        let mut out = Vec::new();
        let logits = [good, nan, infinite, good, good].concat();
        let at = |at| row(&params, &[], &[], 1).with_row(at);
        let rows = LogitRows::new(&logits, 3, &[0, 0, 0, 0, 1]);
        Sampler::new(3).sample(rows, &[at(0), at(1), at(2), at(3), at(4), at(5)], &mut out);
        assert_eq!(out[0], sample(&good, row(&params, &[], &[], 1)));
        assert_eq!(out[1], Err(SampleError::NonFinite { row: 1, token: Some(1) }));
        assert_eq!(out[2], Err(SampleError::NonFinite { row: 2, token: Some(0) }));
        assert_eq!(out[3], out[0]);
        assert_eq!(
            out[4],
            Err(SampleError::NonFinite { row: 4, token: None }),
            "the device reports the row as not finite"
        );
        assert_eq!(out[5], Err(SampleError::NoSuchRow { row: 5, rows: 5 }));
    }
}

#[test]
fn masking_everything_is_an_error() {
    let params = with(SamplingParams::default(), |p| {
        p.allowed_token_ids = Some(vec![1]);
        p.min_tokens = 1;
    });
    let all_masked = row(&params, &[], &[], 0).with_eos_ids(&[1]);
    assert_eq!(sample(&[0.0, 9.0, 0.0], all_masked), Err(SampleError::NoTokenLeft));
    assert_eq!(sample(&[0.0, 9.0, 0.0], all_masked.with_output(&[0])).expect("a token").token, 1);
}

#[test]
fn numbers_out_of_range_and_foreign_logits_are_errors() {
    for params in [
        with(SamplingParams::default(), |p| {
            p.temperature = f32::NAN;
        }),
        with(SamplingParams::default(), |p| {
            p.top_p = f32::NAN;
        }),
        with(SamplingParams::default(), |p| {
            p.logit_bias = vec![(0, f32::NAN)];
        }),
    ] {
        assert!(matches!(sample(&[0.0, 1.0], row(&params, &[], &[], 0)), Err(SampleError::Params(_))));
    }
    let params = SamplingParams::default();
    let mut out = Vec::new();
    let rows = LogitRows::new(&[0.0; 4], 4, &[0]);
    Sampler::new(5).sample(rows, &[row(&params, &[], &[], 0)], &mut out);
    assert_eq!(out, [Err(SampleError::WrongWidth { got: 4, expected: 5 })]);
}

#[test]
fn no_temperature_and_no_logit_gives_nan() {
    // 60,000 / 1e-3 overflows an f16; differences of the largest numbers overflow an f32.
    let rows = [[60_000.0, 59_999.0, -60_000.0], [f32::MAX, 0.0, f32::MIN], [1e-40, 0.0, -1e-40]];
    for logits in rows {
        for temperature in [0.0, 1e-7, 1e-5, 1e-4, 1e-3, 1.0, 2.0] {
            let params = with(SamplingParams::default(), |p| {
                p.temperature = temperature;
                p.logprobs = Some(3);
                p.logprobs_mode = LogprobsMode::Processed;
            });
            params.validate(&limits(3)).expect("allowed");
            for seed in 0..20 {
                let sampled = sample(&logits, row(&params, &[], &[], seed)).expect("a token");
                assert!(sampled.top.iter().all(|e| e.logprob.is_finite()));
                assert_eq!(sampled.top[0].token, 0);
                if temperature <= 1e-4 && logits[0] > 1.0 {
                    assert_eq!(sampled.token, 0, "temperature {temperature} does not sample the argmax");
                }
            }
        }
    }
}

#[test]
fn end_of_sequence_waits_for_min_tokens() {
    let file = cases(include_str!("../data/sampler/eos.json"));
    let case = file["cases"].as_array().expect("cases").iter().find(|c| c["id"] == "e05").expect("e05");
    let request: SamplingParams = serde_json::from_value(case["request"].clone()).expect("a request");
    for (temperature, stop_token_ids) in [(0.0, vec![]), (1.0, vec![]), (1.0, vec![3])] {
        let params = with(request.clone(), |p| {
            p.temperature = temperature;
            p.stop_token_ids = stop_token_ids;
        });
        params.validate(&limits(12)).expect("allowed");
        // The user's stop id, if any, has by far the largest logit, but must not be sampled before `min_tokens`.
        let mut logits = [0.0; 12];
        logits[3] = if params.stop_token_ids.is_empty() { 0.0 } else { 50.0 };
        let mut output = Vec::new();
        loop {
            let at = row(&params, &[1], &output, 5).with_eos_ids(&[7, 9]);
            let token = sample(&logits, at).expect("a token").token;
            if [7, 9].contains(&token) {
                break;
            }
            assert!(!params.stop_token_ids.contains(&token), "sampled a stop id before min_tokens");
            output.push(token);
        }
        assert_eq!(output.len(), 3, "expected 3 tokens before the end of sequence");
    }
}

#[test]
fn raw_logprobs_are_of_the_untouched_distribution() {
    let file = cases(include_str!("../data/sampler/logprobs.json"));
    let case = file["cases"].as_array().expect("cases").iter().find(|c| c["id"] == "l03").expect("l03");
    let logits = floats(&case["logits"]);
    let expected = floats(&case["expect_raw"]);
    let mut params: SamplingParams = serde_json::from_value(case["request"].clone()).expect("a request");
    params.logprobs = Some(3);
    params.logit_bias = vec![(2, 50.0)];
    let sampled = sample(&logits, row(&params, &[], &[], 0)).expect("a token");
    for (at, (entry, expected)) in sampled.top.iter().zip(&expected).enumerate() {
        assert_eq!(entry.token as usize, at);
        assert!((entry.logprob - expected).abs() < 1e-6, "got {}, expected {expected}", entry.logprob);
    }
    assert_eq!(sampled.token, 2, "the bias does not change the sampled token");
    assert_eq!(
        (sampled.logprob, sampled.rank),
        (Some(sampled.top[2].logprob), 3),
        "the raw log-probabilities contain the bias"
    );

    params.logprobs_mode = LogprobsMode::Processed;
    let processed = sample(&logits, row(&params, &[], &[], 0)).expect("a token");
    assert_eq!((processed.token, processed.rank, processed.top.len()), (2, 1, 2), "top_k 2 leaves two");
}

#[test]
fn only_what_is_asked_for_is_reported() {
    let mut params = SamplingParams::default();
    let none = sample(&[0.0, 1.0], row(&params, &[], &[], 3)).expect("a token");
    assert_eq!((none.logprob, none.rank, none.top.len()), (None, 0, 0));
    params.logprobs = Some(0);
    let own = sample(&[0.0, 1.0], row(&params, &[], &[], 3)).expect("a token");
    assert!(own.logprob.is_some() && own.rank > 0 && own.top.is_empty());
    assert_eq!(own.token, none.token);
}

#[test]
fn masked_entries_are_dropped_and_json_stays_strict() {
    let file = cases(include_str!("../data/sampler/logprobs.json"));
    let case = file["cases"].as_array().expect("cases").iter().find(|c| c["id"] == "l01").expect("l01");
    let logits: Vec<f32> =
        case["logits"].as_array().expect("logits").iter().map(|v| v.as_f64().unwrap_or(1.0) as f32).collect();
    for temperature in [0.0, 1.0] {
        for mode in [LogprobsMode::Raw, LogprobsMode::Processed] {
            let params = with(SamplingParams::default(), |p| {
                p.temperature = temperature;
                p.allowed_token_ids = Some(vec![0]);
                p.logprobs = case["top"].as_u64().map(|n| n as u32);
                p.logprobs_mode = mode;
            });
            let sampled = sample(&logits, row(&params, &[], &[], 0)).expect("a token");
            let text = serde_json::to_string(&sampled.top).expect("JSON");
            assert!(!text.contains("null") && !text.contains("inf") && !text.contains("NaN"), "{text}");
            let back: Vec<ascend_llm::sampler::TokenLogprob> = serde_json::from_str(&text).expect("strict JSON");
            assert_eq!(back, sampled.top);
            match mode {
                LogprobsMode::Processed => assert_eq!(text, r#"[{"token":0,"logprob":0.0}]"#),
                _ => assert_eq!(back.len(), 3, "raw log-probabilities contain no masked token"),
            }
        }
    }
}

#[test]
fn prompt_logprobs_repeat_and_refuse_what_they_cannot_read() {
    let mut sampler = Sampler::new(3);
    let logits = [2.0, 1.0, 0.0];
    let first = sampler.prompt_logprobs(&logits, 1, 2).expect("finite");
    assert_eq!(sampler.prompt_logprobs(&logits, 1, 2).expect("finite"), first);
    assert!((first.0 - -1.407_606).abs() < 1e-6);
    assert_eq!((first.1, first.2.len(), first.2[0].token), (2, 2, 0));
    // The values are those for an output token.
    let params = with(SamplingParams::default(), |p| {
        p.logprobs = Some(2);
        p.allowed_token_ids = Some(vec![1]);
    });
    let sampled = sample(&logits, row(&params, &[], &[], 0)).expect("a token");
    assert_eq!((sampled.logprob, sampled.rank, sampled.top), (Some(first.0), first.1, first.2));

    assert_eq!(sampler.prompt_logprobs(&logits, 3, 0), Err(SampleError::NoSuchToken { token: 3, vocab_size: 3 }));
    assert_eq!(sampler.prompt_logprobs(&logits[..2], 0, 0), Err(SampleError::WrongWidth { got: 2, expected: 3 }));
    let nan = [0.0, 0.0, f32::NAN];
    assert_eq!(sampler.prompt_logprobs(&nan, 0, 0), Err(SampleError::NonFinite { row: 0, token: Some(2) }));
}

fn limits(vocab_size: u32) -> ascend_llm::sampler::ParamLimits {
    ascend_llm::sampler::ParamLimits::new(vocab_size, 64).with_max_logprobs(20).with_has_vocabulary(true)
}

fn with(mut params: SamplingParams, change: impl FnOnce(&mut SamplingParams)) -> SamplingParams {
    change(&mut params);
    params
}
