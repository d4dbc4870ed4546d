//! Tests that in-flight steps do not change any output: the tokens are the same at depth 1, 2 and 3.
//!
//! Requests arrive, end, are dropped and fail at random. The model runs as late as possible.
#![allow(clippy::cast_possible_truncation, reason = "the numbers of a test are small")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::common::scripted_engine::{BLOCK, Rig, assert_at_rest, drain};
use ascend_llm::device::DeviceError;
use ascend_llm::engine::{
    BuildError, EngineCore, EngineError, FinishReason, Output, Request, RequestError, RequestHandle,
};
use ascend_llm::kv_cache::BlockId;
use ascend_llm::runner::scripted::{ListedVocabulary, ScriptedForward, hashed_logits};
use ascend_llm::runner::{BatchId, ForwardInput, ForwardOutput, ModelExecutor};
use ascend_llm::sampler::SamplingParams;
use parking_lot::Mutex;
use proptest::prelude::*;

const VOCAB: u32 = 40;

/// A request of a random run, and the actions of its caller.
#[derive(Clone, Debug)]
struct Script {
    prompt: Vec<u32>,
    params: SamplingParams,
    submit_at: usize,
    /// Number of steps after submission at which the caller leaves, and whether it drops its handle (or cancels).
    leaves_after: Option<(usize, bool)>,
}

fn script() -> impl Strategy<Value = Script> {
    let prompt = (0u32..3, 0u32..60, prop::collection::vec(0..VOCAB, 1..12)).prop_map(|(base, len, tail)| {
        (0..len).map(|at| (base * 17 + at * 7) % VOCAB).chain(tail).collect::<Vec<u32>>()
    });
    let lengths = (any::<u64>(), 1u32..30, 0u32..5);
    let looks = (prop::option::weighted(0.2, 0u32..4), prop::bool::weighted(0.2));
    // Most requests are plain greedy ones: these are scheduled ahead.
    let kind = (prop::bool::weighted(0.7), prop::bool::weighted(0.6), 0u32..6);
    let leaving = (0usize..30, prop::option::weighted(0.25, (0usize..20, any::<bool>())));
    (prompt, lengths, looks, kind, leaving).prop_map(|(prompt, lengths, looks, kind, (submit_at, leaves_after))| {
        let (seed, max_tokens, min_tokens) = lengths;
        let (greedy, plain, edit) = kind;
        let mut params = if greedy { SamplingParams::greedy() } else { SamplingParams::default() };
        (params.seed, params.max_tokens) = (Some(seed), Some(max_tokens));
        if !greedy {
            params.n = 1 + (seed % 3) as u32;
        }
        if !plain {
            (params.logprobs, params.prompt_logprobs) = (looks.0, looks.1.then_some(2));
            match edit {
                0 => params.presence_penalty = 0.5,
                1 => params.logit_bias = vec![(3, 2.0), (9, -1.0)],
                2 => params.allowed_token_ids = Some((0..VOCAB).filter(|id| id % 3 != 1).collect()),
                3 => params.min_tokens = min_tokens.min(max_tokens),
                4 => params.bad_words = vec!["d".to_owned()],
                _ => params.ignore_eos = true,
            }
        }
        match seed % 4 {
            0 => params.stop_token_ids = vec![4, 5],
            1 => params.stop = vec!["bc".to_owned(), "a".to_owned()],
            _ => {}
        }
        Script { prompt, params, submit_at, leaves_after }
    })
}

/// Token texts: ids are letters, some of them twice, so that stop strings occur.
fn pieces() -> ListedVocabulary {
    ListedVocabulary::new((0..VOCAB).map(|id| [b'a' + (id % 13) as u8]))
}

#[derive(Clone, Debug)]
struct Setting {
    blocks: u32,
    max_num_seqs: u32,
    spare_rows: u32,
    prefix_caching: bool,
    max_logit_rows: u32,
    deferred: bool,
}

fn setting() -> impl Strategy<Value = Setting> {
    (7u32..30, 1u32..7, 0u32..40, any::<bool>(), 1u32..40, any::<bool>()).prop_map(
        |(blocks, max_num_seqs, spare_rows, prefix_caching, max_logit_rows, deferred)| Setting {
            blocks,
            max_num_seqs,
            spare_rows,
            prefix_caching,
            max_logit_rows,
            deferred,
        },
    )
}

impl Setting {
    fn core(&self, depth: u32) -> EngineCore {
        let mut rig = Rig::new(VOCAB, self.blocks);
        rig.model.eos_ids = vec![7];
        rig.model.max_logit_rows = self.max_logit_rows;
        rig.vocabulary = Some(pieces().shared());
        rig.config.prefix_caching = self.prefix_caching;
        rig.config.max_num_seqs = self.max_num_seqs;
        rig.config.max_num_batched_tokens = self.max_num_seqs + self.spare_rows;
        rig.config.pipeline_depth = Some(depth);
        let model = rig.hashed();
        rig.core(if self.deferred { model.deferred() } else { model })
    }
}

