//! Collectives: each rank leaves a copy of its data, waits until all have, and takes what it needs.
//!
//! Ranks are told apart by their calls' order: the n-th collective of each rank belongs together.

use crate::bench::{self, Bench};
use crate::codes::{Done, fail, rule};
use crate::control;
use crate::memory::{DeviceMemory, memory};
use crate::registry::{Handle, Registry, lock};
use crate::stream::{Stream, Work};
use crate::task::{Cost, Task};
use crate::tensor::{Elem, View};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, LazyLock, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Codes of `HcclResult`.
pub(crate) const PARAMETER: i32 = 1;
pub(crate) const NULL: i32 = 2;
const NOT_SUPPORTED: i32 = 5;
const TIMEOUT: i32 = 9;

/// How long a rank waits for the others to join. The real library waits 120 s.
const JOIN_LIMIT: Duration = Duration::from_secs(20);

pub(crate) static COMMUNICATORS: Registry<Communicator> = Registry::new("communicator");
static GROUPS: LazyLock<Mutex<HashMap<u64, Arc<Group>>>> = LazyLock::new(|| Mutex::new(HashMap::new()));
static NEXT_ROOT: AtomicU64 = AtomicU64::new(1);

/// A rendezvous nobody has used.
pub(crate) fn new_root() -> u64 {
    NEXT_ROOT.fetch_add(1, Ordering::Relaxed)
}

struct Group {
    ranks: usize,
    state: Mutex<GroupState>,
    changed: Condvar,
}

#[derive(Default)]
struct GroupState {
    joined: usize,
    rounds: HashMap<u64, Round>,
}

/// One collective: what each rank left, and how many have taken it.
struct Round {
    left: Vec<Option<Vec<f32>>>,
    taken: usize,
}

pub(crate) struct Communicator {
    group: Arc<Group>,
    rank: usize,
    next_round: AtomicU64,
}

