//! Tests that a step without admission, end or preemption allocates no memory, whether or not the output is read.
#![allow(clippy::cast_possible_truncation)]

#[path = "common/counting_allocator.rs"]
mod counting_allocator;

mod common;

use std::cell::Cell;
use std::time::Duration;

use ascend_llm::engine::Request;
use ascend_llm::runner::scripted::ListedVocabulary;
use ascend_llm::sampler::SamplingParams;
use common::scripted_engine::{Rig, drain};

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

/// Counts only the allocations of this thread, and not those of the test runner's threads.
fn count() {
    let _ = ALLOCATIONS.try_with(|allocations| allocations.set(allocations.get() + 1));
}

#[test]
fn steady_steps_allocate_nothing() {
    for (prefix_caching, depth) in [(false, 1), (true, 1), (false, 2), (true, 3)] {
        let mut rig = Rig::new(60, 64);
        (rig.config.prefix_caching, rig.config.pipeline_depth) = (prefix_caching, Some(depth));
        rig.model.eos_ids = vec![7];
        // Token texts of one to eight bytes; some are incomplete UTF-8 characters.
        let piece = |id: usize| {
            if id.is_multiple_of(5) { vec![0xf0, 0x9f, 0x99] } else { vec![b'a' + (id % 26) as u8; 1 + id % 8] }
        };
        rig.vocabulary = Some(ListedVocabulary::new((0..60).map(piece)).shared());
        let mut core = rig.core(rig.hashed());
        let submit = |change: fn(&mut SamplingParams)| {
            let mut params = SamplingParams::default();
            (params.max_tokens, params.ignore_eos) = (Some(100), true);
            change(&mut params);
            let request =
                Request::tokens(vec![3; 20]).with_sampling(params).with_deadline(Duration::from_secs(1_000_000));
            core.submit(request).unwrap()
        };
        let unread = submit(|params| params.temperature = 0.0);
        let mut read = submit(|params| {
            params.stop = vec!["never said".to_owned(), "bb\u{1f600}".to_owned()];
            params.min_tokens = 3;
        });
        let choices = submit(|params| {
            (params.n, params.seed, params.top_k, params.top_p) = (3, Some(5), 20, 0.9);
            (params.presence_penalty, params.repetition_penalty) = (0.5, 1.1);
            params.logit_bias = vec![(3, 1.0)];
            params.bad_words = vec!["bb".to_owned()];
        });
        submit(|_| {}).detach();
        // After these steps all requests are admitted, all prompts are computed, and all buffers have their final size.
        for _ in 0..24 {
            core.step().unwrap();
        }
        let mut counted = 0;
        for step in 0..70 {
            if step % 3 == 0 {
                while let Ok(Some(_)) = read.try_recv() {}
            }
            let before = ALLOCATIONS.get();
            let report = core.step().unwrap();
            let allocated = ALLOCATIONS.get() - before;
            let steady = report.finished == 0 && report.preempted == 0 && report.sequences > 0;
            if steady {
                assert_eq!(allocated, 0, "step {step} allocated {allocated} times");
                counted += 1;
            }
        }
        assert!(counted > 60, "only {counted} steps were steady");
        drop((unread, read, choices));
        drain(&mut core);
    }
}
