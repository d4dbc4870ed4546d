//! Collectives: each rank deposits a copy of its data, waits until all have, and takes the parts it needs.
//!
//! Calls are matched by their order: the n-th collectives of all ranks belong together and must have the same
//! arguments. A rank that waits longer than `collective_limit_ms` for the others fails, and so does one whose stream is
//! aborted or whose device is lost.

use crate::codes::{Done, Fail, RT_FFTS_PLUS_TIMEOUT, fail, rule};
use crate::control::{self, Fault};
use crate::operands;
use crate::operands::Bench;
use crate::registry::{Handle, Registry, lock};
use crate::runtime::context;
use crate::runtime::memory::{DeviceMemory, computes, memory};
use crate::runtime::stream::{Stream, Work};
use crate::runtime::task::{Cost, Task};
use crate::settings::Setting;
use crate::tensor::{Elem, View};
use std::collections::HashMap;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, LazyLock, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Error codes of `HcclResult`.
pub(crate) const PARAMETER: i32 = 1;
pub(crate) const NULL: i32 = 2;
const NOT_SUPPORTED: i32 = 5;
const TIMEOUT: i32 = 9;
const REMOTE: i32 = 21;

/// Largest time that one poll adds to a rank's waiting time.
const LONGEST_PAUSE: Duration = Duration::from_millis(10);

/// Link failures, which every rank reports.
const LINK_ERRORS: [i32; 2] = [507_056, 507_904];

pub(crate) static COMMUNICATORS: Registry<Communicator> = Registry::new("communicator");
/// Rendezvous at which not all ranks have arrived.
static GROUPS: LazyLock<Mutex<HashMap<u64, Arc<Group>>>> = LazyLock::new(|| Mutex::new(HashMap::new()));
static NEXT_ROOT: AtomicU64 = AtomicU64::new(1);

/// Returns the id of a new rendezvous.
pub(crate) fn new_root() -> u64 {
    NEXT_ROOT.fetch_add(1, Ordering::Relaxed)
}

struct Group {
    state: Mutex<GroupState>,
    changed: Condvar,
    /// Result of `HcclGetCommAsyncError`.
    async_error: AtomicI32,
}

#[derive(Default)]
struct GroupState {
    /// Device of each rank that has arrived.
    devices: Vec<Option<i32>>,
    rounds: HashMap<u64, Round>,
}

/// One collective.
struct Round {
    /// Arguments of the first rank.
    asked: Asked,
    /// Data that each rank deposited, with the modeled time of its stream.
    left: Vec<Option<(Arc<Vec<f32>>, u64)>>,
    /// Number of ranks that have finished it.
    taken: usize,
    /// Failure of the collective.
    failure: Option<Fail>,
}

pub(crate) struct Communicator {
    group: Arc<Group>,
    rank: usize,
    ranks: usize,
    device: i32,
    next_round: AtomicU64,
}

impl Communicator {
    fn add(group: &Arc<Group>, rank: usize, ranks: usize, device: i32) -> Handle {
        let group = group.clone();
        COMMUNICATORS.add(Arc::new(Self { group, rank, ranks, device, next_round: AtomicU64::new(0) }))
    }
}

impl Group {
    fn new(ranks: usize) -> Arc<Self> {
        let state = Mutex::new(GroupState { devices: vec![None; ranks], rounds: HashMap::new() });
        Arc::new(Self { state, changed: Condvar::new(), async_error: AtomicI32::new(0) })
    }
}

/// Joins a rendezvous for the current context's device and waits for all other ranks.
pub(crate) fn join(root: u64, ranks: usize, rank: usize) -> Done<Handle> {
    rule!(rank < ranks, PARAMETER, "rank {rank} of {ranks}");
    let device = context::current()?.device;
    let group = lock(&GROUPS).entry(root).or_insert_with(|| Group::new(ranks)).clone();
    let start = Instant::now();
    let mut state = lock(&group.state);
    let known = state.devices.len();
    rule!(known == ranks, PARAMETER, "{ranks} ranks here, {known} elsewhere");
    rule!(state.devices[rank].is_none(), PARAMETER, "rank {rank} has joined already");
    rule!(!state.devices.contains(&Some(device)), PARAMETER, "device {device} has a rank already");
    state.devices[rank] = Some(device);
    group.changed.notify_all();
    while state.devices.contains(&None) {
        let gives_up = if start.elapsed() >= Duration::from_millis(Setting::join_limit_ms.size()) {
            Some(Fail::new(TIMEOUT, format!("not all of {ranks} ranks came")))
        } else {
            control::is_lost().map(|_| Fail::new(REMOTE, "device lost"))
        };
        if let Some(fail) = gives_up {
            state.devices[rank] = None;
            return Err(fail);
        }
        let wait = group.changed.wait_timeout(state, Duration::from_millis(5));
        state = wait.unwrap_or_else(PoisonError::into_inner).0;
    }
    drop(state);
    lock(&GROUPS).remove(&root);
    Ok(Communicator::add(&group, rank, ranks, device))
}

