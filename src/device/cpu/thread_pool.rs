//! A fixed pool of threads that runs one closure at a time; the calling thread is worker 0.
//!
//! Guarantees: start, end and barrier are cheap (one cache line each while all threads are awake); the work is split
//! the same way in every run, so a result cannot depend on timing; a panic in one worker ends the run on all workers
//! and is resumed by [`ThreadPool::run`] on the caller. Waiting threads spin for about as long as a wake-up costs, then
//! yield their time slice, then sleep. After a thread's first run the pool does not allocate. Threads are never pinned.
//!
//! A run without barriers ([`ThreadPool::run_parallel`]) splits the work into more parts than there are threads. Each
//! thread starts with its own parts, then steals parts that have not begun. The run therefore does not wait for a
//! thread that has lost its processor to another program, whose memory is slower at the moment, or that wakes up only
//! after the work is done.
//!
//! ```text
//! run:   caller  job ─ epoch+1 ─ own parts ─ (parts not begun) ─ wait left == parts ─ raise a panic, if any
//!        thread  wait epoch ─── own parts ─ (parts not begun) ─ wait epoch …
//! ```
//!
//! A thread begins a part of run `e` by moving the part's counter from `e - 1` to `e`. Every run moves every counter,
//! so this succeeds exactly once, and only in run `e`. The run ends after every part that was begun has ended.

#![allow(unsafe_code)]

use crate::device::DeviceError;
use parking_lot::{Condvar, Mutex};
use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Largest number of threads in a pool: the width of the claim masks in [`memory`](super::memory).
pub const MAX_WORKERS: usize = 256;

/// Parts per thread in a parallel run. Two are enough for other threads to steal one; more would shorten the streams
/// that matrix products read.
const PARTS_PER_THREAD: u32 = 2;

/// Spinning longer than a wake-up costs (5 to 50 µs, depending on scheduler and load) cannot pay off.
const SPIN: Duration = Duration::from_micros(20);
/// Between two steps the host samples and schedules; sleeping in that gap would add a wake-up to every step.
const YIELD: Duration = Duration::from_micros(200);
/// Spins between two clock reads; a clock read costs about as much as 20 spins.
const SPINS_PER_LOOK: u32 = 128;

type Body<'a> = dyn Fn(&WorkerCtx<'_>) + Sync + 'a;
type Payload = Box<dyn Any + Send>;

/// Body of a run and its mode.
#[derive(Clone, Copy)]
struct Job {
    body: &'static Body<'static>,
    /// Whether each worker has a thread of its own, so that workers can wait for each other.
    together: bool,
}

impl std::fmt::Debug for Job {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Job").field("together", &self.together).finish_non_exhaustive()
    }
}

/// Aligns a value to cache lines of its own, so that threads that spin on it are not disturbed by other writes.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Line<T>(T);

#[derive(Debug)]
struct Shared {
    count: u32,
    /// Number of parts in a parallel run; a run with barriers has one part per thread.
    parts: u32,
    /// Body of the current run; the caller writes it before it moves `epoch` and clears it when `left` has reached
    /// `parts`.
    job: UnsafeCell<Option<Job>>,
    /// For each part, the last run in which it was begun.
    begun: Box<[Line<AtomicU32>]>,
    /// Number of runs so far; incrementing it starts a run.
    epoch: Line<AtomicU32>,
    /// Number of parts of the current run that have ended.
    left: Line<AtomicU32>,
    /// Number of workers that have reached the current barrier.
    arrived: Line<AtomicU32>,
    /// Number of barriers passed so far; incrementing it opens one.
    passed: Line<AtomicU32>,
    sleepers: AtomicU32,
    stop: AtomicBool,
    lock: Mutex<()>,
    wake: Condvar,
    /// First panic of the run. `uneven` is set if a worker left others waiting at a barrier.
    panic: Mutex<Option<Payload>>,
    uneven: AtomicBool,
}

