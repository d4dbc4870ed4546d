//! Packed weights equal the file's values within the bound of each layout, wherever a matrix is sharded.

#![forbid(unsafe_code)]

use super::*;
use crate::graph::{WeightRole, WeightSlice};
use crate::weights::MemorySource;

const BLOCKS: [DType; 8] =
    [DType::Q4_0, DType::Q4_1, DType::Q5_0, DType::Q5_1, DType::Q8_0, DType::Q4_K, DType::Q5_K, DType::Q6_K];

/// Bytes of a matrix in random blocks whose scales and minima are ordinary numbers.
fn blocks(dtype: DType, elements: usize, seed: u64) -> Vec<u8> {
    let mut state = seed;
    let mut floats = Vec::with_capacity(elements);
    for i in 0..elements {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        // Groups of different sizes, some far from zero.
        let size = 0.01 * ((i / 16 % 5) as f32 + 0.2);
        floats.push(((state >> 40) as f32 / (1 << 23) as f32 - 1.0) * size + if i / 64 % 3 == 1 { 0.3 } else { 0.0 });
    }
    let mut bytes = Vec::new();
    convert::quantize(dtype, &floats, &mut bytes);
    bytes
}

fn form_of(dtype: DType) -> WeightLayout {
    let elem = match dtype {
        DType::Q4_0 | DType::Q4_1 | DType::Q4_K => ElemType::I4,
        _ => ElemType::I8,
    };
    let has_offsets = matches!(dtype, DType::Q4_1 | DType::Q4_K | DType::Q5_1 | DType::Q5_K);
    WeightLayout::Groups { elem, has_offsets }
}

fn weight(dtype: DType, shape: [usize; 2], slice: Option<WeightSlice>) -> Weight {
    Weight { name: "w".into(), shape: shape.to_vec(), dtype, role: WeightRole::Matrix, slice }
}

/// The three sections of a packed weight.
fn packed(source: &MemorySource, weight: &Weight, form: WeightLayout, elem: ElemType) -> [Vec<u8>; 3] {
    let mut all = [const { Vec::new() }; 3];
    let mut write = |stretch: WeightSection, at: usize, bytes: Vec<u8>| {
        let all: &mut Vec<u8> = &mut all[stretch as usize];
        assert_eq!(all.len(), at, "pieces follow each other");
        all.extend(bytes);
        Ok(())
    };
    pack(source, weight, form, elem, &mut write).unwrap();
    all
}

fn source(dtype: DType, shape: [usize; 2], bytes: Vec<u8>) -> MemorySource {
    let mut source = MemorySource::new();
    source.insert("w", dtype, &shape, bytes).unwrap();
    source
}

/// Values of groups as the card's product computes them, in the element type of the activations: `[k, n]`.
fn read_back(
    [values, scales, offsets]: &[Vec<u8>; 3],
    form: WeightLayout,
    elem: ElemType,
    [n, k]: [usize; 2],
) -> Vec<f32> {
    let WeightLayout::Groups { elem: quants, has_offsets } = form else { unreachable!("groups") };
    let half = |bytes: &[u8], i: usize| {
        let raw = [bytes[2 * i], bytes[2 * i + 1]];
        if elem == ElemType::BF16 { bf16::from_le_bytes(raw).to_f32() } else { f16::from_le_bytes(raw).to_f32() }
    };
    let quant = |place: usize| match quants {
        ElemType::I4 => f32::from((values[place / 2] << (4 - 4 * (place % 2))).cast_signed() >> 4),
        _ => f32::from(values[place].cast_signed()),
    };
    let element = |place: usize| {
        let group = place / n / GROUP * n + place % n;
        let offset = if has_offsets { half(offsets, group) } else { 0.0 };
        narrow(narrow(quant(place) + offset, elem) * half(scales, group), elem)
    };
    (0..k * n).map(element).collect()
}

#[test]
fn groups_give_the_files_values_within_their_bounds() {
    for (seed, dtype) in (1..).zip(BLOCKS) {
        let shape @ [n, k] = [6, 768];
        let bytes = blocks(dtype, n * k, seed);
        let mut expected = vec![0.0; n * k];
        convert::dequantize(dtype, &bytes, &mut expected);
        let mut stored = Vec::new();
        convert::groups(dtype, &bytes, |group| stored.push(group));
        let source = source(dtype, shape, bytes);
        for (elem, unit) in [(ElemType::F16, 1.0 / 2048.0), (ElemType::BF16, 1.0 / 256.0)] {
            let form = form_of(dtype);
            let got = read_back(&packed(&source, &weight(dtype, shape, None), form, elem), form, elem, shape);
            for (row, column) in (0..n).flat_map(|row| (0..k).map(move |column| (row, column))) {
                let (got, expected) = (got[column * n + row], expected[row * k + column]);
                let group = stored[(row * k + column) / GROUP];
                let label = format!("seed {seed}, {dtype} in {elem:?}, [{row}, {column}]: {got} for {expected}");
                if elem == ElemType::F16 && matches!(dtype, DType::Q4_0 | DType::Q5_0 | DType::Q8_0) {
                    assert_eq!(got, narrow(expected, elem), "{label}");
                    continue;
                }
                // Scale, offset, their sum and their product are each rounded once.
                let [a, b] = group.scales.map(f32::abs);
                let largest =
                    expected.abs().max(group.min.abs()).max(16.0 * f32::from(u8::from(dtype != DType::Q6_K)) * a);
                let steps = if dtype == DType::Q6_K && a != b {
                    let differ = group.scales[0] * group.scales[1] < 0.0;
                    a.max(b) / if differ { 4.0 } else { 8.0 }
                } else {
                    0.0
                };
                assert!((got - expected).abs() <= 1.02 * steps + 3.0 * unit * largest + 1e-6, "{label}");
            }
        }
    }
}

