//! Products of activation rows with packed weights, with the dimensions of `SmolLM2` 135M, on all threads this process
//! may use.
//!
//! `elem/s` are operations (a multiply and an add are two), `B/s` bytes of weights. Successive iterations use different
//! weights until 128 MiB have been read, like the layers of a model and unlike a single weight that would stay in the
//! L2 cache. Limit the threads with `taskset`.

use std::cell::LazyCell;
use std::hint::black_box;

use ascend_llm::device::cpu::Isa;
use ascend_llm::device::cpu::kernels::cast::round_bf16_row;
use ascend_llm::device::cpu::kernels::float_rows::FloatRows;
use ascend_llm::device::cpu::kernels::matmul::{matmul_bf16, matmul_f32, matmul_q8};
use ascend_llm::device::cpu::kernels::q8_rows::{QuantLayout, QuantRows};
use ascend_llm::device::cpu::kernels::quantize::quantize_rows;
use ascend_llm::device::cpu::memory::{AlignedBytes, Partition};
use ascend_llm::device::cpu::thread_pool::ThreadPool;
use ascend_llm::device::cpu::weights::pack::{PANEL, PackedMatrix};
use ascend_llm::weights::DType;
use ascend_llm::weights::convert::quantize;
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};

use ascend_llm_benches::{Noise, is_smoke};

/// Bytes of weights between two uses of the same one: the size of `SmolLM2` 135M in 8 bits.
const WALK_BYTES: usize = 128 << 20;

/// Outputs × inputs, and the numbers of rows: gate or up, down, `lm_head` (which sees only sampled rows).
const SHAPES: [(usize, usize, &[usize]); 3] =
    [(1536, 576, &[1, 8, 64, 512]), (576, 1536, &[1, 8, 64, 512]), (49_152, 576, &[1])];

const DTYPES: [DType; 7] = [DType::Q8_0, DType::Q4_0, DType::Q4_1, DType::Q4_K, DType::F16, DType::BF16, DType::F32];

/// Activations in the arena's format.
struct Rows {
    elem: Elem,
    k: usize,
    bytes: AlignedBytes,
}

#[derive(Clone, Copy, PartialEq)]
enum Elem {
    F32,
    BF16,
    Q8,
}

impl Elem {
    const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::BF16 => "bf16",
            Self::Q8 => "int8",
        }
    }

    /// Whether to show a path: it has a product of its own for these rows and weights, or it is the fastest path.
    fn multiplies(self, dtype: DType, isa: Isa) -> bool {
        match self {
            Self::F32 => !dtype.is_quantized() || isa == Isa::detect(),
            Self::BF16 => dtype == DType::BF16 && isa == Isa::Avx512Bf16,
            Self::Q8 => dtype.is_quantized(),
        }
    }
}

impl Rows {
    fn new(isa: Isa, elem: Elem, rows: usize, k: usize) -> Self {
        let x = Noise(1).floats(rows * k);
        let layout = QuantLayout::new(k);
        let mut bytes = aligned(match elem {
            Elem::F32 => size_of_val(x.as_slice()),
            Elem::BF16 => x.len() * size_of::<u16>(),
            Elem::Q8 => rows * layout.row_bytes(),
        });
        match elem {
            Elem::F32 => bytes.as_mut_slice().copy_from_slice(bytemuck::cast_slice(&x)),
            Elem::BF16 => round_bf16_row(isa, &x, bytemuck::cast_slice_mut(bytes.as_mut_slice())),
            Elem::Q8 => quantize_rows(isa, layout, &x, bytes.as_mut_slice()),
        }
        Self { elem, k, bytes }
    }
}

fn aligned(bytes: usize) -> AlignedBytes {
    AlignedBytes::zeroed(bytes).expect("memory")
}

/// Several weights of one shape, stored as one matrix of all their outputs.
struct Weights {
    matrix: PackedMatrix,
    n: usize,
}

impl Weights {
    fn new(threads: &ThreadPool, dtype: DType, n: usize, k: usize) -> Self {
        // Repeated values: the time depends on addresses, not on values.
        let mut panel = Vec::new();
        quantize(dtype, &Noise(2).floats(PANEL * k), &mut panel);
        let copies = if is_smoke() { 1 } else { WALK_BYTES.div_ceil(panel.len() * n / PANEL) };
        let data = panel.repeat(n / PANEL * copies);
        let matrix = PackedMatrix::pack(threads, dtype, n * copies, k, &data).expect("a weight");
        Self { matrix, n }
    }

    fn count(&self) -> usize {
        self.matrix.n() / self.n
    }

