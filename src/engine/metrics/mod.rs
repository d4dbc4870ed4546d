//! Counters of the engine, and snapshots of them.
//!
//! The loop adds to atomic counters and never waits for a reader. A [`Stats`] is a snapshot that is read field by
//! field: while the engine is running, its fields may be one step apart from each other. The fields of [`Utilization`]
//! are consistent with each other.

pub(super) mod utilization;

use serde::Serialize;
use serde::ser::SerializeStruct as _;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::request::output::FinishReason;
use crate::graph::Op;
use utilization::Utilization;

/// Upper bounds of the buckets of time histograms, in microseconds.
///
/// These are vLLM's buckets for the time to first token without the longest ones. They also resolve step times of a
/// millisecond and more.
const TIME_BOUNDS_US: [u64; 18] = [
    1_000, 5_000, 10_000, 20_000, 40_000, 60_000, 80_000, 100_000, 250_000, 500_000, 750_000, 1_000_000, 2_500_000,
    5_000_000, 7_500_000, 10_000_000, 20_000_000, 40_000_000,
];

/// Reason why a choice ended, as counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    Stop,
    Length,
    Cancelled,
    Deadline,
    Error,
}

impl Ending {
    const ALL: [Self; 5] = [Self::Stop, Self::Length, Self::Cancelled, Self::Deadline, Self::Error];

    const fn label(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Cancelled => "cancelled",
            Self::Deadline => "deadline",
            Self::Error => "error",
        }
    }
}

impl From<&FinishReason> for Ending {
    fn from(reason: &FinishReason) -> Self {
        match reason {
            FinishReason::Stop { .. } => Self::Stop,
            FinishReason::Length => Self::Length,
            FinishReason::Cancelled => Self::Cancelled,
            FinishReason::Deadline => Self::Deadline,
        }
    }
}

/// Counters of the engine: counters that only grow, and gauges that the loop sets after each step.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub running: AtomicU64,
    pub waiting: AtomicU64,
    pub live_blocks: AtomicU64,
    pub cached_blocks: AtomicU64,
    pub free_blocks: AtomicU64,
    pub prompt_tokens: AtomicU64,
    pub cached_tokens: AtomicU64,
    pub generated_tokens: AtomicU64,
    pub computed_rows: AtomicU64,
    pub prefix_queries: AtomicU64,
    pub prefix_hits: AtomicU64,
    pub preemptions: AtomicU64,
    pub steps: AtomicU64,
    pub wasted_rows: AtomicU64,
    pub retried_sequences: AtomicU64,
    pub padded_rows: AtomicU64,
    /// Number of overflowed elements by operation, in the order of `Op::NAMES`.
    overflows: [AtomicU64; Op::NAMES.len()],
    finished: [AtomicU64; 5],
    pub time_to_first_token: TimeCounter,
    pub step_time: TimeCounter,
    utilization: Mutex<Utilization>,
}

#[derive(Debug, Default)]
pub(crate) struct TimeCounter {
    buckets: [AtomicU64; TIME_BOUNDS_US.len() + 1],
    sum_us: AtomicU64,
}

impl TimeCounter {
    pub fn record(&self, us: u64) {
        let bucket = TIME_BOUNDS_US.partition_point(|&bound| bound < us);
        self.buckets[bucket].fetch_add(1, Ordering::Relaxed);
        self.sum_us.fetch_add(us, Ordering::Relaxed);
    }

    fn snapshot(&self) -> TimeHistogram {
        TimeHistogram {
            counts: std::array::from_fn(|bucket| self.buckets[bucket].load(Ordering::Relaxed)),
            sum_us: self.sum_us.load(Ordering::Relaxed),
        }
    }
}

impl Counters {
    pub fn add(counter: &AtomicU64, by: u64) {
        counter.fetch_add(by, Ordering::Relaxed);
    }

    pub fn set(gauge: &AtomicU64, to: u64) {
        gauge.store(to, Ordering::Relaxed);
    }

