//! Tests of weight files: valid ones yield their values, invalid ones a typed error in bounded memory, and none causes
//! a panic.

// The generators of test data wrap and truncate on purpose.
#![allow(clippy::cast_possible_truncation)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::path::{Path, PathBuf};

use ascend_llm::model::open;
use ascend_llm::weights::gguf::Gguf;
use ascend_llm::weights::safetensors::SafetensorsFolder;
use ascend_llm::weights::{DType, ModelKind, WeightError, WeightSource};
use serde_json::Value;

/// Allocator that counts the live bytes of this thread and their peak, so that other tests do not affect the count.
struct Counting;

thread_local! {
    static LIVE: Cell<usize> = const { Cell::new(0) };
    static PEAK: Cell<usize> = const { Cell::new(0) };
}

fn count(grown: usize, shrunk: usize) {
    // Thread-locals may already be destroyed while a thread ends.
    let _ = LIVE.try_with(|live| {
        live.set(live.get().saturating_add(grown).saturating_sub(shrunk));
        let _ = PEAK.try_with(|peak| peak.set(peak.get().max(live.get())));
    });
}

#[allow(unsafe_code)]
// SAFETY: Each call is forwarded to the system allocator unchanged.
// SAFETY: `count` does not allocate, so no call recurses.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size(), 0);
        // SAFETY: The caller guarantees the preconditions of `alloc`, which are those of `System.alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count(0, layout.size());
        // SAFETY: The caller guarantees the preconditions of `dealloc`, which are those of `System.dealloc`.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // The old and the new memory may both exist while the bytes are moved.
        count(size, 0);
        count(0, layout.size());
        // SAFETY: The caller guarantees the preconditions of `realloc`, which are those of `System.realloc`.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Runs `work`, and returns its result and the largest number of bytes allocated at one time.
fn peak_bytes<T>(work: impl FnOnce() -> T) -> (T, usize) {
    let before = LIVE.get();
    PEAK.set(before);
    let out = work();
    (out, PEAK.get() - before)
}

/// Limit of the manifests for a rejected file.
fn allowed_bytes(file_len: usize) -> usize {
    16 * file_len + (1 << 20)
}

fn data() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data")
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn open_any(path: &Path) -> Result<Box<dyn WeightSource>, WeightError> {
    if path.extension().unwrap() == "gguf" {
        Ok(Box::new(Gguf::open(path)?))
    } else {
        Ok(Box::new(SafetensorsFolder::open_file(path)?))
    }
}

fn parse_any(path: &Path, bytes: Vec<u8>) -> Result<Box<dyn WeightSource>, WeightError> {
    if path.extension().unwrap() == "gguf" {
        Ok(Box::new(Gguf::parse(path, bytes)?))
    } else {
        Ok(Box::new(SafetensorsFolder::parse(path, bytes)?))
    }
}

/// Reads all tensors of a source.
fn read_all(source: &dyn WeightSource) -> usize {
    let mut sum = 0;
    for name in source.names() {
        if let Ok(view) = source.require(&name) {
            assert_eq!(view.dtype.bytes_for(view.elements()), Some(view.data.len()), "{name}");
            sum += view.data.iter().map(|byte| usize::from(*byte)).sum::<usize>();
            source.release(&name);
        }
    }
    sum
}

fn numbers(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32).collect()
}

fn dims(value: &Value) -> Vec<usize> {
    value.as_array().unwrap().iter().map(|x| x.as_u64().unwrap() as usize).collect()
}