    /// Multiplies by weight `index` the way the device does: workers take whole panels of columns.
    fn multiply(&self, threads: &ThreadPool, isa: Isa, x: &Rows, index: usize, out: &mut [f32]) {
        let first = index * self.n / PANEL;
        let parts = Partition::columns(out, self.n, threads.parts(), PANEL);
        threads.run_parallel(&|worker| {
            let mut tile = parts.claim(worker.index());
            let start = first + tile.first() / PANEL;
            let panels = start..start + tile.cols().div_ceil(PANEL);
            let bytes = x.bytes.as_slice();
            match x.elem {
                Elem::F32 => {
                    let rows = FloatRows::new(bytemuck::cast_slice(bytes), x.k, x.k);
                    matmul_f32(isa, rows, &self.matrix, None, panels, &mut tile);
                }
                Elem::BF16 => {
                    let rows = FloatRows::new(bytemuck::cast_slice(bytes), x.k, x.k);
                    matmul_bf16(isa, rows, &self.matrix, None, panels, &mut tile);
                }
                Elem::Q8 => {
                    let rows = QuantRows::new(QuantLayout::new(x.k), bytes);
                    matmul_q8(isa, rows, &self.matrix, None, panels, &mut tile);
                }
            }
        });
    }
}

/// Products of the other paths, for comparison.
const OTHER_SHAPES: [(usize, usize, &[usize]); 1] = [(1536, 576, &[1, 512])];
const OTHER_DTYPES: [DType; 5] = [DType::Q8_0, DType::Q4_0, DType::Q4_1, DType::BF16, DType::F32];

/// Measures all products on the fastest path, and some on the others for comparison.
fn products(c: &mut Criterion, elem: Elem) {
    for &isa in Isa::available().iter().rev() {
        if isa == Isa::detect() {
            products_on(c, isa, elem, &DTYPES, &SHAPES);
        } else {
            products_on(c, isa, elem, &OTHER_DTYPES, &OTHER_SHAPES);
        }
    }
}

fn products_on(c: &mut Criterion, isa: Isa, elem: Elem, dtypes: &[DType], shapes: &[(usize, usize, &[usize])]) {
    let threads = ThreadPool::new(None).expect("a team");
    let mut group = c.benchmark_group(format!("matmul/{}/{}", elem.name(), isa.name()));
    for &dtype in dtypes {
        if !elem.multiplies(dtype, isa) {
            continue;
        }
        for &(n, k, batches) in shapes {
            // A K-quant's rows are whole blocks of 256: round up to the next possible size.
            let k = k.next_multiple_of(dtype.block_len());
            let bytes = dtype.bytes_for(n * k).expect("whole blocks");
            // Created only if the command line selects it.
            let weights = LazyCell::new(|| Weights::new(&threads, dtype, n, k));
            for &m in batches {
                let x = LazyCell::new(|| Rows::new(isa, elem, m, k));
                let mut out = aligned(m * n * size_of::<f32>());
                let mut next = 0;
                group
                    .throughput(Throughput::ElementsAndBytes { elements: (2 * m * n * k) as u64, bytes: bytes as u64 });
                group.bench_function(BenchmarkId::new(format!("{dtype}/{n}x{k}"), m), |b| {
                    let (weights, x) = (&*weights, &*x);
                    let out: &mut [f32] = bytemuck::cast_slice_mut(out.as_mut_slice());
                    b.iter(|| {
                        weights.multiply(&threads, isa, x, next, out);
                        next = (next + 1) % weights.count();
                        black_box(&mut *out);
                    });
                });
            }
        }
    }
    group.finish();
}

fn int8(c: &mut Criterion) {
    products(c, Elem::Q8);
}

fn float(c: &mut Criterion) {
    products(c, Elem::F32);
    products(c, Elem::BF16);
}

/// Quantizes activations to int8, on one thread.
fn quantize_activations(c: &mut Criterion) {
    let (isa, k) = (Isa::detect(), 576);
    let layout = QuantLayout::new(k);
    let mut group = c.benchmark_group(format!("quantize_rows/{}", isa.name()));
    for rows in [1, 64, 512] {
        let x = Noise(3).floats(rows * k);
        let mut out = aligned(rows * layout.row_bytes());
        group.throughput(Throughput::Elements((rows * k) as u64));
        group.bench_function(BenchmarkId::new(k.to_string(), rows), |b| {
            b.iter(|| quantize_rows(isa, layout, black_box(&x), out.as_mut_slice()));
        });
    }
    group.finish();
}

criterion_group!(name = benches; config = ascend_llm_benches::criterion(); targets = int8, float, quantize_activations);
criterion_main!(benches);