// SAFETY: `job` is the only field that is not `Sync` by itself. The caller writes it while no part runs (before it
// moves `epoch` and after all parts have ended). Workers read it only after they have begun a part. `epoch` and `left`
// order the two.
unsafe impl Sync for Shared {}
// SAFETY: the reference in `job` is to a `Sync` closure.
unsafe impl Send for Shared {}

/// Panic payload of a worker that waited for a worker which had already left; never visible outside.
struct Abandoned;

thread_local! {
    /// Pool whose body this thread is executing; used to refuse a nested run, which would deadlock.
    static INSIDE: Cell<*const Shared> = const { Cell::new(std::ptr::null()) };
    /// Whether this thread has already slept in a lock.
    static HAS_SLEPT: Cell<bool> = const { Cell::new(false) };
}

/// Makes this thread sleep once, for no time. A thread's first sleep makes the lock library register it in a table that
/// may have to grow. Whether a run sleeps depends on timing, so each thread registers at its start.
fn sleep_once() {
    if !HAS_SLEPT.replace(true) {
        let nobody = Mutex::new(());
        let _timed_out = Condvar::new().wait_for(&mut nobody.lock(), Duration::ZERO);
    }
}

impl Shared {
    /// Returns once `ready` returns true. The thread that makes it true must then call [`Self::notify`]. Both sides use
    /// `SeqCst`, so either the waiter sees the change or the notifier sees the sleeper.
    fn wait(&self, ready: impl Fn() -> bool) {
        for _ in 0..SPINS_PER_LOOK {
            if ready() {
                return;
            }
            std::hint::spin_loop();
        }
        let start = Instant::now();
        loop {
            let waited = start.elapsed();
            if waited > YIELD {
                break;
            }
            if waited > SPIN {
                std::thread::yield_now();
                if ready() {
                    return;
                }
                continue;
            }
            for _ in 0..SPINS_PER_LOOK {
                if ready() {
                    return;
                }
                std::hint::spin_loop();
            }
        }
        let mut guard = self.lock.lock();
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        while !ready() {
            self.wake.wait(&mut guard);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }

    fn notify(&self) {
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            let _guard = self.lock.lock();
            self.wake.notify_all();
        }
    }

    /// Begins a part of a run; false if another thread has begun it.
    fn begin(&self, part: u32, epoch: u32) -> bool {
        let begun = &self.begun[part as usize].0;
        begun.compare_exchange(epoch.wrapping_sub(1), epoch, Ordering::SeqCst, Ordering::Relaxed).is_ok()
    }

    /// Runs a thread's own parts in order, then steals parts of the other threads, starting with the next thread and
    /// with each thread's last part, which its owner would reach last.
    fn take_parts(&self, thread: u32, epoch: u32) {
        let each = self.parts / self.count;
        for other in (thread..self.count).chain(0..thread) {
            for turn in 0..each {
                let part = other * each + if other == thread { turn } else { each - 1 - turn };
                if !self.begin(part, epoch) {
                    continue;
                }
                // SAFETY: the part has been begun and has not ended, so the run has not ended; the caller wrote `job`
                // before it moved `epoch`.
                let Some(job) = (unsafe { *self.job.get() }) else { return };
                if job.together {
                    return self.part(thread, self.count, job);
                }
                self.part(part, self.parts, job);
            }
        }
    }

    /// Runs the body for one of `count` workers and records its end, with or without a panic.
    fn part(&self, index: u32, count: u32, job: Job) {
        let shared = job.together.then_some(self);
        let outcome = catch_unwind(AssertUnwindSafe(|| (job.body)(&WorkerCtx { shared, index, count })));
        if let Err(payload) = outcome {
            if payload.is::<Abandoned>() {
                self.uneven.store(true, Ordering::Relaxed);
            } else {
                self.panic.lock().get_or_insert(payload);
            }
        }
        self.left.0.fetch_add(1, Ordering::SeqCst);
        self.notify();
    }

