//! The cards of a device: each has a thread and one rank of the model, and all receive commands in one order.
//!
//! ```text
//! callers ──► order ──► card 0: queue ─ thread ─ context ─ streams ──┐
//!                   ├──► card 1: queue ─ thread ─ context ─ streams ──┤ collectives meet on the streams
//!                   └──► …                                          ──┘
//! ```
//! Memory is mirrored: a buffer exists on each card, writes go to all cards, reads come from the first. Ranks meet in
//! collectives in the order of their queues, so a command for all cards is pushed to all queues under one lock.

#![forbid(unsafe_code)]

use crate::num::to_u32;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

use ascend_sys::{AscendError, Collectives, Library, RootInfo, Runtime};
use parking_lot::{Mutex, MutexGuard};

use super::command::{Command, WorkerShared};
use super::consensus::Consensus;
use super::wait::WaitPolicy;
use super::{CardInfo, Worker, WorkerConfig};
use crate::device::DeviceError;
use crate::device::ascend::error::ErrorState;
use crate::device::ascend::notes::Diagnostics;
use crate::device::ascend::options::{AscendOpenError, AscendOptions};
use crate::graph::TpRank;

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct WorkerGroup {
    handles: Vec<WorkerHandle>,
    pub errors: Arc<ErrorState>,
    pub notes: Arc<Diagnostics>,
    order: Mutex<()>,
}

#[derive(Debug)]
struct WorkerHandle {
    shared: Arc<WorkerShared>,
    thread: Option<JoinHandle<()>>,
}

/// Exclusive right to push commands to all cards.
pub(crate) struct Broadcast<'a> {
    group: &'a WorkerGroup,
    _order: MutexGuard<'a, ()>,
}

/// Sent to a card's thread once all cards are open: the data needed to join the others, if there are several.
type JoinInfo = Option<(Collectives, RootInfo, Arc<Consensus>)>;

/// A card whose thread has its context and waits for [`JoinInfo`].
struct ReadyWorker {
    shared: Arc<WorkerShared>,
    info: CardInfo,
    root: Option<RootInfo>,
}

/// A thread that is starting.
struct PendingWorker {
    card: u32,
    thread: JoinHandle<()>,
    ready: mpsc::Receiver<Result<ReadyWorker, AscendError>>,
    join_info: mpsc::Sender<JoinInfo>,
    joined: mpsc::Receiver<Result<(), AscendError>>,
}

impl WorkerGroup {
    /// Starts one thread per card, and joins the cards if there are several.
    ///
    /// # Errors
    /// If a thread cannot start, a card cannot be opened, or the cards cannot join.
    pub(crate) fn open(
        library: &Arc<Library>,
        runtime: &Runtime,
        options: &AscendOptions,
    ) -> Result<(Self, Vec<CardInfo>), AscendOpenError> {
        let of = to_u32(options.cards.len());
        let collectives = if of > 1 { Some(Collectives::load(library)?) } else { None };
        let (limit, errors) = (options.timeout(), Arc::new(ErrorState::new(of > 1)));
        let notes = Arc::new(Diagnostics::default());
        let others = (of > 1).then(|| Arc::clone(&errors));
        let config = |index: u32, card: u32| WorkerConfig {
            library: Arc::clone(library),
            runtime: runtime.clone(),
            card,
            rank: TpRank { index, of },
            wait_policy: WaitPolicy::new(limit, others.clone()),
            is_deterministic: options.deterministic,
            capture_max_rows: if options.capture { options.capture_max_rows as usize } else { 0 },
            root_of: collectives.filter(|_| index == 0),
            errors: Arc::clone(&errors),
            diagnostics: Arc::clone(&notes),
        };
        let mut pending = Vec::with_capacity(options.cards.len());
        let started = (0..).zip(&options.cards).try_for_each(|(index, &card)| {
            pending.push(PendingWorker::start(config(index, card))?);
            Ok(())
        });
        let ready = started.and_then(|()| pending.iter().map(PendingWorker::ready).collect::<Result<Vec<_>, _>>());
        let ready = match ready {
            Ok(ready) => ready,
            Err(error) => {
                pending.into_iter().for_each(PendingWorker::give_up);
                return Err(error);
            }
        };
        let root = ready.first().and_then(|first| first.root);
        let consensus = Arc::new(Consensus::new(pending.len(), Arc::clone(&errors), limit));
        let join_info = collectives.zip(root).map(|(collectives, root)| (collectives, root, consensus));
        for pending in &pending {
            // A thread that has ended reports its error below.
            let _ = pending.join_info.send(join_info.clone());
        }
        let joined = pending.iter().map(PendingWorker::joined).collect::<Vec<_>>();
        let (mut handles, mut info) = (Vec::new(), Vec::new());
        for (pending, ready) in pending.into_iter().zip(ready) {
            handles.push(WorkerHandle { shared: ready.shared, thread: Some(pending.thread) });
            info.push(ready.info);
        }
        // From here on, dropping the group ends all threads.
        let group = Self { handles, errors, notes, order: Mutex::new(()) };
        joined.into_iter().collect::<Result<(), _>>()?;
        Ok((group, info))
    }

    pub(crate) fn count(&self) -> u32 {
        to_u32(self.handles.len())
    }

    /// Shared state of the first card, which serves reads.
    pub(crate) fn first(&self) -> &WorkerShared {
        &self.handles[0].shared
    }