/// Joins a rendezvous and waits for all others.
pub(crate) fn join(root: u64, ranks: usize, rank: usize) -> Done<Handle> {
    rule!(rank < ranks, PARAMETER, "rank {rank} of {ranks}");
    let group = lock(&GROUPS)
        .entry(root)
        .or_insert_with(|| Arc::new(Group { ranks, state: Mutex::default(), changed: Condvar::new() }))
        .clone();
    rule!(group.ranks == ranks, PARAMETER, "{ranks} ranks here, {} elsewhere", group.ranks);
    let start = Instant::now();
    let mut state = lock(&group.state);
    state.joined += 1;
    group.changed.notify_all();
    while state.joined < ranks {
        rule!(start.elapsed() < JOIN_LIMIT, TIMEOUT, "{} of {ranks} ranks came", state.joined);
        let wait = group.changed.wait_timeout(state, Duration::from_millis(10));
        state = wait.unwrap_or_else(PoisonError::into_inner).0;
    }
    drop(state);
    Ok(COMMUNICATORS.add(Arc::new(Communicator { group, rank, next_round: AtomicU64::new(0) })))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reduce {
    Sum,
    Largest,
}

impl Reduce {
    pub(crate) fn of(op: i32) -> Done<Self> {
        match op {
            0 => Ok(Self::Sum),
            2 => Ok(Self::Largest),
            _ => fail!(NOT_SUPPORTED, "reduction {op}; sum and largest are supported here"),
        }
    }

    /// All ranks' elements in the order of the ranks.
    fn join(self, all: &[Vec<f32>], i: usize) -> f32 {
        let values = all.iter().map(|one| one[i]);
        match self {
            Self::Sum => values.sum(),
            Self::Largest => values.fold(f32::NEG_INFINITY, f32::max),
        }
    }
}

/// What a rank gives and takes.
pub(crate) struct Plan {
    send: View,
    recv: View,
    what: What,
}

#[derive(Clone, Copy)]
enum What {
    AllReduce(Reduce),
    AllGather,
    ReduceScatter(Reduce),
    Broadcast(usize),
}

impl Plan {
    fn new(what: What, send: (usize, usize), recv: (usize, usize), dtype: i32) -> Done<Self> {
        let elem = match dtype {
            0 => Elem::I8,
            2 => Elem::I32,
            3 => Elem::F16,
            4 => Elem::F32,
            11 => Elem::BF16,
            _ => fail!(NOT_SUPPORTED, "data type {dtype}"),
        };
        rule!(send.0 != 0 && recv.0 != 0, NULL, "a buffer is null");
        let view = |(address, count): (usize, usize)| View {
            address,
            elem,
            format: crate::codes::FORMAT_ND,
            dims: vec![count],
            strides: vec![1],
            offset: 0,
            storage: vec![count],
        };
        Ok(Self { send: view(send), recv: view(recv), what })
    }

    pub(crate) fn all_reduce(send: usize, recv: usize, count: u64, dtype: i32, reduce: Reduce) -> Done<Self> {
        let count = elements(count)?;
        Self::new(What::AllReduce(reduce), (send, count), (recv, count), dtype)
    }

    pub(crate) fn all_gather(send: usize, recv: usize, count: u64, dtype: i32) -> Done<Self> {
        let count = elements(count)?;
        Self::new(What::AllGather, (send, count), (recv, count), dtype)
    }

    pub(crate) fn reduce_scatter(send: usize, recv: usize, count: u64, dtype: i32, reduce: Reduce) -> Done<Self> {
        let count = elements(count)?;
        Self::new(What::ReduceScatter(reduce), (send, count), (recv, count), dtype)
    }

    pub(crate) fn broadcast(buffer: usize, count: u64, dtype: i32, root: usize) -> Done<Self> {
        let count = elements(count)?;
        Self::new(What::Broadcast(root), (buffer, count), (buffer, count), dtype)
    }

    /// Sizes of both ends with all ranks counted.
    fn spread(mut self, ranks: usize) -> Self {
        let wide = match self.what {
            What::AllGather => &mut self.recv,
            What::ReduceScatter(_) => &mut self.send,
            _ => return self,
        };
        wide.dims[0] *= ranks;
        wide.storage[0] *= ranks;
        self
    }

    /// What this rank receives.
    fn result(&self, all: &[Vec<f32>], rank: usize) -> Vec<f32> {
        let count = self.recv.count();
        match self.what {
            What::AllReduce(reduce) => (0..count).map(|i| reduce.join(all, i)).collect(),
            What::AllGather => all.concat(),
            What::ReduceScatter(reduce) => (0..count).map(|i| reduce.join(all, rank * count + i)).collect(),
            What::Broadcast(root) => all.get(root).cloned().unwrap_or_default(),
        }
    }
}

fn elements(count: u64) -> Done<usize> {
    match usize::try_from(count) {
        Ok(count) if count > 0 => Ok(count),
        _ => fail!(PARAMETER, "{count} elements"),
    }
}

/// A collective as a task: the rendezvous before, the result as its body.
pub(crate) fn task(name: &'static str, comm: &Arc<Communicator>, plan: Plan) -> Work {
    let plan = Arc::new(plan.spread(comm.group.ranks));
    let received: Arc<Mutex<Vec<Vec<f32>>>> = Arc::default();
    let before = {
        let (comm, plan, received) = (comm.clone(), plan.clone(), received.clone());
        move |stream: &Stream| {
            let own = read(&plan.send)?;
            *lock(&received) = comm.exchange(own, stream)?;
            Ok(())
        }
    };
    let rank = comm.rank;
    let cost = Cost { bytes: (plan.send.bytes() + plan.recv.bytes()) as u64, ..Cost::default() };
    let body = move |memory: &mut DeviceMemory| {
        let values = plan.result(&lock(&received), rank);
        let views = [Some(plan.recv.clone())];
        Bench { memory, views: &views }.store(0, &values)
    };
    Work::Task(Arc::new(Task {
        name,
        before: Some(Arc::new(before)),
        body: Arc::new(body),
        cost,
        fault: control::task_fault(name),
        is_op: false,
        workspace_bytes: 0,
    }))
}

fn read(view: &View) -> Done<Vec<f32>> {
    let mut values = Vec::with_capacity(view.count());
    bench::stretch(&memory(), view, 0, view.count(), &mut values)?;
    Ok(values)
}

impl Communicator {
    /// Leaves the own data and waits for everybody's.
    fn exchange(&self, own: Vec<f32>, stream: &Stream) -> Done<Vec<Vec<f32>>> {
        let number = self.next_round.fetch_add(1, Ordering::Relaxed);
        let ranks = self.group.ranks;
        {
            let mut state = lock(&self.group.state);
            let round = state.rounds.entry(number).or_insert_with(|| Round { left: vec![None; ranks], taken: 0 });
            round.left[self.rank] = Some(own);
        }
        loop {
            {
                let mut state = lock(&self.group.state);
                let Some(round) = state.rounds.get_mut(&number) else { fail!(PARAMETER, "the round is gone") };
                if let Some(all) = round.left.iter().cloned().collect::<Option<Vec<_>>>() {
                    round.taken += 1;
                    if round.taken == ranks {
                        state.rounds.remove(&number);
                    }
                    let same = all.iter().all(|one| one.len() == all[0].len());
                    rule!(same, PARAMETER, "ranks gave different numbers of elements");
                    return Ok(all);
                }
            }
            stream.pause()?;
        }
    }
}

/// Forgets everything, for tests.
pub(crate) fn reset() {
    lock(&GROUPS).clear();
    COMMUNICATORS.clear();
}
