//! Measures peak rates of the thread pool: multiply-adds, int8 dot products, bytes read.
//!
//! The arithmetic rate is the sum of each worker's best piece while all are working, so a worker that temporarily
//! shares its processor with another program does not distort it. Memory is shared, so the read rate counts the bytes
//! that all workers read in one window. The whole measurement takes 20 to 50 ms. A result belongs to the machine, an
//! instruction-set path and a number of threads; it is measured on the first query and kept for the life of the
//! process.

#![forbid(unsafe_code)]

use std::hint::black_box;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::device::cpu::Isa;
use crate::device::cpu::memory::AlignedBytes;
use crate::device::cpu::simd::int8_chains;
use crate::device::cpu::simd::vector::{Kernel, LANES, SimdVector, dispatch};
use crate::device::cpu::thread_pool::ThreadPool;
use crate::device::{DeviceError, PeakRates};

/// Smallest number of bytes that all workers read: far more than L2 caches, and more than the last-level cache of many
/// machines. A larger buffer would take longer to allocate than the rest of the measurement.
const BUFFER_BYTES: usize = 128 << 20;
/// Smallest number of bytes that one worker reads.
const PART_BYTES: usize = 4 << 20;
/// Bytes that a worker reads between two clock reads. The arithmetic between two clock reads takes about the same 10 to
/// 20 µs.
const PIECE_BYTES: usize = 256 << 10;
const PIECE_ROUNDS: u64 = 2048;
/// Number of positions of a piece that are read in parallel.
const STREAMS: usize = 4;
const LINE: usize = 64;
const PAGE: usize = 4096;
/// Length of the windows of which the best one counts: short enough that all workers run during at least one, even if
/// other programs compete for processors.
const WINDOW: Duration = Duration::from_micros(750);
/// Duration of one measurement, and the longer duration used if the workers do not get to run together: the system may
/// take some milliseconds to distribute threads over processors.
const TIME: Duration = Duration::from_millis(5);
const LONGEST: Duration = Duration::from_millis(15);

/// Peak rates of this thread pool on this path, cached after the first measurement.
pub(crate) fn peak_rates(threads: &ThreadPool, isa: Isa) -> Result<PeakRates, DeviceError> {
    static KNOWN: Mutex<Vec<(Isa, usize, PeakRates)>> = Mutex::new(Vec::new());
    // Held while measuring, so that two measurements do not disturb each other.
    let mut known = KNOWN.lock();
    if let Some((.., peaks)) = known.iter().find(|(path, count, _)| (*path, *count) == (isa, threads.count())) {
        return Ok(*peaks);
    }
    let peaks = measure(threads, isa)?;
    known.push((isa, threads.count(), peaks));
    Ok(peaks)
}

fn measure(threads: &ThreadPool, isa: Isa) -> Result<PeakRates, DeviceError> {
    // Measure reads first: touching the buffer takes long enough for the threads to be distributed over processors.
    let read_bytes_per_s = bytes_per_s(threads, isa)?;
    let f32_flops_per_s = best_rates(threads, TIME, &|_, _| fma_chains(isa, PIECE_ROUNDS)).each;
    let int8_ops_per_s = if int8_chains(isa, 0).is_some() {
        best_rates(threads, TIME, &|_, _| int8_chains(isa, PIECE_ROUNDS).unwrap_or(0)).each
    } else {
        // Without an instruction for int8 dot products, int8 is no faster than f32.
        f32_flops_per_s
    };
    Ok(PeakRates { f32_flops_per_s, int8_ops_per_s, read_bytes_per_s })
}

/// One piece of a worker's work: receives the worker's index and the piece's index, and returns the amount of work
/// done.
type Piece<'a> = &'a (dyn Fn(usize, usize) -> u64 + Sync);

/// Amounts per second.
#[derive(Clone, Copy, Debug)]
struct Rates {
    /// Largest amount that all workers did in one window.
    together: u64,
    /// Sum of the largest amount that each worker did in one piece.
    each: u64,
}

/// Measures for at least `TIME`, and for at most `longest` while the joint rate is far below the sum of the single
/// rates. Workers without a processor of their own are idle.
fn best_rates(threads: &ThreadPool, longest: Duration, piece: Piece<'_>) -> Rates {
    let [done, together, each] = [const { AtomicU64::new(0) }; 3];
    // After the first worker has ended, the others have more bandwidth than normal, so nothing counts from then on.
    let over = AtomicBool::new(false);
    let rates = || Rates { together: together.load(Ordering::Relaxed), each: each.load(Ordering::Relaxed) };
    let at_work = busy_threads(threads);
    threads.run(&|worker| {
        worker.barrier();
        if worker.index() >= at_work {
            return;
        }
        let start = Instant::now();
        let (mut opened, mut before, mut my_best) = ((start, done.load(Ordering::Relaxed)), start, 0);
        for number in 0.. {
            let amount = piece(worker.index(), number);
            let so_far = done.fetch_add(amount, Ordering::Relaxed) + amount;
            if over.load(Ordering::Relaxed) && my_best > 0 {
                break;
            }
            let now = Instant::now();
            let my_rate = per_s(amount, now - before);
            before = now;
            if my_rate > my_best {
                each.fetch_add(my_rate - my_best, Ordering::Relaxed);
                my_best = my_rate;
            }
            if now - opened.0 < WINDOW {
                continue;
            }
            together.fetch_max(per_s(so_far - opened.1, now - opened.0), Ordering::Relaxed);
            opened = (now, so_far);
            let (passed, rates) = (now - start, rates());
            if passed >= longest || passed >= TIME && rates.together >= rates.each / 10 * 6 {
                over.store(true, Ordering::Relaxed);
                break;
            }
        }
    });
    rates()
}

