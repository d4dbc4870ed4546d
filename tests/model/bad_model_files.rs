//! Tests that a bad model returns a typed error that names the file and the faulty item.
//!
//! Damaged files of any kind never cause a panic, a hang or an abort. A damaged model that still loads answers each
//! request, or fails it with an error.
#![allow(clippy::cast_possible_truncation, reason = "the numbers of a test are small")]
#![cfg(feature = "text")]

use crate::common::fable;
use std::error::Error;
use std::path::{Path, PathBuf};

use crate::common::fable::{Dice, assert_at_rest, builder, drain, float, plain_config, quantized};
use ascend_llm::engine::{BuildError, Engine, Request, RequestError, SubmitError};
use ascend_llm::model::ModelError;
use ascend_llm::sampler::SamplingParams;
use ascend_llm::text::TextError;
use ascend_llm::weights::WeightError;
use serde_json::{Value, json};

fn data(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(path)
}

fn chain(error: &dyn Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| (*cause).source());
    std::iter::once(error.to_string()).chain(causes.map(ToString::to_string)).collect::<Vec<_>>().join(": ")
}

/// Copy of a model that a test may damage; the files are removed when the value is dropped.
struct Copy {
    folder: PathBuf,
}

impl Copy {
    fn empty(name: &str) -> Self {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder).unwrap();
        Self { folder }
    }

    /// Copies all files of a model's folder.
    fn of(model: &Path, name: &str) -> Self {
        let copy = Self::empty(name);
        for entry in std::fs::read_dir(model).unwrap().map(Result::unwrap) {
            if entry.path().is_file() {
                std::fs::copy(entry.path(), copy.path(entry.file_name().to_str().unwrap())).unwrap();
            }
        }
        copy
    }

    fn path(&self, file: &str) -> PathBuf {
        self.folder.join(file)
    }

    fn read(&self, file: &str) -> Vec<u8> {
        std::fs::read(self.path(file)).unwrap()
    }

    fn write(&self, file: &str, bytes: impl AsRef<[u8]>) {
        std::fs::write(self.path(file), bytes).unwrap();
    }

    /// Changes a JSON file.
    fn edit(&self, file: &str, change: impl FnOnce(&mut Value)) {
        let mut value = serde_json::from_slice(&self.read(file)).unwrap();
        change(&mut value);
        self.write(file, value.to_string());
    }

    /// Replaces text in a file; both texts must have the same length, because files of weights contain offsets.
    fn replace(&self, file: &str, from: &str, to: &str) {
        assert_eq!(from.len(), to.len());
        let mut bytes = self.read(file);
        let at =
            bytes.windows(from.len()).position(|window| window == from.as_bytes()).expect("the file contains the text");
        bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
        self.write(file, bytes);
    }
}