    /// Publishes the utilization of the last steps. If a reader holds the lock, the next step publishes it instead.
    pub fn set_utilization(&self, window: Utilization) {
        if let Some(mut shown) = self.utilization.try_lock() {
            *shown = window;
        }
    }

    pub fn finish(&self, ending: Ending) {
        self.finished[ending as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Sets the number of elements that have overflowed in an operation.
    pub fn set_overflow(&self, op: &str, count: u64) {
        if let Some(index) = Op::NAMES.iter().position(|name| *name == op) {
            Self::set(&self.overflows[index], count);
        }
    }

    pub fn snapshot(&self, queued: u32) -> Stats {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let finished = |ending: Ending| read(&self.finished[ending as usize]);
        Stats {
            queued_requests: u64::from(queued),
            running: read(&self.running),
            waiting: read(&self.waiting),
            live_blocks: read(&self.live_blocks),
            cached_blocks: read(&self.cached_blocks),
            free_blocks: read(&self.free_blocks),
            prompt_tokens: read(&self.prompt_tokens),
            cached_tokens: read(&self.cached_tokens),
            generated_tokens: read(&self.generated_tokens),
            computed_rows: read(&self.computed_rows),
            prefix_queries: read(&self.prefix_queries),
            prefix_hits: read(&self.prefix_hits),
            preemptions: read(&self.preemptions),
            steps: read(&self.steps),
            wasted_rows: read(&self.wasted_rows),
            retried_sequences: read(&self.retried_sequences),
            padded_rows: read(&self.padded_rows),
            overflows: Op::NAMES.into_iter().zip(self.overflows.iter().map(read)).filter(|(_, n)| *n > 0).collect(),
            finished_stop: finished(Ending::Stop),
            finished_length: finished(Ending::Length),
            finished_cancelled: finished(Ending::Cancelled),
            finished_deadline: finished(Ending::Deadline),
            finished_error: finished(Ending::Error),
            time_to_first_token: self.time_to_first_token.snapshot(),
            step_time: self.step_time.snapshot(),
            utilization: *self.utilization.lock(),
        }
    }
}

/// Histogram of times, in fixed buckets from 1 ms to 40 s.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TimeHistogram {
    counts: [u64; TIME_BOUNDS_US.len() + 1],
    sum_us: u64,
}

impl TimeHistogram {
    /// Returns the number of recorded times.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Returns the sum of all recorded times in microseconds.
    pub fn sum_us(&self) -> u64 {
        self.sum_us
    }

    /// Returns `(upper bound in microseconds, number of times up to that bound)` for each bucket.
    ///
    /// Only [`count`](Self::count) includes the times above the last bound.
    pub fn buckets(&self) -> impl Iterator<Item = (u64, u64)> {
        TIME_BOUNDS_US.iter().zip(&self.counts).scan(0, |below, (&bound, &count)| {
            *below += count;
            Some((bound, *below))
        })
    }
}

/// Serialized as `count`, `sum_us` and `buckets` of `[upper bound in microseconds, number of times up to that bound]`.
impl Serialize for TimeHistogram {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut fields = serializer.serialize_struct("TimeHistogram", 3)?;
        fields.serialize_field("count", &self.count())?;
        fields.serialize_field("sum_us", &self.sum_us)?;
        fields.serialize_field("buckets", &self.buckets().collect::<Vec<_>>())?;
        fields.end()
    }
}

