//! Tests that attention computes each row correctly, and with bits that do not depend on the rest of the step.

#![allow(clippy::cast_possible_truncation)] // test sizes are small

use ascend_llm::device::cpu::Isa;
use ascend_llm::device::cpu::kernels::attention::{
    Attention, AttentionDims, AttentionSchedules, AttentionScratch, LoopOrder, WorkSplit,
};
use ascend_llm::device::cpu::kernels::kv_cache::{BatchRows, CpuKvLayout, KvRows, kv_write, kv_writes};
use ascend_llm::device::cpu::reference::{self, AttentionParams};
use ascend_llm::kv_cache::{BlockId, KvDType, KvGeometry};

/// `SplitMix64` generator; each test states its seed.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
    /// Returns an approximately normal number.
    fn value(&mut self) -> f32 {
        (0..4).map(|_| (self.next() >> 40) as f32 / (1u64 << 24) as f32 - 0.5).sum::<f32>() * 1.7
    }
    fn values(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.value()).collect()
    }
}

/// Queries, keys and values of one sequence.
#[derive(Clone)]
struct Sequence {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    tokens: usize,
}

impl Sequence {
    fn new(shape: &AttentionDims, tokens: usize, seed: u64) -> Self {
        let mut rng = Rng(seed);
        let (q, kv) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
        Self { q: rng.values(tokens * q), k: rng.values(tokens * kv), v: rng.values(tokens * kv), tokens }
    }
}

#[derive(Clone, Copy)]
enum Chunks {
    Whole,
    Ones,
    Random(u64),
    /// All tokens but the last, then the last one.
    AllButOne,
    /// The given number of tokens at the end, in one chunk. Tokens before them are only stored; their outputs are NaN.
    Last(usize),
}

#[derive(Clone, Copy)]
struct Setup {
    shape: AttentionDims,
    dtype: KvDType,
    isa: Isa,
    block_size: usize,
    blocks_seed: u64,
    workers: usize,
    chunks: Chunks,
    poison: u8,
    threads: bool,
}

impl Setup {
    fn plain(shape: AttentionDims, dtype: KvDType) -> Self {
        Self {
            shape,
            dtype,
            isa: Isa::detect(),
            block_size: 16,
            blocks_seed: 1,
            workers: 1,
            chunks: Chunks::Whole,
            poison: 0xff,
            threads: false,
        }
    }
}

const LAYERS: usize = 2;
const LAYER: usize = 1;

fn shape(heads: usize, kv_heads: usize, head_dim: usize) -> AttentionDims {
    let scale = 1.0 / (head_dim as f32).sqrt();
    AttentionDims { heads, kv_heads, head_dim, scale, window: None, softcap: None, schedules: None }
}

