//! Quantized products, sampling and experts equal their definitions.

use crate::common;
use crate::common::{Rig, close, noise};
use ElemType::{BF16, Bool, F16, F32, I4, I8, I32, I64};
use ascend_sys::{AscendErrorKind, ElemType, TensorDesc};

fn whole(count: usize, seed: u64, most: f32) -> Vec<f32> {
    noise(F32, count, seed).iter().map(|v| (v * most).round()).collect()
}

#[test]
fn rows_are_quantized_by_their_largest() {
    let rig = Rig::new();
    for elem in [F16, BF16] {
        let (t, k) = (3, 33);
        let mut values = noise(elem, t * k, 1);
        values[k..2 * k].fill(0.0);
        let (x, y, scale) = (rig.tensor(elem, &[t, k], &values), rig.empty(I8, &[t, k]), rig.empty(F32, &[t]));
        rig.run(rig.ops.dynamic_quant(&x.desc, &y.desc, &scale.desc)).expect("quantized");
        let (y, scale) = (y.values(), scale.values());
        assert_eq!(scale[1], 0.0);
        for (i, value) in values.iter().enumerate() {
            let s = scale[i / k];
            assert!((y[i] * s - value).abs() <= s * 0.5 + 1e-7 && y[i].abs() <= 127.0);
        }
        let largest = values[..k].iter().fold(0.0f32, |m, v| m.max(v.abs()));
        assert_eq!(scale[0], largest / 127.0);
    }
}

#[test]
fn int8_products_are_exact_before_they_are_scaled() {
    let rig = Rig::new();
    for out_elem in [F16, BF16] {
        let (m, k, n) = (3, 64, 32);
        let (x, w) = (whole(m * k, 1, 127.0), whole(n * k, 2, 127.0));
        let (ws, xs) = (noise(F32, n, 3), noise(F32, m, 4));
        let want: Vec<f32> = (0..m * n)
            .map(|i| {
                let sum: f64 = (0..k).map(|j| f64::from(x[i / n * k + j]) * f64::from(w[i % n * k + j])).sum();
                #[allow(clippy::cast_possible_truncation)]
                let scaled = sum as f32 * (ws[i % n] * 1e-3) * xs[i / n];
                scaled
            })
            .collect();
        let ws: Vec<f32> = ws.iter().map(|v| v * 1e-3).collect();
        let (x, w) = (rig.tensor(I8, &[m, k], &x), rig.tensor(I8, &[n, k], &w));
        let (ws, xs) = (rig.tensor(F32, &[n], &ws), rig.tensor(F32, &[m], &xs));
        let out = rig.empty(out_elem, &[m, n]);
        rig.run(rig.ops.quant_linear(&x.desc, &w.desc, &ws.desc, &xs.desc, None, &out.desc)).expect("plain");
        close(&out.values(), &want, out_elem);
        let plain = out.bytes();
        rig.run(rig.ops.tile_weight(&w.desc)).expect("tiles: 32 rows of 64 fill the tiles exactly");
        let tiled = TensorDesc::tiled(w.at(), I8, n, k);
        rig.run(rig.ops.quant_linear(&x.desc, &tiled, &ws.desc, &xs.desc, None, &out.desc)).expect("tiled");
        assert_eq!(out.bytes(), plain);
    }
}

#[test]
fn weights_of_eight_and_four_bits_beside_plain_rows() {
    let rig = Rig::new();
    let (m, k, n) = (2, 64, 16);
    let x = noise(F16, m * k, 1);
    let product = |w: &dyn Fn(usize, usize) -> f32| -> Vec<f32> {
        (0..m * n).map(|i| (0..k).map(|j| x[i / n * k + j] * w(j, i % n)).sum()).collect()
    };
    let x_tensor = rig.tensor(F16, &[m, k], &x);
    let out = rig.empty(F16, &[m, n]);

    // Weights are multiplied in the element type of the rows.
    let narrow = |value: f32| common::rounded(F16, &[value])[0];

    // One scale per column: int8 rows.
    let (w, s) = (whole(n * k, 2, 100.0), noise(F16, n, 3).iter().map(|v| v * 0.01).collect::<Vec<_>>());
    let s = common::rounded(F16, &s);
    let (weight, scale) = (rig.tensor(I8, &[n, k], &w), rig.tensor(F16, &[n], &s));
    rig.run(rig.ops.weight_quant_linear(&x_tensor.desc, &weight.desc, &scale.desc, None, None, 0, &out.desc))
        .expect("W8");
    close(&out.values(), &product(&|j, c| narrow(w[c * k + j] * s[c])), F16);

    // One scale per 32 rows of a column, int4 two per byte, with offsets.
    let w: Vec<f32> = whole(k * n, 4, 7.0);
    let scales = common::rounded(F16, &noise(F16, 2 * n, 5).iter().map(|v| v * 0.1).collect::<Vec<_>>());
    let offsets = common::rounded(F16, &whole(2 * n, 6, 3.0));
    #[allow(clippy::cast_possible_truncation)]
    let packed: Vec<u8> = w
        .chunks(2)
        .map(|pair| (pair[0] as i8).cast_unsigned() & 15 | ((pair[1] as i8).cast_unsigned() & 15) << 4)
        .collect();
    let buffer = rig.buffer(packed.len());
    buffer.write(0, &packed).expect("write");
    let (scale, offset) = (rig.tensor(F16, &[2, n], &scales), rig.tensor(F16, &[2, n], &offsets));
    let want = product(&|j, c| narrow(narrow(w[j * n + c] + offsets[j / 32 * n + c]) * scales[j / 32 * n + c]));
    let as_int4 = TensorDesc::new(buffer.address(), I4, &[k, n]);
    let as_words = TensorDesc::new(buffer.address(), I32, &[k, n / 8]);
    for weight in [as_int4, as_words] {
        let op =
            rig.ops.weight_quant_linear(&x_tensor.desc, &weight, &scale.desc, Some(&offset.desc), None, 32, &out.desc);
        rig.run(op).expect("W4");
        close(&out.values(), &want, F16);
    }
}

