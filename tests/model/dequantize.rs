//! Tests of stored elements and floats: block layouts equal those of GGML, and rounding stays within each type's bound.

// The generators of test data wrap and truncate on purpose.
#![allow(clippy::cast_possible_truncation)]

use std::path::Path;

use ascend_llm::model::gguf_conventions;
use ascend_llm::weights::convert::{QuantGroup, dequantize, groups, quantize};
use ascend_llm::weights::gguf::Gguf;
use ascend_llm::weights::safetensors::SafetensorsFolder;
use ascend_llm::weights::{DType, WeightSource as _};
use half::f16;
use proptest::prelude::*;

const ALL: [DType; 11] = [
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::Q4_0,
    DType::Q4_1,
    DType::Q5_0,
    DType::Q5_1,
    DType::Q8_0,
    DType::Q4_K,
    DType::Q5_K,
    DType::Q6_K,
];

fn half(x: f32) -> [u8; 2] {
    f16::from_f32(x).to_le_bytes()
}

fn expand(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let mut out = vec![f32::NAN; bytes.len() / dtype.block_bytes() * dtype.block_len()];
    dequantize(dtype, bytes, &mut out);
    out
}

/// Returns the path of the story model in one type; the f16 file is the one of the examples.
fn story(kind: &str) -> std::path::PathBuf {
    let folder = if kind == "f16" { "examples/models" } else { "tests/data/fable/gguf" };
    Path::new(env!("CARGO_MANIFEST_DIR")).join(folder).join(format!("fable-{kind}.gguf"))
}

fn open(kind: &str) -> Gguf {
    Gguf::open(story(kind)).unwrap().with_conventions(gguf_conventions)
}

#[test]
fn floats_are_read_exactly() {
    assert_eq!(expand(DType::F32, &(-0.1_f32).to_le_bytes()), [-0.1]);
    // f16: one, the smallest subnormal (2^-24), the largest number, minus infinity.
    let bytes = [0x00, 0x3c, 0x01, 0x00, 0xff, 0x7b, 0x00, 0xfc];
    assert_eq!(expand(DType::F16, &bytes), [1.0, 1.0 / 16_777_216.0, 65_504.0, f32::NEG_INFINITY]);
    // bf16 is the upper half of an f32.
    assert_eq!(expand(DType::BF16, &[0xc0, 0x3f, 0x49, 0xc0]), [1.5, f32::from_bits(0xc049_0000)]);
}

#[test]
fn a_q4_0_block_by_hand() {
    // Byte j contains element j in its low half and element j + 16 in its high half; the value is (element - 8) times
    // the scale.
    let mut block = half(0.5).to_vec();
    block.extend((0..16).map(|j| j | (15 - j) << 4));
    let out = expand(DType::Q4_0, &block);
    for j in 0..16 {
        assert_eq!(out[j], 0.5 * (j as f32 - 8.0));
        assert_eq!(out[j + 16], 0.5 * (7.0 - j as f32));
    }
}

#[test]
fn a_q4_1_block_by_hand() {
    let mut block = [half(0.25), half(-3.0)].concat();
    block.extend((0..16).map(|j| j | (15 - j) << 4));
    let out = expand(DType::Q4_1, &block);
    for j in 0..16 {
        assert_eq!(out[j], 0.25 * j as f32 - 3.0);
        assert_eq!(out[j + 16], 0.25 * (15.0 - j as f32) - 3.0);
    }
}

#[test]
fn q5_blocks_by_hand() {
    // Only elements 0, 15, 16 and 31 have their fifth bit set; bit i of the u32 belongs to element i.
    let fifth = (1_u32 | 1 << 15 | 1 << 16 | 1 << 31).to_le_bytes();
    let low: Vec<u8> = (0..16).map(|j| j | (15 - j) << 4).collect();
    let quant = |i: usize| {
        let low = if i < 16 { i } else { 31 - i };
        low as f32 + if matches!(i, 0 | 15 | 16 | 31) { 16.0 } else { 0.0 }
    };
    let block = [&half(2.0)[..], &fifth, &low].concat();
    for (i, x) in expand(DType::Q5_0, &block).into_iter().enumerate() {
        assert_eq!(x, 2.0 * (quant(i) - 16.0), "{i}");
    }
    let block = [&half(2.0)[..], &half(-0.5), &fifth, &low].concat();
    for (i, x) in expand(DType::Q5_1, &block).into_iter().enumerate() {
        assert_eq!(x, 2.0 * quant(i) - 0.5, "{i}");
    }
}

