//! Steps in flight on the simulated Ascend card: outputs are equal at every depth and under any delay, a greedy step only
//! queues, and whatever call fails ends in a typed error or the right answer.

#![cfg(feature = "ascend")]
#![allow(clippy::cast_possible_truncation, reason = "the numbers of a test are small")]

mod ascend_steps;
mod npu;
mod story;

use ascend_llm::engine::Request;
use ascend_steps::{LAYERS, config, core_on, greedy};
use npu::Npu;

#[test]
fn outputs_are_equal_at_every_depth() {
    ascend_steps::outputs_are_equal_at_every_depth(1, 11);
}

#[test]
fn no_delay_of_a_stream_changes_an_output() {
    ascend_steps::no_delay_changes_an_output(1, 100);
}

/// Two steps in flight, all rows greedy: between two launches there is nothing but copies of ids, tables and lengths, one task
/// update a layer, and the wait for the results of the step before.
#[test]
fn greedy_steps_in_flight_only_queue() {
    let npu = Npu::new();
    let mut core = core_on(npu.device(), config(1, 2));
    let request = Request::tokens(vec![1, 40, 100, 7]).sampling(greedy(40));
    let handle = core.submit(request).unwrap();
    for _ in 0..8 {
        core.step().unwrap();
    }
    npu.sim.set("log", 1);
    npu.sim.clear_log();
    const STEPS: u64 = 20;
    for _ in 0..STEPS {
        core.step().unwrap();
    }
    // The card's thread has issued what was asked of it once this one has been waited for.
    let log = npu.sim.log();
    let lines = |name: &str| log.iter().filter(|line| line.split_whitespace().next() == Some(name)).collect::<Vec<_>>();
    let count = |name: &str| lines(name).len() as u64;
    let launches = count("aclmdlRIExecuteAsync");
    assert!(launches.abs_diff(STEPS) <= 1, "{launches} launches in {STEPS} steps");
    assert!(count("aclmdlRICaptureTaskUpdateBegin").abs_diff(STEPS * LAYERS) <= LAYERS, "one update a layer and step");
    for forbidden in [
        "aclrtMalloc",
        "aclrtMallocHost",
        "aclrtFree",
        "aclrtFreeHost",
        "aclrtMemcpy",
        "aclrtMemset",
        "aclrtSynchronizeDevice",
        "aclrtCreateEventExWithFlag",
    ] {
        assert_eq!(count(forbidden), 0, "{forbidden}");
    }
    // What crosses to the card in a step of one row: its id, position, wanted row, a line of the table, where its key goes, and
    // which row is fed; logits do not come back.
    let bytes = |kind: &str| -> u64 {
        let fields = log.iter().map(|line| line.split_whitespace().collect::<Vec<_>>());
        fields
            .filter(|fields| fields[0].starts_with("aclrtMemcpyAsync") && fields[1] == kind)
            .map(|fields| fields[2].parse::<u64>().unwrap())
            .sum()
    };
    let (up, down) = (bytes("h2d") / STEPS, bytes("d2h") / STEPS);
    assert!(up > 0 && up <= 256, "{up} bytes a step to the card: {log:#?}");
    assert!(down > 0 && down <= 64, "{down} bytes a step back");
    npu.sim.set("log", 0);
    drop(handle);
    drop(core);
    npu.assert_clean();
}

/// Resident memory of this process in KiB.
#[cfg(target_os = "linux")]
fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Steps of `requests` requests of 50 tokens each, one after the other, without arithmetic: what is left is the engine, the
/// device and the runtime's bookkeeping.
#[cfg(target_os = "linux")]
fn memory_grown_kib(requests: u32) -> u64 {
    let npu = Npu::with(&[("compute", 0)]);
    let mut core = core_on(npu.device(), config(1, 2));
    let mut run = |requests: u32| {
        for request in 0..requests {
            let handle = core.submit(Request::tokens(vec![1, 2 + request % 700]).sampling(greedy(50))).unwrap();
            while !core.is_idle() {
                core.step().unwrap();
            }
            drop(handle);
        }
    };
    run(requests / 10);
    let before = resident_kib();
    run(requests);
    let grown = resident_kib().saturating_sub(before);
    drop(core);
    npu.assert_clean();
    grown
}

#[cfg(target_os = "linux")]
#[test]
fn host_memory_stays_flat() {
    let grown = memory_grown_kib(60);
    assert!(grown < 4096, "{grown} KiB more after 3,000 steps");
}

/// The same at length; takes minutes.
#[cfg(target_os = "linux")]
#[test]
#[ignore = "minutes"]
fn host_memory_stays_flat_over_100_000_steps() {
    let grown = memory_grown_kib(2_000);
    println!("{grown} KiB more after 100,000 steps");
    assert!(grown < 4096, "{grown} KiB");
}

#[test]
fn each_failing_call_is_a_typed_error_or_leaves_the_answer() {
    ascend_steps::failing_calls_are_typed_errors_or_leave_the_answer(1, 1);
}