/// Creates communicators of several devices of one process at once, in device order.
pub(crate) fn join_all(devices: &[i32]) -> Done<Vec<Handle>> {
    let known = Setting::devices.get();
    for (at, device) in devices.iter().enumerate() {
        rule!((0..known).contains(&i64::from(*device)), PARAMETER, "device {device} of {known}");
        rule!(!devices[..at].contains(device), PARAMETER, "device {device} is named twice");
    }
    rule!(!devices.is_empty(), PARAMETER, "no device");
    let group = Group::new(devices.len());
    let ranks = devices.iter().enumerate();
    Ok(ranks.map(|(rank, &device)| Communicator::add(&group, rank, devices.len(), device)).collect())
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reduce {
    Sum,
    Largest,
}

impl Reduce {
    pub(crate) fn from_code(op: i32) -> Done<Self> {
        match op {
            0 => Ok(Self::Sum),
            2 => Ok(Self::Largest),
            _ => fail!(NOT_SUPPORTED, "reduction {op}; sum and largest are supported here"),
        }
    }

    /// Combines one element of all ranks, in rank order.
    fn join(self, all: &[Arc<Vec<f32>>], i: usize) -> f32 {
        let values = all.iter().map(|one| one[i]);
        match self {
            Self::Sum => values.sum(),
            Self::Largest => values.fold(f32::NEG_INFINITY, f32::max),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum What {
    AllReduce(Reduce),
    AllGather,
    ReduceScatter(Reduce),
    Broadcast(usize),
}

/// Arguments that must be equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Asked {
    what: What,
    count: usize,
    elem: Elem,
}

/// A rank's collective: its arguments and its two buffers.
pub(crate) struct Plan {
    asked: Asked,
    send: usize,
    recv: usize,
}

impl Plan {
    pub(crate) fn new(what: What, send: usize, recv: usize, count: u64, dtype: i32) -> Done<Self> {
        let elem = match dtype {
            0 => Elem::I8,
            2 => Elem::I32,
            3 => Elem::F16,
            4 => Elem::F32,
            11 => Elem::BF16,
            _ => fail!(NOT_SUPPORTED, "data type {dtype}"),
        };
        rule!(send != 0 && recv != 0, NULL, "a buffer is null");
        let count = match usize::try_from(count) {
            Ok(count) if count > 0 => count,
            _ => fail!(PARAMETER, "{count} elements"),
        };
        Ok(Self { asked: Asked { what, count, elem }, send, recv })
    }

    /// Views of both buffers; a buffer with a share per rank has its size multiplied by the number of ranks.
    fn views(&self, ranks: usize) -> (View, View) {
        let Asked { what, count, elem } = self.asked;
        let view = |address, count| View {
            address,
            elem,
            format: crate::codes::FORMAT_ND,
            dims: vec![count],
            strides: vec![1],
            offset: 0,
            storage: vec![count],
        };
        match what {
            What::AllGather => (view(self.send, count), view(self.recv, count * ranks)),
            What::ReduceScatter(_) => (view(self.send, count * ranks), view(self.recv, count)),
            _ => (view(self.send, count), view(self.recv, count)),
        }
    }
}

impl Asked {
    /// Data that a rank receives.
    fn result(self, all: &[Arc<Vec<f32>>], rank: usize) -> Vec<f32> {
        let count = self.count;
        match self.what {
            What::AllReduce(reduce) => (0..count).map(|i| reduce.join(all, i)).collect(),
            What::AllGather => all.iter().flat_map(|one| one.iter().copied()).collect(),
            What::ReduceScatter(reduce) => (0..count).map(|i| reduce.join(all, rank * count + i)).collect(),
            What::Broadcast(root) => all.get(root).map(|one| one.to_vec()).unwrap_or_default(),
        }
    }

    /// Cost of a ring: in each step every rank sends one share to the next.
    fn cost(self, ranks: usize) -> Cost {
        let bytes = (self.count * self.elem.bits() / 8) as u64;
        let (ranks, others) = (ranks as u64, ranks as u64 - 1);
        let (link_bytes, link_steps) = match self.what {
            What::AllReduce(_) => (2 * others * bytes / ranks, 2 * others),
            What::AllGather | What::ReduceScatter(_) => (others * bytes, others),
            What::Broadcast(_) => (bytes, others),
        };
        Cost { bytes: 2 * bytes, link_bytes, link_steps, ..Cost::default() }
    }
}

/// Creates the task of a collective on the communicator's device: the rendezvous runs before the body, the body writes
/// the result.
pub(crate) fn task(name: &'static str, comm: &Arc<Communicator>, stream: &Stream, plan: Plan) -> Done<Work> {
    let device = stream.context.device;
    rule!(device == comm.device, PARAMETER, "a stream of device {device} for a rank on device {}", comm.device);
    let asked = plan.asked;
    if let What::Broadcast(root) = asked.what {
        rule!(root < comm.ranks, PARAMETER, "root {root} of {} ranks", comm.ranks);
    }
    let (send, recv) = plan.views(comm.ranks);
    let received: Arc<Mutex<Vec<Arc<Vec<f32>>>>> = Arc::default();
    let fault = control::task_fault(name);
    let before = {
        let (comm, recv, received) = (comm.clone(), recv.clone(), received.clone());
        move |stream: &Stream, clock_ns: &mut u64| {
            if let Some((Fault::Task, code)) = fault {
                if LINK_ERRORS.contains(&code) {
                    comm.group.async_error.store(REMOTE, Ordering::Relaxed);
                }
                fail!(code, "{name} failed on demand");
            }
            let own = take(&send, &recv)?;
            *lock(&received) = comm.exchange(name, asked, own, stream, clock_ns)?;
            Ok(())
        }
    };
    let (rank, cost) = (comm.rank, asked.cost(comm.ranks));
    let body = move |memory: &mut DeviceMemory| {
        let all = std::mem::take(&mut *lock(&received));
        if !computes() {
            return Ok(());
        }
        let views = [Some(recv.clone())];
        Bench { memory, views: &views }.store(0, &asked.result(&all, rank))
    };
    Ok(Work::Task(Arc::new(Task {
        name,
        before: Some(Arc::new(before)),
        body: Arc::new(body),
        cost,
        fault: fault.filter(|(fault, _)| *fault != Fault::Task),
        is_op: false,
        workspace_bytes: 0,
    })))
}

/// Copies the data to send; both buffers must be in device memory.
fn take(send: &View, recv: &View) -> Done<Vec<f32>> {
    let memory = memory();
    memory.check(send.address, send.bytes())?;
    memory.check(recv.address, recv.bytes())?;
    let mut values = Vec::new();
    if computes() {
        operands::stretch(&memory, send, 0, send.count(), &mut values)?;
    }
    Ok(values)
}

impl Communicator {
    /// Deposits the rank's data and waits for all others. The clock advances to the latest rank's.
    fn exchange(
        &self,
        name: &str,
        asked: Asked,
        own: Vec<f32>,
        stream: &Stream,
        clock_ns: &mut u64,
    ) -> Done<Vec<Arc<Vec<f32>>>> {
        let number = self.next_round.fetch_add(1, Ordering::Relaxed);
        {
            let mut state = lock(&self.group.state);
            let round = state.rounds.entry(number).or_insert_with(|| Round {
                asked,
                left: vec![None; self.ranks],
                taken: 0,
                failure: None,
            });
            round.left[self.rank] = Some((Arc::new(own), *clock_ns));
            if round.asked != asked {
                let words = format!(
                    "{name}: rank {} asks for {asked:?} and another rank for {:?} in collective {number}",
                    self.rank, round.asked
                );
                control::complain(words.clone());
                // The real library does not detect this: its ranks wait for each other until they time out.
                round.failure.get_or_insert_with(|| Fail::new(RT_FFTS_PLUS_TIMEOUT, words));
            }
        }
        let mut waited = Duration::ZERO;
        loop {
            if let Some(result) = self.look(number, clock_ns) {
                return result;
            }
            let limit = Duration::from_millis(Setting::collective_limit_ms.size());
            rule!(waited < limit, RT_FFTS_PLUS_TIMEOUT, "{name}: rank {} waited in vain", self.rank);
            let start = Instant::now();
            stream.pause()?;
            // A process that was suspended in the meantime has not waited.
            waited += start.elapsed().min(LONGEST_PAUSE);
        }
    }

    /// Returns the data of all ranks once all have arrived, or the failure of the collective.
    fn look(&self, number: u64, clock_ns: &mut u64) -> Option<Done<Vec<Arc<Vec<f32>>>>> {
        let mut state = lock(&self.group.state);
        let round = state.rounds.get_mut(&number)?;
        if let Some(fail) = round.failure.clone() {
            return Some(Err(fail));
        }
        let all = round.left.iter().cloned().collect::<Option<Vec<_>>>()?;
        round.taken += 1;
        if round.taken == self.ranks {
            state.rounds.remove(&number);
        }
        *clock_ns = all.iter().map(|(_, at_ns)| *at_ns).fold(*clock_ns, u64::max);
        Some(Ok(all.into_iter().map(|(data, _)| data).collect()))
    }

    pub(crate) fn async_error(&self) -> i32 {
        self.group.async_error.load(Ordering::Relaxed)
    }
}

/// Resets the state, for tests.
pub(crate) fn reset() {
    lock(&GROUPS).clear();
    COMMUNICATORS.clear();
}
