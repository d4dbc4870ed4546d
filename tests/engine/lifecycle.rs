//! Tests of drops, cancellations, deadlines, full queues and shutdowns: after each, all blocks are free and the next
//! request works.
//!
//! The cases are those of `data/cases/lifecycle.json`.

use std::sync::mpsc;
use std::time::Duration;

use crate::common::scripted_engine::{Rig, assert_at_rest, drain, finish};
use ascend_llm::device::DeviceError;
use ascend_llm::engine::{
    Engine, EngineCore, EngineError, FinishReason, Health, Request, RequestError, RequestHandle, SubmitError,
};
use ascend_llm::runner::BatchId;
use ascend_llm::runner::scripted::ScriptedForward;
use ascend_llm::sampler::SamplingParams;

const VOCAB: u32 = 50;
/// Longer than any operation of these tests; a wait of this length is a hang.
const LONG: Duration = Duration::from_secs(60);

fn greedy(max_tokens: u32) -> SamplingParams {
    let mut params = SamplingParams::greedy();
    params.max_tokens = Some(max_tokens);
    params
}

fn request(prompt_tokens: usize, max_tokens: u32) -> Request {
    Request::tokens(vec![1; prompt_tokens]).with_sampling(greedy(max_tokens))
}

fn next_one_works(core: &mut EngineCore) {
    let handle = core.submit(request(3, 2)).unwrap();
    assert_eq!(finish(core, handle).choices[0].token_ids.len(), 2);
}

/// Drops the handle, or cancels its request and returns the handle.
fn leave(handle: RequestHandle, by_cancel: bool) -> Option<RequestHandle> {
    by_cancel.then(|| {
        handle.cancel();
        handle
    })
}

fn assert_cancelled(handle: Option<RequestHandle>) {
    if let Some(handle) = handle {
        assert_eq!(handle.collect_output().unwrap().choices[0].finish_reason, FinishReason::Cancelled);
    }
}

#[test]
fn f01_gone_from_the_queue() {
    for by_cancel in [false, true] {
        let mut rig = Rig::new(VOCAB, 32);
        rig.config.max_num_seqs = 1;
        let mut core = rig.core(rig.hashed());
        let running = core.submit(request(3, 50)).unwrap();
        core.step().unwrap();
        let waiting = core.submit(request(3, 50)).unwrap();
        core.step().unwrap();
        assert_eq!((core.stats().running, core.stats().waiting, core.stats().queued_requests), (1, 1, 1));
        let rows = core.stats().computed_rows;
        let waiting = leave(waiting, by_cancel);
        core.step().unwrap();
        assert_eq!((core.stats().running, core.stats().waiting, core.stats().queued_requests), (1, 0, 0));
        assert_eq!(core.stats().computed_rows, rows + 1, "only the running request may have computed a row");
        assert_cancelled(waiting);

        // The same before the engine loop has admitted the request.
        let unseen = leave(core.submit(request(3, 50)).unwrap(), by_cancel);
        core.step().unwrap();
        assert_eq!((core.stats().waiting, core.stats().queued_requests), (0, 0));
        assert_cancelled(unseen);
        drop(running);
        drain(&mut core);
        next_one_works(&mut core);
    }
}

#[test]
fn f02_gone_in_the_middle_of_a_prefill() {
    for by_cancel in [false, true] {
        let rig = Rig::new(VOCAB, 32);
        let mut core = rig.core(rig.hashed());
        let handle = core.submit(request(200, 5)).unwrap();
        core.step().unwrap();
        assert_eq!(core.stats().computed_rows, 64);
        let handle = leave(handle, by_cancel);
        core.step().unwrap();
        assert_eq!(core.stats().computed_rows, 64, "the engine computed rows after the request ended");
        assert_eq!(core.stats().finished_cancelled, 1);
        assert_cancelled(handle);
        assert!(core.is_idle());
        assert_at_rest(&core);
        next_one_works(&mut core);
    }
}

