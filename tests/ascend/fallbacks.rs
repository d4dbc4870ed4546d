//! Tests of the Ascend device if a function is missing, a resource runs out or a call fails.
//!
//! The device uses a fallback with the same outputs and adds a note, or ends with a typed error; in both cases it leaks
//! nothing.

#![allow(clippy::cast_possible_truncation, reason = "the numbers of a test are small")]

use crate::common::fable;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::common::fable::Seen;
use crate::common::sim_npu::Npu;
use ascend_llm::device::Telemetry as _;
use ascend_llm::device::{Device, DeviceError, MemKind};
use ascend_llm::engine::{
    BuildError, CacheBudget, Engine, EngineBuilder, EngineConfig, EngineCore, Health, LoadProgress, ManualClock,
    Request, RequestError,
};
use ascend_llm::graph::{CompileError, OverflowPolicy};
use ascend_llm::sampler::SamplingParams;
use parking_lot::Mutex;

fn config() -> EngineConfig {
    let mut config = fable::plain_config();
    (config.max_num_batched_tokens, config.max_num_seqs) = (32, 4);
    config.kv_cache = CacheBudget::Blocks(12);
    config.max_model_len = Some(256);
    config
}

fn builder(device: Arc<dyn Device>, config: EngineConfig) -> EngineBuilder {
    Engine::builder(fable::float()).config(config).device(device)
}

fn core_on(device: Arc<dyn Device>, config: EngineConfig) -> EngineCore {
    builder(device, config).build_core().expect("the model builds")
}

/// Returns greedy requests, which are scheduled ahead, and one with random sampling.
fn requests() -> Vec<Request> {
    let params = |max_tokens: u32, temperature: f32| {
        let mut params = SamplingParams::default();
        (params.max_tokens, params.temperature) = (Some(max_tokens), temperature);
        (params.seed, params.ignore_eos) = (Some(5), true);
        params
    };
    let long: Vec<u32> = (0..50).map(|i| 3 + i * 13 % 700).collect();
    vec![
        Request::tokens(vec![1, 40, 100, 7]).with_sampling(params(8, 0.0)),
        Request::tokens(long).with_sampling(params(5, 0.0)),
        Request::tokens(vec![1, 9]).with_sampling(params(6, 0.8)),
    ]
}

fn outcomes(core: &mut EngineCore) -> Vec<Result<Seen, RequestError>> {
    let handles: Vec<_> = requests().into_iter().map(|request| core.submit(request).unwrap()).collect();
    while !core.is_idle() && core.step().is_ok() {}
    handles.into_iter().map(|handle| handle.collect_output().map(|output| Seen::of(&output))).collect()
}

fn answers(core: &mut EngineCore) -> Vec<Seen> {
    outcomes(core).into_iter().map(Result::unwrap).collect()
}

/// Returns the outputs of a card without faults.
fn expected(npu: &Npu) -> Vec<Seen> {
    answers(&mut core_on(npu.device(), config()))
}

fn has_note(notes: &[String], words: &str) -> bool {
    notes.iter().any(|note| note.contains(words))
}

#[test]
fn the_policy_for_overflows_is_the_cards_own() {
    let npu = Npu::new();
    let core = core_on(npu.device(), config());
    assert_eq!(core.info().overflow, Some(OverflowPolicy::Error));
    assert_eq!(core.config().compile.overflow, Some(OverflowPolicy::Error));
}

#[test]
fn a_runtime_without_captures_runs_operation_by_operation() {
    let expected = expected(&Npu::new());
    for symbols in [&["aclmdlRICaptureBegin"][..], &["aclmdlRICaptureTaskUpdateBegin"], &["aclrtResetEvent"]] {
        let npu = Npu::lacking(symbols);
        let mut core = core_on(npu.device(), config());
        assert_eq!(answers(&mut core), expected, "{symbols:?}");
        assert!(npu.sim.count("aclnnEmbedding") > 0 && npu.sim.count("aclmdlRIExecuteAsync") == 0, "{symbols:?}");
        let notes = core.device_notes();
        assert!(has_note(&notes, "operation by operation: this CANN version cannot"), "{notes:?}");
        drop(core);
        npu.assert_clean();
    }
}

