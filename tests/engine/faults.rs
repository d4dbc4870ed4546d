//! Tests a model that fails at its n-th call: each handle receives the error exactly once, and no call hangs.

use std::time::Duration;

use crate::common::scripted_engine::Rig;
use ascend_llm::device::DeviceError;
use ascend_llm::engine::{Engine, EngineError, ErrorKind, Health, Request, RequestError, SubmitError};
use ascend_llm::runner::scripted::ScriptedForward;
use ascend_llm::sampler::{ParamError, SamplingParams};

const VOCAB: u32 = 50;
const LONG: Duration = Duration::from_secs(60);

fn faults() -> [DeviceError; 3] {
    [
        DeviceError::Lost,
        DeviceError::OutOfMemory { kind: "device", asked_bytes: 64, free_bytes: 0 },
        DeviceError::Call { call: "launch", code: 507_011, message: "time-out".to_owned() },
    ]
}

fn failing(rig: &Rig, at_call: usize, fault: DeviceError) -> ScriptedForward {
    let mut call = 0;
    rig.hashed().watched(Box::new(move |_| {
        call += 1;
        if call == at_call { Err(fault.clone()) } else { Ok(()) }
    }))
}

fn request(prompt_tokens: usize) -> Request {
    let mut params = SamplingParams::default();
    (params.max_tokens, params.seed, params.n) = (Some(4), Some(1), 2);
    Request::tokens(vec![1; prompt_tokens]).with_sampling(params)
}

#[test]
fn every_handle_receives_the_error_of_a_failure_at_any_call() {
    for at_call in 1..12 {
        for fault in faults() {
            let mut rig = Rig::new(VOCAB, 20);
            rig.config.max_num_seqs = 3;
            let mut core = rig.core(failing(&rig, at_call, fault.clone()));
            let handles: Vec<_> = (1..8).map(|at| core.submit(request(at * 13)).unwrap()).collect();
            let mut steps = 0;
            let error = loop {
                if let Err(error) = core.step() {
                    break error;
                }
                steps += 1;
                assert!(steps < 100, "the model never ran call {at_call}");
            };
            assert_eq!(error, EngineError::Device(fault.clone()));
            let late = core.submit(request(3));
            assert!(matches!(&late, Err(SubmitError::Failed { cause, .. }) if *cause == error), "{late:?}");
            assert_eq!(core.step(), Err(error.clone()), "each later step must return the same error");
            assert_eq!(core.health(), Health::Failed);
            assert!(core.is_idle());
            let mut reported = 0;
            for handle in handles {
                let items: Vec<_> = handle.into_iter().collect();
                let errors = items.iter().filter(|item| item.is_err()).count();
                let finished = items.iter().flatten().filter(|delta| delta.finish_reason.is_some()).count();
                match items.last() {
                    Some(Err(RequestError::Engine(got))) => assert_eq!((got, errors), (&error, 1)),
                    last => assert_eq!((finished, errors), (2, 0), "{last:?}"),
                }
                reported += errors;
            }
            assert!(reported > 0);
        }
    }
}

#[test]
fn the_thread_reports_a_failure_and_ends() {
    let rig = Rig::new(VOCAB, 20);
    let engine = Engine::spawn(rig.core(failing(&rig, 3, DeviceError::Lost))).unwrap();
    let handles: Vec<_> = (1..4).filter_map(|at| engine.submit(request(at * 40)).ok()).collect();
    assert!(!handles.is_empty());
    for handle in handles {
        assert!(matches!(
            handle.into_iter().last(),
            Some(Err(RequestError::Engine(EngineError::Device(DeviceError::Lost))))
        ));
    }
    assert_eq!(engine.health(), Health::Failed);
    assert_eq!(engine.shutdown(LONG), Err(EngineError::Device(DeviceError::Lost)));
}

#[test]
fn a_panic_in_the_model_is_a_failure_like_any_other() {
    let rig = Rig::new(VOCAB, 20);
    let forward = rig.hashed().watched(Box::new(|input| {
        assert!(input.kv_lens[0] < 5, "the context has reached five tokens");
        Ok(())
    }));
    let engine = Engine::spawn(rig.core(forward)).unwrap();
    let handle = engine.submit(request(3)).unwrap();
    let Some(Err(RequestError::Engine(EngineError::Panicked { message }))) = handle.into_iter().last() else {
        panic!("the error does not report the panic")
    };
    assert_eq!(message, "the context has reached five tokens");
    assert!(matches!(engine.submit(request(3)), Err(SubmitError::Failed { .. })));
    assert!(matches!(engine.shutdown(LONG), Err(EngineError::Panicked { .. })));
}

#[test]
fn errors_are_whole_sentences_with_a_kind() {
    let lost = RequestError::Engine(EngineError::Device(DeviceError::Lost));
    assert_eq!(lost.to_string(), "the engine failed: device: device lost");
    assert_eq!((lost.kind(), lost.is_client_error()), (ErrorKind::Device, false));
    let memory = DeviceError::OutOfMemory { kind: "host", asked_bytes: 2, free_bytes: 1 };
    assert_eq!(EngineError::Device(memory).kind(), ErrorKind::OutOfMemory);
    let param = SubmitError::from(ParamError::new("top_p", 2, "at most 1"));
    assert_eq!(
        (param.to_string().as_str(), param.kind()),
        ("top_p: got 2, expected at most 1", ErrorKind::InvalidRequest)
    );
    assert!(param.is_client_error() && param.into_request().is_none());
    let full = SubmitError::QueueFull(Box::new(request(3)));
    assert!(!full.is_client_error() && full.kind().is_retryable());
    assert_eq!(full.into_request(), Some(request(3)));
    assert_eq!(RequestError::Overflow { choice: 0, position: 1 }.kind(), ErrorKind::Numeric);
    assert_eq!(serde_json::to_value(ErrorKind::PromptTooLong).unwrap(), ErrorKind::PromptTooLong.as_str());
}