#[test]
fn f03_gone_while_decoding() {
    for by_cancel in [false, true] {
        let rig = Rig::new(VOCAB, 32);
        let mut core = rig.core(rig.hashed());
        let handle = core.submit(request(3, 100)).unwrap();
        core.step().unwrap();
        core.step().unwrap();
        let handle = leave(handle, by_cancel);
        core.step().unwrap();
        assert_eq!(core.stats().computed_rows, 4, "the engine computed rows after the request ended");
        if let Some(handle) = handle {
            let output = handle.collect_output().unwrap();
            assert_eq!(output.choices[0].token_ids.len(), 2, "the tokens before the end can still be read");
            assert_eq!(output.choices[0].finish_reason, FinishReason::Cancelled);
        }
        assert!(core.is_idle());
        assert_at_rest(&core);
        next_one_works(&mut core);
    }
}

#[test]
fn f04_cancelling_twice_or_too_late_does_nothing() {
    let rig = Rig::new(VOCAB, 32);
    let mut core = rig.core(rig.hashed());
    let handle = core.submit(request(3, 2)).unwrap();
    handle.cancel();
    handle.cancel();
    let output = finish(&mut core, handle);
    assert_eq!(output.choices[0].finish_reason, FinishReason::Cancelled);

    let mut handle = core.submit(request(3, 2)).unwrap();
    drain(&mut core);
    handle.cancel();
    core.step().unwrap();
    let delta = handle.recv().unwrap().unwrap();
    assert_eq!((delta.token_ids.len(), delta.finish_reason), (2, Some(FinishReason::Length)));
    assert!(handle.recv().is_none() && handle.recv().is_none() && handle.is_ended());
    handle.cancel();
    drop(handle);
    assert_eq!(core.stats().finished_cancelled, 1);
    next_one_works(&mut core);
}

#[test]
fn f05_ids_are_the_engines_own() {
    let rig = Rig::new(VOCAB, 32);
    let mut core = rig.core(rig.hashed());
    let (first, second) = (core.submit(request(3, 2)).unwrap(), core.submit(request(3, 2)).unwrap());
    assert_ne!(first.id(), second.id());
    drain(&mut core);
    assert_eq!(first.collect_output().unwrap().choices, second.collect_output().unwrap().choices);
}

#[test]
fn f06_who_never_reads_gets_one_merged_delta() {
    let rig = Rig::new(VOCAB, 32);
    let mut core = rig.core(rig.hashed());
    let handle = core.submit(request(3, 200)).unwrap();
    drain(&mut core);
    let deltas: Vec<_> = handle.into_iter().map(Result::unwrap).collect();
    assert_eq!(deltas.len(), 1);
    assert_eq!(deltas[0].token_ids.len(), 200);
}

#[test]
fn a_detached_request_runs_to_its_end() {
    let rig = Rig::new(VOCAB, 32);
    let mut core = rig.core(rig.hashed());
    core.submit(request(40, 3)).unwrap().detach();
    drain(&mut core);
    assert_eq!((core.stats().finished_length, core.stats().generated_tokens), (1, 3));
    let handle = core.submit(request(40, 1)).unwrap();
    assert_eq!(finish(&mut core, handle).usage.cached_tokens, 32);
}

/// Returns an engine whose steps each wait for a permit, so that a test controls their progress.
fn gated() -> (Engine, mpsc::Sender<()>, mpsc::Receiver<usize>) {
    let mut rig = Rig::new(VOCAB, 32);
    rig.config.max_queue = 4;
    let (permit, permits) = mpsc::channel::<()>();
    let (step, steps) = mpsc::channel();
    let forward = rig.hashed().watched(Box::new(move |input| {
        let _ = step.send(input.q_lens.len());
        // If the sender of the permits has been dropped, every step may run.
        let _ = permits.recv();
        Ok(())
    }));
    (Engine::spawn(rig.core(forward)).unwrap(), permit, steps)
}

