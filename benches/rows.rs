//! Row kernels the way the device calls them: one thread, 512 rows in sequence, as in a prefill of `SmolLM2` 135M.
//!
//! `B/s` are bytes read and written. The rows of one pass (2.4 MiB for two matrices of 512 × 576) are in the L2 and L3
//! cache, as between two steps of a plan. The line before the benches shows the memory bandwidth and the peak
//! arithmetic rate of this machine with all its threads.

use std::hint::black_box;

use ascend_llm::device::cpu::Isa;
use ascend_llm::device::cpu::kernels::activation::{add_row, gelu_tanh_mul_row, mul_row, silu_mul_row};
use ascend_llm::device::cpu::kernels::argmax::{argmax_row, is_finite};
use ascend_llm::device::cpu::kernels::cast::{count_beyond, round_bf16_row, round_f16_row};
use ascend_llm::device::cpu::kernels::norm::rms_norm_row;
use ascend_llm::device::cpu::kernels::q8_rows::QuantLayout;
use ascend_llm::device::cpu::kernels::quantize::quantize_row;
use ascend_llm::device::cpu::kernels::rope::{rope_angles, rope_row};
use ascend_llm::graph::RopeStyle;
use criterion::{Criterion, Throughput, criterion_group, criterion_main};

use ascend_llm_benches::{Noise, print_peaks};

const ROWS: usize = 512;
const HIDDEN: usize = 576;
const MLP: usize = 1536;
const VOCAB: usize = 49_152;

/// Times `body(row, x, out)` over all rows of a matrix; each row reads and writes `moved` floats.
fn each_row(
    c: &mut Criterion,
    name: &str,
    (rows, cols, moved): (usize, usize, usize),
    mut body: impl FnMut(usize, &[f32], &mut [f32]),
) {
    let (x, mut out) = (Noise(1).floats(rows * cols), vec![0.0; rows * cols]);
    let mut group = c.benchmark_group(format!("rows/{}", Isa::detect().name()));
    group.throughput(Throughput::Bytes((rows * moved * size_of::<f32>()) as u64));
    group.bench_function(name, |b| {
        b.iter(|| {
            for row in 0..rows {
                body(row, black_box(&x[row * cols..][..cols]), &mut out[row * cols..][..cols]);
            }
            black_box(&mut out);
        });
    });
    group.finish();
}

fn rows(c: &mut Criterion) {
    print_peaks();
    let isa = Isa::detect();
    let weight = Noise(2).floats(HIDDEN);
    each_row(c, "rms_norm", (ROWS, HIDDEN, 2 * HIDDEN), |_, x, out| rms_norm_row(isa, x, &weight, 1e-5, out));
    each_row(c, "add", (ROWS, HIDDEN, 3 * HIDDEN), |_, x, out| add_row(isa, out, x));
    each_row(c, "mul", (ROWS, MLP, 3 * MLP), |_, x, out| mul_row(isa, x, x, out));
    each_row(c, "silu_mul", (ROWS, MLP, 2 * MLP), |_, x, out| silu_mul_row(isa, x, x, out));
    each_row(c, "gelu_tanh_mul", (ROWS, MLP, 2 * MLP), |_, x, out| gelu_tanh_mul_row(isa, x, x, out));
    each_row(c, "round_f16", (ROWS, HIDDEN, 2 * HIDDEN), |_, x, out| round_f16_row(isa, x, out));
    // Half a float is written for each float that is read.
    each_row(c, "round_bf16", (ROWS, HIDDEN, 3 * HIDDEN / 2), |_, x, out| {
        round_bf16_row(isa, x, &mut bytemuck::cast_slice_mut(out)[..x.len()]);
    });
    each_row(c, "count_beyond", (ROWS, HIDDEN, HIDDEN), |_, x, _| _ = black_box(count_beyond(isa, x, 65_504.0)));
    each_row(c, "is_finite", (ROWS, HIDDEN, HIDDEN), |_, x, _| _ = black_box(is_finite(isa, x)));
    each_row(c, "arg_max", (8, VOCAB, VOCAB), |_, x, _| _ = black_box(argmax_row(isa, x, 0)));

    let layout = QuantLayout::new(HIDDEN);
    let mut quants = vec![0; layout.row_bytes()];
    let moved = HIDDEN + layout.row_bytes() / size_of::<f32>();
    each_row(c, "quantize", (ROWS, HIDDEN, moved), |_, x, _| quantize_row(isa, layout, x, &mut quants));

    let inv_freq: Vec<f32> = (0..32u8).map(|i| 10_000f32.powf(-f32::from(i) / 32.0)).collect();
    let (mut cos, mut sin) = (vec![0.0; 32], vec![0.0; 32]);
    rope_angles(&inv_freq, 1000, 1.0, &mut cos, &mut sin);
    each_row(c, "rope", (ROWS, HIDDEN, 2 * HIDDEN), |_, _, out| rope_row(isa, out, 64, RopeStyle::Half, &cos, &sin));
    each_row(c, "rope_angles", (ROWS, 64, 64), |row, _, out| {
        let (cos, sin) = out.split_at_mut(32);
        rope_angles(&inv_freq, u32::try_from(row).unwrap_or(0), 1.0, cos, sin);
    });
}

criterion_group!(name = benches; config = ascend_llm_benches::criterion(); targets = rows);
criterion_main!(benches);