#[test]
fn a_q8_0_block_by_hand() {
    let mut block = half(-0.125).to_vec();
    block.extend((0..32).map(|i: i16| (i * 8 - 128) as u8));
    for (i, x) in expand(DType::Q8_0, &block).into_iter().enumerate() {
        assert_eq!(x, -0.125 * (8.0 * i as f32 - 128.0), "{i}");
    }
}

/// Packs six-bit scales and minima of the eight sub-blocks as in `Q4_K` and `Q5_K`.
///
/// The first four are in the low six bits of bytes 0..4 and 4..8. The low halves of the last four are in bytes 8..12,
/// their upper two bits in the upper bits of the first bytes.
fn packed_scales(scales: [u8; 8], mins: [u8; 8]) -> [u8; 12] {
    let mut out = [0; 12];
    for j in 0..4 {
        out[j] = scales[j] + 64 * (scales[j + 4] / 16);
        out[j + 4] = mins[j] + 64 * (mins[j + 4] / 16);
        out[j + 8] = scales[j + 4] % 16 + 16 * (mins[j + 4] % 16);
    }
    out
}

const SCALES: [u8; 8] = [1, 63, 7, 32, 15, 16, 49, 62];
const MINS: [u8; 8] = [0, 5, 63, 33, 17, 60, 16, 1];

#[test]
fn a_q4_k_block_by_hand() {
    let mut block = [&half(0.5)[..], &half(0.25), &packed_scales(SCALES, MINS)].concat();
    // Each run of 32 bytes contains 64 elements: first those of the low halves.
    let low: Vec<u8> = (0..128_u32).map(|i| (i * 37 % 251) as u8).collect();
    block.extend(&low);
    for (i, x) in expand(DType::Q4_K, &block).into_iter().enumerate() {
        let byte = low[i / 64 * 32 + i % 32];
        let quant = if i % 64 < 32 { byte % 16 } else { byte / 16 };
        let (scale, min) = (f32::from(SCALES[i / 32]), f32::from(MINS[i / 32]));
        assert_eq!(x, 0.5 * scale * f32::from(quant) - 0.25 * min, "{i}");
    }
}

#[test]
fn a_q5_k_block_by_hand() {
    let high: Vec<u8> = (0..32_u32).map(|i| (i * 73 % 256) as u8).collect();
    let low: Vec<u8> = (0..128_u32).map(|i| (i * 37 % 251) as u8).collect();
    let block = [&half(0.5)[..], &half(0.25), &packed_scales(SCALES, MINS), &high, &low].concat();
    for (i, x) in expand(DType::Q5_K, &block).into_iter().enumerate() {
        let byte = low[i / 64 * 32 + i % 32];
        // Bit k of high byte l is the fifth bit of element 32 k + l.
        let fifth = high[i % 32] >> (i / 32) & 1;
        let quant = 16 * fifth + if i % 64 < 32 { byte % 16 } else { byte / 16 };
        let (scale, min) = (f32::from(SCALES[i / 32]), f32::from(MINS[i / 32]));
        assert_eq!(x, 0.5 * scale * f32::from(quant) - 0.25 * min, "{i}");
    }
}

#[test]
fn a_q6_k_block_by_hand() {
    let low: Vec<u8> = (0..128_u32).map(|i| (i * 37 % 251) as u8).collect();
    let high: Vec<u8> = (0..64_u32).map(|i| (i * 73 % 256) as u8).collect();
    let scales: Vec<i8> = (0..16).map(|i: i16| (i * 16 - 128) as i8).collect();
    let block = [&low[..], &high, &scales.iter().map(|s| *s as u8).collect::<Vec<_>>(), &half(0.25)].concat();
    for (i, x) in expand(DType::Q6_K, &block).into_iter().enumerate() {
        let (n, within) = (i / 128, i % 128);
        let byte = low[64 * n + within % 64];
        let four = if within < 64 { byte % 16 } else { byte / 16 };
        let two = high[32 * n + within % 32] >> (2 * (within / 32)) & 3;
        let quant = f32::from(four + 16 * two) - 32.0;
        assert_eq!(x, 0.25 * f32::from(scales[i / 16]) * quant, "{i}");
    }
}