#[test]
fn f07_dropping_the_engine_ends_every_handle_with_an_error() {
    let (engine, permit, steps) = gated();
    let handles: Vec<_> = (0..3).map(|_| engine.submit(request(3, 200)).unwrap()).collect();
    steps.recv_timeout(LONG).unwrap();
    let clone = engine.clone();
    drop(engine);
    assert_eq!(clone.health(), Health::Ready, "the engine runs as long as a clone exists");
    // The step in progress ends; the next one does not start.
    permit.send(()).unwrap();
    steps.recv_timeout(LONG).unwrap();
    permit.send(()).unwrap();
    steps.recv_timeout(LONG).unwrap();
    // The engine stops before any further step may run.
    drop(clone);
    drop(permit);
    for handle in handles {
        let items: Vec<_> = handle.into_iter().collect();
        assert!(matches!(items.last(), Some(Err(RequestError::Closed))), "{items:?}");
    }
    while steps.recv_timeout(LONG).is_ok() {}
    assert_eq!(steps.try_recv(), Err(mpsc::TryRecvError::Disconnected), "the model must be dropped with its thread");
}

#[test]
fn a_handle_may_outlive_the_engine() {
    let rig = Rig::new(VOCAB, 32);
    let core = rig.core(rig.hashed());
    let (first, second) = (core.submit(request(3, 2)).unwrap(), core.submit(request(3, 2)).unwrap());
    drop(core);
    assert!(matches!(first.collect_output(), Err(RequestError::Closed)));
    second.cancel();
    drop(second);
}

#[test]
fn an_error_that_was_read_comes_again_when_collecting() {
    let rig = Rig::new(VOCAB, 32);
    let core = rig.core(rig.hashed());
    let mut handle = core.submit(request(3, 2)).unwrap();
    drop(core);
    assert!(matches!(handle.recv(), Some(Err(RequestError::Closed))));
    assert!(handle.recv().is_none());
    assert!(matches!(handle.collect_output(), Err(RequestError::Closed)));
}

#[test]
fn f27_auto_traits() {
    fn is_send_sync_clone<T: Send + Sync + Clone + 'static>() {}
    fn is_send<T: Send + 'static>() {}
    is_send_sync_clone::<Engine>();
    is_send::<EngineCore>();
    is_send::<RequestHandle>();
    is_send_sync_clone::<RequestError>();
    is_send_sync_clone::<EngineError>();
}

#[test]
fn sch07_a_full_queue_refuses_at_once_and_gives_the_request_back() {
    let mut rig = Rig::new(VOCAB, 32);
    rig.config.max_queue = 4;
    let mut core = rig.core(rig.hashed());
    let asked = request(3, 2);
    let (accepted, refused): (Vec<_>, Vec<_>) = (0..10).map(|_| core.submit(asked.clone())).partition(Result::is_ok);
    assert_eq!((accepted.len(), refused.len()), (4, 6));
    for refusal in refused {
        let Err(SubmitError::QueueFull(request)) = refusal else { panic!("{refusal:?}") };
        assert_eq!(*request, asked);
    }
    assert_eq!(core.health(), Health::NotAccepting);
    drain(&mut core);
    assert_eq!(core.health(), Health::Ready);
    drop(accepted);
    // A rejected request does not occupy a place in the queue.
    for _ in 0..10 {
        assert!(matches!(core.submit(request(0, 2)), Err(SubmitError::Param(_))));
    }
    next_one_works(&mut core);
}

