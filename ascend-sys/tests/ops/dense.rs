//! The operations of a dense decoder equal their definitions, written here as plain loops.

use crate::common::{Rig, close, noise, rounded};
use ElemType::{BF16, F16, F32, I32, I64};
use ascend_sys::{ElemType, TensorDesc};

#[test]
fn linear_multiplies_by_stored_rows() {
    let rig = Rig::new();
    for elem in [F32, F16, BF16] {
        for (m, k, n) in [(1, 16, 32), (3, 33, 17), (5, 64, 48)] {
            let (x, w, b) = (noise(elem, m * k, 1), noise(elem, n * k, 2), noise(elem, n, 3));
            let want: Vec<f32> = (0..m * n)
                .map(|i| {
                    let products = (0..k).map(|j| f64::from(x[i / n * k + j]) * f64::from(w[i % n * k + j]));
                    #[allow(clippy::cast_possible_truncation)]
                    let sum = products.sum::<f64>() as f32;
                    sum
                })
                .collect();
            let biased: Vec<f32> = want.iter().enumerate().map(|(i, v)| v + b[i % n]).collect();
            let (x, w, b) = (rig.tensor(elem, &[m, k], &x), rig.tensor(elem, &[n, k], &w), rig.tensor(elem, &[n], &b));
            let out = rig.empty(elem, &[m, n]);
            rig.run(rig.ops.linear(&x.desc, &w.desc, None, &out.desc)).expect("linear");
            close(&out.values(), &want, elem);
            rig.run(rig.ops.linear(&x.desc, &w.desc, Some(&b.desc), &out.desc)).expect("with bias");
            close(&out.values(), &biased, elem);
        }
    }
}

/// The large product is one that two threads share.
#[test]
fn a_row_of_a_product_does_not_know_its_batch() {
    let rig = Rig::new();
    let (m, k, n) = (33, 300, 600);
    let (x, w) = (noise(BF16, m * k, 1), noise(BF16, n * k, 2));
    let weight = rig.tensor(BF16, &[n, k], &w);
    let product = |rows: &[f32]| {
        let x = rig.tensor(BF16, &[rows.len() / k, k], rows);
        let out = rig.empty(BF16, &[rows.len() / k, n]);
        rig.run(rig.ops.linear(&x.desc, &weight.desc, None, &out.desc)).expect("linear");
        out.bytes()
    };
    let alone: Vec<u8> = x.chunks(k).flat_map(product).collect();
    assert_eq!(product(&x), alone);
}

#[test]
fn tiled_weights_give_the_same_bits() {
    let rig = Rig::new();
    let (m, k, n) = (3, 40, 24);
    let (x, w) = (noise(F16, m * k, 1), noise(F16, n * k, 2));
    let (x, plain) = (rig.tensor(F16, &[m, k], &x), rig.tensor(F16, &[n, k], &w));
    let out = rig.empty(F16, &[m, n]);
    rig.run(rig.ops.linear(&x.desc, &plain.desc, None, &out.desc)).expect("plain");
    let want = out.bytes();

    let elements = rig.ops.tiled_elements(n, k, F16).expect("size");
    assert_eq!(elements, 32 * 48);
    let tiled = rig.buffer(elements * 2);
    tiled.write(0, &plain.bytes()).expect("write");
    rig.run(rig.ops.tile_weight(&TensorDesc::new(tiled.address(), F16, &[n, k]))).expect("tiling");
    let mut bytes = vec![0; elements * 2];
    tiled.read(0, &mut bytes).expect("read");
    // Row 17, column 20: second column of tiles, second row of tiles, row 1, column 4.
    let (tile_col, tile_row, row_tiles) = (1, 1, 2);
    let place = ((tile_col * row_tiles + tile_row) * 16 + 1) * 16 + 4;
    assert_eq!(bytes[place * 2..place * 2 + 2], plain.bytes()[(17 * k + 20) * 2..(17 * k + 20) * 2 + 2]);

    let other = rig.empty(F16, &[m, n]);
    let weight = TensorDesc::tiled(tiled.address(), F16, n, k);
    rig.run(rig.ops.linear(&x.desc, &weight, None, &other.desc)).expect("tiled");
    assert_eq!(other.bytes(), want);
    let bias = rig.empty(F16, &[n]);
    rig.ops.linear(&x.desc, &weight, Some(&bias.desc), &other.desc).expect_err("no bias with tiles");
}

