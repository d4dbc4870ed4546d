//! Tests that text becomes the reference tokenizer's ids, and ids become exactly their bytes, for all kinds of
//! tokenizer files.
#![cfg(feature = "text")]

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use crate::common::smollm2::smollm2;
use ascend_llm::text::{Detokenizer, TextError, Tokenizer, TokenizerMetadata, Vocabulary as _};
use ascend_llm::weights::gguf::Gguf;
use proptest::prelude::*;
use serde_json::{Value, json};

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

fn read(name: &str) -> Vec<u8> {
    std::fs::read(data(name)).unwrap()
}

fn fable() -> Tokenizer {
    Tokenizer::from_json(&read("fable/tokenizer.json"), Some(&read("fable/tokenizer_config.json"))).unwrap()
}

static FABLE: LazyLock<Tokenizer> = LazyLock::new(fable);

/// Checks a tokenizer against a file of golden rows; returns the number of rows.
fn check_rows(name: &str, tokenizer: &Tokenizer, rows: &str) -> usize {
    let mut seen = 0;
    for line in rows.lines().skip(1) {
        let row: Value = serde_json::from_str(line).unwrap();
        let text = row["text"].as_str().unwrap();
        let ids: Vec<u32> = serde_json::from_value(row["ids"].clone()).unwrap();
        assert_eq!(tokenizer.encode(text, false).unwrap(), ids, "{name}: ids of {text:?}");
        if let Some(with) = row.get("ids_with_special") {
            let with: Vec<u32> = serde_json::from_value(with.clone()).unwrap();
            assert_eq!(tokenizer.encode(text, true).unwrap(), with, "{name}: ids of {text:?} as a prompt");
        }
        let decoded = row["decoded"].as_str().unwrap_or(text);
        assert_eq!(tokenizer.decode(&ids, false), decoded, "{name}: text of the ids of {text:?}");
        let without_special = row["decoded_skip_special"].as_str().unwrap_or(decoded);
        assert_eq!(tokenizer.decode(&ids, true), without_special, "{name}: plain text of the ids of {text:?}");
        if let Some(stream) = row.get("stream") {
            check_stream(name, tokenizer, &ids, stream.as_array().unwrap());
        }
        seen += 1;
    }
    seen
}

/// Checks that deltas are never later than the reference's (which holds a whole token back) and add up to the same
/// text.
fn check_stream(name: &str, tokenizer: &Tokenizer, ids: &[u32], pieces: &[Value]) {
    let (mut sent, mut reference) = (String::new(), String::new());
    let mut detokenizer = Detokenizer::new(false);
    assert_eq!(ids.len(), pieces.len());
    for (&id, piece) in ids.iter().zip(pieces) {
        detokenizer.push(tokenizer, id, &mut sent);
        reference.push_str(piece.as_str().unwrap_or_default());
        assert!(sent.starts_with(&reference), "{name}: sent {sent:?}, the reference sends {reference:?}");
    }
    detokenizer.flush(&mut sent);
    assert!(sent.starts_with(&reference));
}

#[test]
fn the_story_model_tokenizes_as_the_reference_does() {
    let rows = String::from_utf8(read("tokenizers/fable.jsonl")).unwrap();
    assert_eq!(check_rows("fable", &FABLE, &rows), 225);
}

#[test]
fn the_story_models_gguf_file_gives_the_same_tokenizer() {
    let file = Gguf::open(data("fable/gguf/fable-q8_0.gguf")).unwrap();
    let tokenizer = Tokenizer::from_gguf(file.metadata()).unwrap();
    let rows = String::from_utf8(read("tokenizers/fable.jsonl")).unwrap();
    assert_eq!(check_rows("fable gguf", &tokenizer, &rows), 225);
    assert_eq!(tokenizer.len(), FABLE.len());
    assert_eq!(tokenizer.eos_id(), FABLE.eos_id());
}

/// A vocabulary of full size.
#[test]
fn smollm2_from_gguf_tokenizes_as_the_reference_does() {
    let Some(path) = smollm2() else { return };
    let file = Gguf::open(path).unwrap();
    let tokenizer = Tokenizer::from_gguf(file.metadata()).unwrap();
    let rows = String::from_utf8(read("tokenizers/smollm2.jsonl")).unwrap();
    assert_eq!(check_rows("smollm2", &tokenizer, &rows), 225);
    assert_eq!(tokenizer.eos_token(), Some("<|im_end|>"));
    assert!(tokenizer.eos_ids().contains(&2));
    assert!(tokenizer.chat_template().is_some());
}