/// Snapshot of the engine's counters.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Stats {
    /// Number of requests that wait for their first step.
    pub queued_requests: u64,
    /// Number of running sequences after the last step; they hold blocks.
    pub running: u64,
    /// Number of waiting sequences after the last step.
    ///
    /// They wait for blocks, or for the end of a running sequence if `max_num_seqs` sequences are running.
    pub waiting: u64,
    /// Number of blocks that sequences hold.
    pub live_blocks: u64,
    /// Number of blocks in the prefix cache that no sequence holds.
    pub cached_blocks: u64,
    /// Number of free blocks.
    pub free_blocks: u64,
    /// Number of prompt tokens whose prefill has completed.
    pub prompt_tokens: u64,
    /// Number of those tokens that came from the prefix cache.
    pub cached_tokens: u64,
    /// Number of published output tokens.
    pub generated_tokens: u64,
    /// Number of rows that the model computed, including recomputed ones.
    pub computed_rows: u64,
    /// Number of tokens looked up in the prefix cache.
    pub prefix_queries: u64,
    /// Number of those tokens that the prefix cache contained.
    pub prefix_hits: u64,
    /// Number of preemptions: the sequence's blocks were freed for other sequences, and its tokens are computed again.
    pub preemptions: u64,
    /// Number of completed steps.
    pub steps: u64,
    /// Number of wasted rows: in-flight rows of sequences that had ended, or that had to be computed again.
    ///
    /// 0 at pipeline depth 1, and at most `pipeline_depth - 1` for a request that stops.
    pub wasted_rows: u64,
    /// Number of sequences that overflowed and continued with f32 activations.
    pub retried_sequences: u64,
    /// Number of padding rows, which fill batches up to their bucket; 0 on devices without fixed shapes.
    pub padded_rows: u64,
    /// Number of elements that were too large for their storage type and were clamped, by operation.
    pub overflows: Vec<(&'static str, u64)>,
    /// Number of choices that ended on an end-of-sequence token, stop token or stop string.
    pub finished_stop: u64,
    /// Number of choices that reached their maximum length.
    pub finished_length: u64,
    /// Number of choices whose request was cancelled or whose handle was dropped.
    pub finished_cancelled: u64,
    /// Number of choices whose deadline passed.
    pub finished_deadline: u64,
    /// Number of choices that ended with an error.
    pub finished_error: u64,
    /// Time from submission to the first token.
    pub time_to_first_token: TimeHistogram,
    /// Time of a step from its plan to the end of its publication.
    pub step_time: TimeHistogram,
    /// Work of the last steps, and the time that it took.
    pub utilization: Utilization,
}

impl Stats {
    fn finished(&self, ending: Ending) -> u64 {
        match ending {
            Ending::Stop => self.finished_stop,
            Ending::Length => self.finished_length,
            Ending::Cancelled => self.finished_cancelled,
            Ending::Deadline => self.finished_deadline,
            Ending::Error => self.finished_error,
        }
    }

    /// Writes the counters in the Prometheus text format, with vLLM's names and the prefix `ascend_llm_`.
    ///
    /// # Errors
    /// [`fmt::Error`] if writing to `out` fails.
    pub fn write_prometheus(&self, out: &mut impl fmt::Write) -> fmt::Result {
        let used = self.live_blocks as f64 / (self.live_blocks + self.cached_blocks + self.free_blocks).max(1) as f64;
        gauge(out, "num_requests_running", "Running sequences, which hold KV blocks.", self.running)?;
        gauge(out, "num_requests_waiting", "Waiting sequences.", self.waiting)?;
        gauge(out, "kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", used)?;
        counter(out, "prefix_cache_queries", "Tokens looked up in the prefix cache.", self.prefix_queries)?;
        counter(out, "prefix_cache_hits", "Tokens found in the prefix cache.", self.prefix_hits)?;
        counter(out, "num_preemptions", "Preemptions of sequences, which are then recomputed.", self.preemptions)?;
        counter(out, "prompt_tokens", "Prompt tokens whose prefill has completed.", self.prompt_tokens)?;
        counter(out, "prompt_tokens_cached", "Prompt tokens from the prefix cache.", self.cached_tokens)?;
        counter(out, "generation_tokens", "Generated tokens.", self.generated_tokens)?;
        counter(out, "computed_rows", "Rows computed by the model.", self.computed_rows)?;
        counter(out, "steps", "Completed steps.", self.steps)?;
        counter(out, "wasted_rows", "In-flight rows after the end of their sequence.", self.wasted_rows)?;
        head(out, "request_success_total", "Choices that ended, by reason.", "counter")?;
        for ending in Ending::ALL {
            let (label, count) = (ending.label(), self.finished(ending));
            writeln!(out, "ascend_llm_request_success_total{{finished_reason=\"{label}\"}} {count}")?;
        }
        histogram(
            out,
            "time_to_first_token_seconds",
            "Time from submission to first token.",
            &self.time_to_first_token,
        )?;
        histogram(out, "step_time_seconds", "Time of one step of the loop.", &self.step_time)
    }
}

