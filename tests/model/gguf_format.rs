//! Tests of GGUF files: all value types and both versions are read; invalid or unsupported content is rejected by name.

use ascend_llm::model::gguf_conventions;
use ascend_llm::text::TokenizerMetadata;
use ascend_llm::weights::gguf::{Gguf, Value, ValueType};
use ascend_llm::weights::{DType, WeightError, WeightSource as _};

/// Writer of GGUF files, valid or invalid ones.
#[derive(Clone)]
struct Writer {
    version: u32,
    pairs: Vec<Vec<u8>>,
    infos: Vec<Vec<u8>>,
    data: Vec<u8>,
    alignment: usize,
}

fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

impl Writer {
    fn new(architecture: &str) -> Self {
        let writer = Self { version: 3, pairs: Vec::new(), infos: Vec::new(), data: Vec::new(), alignment: 32 };
        writer.pair("general.architecture", 8, &string(architecture))
    }

    fn pair(mut self, key: &str, ty: u32, value: &[u8]) -> Self {
        self.pairs.push([&string(key)[..], &ty.to_le_bytes(), value].concat());
        self
    }

    fn array(self, key: &str, ty: u32, len: u64, values: &[u8]) -> Self {
        self.pair(key, 9, &[&ty.to_le_bytes()[..], &len.to_le_bytes(), values].concat())
    }

    fn u32(self, key: &str, value: u32) -> Self {
        self.pair(key, 4, &value.to_le_bytes())
    }

    fn info(mut self, name: &str, dims: &[u64], ty: u32, offset: u64) -> Self {
        let mut info = [&string(name)[..], &u32::try_from(dims.len()).unwrap().to_le_bytes()].concat();
        info.extend(dims.iter().flat_map(|dim| dim.to_le_bytes()));
        info.extend(ty.to_le_bytes());
        info.extend(offset.to_le_bytes());
        self.infos.push(info);
        self
    }

    /// Adds a tensor of f32; `dims` are fastest first.
    fn f32s(mut self, name: &str, dims: &[u64], values: &[f32]) -> Self {
        self.data.resize(self.data.len().next_multiple_of(self.alignment), 0);
        let offset = self.data.len() as u64;
        self.data.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        self.info(name, dims, 0, offset)
    }

    fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend((self.infos.len() as u64).to_le_bytes());
        out.extend((self.pairs.len() as u64).to_le_bytes());
        out.extend(self.pairs.concat());
        out.extend(self.infos.concat());
        out.resize(out.len().next_multiple_of(self.alignment), 0);
        out.extend(&self.data);
        out
    }

    fn parse(&self) -> Result<Gguf, WeightError> {
        Ok(Gguf::parse("test.gguf", self.bytes())?.with_conventions(gguf_conventions))
    }

    fn refusal(&self) -> String {
        self.parse().expect_err("the file must be rejected").to_string()
    }
}