/// Checks further vocabularies against the reference.
///
/// Set `ASCEND_LLM_TOKENIZERS` to a folder with `NAME/tokenizer.json`, `NAME/tokenizer_config.json` and `NAME.jsonl`
/// (golden rows). Each vocabulary is read from its own file, from GGUF metadata converted from that file, and from
/// `NAME.gguf` if it exists.
#[test]
fn other_vocabularies_tokenize_as_the_reference_does() {
    let Some(folder) = std::env::var_os("ASCEND_LLM_TOKENIZERS").map(PathBuf::from) else { return };
    let pre = HashMap::from([
        ("llama3", "llama-bpe"),
        ("qwen3", "qwen2"),
        ("deepseek_v3", "deepseek-v3"),
        ("gptoss", "gpt-4o"),
        ("smollm2", "smollm"),
    ]);
    let mut seen = 0;
    for entry in std::fs::read_dir(&folder).unwrap() {
        let path = entry.unwrap().path();
        if !path.is_dir() {
            continue;
        }
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        let json = std::fs::read(path.join("tokenizer.json")).unwrap();
        let config = std::fs::read(path.join("tokenizer_config.json")).ok();
        let rows = std::fs::read_to_string(folder.join(format!("{name}.jsonl"))).unwrap();
        let tokenizer = Tokenizer::from_json(&json, config.as_deref()).unwrap();
        assert_eq!(check_rows(&name, &tokenizer, &rows), 225);
        if let Some(pre) = pre.get(name.as_str()) {
            let meta = Meta::byte_level_of(&json, pre);
            check_rows(&format!("{name} gguf"), &Tokenizer::from_gguf(&meta).unwrap(), &rows);
        }
        let gguf = folder.join(format!("{name}.gguf"));
        if gguf.exists() {
            let file = Gguf::open(gguf).unwrap();
            check_rows(&format!("{name}.gguf"), &Tokenizer::from_gguf(file.metadata()).unwrap(), &rows);
        }
        seen += 1;
    }
    assert!(seen > 0, "the folder {} contains no tokenizer", folder.display());
}