    fn work(&self, index: u32) {
        INSIDE.set(self);
        sleep_once();
        let mut seen = 0;
        loop {
            self.wait(|| self.epoch.0.load(Ordering::SeqCst) != seen || self.stop.load(Ordering::SeqCst));
            if self.stop.load(Ordering::SeqCst) {
                return;
            }
            // Runs that other threads completed in the meantime are skipped.
            seen = self.epoch.0.load(Ordering::SeqCst);
            self.take_parts(index, seen);
        }
    }

    fn barrier(&self) {
        let passed = self.passed.0.load(Ordering::SeqCst);
        if self.arrived.0.fetch_add(1, Ordering::SeqCst) + 1 == self.count {
            self.arrived.0.store(0, Ordering::Relaxed);
            self.passed.0.store(passed.wrapping_add(1), Ordering::SeqCst);
            self.notify();
            return;
        }
        // In a run with barriers each thread has one part; the other parts count as ended from the start.
        let ended = self.parts - self.count;
        self.wait(|| self.passed.0.load(Ordering::SeqCst) != passed || self.left.0.load(Ordering::SeqCst) > ended);
        // A worker may have passed this barrier and already left; the barrier is abandoned only if it was never opened.
        if self.passed.0.load(Ordering::SeqCst) == passed {
            resume_unwind(Box::new(Abandoned));
        }
    }
}

/// Context of one worker in a run. In a parallel run, one thread may execute several workers.
#[derive(Clone, Copy, Debug)]
pub struct WorkerCtx<'a> {
    shared: Option<&'a Shared>,
    index: u32,
    count: u32,
}

impl WorkerCtx<'_> {
    /// Index of this worker, `0..count`; in [`ThreadPool::run`] 0 is the calling thread.
    pub fn index(&self) -> usize {
        self.index as usize
    }

    /// Number of workers in the run.
    pub fn count(&self) -> usize {
        self.count as usize
    }

    /// Waits until every worker has arrived; writes made before the barrier are visible to all workers after it. All
    /// workers must pass the same number of barriers in a run: otherwise the run panics on the caller.
    ///
    /// # Panics
    /// In [`ThreadPool::run_parallel`], where one thread may execute several workers.
    pub fn barrier(&self) {
        match self.shared {
            Some(shared) => shared.barrier(),
            None => assert!(self.count == 1, "a barrier between workers that one thread may execute"),
        }
    }

    /// This worker's share of `n` items, split at multiples of `granule`.
    pub fn span(&self, n: usize, granule: usize) -> Range<usize> {
        split(n, granule, self.count(), self.index())
    }
}

/// Part `index` of `parts` of `0..n`, split at multiples of `granule`. Parts are ascending, disjoint and cover the
/// whole range; their sizes differ by at most one granule. All work on this device is split by this function.
pub fn split(n: usize, granule: usize, parts: usize, index: usize) -> Range<usize> {
    let granules = n.div_ceil(granule);
    let cut = |i: usize| (granules * i / parts * granule).min(n);
    cut(index)..cut(index + 1)
}

/// A fixed pool of threads. Dropping it stops and joins them.
#[derive(Debug)]
pub struct ThreadPool {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    /// Serializes runs.
    turn: Mutex<()>,
}