#[test]
fn channels_are_within_half_a_step() {
    for (seed, dtype) in (11..).zip(BLOCKS) {
        let shape @ [n, k] = [5, 512];
        let bytes = blocks(dtype, n * k, seed);
        let mut expected = vec![0.0; n * k];
        convert::dequantize(dtype, &bytes, &mut expected);
        let source = source(dtype, shape, bytes);
        let form = WeightLayout::Channels { in_tiles: false };
        let [values, scales, _] = packed(&source, &weight(dtype, shape, None), form, ElemType::F16);
        for (i, expected) in expected.iter().enumerate() {
            let scale = f32::from_le_bytes(scales[4 * (i / k)..][..4].try_into().unwrap());
            let got = f32::from(values[i].cast_signed()) * scale;
            assert!((got - expected).abs() <= 0.501 * scale, "seed {seed}, {dtype}, {i}: {got} for {expected}");
        }
        assert_eq!((values.len(), scales.len()), (n * k, 4 * n));
    }
}

/// A rank's shard equals the same part of the whole matrix.
#[test]
fn parts_of_a_matrix_are_packed_like_matrices() {
    for (seed, dtype) in (21..).zip(BLOCKS) {
        let [n, k] = [4, 1024];
        let bytes = blocks(dtype, n * k, seed);
        let whole = source(dtype, [n, k], bytes.clone());
        let row_bytes = bytes.len() / n;
        for form in [WeightLayout::Rows, form_of(dtype), WeightLayout::Channels { in_tiles: false }] {
            let columns = WeightSlice { dim: 1, start: 256, of: k };
            let cut: Vec<u8> =
                bytes.chunks(row_bytes).flat_map(|row| row[row_bytes / 4..row_bytes / 4 * 3].to_vec()).collect();
            let got = packed(&whole, &weight(dtype, [n, 512], Some(columns)), form, ElemType::F16);
            let own = source(dtype, [n, 512], cut);
            assert!(got == packed(&own, &weight(dtype, [n, 512], None), form, ElemType::F16), "{dtype}, {form:?}");
            let rows = WeightSlice { dim: 0, start: 1, of: n };
            let got = packed(&whole, &weight(dtype, [2, k], Some(rows)), form, ElemType::F16);
            let own = source(dtype, [2, k], bytes[row_bytes..3 * row_bytes].to_vec());
            assert!(got == packed(&own, &weight(dtype, [2, k], None), form, ElemType::F16), "{dtype}, {form:?}");
        }
    }
}

/// Steps of zero, minima far larger than the step, scales that are NaN or infinite, and values out of the range of f16.
#[test]
fn odd_groups_stay_what_they_are() {
    let group = |scale: f32, min: f32| QuantGroup { quants: [3; GROUP], scales: [scale; 2], min };
    for quants in [ElemType::I4, ElemType::I8] {
        for (stored, expected) in [
            (group(0.0, 0.0), 0.0),
            (group(0.0, -0.75), -0.75),
            (group(1e-6, 1.0), 1.0),
            (group(1e-9, 0.0), 0.0),
            (group(0.5, -1.0), 0.5),
        ] {
            let Packed { quants, scale, offset } = Packed::new(&stored, quants, true, ElemType::F16);
            let got = (f32::from(quants[0]) + offset) * scale;
            assert!((got - expected).abs() <= 1e-5 && scale.is_finite() && offset.is_finite(), "{stored:?}: {got}");
        }
        for bad in [f32::NAN, f32::INFINITY] {
            let packed = Packed::new(&group(bad, 0.5), quants, true, ElemType::F16);
            assert!(!((f32::from(packed.quants[0]) + packed.offset) * packed.scale).is_finite());
            let packed = Packed::new(&group(bad, 0.0), quants, false, ElemType::F16);
            assert!(!(f32::from(packed.quants[0]) * packed.scale).is_finite());
        }
    }
    assert!(fits_f16(&group(2e4, 0.0)) && !fits_f16(&group(3e4, 0.0)) && !fits_f16(&group(1e4, 6e4)));
    let mut bytes = f16::from_f32(6e4).to_le_bytes().to_vec();
    bytes.extend([100; 32]);
    let source = source(DType::Q8_0, [1, 32], bytes);
    for form in [WeightLayout::Rows, form_of(DType::Q8_0)] {
        let mut write = |_: WeightSection, _: usize, _: Vec<u8>| Ok(());
        let error = pack(&source, &weight(DType::Q8_0, [1, 32], None), form, ElemType::F16, &mut write).unwrap_err();
        assert!(error.to_string().contains("tensor w has values beyond f16's 65,504"), "{error}");
        pack(&source, &weight(DType::Q8_0, [1, 32], None), form, ElemType::BF16, &mut write).unwrap();
    }
}