    pub(crate) fn all_shared(&self) -> impl Iterator<Item = &WorkerShared> {
        self.handles.iter().map(|handle| &*handle.shared)
    }

    /// Waits for the exclusive right to push commands to all cards.
    pub(crate) fn broadcast(&self) -> Broadcast<'_> {
        Broadcast { group: self, _order: self.order.lock() }
    }

    /// The error that ended the device.
    pub(crate) fn end(&self) -> DeviceError {
        self.errors.fatal().unwrap_or(DeviceError::Lost)
    }

    /// Runs a function on one card's thread and waits for its result.
    pub(crate) fn call<R: Send + 'static>(
        &self,
        rank: usize,
        run: impl FnOnce(&mut Worker) -> R + Send + 'static,
    ) -> Result<R, DeviceError> {
        let shared = &self.handles.get(rank).ok_or_else(|| self.end())?.shared;
        self.ask(shared, run)?.recv().map_err(|_| self.end())
    }

    /// Runs a function on every card's thread at the same time and waits for the results.
    pub(crate) fn call_each<R: Send + 'static, F: FnOnce(&mut Worker) -> R + Send + 'static>(
        &self,
        mut make: impl FnMut(usize) -> F,
    ) -> Result<Vec<R>, DeviceError> {
        let asked = {
            let turn = self.broadcast();
            let all_shared = turn.group.all_shared().enumerate();
            all_shared.map(|(rank, shared)| self.ask(shared, make(rank))).collect::<Result<Vec<_>, _>>()?
        };
        asked.into_iter().map(|answer| answer.recv().map_err(|_| self.end())).collect()
    }

    fn ask<R: Send + 'static>(
        &self,
        shared: &WorkerShared,
        run: impl FnOnce(&mut Worker) -> R + Send + 'static,
    ) -> Result<mpsc::Receiver<R>, DeviceError> {
        let (sender, answer) = mpsc::sync_channel(1);
        // The receiver is gone only if the calling thread has ended.
        let command = Command::Call(Box::new(move |card| drop(sender.send(run(card)))));
        shared.queue.push_with(|| (command, ())).ok_or_else(|| self.end())?;
        Ok(answer)
    }
}

impl Broadcast<'_> {
    /// Pushes a command to every card; `make` receives its rank and shared state.
    pub(crate) fn push(&self, mut make: impl FnMut(usize, &WorkerShared) -> Command) -> Result<(), DeviceError> {
        self.try_push(|rank, shared| Some(make(rank, shared)))
    }

    /// Pushes a command to every card; if `make` returns `None`, the device has ended.
    pub(crate) fn try_push(
        &self,
        mut make: impl FnMut(usize, &WorkerShared) -> Option<Command>,
    ) -> Result<(), DeviceError> {
        for (rank, shared) in self.group.all_shared().enumerate() {
            let command = make(rank, shared).ok_or_else(|| self.group.end())?;
            shared.queue.push_with(|| (command, ())).ok_or_else(|| self.group.end())?;
        }
        Ok(())
    }
}

impl PendingWorker {
    fn start(config: WorkerConfig) -> Result<Self, AscendOpenError> {
        let card = config.card;
        let (open, ready) = mpsc::channel();
        let (join_info, word) = mpsc::channel::<JoinInfo>();
        let (join, joined) = mpsc::channel();
        let serve = move || {
            let (mut card, shared, info) = match Worker::open(&config) {
                Ok(ready) => ready,
                Err(error) => return drop(open.send(Err(error))),
            };
            let root = match card.make_root(&config) {
                Ok(root) => root,
                Err(error) => return drop(open.send(Err(error))),
            };
            if open.send(Ok(ReadyWorker { shared: Arc::clone(&shared), info, root })).is_err() {
                return;
            }
            // The sender is dropped if another card could not be opened.
            let Ok(join_info) = word.recv() else { return };
            let outcome =
                join_info.map_or(Ok(()), |(collectives, root, consensus)| card.join(&collectives, &root, consensus));
            if join.send(outcome).is_ok() {
                card.serve(&shared);
            }
        };
        let thread = std::thread::Builder::new().name(format!("ascend-{card}")).spawn(serve);
        let thread = thread.map_err(|error| AscendOpenError::Thread { reason: error.to_string() })?;
        Ok(Self { card, thread, ready, join_info, joined })
    }

    /// Ends a thread that waits for its [`JoinInfo`].
    fn give_up(self) {
        let Self { thread, join_info, .. } = self;
        drop(join_info);
        // Its error is of no interest any longer.
        let _ = thread.join();
    }

    fn ready(&self) -> Result<ReadyWorker, AscendOpenError> {
        self.receive(&self.ready)
    }

    fn joined(&self) -> Result<(), AscendOpenError> {
        self.receive(&self.joined)
    }

    fn receive<T>(&self, from: &mpsc::Receiver<Result<T, AscendError>>) -> Result<T, AscendOpenError> {
        let heard = from.recv().map_err(|_| AscendOpenError::Thread { reason: "it ended at once".into() })?;
        heard.map_err(|source| AscendOpenError::Call { card: self.card, source })
    }
}

impl Drop for WorkerGroup {
    fn drop(&mut self) {
        for shared in self.all_shared() {
            // A thread that has ended has closed its queue.
            let _ = shared.queue.push_with(|| (Command::Stop, ()));
        }
        for handle in &mut self.handles {
            if let Some(thread) = handle.thread.take() {
                // The thread reports its failures where they occur.
                let _ = thread.join();
            }
        }
    }
}