/// CANN before 8.3 has no call that writes keys and values to a pool of blocks: their rows are scattered.
#[test]
fn keys_and_values_are_written_without_their_own_call() {
    const OWN: &str = "aclnnScatterPaKvCache";
    let versions = [80_100_000, 80_200_000, 80_500_000];
    let with_it = versions.map(|cann| {
        let npu = Npu::with(&[("cann", cann)]);
        let expected = expected(&npu);
        assert!(npu.sim.count(OWN) > 0);
        expected
    });
    let npu = Npu::lacking(&[OWN, "aclnnScatterPaKvCacheGetWorkspaceSize"]);
    for (cann, expected) in versions.into_iter().zip(with_it) {
        npu.sim.reset();
        npu.sim.set("cann", cann);
        for device in [npu.device(), npu.eager()] {
            assert_eq!(answers(&mut core_on(device, config())), expected, "CANN {cann}");
        }
        assert!(npu.sim.count("aclnnScatterNdUpdate") > 0 && npu.sim.count(OWN) == 0, "CANN {cann}");
        assert!(npu.sim.count("aclmdlRIExecuteAsync") > 0, "CANN {cann}: decode steps are captured");
        npu.assert_clean();
    }
}

/// The notes reflect the state of the device at the time of the call.
#[test]
fn why_a_capture_failed_is_reported_once_it_has() {
    let npu = Npu::new();
    let expected = expected(&npu);
    let mut core = core_on(npu.device(), config());
    npu.sim.fail_always("aclmdlRICaptureBegin", 207_008);
    assert!(!has_note(&core.device_notes(), "operation by operation"), "{:?}", core.device_notes());
    assert_eq!(answers(&mut core), expected);
    assert!(
        has_note(&core.device_notes(), "operation by operation: aclmdlRICaptureBegin"),
        "{:?}",
        core.device_notes()
    );
    let engine = Engine::spawn(core).unwrap();
    assert!(has_note(&engine.device_notes(), "207008"), "{:?}", engine.device_notes());
    engine.shutdown(Duration::ZERO).unwrap();
    npu.assert_clean();
}

/// Number of decode buckets up to `max_num_seqs`.
const DECODE_BUCKETS: u64 = 3;

#[test]
fn an_engine_that_was_warmed_up_captures_nothing_later() {
    let npu = Npu::new();
    let expected = expected(&npu);
    let reports: Arc<Mutex<Vec<LoadProgress>>> = Arc::default();
    let report = Arc::clone(&reports);
    let before = npu.sim.count("aclmdlRICaptureBegin");
    let builder = builder(npu.device(), config()).on_progress(move |progress| report.lock().push(progress));
    let mut core = builder.warm_up(Duration::from_secs(600)).build_core().unwrap();
    let captured = npu.sim.count("aclmdlRICaptureBegin");
    assert_eq!(captured - before, DECODE_BUCKETS);
    assert_eq!((core.stats().padded_rows, core.stats().steps), (0, 0));
    assert_eq!(answers(&mut core), expected);
    assert_eq!(npu.sim.count("aclmdlRICaptureBegin"), captured);
    let reports = reports.lock();
    let warm: Vec<_> = reports.iter().map(|p| (p.warm_buckets, p.total_buckets)).filter(|(_, all)| *all > 0).collect();
    assert_eq!(warm, [(1, 3), (2, 3), (3, 3)]);
    assert!(reports.iter().filter(|p| p.total_buckets > 0).all(|p| p.done_bytes == p.total_bytes));
    drop(core);
    npu.assert_clean();
}

/// Capturing a bucket takes a second of the builder's clock; the budget allows two buckets.
#[test]
fn warming_up_keeps_to_its_budget() {
    let npu = Npu::new();
    for (budget_ms, buckets) in [(0, 0), (1, 1), (1500, 2), (60_000, DECODE_BUCKETS)] {
        let clock = ManualClock::new();
        let (ticking, before) = (clock.clone(), npu.sim.count("aclmdlRICaptureBegin"));
        let builder = builder(npu.device(), config()).clock(Arc::new(clock));
        let builder = builder.on_progress(move |progress| {
            if progress.total_buckets > 0 {
                ticking.advance(Duration::from_secs(1));
            }
        });
        let core = builder.warm_up(Duration::from_millis(budget_ms)).build_core().unwrap();
        assert_eq!(npu.sim.count("aclmdlRICaptureBegin") - before, buckets, "{budget_ms} ms");
        drop(core);
        npu.assert_clean();
    }
}

/// Returns the device memory in use after an engine is built.
fn used_bytes(npu: &Npu, config: &EngineConfig) -> i64 {
    let core = core_on(npu.device(), config.clone());
    let used = npu.sim.live("device_bytes");
    drop(core);
    used as i64
}