fn head(out: &mut impl fmt::Write, name: &str, help: &str, kind: &str) -> fmt::Result {
    writeln!(out, "# HELP ascend_llm_{name} {help}\n# TYPE ascend_llm_{name} {kind}")
}

fn gauge(out: &mut impl fmt::Write, name: &str, help: &str, value: impl fmt::Display) -> fmt::Result {
    head(out, name, help, "gauge")?;
    writeln!(out, "ascend_llm_{name} {value}")
}

fn counter(out: &mut impl fmt::Write, name: &str, help: &str, value: u64) -> fmt::Result {
    head(out, &format!("{name}_total"), help, "counter")?;
    writeln!(out, "ascend_llm_{name}_total {value}")
}

fn histogram(out: &mut impl fmt::Write, name: &str, help: &str, times: &TimeHistogram) -> fmt::Result {
    head(out, name, help, "histogram")?;
    for (bound_us, below) in times.buckets() {
        writeln!(out, "ascend_llm_{name}_bucket{{le=\"{}\"}} {below}", seconds(bound_us))?;
    }
    writeln!(out, "ascend_llm_{name}_bucket{{le=\"+Inf\"}} {}", times.count())?;
    writeln!(out, "ascend_llm_{name}_sum {}", seconds(times.sum_us()))?;
    writeln!(out, "ascend_llm_{name}_count {}", times.count())
}

fn seconds(us: u64) -> f64 {
    us as f64 / 1e6
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn histogram_buckets_are_cumulative_and_bounds_inclusive() {
        let times = TimeCounter::default();
        for us in [0, 1_000, 1_001, 40_000_000, 40_000_001] {
            times.record(us);
        }
        let histogram = times.snapshot();
        let buckets: Vec<_> = histogram.buckets().collect();
        assert_eq!(buckets[0], (1_000, 2));
        assert_eq!(buckets[1], (5_000, 3));
        assert_eq!(buckets.last(), Some(&(40_000_000, 4)));
        assert_eq!(histogram.count(), 5);
        assert_eq!(histogram.sum_us(), 80_002_002);
    }

    #[test]
    fn prometheus_text_has_one_value_a_sample_line() {
        let counters = Counters::default();
        Counters::set(&counters.live_blocks, 1);
        Counters::set(&counters.free_blocks, 3);
        counters.finish(Ending::Length);
        counters.time_to_first_token.record(2_000);
        let mut text = String::new();
        counters.snapshot(0).write_prometheus(&mut text).unwrap();
        assert!(text.contains("\nascend_llm_kv_cache_usage_perc 0.25\n"), "{text}");
        assert!(text.contains("\nascend_llm_request_success_total{finished_reason=\"length\"} 1\n"), "{text}");
        assert!(text.contains("ascend_llm_time_to_first_token_seconds_bucket{le=\"0.001\"} 0\n"), "{text}");
        assert!(text.contains("ascend_llm_time_to_first_token_seconds_bucket{le=\"0.005\"} 1\n"), "{text}");
        assert!(text.contains("ascend_llm_time_to_first_token_seconds_sum 0.002\n"), "{text}");
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let (name, value) = line.rsplit_once(' ').unwrap();
            assert!(name.starts_with("ascend_llm_"), "{line}");
            assert!(value.parse::<f64>().is_ok(), "{line}");
        }
    }
}
