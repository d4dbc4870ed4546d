//! Tests that hosts get text, counts, times and serialized results from the engine.

use std::time::Duration;

use ascend_llm::engine::{Clock as _, Health, ManualClock};
use ascend_llm::scheduler::Tick;
use ascend_llm::{Engine, EngineConfig, FinishReason, Request, RequestError, SamplingParams, SubmitError};
use serde_json::{Value, json};

use crate::common::scripted_engine::{Rig, drain};

const VOCAB: u32 = 50;

fn request(prompt_tokens: usize, max_tokens: u32) -> Request {
    Request::tokens(vec![1; prompt_tokens]).with_sampling(SamplingParams::greedy().with_max_tokens(max_tokens))
}

/// Rig and its clock: each launch of the model takes 10 ms, and only launches advance the clock.
fn slow_rig() -> (Rig, ManualClock) {
    let rig = Rig::new(VOCAB, 32);
    let clock = rig.clock.clone();
    (rig, clock)
}

#[test]
fn usage_has_counts_and_times_in_the_last_delta_and_the_output() {
    let (rig, clock) = slow_rig();
    let step_us = 10_000;
    let advance = clock.clone();
    let forward = rig.hashed().watched(Box::new(move |_| {
        advance.advance(Duration::from_millis(10));
        Ok(())
    }));
    let mut core = rig.core(forward);
    let mut streamed = core.submit(request(3, 4)).unwrap();
    let collected = core.submit(request(3, 4)).unwrap();
    clock.advance(Duration::from_millis(7));
    let start = clock.now();
    drain(&mut core);
    assert_eq!(clock.now(), Tick(start.0 + 4 * step_us));

    let mut deltas = Vec::new();
    let mut builder = streamed.output_builder();
    for delta in streamed.deltas() {
        let delta = delta.unwrap();
        builder.push(&delta);
        deltas.push(delta);
    }
    let usage = deltas.last().unwrap().usage.expect("the last delta contains the usage");
    assert!(deltas[..deltas.len() - 1].iter().all(|delta| delta.usage.is_none()));
    assert_eq!((usage.prompt_tokens, usage.cached_tokens, usage.generated_tokens), (3, 0, 4));
    assert_eq!((usage.queue_us, usage.prefill_us, usage.decode_us), (7_000, step_us, 3 * step_us));
    assert_eq!(usage.time_to_first_token_us, Some(7_000 + step_us));
    assert_eq!(builder.finish().usage, usage);
    assert_eq!(collected.collect_output().unwrap().usage, usage);
}

#[test]
fn usage_of_several_choices_is_of_all_of_them_and_comes_last() {
    let rig = Rig::new(VOCAB, 32);
    let mut core = rig.core(rig.hashed());
    let params = SamplingParams::default().with_n(3).with_seed(4).with_max_tokens(5);
    let handle = core.submit(Request::tokens(vec![1, 2]).with_sampling(params)).unwrap();
    drain(&mut core);
    let deltas: Vec<_> = handle.into_iter().map(Result::unwrap).collect();
    let with_usage: Vec<_> = (0..deltas.len()).filter(|at| deltas[*at].usage.is_some()).collect();
    assert_eq!(with_usage, [deltas.len() - 1]);
    let tokens: usize = deltas.iter().map(|delta| delta.token_ids.len()).sum();
    assert_eq!(deltas.last().unwrap().usage.unwrap().generated_tokens as usize, tokens);
}

#[test]
fn a_request_that_never_ran_only_queued() {
    let (mut rig, clock) = slow_rig();
    rig.config.max_num_seqs = 1;
    let mut core = rig.core(rig.hashed());
    let _running = core.submit(request(3, 100)).unwrap();
    let waiting = core.submit(request(3, 5)).unwrap();
    core.step().unwrap();
    clock.advance(Duration::from_millis(3));
    waiting.cancel();
    core.step().unwrap();
    let output = waiting.collect_output().unwrap();
    assert_eq!(output.choices[0].finish_reason, FinishReason::Cancelled);
    let usage = output.usage;
    assert_eq!((usage.queue_us, usage.prefill_us, usage.decode_us), (3_000, 0, 0));
    assert_eq!((usage.generated_tokens, usage.time_to_first_token_us), (0, None));
}