impl ThreadPool {
    /// Creates a pool of `threads` threads, including the caller. `None` = one per CPU that this process may use, by
    /// its affinity mask and its cgroup's quota.
    ///
    /// # Errors
    /// [`DeviceError`] if `threads` is 0 or above [`MAX_WORKERS`], or if the system cannot start a thread.
    pub fn new(threads: Option<usize>) -> Result<Self, DeviceError> {
        let count = match threads {
            Some(count) if (1..=MAX_WORKERS).contains(&count) => count,
            Some(count) => {
                return Err(DeviceError::Invalid { what: format!("threads: got {count}, expected 1..={MAX_WORKERS}") });
            }
            // The standard library reads sched_getaffinity and the CPU quota of cgroups v1 and v2.
            None => std::thread::available_parallelism().map_or(1, usize::from).min(MAX_WORKERS),
        };
        let count = u32::try_from(count).unwrap_or(1);
        let fits = (count * PARTS_PER_THREAD) as usize <= MAX_WORKERS;
        let parts = if count > 1 && fits { count * PARTS_PER_THREAD } else { count };
        let mut pool = Self {
            shared: Arc::new(Shared {
                count,
                parts,
                job: UnsafeCell::new(None),
                begun: (0..parts).map(|_| Line::default()).collect(),
                epoch: Line::default(),
                left: Line::default(),
                arrived: Line::default(),
                passed: Line::default(),
                sleepers: AtomicU32::new(0),
                stop: AtomicBool::new(false),
                lock: Mutex::new(()),
                wake: Condvar::new(),
                panic: Mutex::new(None),
                uneven: AtomicBool::new(false),
            }),
            threads: Vec::with_capacity(count as usize),
            turn: Mutex::new(()),
        };
        for index in 1..count {
            let shared = Arc::clone(&pool.shared);
            let thread = std::thread::Builder::new()
                .name(format!("ascend-cpu-{index}"))
                .spawn(move || shared.work(index))
                .map_err(|error| DeviceError::Call {
                    call: "spawn a thread",
                    code: error.raw_os_error().unwrap_or(0),
                    message: error.to_string(),
                })?;
            pool.threads.push(thread);
        }
        Ok(pool)
    }

    /// Number of threads, including the caller.
    pub fn count(&self) -> usize {
        self.shared.count as usize
    }

    /// Number of workers in a parallel run. Each thread owns the same number of neighboring workers.
    pub fn parts(&self) -> usize {
        self.shared.parts as usize
    }

    /// Runs `body` once per worker, each on its own thread, and returns when all have ended. A second caller waits
    /// until the first run has ended.
    ///
    /// # Panics
    /// Resumes the first worker's panic after all workers have ended. Panics if workers passed different numbers of
    /// barriers, or if called from within a run of the same pool.
    pub fn run(&self, body: &Body<'_>) {
        self.start(body, true);
    }

    /// Runs `body` once for each of [`parts`](Self::parts) workers, which cannot wait for each other: one thread may
    /// execute several in sequence.
    ///
    /// # Panics
    /// As [`run`](Self::run).
    pub fn run_parallel(&self, body: &Body<'_>) {
        self.start(body, false);
    }

    /// Runs all workers of a parallel run in sequence on the calling thread. Use it for work so short that waking other
    /// threads would take longer. After a panic the remaining workers do not run.
    ///
    /// # Panics
    /// Resumes the body's panic.
    pub fn run_inline(&self, body: &Body<'_>) {
        let count = self.shared.parts;
        for index in 0..count {
            body(&WorkerCtx { shared: None, index, count });
        }
    }

