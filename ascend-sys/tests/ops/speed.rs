//! Measures the speed of the simulated operations: `cargo test --release -p ascend-sys --test ops -- speed:: --ignored
//! --nocapture`.

use crate::common::{Rig, noise};
use ElemType::BF16;
use ascend_sys::{Attention, ElemType, MASK_SIDE, Mask, QueryLayout, TensorDesc};
use std::time::{Duration, Instant};

/// Shortest time of a few runs.
fn time(mut work: impl FnMut()) -> Duration {
    let run = |_| {
        let start = Instant::now();
        work();
        start.elapsed()
    };
    (0..5).map(run).min().unwrap_or_default()
}

#[test]
#[ignore = "a measurement"]
fn products() {
    let rig = Rig::new();
    for (t, k, n) in [(1, 576, 1536), (40, 576, 1536), (40, 1536, 576), (1, 576, 49_152), (128, 2048, 2048)] {
        for elem in [BF16, ElemType::F16, ElemType::F32] {
            let x = rig.tensor(elem, &[t, k], &noise(elem, t * k, 1));
            let w = rig.tensor(elem, &[n, k], &noise(elem, n * k, 2));
            let out = rig.empty(elem, &[t, n]);
            let best = time(|| rig.run(rig.ops.linear(&x.desc, &w.desc, None, &out.desc)).expect("linear"));
            let rate = (2 * t * k * n) as f64 / best.as_secs_f64() / 1e9;
            println!("[{t},{k}] x [{n},{k}] {elem:?}: {:.2} ms, {rate:.2} GFLOP/s", best.as_secs_f64() * 1e3);
        }
    }
}

/// Attention of a step of SmolLM2-135M: 9 query heads over 3 KV heads of size 64.
#[test]
#[ignore = "a measurement"]
fn attention() {
    let rig = Rig::new();
    let (heads, kv_heads, d, blocks) = (9, 3, 64, 8);
    let cache = noise(BF16, blocks * 128 * kv_heads * d, 1);
    let dims = [blocks, 128, kv_heads * d];
    let (keys, values) = (rig.tensor(BF16, &dims, &cache), rig.tensor(BF16, &dims, &cache));
    let mask = rig.empty(ElemType::Bool, &[MASK_SIDE, MASK_SIDE]);
    let bytes: Vec<u8> = (0..MASK_SIDE * MASK_SIDE).map(|i| u8::from(i % MASK_SIDE > i / MASK_SIDE)).collect();
    mask.buffer.write(0, &bytes).expect("mask");
    let table = rig.ints(ElemType::I32, &[0, 1, 2, 3, 4, 5, 6, 7]);
    let table = TensorDesc::new(table.at(), ElemType::I32, &[1, 8]);
    for (queries, kv) in [(40, 40), (1, 52), (1, 1000), (500, 1000)] {
        let q = rig.tensor(BF16, &[queries, heads, d], &noise(BF16, queries * heads * d, 2));
        let out = rig.empty(BF16, &[queries, heads, d]);
        let shape = Attention {
            layout: QueryLayout::Packed,
            query_ends: &[queries as i64],
            kv_lens: &[kv as i64],
            heads,
            kv_heads,
            scale: 0.125,
            mask: Mask::Causal,
            block_size: 128,
        };
        let best = time(|| {
            let op = rig.ops.attention(&q.desc, &keys.desc, &values.desc, Some(&mask.desc), &table, &out.desc, &shape);
            rig.run(op).expect("attention");
        });
        println!("{queries} queries, {kv} keys: {:.2} ms", best.as_secs_f64() * 1e3);
    }
}