#[test]
fn a_card_too_small_for_the_largest_batch_takes_smaller_ones_once() {
    let npu = Npu::new();
    let mut config = config();
    config.max_num_batched_tokens = 512;
    let mut half = config.clone();
    half.max_num_batched_tokens = 256;
    let expected = answers(&mut core_on(npu.device(), half.clone()));
    let (whole_bytes, half_bytes) = (used_bytes(&npu, &config), used_bytes(&npu, &half));
    let limit = i64::midpoint(whole_bytes, half_bytes);
    npu.sim.set("hbm_bytes", limit);
    let mut core = core_on(npu.device(), config.clone());
    assert_eq!(core.config().max_num_batched_tokens, 256);
    assert_eq!(core.info().buckets.last().map(|bucket| bucket.rows), Some(256));
    let notes = &core.info().notes;
    assert!(notes.len() == 1 && notes[0].starts_with("max_num_batched_tokens is 256 instead of 512: "), "{notes:?}");
    assert_eq!(answers(&mut core), expected);
    // The memory of the first try is freed: the second try uses no more than it would without the first.
    let used = npu.sim.live("device_bytes") as i64;
    let captures = used - half_bytes;
    assert!(
        used <= limit && captures >= 0,
        "{used} bytes are in use, expected at most {half_bytes} and the captured graphs"
    );
    drop(core);
    npu.assert_clean();
    // The size is reduced only once, and never below one row per sequence.
    config.max_num_seqs = 512;
    let device = npu.device();
    half.max_num_batched_tokens = 64;
    drop(core_on(device.clone(), half.clone()));
    let at_rest = npu.sim.live("device_bytes");
    let error = builder(device.clone(), config.clone()).build_core().unwrap_err();
    let BuildError::Compile(CompileError::Memory(required)) = &error else { panic!("{error:?}") };
    assert!(required.free_bytes > 0 && required.bytes > required.free_bytes, "{required:?}");
    // All memory is freed, and the same device then runs a configuration that fits.
    assert_eq!(npu.sim.live("device_bytes"), at_rest);
    drop(core_on(device.clone(), half));
    drop(device);
    npu.assert_clean();
}

/// Each allocation fails in turn while an engine is built: the engine is made smaller and adds a note, or the error
/// names the request.
///
/// In all cases, the device then holds no more memory than after an engine that was built and dropped.
#[test]
fn any_allocation_may_fail_while_an_engine_is_built() {
    let npu = Npu::new();
    let (mut two, mut one) = (config(), config());
    two.compile.token_buckets = Some(vec![4, 32]);
    // The batch cannot be smaller than this, and there is one program.
    (one.max_num_batched_tokens, one.compile.token_buckets) = (4, Some(vec![4]));
    let (mut smaller, mut failed) = (0, 0);
    for config in [two, one] {
        npu.sim.reset();
        let device = npu.device();
        let opened = npu.sim.count("aclrtMalloc");
        drop(core_on(device.clone(), config.clone()));
        let calls = npu.sim.count("aclrtMalloc") - opened;
        let at_rest = npu.sim.live("device_bytes");
        drop(device);
        for nth in 1..=calls {
            npu.sim.reset();
            let device = npu.device();
            npu.sim.fail_call("aclrtMalloc", nth, 207_001);
            match builder(device.clone(), config.clone()).build_core() {
                Ok(core) => smaller += u32::from(!core.info().notes.is_empty()),
                Err(BuildError::Device(DeviceError::OutOfMemory { free_bytes, asked_bytes, .. })) => {
                    assert!(free_bytes > 0 && asked_bytes > 0, "{nth}: {asked_bytes} asked, {free_bytes} free");
                    failed += 1;
                }
                Err(BuildError::Compile(CompileError::Memory(required))) => {
                    assert!(required.free_bytes > 0, "{nth}: {required:?}");
                    failed += 1;
                }
                Err(BuildError::CacheDoesNotFit { budget_bytes, needed_bytes, .. }) => {
                    assert!(budget_bytes > needed_bytes, "{nth}: the pool does not fit although the card is not full");
                    failed += 1;
                }
                Err(other) => panic!("allocation {nth} of {calls}: {other:?}"),
            }
            let left = npu.sim.live("device_bytes");
            // The last four allocations are those of the small scratch that replaces the large one; if they fail, the
            // large one is kept.
            assert!(left <= at_rest || nth > calls - 4, "allocation {nth} of {calls}: {left} left, {at_rest} at rest");
            drop(device);
            npu.assert_clean();
        }
    }
    println!("{smaller} engines were made smaller, {failed} failed");
    assert!(smaller > 5 && failed > 5, "{smaller} smaller, {failed} failed");
}