#[test]
fn every_file_of_the_manifests_gets_its_verdict() {
    let cases = data().join("cases");
    let mut seen = 0;
    for manifest in ["gguf_manifest.json", "safetensors_manifest.json"] {
        for case in json(&cases.join(manifest))["files"].as_array().unwrap() {
            let name = case["file"].as_str().unwrap();
            let path = cases.join(name);
            let len = std::fs::metadata(&path).unwrap().len();
            assert_eq!(len, case["bytes"].as_u64().unwrap(), "{name}");
            let (opened, peak) = peak_bytes(|| open_any(&path));
            match case["expect"].as_str().unwrap() {
                "load" => {
                    let source = opened.unwrap_or_else(|error| panic!("{name}: {error}"));
                    if let Some(values) = case.get("values").and_then(Value::as_object) {
                        assert_eq!(source.names().len(), values.len(), "{name}");
                        for (tensor, expected) in values {
                            let view = source.require(tensor).unwrap();
                            assert_eq!(view.to_f32(), numbers(expected), "{name} {tensor}");
                        }
                    }
                    for (key, reversed) in [("row_major_shape", false), ("shapes", false), ("ggml_dims", true)] {
                        for (tensor, shape) in case.get(key).and_then(Value::as_object).into_iter().flatten() {
                            let mut shape = dims(shape);
                            if reversed {
                                shape.reverse();
                            }
                            assert_eq!(source.tensor(tensor).unwrap().shape, shape, "{name} {tensor}");
                        }
                    }
                }
                "reject" => {
                    let error = opened.err().unwrap_or_else(|| panic!("{name} must be rejected"));
                    assert!(
                        matches!(error, WeightError::Corrupt { .. } | WeightError::Unsupported { .. }),
                        "{name}: {error:?}"
                    );
                    assert!(error.to_string().contains(path.file_name().unwrap().to_str().unwrap()), "{error}");
                    assert!(peak <= allowed_bytes(len as usize), "{name}: {peak} bytes were allocated");
                }
                // The rule here is that of the format's specification: a header begins with '{'.
                "policy" => {
                    let error = opened.err().unwrap_or_else(|| panic!("{name} must be rejected"));
                    assert!(error.to_string().contains("does not begin with '{'"), "{error}");
                }
                other => panic!("unknown verdict {other}"),
            }
            seen += 1;
        }
    }
    assert_eq!(seen, 17 + 19);
}

#[test]
fn a_big_endian_file_is_rejected_by_name() {
    let error = Gguf::open(data().join("cases/gguf/bad_big_endian.gguf")).unwrap_err();
    assert!(matches!(error, WeightError::Unsupported { .. }));
    assert!(error.to_string().contains("expected a little-endian file"), "{error}");
}

#[test]
fn arrays_of_strings_keep_empty_and_non_ascii_ones() {
    let gguf = Gguf::open(data().join("cases/gguf/good_no_tensors.gguf")).unwrap();
    assert_eq!(gguf.metadata().architecture(), Some("llama"));
    assert_eq!(gguf.metadata().strings("x.arr").unwrap(), ["hé", ""]);
    assert_eq!(gguf.metadata().keys().collect::<Vec<_>>(), ["general.architecture", "x.arr"]);
}