/// Returns the largest distance between a value of a block and its stored value.
///
/// It consists of half a step of the format for rounding (a whole step at the positive end of types whose integers
/// reach further down than up), and the effect on the block's integers of rounding the scale itself to f16 (2^-11, or
/// half of a subnormal's unit, 2^-25).
fn bound(dtype: DType, block: &[f32]) -> f32 {
    let largest = block.iter().fold(0.0_f32, |a, x| a.max(x.abs()));
    let (min, max) = block.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(a, b), x| (a.min(*x), b.max(*x)));
    let (range, zero_range) = (max - min, max.max(0.0) - min.min(0.0));
    let scale_error = |levels: f32| largest.max(range) * 2.0_f32.powi(-11) + levels * 2.0_f32.powi(-25);
    match dtype {
        DType::F32 => 0.0,
        DType::F16 => scale_error(1.0),
        DType::BF16 => largest * 2.0_f32.powi(-8),
        DType::Q8_0 => largest / 254.0 * 1.001 + scale_error(127.0),
        DType::Q4_0 => largest / 8.0 * 1.001 + scale_error(8.0),
        DType::Q5_0 => largest / 16.0 * 1.001 + scale_error(16.0),
        DType::Q4_1 => range / 30.0 * 1.001 + 2.0 * scale_error(15.0),
        DType::Q5_1 => range / 62.0 * 1.001 + 2.0 * scale_error(31.0),
        // Half a step, where the step is rounded up by at most one unit of the super-block's scale, and the minimum by
        // one unit of its own; each unit is 1/63 of the largest.
        DType::Q4_K => (zero_range / 15.0) * (0.5 + 3.0 / 63.0 * 2.0) + 4.0 * scale_error(15.0 * 63.0),
        DType::Q5_K => (zero_range / 31.0) * (0.5 + 3.0 / 63.0 * 2.0) + 4.0 * scale_error(31.0 * 63.0),
        DType::Q6_K => (largest / 31.0) * (0.5 + 2.0 / 127.0) + 4.0 * scale_error(31.0 * 127.0),
        _ => unreachable!(),
    }
}

