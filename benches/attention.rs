//! Paged attention with the dimensions of `SmolLM2` 135M (9 query heads, 3 KV heads of 64, f16 keys and values), on all
//! threads.
//!
//! `elem/s` are operations of `q·k` and `p·v` over visible tokens, `B/s` bytes of keys and values that a step must read
//! once. Each iteration uses the next of 30 layers, so that a long context is read from the same level of the memory
//! hierarchy as in a model. The work split is recomputed each time, as on the device.
//!
//! The group `attention_kv` runs one sequence over keys and values of each type.
//!
//! The group `attention_order` runs the same steps in each loop order, whatever the length; set `full_max` and
//! `partial_max` to the lengths at which the full and the partial order stop being faster. Its decode steps have four
//! sequences, because a single one is split into segments and then has no choice of order.

use std::cell::LazyCell;
use std::hint::black_box;

use ascend_llm::device::cpu::Isa;
use ascend_llm::device::cpu::kernels::attention::{
    Attention, AttentionDims, AttentionSchedules, AttentionScratch, WorkSplit,
};
use ascend_llm::device::cpu::kernels::kv_cache::{BatchRows, CpuKvLayout, KvRows, KvWrite, kv_write};
use ascend_llm::device::cpu::memory::{AlignedBytes, Partition};
use ascend_llm::device::cpu::thread_pool::ThreadPool;
use ascend_llm::kv_cache::{BlockId, KvDType, KvGeometry};
use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};

use ascend_llm_benches::Noise;

const SHAPE: AttentionDims =
    AttentionDims { heads: 9, kv_heads: 3, head_dim: 64, scale: 0.125, window: None, softcap: None, schedules: None };
const LAYERS: usize = 30;
const BLOCK_SIZE: usize = 16;
const Q_WIDTH: usize = SHAPE.heads * SHAPE.head_dim;

const fn geometry(dtype: KvDType) -> KvGeometry {
    KvGeometry::new(LAYERS, SHAPE.kv_heads, SHAPE.head_dim, BLOCK_SIZE, dtype)
}

/// Numbers of visible tokens for the comparison of loop orders.
const ORDER_LENGTHS: [usize; 3] = [512, 2048, 8192];

/// Each loop order, at any length.
const ORDERS: [(&str, Option<AttentionSchedules>); 3] = [
    ("full", Some(AttentionSchedules { full_max: LONGEST, partial_max: LONGEST })),
    ("partial", Some(AttentionSchedules { full_max: 0, partial_max: LONGEST })),
    ("blocked", None),
];
const LONGEST: u32 = AttentionSchedules::LARGEST_PARTIAL_MAX;

/// Sequences of one length; the last rows of each are computed.
#[derive(Clone, Copy)]
struct Case {
    seqs: usize,
    rows: usize,
    kv_len: usize,
    dtype: KvDType,
}

impl Case {
    fn throughput(self) -> Throughput {
        let visible: usize = (self.kv_len - self.rows + 1..=self.kv_len).sum();
        let elements = self.seqs * 4 * visible * Q_WIDTH;
        let bytes = self.seqs * self.kv_len * geometry(self.dtype).bytes_per_token() / LAYERS;
        Throughput::ElementsAndBytes { elements: elements as u64, bytes: bytes as u64 }
    }
}

/// Inputs of a step.
struct Inputs {
    layout: CpuKvLayout,
    pool: AlignedBytes,
    tables: Vec<BlockId>,
    q_lens: Vec<u32>,
    kv_lens: Vec<u32>,
    q: Vec<f32>,
}

impl Inputs {
    fn new(case: Case) -> Self {
        let count = |n: usize| u32::try_from(n).expect("a small number");
        let blocks = case.seqs * case.kv_len.div_ceil(BLOCK_SIZE);
        let layout = CpuKvLayout::new(geometry(case.dtype));
        let mut pool = AlignedBytes::zeroed(blocks * layout.bytes_per_block()).expect("memory");
        // The same random values in every block: the time does not depend on values as long as they are ordinary
        // numbers.
        let width = SHAPE.kv_heads * SHAPE.head_dim;
        let noise = Noise(1).floats(BLOCK_SIZE * width);
        let rows = KvRows { k: &noise, k_stride: width, v: &noise, v_stride: width };
        for block in (0..count(blocks)).map(BlockId) {
            let write = KvWrite { block, first_row: 0, first_slot: 0, rows: BLOCK_SIZE };
            for layer in 0..LAYERS {
                let bytes = &mut pool.as_mut_slice()[layout.layer_range(block, layer)];
                kv_write(Isa::detect(), &layout, write, 0..SHAPE.kv_heads, rows, bytes);
            }
        }
        // Blocks in random order, as in a pool that has been used for a while.
        let mut tables: Vec<BlockId> = (0..count(blocks)).map(BlockId).collect();
        let mut order = Noise(2);
        tables.sort_by_cached_key(|_| order.bits());
        Self {
            layout,
            pool,
            tables,
            q_lens: vec![count(case.rows); case.seqs],
            kv_lens: vec![count(case.kv_len); case.seqs],
            q: Noise(3).floats(case.seqs * case.rows * Q_WIDTH),
        }
    }

    fn attention(&self, isa: Isa, schedules: Option<AttentionSchedules>, layer: usize) -> Attention<'_> {
        Attention {
            isa,
            shape: AttentionDims { schedules, ..SHAPE },
            layout: self.layout,
            layer,
            pool: self.pool.as_slice(),
            rows: BatchRows { q_lens: &self.q_lens, kv_lens: &self.kv_lens, tables: &self.tables },
            q: &self.q,
            q_stride: Q_WIDTH,
            sinks: None,
        }
    }
}

