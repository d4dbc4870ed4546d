//! Keys and values are written to their slots, and attention over block tables equals the textbook formula.

use crate::common;
use crate::common::{Rig, Tensor, close, noise};
use ElemType::{BF16, Bool, F16, I32, I64};
use ascend_sys::{AscendErrorKind, Attention, ElemType, MASK_SIDE, Mask, QueryLayout, TensorDesc};

const BLOCK: usize = 128;

#[test]
fn keys_and_values_go_to_their_slots() {
    let rig = Rig::new();
    let (t, n, d, blocks) = (3, 2, 16, 2);
    let (k, v) = (noise(BF16, t * n * d, 1), noise(BF16, t * n * d, 2));
    let (key, value) = (rig.tensor(BF16, &[t, n, d], &k), rig.tensor(BF16, &[t, n, d], &v));
    let old = vec![0.5; blocks * 16 * n * d];
    for index in [I32, I64] {
        let (keys, values) = (rig.tensor(BF16, &[blocks, 16, n, d], &old), rig.tensor(BF16, &[blocks, 16, n, d], &old));
        let slots = rig.ints(index, &[5, 31, 0]);
        rig.run(rig.ops.kv_scatter(&key.desc, &value.desc, &slots.desc, &keys.desc, &values.desc)).expect("scatter");
        for (cache, rows) in [(&keys, &k), (&values, &v)] {
            let mut want = old.clone();
            for (row, slot) in [(0, 5), (1, 31), (2, 0)] {
                want[slot * n * d..][..n * d].copy_from_slice(&rows[row * n * d..][..n * d]);
            }
            assert_eq!(cache.values(), want);
        }
    }
    // The older operation writes one cache at a time.
    let cache = rig.tensor(BF16, &[blocks * 16, n * d], &old);
    let slots = rig.ints(I32, &[5, 31, 0]);
    let indices = TensorDesc::new(slots.at(), I32, &[t, 1]);
    let updates = TensorDesc::new(key.at(), BF16, &[t, n * d]);
    rig.run(rig.ops.scatter_rows(&cache.desc, &indices, &updates)).expect("scatter rows");
    assert_eq!(cache.values()[5 * n * d..][..n * d], k[..n * d]);
    assert!(rig.sim.complaints().is_empty());

    // A slot written twice is undefined: garbage and a complaint. A slot out of range crashes.
    let twice = rig.ints(I32, &[7, 7, 0]);
    let indices = TensorDesc::new(twice.at(), I32, &[t, 1]);
    rig.run(rig.ops.scatter_rows(&cache.desc, &indices, &updates)).expect("undefined, not refused");
    assert!(cache.values()[7 * n * d].is_nan() && rig.sim.complaints().len() == 1);
    let beyond = rig.ints(I32, &[7, 32, 0]);
    let indices = TensorDesc::new(beyond.at(), I32, &[t, 1]);
    let error = rig.run(rig.ops.scatter_rows(&cache.desc, &indices, &updates)).expect_err("out of range");
    assert_eq!((error.code, error.kind), (507_035, AscendErrorKind::KernelException));
}

fn causal_mask(rig: &Rig) -> Tensor {
    let mask = rig.empty(Bool, &[MASK_SIDE, MASK_SIDE]);
    let bytes: Vec<u8> = (0..MASK_SIDE * MASK_SIDE).map(|i| u8::from(i % MASK_SIDE > i / MASK_SIDE)).collect();
    mask.buffer.write(0, &bytes).expect("mask");
    mask
}

struct Case {
    heads: usize,
    kv_heads: usize,
    d: usize,
    q_lens: Vec<usize>,
    kv_lens: Vec<usize>,
    mask: Mask,
    block: usize,
}

/// Softmax over the visible keys, in f64, one query at a time.
fn reference(case: &Case, q: &[f32], keys: &[Vec<f32>], values: &[Vec<f32>], scale: f64) -> Vec<f32> {
    let Case { heads, kv_heads, d, .. } = *case;
    let mut out = Vec::new();
    let mut row = 0;
    for (s, (&q_len, &kv_len)) in case.q_lens.iter().zip(&case.kv_lens).enumerate() {
        for i in 0..q_len {
            let own = kv_len - q_len + i;
            for head in 0..heads {
                let kv_head = head / (heads / kv_heads);
                let seen: Vec<usize> = (0..kv_len)
                    .filter(|&key| match case.mask {
                        Mask::Full => true,
                        Mask::Causal => key <= own,
                        Mask::Window(width) => key <= own && own - key < width as usize,
                    })
                    .collect();
                let at = |key: usize| (key * kv_heads + kv_head) * d;
                let score = |key: usize| {
                    let query = &q[(row * heads + head) * d..][..d];
                    let dot: f64 = query.iter().zip(&keys[s][at(key)..]).map(|(a, b)| f64::from(a * b)).sum();
                    dot * scale
                };
                let largest = seen.iter().map(|&key| score(key)).fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<f64> = seen.iter().map(|&key| (score(key) - largest).exp()).collect();
                let total: f64 = weights.iter().sum();
                for e in 0..d {
                    let sum: f64 =
                        seen.iter().zip(&weights).map(|(&key, w)| w * f64::from(values[s][at(key) + e])).sum();
                    #[allow(clippy::cast_possible_truncation)]
                    out.push((sum / total) as f32);
                }
            }
            row += 1;
        }
    }
    out
}