impl Drop for Copy {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

fn refused(path: &Path) -> (BuildError, String) {
    let error = builder(path, plain_config()).build_core().expect_err("the model must be rejected");
    let text = chain(&error);
    (error, text)
}

macro_rules! assert_refused {
    ($path:expr, $pattern:pat, $($part:expr),+) => {
        let (error, text) = refused($path.as_ref());
        assert!(matches!(error, $pattern), "{error:?}");
        $(assert!(text.contains($part), "{text:?} does not contain {:?}", $part);)+
    };
}

#[test]
fn paths_that_hold_no_model() {
    let place = Copy::empty("no-model");
    let (error, text) = refused(&place.path("nowhere"));
    assert!(matches!(error, BuildError::Weights(WeightError::Io { .. })), "{error:?}");
    let source = std::fs::read(place.path("nowhere")).unwrap_err();
    assert_eq!(text, format!("cannot read {}: {source}", place.path("nowhere").display()));
    assert_refused!(
        place.folder,
        BuildError::Weights(WeightError::NotAModel { .. }),
        "no-model",
        "config.json not found"
    );
    place.write("notes.txt", "not a model");
    assert_refused!(
        place.path("notes.txt"),
        BuildError::Weights(WeightError::NotAModel { .. }),
        "notes.txt",
        "expected a .gguf file"
    );
    place.write("notes.gguf", "not a model either, but long enough for a head of its own");
    assert_refused!(place.path("notes.gguf"), BuildError::Weights(WeightError::Corrupt { .. }), "notes.gguf");
    place.write("empty.gguf", "");
    assert_refused!(place.path("empty.gguf"), BuildError::Weights(WeightError::Corrupt { .. }), "empty.gguf");
    assert_refused!(place.folder, BuildError::Weights(WeightError::NotAModel { .. }), "2 .gguf files");
    place.write("config.json", "{}");
    assert_refused!(
        place.folder,
        BuildError::Weights(WeightError::NotAModel { .. }),
        "config.json found",
        "model.safetensors or model.safetensors.index.json not found"
    );
    std::fs::create_dir(place.path("folder.gguf")).unwrap();
    assert_refused!(place.path("folder.gguf"), BuildError::Weights(WeightError::NotAModel { .. }), "folder.gguf");
    place.write("model.safetensors", b"\x02\0\0\0\0\0\0\0{}");
    assert_refused!(place.folder, BuildError::Model(ModelError::MissingField { .. }), "model_type");
}

#[test]
fn models_that_cannot_be_run() {
    let copy = Copy::of(&float(), "cannot-run");
    let spoil = |change: fn(&mut Value)| {
        copy.write("config.json", std::fs::read(float().join("config.json")).unwrap());
        copy.edit("config.json", change);
        refused(&copy.folder)
    };
    let (error, text) = spoil(|c| c["model_type"] = json!("gpt9"));
    assert!(matches!(error, BuildError::Model(ModelError::UnsupportedArchitecture { .. })), "{error:?}");
    let expected = "model architecture \"gpt9\" is not supported; expected one of llama, mistral, ";
    assert!(text.starts_with(expected), "{text}");
    let (error, text) = spoil(|c| c["hidden_act"] = json!("relu"));
    assert!(matches!(error, BuildError::Model(ModelError::UnsupportedFeature { .. })), "{error:?}");
    assert!(text.contains("hidden_act = relu is not supported; expected silu"), "{text}");
    let (error, text) = spoil(|c| c["num_attention_heads"] = json!(-4));
    assert!(matches!(error, BuildError::Model(ModelError::InvalidField { .. })), "{error:?}");
    assert!(text.contains("num_attention_heads = -4 is invalid"), "{text}");
    let (error, text) = spoil(|c| c["intermediate_size"] = json!(513));
    assert!(matches!(error, BuildError::Model(ModelError::TensorShape { .. })), "{error:?}");
    assert!(text.contains("model.layers.0.mlp.gate_proj.weight has shape [512, 256], expected [513, 256]"), "{text}");
    let (error, text) = spoil(|c| c["num_hidden_layers"] = json!(4));
    assert!(matches!(error, BuildError::Model(ModelError::MissingTensor { .. })), "{error:?}");
    assert!(text.contains("model.layers.3.input_layernorm.weight is missing"), "{text}");
    let (error, text) = spoil(|c| c["tie_word_embeddings"] = json!(false));
    assert!(matches!(error, BuildError::Model(ModelError::MissingTensor { .. })), "{error:?}");
    assert!(text.contains("lm_head.weight is missing"), "{text}");
    copy.write("config.json", std::fs::read(float().join("config.json")).unwrap());

    // Errors in the weights themselves.
    copy.replace("model.safetensors", "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weighs");
    assert_refused!(
        copy.folder,
        BuildError::Model(ModelError::MissingTensor { .. }),
        "model.layers.1.mlp.up_proj.weight is missing"
    );
    copy.write("model.safetensors", std::fs::read(float().join("model.safetensors")).unwrap());
    copy.replace("model.safetensors", "\"shape\":[512,256]", "\"shape\":[256,512]");
    assert_refused!(
        copy.folder,
        BuildError::Model(ModelError::TensorShape { .. }),
        "has shape [256, 512], expected [512, 256]"
    );
    copy.write("model.safetensors", std::fs::read(float().join("model.safetensors")).unwrap());
    copy.replace("model.safetensors", "\"BF16\"", "\"F8XX\"");
    let (_, text) = refused(&copy.folder);
    assert!(text.contains("F8XX") || text.contains("model.safetensors"), "{text}");
    copy.write("model.safetensors", std::fs::read(float().join("model.safetensors")).unwrap());
    copy.replace("model.safetensors", "\"BF16\"", "\"I16\" ");
    let (error, text) = refused(&copy.folder);
    assert!(matches!(error, BuildError::Model(ModelError::UnusableTensor { .. })), "{error:?}");
    assert!(text.contains("model.embed_tokens.weight cannot be used"), "{text}");
    assert!(text.contains("model.safetensors has type I16, expected one of f32, f16, bf16"), "{text}");
}

#[test]
fn gguf_files_that_cannot_be_run() {
    let copy = Copy::empty("gguf-cannot-run");
    let original = std::fs::read(quantized()).unwrap();
    let spoil = |from: &str, to: &str| {
        copy.write("m.gguf", &original);
        copy.replace("m.gguf", from, to);
        refused(&copy.path("m.gguf"))
    };
    let (error, text) = spoil("llama", "lamas");
    assert!(matches!(error, BuildError::Model(ModelError::UnsupportedArchitecture { .. })), "{error:?}");
    assert!(text.contains("model architecture \"lamas\" is not supported"), "{text}");
    let (error, text) = spoil("llama.block_count", "llama.block_cxunt");
    assert!(matches!(error, BuildError::Model(ModelError::MissingField { .. })), "{error:?}");
    assert!(text.contains("llama.block_count is missing"), "{text}");
    let (error, text) = spoil("blk.1.ffn_up.weight", "blk.1.ffn_ip.weight");
    assert!(matches!(error, BuildError::Model(ModelError::MissingTensor { .. })), "{error:?}");
    assert!(text.contains("model.layers.1.mlp.up_proj.weight is missing"), "{text}");
    // The number of dimensions of the first tensor, its dimensions, then its type: 8 is Q8_0, 23 is IQ4_XS.
    copy.write("m.gguf", &original);
    let name = b"token_embd.weight";
    let at = original.windows(name.len()).position(|window| window == name).unwrap() + name.len() + 4 + 2 * 8;
    let mut bytes = original.clone();
    assert_eq!(bytes[at..at + 4], [8, 0, 0, 0]);
    bytes[at] = 23;
    copy.write("m.gguf", bytes);
    let (error, text) = refused(&copy.path("m.gguf"));
    assert!(matches!(error, BuildError::Model(ModelError::UnusableTensor { .. })), "{error:?}");
    assert!(text.contains("token_embd.weight") && text.contains("has type iq4_xs (ggml type 23)"), "{text}");
    let (error, text) = spoil("tokenizer.ggml.tokens", "tokenizer.ggml.tokenz");
    assert!(matches!(error, BuildError::Text(TextError::MissingKey { key: "tokenizer.ggml.tokens", .. })), "{error:?}");
    assert!(text.contains("tokenizer.ggml.tokens: absent from the gguf metadata"), "{text}");
    let (error, text) = spoil("GGUF", "GGUX");
    assert!(matches!(error, BuildError::Weights(WeightError::Corrupt { .. })), "{error:?}");
    assert!(text.contains("m.gguf is corrupt"), "{text}");
}

#[test]
fn shards_that_are_not_there() {
    let copy = Copy::of(&data("conformance/llama-sharded"), "shards");
    let shard = "model-00002-of-00003.safetensors";
    let bytes = copy.read(shard);
    std::fs::remove_file(copy.path(shard)).unwrap();
    let (error, text) = refused(&copy.folder);
    let BuildError::Weights(WeightError::MissingShard { shard: named, tensor, .. }) = &error else {
        panic!("{error:?}");
    };
    assert_eq!((named.as_str(), tensor.as_str()), (shard, "model.layers.0.input_layernorm.weight"));
    assert!(text.contains("model.safetensors.index.json") && text.contains(shard), "{text}");

    copy.write(shard, &bytes[..bytes.len() / 2]);
    assert_refused!(copy.folder, BuildError::Weights(WeightError::Corrupt { .. }), shard);
    copy.write(shard, copy.read("model-00001-of-00003.safetensors"));
    let (error, text) = refused(&copy.folder);
    assert!(matches!(error, BuildError::Weights(_)) && text.contains(shard), "{text}");
    copy.write(shard, &bytes);
    builder(&copy.folder, plain_config()).build_core().unwrap();

    let index = copy.read("model.safetensors.index.json");
    copy.edit("model.safetensors.index.json", |i| i["weight_map"]["lm_head.weight"] = json!("../x.safetensors"));
    assert_refused!(
        copy.folder,
        BuildError::Weights(WeightError::Corrupt { .. }),
        "index.json",
        "lm_head.weight",
        "../x"
    );
    copy.edit("model.safetensors.index.json", |i| {
        i["weight_map"].as_object_mut().unwrap().remove("lm_head.weight");
    });
    assert_refused!(copy.folder, BuildError::Model(ModelError::MissingTensor { .. }), "lm_head.weight");
    copy.write("model.safetensors.index.json", index);
}

#[test]
fn text_files_that_are_no_tokenizer() {
    let copy = Copy::of(&float(), "text-files");
    let spoil = |file: &str, bytes: &[u8]| {
        let original = copy.read(file);
        copy.write(file, bytes);
        let answer = refused(&copy.folder);
        copy.write(file, original);
        answer
    };
    for (file, bytes) in [
        ("tokenizer.json", &b"{}"[..]),
        ("tokenizer.json", b""),
        ("tokenizer.json", b"\xff\xfe"),
        // Half of a surrogate pair: valid JSON for a parser that skips the string, invalid for one that reads it.
        ("tokenizer.json", br#"{"model": {"type": "BPE", "vocab": {}, "merges": []}, "decoder": {"type": "\ud800"}}"#),
        ("tokenizer_config.json", b"[]"),
        ("tokenizer_config.json", b"{\"bos_token\": 7}"),
    ] {
        let (error, text) = spoil(file, bytes);
        assert!(matches!(error, BuildError::Text(_)), "{error:?}");
        assert!(text.starts_with("tokenizer or chat template: "), "{text}");
        assert!(text.contains(file), "{text}");
    }
    let (error, text) = spoil("tokenizer_config.json", br#"{"chat_template": "{% for m in messages %}"}"#);
    assert!(matches!(error, BuildError::Text(TextError::Template { line: 1, .. })), "{error:?}");
    assert!(text.contains("chat template, line 1"), "{text}");
    let (error, text) = spoil("generation_config.json", br#"{"eos_token_id": "x"}"#);
    assert!(matches!(error, BuildError::Model(ModelError::InvalidField { .. })), "{error:?}");
    assert!(text.contains("eos_token_id"), "{text}");
    let (error, text) = spoil("generation_config.json", b"{");
    assert!(matches!(error, BuildError::Model(ModelError::Json { .. })), "{error:?}");
    assert!(text.contains("generation_config.json is not valid JSON"), "{text}");
    let (error, text) = spoil("config.json", b"[1]");
    assert!(matches!(error, BuildError::Model(ModelError::Json { .. })), "{error:?}");
    assert!(text.contains("config.json is not valid JSON: expected an object"), "{text}");
}

/// If the model loads, it must answer, or fail a request with an error and then serve the next one.
fn try_to_serve(path: &Path) -> Result<(), BuildError> {
    let mut core = builder(path, plain_config()).build_core()?;
    for prompt in ["Once upon", "a"] {
        let mut params = SamplingParams::default();
        (params.seed, params.max_tokens, params.logprobs) = (Some(1), Some(3), Some(1));
        let handle = match core.submit(Request::text(prompt).with_sampling(params.clone())) {
            Ok(handle) => handle,
            // The model has no tokenizer, or its tokenizer has other ids than the model.
            Err(SubmitError::Param(_) | SubmitError::Encode { .. }) => {
                core.submit(Request::tokens(vec![0]).with_sampling(params)).unwrap()
            }
            Err(error) => panic!("{error:?}"),
        };
        drain(&mut core);
        match handle.collect_output() {
            Ok(_) | Err(RequestError::NonFinite { .. }) => {}
            Err(error) => panic!("{error:?}"),
        }
    }
    assert_at_rest(&core);
    Ok(())
}

/// Truncates a file to many lengths: each must be rejected with an error that contains `named`.
///
/// Bytes from `padding` on may be missing.
fn truncate(copy: &Copy, model: &Path, file: &str, named: &str, seed: u64) {
    let whole = copy.read(file);
    let mut dice = Dice::new(seed);
    let mut lens: Vec<usize> = (0..24).chain([whole.len() / 2, whole.len() - 2, whole.len() - 1]).collect();
    lens.extend((0..30).map(|_| dice.from(0, whole.len() as u32 - 1) as usize));
    // Most lengths are within the header, which contains the structure.
    lens.extend((0..30).map(|_| dice.from(0, whole.len().min(4_000) as u32 - 1) as usize));
    for len in lens {
        // Without its final line break, a text file is still complete.
        if whole[len..].iter().all(u8::is_ascii_whitespace) {
            continue;
        }
        copy.write(file, &whole[..len]);
        let error = try_to_serve(model).expect_err(&format!("{file} truncated to {len} bytes"));
        let text = chain(&error);
        assert!(text.contains(named), "{file} truncated to {len} bytes: {text}");
    }
    copy.write(file, whole);
    try_to_serve(model).unwrap();
}

/// Changes random bytes of a file many times; returns the percentage of damaged files that still loaded.
///
/// For a longer search than a test run, `ASCEND_LLM_DAMAGE=50` runs 50 times as many cases.
fn flip(copy: &Copy, model: &Path, file: &str, cases: u64, seed: u64) -> u64 {
    let times = std::env::var("ASCEND_LLM_DAMAGE").map_or(1, |times| times.parse().expect("a number"));
    let whole = copy.read(file);
    let mut loaded = 0;
    for case in 0..cases * times {
        let seed = seed * 1_000_000 + case;
        let mut dice = Dice::new(seed);
        let mut bytes = whole.clone();
        let reach = if dice.chance(75) { bytes.len().min(6_000) } else { bytes.len() };
        for _ in 0..dice.from(1, 4) {
            let at = dice.from(0, reach as u32 - 1) as usize;
            bytes[at] = match dice.from(0, 3) {
                0 => bytes[at] ^ (1 << dice.from(0, 7)),
                1 => dice.bits() as u8,
                // The result is usually still JSON.
                2 => dice.one_of(b"0123456789"),
                _ => dice.one_of(b"\"{}[],: \xffa"),
            };
        }
        copy.write(file, bytes);
        // The output makes it possible to trace a panic to its case.
        println!("{file}, seed {seed}");
        loaded += u64::from(try_to_serve(model).is_ok());
    }
    copy.write(file, whole);
    loaded * 100 / (cases * times)
}

#[test]
fn damaged_weights() {
    let copy = Copy::of(&data("conformance/llama-mha-untied-bias"), "damaged-safetensors");
    truncate(&copy, &copy.folder, "model.safetensors", "model.safetensors is corrupt", 1);
    let loaded = flip(&copy, &copy.folder, "model.safetensors", 120, 2);
    assert!((5..95).contains(&loaded), "{loaded} % loaded: the damage is too small or too large for a useful test");
}

#[test]
fn damaged_gguf() {
    let copy = Copy::empty("damaged-gguf");
    let path = copy.path("m.gguf");
    copy.write("m.gguf", std::fs::read(quantized()).unwrap());
    truncate(&copy, &path, "m.gguf", "m.gguf is corrupt", 3);
    let loaded = flip(&copy, &path, "m.gguf", 80, 4);
    assert!((5..95).contains(&loaded), "{loaded} % loaded: the damage is too small or too large for a useful test");
}

#[test]
fn damaged_descriptions() {
    let copy = Copy::of(&data("conformance/qwen3"), "damaged-config");
    truncate(&copy, &copy.folder, "config.json", "config.json is not valid JSON", 5);
    flip(&copy, &copy.folder, "config.json", 150, 6);
    truncate(&copy, &copy.folder, "generation_config.json", "generation_config.json is not valid JSON", 7);
    let copy = Copy::of(&data("conformance/llama-sharded"), "damaged-index");
    truncate(&copy, &copy.folder, "model.safetensors.index.json", "model.safetensors.index.json is corrupt", 8);
    flip(&copy, &copy.folder, "model.safetensors.index.json", 80, 9);
}

#[test]
fn damaged_text_files() {
    let copy = Copy::of(&float(), "damaged-text");
    truncate(&copy, &copy.folder, "tokenizer.json", "tokenizer.json", 10);
    flip(&copy, &copy.folder, "tokenizer.json", 60, 11);
    truncate(&copy, &copy.folder, "tokenizer_config.json", "tokenizer_config.json", 12);
    flip(&copy, &copy.folder, "tokenizer_config.json", 60, 13);
}

/// Gives each field of each kind of config values that it should never have.
#[test]
fn strange_values_in_descriptions() {
    let values = [
        json!(null),
        json!(0),
        json!(1),
        json!(-1),
        json!(3),
        json!(1u64 << 28),
        json!(u64::MAX),
        json!(1e300),
        json!(0.5),
        json!("x"),
        json!([]),
        json!([1, -2]),
        json!({}),
        json!(true),
        json!(false),
    ];
    for (model, with_top) in [("llama-rope-llama3", false), ("llama-rope-yarn", false), ("qwen3", true)] {
        let copy = Copy::of(&data("conformance").join(model), &format!("strange-{model}"));
        let original: Value = serde_json::from_slice(&copy.read("config.json")).unwrap();
        let nested = original["rope_parameters"].as_object().unwrap().keys();
        let top = original.as_object().unwrap().keys().filter(|_| with_top).map(|key| format!("/{key}"));
        for place in top.chain(nested.map(|key| format!("/rope_parameters/{key}"))) {
            for value in &values {
                copy.edit("config.json", |config| {
                    *config = original.clone();
                    *config.pointer_mut(&place).unwrap() = value.clone();
                });
                println!("{model}: {place} = {value}");
                let _ = try_to_serve(&copy.folder);
            }
        }
    }
}

/// The embedding of one token is infinite: only requests with that token fail, all others succeed.
#[test]
fn a_model_with_a_bad_row_fails_only_the_requests_that_meet_it() {
    let original = data("conformance/llama-mha-untied-bias");
    let copy = Copy::of(&original, "bad-row");
    let (token, hidden) = (77, 64);
    let mut bytes = copy.read("model.safetensors");
    let head_len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let head: Value = serde_json::from_slice(&bytes[8..8 + head_len]).unwrap();
    let start = head["model.embed_tokens.weight"]["data_offsets"][0].as_u64().unwrap() as usize;
    let at = 8 + head_len + start + token * hidden * 4;
    bytes[at..at + 4].copy_from_slice(&f32::INFINITY.to_le_bytes());
    copy.write("model.safetensors", bytes);

    let engine = builder(&copy.folder, plain_config()).build().unwrap();
    let sound = builder(&original, plain_config()).build().unwrap();
    let request = |tokens: Vec<u32>| {
        let mut params = SamplingParams::default();
        (params.seed, params.max_tokens, params.logprobs) = (Some(3), Some(20), Some(2));
        params.logit_bias = vec![(token as u32, -100.0)];
        Request::tokens(tokens).with_sampling(params)
    };
    let answer = |engine: &Engine, tokens: Vec<u32>| engine.submit(request(tokens)).unwrap();
    let good: Vec<_> = (0..6).map(|id| answer(&engine, vec![id + 3; 5])).collect();
    let bad: Vec<_> = (0..3).map(|id| answer(&engine, vec![id + 3, token as u32, 9])).collect();
    for handle in bad {
        let error = handle.collect_output().unwrap_err();
        assert!(matches!(error, RequestError::NonFinite { choice: 0, position: 1 }), "{error:?}");
        assert!(chain(&error).contains("values at position 1 are not finite"), "{error}");
    }
    for (id, handle) in (0..).zip(good) {
        let expected = answer(&sound, vec![id + 3; 5]).collect_output().unwrap();
        assert_eq!(fable::Seen::of(&handle.collect_output().unwrap()), fable::Seen::of(&expected));
    }
    assert_eq!(engine.stats().finished_error, 3);
}
