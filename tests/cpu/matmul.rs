//! Tests that a product of rows with packed weights is right within a stated bound, and that a row's bits depend only
//! on it.
//!
//! The bits do not depend on the number of rows, the tile, the range of panels or the number of threads.

use ascend_llm::device::cpu::Isa;
use ascend_llm::device::cpu::kernels::cast::round_bf16_row;
use ascend_llm::device::cpu::kernels::float_rows::{FloatRows, columns_of};
use ascend_llm::device::cpu::kernels::matmul::{matmul_bf16, matmul_f32, matmul_q8};
use ascend_llm::device::cpu::kernels::q8_rows::{QuantLayout, QuantRows};
use ascend_llm::device::cpu::kernels::quantize::quantize_rows;
use ascend_llm::device::cpu::memory::{Partition, Tile};
use ascend_llm::device::cpu::thread_pool::ThreadPool;
use ascend_llm::device::cpu::weights::pack::{PANEL, PackedMatrix};
use ascend_llm::weights::{DType, convert};
use half::{bf16, f16};

const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];
const SMALL_BLOCKS: [DType; 5] = [DType::Q8_0, DType::Q4_0, DType::Q4_1, DType::Q5_0, DType::Q5_1];
const SUPER_BLOCKS: [DType; 3] = [DType::Q4_K, DType::Q5_K, DType::Q6_K];

/// `SplitMix64` generator; each call states its seed.
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn float(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    fn floats(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.float()).collect()
    }

    /// Returns a weight in the file's format: all bit patterns of the quants and integer scales, f16 scales of both
    /// signs.
    fn weight(&mut self, dtype: DType, n: usize, k: usize) -> Vec<u8> {
        let mut out = Vec::new();
        for _ in 0..n * k / dtype.block_len() {
            let start = out.len();
            match dtype {
                DType::F32 => out.extend(self.float().to_le_bytes()),
                DType::F16 => out.extend(f16::from_f32(self.float()).to_le_bytes()),
                DType::BF16 => out.extend(bf16::from_f32(self.float()).to_le_bytes()),
                _ => out.extend((0..dtype.block_bytes()).map(|_| (self.next() >> 56) as u8)),
            }
            let halves: &[usize] = match dtype {
                DType::F32 | DType::F16 | DType::BF16 => &[],
                DType::Q8_0 | DType::Q4_0 | DType::Q5_0 => &[0],
                DType::Q6_K => &[208],
                _ => &[0, 2],
            };
            for at in halves {
                out[start + at..start + at + 2].copy_from_slice(&f16::from_f32(self.float() * 0.01).to_le_bytes());
            }
        }
        out
    }
}

