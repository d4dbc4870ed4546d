//! Tests of a model sharded over several simulated cards.
//!
//! Results are within bounds, and bit-equal with graph capture, at every depth and under any delay. A failure of one
//! card ends all of them with a typed error.

#![allow(clippy::cast_possible_truncation, reason = "the numbers of a test are small")]

use crate::common::fable;
use crate::steps;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::common::goldens::ascend_models;
use crate::common::model::Model;
use crate::steps::{config, core_on, greedy, machine, outcomes, seen};
use ascend_llm::device::Telemetry as _;
use ascend_llm::device::ascend::AscendOpenError;
use ascend_llm::device::{Device, DeviceError, MemKind, Span};
use ascend_llm::engine::{Engine, RequestError};

/// Largest difference of a logit from the CPU's; logits are up to 10.
///
/// One card stays below 0.04 and 0.13 here; the partial sums of several ranks are rounded once more before they are
/// added.
const F16_BOUND: f32 = 6e-2;
const BF16_BOUND: f32 = 3e-1;

fn data(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(path)
}

/// Returns the logits of a few tokens, computed in chunks and as single rows, so that some steps are captured.
fn rows(device: Arc<dyn Device>, folder: &Path, ranks: u32) -> Vec<Vec<f32>> {
    let mut model = Model::new(Engine::builder(folder).config(config(ranks, 1)).device(device));
    let ids: Vec<u32> = (0..30u32).map(|i| (i * i * 7 + 3) % 160).collect();
    let (start, end) = ids.split_at(22);
    let mut rows = model.forward(start, 4);
    rows.extend(end.iter().map(|&id| model.forward(&[id], 1).remove(0)));
    rows
}