/// GGUF metadata as a map.
#[derive(Clone, Default)]
struct Meta(HashMap<&'static str, Value>);

impl TokenizerMetadata for Meta {
    fn str(&self, key: &str) -> Option<&str> {
        self.0.get(key)?.as_str()
    }
    fn u32(&self, key: &str) -> Option<u32> {
        self.0.get(key)?.as_u64()?.try_into().ok()
    }
    fn bool(&self, key: &str) -> Option<bool> {
        self.0.get(key)?.as_bool()
    }
    fn strings(&self, key: &str) -> Option<Vec<String>> {
        serde_json::from_value(self.0.get(key)?.clone()).ok()
    }
    fn i32s(&self, key: &str) -> Option<Vec<i32>> {
        serde_json::from_value(self.0.get(key)?.clone()).ok()
    }
    fn f32s(&self, key: &str) -> Option<Vec<f32>> {
        serde_json::from_value(self.0.get(key)?.clone()).ok()
    }
}

impl Meta {
    fn with(mut self, key: &'static str, value: impl Into<Value>) -> Self {
        self.0.insert(key, value.into());
        self
    }

    fn without(mut self, key: &str) -> Self {
        self.0.remove(key);
        self
    }

    /// Returns the metadata that a converter would write for this byte-level `tokenizer.json`.
    fn byte_level_of(json: &[u8], pre: &str) -> Self {
        let file: Value = serde_json::from_slice(json).unwrap();
        let mut tokens: Vec<Option<String>> = Vec::new();
        let mut types = Vec::new();
        let mut put = |id: &Value, token: &str, kind: i32| {
            let id = usize::try_from(id.as_u64().unwrap()).unwrap();
            tokens.resize(tokens.len().max(id + 1), None);
            types.resize(tokens.len(), 5);
            tokens[id] = Some(token.to_owned());
            types[id] = kind;
        };
        for (token, id) in file["model"]["vocab"].as_object().unwrap() {
            put(id, token, 1);
        }
        for added in file["added_tokens"].as_array().unwrap() {
            put(&added["id"], added["content"].as_str().unwrap(), if added["special"] == true { 3 } else { 4 });
        }
        let tokens: Vec<String> =
            tokens.into_iter().enumerate().map(|(id, token)| token.unwrap_or(format!("[PAD{id}]"))).collect();
        let merges: Vec<String> = file["model"]["merges"]
            .as_array()
            .unwrap()
            .iter()
            .map(|merge| match merge {
                Value::String(line) => line.clone(),
                pair => format!("{} {}", pair[0].as_str().unwrap(), pair[1].as_str().unwrap()),
            })
            .collect();
        Self::default()
            .with("tokenizer.ggml.model", "gpt2")
            .with("tokenizer.ggml.pre", pre)
            .with("tokenizer.ggml.tokens", tokens)
            .with("tokenizer.ggml.token_type", types)
            .with("tokenizer.ggml.merges", merges)
    }

    fn fable() -> Self {
        Self::byte_level_of(&read("fable/tokenizer.json"), "gpt-2").with("tokenizer.ggml.eos_token_id", 2)
    }

    /// A small `SentencePiece` vocabulary, in which `ab` and `▁ab` can be merged in more than one way.
    fn sentence_piece() -> Self {
        let bytes = (0..=255).map(|byte| (format!("<0x{byte:02X}>"), 6, 0.0));
        let pieces = [("▁", -1.0), ("a", -2.0), ("b", -3.0), ("ab", -0.5), ("▁a", -0.2), ("▁ab", -0.3), ("\n", -9.0)];
        let all: Vec<(String, i32, f64)> = [("<unk>", 2, 0.0), ("<s>", 3, 0.0), ("</s>", 3, 0.0)]
            .map(|(token, kind, score)| (token.to_owned(), kind, score))
            .into_iter()
            .chain(bytes)
            .chain(pieces.map(|(token, score)| (token.to_owned(), 1, score)))
            .chain([("[TOOL]".to_owned(), 4, 0.0)])
            .collect();
        Self::default()
            .with("tokenizer.ggml.model", "llama")
            .with("tokenizer.ggml.tokens", all.iter().map(|(token, ..)| token.clone()).collect::<Vec<_>>())
            .with("tokenizer.ggml.token_type", all.iter().map(|(_, kind, _)| *kind).collect::<Vec<_>>())
            .with("tokenizer.ggml.scores", all.iter().map(|(.., score)| *score).collect::<Vec<_>>())
            .with("tokenizer.ggml.bos_token_id", 1)
            .with("tokenizer.ggml.eos_token_id", 2)
            .with("tokenizer.ggml.unknown_token_id", 0)
    }

    fn build(&self) -> Result<Tokenizer, TextError> {
        Tokenizer::from_gguf(self)
    }
}

fn bytes_of(tokenizer: &Tokenizer, id: u32, first: bool) -> Vec<u8> {
    let mut bytes = Vec::new();
    tokenizer.token_bytes(id, first, &mut bytes);
    bytes
}

#[test]
fn sentence_piece_joins_by_score_and_falls_back_to_bytes() {
    let tokenizer = Meta::sentence_piece().build().unwrap();
    let id = |token: &str| tokenizer.token_id(token).unwrap();
    // "▁a" has a higher score than "ab", and "▁ab" is then merged from it.
    assert_eq!(tokenizer.encode("ab", false).unwrap(), [id("▁ab")]);
    assert_eq!(tokenizer.encode("ab", true).unwrap(), [1, id("▁ab")]);
    assert_eq!(tokenizer.encode("b ab", false).unwrap(), [id("▁"), id("b"), id("▁ab")]);
    assert_eq!(tokenizer.encode("é", false).unwrap(), [id("▁"), id("<0xC3>"), id("<0xA9>")]);
    assert_eq!(tokenizer.encode("[TOOL]", false).unwrap(), [id("[TOOL]")]);
    assert_eq!(tokenizer.encode("", true).unwrap(), [1]);
    assert_eq!(bytes_of(&tokenizer, id("<0xC3>"), false), [0xC3]);
    assert_eq!(bytes_of(&tokenizer, id("<0x0A>"), false), b"\n");
    assert_eq!(bytes_of(&tokenizer, id("▁ab"), false), b" ab");
    assert_eq!(bytes_of(&tokenizer, id("▁ab"), true), b"ab");
    assert_eq!(bytes_of(&tokenizer, 10_000, true), b"");
    assert!(tokenizer.is_special(0) && tokenizer.is_special(1) && tokenizer.is_special(2));
    assert!(!tokenizer.is_special(id("[TOOL]")) && !tokenizer.is_special(10_000));
    assert_eq!(tokenizer.decode(&[1, id("▁ab"), id("<0xC3>"), id("<0xA9>"), 2], true), "abé");
    assert_eq!(tokenizer.decode(&[1, id("▁ab")], false), "<s> ab");
}

#[test]
fn sentence_piece_without_a_space_prefix_neither_adds_nor_strips_one() {
    let tokenizer = Meta::sentence_piece().with("tokenizer.ggml.add_space_prefix", false).build().unwrap();
    let id = |token: &str| tokenizer.token_id(token).unwrap();
    assert_eq!(tokenizer.encode("ab ab", false).unwrap(), [id("ab"), id("▁ab")]);
    assert_eq!(bytes_of(&tokenizer, id("▁ab"), true), b" ab");
}

#[test]
fn a_prompt_gets_the_special_tokens_of_the_file() {
    let around = |meta: Meta| meta.build().unwrap().encode("ab", true).unwrap();
    let plain = Meta::sentence_piece();
    let ab = plain.build().unwrap().encode("ab", false).unwrap()[0];
    assert_eq!(around(plain.clone().with("tokenizer.ggml.add_bos_token", false)), [ab]);
    assert_eq!(around(plain.clone().with("tokenizer.ggml.add_eos_token", true)), [1, ab, 2]);
    let nameless = plain.without("tokenizer.ggml.bos_token_id").with("tokenizer.ggml.add_bos_token", true);
    let error = nameless.build().unwrap_err().to_string();
    assert!(error.contains("add_bos_token"), "{error}");
}

#[test]
fn end_of_sequence_ids_are_those_named_and_those_known_by_text() {
    let named = Meta::fable().with("tokenizer.ggml.eot_token_id", 40).build().unwrap();
    assert_eq!(named.eos_ids(), [0, 2, 40]);
    assert_eq!(FABLE.eos_ids(), [2]);
}

#[test]
fn chat_text_gets_exactly_one_bos() {
    let adds = Meta::sentence_piece().build().unwrap();
    for rendered in ["<s>ab</s>", "ab</s>"] {
        let ids = adds.encode_chat(rendered).unwrap();
        assert_eq!(ids.iter().filter(|&&id| id == 1).count(), 1, "{rendered}");
        assert_eq!(ids[0], 1);
        assert_eq!(ids.last(), Some(&2));
    }
    let leaves = Meta::sentence_piece().with("tokenizer.ggml.add_bos_token", false).build().unwrap();
    assert_eq!(leaves.encode_chat("<s>ab").unwrap()[0], 1);
    assert_ne!(leaves.encode_chat("ab").unwrap()[0], 1);
    let text = "<|im_start|>user\nHi<|im_end|>\n";
    assert_eq!(FABLE.encode_chat(text).unwrap(), FABLE.encode(text, false).unwrap());
}

#[test]
fn the_config_decides_what_is_added() {
    let config = |config: Value| {
        let config = serde_json::to_vec(&config).unwrap();
        Tokenizer::from_json(&read("fable/tokenizer.json"), Some(&config))
    };
    let both = config(json!({
        "bos_token": {"content": "<|endoftext|>", "lstrip": false},
        "eos_token": "<|im_end|>",
        "add_bos_token": true,
        "add_eos_token": true,
        "chat_template": [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}],
    }))
    .unwrap();
    let bare = both.encode("a", false).unwrap();
    assert_eq!(both.encode("a", true).unwrap(), [&[0], &bare[..], &[2]].concat());
    assert!(both.adds_bos());
    assert_eq!((both.bos_token(), both.eos_token()), (Some("<|endoftext|>"), Some("<|im_end|>")));
    assert_eq!((both.chat_template(), both.named_chat_template("tool_use")), (Some("D"), Some("T")));
    let unknown = config(json!({"bos_token": "<nope>", "add_bos_token": true})).unwrap_err().to_string();
    assert!(unknown.contains("bos_token") && unknown.contains("<nope>"), "{unknown}");
    let moved = json!({"added_tokens_decoder": {"9000": {"content": "<new>", "special": true, "single_word": false,
        "lstrip": false, "rstrip": false, "normalized": false}}});
    assert!(config(moved).unwrap_err().to_string().contains("added_tokens_decoder"));
    let added = json!({"added_tokens_decoder": {"768": {"content": "<new>", "special": true, "single_word": false,
        "lstrip": false, "rstrip": false, "normalized": false}}});
    let added = config(added).unwrap();
    assert_eq!(added.encode("<new>", false).unwrap(), [768]);
    assert!(added.is_special(768));
}