/// Returns the values of one row by the format's definition (ggml `dequantize_row_*`); it shares no code with the
/// packing.
fn dequantize(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let half = |b: &[u8], at: usize| f16::from_le_bytes([b[at], b[at + 1]]).to_f32();
    let mut out = Vec::new();
    for b in bytes.chunks_exact(dtype.block_bytes()) {
        let mut y = vec![0.0f32; dtype.block_len()];
        match dtype {
            DType::F32 => y[0] = f32::from_le_bytes([b[0], b[1], b[2], b[3]]),
            DType::F16 => y[0] = half(b, 0),
            DType::BF16 => y[0] = bf16::from_le_bytes([b[0], b[1]]).to_f32(),
            DType::Q8_0 => (0..32).for_each(|i| y[i] = half(b, 0) * f32::from(b[2 + i] as i8)),
            DType::Q4_0 | DType::Q4_1 | DType::Q5_0 | DType::Q5_1 => {
                let (min, qh_at) = if matches!(dtype, DType::Q4_1 | DType::Q5_1) { (half(b, 2), 4) } else { (0.0, 2) };
                let fifth = matches!(dtype, DType::Q5_0 | DType::Q5_1);
                let qh =
                    if fifth { u32::from_le_bytes([b[qh_at], b[qh_at + 1], b[qh_at + 2], b[qh_at + 3]]) } else { 0 };
                let qs = &b[qh_at + 4 * usize::from(fifth)..];
                let offset = match dtype {
                    DType::Q4_0 => 8,
                    DType::Q5_0 => 16,
                    _ => 0,
                };
                for j in 0..16 {
                    let lo = i32::from(qs[j] & 15) | ((qh >> j & 1) << 4) as i32;
                    let hi = i32::from(qs[j] >> 4) | ((qh >> (j + 16) & 1) << 4) as i32;
                    y[j] = half(b, 0) * (lo - offset) as f32 + min;
                    y[j + 16] = half(b, 0) * (hi - offset) as f32 + min;
                }
            }
            DType::Q4_K | DType::Q5_K => {
                let (d, dmin, packed) = (half(b, 0), half(b, 2), &b[4..16]);
                let scale_min = |j: usize| {
                    if j < 4 {
                        (packed[j] & 63, packed[j + 4] & 63)
                    } else {
                        (packed[j + 4] & 15 | packed[j - 4] >> 6 << 4, packed[j + 4] >> 4 | packed[j] >> 6 << 4)
                    }
                };
                let (qh, qs) = if dtype == DType::Q5_K { (Some(&b[16..48]), &b[48..]) } else { (None, &b[16..]) };
                for pair in 0..4 {
                    for l in 0..32 {
                        for (part, nibble) in [qs[32 * pair + l] & 15, qs[32 * pair + l] >> 4].into_iter().enumerate() {
                            let sub = 2 * pair + part;
                            let q = nibble + qh.map_or(0, |qh| (qh[l] >> sub & 1) * 16);
                            let (sc, m) = scale_min(sub);
                            y[32 * sub + l] = d * f32::from(sc) * f32::from(q) - dmin * f32::from(m);
                        }
                    }
                }
            }
            DType::Q6_K => {
                for n in 0..2 {
                    let (ql, qh, sc) = (&b[64 * n..], &b[128 + 32 * n..], &b[192 + 8 * n..]);
                    for l in 0..32 {
                        let q = [
                            ql[l] & 15 | (qh[l] & 3) << 4,
                            ql[l + 32] & 15 | (qh[l] >> 2 & 3) << 4,
                            ql[l] >> 4 | (qh[l] >> 4 & 3) << 4,
                            ql[l + 32] >> 4 | (qh[l] >> 6) << 4,
                        ];
                        for (i, q) in q.into_iter().enumerate() {
                            let scale = f32::from(sc[l / 16 + 2 * i] as i8);
                            y[128 * n + 32 * i + l] = half(b, 208) * scale * f32::from(i16::from(q) - 32);
                        }
                    }
                }
            }
            _ => unreachable!("this type has no definition in the test"),
        }
        out.extend(y);
    }
    out
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Rows {
    F32,
    BF16,
    Int8,
}

/// Computes the whole product with all workers of a thread pool, each over its own panels.
fn product(threads: &ThreadPool, isa: Isa, kind: Rows, x: &[f32], w: &PackedMatrix, bias: Option<&[f32]>) -> Vec<f32> {
    let rows = x.len() / w.k();
    let layout = QuantLayout::new(w.k());
    let mut quants = vec![0; rows * layout.row_bytes()];
    if kind == Rows::Int8 {
        quantize_rows(isa, layout, x, &mut quants);
    }
    let mut halves = vec![0; x.len()];
    round_bf16_row(isa, x, &mut halves);
    let mut out = vec![f32::NAN; rows * w.n()];
    let parts = Partition::columns(&mut out, w.n(), threads.parts(), PANEL);
    threads.run_parallel(&|worker| {
        let panels = worker.span(w.panels(), 1);
        let mut tile = parts.claim(worker.index());
        match kind {
            Rows::F32 => matmul_f32(isa, FloatRows::new(x, w.k(), w.k()), w, bias, panels, &mut tile),
            Rows::BF16 => matmul_bf16(isa, FloatRows::new(&halves, w.k(), w.k()), w, bias, panels, &mut tile),
            Rows::Int8 => matmul_q8(isa, QuantRows::new(layout, &quants), w, bias, panels, &mut tile),
        }
    });
    out
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Returns all combinations that a machine supports: (dtype, k, rows).
fn combinations() -> Vec<(DType, usize, Rows)> {
    let mut all = Vec::new();
    for dtype in FLOATS {
        let depths = [1, 48, 56, 99, 300, 2100];
        all.extend(depths.into_iter().flat_map(|k| [(dtype, k, Rows::F32), (dtype, k, Rows::BF16)]));
    }
    for dtype in SMALL_BLOCKS {
        all.extend([32, 96, 576].into_iter().flat_map(|k| [(dtype, k, Rows::F32), (dtype, k, Rows::Int8)]));
    }
    for dtype in SUPER_BLOCKS {
        all.extend([256, 768].into_iter().flat_map(|k| [(dtype, k, Rows::F32), (dtype, k, Rows::Int8)]));
    }
    all
}

#[test]
fn a_row_has_the_same_bits_in_any_batch_tile_panel_range_and_thread_pool() {
    let teams = [1, 2, 3].map(|threads| ThreadPool::new(Some(threads)).unwrap());
    for (dtype, k, kind) in combinations() {
        let n = 167;
        let mut noise = Noise(k as u64);
        let w = PackedMatrix::pack(&teams[1], dtype, n, k, &noise.weight(dtype, n, k)).unwrap();
        let (x, bias) = (noise.floats(504 * k), noise.floats(n));
        for &isa in Isa::available() {
            // Scalar kernels have one loop for all shapes, so fewer sizes suffice.
            let batches: Vec<usize> = match isa {
                Isa::Plain => vec![1, 5, 20],
                _ => (1..=40).chain([504]).collect(),
            };
            let most = batches[batches.len() - 1];
            let reference = product(&teams[0], isa, kind, &x[..most * k], &w, Some(&bias));
            for &rows in &batches {
                // From the first and from the last rows, so that a row has different positions in its tile.
                for first in [0, most - rows] {
                    let part = &x[first * k..(first + rows) * k];
                    let expected = bits(&reference[first * n..(first + rows) * n]);
                    let threads = &teams[rows % 3];
                    let got = bits(&product(threads, isa, kind, part, &w, Some(&bias)));
                    assert!(got == expected, "{dtype} k {k} {kind:?} {isa:?}: the bits of rows {first}+{rows} differ");
                }
            }
            for threads in &teams {
                let got = bits(&product(threads, isa, kind, &x[..13 * k], &w, Some(&bias)));
                assert!(
                    got == bits(&reference[..13 * n])[..],
                    "{dtype} k {k} {kind:?} {isa:?}: {} threads",
                    threads.count()
                );
            }
        }
    }
}

/// Compares products with an f64 oracle over dequantized weights, within a bound on the rounding errors.
///
/// f32 rows: at most one rounding for each of the K additions and one for the weight, 2^-24 each. int8 rows: exact
/// against the quantized activations, up to two roundings for each block and half of 16, and one for its minimum.
#[test]
fn products_agree_with_the_dequantized_oracle() {
    let threads = ThreadPool::new(Some(2)).unwrap();
    for (dtype, k, kind) in combinations() {
        let (n, rows) = (37, 15);
        let mut noise = Noise(1000 + k as u64);
        let data = noise.weight(dtype, n, k);
        let w = PackedMatrix::pack(&threads, dtype, n, k, &data).unwrap();
        let values: Vec<Vec<f32>> = data.chunks_exact(data.len() / n).map(|row| dequantize(dtype, row)).collect();
        let (x, bias) = (noise.floats(rows * k), noise.floats(n));
        for &isa in Isa::available() {
            let got = product(&threads, isa, kind, &x, &w, Some(&bias));
            // The input of the kernel: for int8 the quantized activations, as f64.
            let seen: Vec<f64> = match kind {
                Rows::F32 => x.iter().map(|&x| f64::from(x)).collect(),
                Rows::BF16 => x.iter().map(|&x| bf16::from_f32(x).to_f64()).collect(),
                Rows::Int8 => x
                    .chunks_exact(32)
                    .flat_map(|block| {
                        let amax = block.iter().fold(0.0f32, |max, x| max.max(x.abs()));
                        block
                            .iter()
                            .map(move |x| f64::from((x * (127.0 / amax)).round_ties_even()) * f64::from(amax / 127.0))
                    })
                    .collect(),
            };
            for row in 0..rows {
                for column in 0..n {
                    let (mut sum, mut size) = (f64::from(bias[column]), f64::from(bias[column].abs()));
                    for (x, w) in seen[row * k..(row + 1) * k].iter().zip(&values[column]) {
                        sum += x * f64::from(*w);
                        size += (x * f64::from(*w)).abs();
                        if kind == Rows::Int8 && k >= 256 {
                            // A minimum may cancel against its quants: count both.
                            size += x.abs() * 0.7;
                        }
                    }
                    let steps = if kind == Rows::Int8 { k / 32 * 4 + 8 } else { k + 3 };
                    let bound = size * steps as f64 / f64::from(1 << 24);
                    let error = (f64::from(got[row * n + column]) - sum).abs();
                    assert!(
                        error <= bound,
                        "{dtype} k {k} {kind:?} {isa:?} [{row}][{column}]: error {error} exceeds the bound {bound}"
                    );
                }
            }
        }
    }
}

/// Returns a weight of one row and `k` = 256 with scales of 1 and minima of 0; `quants` returns the bytes that contain
/// quants.
fn unscaled(dtype: DType, mut quants: impl FnMut() -> u8) -> Vec<u8> {
    let mut out = Vec::new();
    for _ in 0..256 / dtype.block_len() {
        let mut block: Vec<u8> = (0..dtype.block_bytes()).map(|_| quants()).collect();
        let mut put = |at: usize, bytes: &[u8]| block[at..at + bytes.len()].copy_from_slice(bytes);
        let (one, zero) = (f16::ONE.to_le_bytes(), [0, 0]);
        match dtype {
            DType::Q8_0 | DType::Q4_0 | DType::Q5_0 => put(0, &one),
            DType::Q6_K => {
                put(192, &[1; 16]);
                put(208, &one);
            }
            _ => {
                put(0, &one);
                put(2, &zero);
                if dtype.block_len() == 256 {
                    put(4, &[1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1]);
                }
            }
        }
        out.extend(block);
    }
    out
}

/// Checks that products with scales of one and without minima are exact, even for the largest weights and activations.
///
/// Nothing is rounded, so all paths must return the integers. The intermediate sums exceed 16 bits: 255 · 127 · 2 (two
/// products of 8-bit weights as stored), five products of 6-bit weights, and nine of 5-bit weights.
#[test]
fn integer_sums_are_exact_at_the_extremes() {
    type Signs = fn(usize) -> f32;
    let threads = ThreadPool::new(Some(1)).unwrap();
    let signs: [(&str, Signs); 4] = [
        ("all up", |_| 127.0),
        ("all down", |_| -127.0),
        ("turns", |k| if k % 2 == 0 { 127.0 } else { -127.0 }),
        ("pairs", |k| if k % 4 < 2 { 127.0 } else { -127.0 }),
    ];
    for dtype in SMALL_BLOCKS.into_iter().chain(SUPER_BLOCKS) {
        let mut noise = Noise(9);
        // As 8-bit values 0x80 is -128 and 0x7f is 127; 0xff and 0 are the extremes of all other formats.
        for (pattern, fill) in [("-128", 0x80), ("127", 0x7f), ("ones", 0xff), ("zeros", 0), ("both ends", 1)] {
            let data = unscaled(dtype, || match fill {
                1 => [0x80, 0x7f, 0xff, 0][usize::from((noise.next() >> 62) as u8)],
                _ => fill,
            });
            let w = PackedMatrix::pack(&threads, dtype, 1, 256, &data).unwrap();
            let values = dequantize(dtype, &data);
            for (name, sign) in signs {
                // One row, and as many as the tallest tile.
                let row: Vec<f32> = (0..256).map(sign).collect();
                let exact: f64 = row.iter().zip(&values).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum();
                for &isa in Isa::available() {
                    for rows in [1, 13] {
                        let got = product(&threads, isa, Rows::Int8, &row.repeat(rows), &w, None);
                        assert!(
                            got.iter().all(|got| f64::from(*got) == exact),
                            "{dtype} {pattern}, {name}, {isa:?}, {rows} rows: {got:?} instead of {exact}"
                        );
                    }
                }
            }
        }
    }
}

/// Compares the bits of paths with fused multiply-adds.
///
/// The library does not guarantee this, but these paths perform the same operations in the same order: a difference is
/// a bug in one of them.
#[test]
fn paths_with_fused_additions_give_the_same_bits() {
    let threads = ThreadPool::new(Some(2)).unwrap();
    for (dtype, k, kind) in combinations() {
        let (n, rows) = (41, 21);
        let mut noise = Noise(10 + k as u64);
        let w = PackedMatrix::pack(&threads, dtype, n, k, &noise.weight(dtype, n, k)).unwrap();
        let (x, bias) = (noise.floats(rows * k), noise.floats(n));
        let fused: Vec<Isa> = Isa::available().iter().copied().filter(|isa| *isa != Isa::Plain).collect();
        for pair in fused.windows(2) {
            if pair[1] == Isa::Avx512Bf16 && kind == Rows::BF16 && dtype == DType::BF16 {
                continue; // this path adds pairs of products, the second product of a pair first
            }
            let [a, b] = [pair[0], pair[1]].map(|isa| bits(&product(&threads, isa, kind, &x, &w, Some(&bias))));
            assert!(a == b, "{dtype} k {k} {kind:?}: {pair:?}");
        }
    }
}

#[test]
fn dequantized_rows_are_those_of_the_source() {
    let threads = ThreadPool::new(Some(3)).unwrap();
    for (dtype, k, _) in combinations() {
        let n = 35;
        let data = Noise(7).weight(dtype, n, k);
        let w = PackedMatrix::pack(&threads, dtype, n, k, &data).unwrap();
        for (row, source) in data.chunks_exact(data.len() / n).enumerate() {
            let mut got = vec![f32::NAN; k];
            w.row_f32(row, &mut got);
            assert!(got == dequantize(dtype, source), "{dtype} k {k} row {row}");
            let mut converted = vec![f32::NAN; k];
            convert::dequantize(dtype, source, &mut converted);
            assert!(got == converted, "{dtype} k {k} row {row}");
        }
    }
}

/// Checks that products with unit rows return exactly the weights of the source.
///
/// This reads single weights back through the fast kernels.
#[test]
fn f32_bodies_see_exactly_the_values_of_the_source() {
    let threads = ThreadPool::new(Some(1)).unwrap();
    for (dtype, k, _) in combinations() {
        let n = 19;
        let data = Noise(8).weight(dtype, n, k);
        let w = PackedMatrix::pack(&threads, dtype, n, k, &data).unwrap();
        let values: Vec<Vec<f32>> = data.chunks_exact(data.len() / n).map(|row| dequantize(dtype, row)).collect();
        let mut x = vec![0.0; k * k];
        (0..k).for_each(|i| x[i * k + i] = 1.0);
        for &isa in Isa::available() {
            for kind in [Rows::F32, Rows::BF16] {
                let got = product(&threads, isa, kind, &x, &w, None);
                for (i, row) in got.chunks_exact(n).enumerate() {
                    assert!(row.iter().zip(&values).all(|(got, row)| *got == row[i]), "{dtype} k {k} {isa:?} at {i}");
                }
            }
        }
    }
}

#[test]
fn a_non_finite_activation_spoils_its_own_row_only() {
    let threads = ThreadPool::new(Some(2)).unwrap();
    let kinds =
        [(DType::F32, Rows::F32), (DType::BF16, Rows::BF16), (DType::Q8_0, Rows::Int8), (DType::Q4_1, Rows::Int8)];
    for (dtype, kind) in kinds {
        let w = PackedMatrix::pack(&threads, dtype, 33, 64, &Noise(3).weight(dtype, 33, 64)).unwrap();
        for &isa in Isa::available() {
            let mut x = Noise(4).floats(15 * 64);
            let clean = product(&threads, isa, kind, &x, &w, None);
            x[7 * 64 + 5] = f32::NAN;
            let got = product(&threads, isa, kind, &x, &w, None);
            for row in 0..15 {
                let part = row * 33..(row + 1) * 33;
                if row == 7 {
                    assert!(got[part].iter().all(|value| value.is_nan()), "{isa:?}");
                } else {
                    assert_eq!(got[part.clone()], clean[part], "{isa:?}");
                }
            }
        }
    }
}

#[test]
fn strided_rows_and_single_panels_work_alike() {
    let threads = ThreadPool::new(Some(1)).unwrap();
    let (n, k, stride) = (40, 48, 50);
    let w = PackedMatrix::pack(&threads, DType::BF16, n, k, &Noise(5).weight(DType::BF16, n, k)).unwrap();
    let padded = Noise(6).floats(6 * stride + k);
    let dense: Vec<f32> = (0..7).flat_map(|row| padded[row * stride..][..k].to_vec()).collect();
    for &isa in Isa::available() {
        let expected = product(&threads, isa, Rows::F32, &dense, &w, None);
        for panel in 0..w.panels() {
            let columns = columns_of(&w, &(panel..panel + 1));
            let mut out = vec![0.0; 7 * columns.len()];
            let mut tile = Tile::whole(&mut out, columns.len());
            matmul_f32(isa, FloatRows::new(&padded, k, stride), &w, None, panel..panel + 1, &mut tile);
            for row in 0..7 {
                assert_eq!(tile.row(row), &expected[row * n..][columns.clone()], "{isa:?}");
            }
        }
    }
}

#[test]
fn weights_of_wrong_size_are_refused() {
    let threads = ThreadPool::new(Some(1)).unwrap();
    for (dtype, n, k, bytes) in [
        (DType::Q8_0, 1, 33, 34),
        (DType::Q8_0, 2, 32, 34),
        (DType::F32, 0, 4, 0),
        (DType::F32, 4, 0, 0),
        (DType::Q4_K, 1, 128, 72),
    ] {
        let error = PackedMatrix::pack(&threads, dtype, n, k, &vec![0; bytes]).unwrap_err().to_string();
        assert!(error.contains(&format!("{n} × {k}")), "{error}");
    }
}