fn check(rig: &Rig, elem: ElemType, layout: QueryLayout, case: &Case) {
    let Case { heads, kv_heads, d, block, .. } = *case;
    let (tokens, seqs) = (case.q_lens.iter().sum::<usize>(), case.q_lens.len());
    let width = case.kv_lens.iter().max().expect("sequences").div_ceil(block);
    let blocks = seqs * width + 1;
    let row = kv_heads * d;
    // Blocks in a shuffled order; blocks that no sequence owns stay poisoned.
    let id = |s: usize, b: usize| blocks - 1 - (b * seqs + s);
    let (key_cache, value_cache) = (rig.empty(elem, &[blocks, block, row]), rig.empty(elem, &[blocks, block, row]));
    let mut stored = (Vec::new(), Vec::new());
    for (s, &kv_len) in case.kv_lens.iter().enumerate() {
        let seed = 10 * s as u64;
        let (keys, values) = (noise(elem, kv_len * row, seed + 1), noise(elem, kv_len * row, seed + 2));
        for (cache, all) in [(&key_cache, &keys), (&value_cache, &values)] {
            for (b, chunk) in all.chunks(block * row).enumerate() {
                cache.buffer.write(id(s, b) * block * row * 2, &common::encode(elem, chunk)).expect("write");
            }
        }
        stored.0.push(keys);
        stored.1.push(values);
    }
    let table: Vec<i64> = (0..seqs * width).map(|i| id(i / width, i % width) as i64).collect();
    let table = rig.ints(I32, &table);
    let table = TensorDesc::new(table.at(), I32, &[seqs, width]);
    let q = noise(elem, tokens * heads * d, 99);
    let dims = match layout {
        QueryLayout::Packed => vec![tokens, heads, d],
        QueryLayout::Padded => vec![seqs, tokens / seqs, heads, d],
    };
    let (query, out) = (rig.tensor(elem, &dims, &q), rig.empty(elem, &dims));
    let mut end = 0;
    let ends: Vec<i64> = case
        .q_lens
        .iter()
        .map(|&len| {
            end += len as i64;
            end
        })
        .collect();
    let kv_lens: Vec<i64> = case.kv_lens.iter().map(|&len| len as i64).collect();
    let mask = causal_mask(rig);
    let scale = 1.0 / (d as f64).sqrt();
    let shape = Attention {
        layout,
        query_ends: if layout == QueryLayout::Packed { &ends } else { &[] },
        kv_lens: &kv_lens,
        heads,
        kv_heads,
        scale,
        mask: case.mask,
        block_size: block,
    };
    let mask = (case.mask != Mask::Full).then_some(&mask.desc);
    rig.run(rig.ops.attention(&query.desc, &key_cache.desc, &value_cache.desc, mask, &table, &out.desc, &shape))
        .expect("attention");
    close(&out.values(), &reference(case, &q, &stored.0, &stored.1, scale), elem);
}

#[test]
fn packed_sequences_of_any_lengths_share_a_call() {
    let rig = Rig::new();
    for mask in [Mask::Causal, Mask::Full, Mask::Window(5)] {
        let case = Case {
            heads: 4,
            kv_heads: 2,
            d: 64,
            q_lens: vec![1, 5, 1, 3],
            kv_lens: vec![130, 5, 1, 40],
            mask,
            block: BLOCK,
        };
        check(&rig, BF16, QueryLayout::Packed, &case);
    }
    let case = Case {
        heads: 4,
        kv_heads: 1,
        d: 32,
        q_lens: vec![2, 1],
        kv_lens: vec![7, 300],
        mask: Mask::Causal,
        block: BLOCK,
    };
    check(&rig, F16, QueryLayout::Packed, &case);
}

#[test]
fn decode_rows_may_use_small_blocks_padded() {
    let rig = Rig::new();
    for (heads, kv_heads, d, block) in [(2, 2, 16, 16), (6, 2, 48, 32), (2, 1, 128, 512)] {
        let case = Case { heads, kv_heads, d, q_lens: vec![1, 1], kv_lens: vec![70, 3], mask: Mask::Full, block };
        check(&rig, F16, QueryLayout::Padded, &case);
    }
}