#[test]
fn a_pool_of_our_own_choice_takes_what_there_is() {
    // Blocks of 16 tokens.
    let npu = Npu::with(&[("cann", 90_100_000)]);
    let mut config = config();
    // More blocks than fit, so that the card's memory decides.
    (config.max_num_seqs, config.block_size) = (32, Some(16));
    config.kv_cache = CacheBudget::Blocks(1);
    let opened = {
        let device = npu.device();
        let opened = npu.sim.live("device_bytes") as i64;
        drop(device);
        opened
    };
    let model_bytes = used_bytes(&npu, &config) - opened;
    npu.sim.set("hbm_bytes", opened + model_bytes + model_bytes / 6);
    config.kv_cache = CacheBudget::Auto;
    // The memory that weights and programs leave free, less a tenth of the card.
    let core = core_on(npu.device(), config.clone());
    let (info, card_bytes) = (core.info().clone(), model_bytes + model_bytes / 6);
    assert!(info.notes.is_empty(), "{:?}", info.notes);
    assert_eq!(core.config().kv_cache, CacheBudget::Blocks(info.pool_blocks));
    assert!(info.pool_blocks > 1 && info.pool_bytes < model_bytes as u64 / 6, "{} bytes", info.pool_bytes);
    let free = opened + card_bytes - npu.sim.live("device_bytes") as i64;
    assert!(free > card_bytes / 20 && free < card_bytes / 6, "{free} of {card_bytes} are left");
    drop(core);
    // If the pool does not fit after all, half of it is tried, and nothing else is reduced.
    let before = npu.sim.count("aclrtMalloc");
    drop(core_on(npu.device(), config.clone()));
    let calls = npu.sim.count("aclrtMalloc") - before;
    let halved = (1..=calls).filter(|nth| {
        npu.sim.fail_call("aclrtMalloc", *nth, 207_001);
        let Ok(device) = npu.try_device(|_| ()) else { return false };
        let Ok(core) = builder(device, config.clone()).build_core() else { return false };
        let notes = &core.info().notes;
        let is_halved = notes.len() == 1 && notes[0].starts_with("the KV pool has ");
        let blocks = core.info().pool_blocks;
        assert!(!is_halved || (blocks >= 1 && blocks <= info.pool_blocks / 2), "{blocks} of {}", info.pool_blocks);
        is_halved && core.config().max_num_batched_tokens == config.max_num_batched_tokens
    });
    assert!(halved.count() > 0, "none of {calls} allocations is that of the pool");
    npu.assert_clean();
    // A pool size chosen by the user is not reduced: the error contains the size that would fit.
    config.kv_cache = CacheBudget::Blocks(100_000);
    let error = builder(npu.device(), config).build_core().unwrap_err();
    let BuildError::CacheDoesNotFit { budget_bytes, needed_bytes, fitting_tokens, block_bytes, .. } = error else {
        panic!("{error:?}")
    };
    assert_eq!(needed_bytes, 100_001 * block_bytes);
    assert!(budget_bytes < model_bytes as u64 && budget_bytes > 0, "the error reports {budget_bytes} free bytes");
    assert_eq!(fitting_tokens, (budget_bytes / block_bytes - 1) * 16);
    npu.assert_clean();
}

/// The free memory suffices, but is fragmented: the pool is halved.
#[test]
fn memory_in_pieces_halves_a_pool_of_our_own_choice() {
    let npu = Npu::new();
    let mut config = config();
    (config.max_num_seqs, config.max_model_len, config.kv_cache) = (32, Some(512), CacheBudget::Auto);
    let whole = core_on(npu.device(), config.clone()).info().pool_bytes;
    npu.sim.set("largest_block_bytes", i64::try_from(whole * 3 / 4).unwrap());
    let core = core_on(npu.device(), config.clone());
    let info = core.info();
    assert_eq!(info.pool_bytes, whole / 2);
    assert!(info.notes.len() == 1 && info.notes[0].starts_with("the KV pool has "), "{:?}", info.notes);
    assert_eq!(core.config().max_num_batched_tokens, config.max_num_batched_tokens);
    drop(core);
    npu.assert_clean();
}