fn busy_threads(threads: &ThreadPool) -> usize {
    std::thread::available_parallelism().map_or(usize::MAX, usize::from).min(threads.count())
}

#[allow(clippy::cast_possible_truncation)] // casts of floats saturate
fn per_s(amount: u64, time: Duration) -> u64 {
    (amount as f64 / time.as_secs_f64()) as u64
}

/// Runs enough independent multiply-adds to hide their latency; returns the number of operations.
fn fma_chains(isa: Isa, rounds: u64) -> u64 {
    struct Chains(u64);
    impl Kernel for Chains {
        type Output = u64;
        #[inline(always)]
        fn run<L: SimdVector>(self, l: L) -> u64 {
            // As many accumulators as fit in the registers along with two constants.
            if L::HAS_32_REGISTERS { chains::<L, 12>(l, self.0) } else { chains::<L, 5>(l, self.0) }
        }
    }
    dispatch(isa, Chains(rounds))
}

#[inline(always)]
fn chains<L: SimdVector, const N: usize>(l: L, rounds: u64) -> u64 {
    // Start values differ; otherwise the compiler would merge the N chains into one.
    let mut sums = [l.splat(0.0); N];
    for (start, sum) in [0.25_f32; N].into_iter().zip(&mut sums) {
        *sum = l.splat(black_box(start));
    }
    let (factor, term) = (l.splat(black_box(0.75)), l.splat(black_box(0.5)));
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = l.fma(*sum, factor, term);
        }
    }
    for sum in sums {
        let mut result = [0.0; LANES];
        l.store(sum, &mut result);
        black_box(&result);
    }
    rounds * (N * LANES * 2) as u64
}

/// Bytes per second that all workers read together. Each worker reads a part of the buffer that it has touched first.
fn bytes_per_s(threads: &ThreadPool, isa: Isa) -> Result<u64, DeviceError> {
    let part_bytes = (BUFFER_BYTES / busy_threads(threads)).max(PART_BYTES) / PIECE_BYTES * PIECE_BYTES;
    let mut buffer = AlignedBytes::zeroed(part_bytes * busy_threads(threads))?;
    let parts: Vec<_> = buffer.as_mut_slice().chunks_exact_mut(part_bytes).map(Mutex::new).collect();
    threads.run(&|worker| {
        if let Some(part) = parts.get(worker.index()) {
            // Pages that were never written all map to one page of zeros.
            part.lock().iter_mut().step_by(PAGE).for_each(|byte| *byte = 1);
        }
    });
    let read = |worker: usize, number: usize| {
        let part = parts[worker].lock();
        let start = number * PIECE_BYTES % part_bytes;
        black_box(read_all(isa, &part[start..start + PIECE_BYTES]));
        PIECE_BYTES as u64
    };
    Ok(best_rates(threads, LONGEST, &read).together)
}

/// Reads all of `bytes`, whose length is a multiple of [`STREAMS`] lines.
fn read_all(isa: Isa, bytes: &[u8]) -> f32 {
    struct Read<'a>(&'a [u8]);
    impl Kernel for Read<'_> {
        type Output = f32;
        #[inline(always)]
        fn run<L: SimdVector>(self, l: L) -> f32 {
            let lines = self.0.as_chunks::<LINE>().0;
            let (half, quarter) = (lines.len() / 2, lines.len() / STREAMS);
            let ((a, b), (c, d)) = (lines[..half].split_at(quarter), lines[half..].split_at(quarter));
            let mut sums = [l.splat(0.0); STREAMS];
            for (((a, b), c), d) in a.iter().zip(b).zip(c).zip(d) {
                for (sum, line) in sums.iter_mut().zip([a, b, c, d]) {
                    *sum = l.add(*sum, l.load_f32_bytes(line));
                }
            }
            l.sum(l.add(l.add(sums[0], sums[1]), l.add(sums[2], sums[3])))
        }
    }
    dispatch(isa, Read(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peaks_are_measured_once_for_a_path_and_a_number_of_threads() {
        for &isa in Isa::available() {
            let threads = ThreadPool::new(Some(2)).unwrap();
            let first = peak_rates(&threads, isa).unwrap();
            assert!(first.f32_flops_per_s > 0 && first.int8_ops_per_s > 0 && first.read_bytes_per_s > 0, "{first:?}");
            // The second call returns exactly the cached result.
            assert_eq!(peak_rates(&ThreadPool::new(Some(2)).unwrap(), isa).unwrap(), first);
        }
    }
}