#[test]
fn what_is_accepted_depends_on_the_version() {
    // (version, f16?, heads, KV heads, head, block, accepted)
    let cases = [
        (80_500_000, false, 2, 2, 128, 128, true),
        (80_500_000, false, 2, 2, 256, 128, false),
        (80_500_000, true, 2, 2, 128, 128, false),
        (80_500_000, true, 4, 2, 128, 128, true),
        (80_500_000, false, 4, 2, 128, 16, false),
        (80_200_000, false, 4, 2, 128, 128, false),
        (90_100_000, true, 2, 2, 128, 128, true),
        (90_100_000, false, 4, 2, 128, 16, true),
        (90_100_000, false, 2, 2, 48, 128, false),
        (90_100_000, false, 4, 2, 48, 128, true),
        (90_100_000, false, 4, 2, 256, 128, true),
    ];
    for (version, is_f16, heads, kv_heads, d, block, accepted) in cases {
        let rig = Rig::with(|sim| sim.set("cann", version));
        let elem = if is_f16 { F16 } else { BF16 };
        let cache = rig.empty(elem, &[2, block, kv_heads * d]);
        let (query, out) = (rig.empty(elem, &[2, heads, d]), rig.empty(elem, &[2, heads, d]));
        let (table, mask) = (rig.empty(I32, &[1, 2]), causal_mask(&rig));
        let shape = Attention {
            layout: QueryLayout::Packed,
            query_ends: &[2],
            kv_lens: &[9],
            heads,
            kv_heads,
            scale: 0.1,
            mask: Mask::Causal,
            block_size: block,
        };
        let made =
            rig.ops.attention(&query.desc, &cache.desc, &cache.desc, Some(&mask.desc), &table.desc, &out.desc, &shape);
        match made {
            Ok(_) => assert!(accepted, "{version} {elem:?} {heads}/{kv_heads}x{d} blocks {block}"),
            Err(error) => {
                assert!(!accepted, "{version}: {error}");
                assert_eq!((error.code, error.kind), (561_002, AscendErrorKind::Refused));
            }
        }
    }
}

#[test]
fn lengths_and_tables_must_fit() {
    let rig = Rig::new();
    let (heads, kv_heads, d) = (4, 2, 64);
    let cache = rig.empty(BF16, &[4, BLOCK, kv_heads * d]);
    let (query, out) = (rig.empty(BF16, &[3, heads, d]), rig.empty(BF16, &[3, heads, d]));
    let (table, mask) = (rig.empty(I32, &[2, 2]), causal_mask(&rig));
    let refused = |ends: &[i64], kv_lens: &[i64], mask: Option<&TensorDesc>, kind: Mask| {
        let shape = Attention {
            layout: QueryLayout::Packed,
            query_ends: ends,
            kv_lens,
            heads,
            kv_heads,
            scale: 0.1,
            mask: kind,
            block_size: BLOCK,
        };
        rig.ops.attention(&query.desc, &cache.desc, &cache.desc, mask, &table.desc, &out.desc, &shape).err()
    };
    let mask = Some(&mask.desc);
    assert_eq!(refused(&[1, 3], &[9, 9], mask, Mask::Causal), None);
    for (ends, kv_lens) in [([1, 2], [9, 9]), ([2, 1], [9, 9]), ([1, 3], [9, 0]), ([1, 3], [9, 257]), ([1, 3], [9, 1])]
    {
        let error = refused(&ends, &kv_lens, mask, Mask::Causal).expect("refused");
        assert_eq!(error.code, 561_002, "{ends:?} {kv_lens:?}");
    }
    assert!(refused(&[1, 3], &[9, 9], None, Mask::Causal).is_some(), "a mode without its mask");
    assert!(refused(&[1, 3], &[9, 9], mask, Mask::Full).is_some(), "a mask without its mode");
}

#[test]
fn blocks_outside_the_cache_crash_the_kernel() {
    let rig = Rig::new();
    let (heads, kv_heads, d) = (4, 2, 64);
    let cache = rig.tensor(BF16, &[1, BLOCK, kv_heads * d], &vec![0.0; BLOCK * kv_heads * d]);
    let (query, out) = (rig.tensor(BF16, &[1, heads, d], &vec![0.0; heads * d]), rig.empty(BF16, &[1, heads, d]));
    let table = rig.ints(I32, &[1 << 20]);
    let table = TensorDesc::new(table.at(), I32, &[1, 1]);
    let shape = Attention {
        layout: QueryLayout::Packed,
        query_ends: &[1],
        kv_lens: &[1],
        heads,
        kv_heads,
        scale: 0.1,
        mask: Mask::Full,
        block_size: BLOCK,
    };
    let error = rig
        .run(rig.ops.attention(&query.desc, &cache.desc, &cache.desc, None, &table, &out.desc, &shape))
        .expect_err("ids are not checked, but the address is invalid");
    assert_eq!((error.call, error.code), ("aclrtSynchronizeStream", 507_015));
}