#[test]
fn results_and_counters_serialize() {
    let rig = Rig::new(VOCAB, 32);
    let mut core = rig.core(rig.hashed());
    let params = SamplingParams::greedy().with_max_tokens(2).with_logprobs(1);
    let handle = core.submit(Request::tokens(vec![1, 2]).with_sampling(params)).unwrap();
    drain(&mut core);
    let output = handle.collect_output().unwrap();
    let value = serde_json::to_value(&output).unwrap();
    assert_eq!(value["choices"][0]["finish_reason"], json!({"reason": "length"}));
    assert_eq!(value["choices"][0]["token_ids"], json!(output.choices[0].token_ids));
    assert_eq!(value["choices"][0]["logprobs"].as_array().unwrap().len(), 2);
    assert_eq!(value["choices"][0]["logprobs"][0]["chosen"]["token"], output.choices[0].token_ids[0]);
    assert_eq!(value["usage"]["prompt_tokens"], 2);
    let stop = FinishReason::Stop { matched: ascend_llm::engine::StopMatch::Text(".".into()) };
    assert_eq!(serde_json::to_value(stop).unwrap(), json!({"reason": "stop", "matched": {"text": "."}}));
    let stats = serde_json::to_value(core.stats()).unwrap();
    assert_eq!((&stats["generated_tokens"], &stats["time_to_first_token"]["count"]), (&json!(2), &json!(1)));
    assert_eq!(serde_json::to_value(core.health()).unwrap(), "ready");
    let info = serde_json::to_value(core.info()).unwrap();
    assert_eq!((&info["version"], &info["architecture"]), (&json!(env!("CARGO_PKG_VERSION")), &Value::Null));
}