fn request(script: &Script) -> Request {
    Request::tokens(script.prompt.clone()).with_sampling(script.params.clone())
}

/// Outputs of a run by request, and the number of choices that stopped before their maximum length.
struct Run {
    outputs: Vec<Option<Output>>,
    stopped: u64,
    left: u64,
    wasted: u64,
}

fn run(setting: &Setting, scripts: &[Script], depth: u32) -> Run {
    let mut core = setting.core(depth);
    let mut handles: Vec<Option<RequestHandle>> = scripts.iter().map(|_| None).collect();
    let mut step = 0;
    while step < 60 || !core.is_idle() {
        for (script, handle) in scripts.iter().zip(&mut handles) {
            if script.submit_at == step {
                *handle = Some(core.submit(request(script)).unwrap());
            }
            match script.leaves_after {
                Some((after, true)) if script.submit_at + after == step => handle.as_ref().unwrap().cancel(),
                Some((after, false)) if script.submit_at + after == step => *handle = None,
                _ => {}
            }
        }
        core.step().unwrap();
        core.check().unwrap();
        step += 1;
        assert!(step < 20_000, "the requests do not end within the bound");
    }
    assert_at_rest(&core);
    let stats = core.stats();
    Run {
        outputs: handles.into_iter().map(|handle| handle.map(|handle| handle.collect_output().unwrap())).collect(),
        stopped: stats.finished_stop,
        left: stats.finished_cancelled,
        wasted: stats.wasted_rows,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]

    #[test]
    fn depth_does_not_change_outputs(setting in setting(), scripts in prop::collection::vec(script(), 1..10)) {
        let expected = run(&setting, &scripts, 1);
        prop_assert_eq!(expected.wasted, 0);
        for depth in [2, 3] {
            let got = run(&setting, &scripts, depth);
            for (script, (got, expected)) in scripts.iter().zip(got.outputs.iter().zip(&expected.outputs)) {
                let (Some(got), Some(expected)) = (got, expected) else { continue };
                if script.leaves_after.is_none() {
                    prop_assert_eq!(&got.choices, &expected.choices, "depth {}", depth);
                    prop_assert_eq!(&got.prompt_logprobs, &expected.prompt_logprobs);
                }
                for (got, expected) in got.choices.iter().zip(&expected.choices) {
                    let (a, b) = (&got.token_ids, &expected.token_ids);
                    prop_assert!(a.starts_with(b) || b.starts_with(a), "depth {}: {:?} {:?}", depth, a, b);
                }
            }
            // A request may be dropped while chunks of its prompt are in flight.
            let a_chunk = u64::from(setting.max_num_seqs + setting.spare_rows);
            let most = u64::from(depth - 1) * (got.stopped + a_chunk * got.left);
            prop_assert!(got.wasted <= most, "depth {}: {} rows wasted, {} stopped", depth, got.wasted, got.stopped);
        }
    }
}

fn greedy(max_tokens: u32) -> SamplingParams {
    let mut params = SamplingParams::greedy();
    params.max_tokens = Some(max_tokens);
    params
}

/// Calls of the engine to its model, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Call {
    Launch { rows: usize, deferred: usize },
    Collect,
}

/// Logs the calls to a deferred model, and the number of in-flight batches.
struct Logged {
    model: ScriptedForward,
    log: Arc<Mutex<Vec<Call>>>,
}

impl ModelExecutor for Logged {
    fn launch(&mut self, input: ForwardInput) -> Result<BatchId, DeviceError> {
        self.log.lock().push(Call::Launch { rows: input.tokens.len(), deferred: input.deferred.len() });
        self.model.launch(input)
    }
    fn collect(&mut self, batch: BatchId, stale: &[bool]) -> Result<ForwardOutput<'_>, DeviceError> {
        self.log.lock().push(Call::Collect);
        self.model.collect(batch, stale)
    }
    fn max_in_flight(&self) -> u32 {
        self.model.max_in_flight()
    }
    fn copy_blocks(&mut self, pairs: &[(BlockId, BlockId)]) -> Result<(), DeviceError> {
        self.model.copy_blocks(pairs)
    }
    fn vocab_size(&self) -> usize {
        self.model.vocab_size()
    }
}

