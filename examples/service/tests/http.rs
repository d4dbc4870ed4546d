//! Tests over sockets: answers, streams, errors, disconnected clients.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex, mpsc};

use ascend_llm::engine::{CacheBudget, EngineConfig, EngineCore, ManualClock, ModelLimits};
use ascend_llm::runner::scripted::{ListedVocabulary, ScriptedForward};
use ascend_llm::{Engine, SamplingParams};
use serde_json::{Value, json};

/// Service on a free port. Dropping it stops its runtime.
struct Service {
    address: SocketAddr,
    _runtime: tokio::runtime::Runtime,
}

impl Service {
    fn start(engine: Engine) -> Self {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        runtime.spawn(async move { axum::serve(listener, ascend_llm_service::router(engine)).await });
        Self { address, _runtime: runtime }
    }

    fn send(&self, method: &str, path: &str, body: &str) -> TcpStream {
        let mut stream = TcpStream::connect(self.address).unwrap();
        let head =
            format!("{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json");
        write!(stream, "{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len()).unwrap();
        stream
    }

    fn ask(&self, method: &str, path: &str, body: &str) -> (u16, String) {
        let mut text = String::new();
        self.send(method, path, body).read_to_string(&mut text).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        let status = head.split_whitespace().nth(1).unwrap().parse().unwrap();
        (status, body.to_owned())
    }
}

fn story_engine() -> Engine {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/fable-f16.gguf");
    Engine::builder(model).build().unwrap()
}

#[test]
fn answers_and_streams_have_the_same_text() {
    let engine = story_engine();
    let expected = engine.generate("Once upon a time", &SamplingParams::greedy().with_max_tokens(24)).unwrap();
    let service = Service::start(engine);
    let body = json!({"prompt": "Once upon a time", "temperature": 0, "max_tokens": 24});
    let (status, text) = service.ask("POST", "/generate", &body.to_string());
    let output: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((status, output["choices"][0]["text"].as_str().unwrap()), (200, expected.as_str()));

    let body = json!({"prompt": "Once upon a time", "temperature": 0, "max_tokens": 24, "stream": true});
    let (status, text) = service.ask("POST", "/generate", &body.to_string());
    let deltas: Vec<Value> = text
        .lines()
        .filter_map(|line| line.strip_prefix("data: "))
        .map(|data| serde_json::from_str(data).unwrap())
        .collect();
    let streamed: String = deltas.iter().map(|delta| delta["text"].as_str().unwrap()).collect();
    assert_eq!((status, streamed), (200, expected));
    let last = deltas.last().unwrap();
    assert_eq!((&last["finish_reason"]["reason"], &last["usage"]["generated_tokens"]), (&json!("length"), &json!(24)));
}

#[test]
fn errors_have_a_status_a_kind_and_a_sentence() {
    let service = Service::start(story_engine());
    let long = "the ".repeat(5_000);
    for (body, status, kind, words) in [
        (
            json!({"prompt": "x", "temperature": 9}),
            400,
            "invalid_request",
            "temperature: got 9, expected a finite number in 0..=2",
        ),
        (json!({"prompt": "x", "temprature": 1}), 400, "invalid_request", "unknown field `temprature`"),
        (json!({"temperature": 1}), 400, "invalid_request", "missing field `prompt`"),
        (json!({"prompt": long}), 400, "prompt_too_long", "expected at most 511"),
    ] {
        let (got, text) = service.ask("POST", "/generate", &body.to_string());
        let error: Value = serde_json::from_str(&text).unwrap();
        let message = error["error"]["message"].as_str().unwrap();
        assert_eq!((got, &error["error"]["kind"]), (status, &json!(kind)), "{text}");
        assert!(message.contains(words), "{message}");
    }
}

/// Engine whose model waits for a permit before each step.
fn gated_engine() -> (Engine, mpsc::Sender<()>) {
    const VOCAB: u32 = 50;
    let (permit, gate) = mpsc::channel();
    let gate = Mutex::new(gate);
    let watch = Box::new(move |_: &_| {
        let _ = gate.lock().unwrap().recv();
        Ok(())
    });
    let mut config = EngineConfig::default().with_max_num_batched_tokens(64).with_max_num_seqs(8).with_block_size(16);
    config.kv_cache = CacheBudget::Blocks(32);
    let words = (0..VOCAB).map(|id| format!("w{id} "));
    let core = EngineCore::from_parts(
        config,
        Box::new(ScriptedForward::hashed(VOCAB, 32, 16).watched(watch)),
        ModelLimits::new(VOCAB, 256),
        Some(ListedVocabulary::new(words).shared()),
        None,
        Arc::new(ManualClock::new()),
    );
    (Engine::spawn(core.unwrap()).unwrap(), permit)
}

#[test]
fn a_client_that_goes_cancels_its_request() {
    let (engine, permit) = gated_engine();
    let service = Service::start(engine.clone());
    for stream in [true, false] {
        let before = engine.stats().finished_cancelled;
        let body = json!({"prompt": "w1 w2 ", "temperature": 0, "stream": stream});
        let client = service.send("POST", "/generate", &body.to_string());
        permit.send(()).unwrap();
        if stream {
            let first = BufReader::new(&client).lines().map(Result::unwrap).find(|line| line.starts_with("data: "));
            assert!(first.is_some());
        } else {
            while engine.stats().running == 0 {
                std::thread::yield_now();
            }
        }
        client.shutdown(std::net::Shutdown::Both).unwrap();
        drop(client);
        // The server notices a closed connection when it writes. Without cancellation the request runs for 250 steps.
        let mut permits = 1;
        while engine.stats().finished_cancelled == before {
            if permits < 200 && engine.stats().steps >= permits {
                permits += 1;
                let _ = permit.send(());
            }
            std::thread::yield_now();
        }
    }
    assert_eq!(engine.stats().finished_length, 0);
}