#[test]
fn padding_and_truncation_of_the_file_are_dropped() {
    let mut file: Value = serde_json::from_slice(&read("fable/tokenizer.json")).unwrap();
    file["truncation"] = json!({"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0});
    file["padding"] = json!({"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": null,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>"});
    let tokenizer = Tokenizer::from_json(&serde_json::to_vec(&file).unwrap(), None).unwrap();
    let text = "The duck said nothing at all, and then it said quack.";
    assert_eq!(tokenizer.encode(text, true).unwrap(), FABLE.encode(text, false).unwrap());
}

#[test]
fn what_is_not_implemented_is_refused_by_name() {
    let gguf = |meta: Meta, words: &[&str]| {
        let error = meta.build().unwrap_err().to_string();
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
    };
    gguf(Meta::default(), &["tokenizer.ggml.model", "absent"]);
    gguf(Meta::fable().with("tokenizer.ggml.model", "rwkv"), &["tokenizer.ggml.model", "rwkv"]);
    gguf(Meta::fable().with("tokenizer.ggml.pre", "klingon"), &["tokenizer.ggml.pre", "klingon"]);
    gguf(Meta::fable().without("tokenizer.ggml.pre"), &["tokenizer.ggml.pre", "absent"]);
    gguf(Meta::fable().without("tokenizer.ggml.merges"), &["tokenizer.ggml.merges", "absent"]);
    gguf(Meta::fable().with("tokenizer.ggml.merges", vec!["a"]), &["tokenizer.ggml.merges", "\"a\""]);
    gguf(Meta::fable().with("tokenizer.ggml.merges", vec!["the dog"]), &["tokenizer.ggml.merges", "the dog"]);
    gguf(Meta::fable().with("tokenizer.ggml.token_type", vec![1]), &["token_type", "1 entries", "768"]);
    gguf(Meta::fable().with("tokenizer.ggml.eos_token_id", 768), &["eos_token_id", "768"]);
    gguf(Meta::sentence_piece().without("tokenizer.ggml.scores"), &["tokenizer.ggml.scores", "absent"]);
    let twice = Meta::default()
        .with("tokenizer.ggml.model", "gpt2")
        .with("tokenizer.ggml.pre", "gpt-2")
        .with("tokenizer.ggml.tokens", vec!["a", "a"])
        .with("tokenizer.ggml.merges", Vec::<String>::new());
    gguf(twice, &["tokenizer.ggml.tokens", "\"a\""]);

    let json = |change: &dyn Fn(&mut Value), words: &[&str]| {
        let mut file: Value = serde_json::from_slice(&read("fable/tokenizer.json")).unwrap();
        change(&mut file);
        let error = Tokenizer::from_json(&serde_json::to_vec(&file).unwrap(), None).unwrap_err().to_string();
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
    };
    json(&|file| file["decoder"] = Value::Null, &["decoder"]);
    json(&|file| file["decoder"] = json!({"type": "WordPiece", "prefix": "##", "cleanup": true}), &["WordPiece"]);
    json(&|file| file["post_processor"] = json!({"type": "BertProcessing"}), &["post_processor", "BertProcessing"]);
    json(&|file| file["normalizer"] = json!({"type": "Precompiled"}), &["normalizer", "Precompiled"]);
    json(&|file| file["model"]["type"] = json!("WordPiece"), &["model.type", "WordPiece"]);
    json(&|file| file["model"]["dropout"] = json!(0.1), &["dropout"]);
    json(&|file| file["model"]["merges"] = json!([["the ".repeat(50), "end"]]), &["model.merges"]);
    json(&|file| file["model"]["vocab"]["far"] = json!(4_000_000_000_u32), &["model.vocab", "4000000000"]);
}

proptest! {
    #[test]
    fn any_text_survives_encoding_and_decoding(text in "\\PC{0,40}|[ \\n\\t\\r a-c'<|>]{0,40}") {
        let ids = FABLE.encode(&text, false).unwrap();
        prop_assert_eq!(FABLE.decode(&ids, false), text);
    }

    #[test]
    fn joined_deltas_equal_the_decoding_of_all_ids(
        ids in prop::collection::vec(0_u32..800, 0..60),
        skip: bool,
    ) {
        let mut bytes = Vec::new();
        let (mut sent, mut detokenizer) = (String::new(), Detokenizer::new(skip));
        for &id in &ids {
            let mut delta = String::new();
            detokenizer.push(&*FABLE, id, &mut delta);
            sent.push_str(&delta);
            if !(skip && FABLE.is_special(id)) {
                FABLE.token_bytes(id, false, &mut bytes);
            }
        }
        detokenizer.flush(&mut sent);
        prop_assert_eq!(&sent, &String::from_utf8_lossy(&bytes));
        prop_assert_eq!(sent, FABLE.decode(&ids, skip));
    }
}

/// A file with one component of each kind and a tiny vocabulary, so that random damage mostly hits the structure.
fn small_file() -> Vec<u8> {
    let file = json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [{"id": 4, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true}],
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Prepend", "prepend": "a"},
            {"type": "Replace", "pattern": {"String": "b"}, "content": "a"}]},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": "\\s+(?!\\S)|a"}, "behavior": "Isolated", "invert": false},
            {"type": "Digits", "individual_digits": true},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}]},
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [4], "tokens": ["<s>"]}}},
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteLevel", "add_prefix_space": true,
            "trim_offsets": true, "use_regex": true}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": {"<unk>": 0, "a": 1, "b": 2, "ab": 3, "<s>": 4}, "merges": [["a", "b"]]},
    });
    serde_json::to_vec(&file).unwrap()
}