fn norm_of(row: &[f32], gamma: &[f32], eps: f64) -> Vec<f32> {
    let mean = row.iter().map(|v| f64::from(*v) * f64::from(*v)).sum::<f64>() / row.len() as f64;
    #[allow(clippy::cast_possible_truncation)]
    row.iter().zip(gamma).map(|(v, g)| (f64::from(*v) / (mean + eps).sqrt() * f64::from(*g)) as f32).collect()
}

#[test]
fn norms_divide_by_the_root_mean_square() {
    let rig = Rig::new();
    for elem in [F32, F16, BF16] {
        let (t, h, eps) = (3, 33, 1e-5);
        let (a, b, g) = (noise(elem, t * h, 1), noise(elem, t * h, 2), noise(elem, h, 3));
        let sum = rounded(elem, &a.iter().zip(&b).map(|(a, b)| a + b).collect::<Vec<_>>());
        let normed = |x: &[f32]| x.chunks(h).flat_map(|row| norm_of(row, &g, eps)).collect::<Vec<_>>();
        let (x, y) = (rig.tensor(elem, &[t, h], &a), rig.tensor(elem, &[t, h], &b));
        let gamma = rig.tensor(elem, &[h], &g);
        let (out, rstd, total) = (rig.empty(elem, &[t, h]), rig.empty(F32, &[t, 1]), rig.empty(elem, &[t, h]));
        rig.run(rig.ops.rms_norm(&x.desc, &gamma.desc, eps, &out.desc, &rstd.desc)).expect("norm");
        close(&out.values(), &normed(&a), elem);
        rig.run(rig.ops.add_rms_norm(&x.desc, &y.desc, &gamma.desc, eps, &out.desc, &rstd.desc, &total.desc))
            .expect("add and norm");
        assert_eq!(total.values(), sum);
        close(&out.values(), &normed(&sum), elem);
    }
}

#[test]
fn heads_are_normed_through_views() {
    let rig = Rig::new();
    // Two heads of 16 within rows of 48: the keys of a fused projection.
    let (t, n, d) = (2, 2, 16);
    let rows = noise(F16, t * 48, 1);
    let gamma = noise(F16, d, 2);
    let fused = rig.tensor(F16, &[t, 48], &rows);
    let view = TensorDesc::view(fused.at(), F16, &[t, n, d], &[48, d, 1], 16, &[t, 48]);
    let gamma_tensor = rig.tensor(F16, &[d], &gamma);
    let (out, rstd) = (rig.empty(F16, &[t, n, d]), rig.empty(F32, &[t, n, 1]));
    rig.run(rig.ops.rms_norm(&view, &gamma_tensor.desc, 1e-6, &out.desc, &rstd.desc)).expect("norm");
    let heads = (0..t * n).flat_map(|i| norm_of(&rows[i / n * 48 + 16 + i % n * d..][..d], &gamma, 1e-6));
    close(&out.values(), &heads.collect::<Vec<_>>(), F16);
}

#[test]
fn rope_turns_halves_or_neighbours() {
    let rig = Rig::new();
    for elem in [F32, F16, BF16] {
        let (t, n, d) = (3, 2, 8);
        let (x, cos, sin) = (noise(elem, t * n * d, 1), noise(elem, t * d, 2), noise(elem, t * d, 3));
        let tensors =
            (rig.tensor(elem, &[t, n, d], &x), rig.tensor(elem, &[t, 1, d], &cos), rig.tensor(elem, &[t, 1, d], &sin));
        let out = rig.empty(elem, &[t, n, d]);
        for interleaved in [false, true] {
            let want: Vec<f32> = (0..t * n * d)
                .map(|i| {
                    let (row, e, angle) = (i / d * d, i % d, i / (n * d) * d + i % d);
                    let turned = match (interleaved, e < d / 2, e % 2) {
                        (false, true, _) => -x[row + e + d / 2],
                        (false, false, _) => x[row + e - d / 2],
                        (true, _, 0) => -x[row + e + 1],
                        (true, _, _) => x[row + e - 1],
                    };
                    x[i] * cos[angle] + turned * sin[angle]
                })
                .collect();
            rig.run(rig.ops.rope(&tensors.0.desc, &tensors.1.desc, &tensors.2.desc, interleaved, &out.desc))
                .expect("rope");
            close(&out.values(), &want, elem);
        }
    }
}