/// Runs all sequences in one batch, chunk by chunk; returns the outputs of each, and the number of steps that split
/// segments.
fn run_counting(setup: &Setup, sequences: &[Sequence], sinks: Option<&[f32]>) -> (Vec<Vec<f32>>, usize) {
    let shape = &setup.shape;
    let (q_width, kv_width) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
    let geometry = KvGeometry::new(LAYERS, shape.kv_heads, shape.head_dim, setup.block_size, setup.dtype);
    let layout = CpuKvLayout::new(geometry);
    let mut rng = Rng(setup.blocks_seed);
    let needed: usize = sequences.iter().map(|s| s.tokens.div_ceil(setup.block_size)).sum();
    let mut free: Vec<u32> = (0..needed as u32 + 3).collect();
    for i in (1..free.len()).rev() {
        free.swap(i, rng.below(i + 1));
    }
    let mut pool = vec![setup.poison; (needed + 3) * layout.bytes_per_block()];
    let tables: Vec<Vec<BlockId>> = sequences
        .iter()
        .map(|s| (0..s.tokens.div_ceil(setup.block_size)).map(|_| BlockId(free.pop().unwrap())).collect())
        .collect();

    let mut done = vec![0; sequences.len()];
    let mut outputs: Vec<Vec<f32>> = sequences.iter().map(|s| vec![f32::NAN; s.tokens * q_width]).collect();
    let mut scratch: Vec<_> = (0..setup.workers).map(|_| AttentionScratch::new(shape)).collect();
    // Four workers simulate two threads with two parts each.
    let mut schedule = WorkSplit::new(setup.workers).parts_per_thread(if setup.workers == 4 { 2 } else { 1 });
    let mut splits = 0;
    let mut chunk_rng = Rng(if let Chunks::Random(seed) = setup.chunks { seed } else { 0 });
    while done.iter().zip(sequences).any(|(d, s)| *d < s.tokens) {
        let (mut q_lens, mut kv_lens, mut table, mut who) = (vec![], vec![], vec![], vec![]);
        let (mut q, mut k, mut v) = (vec![], vec![], vec![]);
        for (i, s) in sequences.iter().enumerate() {
            let left = s.tokens - done[i];
            let take = match setup.chunks {
                Chunks::Ones => left.min(1),
                Chunks::Random(_) => left.min(1 + chunk_rng.below(70)),
                Chunks::AllButOne => (left - usize::from(left > 1)).max(left.min(1)),
                Chunks::Last(rows) if left > rows => left - rows,
                Chunks::Whole | Chunks::Last(_) => left,
            };
            if take == 0 {
                continue;
            }
            let (from, to) = (done[i], done[i] + take);
            q_lens.push(take as u32);
            kv_lens.push(to as u32);
            table.extend(&tables[i][..to.div_ceil(setup.block_size)]);
            q.extend_from_slice(&s.q[from * q_width..to * q_width]);
            k.extend_from_slice(&s.k[from * kv_width..to * kv_width]);
            v.extend_from_slice(&s.v[from * kv_width..to * kv_width]);
            who.push((i, from, take));
            done[i] = to;
        }
        let rows = BatchRows { q_lens: &q_lens, kv_lens: &kv_lens, tables: &table };
        let kv = KvRows { k: &k, k_stride: kv_width, v: &v, v_stride: kv_width };
        for worker in 0..setup.workers {
            for write in kv_writes(rows, setup.block_size, worker, setup.workers) {
                let bytes = &mut pool[layout.layer_range(write.block, LAYER)];
                kv_write(setup.isa, &layout, write, 0..shape.kv_heads, kv, bytes);
            }
        }
        if matches!(setup.chunks, Chunks::Last(_)) && done.iter().zip(sequences).any(|(d, s)| *d < s.tokens) {
            continue;
        }
        let attention = Attention {
            isa: setup.isa,
            shape: *shape,
            layout,
            layer: LAYER,
            pool: &pool,
            rows,
            q: &q,
            q_stride: q_width,
            sinks,
        };
        schedule.plan(shape, rows, setup.block_size);
        splits += usize::from(schedule.needs_merge());
        let mut out = vec![f32::NAN; q.len()];
        if schedule.needs_merge() {
            let pieces = *schedule.bounds().last().unwrap();
            let most = *kv_lens.iter().max().unwrap() as usize;
            assert!(pieces <= shape.max_partials(setup.workers, most));
            let mut partials = vec![f32::NAN; pieces * shape.partial_len()];
            threads(
                setup,
                schedule.bounds(),
                shape.partial_len(),
                &mut partials,
                &mut scratch,
                &|m, scratch, store| {
                    attention.attend(&schedule, m, scratch, store);
                },
            );
            threads(setup, schedule.merge_bounds(), shape.piece_len(), &mut out, &mut scratch, &|m, scratch, store| {
                attention.merge(&schedule, m, &partials, scratch, store);
            });
        } else {
            threads(setup, schedule.bounds(), shape.piece_len(), &mut out, &mut scratch, &|m, scratch, store| {
                attention.attend(&schedule, m, scratch, store);
            });
        }
        let mut row = 0;
        for (i, from, take) in who {
            outputs[i][from * q_width..(from + take) * q_width]
                .copy_from_slice(&out[row * q_width..(row + take) * q_width]);
            row += take;
        }
    }
    (outputs, splits)
}

type Share<'a> = dyn Fn(usize, &mut AttentionScratch, &mut dyn FnMut(usize, &[f32])) + Sync + 'a;

/// Each worker fills its own contiguous part of `out`, in turn or on parallel threads.
fn threads(
    setup: &Setup,
    bounds: &[usize],
    len: usize,
    out: &mut [f32],
    scratch: &mut [AttentionScratch],
    share: &Share<'_>,
) {
    let mut parts = vec![];
    let mut rest = out;
    for pair in bounds.windows(2) {
        let (part, after) = rest.split_at_mut((pair[1] - pair[0]) * len);
        parts.push((pair[0], part));
        rest = after;
    }
    assert!(rest.is_empty(), "the bounds do not cover the whole output");
    let work = |m: usize, first: usize, part: &mut [f32], scratch: &mut AttentionScratch| {
        share(m, scratch, &mut |index, values| {
            assert_eq!(values.len(), len);
            let place = &mut part[(index - first) * len..][..len];
            assert!(place.iter().all(|x| x.is_nan()), "a piece is stored twice");
            place.copy_from_slice(values);
        });
    };
    if setup.threads {
        std::thread::scope(|scope| {
            for (m, ((first, part), scratch)) in parts.into_iter().zip(scratch).enumerate() {
                let work = &work;
                scope.spawn(move || work(m, first, part, scratch));
            }
        });
    } else {
        for (m, ((first, part), scratch)) in parts.into_iter().zip(scratch).enumerate() {
            work(m, first, part, scratch);
        }
    }
}

fn run(setup: &Setup, sequences: &[Sequence]) -> Vec<Vec<f32>> {
    run_counting(setup, sequences, None).0
}

fn bits(outputs: &[f32]) -> Vec<u32> {
    outputs.iter().map(|x| x.to_bits()).collect()
}

