//! Tests a handle as a stream: a pending poll stores the waker, and an update wakes it, on any thread.

#![cfg(feature = "async")]

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use crate::common::scripted_engine::{Rig, drain};
use ascend_llm::engine::{Engine, Request, RequestError, RequestHandle};
use ascend_llm::sampler::SamplingParams;
use futures_core::Stream as _;
use futures_core::stream::FusedStream as _;

/// Waker that counts its calls and unparks the thread that created it.
struct CountingWaker {
    wakes: AtomicUsize,
    thread: std::thread::Thread,
}

impl CountingWaker {
    fn here() -> Arc<Self> {
        Arc::new(Self { wakes: AtomicUsize::new(0), thread: std::thread::current() })
    }

    fn wakes(&self) -> usize {
        self.wakes.load(Ordering::SeqCst)
    }
}

impl Wake for CountingWaker {
    fn wake(self: Arc<Self>) {
        self.wakes.fetch_add(1, Ordering::SeqCst);
        self.thread.unpark();
    }
}

fn poll(handle: &mut RequestHandle, waker: &Waker) -> Poll<Option<Result<ascend_llm::engine::Delta, RequestError>>> {
    Pin::new(handle).poll_next(&mut Context::from_waker(waker))
}

fn request(max_tokens: u32) -> Request {
    let mut params = SamplingParams::greedy();
    params.max_tokens = Some(max_tokens);
    Request::tokens(vec![1, 2, 3]).with_sampling(params)
}

#[test]
fn f28_pending_keeps_the_waker_and_an_update_wakes_it_once() {
    let rig = Rig::new(50, 16);
    let mut core = rig.core(rig.hashed());
    let mut handle = core.submit(request(3)).unwrap();
    let (first, second) = (CountingWaker::here(), CountingWaker::here());
    let (first_waker, second_waker) = (Waker::from(Arc::clone(&first)), Waker::from(Arc::clone(&second)));
    assert!(poll(&mut handle, &first_waker).is_pending());
    assert!(poll(&mut handle, &second_waker).is_pending());
    core.step().unwrap();
    assert_eq!((first.wakes(), second.wakes()), (0, 1), "only the last waker is called");
    core.step().unwrap();
    assert_eq!(second.wakes(), 1, "the waker is called again although the handle was not polled");
    let Poll::Ready(Some(Ok(delta))) = poll(&mut handle, &second_waker) else { panic!("no delta is available") };
    assert_eq!(delta.token_ids.len(), 2, "the delta merges the tokens of two steps");
    assert!(poll(&mut handle, &second_waker).is_pending());
    drain(&mut core);
    assert_eq!(second.wakes(), 2);
    assert!(!handle.is_terminated());
    let Poll::Ready(Some(Ok(delta))) = poll(&mut handle, &second_waker) else { panic!("the last delta is missing") };
    assert!(delta.finish_reason.is_some());
    assert!(matches!(poll(&mut handle, &second_waker), Poll::Ready(None)));
    assert!(matches!(poll(&mut handle, &second_waker), Poll::Ready(None)));
    assert!(handle.is_terminated());
}

#[test]
fn an_error_wakes_too() {
    let rig = Rig::new(50, 16);
    let core = rig.core(rig.hashed());
    let mut handle = core.submit(request(3)).unwrap();
    let counting_waker = CountingWaker::here();
    let waker = Waker::from(Arc::clone(&counting_waker));
    assert!(poll(&mut handle, &waker).is_pending());
    drop(core);
    assert_eq!(counting_waker.wakes(), 1);
    assert!(matches!(poll(&mut handle, &waker), Poll::Ready(Some(Err(RequestError::Closed)))));
    assert!(matches!(poll(&mut handle, &waker), Poll::Ready(None)));
}

#[test]
fn f27_a_stream_moves_between_threads() {
    let rig = Rig::new(50, 16);
    let engine = Engine::spawn(rig.core(rig.hashed())).unwrap();
    let mut handle = engine.submit(request(40)).unwrap();
    let first = {
        let waker = Waker::from(CountingWaker::here());
        poll(&mut handle, &waker)
    };
    let taken = match first {
        Poll::Ready(Some(Ok(delta))) => delta.token_ids.len(),
        Poll::Pending => 0,
        other @ Poll::Ready(_) => panic!("{other:?}"),
    };
    // Another thread continues with its own waker, and sleeps while no update is available.
    let rest = std::thread::spawn(move || {
        let waker = Waker::from(CountingWaker::here());
        let mut tokens = 0;
        loop {
            match poll(&mut handle, &waker) {
                Poll::Ready(Some(Ok(delta))) => tokens += delta.token_ids.len(),
                Poll::Ready(None) => return tokens,
                Poll::Ready(Some(Err(error))) => panic!("{error}"),
                Poll::Pending => std::thread::park(),
            }
        }
    });
    assert_eq!(taken + rest.join().unwrap(), 40);
}