fn logged(depth: u32, params: SamplingParams, prompt: usize) -> (Vec<Call>, ascend_llm::engine::Stats) {
    let mut rig = Rig::new(VOCAB, 32);
    rig.config.pipeline_depth = Some(depth);
    let log = Arc::new(Mutex::new(Vec::new()));
    let mut core = rig.core(Logged { model: rig.hashed().deferred(), log: Arc::clone(&log) });
    let handle = core.submit(Request::tokens(vec![1; prompt]).with_sampling(params)).unwrap();
    drain(&mut core);
    handle.collect_output().unwrap();
    let calls = log.lock().clone();
    (calls, core.stats())
}

#[test]
fn the_next_steps_are_launched_before_the_first_is_waited_for() {
    let (first, deferred) = (Call::Launch { rows: 5, deferred: 0 }, Call::Launch { rows: 1, deferred: 1 });
    let plain = Call::Launch { rows: 1, deferred: 0 };
    let (one, two, three) = (logged(1, greedy(4), 5), logged(2, greedy(4), 5), logged(3, greedy(4), 5));
    let out = Call::Collect;
    assert_eq!(one.0, [first, out, plain, out, plain, out, plain, out]);
    assert_eq!(two.0, [first, deferred, out, deferred, out, deferred, out, out]);
    assert_eq!(three.0, [first, deferred, deferred, out, deferred, out, out, out]);
    // The engine can predict that a request ends by its length, so no row is wasted.
    assert_eq!((one.1.wasted_rows, two.1.wasted_rows, three.1.wasted_rows), (0, 0, 0));

    // A sequence with random sampling is skipped in a step until its last token is sampled; chunks of its prompt are
    // not skipped.
    let mut params = SamplingParams::default();
    (params.max_tokens, params.seed) = (Some(3), Some(1));
    let (chunk, last) = (Call::Launch { rows: 64, deferred: 0 }, Call::Launch { rows: 22, deferred: 0 });
    assert_eq!(logged(2, params.clone(), 150).0, [chunk, chunk, out, last, out, out, plain, out, plain, out]);
    // The first collection after the prompt's last chunk belongs to a separate step.
    assert_eq!(logged(3, params, 150).0, [chunk, chunk, last, out, out, out, plain, out, plain, out]);
}

#[test]
fn a_stop_wastes_only_the_rows_of_later_in_flight_steps() {
    for depth in 1..=3 {
        let mut rig = Rig::new(VOCAB, 32);
        rig.config.pipeline_depth = Some(depth);
        rig.model.eos_ids = vec![7];
        let script = vec![1, 2, 3, 7, 9, 9, 9];
        let model = ScriptedForward::new(VOCAB, 32, BLOCK, ascend_llm::runner::scripted::reciting(5, script));
        let mut core = rig.core(model.deferred());
        let handle = core.submit(Request::tokens(vec![1; 5]).with_sampling(greedy(30))).unwrap();
        drain(&mut core);
        let output = handle.collect_output().unwrap();
        assert_eq!(output.choices[0].token_ids, [1, 2, 3]);
        let stats = core.stats();
        assert_eq!(stats.wasted_rows, u64::from(depth - 1));
        assert_eq!(stats.computed_rows, 5 + 3 + stats.wasted_rows);
    }
}

#[test]
fn an_error_in_one_step_discards_the_later_in_flight_steps() {
    for depth in 1..=3 {
        for at_call in 1..14u64 {
            let mut rig = Rig::new(VOCAB, 20);
            (rig.config.max_num_seqs, rig.config.pipeline_depth) = (3, Some(depth));
            let calls = Arc::new(AtomicU64::new(0));
            let seen = Arc::clone(&calls);
            let model = rig.hashed().deferred().watched(Box::new(move |_| {
                if seen.fetch_add(1, Ordering::Relaxed) + 1 == at_call { Err(DeviceError::Lost) } else { Ok(()) }
            }));
            let mut core = rig.core(model);
            let handles: Vec<_> = (1..8u32)
                .map(|at| core.submit(Request::tokens(vec![at; at as usize * 13]).with_sampling(greedy(6))).unwrap())
                .collect();
            let mut steps = 0;
            let error = loop {
                if let Err(error) = core.step() {
                    break error;
                }
                steps += 1;
                assert!(steps < 200, "the model never ran call {at_call}");
            };
            assert_eq!(error, EngineError::Device(DeviceError::Lost));
            assert_eq!(core.stats().steps, at_call - 1, "the engine published results of later steps");
            assert!(core.is_idle());
            assert_eq!(core.step(), Err(error.clone()));
            for handle in handles {
                let items: Vec<_> = handle.into_iter().collect();
                let errors = items.iter().filter(|item| item.is_err()).count();
                match items.last() {
                    Some(Err(RequestError::Engine(got))) => assert_eq!((got, errors), (&error, 1)),
                    last => assert!(errors == 0 && last.is_some(), "{last:?}"),
                }
            }
        }
    }
}

