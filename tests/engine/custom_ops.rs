//! Tests of custom operations: they change the output, see only the rows of one sequence, and a failure ends only its
//! request.

#![allow(missing_docs, clippy::cast_possible_truncation, clippy::unnecessary_wraps)]
#![cfg(feature = "text")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::common::fable::{Seen, alone, assert_at_rest, builder, drain, float, plain_config, quantized};
use ascend_llm::engine::{BuildError, EngineConfig, EngineCore, Request, RequestError};
use ascend_llm::graph::{CompileError, CustomCall, CustomOp, CustomOpError, CustomSite, Numerics};
use ascend_llm::model::ModelError;
use ascend_llm::sampler::SamplingParams;

/// Function that an operation applies to its rows.
type Body = fn(&CustomCall<'_>, &[f32], &mut [f32]) -> Result<(), CustomOpError>;

#[derive(Debug)]
struct Op(Body);

impl CustomOp for Op {
    fn name(&self) -> &'static str {
        "probe"
    }

    fn check(&self, width: usize) -> Result<(), CustomOpError> {
        if width == 256 { Ok(()) } else { Err(CustomOpError(format!("rows of {width}, expected 256"))) }
    }

    fn run(&self, call: &CustomCall<'_>, x: &[f32], out: &mut [f32]) -> Result<(), CustomOpError> {
        (self.0)(call, x, out)
    }
}

/// Token whose rows make the operations below fail.
const BAD: u32 = 99;

fn core_with(config: EngineConfig, sites: &[(CustomSite, Body)]) -> EngineCore {
    let mut builder = builder(&float(), config);
    for (site, body) in sites {
        builder = builder.custom_op(*site, Arc::new(Op(*body)));
    }
    builder.build_core().unwrap()
}

fn request(prompt: Vec<u32>) -> Request {
    let mut params = SamplingParams::greedy();
    (params.max_tokens, params.logprobs) = (Some(6), Some(3));
    Request::tokens(prompt).with_sampling(params)
}

fn prompt(seed: u32, len: u32) -> Vec<u32> {
    (0..len).map(|i| 100 + (i * i * 5 + i * seed + seed) % 600).collect()
}

fn config(rows: u32) -> EngineConfig {
    let mut config = plain_config();
    (config.max_num_seqs, config.max_num_batched_tokens, config.numerics) = (8, rows, Numerics::Fast);
    config
}

fn all(core: &mut EngineCore, requests: Vec<Request>) -> Vec<Result<Seen, RequestError>> {
    let handles: Vec<_> = requests.into_iter().map(|request| core.submit(request).unwrap()).collect();
    drain(core);
    handles.into_iter().map(|handle| handle.collect_output().map(|output| Seen::of(&output))).collect()
}

fn copy(_: &CustomCall<'_>, x: &[f32], out: &mut [f32]) -> Result<(), CustomOpError> {
    assert!(x == out, "the output buffer does not start as a copy of the input");
    Ok(())
}

/// Adds a direction, scaled by a function of the row's token and position.
fn steer(call: &CustomCall<'_>, x: &[f32], out: &mut [f32]) -> Result<(), CustomOpError> {
    assert_eq!((x.len(), out.len()), (call.tokens.len() * call.width, x.len()));
    for (row, (out, token)) in out.chunks_exact_mut(call.width).zip(call.tokens).enumerate() {
        let position = call.first_position + row as u32;
        let size = ((token * 7 + position * 3) % 11) as f32 / 20.0;
        out.iter_mut().step_by(3).for_each(|x| *x += size);
    }
    Ok(())
}

fn refuse(call: &CustomCall<'_>, _: &[f32], out: &mut [f32]) -> Result<(), CustomOpError> {
    out.fill(f32::NAN);
    if call.tokens.contains(&BAD) {
        return Err(CustomOpError("bad token".to_owned()));
    }
    out.fill(0.5);
    Ok(())
}

fn panic(call: &CustomCall<'_>, _: &[f32], out: &mut [f32]) -> Result<(), CustomOpError> {
    out.fill(0.5);
    assert!(!call.tokens.contains(&BAD), "the rows contain the bad token");
    Ok(())
}

#[test]
fn an_operation_changes_the_output_and_a_copying_one_does_not() {
    let plain = alone(&float(), &config(512), request(prompt(1, 40)));
    let with = |sites: &[(CustomSite, Body)]| {
        all(&mut core_with(config(512), sites), vec![request(prompt(1, 40))]).remove(0).unwrap()
    };
    let copied = with(&[
        (CustomSite::AfterEmbedding, copy),
        (CustomSite::AfterLayer(0), copy),
        (CustomSite::AfterLayer(2), copy),
    ]);
    assert_eq!(copied, plain);
    for site in [CustomSite::AfterEmbedding, CustomSite::AfterLayer(0), CustomSite::AfterLayer(2)] {
        assert_ne!(with(&[(site, steer)]), plain, "{site}");
    }
    // Two operations at the same site run in the order in which they were added.
    let fill = |call: &CustomCall<'_>, _: &[f32], out: &mut [f32]| refuse(call, &[], out);
    let last = (CustomSite::AfterLayer(1), fill as Body);
    assert_eq!(with(&[(CustomSite::AfterLayer(1), steer), last]), with(&[last]));
    assert_ne!(with(&[last, (CustomSite::AfterLayer(1), steer)]), with(&[last]));
}