fn assert_same(name: &str, a: &[f32], b: &[f32]) {
    assert!(a.iter().all(|x| x.is_finite()), "{name}: not finite");
    assert_eq!(a.len(), b.len());
    let different = a.iter().zip(b).position(|(x, y)| x.to_bits() != y.to_bits());
    assert_eq!(different, None, "{name}: {:?}", different.map(|i| (a[i], b[i])));
}

const LENGTHS: [usize; 8] = [1, 15, 16, 17, 255, 256, 257, 1000];

/// All types of stored keys and values.
const DTYPES: [KvDType; 4] = [KvDType::F32, KvDType::F16, KvDType::BF16, KvDType::I8];

/// Returns keys or values rounded to the stored type, as f64.
fn stored(dtype: KvDType, head_dim: usize, x: &[f32]) -> Vec<f64> {
    let one = |x: f32| match dtype {
        KvDType::F16 => half::f16::from_f32(x.clamp(-65504.0, 65504.0)).to_f32(),
        KvDType::BF16 => half::bf16::from_f32(x).to_f32(),
        _ => x,
    };
    if dtype != KvDType::I8 {
        return x.iter().map(|x| f64::from(one(*x))).collect();
    }
    let head = |x: &[f32]| {
        let amax = x.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        let (scale, inverse) = (amax / 127.0, 127.0 / amax);
        x.iter().map(|x| f64::from(scale) * f64::from((x * inverse).round_ties_even())).collect::<Vec<_>>()
    };
    x.chunks_exact(head_dim).flat_map(head).collect()
}

/// Computes softmax attention in f64 over keys and values as stored, for the rows from `first_row` on.
fn oracle(shape: &AttentionDims, dtype: KvDType, s: &Sequence, first_row: usize, sinks: Option<&[f32]>) -> Vec<f64> {
    let (dim, group) = (shape.head_dim, shape.heads / shape.kv_heads);
    let [k, v] = [&s.k, &s.v].map(|x| stored(dtype, dim, x));
    let kv_width = shape.kv_heads * dim;
    let mut out = vec![];
    for row in first_row..s.tokens {
        let start = shape.window.map_or(0, |w| (row + 1).saturating_sub(w as usize));
        for head in 0..shape.heads {
            let q = &s.q[(row * shape.heads + head) * dim..][..dim];
            let mut scores: Vec<f64> = (start..=row)
                .map(|t| {
                    let k = &k[t * kv_width + head / group * dim..][..dim];
                    let dot: f64 = q.iter().zip(k).map(|(a, b)| f64::from(*a) * b).sum();
                    let score = dot * f64::from(shape.scale);
                    shape.softcap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh())
                })
                .collect();
            let sink = sinks.map(|s| f64::from(s[head]));
            let largest = scores.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
            for x in &mut scores {
                *x = (*x - largest).exp();
            }
            let sum = scores.iter().sum::<f64>() + sink.map_or(0.0, |s| (s - largest).exp());
            for d in 0..dim {
                let value: f64 =
                    (start..=row).zip(&scores).map(|(t, w)| w * v[t * kv_width + head / group * dim + d]).sum();
                out.push(value / sum);
            }
        }
    }
    out
}

fn assert_close(name: &str, got: &[f32], expected: &[f64], bound: f64) {
    let worst = got.iter().zip(expected).map(|(a, b)| (f64::from(*a) - b).abs()).fold(0.0, f64::max);
    assert!(got.len() == expected.len() && worst <= bound, "{name}: error {worst:e} exceeds the bound {bound:e}");
}

#[test]
fn window_is_self_and_the_tokens_before_it() {
    // Lengths 3 to 12 with a window of 4: the row itself and 3 before it.
    for tokens in 3..=12 {
        for (window, dim) in [(4, 16), (1, 16), (3, 20), (20, 16)] {
            let shape = AttentionDims { window: Some(window), ..shape(2, 1, dim) };
            let s = Sequence::new(&shape, tokens, 7 + tokens as u64);
            let p = AttentionParams {
                heads: 2,
                kv_heads: 1,
                head_dim: dim,
                scale: shape.scale,
                window: Some(window),
                softcap: None,
            };
            let mut expected = vec![0.0; s.q.len()];
            reference::attention(&p, &s.q, &s.k, &s.v, &mut expected);
            for chunks in [Chunks::Whole, Chunks::Ones] {
                let setup = Setup { chunks, ..Setup::plain(shape, KvDType::F32) };
                let got = run(&setup, std::slice::from_ref(&s));
                assert_close("window", &got[0], &expected.iter().map(|x| f64::from(*x)).collect::<Vec<_>>(), 2e-6);
            }
        }
    }
}