#[test]
fn element_wise_operations() {
    let rig = Rig::new();
    let silu = |v: f32| v / (1.0 + (-v).exp());
    let gelu = |v: f32| 0.5 * v * (1.0 + (0.797_884_6 * (v + 0.044_715 * v * v * v)).tanh());
    for elem in [F32, F16, BF16] {
        let (t, n) = (3, 17);
        let (a, b) = (noise(elem, t * n, 1), noise(elem, t * n, 2));
        let (x, y, out) = (rig.tensor(elem, &[t, n], &a), rig.tensor(elem, &[t, n], &b), rig.empty(elem, &[t, n]));
        let map = |f: &dyn Fn(f32) -> f32| a.iter().map(|v| f(*v)).collect::<Vec<_>>();
        rig.run(rig.ops.silu(&x.desc, &out.desc)).expect("silu");
        close(&out.values(), &map(&silu), elem);
        rig.run(rig.ops.gelu(&x.desc, &out.desc)).expect("gelu");
        close(&out.values(), &map(&gelu), elem);
        rig.run(rig.ops.tanh(&x.desc, &out.desc)).expect("tanh");
        close(&out.values(), &map(&f32::tanh), elem);
        rig.run(rig.ops.scale(&x.desc, 0.5, &out.desc)).expect("scale");
        close(&out.values(), &map(&|v| v * 0.5), elem);
        let zip = |f: &dyn Fn(f32, f32) -> f32| a.iter().zip(&b).map(|(a, b)| f(*a, *b)).collect::<Vec<_>>();
        rig.run(rig.ops.add(&x.desc, &y.desc, &out.desc)).expect("add");
        assert_eq!(out.values(), rounded(elem, &zip(&|a, b| a + b)));
        rig.run(rig.ops.mul(&x.desc, &y.desc, &out.desc)).expect("mul");
        assert_eq!(out.values(), rounded(elem, &zip(&|a, b| a * b)));
        let column = rig.tensor(elem, &[n], &b[..n]);
        rig.run(rig.ops.mul(&x.desc, &column.desc, &out.desc)).expect("one row for all");
        let want: Vec<f32> = a.iter().enumerate().map(|(i, v)| v * b[i % n]).collect();
        assert_eq!(out.values(), rounded(elem, &want));
        let (gate_up, half) = (rig.tensor(elem, &[t, 16], &a[..t * 16]), rig.empty(elem, &[t, 8]));
        rig.run(rig.ops.swiglu(&gate_up.desc, &half.desc)).expect("swiglu");
        let want: Vec<f32> = (0..t * 8).map(|i| silu(a[i / 8 * 16 + i % 8]) * a[i / 8 * 16 + 8 + i % 8]).collect();
        close(&half.values(), &want, elem);
    }
}

#[test]
fn casts_round_to_even_and_copies_follow_views() {
    let rig = Rig::new();
    let values = [1.0, 1.000_976_5, 1.003_906_3, -2.5, 70_000.0, f32::NAN];
    let x = rig.tensor(F32, &[6], &values);
    for elem in [F16, BF16] {
        let out = rig.empty(elem, &[6]);
        rig.run(rig.ops.cast(&x.desc, &out.desc)).expect("cast");
        let (got, want) = (out.values(), rounded(elem, &values));
        assert_eq!(got[..5], want[..5]);
        assert!(got[5].is_nan());
    }
    let counts = rig.ints(I32, &[3, -1, 7]);
    let wide = rig.empty(I64, &[3]);
    rig.run(rig.ops.cast(&counts.desc, &wide.desc)).expect("whole numbers");
    assert_eq!(wide.ints(), [3, -1, 7]);

    let matrix = rig.tensor(F16, &[2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let turned = TensorDesc::view(matrix.at(), F16, &[3, 2], &[1, 3], 0, &[2, 3]);
    let out = rig.empty(F16, &[3, 2]);
    rig.run(rig.ops.copy(&out.desc, &turned)).expect("copy");
    assert_eq!(out.values(), [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
}

#[test]
fn rows_are_gathered_by_number() {
    let rig = Rig::new();
    for index in [I32, I64] {
        let table = noise(F16, 5 * 16, 1);
        let (weight, ids, out) =
            (rig.tensor(F16, &[5, 16], &table), rig.ints(index, &[4, 0, 4]), rig.empty(F16, &[3, 16]));
        let want = [&table[64..], &table[..16], &table[64..]].concat();
        rig.run(rig.ops.embedding(&weight.desc, &ids.desc, &out.desc)).expect("embedding");
        assert_eq!(out.values(), want);
        rig.run(rig.ops.gather_rows(&weight.desc, &ids.desc, &out.desc)).expect("gather");
        assert_eq!(out.values(), want);
    }
}