#[test]
fn the_small_file_is_sound() {
    let tokenizer = Tokenizer::from_json(&small_file(), None).unwrap();
    assert_eq!(tokenizer.encode("c", true).unwrap(), [4, 1, 0]);
    assert_eq!(tokenizer.bos_id(), Some(4));
}

/// Encodes a text if the bytes are still a valid tokenizer; damage must never cause a panic.
fn try_file(file: &[u8]) {
    if let Ok(tokenizer) = Tokenizer::from_json(file, None) {
        let _ = tokenizer.encode("Once upon a time <s> 12", true);
        let _ = tokenizer.decode(&[0, 1, 2, 3, 4], true);
    }
}

#[test]
fn every_byte_of_a_file_may_be_damaged() {
    let file = small_file();
    for at in 0..file.len() {
        try_file(&file[..at]);
        for with in [0, b'0', b'9', b'"', b'\\', b'}', b'e', b'-', 0xFF] {
            let mut damaged = file.clone();
            damaged[at] = with;
            try_file(&damaged);
        }
    }
}

proptest! {
    #[test]
    fn damage_of_a_real_file_is_an_error_or_a_tokenizer_and_never_a_panic(
        at in any::<prop::sample::Index>(),
        with in any::<u8>(),
        cut: bool,
    ) {
        let mut file = read("fable/tokenizer.json");
        let at = at.index(file.len());
        if cut { file.truncate(at) } else { file[at] = with }
        try_file(&file);
    }

    #[test]
    fn damage_in_several_places_is_an_error_or_a_tokenizer_and_never_a_panic(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..5),
    ) {
        let mut file = small_file();
        for (at, with) in changes {
            let at = at.index(file.len());
            file[at] = with;
        }
        try_file(&file);
    }
}