/// Temporary folder for one test, removed when the value is dropped.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("ascend-llm-{}-{name}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn write(&self, name: &str, bytes: &[u8]) {
        std::fs::write(self.0.join(name), bytes).unwrap();
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Returns a safetensors file of f32 tensors with one element each.
fn safetensors(tensors: &[(&str, f32)]) -> Vec<u8> {
    let entries: Vec<String> = tensors
        .iter()
        .enumerate()
        .map(|(i, (name, _))| {
            format!(r#""{name}":{{"dtype":"F32","shape":[1],"data_offsets":[{},{}]}}"#, 4 * i, 4 * i + 4)
        })
        .collect();
    let header = format!("{{{}}}", entries.join(","));
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend(tensors.iter().flat_map(|(_, value)| value.to_le_bytes()));
    bytes
}

#[test]
fn every_shard_index_case_gets_its_verdict() {
    let cases = json(&data().join("cases/shard_index.json"));
    for case in cases["cases"].as_array().unwrap() {
        let id = case["id"].as_str().unwrap();
        let folder = Folder::new(id);
        let index = case["index"].as_str();
        let weight_map: Value = index.map_or(Value::Null, |text| serde_json::from_str(text).unwrap());
        let pairs: Vec<(&str, &str)> = weight_map["weight_map"]
            .as_object()
            .into_iter()
            .flatten()
            .map(|(tensor, file)| (tensor.as_str(), file.as_str().unwrap()))
            .collect();
        let verdict = case["expect"].as_str().unwrap();
        for file in case["files"].as_array().unwrap() {
            let file = file.as_str().unwrap();
            let held: Vec<(&str, f32)> = pairs.iter().filter(|pair| pair.1 == file).map(|pair| (pair.0, 1.5)).collect();
            if held.is_empty() && index.is_some() {
                // An unrelated file, which would cause an error if it were opened.
                folder.write(file, b"not a weight file");
            } else if index.is_none() {
                folder.write(file, &safetensors(&[("a", 1.5)]));
            } else if verdict.starts_with("error") {
                // If a shard is missing, the existing shards are not read either.
                folder.write(file, b"not a weight file");
            } else {
                folder.write(file, &safetensors(&held));
            }
        }
        if let Some(index) = index {
            folder.write("model.safetensors.index.json", index.as_bytes());
        }
        let opened = SafetensorsFolder::open(&folder.0);
        if verdict.starts_with("error") {
            let error = opened.unwrap_err();
            assert!(
                matches!(&error, WeightError::MissingShard { shard, .. } if shard == "model-00002-of-00002.safetensors"),
                "{id}: {error}"
            );
            assert!(error.to_string().contains("model-00002-of-00002.safetensors"), "{error}");
        } else {
            let source = opened.unwrap_or_else(|error| panic!("{id}: {error}"));
            let expected: Vec<&str> =
                if index.is_some() { pairs.iter().map(|pair| pair.0).collect() } else { vec!["a"] };
            assert_eq!(source.names(), expected, "{id}");
            for name in expected {
                assert_eq!(source.require(name).unwrap().to_f32(), [1.5], "{id}");
            }
        }
    }
}

#[test]
fn the_index_is_the_truth() {
    let folder = Folder::new("truth");
    folder.write("x.safetensors", &safetensors(&[("a", 1.0), ("b", 2.0)]));
    folder.write("y.safetensors", &safetensors(&[("a", 3.0), ("c", 4.0)]));
    folder.write("model.safetensors", b"stray");
    folder.write("model.safetensors.index.json", br#"{"weight_map":{"a":"y.safetensors","b":"x.safetensors"}}"#);
    let source = SafetensorsFolder::open(&folder.0).unwrap();
    // "a" is also in x, and "c" is in y, but the index does not list them there.
    assert_eq!(source.names(), ["b", "a"]);
    assert_eq!(source.require("a").unwrap().to_f32(), [3.0]);
    assert!(source.tensor("c").is_none());

    folder.write("model.safetensors.index.json", br#"{"weight_map":{"d":"y.safetensors"}}"#);
    let error = SafetensorsFolder::open(&folder.0).unwrap_err().to_string();
    assert!(error.contains("\"d\"") && error.contains("y.safetensors"), "{error}");

    folder.write("model.safetensors.index.json", br#"{"weight_map":{"d":"../y.safetensors"}}"#);
    assert!(matches!(SafetensorsFolder::open(&folder.0), Err(WeightError::Corrupt { .. })));
}

#[test]
fn a_tensor_of_another_type_is_refused_when_asked_for() {
    let header = br#"{"i":{"dtype":"I64","shape":[1],"data_offsets":[0,8]},"w":{"dtype":"F16","shape":[1],"data_offsets":[8,10]}}"#;
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header);
    bytes.extend([0, 0, 0, 0, 0, 0, 0, 0, 0, 0x3c]);
    let source = SafetensorsFolder::parse("f", bytes).unwrap();
    assert_eq!(source.require("w").unwrap().to_f32(), [1.0]);
    assert!(source.tensor("i").is_none());
    let error = source.require("i").unwrap_err();
    assert!(
        matches!(&error, WeightError::UnsupportedType { tensor, type_name, .. } if tensor == "i" && type_name == "I64")
    );

    let mut bytes = std::fs::read(data().join("cases/gguf/good_one_f32.gguf")).unwrap();
    // The type number follows the magic, the counts, one pair, the name and two dimensions; 26 is i32, which is as wide
    // as f32.
    let at = 24 + 8 + 20 + 4 + 8 + 5 + 8 + 1 + 4 + 16;
    bytes[at] = 26;
    let source = Gguf::parse("f", bytes.clone()).unwrap();
    let error = source.require("w").unwrap_err();
    assert!(
        matches!(&error, WeightError::UnsupportedType { tensor, type_id: Some(26), .. } if tensor == "w"),
        "{error}"
    );
    assert!(error.to_string().contains("i32 (ggml type 26)"), "{error}");
    // An unknown type number has an unknown element size, so the file cannot be checked.
    bytes[at] = 99;
    let error = Gguf::parse("f", bytes).unwrap_err();
    assert!(matches!(error, WeightError::UnsupportedType { type_id: Some(99), .. }), "{error}");
}

#[test]
fn truncation_at_every_length_is_an_error_or_harmless() {
    let cases = data().join("cases");
    for name in
        ["gguf/good_align64.gguf", "gguf/good_no_tensors.gguf", "safetensors/good_metadata_unordered.safetensors"]
    {
        let path = cases.join(name);
        let bytes = std::fs::read(&path).unwrap();
        for len in 0..bytes.len() {
            let (parsed, peak) = peak_bytes(|| parse_any(&path, bytes[..len].to_vec()));
            // The last tensor of a GGUF file is followed by padding, which may be missing.
            let is_padding = name == "gguf/good_align64.gguf" && len >= 264;
            assert_eq!(parsed.is_ok(), is_padding, "{name} truncated to {len}");
            assert!(peak <= allowed_bytes(len) + len, "{name} truncated to {len}: {peak} bytes were allocated");
        }
    }
    for name in ["fable/gguf/fable-q4_0.gguf", "fable/model.safetensors"] {
        let path = data().join(name);
        let bytes = std::fs::read(&path).unwrap();
        // All lengths within the headers at small intervals, those within the data at large ones.
        let mut lens: Vec<usize> = (0..bytes.len().min(60_000)).step_by(97).collect();
        lens.extend((60_000..bytes.len()).step_by(61_001));
        lens.push(bytes.len() - 1);
        for len in lens {
            assert!(parse_any(&path, bytes[..len].to_vec()).is_err(), "{name} truncated to {len}");
        }
    }
}

/// splitmix64: random enough for bit flips, and the same in each run.
struct Flips(u64);

impl Flips {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % bound as u64) as usize
    }
}

#[test]
fn flipped_bytes_never_panic_and_stay_bounded() {
    let mut flips = Flips(20_261);
    let mut refused = 0;
    let mut folders = Vec::new();
    for kind in ["gguf", "safetensors"] {
        folders.extend(std::fs::read_dir(data().join("cases").join(kind)).unwrap().map(|entry| entry.unwrap().path()));
    }
    folders.sort();
    for path in folders {
        let good = std::fs::read(&path).unwrap();
        if good.is_empty() {
            continue;
        }
        for _ in 0..2_000 {
            let mut bytes = good.clone();
            for _ in 0..=flips.below(3) {
                let at = flips.below(bytes.len());
                bytes[at] = [0, 1, 0x7f, 0x80, 0xff, flips.below(256) as u8][flips.below(6)];
            }
            let len = bytes.len();
            let (parsed, peak) = peak_bytes(|| parse_any(&path, bytes));
            assert!(peak <= allowed_bytes(len), "{path:?}: {peak} bytes were allocated");
            match parsed {
                Ok(source) => {
                    read_all(&*source);
                }
                Err(error) => {
                    assert!(!error.to_string().is_empty());
                    refused += 1;
                }
            }
        }
    }
    assert!(refused > 10_000, "{refused}");
    // The headers of real files.
    for (name, head, rounds) in [("fable/gguf/fable-q4_0.gguf", 24_000, 400), ("fable/model.safetensors", 3_000, 400)] {
        let path = data().join(name);
        let good = std::fs::read(&path).unwrap();
        for _ in 0..rounds {
            let mut bytes = good.clone();
            let at = flips.below(head);
            bytes[at] = flips.below(256) as u8;
            let _ = parse_any(&path, bytes).map(|source| source.names());
        }
    }
}

/// Compares our verdicts with those of the format's own crate, apart from content that only we reject.
#[test]
fn safetensors_verdicts_agree_with_the_formats_own_crate() {
    let mut flips = Flips(7);
    let (mut both, mut neither) = (0, 0);
    let good = safetensors(&[("a", 1.0), ("bb", 2.0), ("c", 3.0)]);
    for _ in 0..20_000 {
        let mut bytes = good.clone();
        let at = flips.below(bytes.len());
        bytes[at] = b"0123456789abcF{}[]:,\" \\x\0\xff"[flips.below(26)];
        let theirs = ::safetensors::SafeTensors::read_metadata(&bytes).is_ok();
        let ours = SafetensorsFolder::parse("f", bytes.clone());
        match (&ours, theirs) {
            (Ok(_), true) => both += 1,
            (Err(_), false) => neither += 1,
            (Err(error), true) => {
                let error = error.to_string();
                assert!(error.contains("listed twice") || error.contains("does not begin with"), "{error}");
            }
            (Ok(_), false) => panic!("only our reader accepts {:?}", bytes.escape_ascii().to_string()),
        }
    }
    assert!(both > 100 && neither > 1_000, "{both} {neither}");
}

#[test]
fn headers_made_to_be_expensive_cost_little() {
    let mut files = Vec::new();
    let mut header_file = |text: String| {
        let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
        bytes.extend(text.as_bytes());
        files.push((PathBuf::from("f.safetensors"), bytes));
    };
    let many = 200_000;
    header_file(format!(r#"{{"w":{{"dtype":"F32","shape":[{}1],"data_offsets":[0,1]}}}}"#, "1,".repeat(many)));
    header_file(format!(r#"{{"w":{{"x":[{}1]}}}}"#, "1,".repeat(many)));
    header_file(format!(r#"{{"w":{}1}}"#, "[".repeat(many)));
    header_file(format!(r#"{{"__metadata__":{{{}"":1}}}}"#, r#""":"","#.repeat(many)));
    let tensors: Vec<String> =
        (0..many / 8).map(|i| format!(r#""{i:x}":{{"dtype":"F32","shape":[],"data_offsets":[0,0]}}"#)).collect();
    header_file(format!("{{{}}}", tensors.join(",")));

    let gguf_head = |tensors: u64, pairs: u64| {
        let mut bytes = b"GGUF\x03\0\0\0".to_vec();
        bytes.extend(tensors.to_le_bytes());
        bytes.extend(pairs.to_le_bytes());
        bytes
    };
    let string = |text: &str| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
    // Pairs with short keys, the last one truncated before its value.
    let mut bytes = gguf_head(0, many as u64);
    for i in 0..many - 1 {
        bytes.extend(string(&format!("{i:x}")));
        bytes.extend([0, 0, 0, 0, 7]);
    }
    bytes.extend([0; 12]);
    files.push((PathBuf::from("pairs.gguf"), bytes));
    // An array of arrays of empty arrays.
    let mut bytes = gguf_head(0, 1);
    bytes.extend(string("a"));
    bytes.extend(9_u32.to_le_bytes());
    for _ in 0..many {
        bytes.extend(9_u32.to_le_bytes());
        bytes.extend(1_u64.to_le_bytes());
    }
    files.push((PathBuf::from("nested.gguf"), bytes));
    // Very many scalars, all at the same offset.
    let mut bytes = gguf_head(many as u64, 0);
    for i in 0..many {
        bytes.extend(string(&format!("{i:x}")));
        bytes.extend([0; 4 + 4 + 8]);
    }
    bytes.extend([0; 64]);
    files.push((PathBuf::from("tensors.gguf"), bytes));

    for (i, (path, bytes)) in files.into_iter().enumerate() {
        let len = bytes.len();
        let (parsed, peak) = peak_bytes(|| parse_any(&path, bytes));
        assert!(parsed.is_err(), "{i}");
        assert!(peak <= allowed_bytes(len), "{i}: {peak} bytes were allocated for a file of {len} bytes");
    }
}

#[test]
fn a_path_opens_the_model_at_that_place() {
    let fable = data().join("fable");
    let files = open(&fable).unwrap();
    assert!(matches!(&files.kind, ModelKind::Folder(folder) if *folder == fable));
    assert!(files.source.tensor("model.embed_tokens.weight").is_some());

    let file = fable.join("gguf/fable-q8_0.gguf");
    let files = open(&file).unwrap();
    let ModelKind::Gguf(gguf) = &files.kind else { panic!("{:?}", files.kind) };
    assert_eq!(gguf.path(), file);
    assert_eq!(files.source.tensor("model.norm.weight").unwrap().dtype, DType::F32);

    // Eight .gguf files and no config.json: the caller must choose one.
    let error = open(fable.join("gguf")).unwrap_err();
    assert!(matches!(error, WeightError::NotAModel { .. }));
    assert!(
        error.to_string().contains("8 .gguf files") && error.to_string().contains("config.json not found"),
        "{error}"
    );

    let folder = Folder::new("open");
    assert!(matches!(open(&folder.0), Err(WeightError::NotAModel { .. })));
    assert!(matches!(open(folder.0.join("none")), Err(WeightError::Io { .. })));
    folder.write("one.gguf", &std::fs::read(data().join("cases/gguf/good_one_f32.gguf")).unwrap());
    assert!(matches!(open(&folder.0).unwrap().kind, ModelKind::Gguf(_)));
    folder.write("config.json", b"{}");
    assert!(matches!(open(&folder.0).unwrap().kind, ModelKind::Gguf(_)));
    folder.write("model.safetensors", &safetensors(&[("a", 1.0)]));
    assert!(matches!(open(&folder.0).unwrap().kind, ModelKind::Folder(_)));
    assert!(matches!(open(folder.0.join("config.json")), Err(WeightError::NotAModel { .. })));
}
