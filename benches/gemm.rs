//! f32 products compared with the `gemm` crate, on one thread, with the dimensions of `SmolLM2` 135M and of a 1B model
//! at prefill.
//!
//! `elem/s` are operations. `gemm` reads the same weight as a column-major right side. Its time includes packing, while
//! our weights were packed when they were loaded: this is the cost that an engine would see with either.

#![allow(unsafe_code)] // the other crate's entry takes pointers

use std::hint::black_box;

use ascend_llm::device::cpu::Isa;
use ascend_llm::device::cpu::kernels::float_rows::FloatRows;
use ascend_llm::device::cpu::kernels::matmul::matmul_f32;
use ascend_llm::device::cpu::memory::{AlignedBytes, Tile};
use ascend_llm::device::cpu::thread_pool::ThreadPool;
use ascend_llm::device::cpu::weights::pack::{PANEL, PackedMatrix};
use ascend_llm::weights::DType;
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};

use ascend_llm_benches::{Noise, print_peaks};

/// Rows, outputs, inputs.
const SHAPES: [(usize, usize, usize); 5] =
    [(1, 1536, 576), (8, 1536, 576), (512, 1536, 576), (512, 576, 1536), (512, 8192, 2048)];

fn products(c: &mut Criterion) {
    print_peaks();
    let (isa, threads) = (Isa::detect(), ThreadPool::new(Some(1)).expect("a team"));
    let mut group = c.benchmark_group("gemm_f32");
    for (m, n, k) in SHAPES {
        if ascend_llm_benches::is_smoke() && m * n * k > 1 << 24 {
            continue;
        }
        let (x, w) = (Noise(1).floats(m * k), Noise(2).floats(n * k));
        let matrix = PackedMatrix::pack(&threads, DType::F32, n, k, bytemuck::cast_slice(&w)).expect("a weight");
        let mut out = AlignedBytes::zeroed(m * n * size_of::<f32>()).expect("memory");
        let out: &mut [f32] = bytemuck::cast_slice_mut(out.as_mut_slice());
        group.throughput(Throughput::Elements((2 * m * n * k) as u64));
        group.bench_function(BenchmarkId::new(format!("{n}x{k}/ours"), m), |b| {
            b.iter(|| {
                let rows = FloatRows::new(black_box(&x), k, k);
                matmul_f32(isa, rows, &matrix, None, 0..n.div_ceil(PANEL), &mut Tile::whole(out, n));
            });
        });
        let mut other = vec![0.0f32; m * n];
        group.bench_function(BenchmarkId::new(format!("{n}x{k}/gemm"), m), |b| {
            b.iter(|| multiply_with_gemm(m, n, k, black_box(&x), &w, &mut other));
        });
        let apart = out.iter().zip(&other).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(apart < 1e-3, "the two differ by {apart}");
    }
    group.finish();
}

/// Computes `out = x · wᵀ`.
fn multiply_with_gemm(m: usize, n: usize, k: usize, x: &[f32], w: &[f32], out: &mut [f32]) {
    assert!(x.len() == m * k && w.len() == n * k && out.len() == m * n);
    let stride = |n: usize| isize::try_from(n).expect("a small matrix");
    // SAFETY: strides and sizes describe exactly the slices, asserted above; only `out` is written.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            out.as_mut_ptr(),
            1,
            stride(n),
            false,
            x.as_ptr(),
            1,
            stride(k),
            w.as_ptr(),
            stride(k),
            1,
            0.0,
            1.0,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}

criterion_group!(name = benches; config = ascend_llm_benches::criterion(); targets = products);
criterion_main!(benches);