#[test]
fn bad_logits_end_their_request_and_waste_its_in_flight_rows() {
    for depth in 1..=3 {
        let mut rig = Rig::new(VOCAB, 32);
        rig.config.pipeline_depth = Some(depth);
        let model = |history: &[u32], logits: &mut [f32]| {
            hashed_logits(history, logits);
            if history[0] == 9 && history.len() == 6 {
                logits[3] = f32::NAN;
            }
        };
        let model = ScriptedForward::new(VOCAB, 32, BLOCK, Box::new(model)).deferred();
        let mut core = rig.core(model);
        let good = core.submit(Request::tokens(vec![1, 2]).with_sampling(greedy(9))).unwrap();
        let bad = core.submit(Request::tokens(vec![9; 3]).with_sampling(greedy(9))).unwrap();
        drain(&mut core);
        assert_eq!(good.collect_output().unwrap().choices[0].token_ids.len(), 9);
        let items: Vec<_> = bad.into_iter().collect();
        assert!(matches!(items.last(), Some(Err(RequestError::NonFinite { position: 5, .. }))), "{items:?}");
        assert_eq!(core.stats().wasted_rows, u64::from(depth - 1));
    }
}

#[test]
fn an_abandoned_request_frees_its_blocks_at_once() {
    for depth in 1..=3 {
        let mut rig = Rig::new(VOCAB, 8);
        rig.config.pipeline_depth = Some(depth);
        let mut core = rig.core(rig.hashed().deferred());
        // Each request uses half of the pool; the third fits when the first leaves, while rows of the first are in
        // flight.
        let first = core.submit(Request::tokens(vec![1; 60]).with_sampling(greedy(60))).unwrap();
        core.step().unwrap();
        core.step().unwrap();
        drop(first);
        let next = core.submit(Request::tokens(vec![2; 120]).with_sampling(greedy(4))).unwrap();
        core.step().unwrap();
        assert_eq!(core.stats().running, 1, "depth {depth}");
        drain(&mut core);
        let mut alone = rig.core(rig.hashed());
        let same = alone.submit(Request::tokens(vec![2; 120]).with_sampling(greedy(4))).unwrap();
        drain(&mut alone);
        assert_eq!(next.collect_output().unwrap().choices, same.collect_output().unwrap().choices);
        assert_eq!(core.stats().finished_cancelled, 1);
    }
}

#[test]
fn an_unsupported_depth_is_rejected_by_name() {
    struct Single(ScriptedForward);
    impl ModelExecutor for Single {
        fn launch(&mut self, input: ForwardInput) -> Result<BatchId, DeviceError> {
            self.0.launch(input)
        }
        fn collect(&mut self, batch: BatchId, stale: &[bool]) -> Result<ForwardOutput<'_>, DeviceError> {
            self.0.collect(batch, stale)
        }
        fn copy_blocks(&mut self, pairs: &[(BlockId, BlockId)]) -> Result<(), DeviceError> {
            self.0.copy_blocks(pairs)
        }
        fn vocab_size(&self) -> usize {
            self.0.vocab_size()
        }
    }
    let build = |depth| {
        let mut rig = Rig::new(VOCAB, 8);
        rig.config.pipeline_depth = Some(depth);
        EngineCore::from_parts(
            rig.config.clone(),
            Box::new(Single(rig.hashed())),
            rig.model.clone(),
            None,
            None,
            Arc::new(rig.clock.clone()),
        )
        .map(|core| core.config().pipeline_depth)
    };
    assert_eq!(build(1).unwrap(), Some(1));
    for (depth, expected) in [(0, "1..=3"), (2, "at most 1"), (4, "1..=3")] {
        let Err(BuildError::Config(error)) = build(depth) else { panic!("the engine accepted depth {depth}") };
        assert_eq!((error.field, error.value.as_str()), ("pipeline_depth", depth.to_string().as_str()));
        assert!(error.expected.starts_with(expected), "{error}");
    }
}

#[test]
fn a_cancelled_request_receives_published_tokens_but_no_in_flight_ones() {
    for depth in 1..=3 {
        let mut rig = Rig::new(VOCAB, 32);
        rig.config.pipeline_depth = Some(depth);
        let mut core = rig.core(rig.hashed().deferred());
        let handle = core.submit(Request::tokens(vec![1; 5]).with_sampling(greedy(50))).unwrap();
        for _ in 0..4 {
            core.step().unwrap();
        }
        handle.cancel();
        drain(&mut core);
        let output = handle.collect_output().unwrap();
        assert_eq!((output.choices[0].token_ids.len(), core.stats().wasted_rows), (4, u64::from(depth - 1)));
        assert_eq!(output.choices[0].finish_reason, FinishReason::Cancelled);
    }
}