#[test]
fn sch08_ready_busy_and_failed_are_three_answers() {
    let (engine, permit, steps) = gated();
    assert_eq!(engine.health(), Health::Ready);
    let running = engine.submit(request(3, 2)).unwrap();
    steps.recv_timeout(LONG).unwrap();
    assert_eq!(engine.health(), Health::Ready, "busy, but the queue has free capacity");
    let waiting: Vec<_> = (0..4).map(|_| engine.submit(request(3, 2)).unwrap()).collect();
    assert_eq!(engine.health(), Health::NotAccepting);
    assert!(matches!(engine.submit(request(3, 2)), Err(SubmitError::QueueFull(_))));
    drop(permit);
    for handle in waiting.into_iter().chain([running]) {
        assert_eq!(handle.collect_output().unwrap().choices[0].token_ids.len(), 2);
    }
    assert_eq!(engine.health(), Health::Ready);

    let rig = Rig::new(VOCAB, 32);
    let lost = rig.hashed().watched(Box::new(|_| Err(DeviceError::Lost)));
    let engine = Engine::spawn(rig.core(lost)).unwrap();
    let handle = engine.submit(request(3, 2)).unwrap();
    assert!(matches!(handle.collect_output(), Err(RequestError::Engine(EngineError::Device(DeviceError::Lost)))));
    assert_eq!(engine.health(), Health::Failed);
    assert!(matches!(engine.submit(request(3, 2)), Err(SubmitError::Failed { .. })));
    assert_eq!(engine.shutdown(LONG), Err(EngineError::Device(DeviceError::Lost)));
}

#[test]
fn shutdown_lets_requests_finish_and_accepts_no_new_one() {
    let (engine, permit, steps) = gated();
    let handle = engine.submit(request(3, 5)).unwrap();
    steps.recv_timeout(LONG).unwrap();
    let clone = engine.clone();
    let closing = std::thread::spawn(move || engine.shutdown(LONG));
    while clone.health() == Health::Ready {
        std::thread::yield_now();
    }
    let asked = request(3, 2);
    let Err(SubmitError::Closed(back)) = clone.submit(asked.clone()) else {
        panic!("the request was accepted during the shutdown")
    };
    assert_eq!(*back, asked);
    drop(permit);
    assert_eq!(closing.join().unwrap(), Ok(()));
    assert_eq!(handle.collect_output().unwrap().choices[0].token_ids.len(), 5);
    assert_eq!(clone.health(), Health::Stopped);
    assert!(matches!(clone.submit(asked), Err(SubmitError::Closed(_))));
}

#[test]
fn shutdown_without_grace_ends_what_runs() {
    let (engine, permit, steps) = gated();
    let handle = engine.submit(request(3, 200)).unwrap();
    steps.recv_timeout(LONG).unwrap();
    let clone = engine.clone();
    let closing = std::thread::spawn(move || engine.shutdown(Duration::ZERO));
    while clone.health() == Health::Ready {
        std::thread::yield_now();
    }
    drop(permit);
    assert_eq!(closing.join().unwrap(), Ok(()));
    assert!(matches!(handle.into_iter().last(), Some(Err(RequestError::Closed))));
}

#[test]
fn deadlines_end_waiting_and_running_requests() {
    let mut rig = Rig::new(VOCAB, 32);
    rig.config.max_num_seqs = 1;
    let mut core = rig.core(rig.hashed());
    let second = Duration::from_secs(1);
    let running = core.submit(request(3, 100).with_deadline(second * 3)).unwrap();
    core.step().unwrap();
    let waiting = core.submit(request(3, 100).with_deadline(second)).unwrap();
    let patient = core.submit(request(3, 2)).unwrap();
    rig.clock.advance(Duration::from_micros(999_999));
    core.step().unwrap();
    assert_eq!(core.stats().finished_deadline, 0);
    rig.clock.advance(Duration::from_micros(1));
    core.step().unwrap();
    assert_eq!(core.stats().finished_deadline, 1);
    assert_eq!(waiting.collect_output().unwrap().choices[0].finish_reason, FinishReason::Deadline);
    rig.clock.advance(second * 2);
    core.step().unwrap();
    assert_eq!(core.stats().finished_deadline, 2);
    let choice = running.collect_output().unwrap().choices.remove(0);
    assert_eq!((choice.finish_reason, choice.token_ids.len()), (FinishReason::Deadline, 3));
    assert_eq!(finish(&mut core, patient).choices[0].finish_reason, FinishReason::Length);
}

