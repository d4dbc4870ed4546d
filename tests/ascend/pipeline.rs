//! Tests of in-flight steps on the simulated Ascend card.
//!
//! Outputs are equal at each depth and under any delay, a greedy step only queues, and a failure of any call yields a
//! typed error or the correct output.

#![allow(clippy::cast_possible_truncation, reason = "the numbers of a test are small")]

use crate::common::sim_npu::Npu;
use crate::steps;
use crate::steps::{config, core_on, greedy};
use ascend_llm::engine::Request;

#[test]
fn outputs_are_equal_at_every_depth() {
    steps::outputs_are_equal_at_every_depth(1, 11);
}

#[test]
fn no_delay_of_a_stream_changes_an_output() {
    steps::no_delay_changes_an_output(1, 100);
}

#[test]
fn greedy_steps_in_flight_only_queue() {
    steps::greedy_steps_in_flight_only_queue(1);
}

/// Returns the resident memory of this process in KiB.
#[cfg(target_os = "linux")]
fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Runs `requests` requests of 50 tokens each in sequence, without arithmetic, and returns the growth of resident
/// memory.
///
/// Only the memory of the engine, the device and the runtime's bookkeeping can grow.
#[cfg(target_os = "linux")]
fn memory_grown_kib(requests: u32) -> u64 {
    let npu = Npu::with(&[("compute", 0)]);
    let mut core = core_on(npu.device(), config(1, 2));
    let mut run = |requests: u32| {
        for request in 0..requests {
            let handle = core.submit(Request::tokens(vec![1, 2 + request % 700]).with_sampling(greedy(50))).unwrap();
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

/// The same with many more steps; takes minutes.
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
    steps::failing_calls_are_typed_errors_or_leave_the_answer(1, 1);
}
