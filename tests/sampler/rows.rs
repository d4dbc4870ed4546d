//! Tests that a row's token depends only on the row, its seed, choice and position, and that sampling follows the
//! distribution.

#![allow(clippy::cast_possible_truncation)]

use ascend_llm::runner::LogitRows;
use ascend_llm::sampler::{LogprobsMode, SampleError, SampleRow, Sampled, Sampler, SamplingParams};
use proptest::prelude::*;

const VOCAB: usize = 40;

/// A row with all data that sampling needs.
#[derive(Clone, Debug)]
struct Case {
    logits: Vec<f32>,
    params: SamplingParams,
    prompt: Vec<u32>,
    output: Vec<u32>,
    bad_words: Vec<Vec<u32>>,
    seed: u64,
    choice: u32,
}

impl Case {
    fn row(&self, at: usize) -> SampleRow<'_> {
        let Self { params, prompt, output, bad_words, seed, choice, .. } = self;
        SampleRow::new(at, params, prompt, output)
            .with_eos_ids(&[2])
            .with_bad_words(bad_words)
            .with_seed(*seed)
            .with_choice(*choice)
    }
}

fn run(sampler: &mut Sampler, cases: &[Case], order: &[usize], out: &mut Vec<Result<Sampled, SampleError>>) {
    let logits: Vec<f32> = cases.iter().flat_map(|case| case.logits.clone()).collect();
    let rows: Vec<SampleRow<'_>> = order.iter().map(|&at| cases[at].row(at)).collect();
    sampler.sample(LogitRows::new(&logits, VOCAB, &vec![0; cases.len()]), &rows, out);
}

fn case() -> impl Strategy<Value = Case> {
    let token = 0..VOCAB as u32;
    let logit = prop_oneof![40 => -6.0f32..6.0, 10 => (-6i8..6).prop_map(f32::from), 1 => Just(f32::NAN)];
    let filters = (
        prop_oneof![Just(0.0f32), 0.1f32..2.0],
        -1i32..VOCAB as i32,
        prop_oneof![Just(1.0f32), 0.05f32..1.0],
        prop_oneof![Just(0.0f32), 0.0f32..0.5],
    );
    let edits = (
        prop_oneof![Just(1.0f32), 0.5f32..2.0],
        prop_oneof![Just(0.0f32), -2.0f32..2.0],
        prop_oneof![Just(0.0f32), -2.0f32..2.0],
        prop::collection::btree_map(token.clone(), -9.0f32..9.0, 0..3),
        prop::option::of(prop::collection::vec(token.clone(), 1..30)),
        0u32..6,
    );
    let asks = (prop::option::of(0u32..6), prop_oneof![Just(LogprobsMode::Raw), Just(LogprobsMode::Processed)]);
    let history = (
        prop::collection::vec(logit, VOCAB),
        prop::collection::vec(token.clone(), 0..12),
        prop::collection::vec(token.clone(), 0..12),
        prop::collection::vec(prop::collection::vec(token, 1..3), 0..3),
    );
    (filters, edits, asks, history, any::<u64>(), 0u32..4).prop_map(|(filters, edits, asks, history, seed, choice)| {
        let mut params = SamplingParams::default();
        (params.temperature, params.top_k, params.top_p, params.min_p) = filters;
        let bias;
        (
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
            bias,
            params.allowed_token_ids,
            params.min_tokens,
        ) = edits;
        params.logit_bias = bias.into_iter().collect();
        (params.logprobs, params.logprobs_mode) = asks;
        let (logits, prompt, output, bad_words) = history;
        Case { logits, params, prompt, output, bad_words, seed, choice }
    })
}

proptest! {
    #[test]
    fn a_row_has_the_same_result_in_any_batch(
        cases in prop::collection::vec(case(), 1..8), order in prop::collection::vec(any::<prop::sample::Index>(), 1..12),
    ) {
        let order: Vec<usize> = order.iter().map(|at| at.index(cases.len())).collect();
        let mut together = Vec::new();
        let mut sampler = Sampler::new(VOCAB);
        run(&mut sampler, &cases, &order, &mut together);
        prop_assert_eq!(together.len(), order.len());
        for (got, &at) in together.iter().zip(&order) {
            let mut alone = Vec::new();
            run(&mut Sampler::new(VOCAB), &cases, &[at], &mut alone);
            prop_assert_eq!(got, &alone[0]);
        }
        // Reusing the sampler and the list of results does not change the results.
        let mut again = together.clone();
        run(&mut sampler, &cases, &order, &mut again);
        prop_assert_eq!(&again, &together);
    }

    #[test]
    fn asking_for_logprobs_never_changes_the_token(case in case()) {
        let mut quiet = case.clone();
        quiet.params.logprobs = None;
        let mut out = [Vec::new(), Vec::new()];
        run(&mut Sampler::new(VOCAB), &[case], &[0], &mut out[0]);
        run(&mut Sampler::new(VOCAB), &[quiet], &[0], &mut out[1]);
        let [asked, quiet] = out.map(|mut out| out.remove(0).map(|sampled| sampled.token));
        prop_assert_eq!(asked, quiet);
    }
}