#[test]
fn error_against_f64_is_small() {
    // 16 times the rounding error of a sum of values below 4.
    let bound = 4e-6;
    for dtype in DTYPES {
        for (heads, kv_heads, dim) in [(3, 1, 64), (4, 2, 128), (2, 2, 80), (1, 1, 20), (7, 1, 16)] {
            for (window, softcap) in [(None, None), (Some(100), Some(5.0))] {
                let shape = AttentionDims { window, softcap, ..shape(heads, kv_heads, dim) };
                let s = Sequence::new(&shape, 600, 11);
                let expected = oracle(&shape, dtype, &s, 0, None);
                for &isa in Isa::available() {
                    let got = run(&Setup { isa, ..Setup::plain(shape, dtype) }, std::slice::from_ref(&s));
                    assert_close(&format!("{shape:?} {dtype:?} {isa:?}"), &got[0], &expected, bound);
                }
            }
        }
    }
}

#[test]
fn sinks_take_part_in_the_sum() {
    let shape = shape(4, 2, 32);
    let s = Sequence::new(&shape, 300, 5);
    let sinks = [0.5, -2.0, 3.0, 40.0];
    let expected = oracle(&shape, KvDType::F32, &s, 0, Some(&sinks));
    for workers in [1, 3] {
        let setup = Setup { workers, chunks: Chunks::AllButOne, ..Setup::plain(shape, KvDType::F32) };
        let got = run_counting(&setup, std::slice::from_ref(&s), Some(&sinks)).0;
        assert_close("sinks", &got[0], &expected, 4e-6);
    }
}

#[test]
fn chunking_does_not_change_bits() {
    let groups = [(1, KvDType::F16), (2, KvDType::BF16), (3, KvDType::F16), (4, KvDType::F32), (8, KvDType::F16)];
    for (group, dtype) in groups.into_iter().chain([(1, KvDType::I8), (3, KvDType::I8)]) {
        for window in [None, Some(33)] {
            let shape = AttentionDims { window, ..shape(group * 2, 2, 16) };
            for tokens in LENGTHS {
                let s = [Sequence::new(&shape, tokens, 100 + tokens as u64)];
                let whole = run(&Setup::plain(shape, dtype), &s);
                for chunks in [Chunks::Ones, Chunks::Random(1), Chunks::Random(2), Chunks::AllButOne] {
                    let got = run(&Setup { chunks, ..Setup::plain(shape, dtype) }, &s);
                    assert_same(&format!("group {group}, window {window:?}, {tokens} tokens"), &got[0], &whole[0]);
                }
            }
        }
    }
}

#[test]
fn block_size_and_layout_do_not_change_bits() {
    let shape = shape(6, 2, 32);
    for tokens in LENGTHS {
        let s = [Sequence::new(&shape, tokens, 3)];
        for dtype in [KvDType::F16, KvDType::I8] {
            let expected = run(&Setup::plain(shape, dtype), &s);
            for block_size in [16, 32, 128] {
                for blocks_seed in [2, 3] {
                    let chunks = Chunks::Random(9);
                    let setup = Setup { block_size, blocks_seed, chunks, ..Setup::plain(shape, dtype) };
                    let name = format!("{dtype:?}, blocks of {block_size}, {tokens} tokens");
                    assert_same(&name, &run(&setup, &s)[0], &expected[0]);
                }
            }
        }
    }
}

#[test]
fn the_content_of_unused_slots_does_not_change_bits() {
    for dtype in DTYPES {
        let shape = AttentionDims { window: Some(40), ..shape(4, 2, 20) };
        let s: Vec<_> = LENGTHS.iter().map(|t| Sequence::new(&shape, *t, 50)).collect();
        for chunks in [Chunks::Whole, Chunks::Random(4)] {
            // 0xff is NaN in each type (in int8 the scale is), 0x7b is a large number.
            let outputs =
                [0x00, 0xff, 0x7b].map(|poison| run(&Setup { chunks, poison, ..Setup::plain(shape, dtype) }, &s));
            for (a, b) in outputs[0].iter().zip(&outputs[1]).chain(outputs[0].iter().zip(&outputs[2])) {
                assert_same("poison", a, b);
            }
        }
    }
}

#[test]
fn tokens_outside_the_window_do_not_change_bits() {
    // Keys and values before the window are infinite or NaN; rows whose windows start after them must not change.
    let shape = AttentionDims { window: Some(10), ..shape(2, 1, 16) };
    let clean = Sequence::new(&shape, 60, 8);
    let mut dirty = clean.clone();
    for (i, x) in dirty.k[..30 * 16].iter_mut().enumerate() {
        *x = if i % 2 == 0 { f32::NAN } else { f32::INFINITY };
    }
    dirty.v[..30 * 16].fill(f32::NAN);
    for dtype in [KvDType::F32, KvDType::I8] {
        for chunks in [Chunks::Whole, Chunks::Ones, Chunks::Random(3)] {
            let setup = Setup { chunks, ..Setup::plain(shape, dtype) };
            let [a, b] = [&clean, &dirty].map(|s| run(&setup, std::slice::from_ref(s)).remove(0));
            assert_same("window", &a[39 * 32..], &b[39 * 32..]);
            assert!(b[38 * 32].is_nan(), "a NaN within the window must reach the output");
        }
    }
}