fn assert_close(dtype: DType, src: &[f32], stored: &[f32], slack: f32) {
    for (block, stored) in src.chunks(dtype.block_len()).zip(stored.chunks(dtype.block_len())) {
        let bound = bound(dtype, block) * slack;
        for (x, y) in block.iter().zip(stored) {
            assert!((x - y).abs() <= bound, "{dtype}: {x} was rounded to {y}, beyond the bound {bound}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn what_is_rounded_comes_back_within_the_bound(
        values in prop::collection::vec(-1.0_f32..1.0, 512),
        magnitude in -12_i32..10,
        shift in prop::sample::select(vec![0.0_f32, 1.0, -1.0, 0.3]),
        zeroes in 0_usize..4,
    ) {
        let mut src: Vec<f32> = values.iter().map(|x| (x + shift) * 2.0_f32.powi(magnitude)).collect();
        src[..64 * zeroes].fill(0.0);
        for dtype in ALL {
            let mut bytes = vec![7];
            quantize(dtype, &src, &mut bytes);
            prop_assert_eq!(Some(bytes.len() - 1), dtype.bytes_for(src.len()));
            assert_close(dtype, &src, &expand(dtype, &bytes[1..]), 1.0);
        }
    }

    /// Quantizing a dequantized block yields the same block, or at least the same values.
    #[test]
    fn rounding_twice_is_rounding_once(values in prop::collection::vec(-1.0_f32..1.0, 256)) {
        for dtype in [DType::F32, DType::F16, DType::BF16, DType::Q8_0, DType::Q4_0, DType::Q5_0] {
            let (mut once, mut twice) = (Vec::new(), Vec::new());
            quantize(dtype, &values, &mut once);
            let stored = expand(dtype, &once);
            quantize(dtype, &stored, &mut twice);
            let again = expand(dtype, &twice);
            for (x, y) in stored.iter().zip(&again) {
                // The f16 scale of the second quantization may differ in its last bit.
                prop_assert!((x - y).abs() <= x.abs() / 1024.0, "{}: {} {}", dtype, x, y);
            }
        }
    }

    /// Integers, scales and minima yield the values; in formats with minima the integers are not negative.
    #[test]
    fn groups_give_the_values(bytes in prop::collection::vec(any::<u8>(), 210 * 4)) {
        for dtype in ALL {
            let bytes = &bytes[..bytes.len() / dtype.block_bytes() * dtype.block_bytes()];
            let mut values = Vec::new();
            groups(dtype, bytes, |QuantGroup { quants, scales, min }| {
                values.extend(quants.iter().enumerate().map(|(i, q)| scales[i / 16] * f32::from(*q) + min));
                assert!(min == 0.0 || quants.iter().all(|q| *q >= 0), "{dtype}");
            });
            if dtype.is_quantized() {
                let expected = expand(dtype, bytes);
                prop_assert_eq!(values.len(), expected.len());
                for (value, expected) in values.iter().zip(&expected) {
                    prop_assert!(value == expected || (value.is_nan() && expected.is_nan()), "{}", dtype);
                }
            } else {
                prop_assert!(values.is_empty());
            }
        }
    }

    #[test]
    fn any_bytes_expand_without_panic(bytes in prop::collection::vec(any::<u8>(), 210 * 4)) {
        for dtype in ALL {
            let len = bytes.len() / dtype.block_bytes() * dtype.block_bytes();
            expand(dtype, &bytes[..len]);
        }
    }
}

#[test]
fn non_finite_and_extreme_values_do_not_panic() {
    for x in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN_POSITIVE / 2.0, 0.0, -0.0] {
        let mut src = vec![0.5; 256];
        src[77] = x;
        for dtype in ALL {
            for src in [&src, &vec![x; 256]] {
                let mut bytes = Vec::new();
                quantize(dtype, src, &mut bytes);
                expand(dtype, &bytes);
            }
        }
    }
    for dtype in ALL {
        let mut bytes = Vec::new();
        quantize(dtype, &[0.0; 256], &mut bytes);
        assert!(expand(dtype, &bytes).iter().all(|x| *x == 0.0), "{dtype}");
    }
}

#[test]
fn the_story_model_is_the_same_in_every_file() {
    let fable = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/fable");
    let exact = SafetensorsFolder::open(&fable).unwrap();
    let mut names = exact.names();
    names.sort();
    let mut met = Vec::new();
    for file in ["f16", "q4_0", "q8_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K_M", "Q5_K_M", "Q6_K"] {
        let gguf = open(file);
        let mut in_file: Vec<String> = gguf.names();
        in_file.sort();
        assert_eq!(in_file, names, "{file}");
        for name in &names {
            let (ours, stored) = (exact.require(name).unwrap(), gguf.require(name).unwrap());
            assert_eq!(ours.shape, stored.shape, "{file} {name}");
            let (src, out) = (ours.to_f32(), stored.to_f32());
            // GGML's search for scales may exceed the bound of plain rounding if that reduces the total error.
            let slack = if matches!(stored.dtype, DType::Q4_K | DType::Q5_K | DType::Q6_K) { 2.5 } else { 1.0 };
            assert_close(stored.dtype, &src, &out, slack);
            let power: f32 = src.iter().map(|x| x * x).sum();
            let error: f32 = src.iter().zip(&out).map(|(x, y)| (x - y) * (x - y)).sum();
            let limit = match stored.dtype {
                DType::F32 => 0.0,
                DType::F16 | DType::BF16 => 1e-6,
                DType::Q8_0 | DType::Q6_K => 1e-3,
                DType::Q5_0 | DType::Q5_1 | DType::Q5_K => 4e-3,
                _ => 1.5e-2,
            };
            assert!(error <= limit * power, "{file} {name} {}: {}", stored.dtype, error / power);
            met.push(stored.dtype);
        }
    }
    for dtype in ALL {
        assert!(met.contains(&dtype) || dtype == DType::BF16, "no file contains {dtype}");
    }
}

/// The plain formats are rounded like those of the files' writer, byte for byte.
#[test]
fn plain_formats_round_as_ggml_does() {
    let fable = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/fable");
    let exact = SafetensorsFolder::open(&fable).unwrap();
    let mut compared = 0;
    for file in ["q4_0", "q8_0", "Q5_0", "Q4_1", "Q5_1"] {
        let gguf = open(file);
        for name in exact.names() {
            let stored = gguf.require(&name).unwrap();
            if !stored.dtype.is_quantized() || stored.dtype.block_len() != 32 {
                continue;
            }
            let mut bytes = Vec::new();
            quantize(stored.dtype, &exact.require(&name).unwrap().to_f32(), &mut bytes);
            assert!(bytes == stored.data, "{file} {name} {}", stored.dtype);
            compared += 1;
        }
    }
    assert!(compared >= 5 * 21, "{compared}");
}

/// Precondition of the test above: the files store query rows in another order than the hub.
#[test]
fn the_files_own_name_gives_the_files_own_order() {
    let gguf = open("f16");
    let raw = gguf.require("blk.0.attn_q.weight").unwrap();
    let hub = gguf.require("model.layers.0.self_attn.q_proj.weight").unwrap();
    assert_ne!(raw.data, hub.data);
    assert_eq!(raw.rows(1..2), hub.rows(32..33));
    let norm = "model.layers.0.input_layernorm.weight";
    assert_eq!(gguf.require(norm).unwrap().data, gguf.require("blk.0.attn_norm.weight").unwrap().data);
}