proptest! {
    /// Rows with an argmax found by the model yield the same results as without it.
    #[test]
    fn a_known_argmax_changes_nothing(cases in prop::collection::vec(case(), 1..6)) {
        let logits: Vec<f32> = cases.iter().flat_map(|case| case.logits.clone()).collect();
        let finite = |case: &Case| case.logits.iter().all(|logit| logit.is_finite());
        let status: Vec<u8> = cases.iter().map(|case| u8::from(!finite(case)) * 2).collect();
        let argmax_of = |case: &Case| {
            let largest = case.logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            case.logits.iter().position(|logit| *logit == largest && finite(case)).map_or(u32::MAX, |id| id as u32)
        };
        let argmax: Vec<u32> = cases.iter().map(argmax_of).collect();
        let rows: Vec<SampleRow<'_>> = cases.iter().enumerate().map(|(at, case)| case.row(at)).collect();
        let mut out = [Vec::new(), Vec::new()];
        for (out, argmax) in out.iter_mut().zip([[].as_slice(), &argmax]) {
            let logits = LogitRows::new(&logits, VOCAB, &status).with_argmax(argmax);
            Sampler::new(VOCAB).sample(logits, &rows, out);
        }
        prop_assert_eq!(&out[0], &out[1]);
    }
}

/// The model's argmax is used for plain greedy requests only.
#[test]
fn a_known_argmax_is_used() {
    let mut params = SamplingParams::greedy();
    let logits = [0.0, 1.0, 5.0, 2.0];
    let mut token = |argmax: &[u32], change: fn(&mut SamplingParams)| {
        change(&mut params);
        let row = SampleRow::new(0, &params, &[], &[]).with_seed(1);
        let mut out = Vec::new();
        Sampler::new(4).sample(LogitRows::new(&logits, 4, &[0]).with_argmax(argmax), &[row], &mut out);
        out.remove(0).unwrap().token
    };
    assert_eq!(token(&[1], |_| {}), 1);
    assert_eq!(token(&[9], |_| {}), 2, "an argmax outside of the vocabulary is ignored");
    assert_eq!(token(&[], |_| {}), 2);
    assert_eq!(token(&[1], |p| p.logprobs = Some(0)), 2);
    assert_eq!(token(&[1], |p| (p.logprobs, p.logit_bias) = (None, [(3, 9.0)].into_iter().collect())), 3);
}

fn sample_token(logits: &[f32], params: &SamplingParams, seed: u64, choice: u32, position: usize) -> u32 {
    let output = vec![0; position];
    let row = SampleRow::new(0, params, &[], &output).with_seed(seed).with_choice(choice);
    let mut out = Vec::new();
    let logits = LogitRows::new(logits, logits.len(), &[0]);
    Sampler::new(logits.vocab).sample(logits, &[row], &mut out);
    out.remove(0).expect("a token").token
}

#[test]
fn samples_differ_by_position() {
    let sampled: std::collections::HashSet<u32> =
        (0..50).map(|at| sample_token(&[0.0; 100], &SamplingParams::default(), 1, 0, at)).collect();
    assert!(sampled.len() >= 30, "{} distinct ids", sampled.len());
}

#[test]
fn choices_of_one_seed_differ_and_repeat() {
    let text = |choice| -> Vec<u32> {
        (0..20).map(|at| sample_token(&[0.0; 100], &SamplingParams::default(), 7, choice, at)).collect()
    };
    let choices = [text(0), text(1), text(2)];
    assert!(choices[0] != choices[1] && choices[1] != choices[2] && choices[0] != choices[2]);
    assert_eq!(choices, [text(0), text(1), text(2)]);
}

/// The sampling algorithm is part of the API: a seed yields the same tokens in all releases and on all machines.
#[test]
fn seeds_keep_their_meaning() {
    let sampled: Vec<u32> =
        (0..12).map(|at| sample_token(&[0.0; 1000], &SamplingParams::default(), 42, 0, at)).collect();
    // Computed by an independent ChaCha8, written from the specification: the key is the seed and the crate's constant,
    // the stream is the choice.
    assert_eq!(sampled, [634, 103, 131, 645, 949, 81, 474, 487, 364, 66, 421, 460]);
}