    fn start(&self, body: &Body<'_>, together: bool) {
        let shared = &*self.shared;
        if shared.count == 1 {
            return body(&WorkerCtx { shared: None, index: 0, count: 1 });
        }
        sleep_once();
        let this: *const Shared = shared;
        assert!(INSIDE.get() != this, "a worker called run on its own thread pool");
        let turn = self.turn.lock();
        let next = shared.epoch.0.load(Ordering::Relaxed).wrapping_add(1);
        let each = shared.parts / shared.count;
        let taken = if together { shared.parts - shared.count } else { 0 };
        if together {
            // Each thread has one part, its first; the other parts are marked as begun and ended.
            let others = (0..shared.parts).filter(|part| !part.is_multiple_of(each));
            others.for_each(|part| shared.begun[part as usize].0.store(next, Ordering::SeqCst));
        }
        shared.left.0.store(taken, Ordering::Relaxed);
        shared.arrived.0.store(0, Ordering::Relaxed);
        // SAFETY: only the lifetime changes. Workers use the reference before their part ends, and this function
        // neither returns nor unwinds before all parts have ended: `Shared::part` catches every panic.
        let body = unsafe { std::mem::transmute::<&Body<'_>, &'static Body<'static>>(body) };
        // SAFETY: all parts of earlier runs have been begun and have ended, so no thread begins one and reads `job`
        // now; `turn` excludes other callers.
        unsafe { *shared.job.get() = Some(Job { body, together }) };
        shared.epoch.0.store(next, Ordering::SeqCst);
        shared.notify();

        let outer = INSIDE.replace(this);
        shared.take_parts(0, next);
        shared.wait(|| shared.left.0.load(Ordering::SeqCst) == shared.parts);
        INSIDE.set(outer);

        // SAFETY: all have left.
        unsafe { *shared.job.get() = None };
        let uneven = shared.uneven.swap(false, Ordering::Relaxed);
        let panic = shared.panic.lock().take();
        drop(turn);
        if let Some(payload) = panic {
            resume_unwind(payload);
        }
        assert!(!uneven, "workers passed different numbers of barriers");
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.notify();
        for thread in self.threads.drain(..) {
            // Panics of workers were caught, so the join cannot fail.
            drop(thread.join());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    #[test]
    fn every_member_runs_once_a_run_and_sees_what_others_wrote_before_a_barrier() {
        for count in [1, 2, 3, 7] {
            let threads = ThreadPool::new(Some(count)).unwrap();
            let slots: Vec<AtomicUsize> = (0..count).map(|_| AtomicUsize::new(0)).collect();
            for round in 1..200 {
                threads.run(&|worker| {
                    for phase in 0..3 {
                        slots[worker.index()].store(round * 10 + phase, Ordering::Relaxed);
                        worker.barrier();
                        assert!(slots.iter().all(|slot| slot.load(Ordering::Relaxed) == round * 10 + phase));
                        worker.barrier();
                    }
                });
            }
        }
    }

    #[test]
    fn a_panic_in_any_member_comes_out_of_run_and_the_team_still_works() {
        let threads = ThreadPool::new(Some(3)).unwrap();
        for bad in 0..3 {
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                threads.run(&|worker| {
                    if worker.index() == bad {
                        resume_unwind(Box::new(format!("worker {bad}")));
                    }
                    worker.barrier();
                });
            }));
            assert_eq!(*outcome.unwrap_err().downcast::<String>().unwrap(), format!("worker {bad}"));
            let ran = AtomicUsize::new(0);
            threads.run(&|worker| {
                worker.barrier();
                ran.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(ran.into_inner(), 3);
        }
    }

    #[test]
    fn uneven_barriers_and_runs_within_runs_are_refused_instead_of_hanging() {
        let threads = ThreadPool::new(Some(2)).unwrap();
        let uneven = catch_unwind(AssertUnwindSafe(|| {
            threads.run(&|worker| {
                if worker.index() == 1 {
                    worker.barrier();
                }
            });
        }));
        assert!(uneven.is_err());
        assert!(catch_unwind(AssertUnwindSafe(|| threads.run(&|_| threads.run(&|_| {})))).is_err());
        threads.run(&|worker| worker.barrier());
    }

    #[test]
    fn shared_parts_run_once_each_whoever_does_them() {
        for count in [1, 2, 3, 7] {
            let threads = ThreadPool::new(Some(count)).unwrap();
            assert_eq!(threads.parts(), if count == 1 { 1 } else { 2 * count });
            let counters = |n: usize| (0..n).map(|_| AtomicUsize::new(0)).collect::<Vec<_>>();
            let (ran, shared, alone) = (counters(count), counters(threads.parts()), counters(threads.parts()));
            for round in 1..2000 {
                // Also test that a run with barriers, placed between parallel runs, finds every part not yet begun.
                if round % 5 == 0 {
                    threads.run(&|worker| {
                        worker.barrier();
                        assert_eq!(worker.count(), count);
                        ran[worker.index()].fetch_add(1, Ordering::Relaxed);
                    });
                    threads.run_inline(&|worker| _ = alone[worker.index()].fetch_add(1, Ordering::Relaxed));
                }
                threads.run_parallel(&|worker| {
                    assert_eq!(worker.count(), threads.parts());
                    shared[worker.index()].fetch_add(1, Ordering::Relaxed);
                });
                let all = |ran: &[AtomicUsize], n| ran.iter().all(|ran| ran.load(Ordering::Relaxed) == n);
                assert!(all(&shared, round), "{shared:?} in round {round}");
                assert!(all(&ran, round / 5) && all(&alone, round / 5), "{ran:?}, {alone:?} in round {round}");
            }
        }
    }

    /// A thread that does not arrive delays no part: the caller, blocked until another thread has begun one of its own
    /// parts and waits in it, must run all the others.
    #[test]
    fn parts_of_threads_that_are_busy_are_done_by_others() {
        let threads = ThreadPool::new(Some(4)).unwrap();
        let (begun, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
        threads.run_parallel(&|worker| {
            if begun.fetch_add(1, Ordering::SeqCst) == 0 {
                // The first part lasts until all others are done, so at most three threads run these.
                while done.load(Ordering::SeqCst) + 1 < threads.parts() {
                    std::thread::yield_now();
                }
            } else {
                done.fetch_add(1, Ordering::SeqCst);
            }
            assert!(worker.index() < threads.parts());
        });
        assert_eq!((begun.into_inner(), done.into_inner()), (8, 7));
    }

    #[test]
    fn barriers_between_shared_parts_and_panics_in_them_come_out() {
        let threads = ThreadPool::new(Some(2)).unwrap();
        assert!(catch_unwind(AssertUnwindSafe(|| threads.run_parallel(&|worker| worker.barrier()))).is_err());
        for bad in 0..2 {
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                threads.run_parallel(&|worker| {
                    if worker.index() == bad {
                        resume_unwind(Box::new(bad));
                    }
                });
            }));
            assert_eq!(*outcome.unwrap_err().downcast::<usize>().unwrap(), bad);
        }
        threads.run(&|worker| worker.barrier());
    }