#[test]
fn settings_have_methods_and_refuse_unknown_keys_when_flattened() {
    #[derive(Debug, serde::Deserialize)]
    struct Body {
        prompt: String,
        #[serde(flatten)]
        sampling: SamplingParams,
    }
    let read = |text: &str| serde_json::from_str::<Body>(text);
    let body = read(r#"{"prompt": "x", "stop": ["a", "b"], "logit_bias": {"3": 1.5}, "seed": null, "n": 2}"#).unwrap();
    let expected = SamplingParams::default().with_stop(["a", "b"]).with_logit_bias([(3, 1.5)]).with_n(2);
    assert_eq!((body.prompt.as_str(), body.sampling), ("x", expected));
    for (text, named) in [
        (r#"{"prompt": "x", "max_token": 3}"#, "unknown field `max_token`, expected one of `temperature`"),
        (r#"{"prompt": "x", "n": "two"}"#, "expected u32"),
        (r#"{"prompt": "x", "n": 1, "n": 2}"#, "duplicate field `n`"),
    ] {
        let error = read(text).unwrap_err().to_string();
        assert!(error.contains(named), "{error}");
    }
    let params = SamplingParams::default();
    let same: SamplingParams = serde_json::from_str(&serde_json::to_string(&params).unwrap()).unwrap();
    assert_eq!(same, params);
    let config = EngineConfig::default().with_threads(2).with_kv_dtype(None).with_max_model_len(Some(64));
    assert_eq!((config.threads, config.kv_dtype, config.max_model_len), (Some(2), None, Some(64)));
}

#[test]
fn close_accepts_no_request_and_ends_the_thread_when_all_are_done() {
    let rig = Rig::new(VOCAB, 32);
    let engine = Engine::spawn(rig.core(rig.hashed())).unwrap();
    let handle = engine.submit(request(3, 20)).unwrap();
    engine.close();
    let refused = engine.submit(request(3, 1)).unwrap_err();
    assert!(matches!(refused, SubmitError::Closed(_)), "{refused:?}");
    assert_eq!(refused.into_request(), Some(request(3, 1)));
    assert_eq!(handle.collect_output().unwrap().choices[0].token_ids.len(), 20);
    let clone = engine.clone();
    engine.shutdown(Duration::ZERO).unwrap();
    assert_eq!(clone.health(), Health::Stopped);
}

#[test]
fn dropping_the_last_engine_does_not_wait_for_its_step() {
    let rig = Rig::new(VOCAB, 32);
    let (permit, gate) = std::sync::mpsc::channel::<()>();
    let (entered, inside) = std::sync::mpsc::channel();
    let gate = std::sync::Mutex::new(gate);
    let forward = rig.hashed().watched(Box::new(move |_| {
        let _ = entered.send(());
        let _ = gate.lock().unwrap().recv();
        Ok(())
    }));
    let engine = Engine::spawn(rig.core(forward)).unwrap();
    let handle = engine.submit(request(3, 20)).unwrap();
    inside.recv().unwrap();
    // The step is still in progress: it ends only after the permit.
    drop(engine);
    drop(permit);
    assert!(matches!(handle.into_iter().last(), Some(Err(RequestError::Closed))));
}

#[cfg(feature = "text")]
mod with_text {
    use std::sync::Arc;

    use ascend_llm::device::Device as _;
    use ascend_llm::device::cpu::{CpuDevice, CpuOptions};
    use ascend_llm::graph::Numerics;
    use ascend_llm::{ChatMessage, ChatPrompt, KvDType, Request};
    use serde_json::json;

    use crate::common::fable;

    #[test]
    fn text_and_chats_are_encoded_counted_and_rendered() {
        let engine = fable::builder(&fable::float(), fable::plain_config()).build().unwrap();
        let ids = engine.tokenize("Once upon a time", false).unwrap();
        assert_eq!(engine.detokenize(&ids, true).unwrap(), "Once upon a time");
        let chat = ChatPrompt::new([ChatMessage::user("What does the duck say?")]);
        let rendered = engine.render_chat(chat.clone()).unwrap();
        assert!(rendered.ends_with("<|im_start|>assistant\n"), "{rendered:?}");
        let handle = engine.submit(Request::chat(chat.clone())).unwrap();
        assert_eq!(engine.count_tokens(chat.clone()).unwrap(), handle.prompt_token_ids().len());
        assert_eq!(
            engine.count_tokens("Once upon a time").unwrap(),
            engine.tokenize("Once upon a time", true).unwrap().len()
        );
        let options = ascend_llm::text::ChatOptions::default().with_generation_prompt(false);
        let history = engine.render_chat(chat.clone().with_options(options)).unwrap();
        assert_eq!(format!("{history}<|im_start|>assistant\n"), rendered);

        let template = "{% for m in messages %}[{{ m.content }}|{{ mood }}|{{ tools | length }}]{% endfor %}";
        let own = fable::builder(&fable::float(), fable::plain_config()).chat_template(template).build().unwrap();
        let options = ascend_llm::text::ChatOptions::default()
            .with_tools([json!({"name": "clock"}), json!({"name": "lamp"})])
            .and_then(|options| options.with_variable("mood", "calm"))
            .unwrap();
        let chat = chat.with_options(options);
        assert_eq!(own.render_chat(chat.clone()).unwrap(), "[What does the duck say?|calm|2]");
        assert!(!own.submit(Request::chat(chat)).unwrap().prompt_token_ids().is_empty());
        let broken =
            fable::builder(&fable::float(), fable::plain_config()).chat_template("{% for %}").build().unwrap_err();
        assert!(broken.to_string().starts_with("tokenizer or chat template: chat template, line 1"), "{broken}");
    }

    #[test]
    fn the_engine_reports_what_it_runs() {
        let device = Arc::new(CpuDevice::new(CpuOptions::default()).unwrap());
        let description = device.caps().description.clone();
        let core = fable::builder(&fable::quantized(), fable::plain_config()).device(device).build_core().unwrap();
        let info = core.info();
        assert_eq!(info.architecture.unwrap().name(), "llama");
        assert_eq!(info.weight_dtype.unwrap().name(), "q8_0");
        assert_eq!((info.kv_dtype, info.numerics), (Some(KvDType::F16), Some(Numerics::Fast)));
        assert_eq!((info.device, info.device_description.as_str()), (Some("cpu"), description.as_str()));
        let value = serde_json::to_value(info).unwrap();
        assert_eq!((&value["architecture"], &value["weight_dtype"]), (&json!("llama"), &json!("q8_0")));
    }
}