#[test]
fn off_is_off_however_it_is_spelled() {
    let logits: Vec<f32> = (0..64).map(|id| (id as f32 * 0.37).sin() * 3.0).collect();
    let spelled: Vec<Vec<u32>> = [0, -1, 64, 1000]
        .iter()
        .map(|&top_k| {
            let params = with(SamplingParams::default(), |p| {
                p.top_k = top_k;
            });
            (0..10).map(|seed| sample_token(&logits, &params, seed, 0, 0)).collect()
        })
        .collect();
    assert!(spelled.iter().all(|tokens| tokens == &spelled[0]));
    assert!(spelled[0].iter().any(|token| token != &spelled[0][0]), "all ten seeds sampled the same token");
}

#[test]
fn one_token_left_is_greedy_whichever_filter_leaves_it() {
    let logits = [1.0, 4.0, 4.0, 3.9, f32::MIN];
    let default = SamplingParams::default();
    for (params, tie_broken) in [
        (
            with(default.clone(), |p| {
                p.top_k = 1;
            }),
            true,
        ),
        (
            with(default.clone(), |p| {
                p.top_p = 1e-9;
            }),
            true,
        ),
        (SamplingParams::greedy(), true),
        // Two equally likely tokens both pass min_p.
        (
            with(default, |p| {
                p.min_p = 1.0;
            }),
            false,
        ),
    ] {
        for seed in 0..40 {
            let token = sample_token(&logits, &params, seed, 0, 0);
            assert!(token == 1 || (!tie_broken && token == 2), "{token} with {params:?}");
        }
    }
}

/// Compares 20,000 samples with the exact probabilities, over the positions of one seed and over seeds at one position.
#[test]
fn frequencies_match_the_probabilities() {
    const DRAWS: usize = 20_000;
    let logits: Vec<f32> = (0..200).map(|id| 3.0 - (id % 25) as f32 * 0.25).collect();
    let temperature = 0.8f64;
    let configs = [
        with(SamplingParams::default(), |p| {
            p.temperature = 0.8;
        }),
        with(SamplingParams::default(), |p| {
            p.temperature = 0.8;
            p.top_k = 30;
        }),
        with(SamplingParams::default(), |p| {
            p.temperature = 0.8;
            p.top_p = 0.7;
        }),
    ];
    for params in configs {
        let mut order: Vec<usize> = (0..200).collect();
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
        let weight = |id: usize| (f64::from(logits[id]) / temperature).exp();
        let all: f64 = order.iter().map(|&id| weight(id)).sum();
        let mut kept = 0.0;
        let mut expected = vec![0.0; 200];
        for (place, &id) in order.iter().enumerate() {
            let in_k = params.top_k == 0 || place < params.top_k as usize;
            if in_k && (params.top_p == 1.0 || kept < f64::from(params.top_p) * all) {
                kept += weight(id);
                expected[id] = weight(id);
            }
        }
        for by_seed in [false, true] {
            let mut counts = vec![0.0; 200];
            let zeros = vec![0; DRAWS];
            let rows: Vec<SampleRow<'_>> =
                (0..DRAWS)
                    .map(|at| {
                        SampleRow::new(0, &params, &[], if by_seed { &[] } else { &zeros[..at] })
                            .with_seed(if by_seed { at as u64 } else { 9 })
                    })
                    .collect();
            let mut out = Vec::new();
            Sampler::new(200).sample(LogitRows::new(&logits, 200, &[0]), &rows, &mut out);
            for sampled in out {
                counts[sampled.expect("a token").token as usize] += 1.0;
            }
            let (mut chi, mut cells) = (0.0, 0.0);
            for (count, weight) in counts.iter().zip(&expected) {
                let want = weight / kept * DRAWS as f64;
                if want == 0.0 {
                    assert_eq!(*count, 0.0, "sampled a token that was filtered out");
                } else {
                    chi += (count - want) * (count - want) / want;
                    cells += 1.0;
                }
            }
            // The mean of chi-square is cells - 1, its variance twice that. The bound is four standard deviations; the
            // seed is fixed.
            let bound = cells - 1.0 + 4.0 * (2.0 * (cells - 1.0f64)).sqrt();
            assert!(chi < bound, "chi-square {chi} over {cells} cells, bound {bound}");
        }
    }
}

fn with(mut params: SamplingParams, change: impl FnOnce(&mut SamplingParams)) -> SamplingParams {
    change(&mut params);
    params
}