#[test]
fn a_non_finite_int8_row_affects_all_rows_that_read_it() {
    let shape = shape(2, 1, 20);
    let clean = Sequence::new(&shape, 40, 9);
    // The last element of the key or of the value of token 25.
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for is_key in [true, false] {
            let mut dirty = clean.clone();
            (if is_key { &mut dirty.k } else { &mut dirty.v })[26 * 20 - 1] = bad;
            for &isa in Isa::available() {
                let setup = Setup { isa, ..Setup::plain(shape, KvDType::I8) };
                let [a, b] = [&clean, &dirty].map(|s| run(&setup, std::slice::from_ref(s)).remove(0));
                assert_same("rows before the bad token", &a[..25 * 40], &b[..25 * 40]);
                assert!(b[25 * 40..].iter().all(|x| x.is_nan()), "{bad}, {is_key}, {isa:?}");
            }
        }
    }
}

#[test]
fn batches_do_not_change_outputs() {
    let shape = shape(6, 2, 16);
    let s: Vec<_> = LENGTHS.iter().map(|t| Sequence::new(&shape, *t, *t as u64)).collect();
    for dtype in [KvDType::F16, KvDType::I8] {
        let alone: Vec<_> =
            s.iter().map(|s| run(&Setup::plain(shape, dtype), std::slice::from_ref(s)).remove(0)).collect();
        for chunks in [Chunks::Whole, Chunks::Ones, Chunks::Random(5)] {
            let together = run(&Setup { chunks, workers: 2, ..Setup::plain(shape, dtype) }, &s);
            for (a, b) in together.iter().zip(&alone) {
                assert_same("other sequences in the batch", a, b);
            }
        }
    }
}

