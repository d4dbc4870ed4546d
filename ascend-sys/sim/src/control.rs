//! Injected faults, the call log, and complaints about misuse that the real runtime would accept.

use crate::codes::Fail;
use crate::registry::lock;
use crate::settings::{self, Setting};
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{LazyLock, Mutex, Once};

/// Kind of an injected fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The call itself returns the code and has no effect.
    Call,
    /// The call succeeds; its task fails with the code when the stream executes it.
    Task,
    /// The task never ends by itself.
    Hang,
    /// The task writes infinity into its first output.
    Overflow,
}

#[derive(Debug)]
struct Demand {
    fault: Fault,
    /// Name of a function, or `*` for all.
    name: String,
    /// Number of calls until the fault occurs: 1 is the next call.
    left: u64,
    code: i32,
    /// Whether the fault also occurs at every later call.
    is_lasting: bool,
}

#[derive(Default)]
struct State {
    counts: HashMap<&'static str, u64>,
    total: u64,
    demands: Vec<Demand>,
    /// Code that every call returns once the device is lost.
    lost: Option<i32>,
    log: VecDeque<Entry>,
    complaints: Vec<String>,
    last_error: HashMap<std::thread::ThreadId, i32>,
}

/// Data of a call in the log, in addition to its name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Note {
    /// Direction of a copy, or kind of an object.
    pub(crate) kind: &'static str,
    /// Bytes moved or allocated.
    pub(crate) bytes: u64,
}

/// A logged call.
#[derive(Clone, Debug)]
struct Entry {
    name: &'static str,
    note: Note,
    code: i32,
}

static STATE: LazyLock<Mutex<State>> = LazyLock::new(|| Mutex::new(State::default()));
static RELEASES: AtomicI32 = AtomicI32::new(0);
static FIRST_CALL: Once = Once::new();

/// Counts a call; returns the failure to inject, if any.
pub(crate) fn enter(name: &'static str) -> Option<Fail> {
    FIRST_CALL.call_once(settings::reset);
    let mut state = lock(&STATE);
    *state.counts.entry(name).or_default() += 1;
    state.total += 1;
    if let Some(code) = state.lost {
        return Some(Fail::new(code, "device lost"));
    }
    strike(&mut state.demands, name, |fault| fault == Fault::Call).map(|(_, code)| Fail::new(code, "on demand"))
}

/// Returns the fault of a queued task, if any. A hanging task stores the number of releases so far: the next release
/// ends it, even if it comes before the task starts.
pub(crate) fn task_fault(name: &str) -> Option<(Fault, i32)> {
    let struck = strike(&mut lock(&STATE).demands, name, |fault| fault != Fault::Call);
    struck.map(|(fault, code)| (fault, if fault == Fault::Hang { releases() } else { code }))
}

/// Number of times that hanging tasks were released.
pub(crate) fn releases() -> i32 {
    RELEASES.load(Ordering::Relaxed)
}

pub(crate) fn release() {
    RELEASES.fetch_add(1, Ordering::Relaxed);
}

fn strike(demands: &mut Vec<Demand>, name: &str, of_sort: impl Fn(Fault) -> bool) -> Option<(Fault, i32)> {
    let mut struck = None;
    for demand in demands.iter_mut().filter(|demand| of_sort(demand.fault)) {
        if demand.name != "*" && demand.name != name {
            continue;
        }
        demand.left = demand.left.saturating_sub(1);
        if demand.left == 0 {
            struck = struck.or(Some((demand.fault, demand.code)));
        }
    }
    demands.retain(|demand| demand.left > 0 || demand.is_lasting);
    struck
}

/// Logs a completed call.
pub(crate) fn leave(name: &'static str, note: Note, code: i32) {
    if Setting::log.get() == 0 {
        return;
    }
    let mut state = lock(&STATE);
    state.log.push_back(Entry { name, note, code });
    while state.log.len() as u64 > Setting::log_entries.size() {
        state.log.pop_front();
    }
}

pub(crate) fn note_error(code: i32) {
    lock(&STATE).last_error.insert(std::thread::current().id(), code);
}

/// Returns the thread's last error; `clear` resets it.
pub(crate) fn last_error(clear: bool) -> i32 {
    let thread = std::thread::current().id();
    let mut state = lock(&STATE);
    let code = state.last_error.get(&thread).copied().unwrap_or(0);
    if clear {
        state.last_error.remove(&thread);
    }
    code
}

/// Records a misuse that the real runtime does not refuse.
pub(crate) fn complain(text: impl Into<String>) {
    let mut state = lock(&STATE);
    if state.complaints.len() < 1000 {
        state.complaints.push(text.into());
    }
}

pub(crate) fn is_lost() -> Option<i32> {
    lock(&STATE).lost
}

pub(crate) fn lose_device(code: i32) {
    lock(&STATE).lost = (code != 0).then_some(code);
}

pub(crate) fn demand(fault: Fault, name: String, nth: u64, code: i32, is_lasting: bool) {
    lock(&STATE).demands.push(Demand { fault, name, left: nth.max(1), code, is_lasting });
}

/// Number of calls of a function so far; `*` counts all functions.
pub(crate) fn count(name: &str) -> u64 {
    let state = lock(&STATE);
    if name == "*" { state.total } else { state.counts.get(name).copied().unwrap_or(0) }
}

/// Returns the log, one call per line: name, kind, bytes, code.
pub(crate) fn log_text() -> String {
    let state = lock(&STATE);
    let line = |entry: &Entry| {
        let Entry { name, note: Note { kind, bytes }, code } = entry;
        format!("{name} {} {bytes} {code}\n", if kind.is_empty() { "-" } else { kind })
    };
    state.log.iter().map(line).collect()
}

pub(crate) fn clear_log() {
    lock(&STATE).log.clear();
}

pub(crate) fn complaints_text() -> String {
    lock(&STATE).complaints.iter().flat_map(|complaint| [complaint.as_str(), "\n"]).collect()
}

/// Clears faults, counts, log and complaints, and restores a lost device.
pub(crate) fn reset() {
    FIRST_CALL.call_once(|| ());
    settings::reset();
    *lock(&STATE) = State::default();
}
