#![allow(clippy::explicit_write)]
//! Tests that the library writes nothing to stdout or stderr in any situation.
//!
//! The test runs itself as a child process, which marks the beginning and the end of the library's work; between the
//! marks both streams must be empty. The child uses `--nocapture`, so the marks and the library's output go to the same
//! raw streams, and no output can escape the check.
#![cfg(feature = "text")]

mod common;

use std::io::Write as _;
use std::process::Command;

use ascend_llm::engine::{Engine, Request};
use ascend_llm::sampler::SamplingParams;
use ascend_llm::text::ChatMessage;
use common::fable::{builder, core, finish, float, plain_config, quantized};

const ROLE: &str = "ASCEND_LLM_SILENCE_CHILD";
const BEGIN: &str = "<<library begins>>";
const END: &str = "<<library ends>>";

fn mark(mark: &str) {
    print!("{mark}");
    eprint!("{mark}");
    std::io::stdout().flush().unwrap();
}

/// Loads models and generates, rejects, cancels and fails requests, then shuts down.
fn work() {
    for model in [float(), quantized()] {
        let engine = builder(&model, plain_config()).on_progress(|_| {}).build().unwrap();
        let mut params = SamplingParams::greedy();
        params.max_tokens = Some(8);
        assert!(!engine.generate("Once upon a time", &params).unwrap().is_empty());
        engine.chat(&[ChatMessage::new("user", "Who are you?")], &params).unwrap();
        drop(engine.submit(Request::text("The")).unwrap());
        params.temperature = f32::NAN;
        engine.generate("Once", &params).unwrap_err();
        engine.submit(Request::tokens(vec![])).unwrap_err();
        let _ = engine.stats();
        engine.shutdown(std::time::Duration::MAX).unwrap();

        let mut core = core(&model, plain_config());
        let handle = core.submit(Request::text("One day").with_sampling({
            let mut params = SamplingParams::default();
            (params.n, params.seed, params.max_tokens, params.logprobs) = (2, Some(1), Some(6), Some(2));
            params
        }));
        finish(&mut core, handle.unwrap());
    }
    Engine::builder("/nowhere/at/all").build().unwrap_err();
    Engine::builder(file!()).build().unwrap_err();
    let mut config = plain_config();
    config.max_num_seqs = 0;
    builder(&float(), config).build().unwrap_err();
}

/// Returns the child's output between the marks, on stdout and on stderr.
fn written(role: &str) -> [String; 2] {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child", "--nocapture", "--test-threads=1"])
        .env(ROLE, role)
        .output()
        .unwrap();
    let streams = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    assert!(output.status.success(), "the child failed: {streams:?}");
    streams.map(|stream| {
        let (_, rest) = stream.split_once(BEGIN).unwrap_or_else(|| panic!("the output has no begin mark: {stream:?}"));
        let (between, _) = rest.split_once(END).unwrap_or_else(|| panic!("the output has no end mark: {stream:?}"));
        between.to_owned()
    })
}

/// Runs as the child; does nothing in a normal test run.
#[test]
fn child() {
    let Ok(role) = std::env::var(ROLE) else { return };
    mark(BEGIN);
    match role.as_str() {
        "library" => work(),
        "loud" => {
            print!("out");
            eprint!("err");
        }
        other => panic!("unknown role {other}"),
    }
    mark(END);
}

#[test]
fn the_library_writes_nothing() {
    assert_eq!(written("library"), ["", ""]);
}

#[test]
fn output_of_the_child_is_detected() {
    assert_eq!(written("loud"), ["out", "err"]);
}