#[test]
fn every_value_type_is_read_and_integers_widen() {
    let gguf = Writer::new("llama")
        .pair("u8", 0, &[200])
        .pair("i8", 1, &[0xff])
        .pair("u16", 2, &60_000_u16.to_le_bytes())
        .pair("i16", 3, &(-300_i16).to_le_bytes())
        .pair("u32", 4, &4_000_000_000_u32.to_le_bytes())
        .pair("i32", 5, &(-5_i32).to_le_bytes())
        .pair("f32", 6, &1.5_f32.to_le_bytes())
        .pair("yes", 7, &[1])
        .pair("no", 7, &[0])
        .pair("text", 8, &string("héllo"))
        .pair("u64", 10, &(1_u64 << 40).to_le_bytes())
        .pair("i64", 11, &7_i64.to_le_bytes())
        .pair("f64", 12, &0.1_f64.to_le_bytes())
        .array("bytes", 0, 3, &[1, 2, 255])
        .array("i32s", 5, 2, &[(-1_i32).to_le_bytes(), 7_i32.to_le_bytes()].concat())
        .array("f32s", 6, 2, &[0.5_f32.to_le_bytes(), 2.0_f32.to_le_bytes()].concat())
        .array("f64s", 12, 1, &0.5_f64.to_le_bytes())
        .array("bools", 7, 2, &[1, 0])
        .array("strings", 8, 2, &[string("a"), string("")].concat())
        .array("none", 8, 0, &[])
        .parse()
        .unwrap();
    let meta = gguf.metadata();
    assert_eq!(meta.len(), 21);
    for (key, value) in [("u8", 200), ("u16", 60_000), ("u32", 4_000_000_000), ("i64", 7)] {
        assert_eq!(meta.u32(key), Some(value), "{key}");
        assert_eq!(meta.u64(key), Some(value.into()), "{key}");
    }
    for (key, value) in [("i8", -1), ("i16", -300), ("i32", -5), ("u64", 1 << 40)] {
        assert_eq!(meta.u32(key), None, "{key} does not fit");
        assert_eq!(meta.i64(key), Some(value), "{key}");
    }
    assert_eq!((meta.f32("f32"), meta.f32("f64"), meta.f32("u8")), (Some(1.5), Some(0.1), None));
    assert_eq!((meta.bool("yes"), meta.bool("no"), meta.bool("u8")), (Some(true), Some(false), None));
    assert_eq!((meta.str("text"), meta.str("u8"), meta.str("absent")), (Some("héllo"), None, None));
    assert_eq!(meta.u32s("bytes").unwrap(), [1, 2, 255]);
    assert_eq!((meta.i32s("i32s").unwrap(), meta.u32s("i32s")), (vec![-1, 7], None));
    assert_eq!((meta.f32s("f32s").unwrap(), meta.f32s("f64s").unwrap()), (vec![0.5, 2.0], vec![0.5]));
    assert_eq!(meta.bools("bools").unwrap(), [true, false]);
    assert_eq!(meta.strings("strings").unwrap(), ["a", ""]);
    assert_eq!(meta.strings("none").unwrap(), [""; 0]);
    assert_eq!((meta.strings("i32s"), meta.i32s("strings")), (None, None));

    let text: &dyn TokenizerMetadata = meta;
    assert_eq!((text.str("text"), text.u32("u8"), text.bool("yes")), (Some("héllo"), Some(200), Some(true)));
    assert_eq!(text.strings("strings").unwrap().len() + text.i32s("i32s").unwrap().len(), 4);
    assert_eq!(text.f32s("f32s").unwrap(), [0.5, 2.0]);
}