#[test]
fn priorities_act_under_their_policy_and_are_refused_under_another() {
    let mut rig = Rig::new(VOCAB, 32);
    rig.config.max_num_seqs = 1;
    let core = rig.core(rig.hashed());
    let Err(SubmitError::Param(error)) = core.submit(request(3, 2).with_priority(1)) else {
        panic!("the priority was accepted")
    };
    assert_eq!(error.field, "priority");

    rig.config.policy = ascend_llm::scheduler::SchedulePolicy::Priority;
    let mut core = rig.core(rig.hashed());
    let mut low = core.submit(request(3, 2)).unwrap();
    let mut high = core.submit(request(3, 2).with_priority(1)).unwrap();
    core.step().unwrap();
    core.step().unwrap();
    assert!(high.try_recv().unwrap().is_some_and(|delta| delta.finish_reason.is_some()));
    assert!(low.try_recv().unwrap().is_none());
    drain(&mut core);
}

#[test]
fn threads_share_one_engine() {
    let rig = Rig::new(VOCAB, 32);
    let mut core = rig.core(rig.hashed());
    let handle = core.submit(request(3, 20)).unwrap();
    let expected = finish(&mut core, handle).choices;
    let engine = Engine::spawn(rig.core(rig.hashed())).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            let (engine, expected) = (engine.clone(), &expected);
            scope.spawn(move || {
                for round in 0..20 {
                    let handle = engine.submit(request(3, 20)).unwrap();
                    if round % 3 == 0 {
                        drop(handle);
                    } else {
                        assert_eq!(&handle.collect_output().unwrap().choices, expected);
                    }
                }
            });
        }
    });
    assert_eq!(engine.clone().shutdown(LONG), Ok(()));
    let stats = engine.stats();
    assert_eq!(stats.finished_length + stats.finished_cancelled, 80, "{stats:?}");
    assert_eq!((stats.running, stats.waiting, stats.live_blocks, stats.queued_requests), (0, 0, 0, 0));
}

#[test]
fn recv_timeout_distinguishes_waiting_from_the_end() {
    let (engine, permit, steps) = gated();
    let mut handle = engine.submit(request(3, 1)).unwrap();
    steps.recv_timeout(LONG).unwrap();
    assert!(handle.recv_timeout(Duration::ZERO).unwrap().is_none() && !handle.is_ended());
    drop(permit);
    assert!(handle.recv_timeout(LONG).unwrap().is_some());
    assert!(handle.recv_timeout(LONG).unwrap().is_none() && handle.is_ended());
}

#[test]
fn a_model_that_gives_the_wrong_number_of_rows_is_an_engine_error() {
    struct Short(ScriptedForward);
    impl ascend_llm::runner::ModelExecutor for Short {
        fn launch(&mut self, input: ascend_llm::runner::ForwardInput) -> Result<BatchId, DeviceError> {
            self.0.launch(input)
        }
        fn collect(
            &mut self,
            ticket: BatchId,
            void: &[bool],
        ) -> Result<ascend_llm::runner::ForwardOutput<'_>, DeviceError> {
            let mut rows = self.0.collect(ticket, void)?;
            rows.logits.logits = &rows.logits.logits[1..];
            Ok(rows)
        }
        fn copy_blocks(
            &mut self,
            pairs: &[(ascend_llm::kv_cache::BlockId, ascend_llm::kv_cache::BlockId)],
        ) -> Result<(), DeviceError> {
            self.0.copy_blocks(pairs)
        }
        fn vocab_size(&self) -> usize {
            self.0.vocab_size()
        }
    }
    let rig = Rig::new(VOCAB, 32);
    let mut core = rig.core(Short(rig.hashed()));
    let handle = core.submit(request(3, 2)).unwrap();
    let error = core.step().unwrap_err();
    assert_eq!(error, EngineError::BadAnswer { what: "logits", got: 49, expected: 50 });
    assert!(matches!(handle.collect_output(), Err(RequestError::Engine(heard)) if heard == error));
}