fn largest_difference(a: &[Vec<f32>], b: &[Vec<f32>]) -> f32 {
    assert_eq!(a.len(), b.len());
    let pairs = a.iter().flatten().zip(b.iter().flatten());
    pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// Shards of heads, width and vocabulary differ by one if they cannot be equal; with four ranks, some models have a KV
/// head on two cards.
#[test]
fn cards_agree_with_the_reference_and_captured_with_eager() {
    let mut worst = 0.0f32;
    for folder in ascend_models() {
        let bound = if folder.ends_with("llama-bf16") { BF16_BOUND } else { F16_BOUND };
        let cpu = rows(fable::device(|_| ()), &folder, 1);
        // Four heads over three cards, 160 ids, a width of 56: in each case one shard differs in size from the others.
        let uneven = folder.ends_with("llama-mha-untied-bias").then_some(3);
        for ranks in [2, 4].into_iter().chain(uneven) {
            let npu = machine(ranks);
            let label = format!("{}, {ranks} cards", folder.display());
            let captured = rows(npu.cards(ranks), &folder, ranks);
            npu.assert_clean();
            let error = largest_difference(&captured, &cpu);
            assert!(error <= bound, "{label}: the largest difference of a logit is {error}");
            worst = worst.max(if folder.ends_with("llama-bf16") { 0.0 } else { error });
            let eager = npu.try_device(|options| (options.cards, options.capture) = ((0..ranks).collect(), false));
            assert!(
                rows(eager.unwrap(), &folder, ranks) == captured,
                "{label}: the captured steps differ from the eager ones"
            );
            npu.assert_clean();
        }
    }
    println!("largest error in f16: {worst}");
}

#[test]
fn mixed_requests_with_preemption_are_equal_at_every_depth() {
    steps::outputs_are_equal_at_every_depth(2, 12);
}

#[test]
fn no_delay_of_a_card_changes_an_output() {
    steps::no_delay_changes_an_output(2, 50);
}

#[test]
fn greedy_steps_in_flight_only_queue_on_every_card() {
    steps::greedy_steps_in_flight_only_queue(2);
}

#[test]
fn what_does_not_fit_the_cards_is_refused_by_name() {
    let npu = machine(4);
    let built = |ranks: u32, cards: u32| {
        let builder = Engine::builder(fable::float()).config(config(ranks, 1)).device(npu.cards(cards));
        builder.build_core().map(drop).map_err(|error| format!("{error:?}"))
    };
    for (ranks, cards) in [(1, 2), (2, 4), (4, 2), (2, 1)] {
        let message = built(ranks, cards).unwrap_err();
        assert!(message.contains("tensor_parallel_size") && message.contains(&cards.to_string()), "{message}");
    }
    let error = npu.try_device(|options| options.cards = vec![0, 9, 1]).unwrap_err();
    assert_eq!(error, AscendOpenError::Card { card: 9, count: 4 });
    npu.assert_clean();
}

/// The runtime lacks the collectives, or a card fails to open, to join or to capture.
#[test]
fn what_fails_while_cards_open_is_named_and_leaves_nothing() {
    let npu = machine(2);
    let calls = ["HcclGetRootInfo", "HcclCommInitRootInfo", "aclrtSetDevice", "aclrtCreateContext", "aclrtMallocHost"];
    for call in calls {
        for nth in [1, 2] {
            npu.sim.fail_call(call, nth, 207_001);
            match npu.try_device(|options| options.cards = vec![0, 1]) {
                Err(error) => assert!(error.to_string().contains(call), "{call} {nth}: {error}"),
                Ok(_) => assert_eq!((call, nth), ("HcclGetRootInfo", 2), "only one card creates the root info"),
            }
            npu.sim.reset();
            npu.sim.set("devices", 2);
            npu.sim.set("join_limit_ms", 300);
            npu.assert_clean();
        }
    }
}

/// If one card cannot capture, all cards issue operation by operation.
#[test]
fn cards_capture_together_or_not_at_all() {
    let npu = machine(2);
    let requests = [(vec![1, 40, 100, 7], greedy(6))];
    let mut core = core_on(npu.cards(2), config(2, 2));
    let expected = seen(&mut core, &requests);
    drop(core);
    for (call, code) in [("aclmdlRICaptureBegin", 207_000), ("aclmdlRICaptureTaskUpdateBegin", 207_000)] {
        let device = npu.cards(2);
        let mut core = core_on(device.clone(), config(2, 2));
        npu.sim.fail_call(call, 1, code);
        let before = npu.sim.count("aclmdlRIExecuteAsync");
        assert!(seen(&mut core, &requests) == expected, "{call}");
        assert_eq!(npu.sim.count("aclmdlRIExecuteAsync"), before, "{call}");
        let notes = device.notes().join("\n");
        assert!(notes.contains("operation by operation"), "{notes}");
        drop((core, device));
        npu.assert_clean();
        npu.sim.reset();
        npu.sim.set("devices", 2);
    }
}

/// A rank fails, hangs or is lost in a collective.
#[test]
fn a_card_that_fails_ends_all_of_them() {
    let npu = machine(2);
    let requests = [(vec![1, 40, 100, 7], greedy(6))];
    let mut core = core_on(npu.cards(2), config(2, 2));
    let expected = seen(&mut core, &requests);
    drop(core);
    for fault in ["task", "hang", "lost", "link"] {
        let device = npu.try_device(|options| (options.cards, options.timeout_us) = (vec![0, 1], 1_000_000)).unwrap();
        let mut core = core_on(device.clone(), config(2, 2));
        match fault {
            "task" => npu.sim.fail_task("HcclAllReduce", 5, 507_015),
            "link" => npu.sim.fail_task("HcclAllReduce", 5, 507_056),
            "hang" => npu.sim.hang_task("aclnnRmsNorm", 3),
            _ => npu.sim.lose_device(507_018),
        }
        let outcome = outcomes(&mut core, &requests).remove(0);
        assert!(matches!(outcome, Err(RequestError::Engine(_))), "{fault}: {outcome:?}");
        let reported = device.alloc(64, MemKind::Device).unwrap_err();
        let is_expected = match fault {
            // Either the host detects the hang, or the runtime by its time limit for kernels.
            "hang" => matches!(reported, DeviceError::TimedOut { .. } | DeviceError::Crashed { .. }),
            "link" => {
                matches!(reported, DeviceError::Call { code: 507_056, .. } | DeviceError::Crashed { code: 507_056, .. })
            }
            "task" => matches!(reported, DeviceError::Crashed { code: 507_015, .. }),
            _ => matches!(reported, DeviceError::Crashed { code: 507_018, .. }),
        };
        assert!(is_expected, "{fault}: {reported:?}");
        let notes = device.notes();
        let links = notes.iter().filter(|note| note.contains("HcclGetCommAsyncError")).count();
        assert_eq!(links, usize::from(fault == "link"), "{fault}: {notes:?}");
        assert!(notes.iter().any(|note| note.starts_with("card ")), "{fault}: {notes:?}");
        drop((core, device));
        npu.sim.lose_device(0);
        npu.assert_clean();
        // The cards can be opened again in the same process.
        let mut core = core_on(npu.cards(2), config(2, 2));
        assert!(seen(&mut core, &requests) == expected, "wrong outputs after the fault {fault}");
        drop(core);
        npu.assert_clean();
    }
}

#[test]
fn failing_calls_are_typed_errors_or_leave_the_answer() {
    steps::failing_calls_are_typed_errors_or_leave_the_answer(2, 31);
}

#[test]
#[ignore = "minutes"]
fn each_failing_call_is_a_typed_error_or_leaves_the_answer() {
    steps::failing_calls_are_typed_errors_or_leave_the_answer(2, 1);
}

/// Choices of one prompt write to copies of its last block: of three cards with one, one and two heads, each copies its
/// own heads.
#[test]
fn blocks_are_copied_on_every_card() {
    let npu = machine(3);
    let mut config = config(3, 2);
    config.prefix_caching = true;
    let builder = Engine::builder(data("conformance/llama-mha-untied-bias")).config(config).device(npu.cards(3));
    let mut core = builder.build_core().unwrap();
    let prompt: Vec<u32> = (1..22).collect();
    let alone = seen(&mut core, &[(prompt.clone(), greedy(12))]);
    let mut params = greedy(12);
    // With top_k = 1 each choice samples the argmax. Greedy choices would be rejected, because they are all equal.
    (params.n, params.temperature, params.top_k) = (3, 1.0, 1);
    npu.sim.set("log", 1);
    let output = outcomes(&mut core, &[(prompt, params)]).remove(0).unwrap();
    let log = npu.sim.log();
    for heads in [1, 2] {
        let line = format!("aclrtMemcpyAsync d2d {} 0", 128 * heads * 16 * 2);
        assert!(log.contains(&line), "the log contains no copy of the keys of {heads} heads: {log:#?}");
    }
    assert_eq!(output.choices.len(), 3);
    for choice in &output.choices {
        assert_eq!(choice.token_ids, alone[0].choices[0].ids);
    }
    drop(core);
    npu.assert_clean();
}

/// A write is copied to each card; a read returns the data of the first one.
#[test]
fn buffers_are_one_on_each_card() {
    let npu = machine(2);
    let device = npu.cards(2);
    let span = |buffer, bytes| Span { buffer, offset: 0, bytes };
    let pinned = device.alloc(4096, MemKind::Pinned).unwrap();
    let (a, b) = (device.alloc(4096, MemKind::Device).unwrap(), device.alloc(4096, MemKind::Device).unwrap());
    let stream = device.stream().unwrap();
    let bytes: Vec<u8> = (0..4096u32).map(|i| (i % 251) as u8).collect();
    device.write(span(a, 4096), &bytes, stream).unwrap();
    device.copy(span(b, 4096), span(a, 4096), stream).unwrap();
    device.copy(span(pinned, 4096), span(b, 4096), stream).unwrap();
    let after = device.record(stream).unwrap();
    device.wait_host(after).unwrap();
    let mut back = vec![0; 4096];
    for buffer in [b, pinned] {
        device.read(span(buffer, 4096), &mut back, None).unwrap();
        assert_eq!(back, bytes);
    }
    for buffer in [a, b, pinned] {
        device.free(buffer);
    }
    drop(device);
    npu.assert_clean();
}

/// Callers on several threads: all cards process their work in the same order, and no caller waits for the lock of
/// another.
#[test]
fn callers_on_several_threads_do_not_disturb_each_other() {
    const BYTES: u64 = 4096;
    let npu = machine(2);
    let device = npu.cards(2);
    std::thread::scope(|scope| {
        for thread in 0..4u8 {
            let device = &device;
            scope.spawn(move || {
                for round in 0..20u8 {
                    let stream = device.stream().unwrap();
                    let buffer = device.alloc(BYTES, MemKind::Device).unwrap();
                    let span = Span { buffer, offset: 0, bytes: BYTES };
                    let bytes = [thread ^ (round << 2); BYTES as usize];
                    device.write(span, &bytes, stream).unwrap();
                    let event = device.record(stream).unwrap();
                    let mut back = [0; BYTES as usize];
                    device.read(span, &mut back, Some(event)).unwrap();
                    assert_eq!(back, bytes, "thread {thread}, round {round}");
                    device.free(buffer);
                }
            });
        }
    });
    drop(device);
    npu.assert_clean();
}