#[test]
fn nested_arrays_are_walked() {
    let inner = |bytes: &[u8]| [&0_u32.to_le_bytes()[..], &(bytes.len() as u64).to_le_bytes(), bytes].concat();
    let gguf = Writer::new("llama")
        .array("nested", 9, 2, &[inner(&[1, 2]), inner(&[3])].concat())
        .u32("after", 9)
        .parse()
        .unwrap();
    assert_eq!(gguf.metadata().u32("after"), Some(9));
    let outer = gguf.metadata().array("nested").unwrap();
    assert_eq!((outer.element(), outer.len()), (ValueType::Array, 2));
    let flat: Vec<i128> = outer
        .iter()
        .flat_map(|inner| match inner {
            Value::Array(inner) => inner.iter().map(|value| value.as_int().unwrap()).collect::<Vec<_>>(),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(flat, [1, 2, 3]);
}

#[test]
fn versions_2_and_3_are_read_and_others_named() {
    let mut writer = Writer::new("llama").f32s("w", &[2], &[1.0, 2.0]);
    for version in [2, 3] {
        writer.version = version;
        assert_eq!(writer.parse().unwrap().require("w").unwrap().to_f32(), [1.0, 2.0]);
    }
    for version in [0, 1, 4, 77] {
        writer.version = version;
        let error = writer.refusal();
        assert!(error.contains(&format!("version is {version}, expected 2 or 3")), "{error}");
    }
    for version in [2_u32, 3] {
        writer.version = version.swap_bytes();
        assert!(writer.refusal().contains("expected a little-endian file"));
    }
}

#[test]
fn what_metadata_may_not_be() {
    let good = Writer::new("llama");
    for (writer, expected) in [
        (good.clone().u32("a", 1).u32("a", 2), "\"a\" occurs twice"),
        (good.clone().pair("a", 13, &[0; 16]), "\"a\": has value type 13"),
        (good.clone().pair("a", 7, &[2]), "\"a\": has boolean 2"),
        (good.clone().pair("a", 8, &[1, 0, 0, 0, 0, 0, 0, 0, 0xff]), "is not UTF-8"),
        (good.clone().array("a", 99, 0, &[]), "\"a\": has value type 99"),
        (good.clone().array("a", 7, 2, &[1, 3]), "\"a\": has boolean 3"),
        (good.clone().array("a", 4, 1 << 62, &[0; 64]), "\"a\": has an array of 4611686018427387904"),
        (good.clone().array("a", 8, 2, &[string("x"), vec![0xff; 8]].concat()), "string value"),
        (good.clone().u32("split.count", 2), "one of 2 parts"),
        (good.clone().u32("general.alignment", 0), "general.alignment is U32(0)"),
        (good.clone().u32("general.alignment", 24), "expected a power of two"),
        (good.clone().pair("general.alignment", 8, &string("32")), "expected a power of two"),
    ] {
        let error = writer.refusal();
        assert!(error.starts_with("test.gguf") && error.contains(expected), "{error}");
    }
    assert!(good.u32("split.count", 1).parse().is_ok());
}

#[test]
fn what_tensors_may_not_be() {
    let mut good = Writer::new("llama");
    good.data = vec![0; 256];
    good.info("a", &[4], 0, 0).parse().unwrap();
    let mut good = Writer::new("llama");
    good.data = vec![0; 256];
    for (writer, expected) in [
        (good.clone().info("a", &[4], 0, 0).info("a", &[4], 0, 32), "\"a\" is listed twice"),
        (good.clone().info("a", &[16], 0, 0).info("b", &[4], 0, 32), "\"b\" overlaps \"a\""),
        (good.clone().info("a", &[4], 0, 0).info("b", &[4], 0, 0), "\"b\" overlaps \"a\""),
        (good.clone().info("a", &[4], 0, 8), "multiple of the alignment 32"),
        (good.clone().info("a", &[4], 0, 256), "beyond the end"),
        (good.clone().info("a", &[65], 0, 0), "beyond the end"),
        (good.clone().info("a", &[4], 0, u64::MAX - 31), "beyond the end"),
        (good.clone().info("a", &[1 << 32, 1 << 32], 0, 0), "larger than any file"),
        (good.clone().info("a", &[1 << 63, 2, 1, 1], 0, 0), "larger than any file"),
        (good.clone().info("a", &[1 << 62], 0, 0), "larger than any file"),
        (good.clone().info("a", &[4, 0], 0, 0), "no dimension of 0"),
        (good.clone().info("a", &[1, 1, 1, 1, 1], 0, 0), "more than 4 dimensions"),
        // 64 elements are two blocks of Q4_0, but a row of 16 elements is not a whole block.
        (good.clone().info("a", &[16, 4], 2, 0), "rows of 16 elements, expected a multiple of 32 for q4_0"),
        (good.clone().info("a", &[4], 4, 0), "ggml type 4"),
        (good.clone().info("a", &[4], 1_000, 0), "\"a\" in test.gguf has type unknown (ggml type 1000)"),
    ] {
        let error = writer.refusal();
        assert!(error.contains("test.gguf") && error.contains(expected), "{error}, expected {expected}");
    }
    // A scalar, and a type that is recognized but not supported.
    let gguf = good.info("s", &[], 0, 0).info("i", &[256, 1], 10, 32).parse().unwrap();
    assert_eq!(gguf.require("s").unwrap().shape, [0_usize; 0]);
    let error = gguf.require("i").unwrap_err().to_string();
    assert!(error.contains("\"i\"") && error.contains("q2_k (ggml type 10)"), "{error}");
}

#[test]
fn an_unknown_architecture_keeps_the_files_names() {
    let gguf = Writer::new("novel").f32s("blk.0.attn_q.weight", &[1, 4], &[0.0, 1.0, 2.0, 3.0]).parse().unwrap();
    assert_eq!(gguf.names(), ["blk.0.attn_q.weight"]);
    assert!(gguf.tensor("model.layers.0.self_attn.q_proj.weight").is_none());
}

#[test]
fn hub_names_give_hub_order_and_raw_names_the_files() {
    let file = |architecture: &str| {
        Writer::new(architecture)
            .u32(&format!("{architecture}.attention.head_count"), 2)
            .u32(&format!("{architecture}.attention.head_count_kv"), 1)
            .f32s("blk.0.attn_q.weight", &[1, 8], &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])
            .f32s("blk.0.attn_q.bias", &[8], &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])
            .f32s("blk.0.attn_k.weight", &[1, 4], &[0.0, 1.0, 2.0, 3.0])
            .f32s("blk.0.attn_v.weight", &[1, 4], &[0.0, 1.0, 2.0, 3.0])
            .f32s("rope_freqs.weight", &[2], &[1.0, 2.0])
            .parse()
            .unwrap()
    };
    let llama = file("llama");
    let values = |gguf: &Gguf, name: &str| gguf.require(name).unwrap().to_f32();
    for part in ["q_proj.weight", "q_proj.bias"] {
        let name = format!("model.layers.0.self_attn.{part}");
        assert_eq!(values(&llama, &name), [0.0, 2.0, 1.0, 3.0, 4.0, 6.0, 5.0, 7.0]);
        assert_eq!(values(&file("qwen2"), &name), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]);
    }
    assert_eq!(values(&llama, "model.layers.0.self_attn.k_proj.weight"), [0.0, 2.0, 1.0, 3.0]);
    assert_eq!(values(&llama, "model.layers.0.self_attn.v_proj.weight"), [0.0, 1.0, 2.0, 3.0]);
    assert_eq!(values(&llama, "blk.0.attn_k.weight"), [0.0, 1.0, 2.0, 3.0]);
    assert_eq!(
        llama.names(),
        [
            "model.layers.0.self_attn.q_proj.weight",
            "model.layers.0.self_attn.q_proj.bias",
            "model.layers.0.self_attn.k_proj.weight",
            "model.layers.0.self_attn.v_proj.weight",
            "rope_freqs.weight"
        ]
    );
    // Releasing pages does not invalidate reordered rows that a view still uses.
    let view = llama.require("model.layers.0.self_attn.k_proj.weight").unwrap();
    llama.release("model.layers.0.self_attn.k_proj.weight");
    assert_eq!(view.to_f32(), [0.0, 2.0, 1.0, 3.0]);
}