#[test]
fn other_sequences_and_chunks_do_not_change_bits() {
    let sites: [(CustomSite, Body); 2] = [(CustomSite::AfterEmbedding, steer), (CustomSite::AfterLayer(1), steer)];
    let requests = || (1..7).map(|seed| request(prompt(seed, seed * 17))).collect::<Vec<_>>();
    let single = requests()
        .into_iter()
        .map(|request| all(&mut core_with(config(512), &sites), vec![request]).remove(0).unwrap());
    let expected: Vec<Seen> = single.collect();
    for rows in [8, 33, 512] {
        for (level, threads) in [(0, 1), (2, 2), (3, 2)] {
            let mut config = config(rows);
            (config.compile.opt_level, config.threads) = (Some(level), Some(threads));
            config.pipeline_depth = Some(threads as u32);
            let got = all(&mut core_with(config, &sites), requests());
            for (got, expected) in got.into_iter().zip(&expected) {
                assert!(got.unwrap() == *expected, "{rows} rows per step, level {level}");
            }
        }
    }
}

#[test]
fn a_failure_ends_its_own_request_and_names_the_operation() {
    for (body, reason) in [(refuse as Body, "bad token"), (panic as Body, "panicked: the rows contain the bad token")] {
        let sites = [(CustomSite::AfterLayer(1), body)];
        let good = || [request(prompt(1, 30)), request(prompt(2, 50))];
        let expected: Vec<Seen> = good()
            .into_iter()
            .map(|good| all(&mut core_with(config(512), &sites), vec![good]).remove(0).unwrap())
            .collect();
        // The token is in the middle of a prompt, which is computed in several chunks or in one.
        for (rows, first, depth) in [(8, None, 1), (512, Some(0), 1), (8, None, 2), (24, None, 3)] {
            let mut bad = prompt(3, 60);
            bad[20] = BAD;
            let mut config = config(rows);
            config.pipeline_depth = Some(depth);
            let mut core = core_with(config, &sites);
            let [one, two] = good();
            let mut answers = all(&mut core, vec![one, request(bad), two]);
            match answers.remove(1) {
                Err(RequestError::CustomOp { choice: 0, position, name, reason: message }) => {
                    assert_eq!((name.as_str(), message.as_str()), ("probe", reason));
                    assert!(
                        first.is_none_or(|first| first == position) && position <= 20,
                        "the error has the wrong position {position}"
                    );
                }
                other => panic!("{other:?}"),
            }
            for (got, expected) in answers.into_iter().zip(&expected) {
                assert!(got.unwrap() == *expected, "{rows} rows per step");
            }
            assert_eq!(core.stats().finished_error, 1);
            assert_at_rest(&core);
            // The engine continues to work.
            let [one, _] = good();
            assert!(all(&mut core, vec![one]).remove(0).unwrap() == expected[0]);
        }
    }
}

/// A failure in an earlier step, in the program of another bucket, is not reported for this step.
#[test]
fn a_failure_is_reported_with_its_own_message() {
    fn dislike(call: &CustomCall<'_>, _: &[f32], _: &mut [f32]) -> Result<(), CustomOpError> {
        let bad = call.tokens.iter().find(|token| **token < 100);
        bad.map_or(Ok(()), |token| Err(CustomOpError(format!("token {token}"))))
    }
    let mut config = config(512);
    config.compile.token_buckets = Some(vec![4]);
    let mut core = core_with(config, &[(CustomSite::AfterLayer(0), dislike)]);
    for (token, len) in [(98, 3), (97, 60), (96, 3)] {
        let mut bad = prompt(3, len);
        bad[1] = token;
        match all(&mut core, vec![request(bad)]).remove(0) {
            Err(RequestError::CustomOp { reason, .. }) => assert_eq!(reason, format!("token {token}")),
            other => panic!("{other:?}"),
        }
    }
}

/// Each sequence of a batch causes one call per step, with the tokens and positions of its own rows.
#[test]
fn calls_have_one_sequences_rows() {
    static CALLS: AtomicU32 = AtomicU32::new(0);
    fn look(call: &CustomCall<'_>, _: &[f32], _: &mut [f32]) -> Result<(), CustomOpError> {
        CALLS.fetch_add(1, Ordering::Relaxed);
        let sequence = call.tokens[0] / 100;
        let sound = call.tokens.iter().enumerate().all(|(row, token)| {
            let position = call.first_position + row as u32;
            position >= 40 || *token == sequence * 100 + position
        });
        if sound { Ok(()) } else { Err(CustomOpError(format!("{call:?}"))) }
    }
    let mut core = core_with(config(24), &[(CustomSite::AfterLayer(0), look)]);
    let mut params = SamplingParams::greedy();
    params.max_tokens = Some(1);
    let requests = (1..4)
        .map(|i| Request::tokens((0..40).map(|p| 100 * i + p).collect::<Vec<u32>>()).with_sampling(params.clone()));
    let answers = all(&mut core, requests.collect());
    assert!(answers.iter().all(Result::is_ok), "{answers:?}");
    // 120 rows in steps of 24 rows: five steps, with one or two sequences each.
    let calls = CALLS.load(Ordering::Relaxed);
    assert!((5..=10).contains(&calls), "{calls} calls");
}

#[test]
fn operations_without_a_site_in_the_model_are_rejected_by_name() {
    let build = |model: &std::path::Path, site| {
        builder(model, plain_config()).custom_op(site, Arc::new(Op(copy))).build_core().unwrap_err()
    };
    match build(&quantized(), CustomSite::AfterLayer(3)) {
        BuildError::Model(error @ ModelError::Custom { layers: 3, .. }) => {
            let expected = "custom operation probe cannot run after layer 3: the model has layers 0 to 2";
            assert_eq!(error.to_string(), expected);
        }
        other => panic!("{other:?}"),
    }
    let other = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/conformance/qwen2");
    match build(&other, CustomSite::AfterEmbedding) {
        BuildError::Compile(error @ CompileError::Custom { .. }) => {
            assert_eq!(error.to_string(), "custom operation probe: rows of 64, expected 256");
        }
        other => panic!("{other:?}"),
    }
}