#[test]
fn out_of_memory_names_what_is_free() {
    let npu = Npu::with(&[("hbm_bytes", 64 << 20)]);
    let device = npu.device();
    let free = (64 << 20) - npu.sim.live("device_bytes");
    let error = device.alloc(1 << 30, MemKind::Device).unwrap_err();
    assert_eq!(error, DeviceError::OutOfMemory { kind: "device", asked_bytes: 1 << 30, free_bytes: free });
}

/// A failed step ends its engine but not its device: the next engine on the device works as on a new one.
#[test]
fn a_device_goes_on_after_a_refused_step() {
    let npu = Npu::new();
    let expected = expected(&npu);
    let faults = [
        ("aclnnMm", 161_002),
        ("aclnnEmbedding", 561_002),
        ("aclrtMemcpyAsync", 107_000),
        ("aclrtRecordEvent", 207_000),
        ("aclmdlRIExecuteAsync", 107_000),
    ];
    let mut ended = 0;
    for (call, code) in faults {
        for nth in [1, 4] {
            let device = npu.device();
            let mut core = core_on(device.clone(), config());
            npu.sim.fail_call(call, nth, code);
            for (outcome, expected) in outcomes(&mut core).into_iter().zip(&expected) {
                match outcome {
                    // If a call fails during a capture, the step runs without a graph.
                    Ok(seen) => assert_eq!(seen, *expected, "{call} {nth}"),
                    Err(error) => assert!(matches!(error, RequestError::Engine(_)), "{call} {nth}: {error:?}"),
                }
            }
            ended += u32::from(core.health() == Health::Failed);
            drop(core);
            assert_eq!(answers(&mut core_on(device.clone(), config())), expected, "{call} {nth}");
            drop(device);
            npu.assert_clean();
        }
    }
    assert!(ended >= 6, "only {ended} engines ended with an error");
}

/// A crash makes only its device unusable: a device that is opened afterwards works, even while the lost one still
/// exists.
#[test]
fn a_device_opened_after_a_lost_one_works() {
    let npu = Npu::new();
    let expected = expected(&npu);
    let device = npu.device();
    let mut core = core_on(device.clone(), config());
    npu.sim.fail_task("aclnnMm", 3, 507_015);
    let lost = outcomes(&mut core);
    assert!(lost.iter().all(|outcome| matches!(outcome, Err(RequestError::Engine(_)))), "{lost:?}");
    assert!(builder(device.clone(), config()).build_core().is_err());
    assert_eq!(
        answers(&mut core_on(npu.device(), config())),
        expected,
        "wrong outputs while the lost device still exists"
    );
    drop((core, device));
    assert_eq!(
        answers(&mut core_on(npu.device(), config())),
        expected,
        "wrong outputs after the lost device was dropped"
    );
    npu.assert_clean();
}

/// A simulated card of 200 W, whose power is sampled while an energy query is active.
#[test]
fn energy_equals_the_cards_metered_power() {
    let npu = Npu::with(&[("power_dw", 2000)]);
    let start = Instant::now();
    let library = npu.sim.path().to_owned();
    let core = core_on(npu.try_device(|options| options.dcmi_library = Some(library)).unwrap(), config());
    let first_uj = core.energy_uj().expect("the card reports its power");
    let mut last_uj = first_uj;
    while last_uj == first_uj {
        assert!(start.elapsed() < Duration::from_secs(30), "the energy does not increase");
        std::thread::yield_now();
        last_uj = core.energy_uj().expect("the card reports its power");
    }
    // At most 200 W since the time before the first sample.
    let most_uj = 200 * start.elapsed().as_micros();
    assert!(last_uj > first_uj && u128::from(last_uj) <= most_uj, "{first_uj}, {last_uj} of {most_uj} uJ");
    assert!(!has_note(&core.device_notes(), "no energy"));
    drop(core);
    npu.assert_clean();
}

#[test]
fn a_card_without_a_power_meter_reports_the_reason() {
    let npu = Npu::lacking(&["dcmi_get_device_power_info"]);
    for (library, words) in [
        (npu.sim.path().to_owned(), "has no symbol dcmi_get_device_power_info"),
        (PathBuf::from("/nowhere/libdcmi.so"), "no card metrics: /nowhere/libdcmi.so cannot be used"),
    ] {
        let device = npu.try_device(|options| options.dcmi_library = Some(library)).unwrap();
        assert_eq!((device.energy_uj(), device.energy_uj()), (None, None));
        let notes = device.notes();
        assert_eq!(notes.iter().filter(|note| note.starts_with("no energy: ")).count(), 1, "{notes:?}");
        assert!(has_note(&notes, words), "{notes:?}");
        drop(device);
        npu.assert_clean();
    }
}