#[test]
fn rows_that_are_no_heads_are_refused_by_name() {
    let hub = "model.layers.0.self_attn.q_proj.weight";
    let without = Writer::new("llama").f32s("blk.0.attn_q.weight", &[1, 4], &[0.0; 4]).parse().unwrap();
    let error = without.require(hub).unwrap_err().to_string();
    assert!(error.contains("llama.attention.head_count"), "{error}");
    let odd = Writer::new("llama")
        .u32("llama.attention.head_count", 3)
        .f32s("blk.0.attn_q.weight", &[1, 4], &[0.0; 4])
        .parse()
        .unwrap();
    let error = odd.require(hub).unwrap_err().to_string();
    assert!(error.contains("blk.0.attn_q.weight") && error.contains("3 heads"), "{error}");
}

#[test]
fn slices_by_rows_are_whole_blocks() {
    let gguf = Writer::new("llama").f32s("w", &[2, 3], &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]).parse().unwrap();
    let view = gguf.require("w").unwrap();
    assert_eq!((view.dtype, view.shape, view.row_len(), view.elements()), (DType::F32, &[3, 2][..], 2, 6));
    assert_eq!(view.rows(1..3), Some(&view.data[8..24]));
    assert_eq!(view.rows(3..3), Some(&[][..]));
    assert_eq!((view.rows(2..4), view.rows(0..usize::MAX)), (None, None));
    assert!(view.expect_shape("w", &[3, 2]).is_ok());
    let error = view.expect_shape("w", &[2, 3]).unwrap_err().to_string();
    assert_eq!(error, "tensor \"w\" has shape [3, 2], expected [2, 3]");
}