#[test]
fn a_side_beyond_65535_is_refused() {
    let rig = Rig::with(|sim| sim.set("compute", 0));
    let (k, n) = (32, 65_536);
    let (x, out) = (rig.empty(F16, &[1, k]), rig.empty(F16, &[1, n]));
    let (weight, scale) = (rig.empty(I8, &[n, k]), rig.empty(F16, &[n]));
    let error =
        rig.ops.weight_quant_linear(&x.desc, &weight.desc, &scale.desc, None, None, 0, &out.desc).expect_err("lm_head");
    assert_eq!(error.kind, AscendErrorKind::Refused);
    assert!(error.message.contains("65535"), "{error}");
}

#[test]
fn the_largest_are_found_and_the_first_of_equals_wins() {
    let rig = Rig::new();
    let rows = [0.5, 2.0, -1.0, 2.0, 1.0, f32::NAN, 3.0, 0.0];
    let x = rig.tensor(F32, &[2, 4], &rows);
    for index in [I32, I64] {
        let out = rig.empty(index, &[2]);
        rig.run(rig.ops.argmax(&x.desc, &out.desc)).expect("argmax");
        assert_eq!(out.ints(), [1, 1]);
    }
    let (values, places) = (rig.empty(F32, &[2, 2]), rig.empty(I64, &[2, 2]));
    rig.run(rig.ops.topk(&x.desc, 2, &values.desc, &places.desc)).expect("topk");
    assert_eq!(places.ints(), [1, 3, 1, 2]);
    assert_eq!(values.values()[..2], [2.0, 2.0]);
    let (finite, all) = (rig.empty(Bool, &[2, 4]), rig.empty(Bool, &[2]));
    rig.run(rig.ops.is_finite(&x.desc, &finite.desc)).expect("finite");
    assert_eq!(finite.ints(), [1, 1, 1, 1, 1, 0, 1, 1]);
    rig.run(rig.ops.all(&finite.desc, &all.desc)).expect("all");
    assert_eq!(all.ints(), [1, 0]);
    let soft = rig.empty(F32, &[2, 4]);
    rig.run(rig.ops.softmax(&x.desc, &soft.desc)).expect("softmax");
    let total: f32 = rows[..4].iter().map(|v| v.exp()).sum();
    close(&soft.values()[..4], &rows[..4].iter().map(|v| v.exp() / total).collect::<Vec<_>>(), F32);
}

#[test]
fn experts_are_chosen_multiplied_and_put_back() {
    let rig = Rig::new();
    let (t, h, n, experts, k) = (5, 16, 8, 4, 2);
    let (x, w, logits) = (noise(BF16, t * h, 1), noise(BF16, experts * h * n, 2), noise(F32, t * experts, 3));
    let x_tensor = rig.tensor(BF16, &[t, h], &x);
    let weight = rig.tensor(BF16, &[experts, h, n], &w);
    let router = rig.tensor(F32, &[t, experts], &logits);
    let (chosen, gates) = (rig.empty(I32, &[t, k]), rig.empty(F32, &[t, k]));
    let (expanded, places, counts) =
        (rig.empty(BF16, &[t * k, h]), rig.empty(I32, &[t * k]), rig.empty(I32, &[experts]));
    let (wide, hidden, out) = (rig.empty(I64, &[experts]), rig.empty(BF16, &[t * k, n]), rig.empty(BF16, &[t, n]));
    for renorm in [false, true] {
        rig.run(rig.ops.moe_gate(&router.desc, k as i64, renorm, &gates.desc, &chosen.desc)).expect("gate");
        rig.run(rig.ops.moe_route(
            &x_tensor.desc,
            &chosen.desc,
            experts as i64,
            &expanded.desc,
            &places.desc,
            &counts.desc,
        ))
        .expect("route");
        rig.run(rig.ops.cast(&counts.desc, &wide.desc)).expect("cast");
        rig.run(rig.ops.moe_linear(&expanded.desc, &weight.desc, &wide.desc, &hidden.desc)).expect("product");
        rig.run(rig.ops.moe_combine(&hidden.desc, &places.desc, &gates.desc, &chosen.desc, &out.desc))
            .expect("combine");
        assert_eq!(wide.ints().iter().sum::<i64>(), (t * k) as i64);
        let mut want = Vec::new();
        for token in 0..t {
            let row = &logits[token * experts..][..experts];
            let mut order: Vec<usize> = (0..experts).collect();
            order.sort_by(|&a, &b| row[b].total_cmp(&row[a]));
            let among = if renorm { &order[..k] } else { &order[..] };
            let total: f32 = among.iter().map(|&e| row[e].exp()).sum();
            for c in 0..n {
                let of = |e: usize| -> f32 {
                    let sum = (0..h).map(|j| x[token * h + j] * w[(e * h + j) * n + c]).sum::<f32>();
                    common::rounded(BF16, &[sum])[0]
                };
                want.push(order[..k].iter().map(|&e| row[e].exp() / total * of(e)).sum());
            }
        }
        close(&out.values(), &want, BF16);
    }
}