#[test]
fn a_waker_that_panics_affects_no_other_request() {
    struct Broken;
    impl Wake for Broken {
        fn wake(self: Arc<Self>) {
            panic!("broken waker");
        }
    }
    let rig = Rig::new(50, 16);
    let mut core = rig.core(rig.hashed());
    let mut broken = core.submit(request(3)).unwrap();
    let other = core.submit(request(3)).unwrap();
    assert!(poll(&mut broken, &Waker::from(Arc::new(Broken))).is_pending());
    drain(&mut core);
    assert_eq!(other.collect_output().unwrap().choices[0].token_ids.len(), 3);
    assert_eq!(broken.collect_output().unwrap().choices[0].token_ids.len(), 3);
}

/// Small executor: polls the future, and sleeps until its waker unparks the thread.
fn block_on<T>(future: impl Future<Output = T>) -> T {
    let mut future = std::pin::pin!(future);
    let waker = Waker::from(CountingWaker::here());
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(value) => return value,
            Poll::Pending => std::thread::park(),
        }
    }
}

#[test]
fn deltas_and_outputs_are_awaited() {
    let rig = Rig::new(50, 16);
    let engine = Engine::spawn(rig.core(rig.hashed())).unwrap();
    let mut streamed = engine.submit(request(30)).unwrap();
    let whole = engine.submit(request(30)).unwrap();
    let (tokens, usage) = block_on(async {
        let (mut tokens, mut usage) = (Vec::new(), None);
        while let Some(delta) = streamed.next_delta().await {
            let delta = delta.unwrap();
            tokens.extend(delta.token_ids);
            usage = delta.usage;
        }
        assert!(streamed.next_delta().await.is_none());
        (tokens, usage)
    });
    assert_eq!((tokens.len(), usage.unwrap().generated_tokens), (30, 30));
    let output = block_on(whole.output()).unwrap();
    assert_eq!(output.choices[0].token_ids, tokens);

    // Dropping a future loses no update.
    let mut handle = engine.submit(request(30)).unwrap();
    drop(handle.next_delta());
    let rest = block_on(async { handle.output().await }).unwrap();
    assert_eq!(rest.choices[0].token_ids, tokens);
}

#[test]
fn a_stream_of_its_own_has_the_deltas_and_cancels_when_dropped() {
    let rig = Rig::new(50, 16);
    let mut core = rig.core(rig.hashed());
    let mut stream = core.submit(request(3)).unwrap().into_stream();
    let dropped = core.submit(request(200)).unwrap().into_stream();
    assert_eq!(stream.handle().prompt_token_ids(), [1, 2, 3]);
    drop(dropped);
    drain(&mut core);
    assert_eq!(core.stats().finished_cancelled, 1);
    let waker = Waker::from(CountingWaker::here());
    let mut context = Context::from_waker(&waker);
    let Poll::Ready(Some(Ok(delta))) = Pin::new(&mut stream).poll_next(&mut context) else {
        panic!("no delta is available")
    };
    assert_eq!(delta.token_ids.len(), 3);
    assert!(matches!(Pin::new(&mut stream).poll_next(&mut context), Poll::Ready(None)));
    assert!(stream.is_terminated());
    assert!(stream.into_handle().is_ended());
}

#[test]
fn shutdown_is_awaited_and_begins_with_the_call() {
    let rig = Rig::new(50, 16);
    let engine = Engine::spawn(rig.core(rig.hashed())).unwrap();
    let clone = engine.clone();
    let handle = engine.submit(request(50)).unwrap();
    let shutdown = engine.shutdown_async(std::time::Duration::from_secs(600));
    assert!(matches!(clone.submit(request(1)), Err(ascend_llm::SubmitError::Closed(_))));
    assert_eq!(block_on(shutdown), Ok(()));
    assert_eq!(clone.health(), ascend_llm::engine::Health::Stopped);
    assert_eq!(handle.collect_output().unwrap().choices[0].token_ids.len(), 50);
    // After the shutdown has ended, waiting for it again returns at once.
    assert_eq!(block_on(clone.shutdown_async(std::time::Duration::ZERO)), Ok(()));

    let failing = rig.hashed().watched(Box::new(|_| Err(ascend_llm::device::DeviceError::Lost)));
    let engine = Engine::spawn(rig.core(failing)).unwrap();
    let handle = engine.submit(request(5)).unwrap();
    assert!(block_on(handle.output()).is_err());
    let error = block_on(engine.shutdown_async(std::time::Duration::ZERO)).unwrap_err();
    assert_eq!(error, ascend_llm::EngineError::Device(ascend_llm::device::DeviceError::Lost));
}
