//! Shared code of the benches: random inputs, criterion's settings, and timing of state that wears out.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ascend_llm::device::Telemetry as _;
use ascend_llm::device::cpu::{CpuDevice, CpuOptions};
use criterion::{Bencher, Criterion};

/// `SplitMix64` generator. Each use has a fixed seed, so that every run measures the same data.
#[derive(Debug)]
pub struct Noise(pub u64);

impl Noise {
    /// 64 uniformly distributed bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in -1..1.
    pub fn float(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    /// `n` uniform values.
    pub fn floats(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.float()).collect()
    }

    /// Approximately normal, with deviation 1.
    pub fn normal(&mut self) -> f32 {
        // The sum of twelve uniform values of width 1 has variance 1.
        (0..12).map(|_| self.float() / 2.0).sum()
    }

    /// `n` numbers below a bound.
    pub fn ids(&mut self, n: usize, below: u32) -> Vec<u32> {
        (0..n).map(|_| u32::try_from(self.bits() % u64::from(below)).unwrap_or(0)).collect()
    }
}

/// Path of the small story model in the repository.
pub fn story_model() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/models/fable-f16.gguf")
}

/// Shorter than criterion's defaults: the benches together take minutes, and the measured times are far above the
/// clock's resolution.
pub fn criterion() -> Criterion {
    Criterion::default()
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(2))
        .sample_size(20)
}

/// Prints the machine's peak rates for comparison with the kernels' rates; prints nothing if each body runs only once.
pub fn print_peaks() {
    if is_smoke() {
        return;
    }
    let device = CpuDevice::new(CpuOptions::default()).expect("the CPU");
    let Some(peaks) = device.peak_rates() else { return };
    let giga = |per_s: u64| per_s as f64 / 1e9;
    let (f32s, int8s, bytes) = (peaks.f32_flops_per_s, peaks.int8_ops_per_s, peaks.read_bytes_per_s);
    println!(
        "peaks of {} threads: f32 {:.0} GFLOP/s, int8 {:.0} GOP/s, reading {:.1} GB/s",
        device.threads(),
        giga(f32s),
        giga(int8s),
        giga(bytes)
    );
}

/// Whether each body runs only once, to check that it works (`cargo bench -- --test`, `cargo test --benches`).
pub fn is_smoke() -> bool {
    let has = |flag: &str| std::env::args().any(|arg| arg == flag);
    has("--test") || !has("--bench")
}

/// Times `step` on state that supports at most `life` steps; recreating the state is not timed.
pub fn bench_aging<S>(
    bencher: &mut Bencher<'_>,
    life: u64,
    mut renew: impl FnMut() -> S,
    mut step: impl FnMut(&mut S),
) {
    bencher.iter_custom(|iterations| {
        let (mut left, mut spent) = (iterations, Duration::ZERO);
        while left > 0 {
            let mut state = renew();
            let run = left.min(life);
            let start = Instant::now();
            for _ in 0..run {
                step(&mut state);
            }
            spent += start.elapsed();
            left -= run;
        }
        spent
    });
}