#[test]
fn workers_and_split_segments_do_not_change_bits() {
    for (heads, kv_heads, dtype) in [
        (1, 1, KvDType::BF16),
        (3, 1, KvDType::BF16),
        (4, 4, KvDType::BF16),
        (8, 1, KvDType::BF16),
        (3, 1, KvDType::I8),
    ] {
        for window in [None, Some(300)] {
            let shape = AttentionDims { window, ..shape(heads, kv_heads, 32) };
            for tokens in LENGTHS {
                let s = [Sequence::new(&shape, tokens, 77)];
                let expected = run(&Setup::plain(shape, dtype), &s);
                for workers in 1..=4 {
                    for chunks in [Chunks::Whole, Chunks::AllButOne, Chunks::Random(6)] {
                        let setup = Setup { workers, chunks, ..Setup::plain(shape, dtype) };
                        let (got, splits) = run_counting(&setup, &s, None);
                        assert_same(&format!("{workers} workers, {tokens} tokens"), &got[0], &expected[0]);
                        if workers > 1 && heads == 3 && tokens == 1000 && matches!(chunks, Chunks::AllButOne) {
                            assert_eq!(splits, 1, "the last step must split segments");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn threads_do_not_change_bits() {
    let shape = shape(3, 1, 64);
    let s = [Sequence::new(&shape, 700, 21)];
    for dtype in [KvDType::F16, KvDType::I8] {
        let expected = run(&Setup::plain(shape, dtype), &s);
        for workers in [2, 3] {
            for chunks in [Chunks::Whole, Chunks::AllButOne] {
                let setup = Setup { workers, chunks, threads: true, ..Setup::plain(shape, dtype) };
                assert_same("threads", &run(&setup, &s)[0], &expected[0]);
            }
        }
    }
}

#[test]
fn every_instruction_set_has_the_same_bits() {
    for dtype in DTYPES {
        for dim in [16, 20, 64, 80, 128] {
            let shape = AttentionDims { window: Some(200), softcap: Some(20.0), ..shape(5, 1, dim) };
            let s = [Sequence::new(&shape, 270, 31)];
            let plain = run(&Setup { isa: Isa::Plain, ..Setup::plain(shape, dtype) }, &s);
            for &isa in Isa::available() {
                let got = run(&Setup { isa, ..Setup::plain(shape, dtype) }, &s);
                assert_same(&format!("{dtype:?}, {dim}, {isa:?}"), &got[0], &plain[0]);
            }
        }
    }
}

/// Loop orders by length: each order for all lengths, and changes of order at the default lengths and within the first
/// segment.
const SCHEDULES: [(&str, Option<AttentionSchedules>); 5] = {
    let most = AttentionSchedules::LARGEST_PARTIAL_MAX;
    [
        ("blocked", None),
        ("full", Some(AttentionSchedules { full_max: most, partial_max: most })),
        ("partial", Some(AttentionSchedules { full_max: 0, partial_max: most })),
        ("default", Some(AttentionSchedules::DEFAULT)),
        ("16 and 32", Some(AttentionSchedules { full_max: 16, partial_max: 32 })),
    ]
};

/// Lengths at both sides of the boundaries, and well above them.
const ORDER_LENGTHS: [usize; 8] = [1, 511, 512, 513, 2047, 2048, 2049, 8192];

#[test]
fn the_loop_order_goes_by_visible_length() {
    let choose = |full_max, partial_max, tokens| AttentionSchedules { full_max, partial_max }.choose(tokens);
    for (full_max, partial_max, tokens, expected) in [
        (512, 2048, 1, LoopOrder::Full),
        (512, 2048, 512, LoopOrder::Full),
        (512, 2048, 513, LoopOrder::Partial),
        (512, 2048, 2048, LoopOrder::Partial),
        (512, 2048, 2049, LoopOrder::Blocked),
        (512, 2048, usize::MAX, LoopOrder::Blocked),
        (0, 0, 1, LoopOrder::Blocked),
        (16, 16, 16, LoopOrder::Full),
        (16, 16, 17, LoopOrder::Blocked),
        // Values beyond the valid range: the size of scratch stays bounded.
        (0, u32::MAX, 65_536, LoopOrder::Partial),
        (0, u32::MAX, 65_537, LoopOrder::Blocked),
    ] {
        assert_eq!(choose(full_max, partial_max, tokens), expected, "{tokens} tokens at {full_max} and {partial_max}");
    }
    assert_eq!(AttentionSchedules::default(), AttentionSchedules { full_max: 512, partial_max: 2048 });
    for (full_max, partial_max, expected) in
        [(512, 2048, true), (0, 0, true), (7, 7, true), (8, 7, false), (1, 65_536, true), (1, 65_537, false)]
    {
        assert_eq!(AttentionSchedules { full_max, partial_max }.is_valid(), expected, "{full_max} and {partial_max}");
    }
}

#[test]
fn loop_orders_do_not_change_bits() {
    for dtype in [KvDType::F32, KvDType::F16, KvDType::I8] {
        for tokens in ORDER_LENGTHS {
            // A block of six queries holds several rows, parts of two rows, or part of a row.
            for (heads, kv_heads) in [(1, 1), (4, 1), (7, 1)] {
                for window in [None, Some(300)] {
                    loop_orders_agree(dtype, tokens, &AttentionDims { window, ..shape(heads, kv_heads, 16) });
                }
            }
        }
    }
}

/// Checks that the last rows of a sequence are close to the oracle, and have the same bits in each loop order.
fn loop_orders_agree(dtype: KvDType, tokens: usize, shape: &AttentionDims) {
    const ROWS: usize = 37;
    let seed = 1000 + tokens as u64;
    let s = [Sequence::new(shape, tokens, seed)];
    let last_rows = |setup: &Setup, rows: usize| {
        let first = tokens.saturating_sub(rows) * shape.heads * shape.head_dim;
        run(&Setup { chunks: Chunks::Last(rows), ..*setup }, &s)[0].split_off(first)
    };
    let name = format!("seed {seed}, {tokens} tokens, {dtype:?}, {shape:?}");
    let expected = last_rows(&Setup::plain(*shape, dtype), ROWS);
    // Two units in the last place of values below 2, times the square root of the number of tokens.
    let bound = 2.0 * f64::from(f32::EPSILON) * (tokens as f64).sqrt();
    assert_close(&name, &expected, &oracle(shape, dtype, &s[0], tokens.saturating_sub(ROWS), None), bound.min(4e-6));
    for (order, schedules) in SCHEDULES {
        for &isa in Isa::available() {
            for (rows, workers) in [(1, 1), (1, 2), (19, 1), (ROWS, 2)] {
                let shape = AttentionDims { schedules, ..*shape };
                let got = last_rows(&Setup { isa, workers, ..Setup::plain(shape, dtype) }, rows);
                let expected = &expected[expected.len() - got.len()..];
                assert_same(&format!("{order}, {isa:?}, last {rows}, {workers} workers, {name}"), &got, expected);
            }
        }
    }
}

#[test]
fn loop_orders_of_one_step_may_differ() {
    // Each sequence has its own order, in chunks whose rows cross the boundaries.
    for window in [None, Some(20), Some(530)] {
        let shape = AttentionDims { window, ..shape(6, 2, 16) };
        let s: Vec<_> = LENGTHS.iter().map(|t| Sequence::new(&shape, *t, 60 + *t as u64)).collect();
        for dtype in [KvDType::F16, KvDType::I8] {
            let expected = run(&Setup::plain(shape, dtype), &s);
            for (order, schedules) in SCHEDULES {
                let shape = AttentionDims { schedules, ..shape };
                for (workers, chunks, threads) in
                    [(1, Chunks::Whole, false), (2, Chunks::Whole, true), (1, Chunks::Random(8), false)]
                {
                    let setup = Setup { workers, chunks, threads, ..Setup::plain(shape, dtype) };
                    for (got, expected) in run(&setup, &s).iter().zip(&expected) {
                        assert_same(
                            &format!("{order}, {dtype:?}, window {window:?}, {workers} workers"),
                            got,
                            expected,
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn scratch_holds_the_longest_unit_of_the_partial_order() {
    // 16 rows with windows of 243 tokens cover 258 tokens in total, here from the last token of a segment to the first
    // token of the segment after the next.
    let shape = AttentionDims { window: Some(243), ..shape(1, 1, 16) };
    let s = [Sequence::new(&shape, 513, 4)];
    let [expected, got] = [None, Some(AttentionSchedules { full_max: 0, partial_max: 243 })].map(|schedules| {
        let setup = Setup { chunks: Chunks::Last(16), ..Setup::plain(shape, KvDType::F32) };
        run(&Setup { shape: AttentionDims { schedules, ..shape }, ..setup }, &s)[0].split_off(497 * 16)
    });
    assert_same("the longest unit, seed 4", &got, &expected);
}

#[test]
fn stores_round_to_nearest_even_and_clamp() {
    let geometry = KvGeometry::new(1, 1, 8, 16, KvDType::F16);
    let v = [1e6, -1e6, f32::NAN, 1.0 + 1.0 / 2048.0, 1.0 + 3.0 / 2048.0, 65519.0, f32::INFINITY, 6e-8];
    for &isa in Isa::available() {
        for dtype in [KvDType::F32, KvDType::F16, KvDType::BF16] {
            let layout = CpuKvLayout::new(geometry.with_dtype(dtype));
            let mut pool = vec![0; layout.bytes_per_block()];
            let rows = BatchRows { q_lens: &[1], kv_lens: &[6], tables: &[BlockId(0)] };
            let kv = KvRows { k: &v, k_stride: 8, v: &v, v_stride: 8 };
            for write in kv_writes(rows, 16, 0, 1) {
                kv_write(isa, &layout, write, 0..1, kv, &mut pool);
            }
            let bytes = dtype.bytes();
            for (d, x) in v.iter().enumerate() {
                let expected: Vec<u8> = match dtype {
                    KvDType::F16 => {
                        let clamped = if x.is_nan() { *x } else { x.clamp(-65504.0, 65504.0) };
                        half::f16::from_f32(clamped).to_le_bytes().to_vec()
                    }
                    KvDType::BF16 => half::bf16::from_f32(*x).to_le_bytes().to_vec(),
                    _ => x.to_le_bytes().to_vec(),
                };
                let key = (d * 16 + 5) * bytes;
                let value = layout.v_offset(0) + (5 * 8 + d) * bytes;
                assert_eq!(&pool[key..key + bytes], expected, "{dtype:?} key of {x}");
                assert_eq!(&pool[value..value + bytes], expected, "{dtype:?} value of {x}");
            }
        }
    }
}

/// Writes one row of keys and values of two heads of 20 elements to slot 21 of a block of 32; returns the bytes of each
/// head.
fn int8_row(isa: Isa, k: &[f32; 40], v: &[f32; 40]) -> (CpuKvLayout, Vec<u8>) {
    let geometry = KvGeometry::new(1, 2, 20, 32, KvDType::I8);
    let layout = CpuKvLayout::new(geometry);
    let mut pool = vec![0xa5; layout.bytes_per_block()];
    let rows = BatchRows { q_lens: &[1], kv_lens: &[22], tables: &[BlockId(0)] };
    for write in kv_writes(rows, 32, 0, 1) {
        kv_write(isa, &layout, write, 0..2, KvRows { k, k_stride: 40, v, v_stride: 40 }, &mut pool);
    }
    (layout, pool)
}

#[test]
fn int8_stores_round_each_row_by_its_own_scale() {
    // Keys of the first head have amplitude 127, so that values are quantization steps, with ties in both directions.
    // Keys of the second head are 2^-20 of that.
    let mut steps = [0.0f32; 20];
    for (i, x) in steps.iter_mut().enumerate() {
        *x = if i == 7 { -127.0 } else { i as f32 - 10.5 };
    }
    let expected: [i8; 20] = [-10, -10, -8, -8, -6, -6, -4, -127, -2, -2, 0, 0, 2, 2, 4, 4, 6, 6, 8, 8];
    let small = steps.map(|x| x / 1_048_576.0);
    let join = |a: [f32; 20], b: [f32; 20]| -> [f32; 40] { [a, b].concat().try_into().unwrap() };
    let zero = [0.0f32; 20];
    let tiny = steps.map(|x| x * 1e-40);
    let [mut nan, mut infinite] = [steps; 2];
    (nan[3], infinite[19]) = (f32::NAN, f32::NEG_INFINITY);
    let large = steps.map(|x| x * 2.0f32.powi(120));

    for &isa in Isa::available() {
        for (k, v, quants, scales) in [
            (join(steps, small), join(small, steps), [expected; 4], [1.0, 0.5f32.powi(20), 0.5f32.powi(20), 1.0]),
            (join(zero, tiny), join(steps, zero), [[0; 20], [0; 20], expected, [0; 20]], [0.0, 0.0, 1.0, 0.0]),
            (
                join(nan, steps),
                join(infinite, large),
                [[0; 20], expected, [0; 20], expected],
                [f32::NAN, 1.0, f32::NAN, 2.0f32.powi(120)],
            ),
        ] {
            let (layout, pool) = int8_row(isa, &k, &v);
            let mut expected = vec![0xa5; pool.len()];
            // Slot 21 is lane 5 of the second tile. A tile has 384 bytes: 320 of elements and 64 of scales.
            assert_eq!((layout.tile_bytes(), layout.head_bytes(), pool.len()), (384, 4 * 384, 2 * 4 * 384));
            for head in 0..2 {
                let (key, value) = (layout.k_offset(head) + 384, layout.v_offset(head) + 384);
                for d in 0..20 {
                    expected[key + d * 16 + 5] = quants[head][d].cast_unsigned();
                    expected[value + 5 * 20 + d] = quants[2 + head][d].cast_unsigned();
                }
                expected[key + 320 + 5 * 4..][..4].copy_from_slice(&scales[head].to_le_bytes());
                expected[value + 320 + 5 * 4..][..4].copy_from_slice(&scales[2 + head].to_le_bytes());
            }
            let different = pool.iter().zip(&expected).position(|(a, b)| a != b);
            assert_eq!(different, None, "{isa:?}, {k:?}, {v:?}");
        }
    }
}

#[test]
fn int8_blocks_are_half_as_large_and_each_rank_has_its_heads_of_them() {
    for (head_dim, block_size) in [(64, 16), (128, 32), (20, 16), (7, 48)] {
        let geometry = |dtype| KvGeometry::new(3, 4, head_dim, block_size, dtype);
        let [half, int8] = [KvDType::F16, KvDType::I8].map(|dtype| CpuKvLayout::new(geometry(dtype)));
        assert_eq!(half.bytes_per_block(), geometry(KvDType::F16).bytes_per_block());
        let rows = 2 * 3 * 4 * block_size;
        assert_eq!(geometry(KvDType::I8).bytes_per_block(), rows * (head_dim + 4));
        // A tile has less than a cache line of padding.
        let padding = int8.bytes_per_block() - rows * (head_dim + 4);
        assert!(padding < rows / 16 * 64 && (padding == 0 || head_dim % 4 != 0), "{head_dim}: {padding}");
        assert!(int8.bytes_per_block().is_multiple_of(64));
        let mut end = 0;
        for layer in 0..3 {
            for first in [0, 2] {
                let range = int8.with_heads(first, 2).layer_range(BlockId(0), layer);
                assert_eq!((range.start, range.len()), (end, 2 * int8.head_bytes()));
                end = range.end;
            }
        }
        assert_eq!(end, int8.bytes_per_block());
        assert_eq!(int8.layer_range(BlockId(5), 0).start, 5 * end);
    }
}

#[test]
fn writes_cover_every_row_once_and_share_no_block() {
    let mut rng = Rng(99);
    for _ in 0..200 {
        let block_size = [16, 32, 128][rng.below(3)];
        let sequences = 1 + rng.below(5);
        let (mut q_lens, mut kv_lens, mut tables) = (vec![], vec![], vec![]);
        for _ in 0..sequences {
            let kv = 1 + rng.below(400);
            q_lens.push(1 + rng.below(kv) as u32);
            kv_lens.push(kv as u32);
            for _ in 0..kv.div_ceil(block_size) {
                tables.push(BlockId(tables.len() as u32));
            }
        }
        let rows = BatchRows { q_lens: &q_lens, kv_lens: &kv_lens, tables: &tables };
        let workers = 1 + rng.below(4);
        let (mut written, mut owners) = (vec![0; rows.total()], std::collections::HashMap::new());
        for worker in 0..workers {
            for write in kv_writes(rows, block_size, worker, workers) {
                assert!(write.first_slot + write.rows <= block_size && write.rows > 0);
                assert_eq!(*owners.entry(write.block).or_insert(worker), worker);
                written[write.first_row..write.first_row + write.rows].iter_mut().for_each(|n| *n += 1);
            }
        }
        assert!(written.iter().all(|n| *n == 1));
    }
}

#[test]
fn a_non_finite_row_affects_only_itself() {
    let shape = shape(2, 1, 16);
    let clean = Sequence::new(&shape, 40, 1);
    let mut dirty = clean.clone();
    dirty.q[20 * 32..21 * 32].fill(f32::NAN);
    let setup = Setup::plain(shape, KvDType::F32);
    let [a, b] = [&clean, &dirty].map(|s| run(&setup, std::slice::from_ref(s)).remove(0));
    assert_eq!(bits(&a[..20 * 32]), bits(&b[..20 * 32]));
    assert_eq!(bits(&a[21 * 32..]), bits(&b[21 * 32..]));
    assert!(b[20 * 32..21 * 32].iter().all(|x| x.is_nan()));
}