/// The thread pool and the workers' outputs.
struct Bench {
    threads: ThreadPool,
    scratches: Vec<AttentionScratch>,
    schedule: WorkSplit,
    partials: Vec<f32>,
    out: Vec<f32>,
}

impl Bench {
    fn new(schedules: Option<AttentionSchedules>) -> Self {
        let threads = ThreadPool::new(None).expect("a team");
        let workers = threads.parts();
        Self {
            scratches: (0..workers).map(|_| AttentionScratch::new(&AttentionDims { schedules, ..SHAPE })).collect(),
            schedule: WorkSplit::new(workers).parts_per_thread(workers / threads.count()),
            threads,
            partials: Vec::new(),
            out: Vec::new(),
        }
    }

    /// Runs one layer's attention the way the device does.
    fn run(&mut self, attention: &Attention<'_>) {
        let Self { threads, scratches, schedule, partials, out } = self;
        schedule.plan(&attention.shape, attention.rows, BLOCK_SIZE);
        out.resize(attention.rows.total() * Q_WIDTH, 0.0);
        if !schedule.needs_merge() {
            let parts = Partition::rows_at(out, SHAPE.piece_len(), schedule.bounds());
            attend(threads, scratches, attention, schedule, &parts);
            return;
        }
        partials.resize(schedule.bounds().last().map_or(0, |end| end * SHAPE.partial_len()), 0.0);
        let parts = Partition::rows_at(partials, SHAPE.partial_len(), schedule.bounds());
        attend(threads, scratches, attention, schedule, &parts);
        let partials = parts.read();
        let parts = Partition::rows_at(out, SHAPE.piece_len(), schedule.merge_bounds());
        let scratches = Partition::rows(scratches, 1, threads.parts(), 1);
        threads.run_parallel(&|worker| {
            let (mut scratch, mut tile) = (scratches.claim(worker.index()), parts.claim(worker.index()));
            let first = tile.first();
            attention.merge(schedule, worker.index(), partials, &mut scratch.row_mut(0)[0], &mut |piece, values| {
                tile.row_mut(piece - first).copy_from_slice(values);
            });
        });
    }
}

fn attend(
    threads: &ThreadPool,
    scratches: &mut [AttentionScratch],
    attention: &Attention<'_>,
    schedule: &WorkSplit,
    parts: &Partition<'_, f32>,
) {
    let scratches = Partition::rows(scratches, 1, threads.parts(), 1);
    threads.run_parallel(&|worker| {
        let (mut scratch, mut tile) = (scratches.claim(worker.index()), parts.claim(worker.index()));
        let first = tile.first();
        attention.attend(schedule, worker.index(), &mut scratch.row_mut(0)[0], &mut |piece, values| {
            tile.row_mut(piece - first).copy_from_slice(values);
        });
    });
}

fn measure(
    group: &mut BenchmarkGroup<'_, WallTime>,
    name: &str,
    case: Case,
    schedules: Option<AttentionSchedules>,
    inputs: &LazyCell<Inputs, impl FnOnce() -> Inputs>,
) {
    let isa = Isa::detect();
    let mut bench = Bench::new(schedules);
    let mut layer = 0;
    group.throughput(case.throughput());
    group.bench_function(BenchmarkId::new(format!("{name}/{}seq", case.seqs), case.kv_len), |b| {
        let inputs: &Inputs = inputs;
        b.iter(|| {
            bench.run(&inputs.attention(isa, schedules, layer));
            layer = (layer + 1) % LAYERS;
            black_box(&mut bench.out);
        });
    });
}

fn attention(c: &mut Criterion) {
    let mut group = c.benchmark_group(format!("attention/{}", Isa::detect().name()));
    let decode = [(1, 128), (1, 1024), (1, 4096), (32, 256)];
    let decode = decode.map(|(seqs, kv_len)| ("decode", Case { seqs, rows: 1, kv_len, dtype: KvDType::F16 }));
    for (name, case) in
        decode.into_iter().chain([("prefill", Case { seqs: 1, rows: 512, kv_len: 512, dtype: KvDType::F16 })])
    {
        // Created only if the command line selects it.
        let inputs = LazyCell::new(|| Inputs::new(case));
        measure(&mut group, name, case, None, &inputs);
    }
    group.finish();

    let mut group = c.benchmark_group(format!("attention_kv/{}", Isa::detect().name()));
    for (step, rows, kv_len) in [("decode", 1, 1024), ("decode", 1, 4096), ("prefill", 512, 512)] {
        for (name, dtype) in [("f32", KvDType::F32), ("f16", KvDType::F16), ("i8", KvDType::I8)] {
            let case = Case { seqs: 1, rows, kv_len, dtype };
            let inputs = LazyCell::new(|| Inputs::new(case));
            measure(&mut group, &format!("{step}/{name}"), case, None, &inputs);
        }
    }
    group.finish();

    let mut group = c.benchmark_group(format!("attention_order/{}", Isa::detect().name()));
    for kv_len in ORDER_LENGTHS {
        for (step, seqs, rows) in [("prefill", 1, 128), ("decode", 4, 1)] {
            let case = Case { seqs, rows, kv_len, dtype: KvDType::F16 };
            let inputs = LazyCell::new(|| Inputs::new(case));
            for (order, schedules) in ORDERS {
                measure(&mut group, &format!("{step}/{order}"), case, schedules, &inputs);
            }
        }
    }
    group.finish();
}

criterion_group!(name = benches; config = ascend_llm_benches::criterion(); targets = attention);
criterion_main!(benches);