    #[test]
    fn callers_on_several_threads_take_turns() {
        let threads = ThreadPool::new(Some(2)).unwrap();
        let (busy, runs) = (AtomicUsize::new(0), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        threads.run(&|worker| {
                            if worker.index() == 0 {
                                assert_eq!(busy.fetch_add(1, Ordering::SeqCst), 0);
                            }
                            worker.barrier();
                            if worker.index() == 0 {
                                busy.fetch_sub(1, Ordering::SeqCst);
                                runs.fetch_add(1, Ordering::SeqCst);
                            }
                        });
                    }
                });
            }
        });
        assert_eq!(runs.into_inner(), 200);
    }

    #[test]
    fn splits_cover_everything_once_at_granules() {
        for n in [0, 1, 15, 16, 17, 48, 576, 1000] {
            for granule in [1, 4, 16] {
                for parts in 1..9 {
                    let mut next = 0;
                    for index in 0..parts {
                        let span = split(n, granule, parts, index);
                        assert_eq!(span.start, next);
                        assert!(span.start.is_multiple_of(granule) || span.start == n);
                        assert!(span.len() <= (n.div_ceil(granule).div_ceil(parts)) * granule);
                        next = span.end;
                    }
                    assert_eq!(next, n);
                }
            }
        }
    }

    #[test]
    fn thread_counts_out_of_range_are_refused() {
        for threads in [0, MAX_WORKERS + 1] {
            let error = ThreadPool::new(Some(threads)).unwrap_err().to_string();
            assert!(error.contains(&format!("threads: got {threads}, expected 1..=256")), "{error}");
        }
    }
}
