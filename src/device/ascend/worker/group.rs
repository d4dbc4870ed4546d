//! The cards of a device: a thread each, one rank of the model each, and one order of commands for all.
//!
//! ```text
//!  callers ──► order ──► card 0: queue ─ thread ─ context ─ streams ──┐
//!                   ├──► card 1: queue ─ thread ─ context ─ streams ──┤ collectives meet on the streams
//!                   └──► …                                          ──┘
//! ```
//! Memory is mirrored: a buffer is one on each card, writes go to all of them, reads come from the first. Ranks meet in
//! collectives in the order of their queues, so whatever goes to all cards goes to all queues under one lock.

#![forbid(unsafe_code)]

use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

use ascend_sys::{AscendError, Collectives, Library, RootInfo, Runtime};
use parking_lot::{Mutex, MutexGuard};

use super::command::{Command, Desk};
use super::consensus::Accord;
use super::wait::Patience;
use super::{Card, Facts, Opening};
use crate::device::DeviceError;
use crate::device::ascend::error::Failures;
use crate::device::ascend::notes::Notes;
use crate::device::ascend::options::{AscendOpenError, AscendOptions};
use crate::graph::Rank;

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Cards {
    seats: Vec<Seat>,
    pub failures: Arc<Failures>,
    pub notes: Arc<Notes>,
    order: Mutex<()>,
}

#[derive(Debug)]
struct Seat {
    desk: Arc<Desk>,
    thread: Option<JoinHandle<()>>,
}

/// The right to hand commands to all cards.
pub(crate) struct Turn<'a> {
    cards: &'a Cards,
    _order: MutexGuard<'a, ()>,
}

/// What a card's thread hears once all others have opened: what to join with, if there are several.
type Go = Option<(Collectives, RootInfo, Arc<Accord>)>;

/// A card whose thread has its context and waits for the word.
struct Opened {
    desk: Arc<Desk>,
    facts: Facts,
    root: Option<RootInfo>,
}

/// A thread on its way.
struct Candidate {
    card: u32,
    thread: JoinHandle<()>,
    opened: mpsc::Receiver<Result<Opened, AscendError>>,
    go: mpsc::Sender<Go>,
    joined: mpsc::Receiver<Result<(), AscendError>>,
}

impl Cards {
    /// Starts a thread a card, and joins them if there are several.
    pub(crate) fn open(
        library: &Arc<Library>,
        runtime: &Runtime,
        options: &AscendOptions,
    ) -> Result<(Self, Vec<Facts>), AscendOpenError> {
        let of = u32::try_from(options.cards.len()).unwrap_or(u32::MAX);
        let collectives = if of > 1 { Some(Collectives::load(library)?) } else { None };
        let (limit, failures) = (options.timeout(), Arc::new(Failures::new(of > 1)));
        let notes = Arc::new(Notes::default());
        let others = (of > 1).then(|| Arc::clone(&failures));
        let opening = |index: u32, card: u32| Opening {
            library: Arc::clone(library),
            runtime: runtime.clone(),
            card,
            rank: Rank { index, of },
            patience: Patience::new(limit, others.clone()),
            is_deterministic: options.deterministic,
            capture_max_rows: if options.capture { options.capture_max_rows as usize } else { 0 },
            root_of: collectives.filter(|_| index == 0),
            failures: Arc::clone(&failures),
            notes: Arc::clone(&notes),
        };
        let mut candidates = Vec::with_capacity(options.cards.len());
        let started = (0..).zip(&options.cards).try_for_each(|(index, &card)| {
            candidates.push(Candidate::start(opening(index, card))?);
            Ok(())
        });
        let opened = started.and_then(|()| candidates.iter().map(Candidate::opened).collect::<Result<Vec<_>, _>>());
        let opened = match opened {
            Ok(opened) => opened,
            Err(error) => {
                candidates.into_iter().for_each(Candidate::give_up);
                return Err(error);
            }
        };
        let root = opened.first().and_then(|first| first.root);
        let accord = Arc::new(Accord::new(candidates.len(), Arc::clone(&failures), limit));
        let go = collectives.zip(root).map(|(collectives, root)| (collectives, root, accord));
        for candidate in &candidates {
            // One that has ended says so below.
            let _ = candidate.go.send(go.clone());
        }
        let joined = candidates.iter().map(Candidate::joined).collect::<Vec<_>>();
        let (mut seats, mut facts) = (Vec::new(), Vec::new());
        for (candidate, opened) in candidates.into_iter().zip(opened) {
            seats.push(Seat { desk: opened.desk, thread: Some(candidate.thread) });
            facts.push(opened.facts);
        }
        // From here on dropping it ends all threads.
        let cards = Self { seats, failures, notes, order: Mutex::new(()) };
        joined.into_iter().collect::<Result<(), _>>()?;
        Ok((cards, facts))
    }

    pub(crate) fn count(&self) -> u32 {
        u32::try_from(self.seats.len()).unwrap_or(u32::MAX)
    }

    /// The desk of the first card, which answers reads.
    pub(crate) fn first(&self) -> &Desk {
        &self.seats[0].desk
    }

    pub(crate) fn desks(&self) -> impl Iterator<Item = &Desk> {
        self.seats.iter().map(|seat| &*seat.desk)
    }

    /// Waits for the right to hand commands to all cards.
    pub(crate) fn turn(&self) -> Turn<'_> {
        Turn { cards: self, _order: self.order.lock() }
    }

    /// What ended the device.
    pub(crate) fn end(&self) -> DeviceError {
        self.failures.fatal().unwrap_or(DeviceError::Lost)
    }

    /// Runs something on one card's thread and waits for what it gives.
    pub(crate) fn call<R: Send + 'static>(
        &self,
        rank: usize,
        run: impl FnOnce(&mut Card) -> R + Send + 'static,
    ) -> Result<R, DeviceError> {
        let desk = &self.seats.get(rank).ok_or_else(|| self.end())?.desk;
        self.ask(desk, run)?.recv().map_err(|_| self.end())
    }

    /// Runs something on every card's thread, all at once, and waits for what they give.
    pub(crate) fn call_each<R: Send + 'static, F: FnOnce(&mut Card) -> R + Send + 'static>(
        &self,
        mut make: impl FnMut(usize) -> F,
    ) -> Result<Vec<R>, DeviceError> {
        let asked = {
            let turn = self.turn();
            let desks = turn.cards.desks().enumerate();
            desks.map(|(rank, desk)| self.ask(desk, make(rank))).collect::<Result<Vec<_>, _>>()?
        };
        asked.into_iter().map(|given| given.recv().map_err(|_| self.end())).collect()
    }

    fn ask<R: Send + 'static>(
        &self,
        desk: &Desk,
        run: impl FnOnce(&mut Card) -> R + Send + 'static,
    ) -> Result<mpsc::Receiver<R>, DeviceError> {
        let (give, given) = mpsc::sync_channel(1);
        // Whoever asked waits, unless it is gone with its whole thread.
        let command = Command::Call(Box::new(move |card| drop(give.send(run(card)))));
        desk.queue.push_with(|| (command, ())).ok_or_else(|| self.end())?;
        Ok(given)
    }
}

impl Turn<'_> {
    /// Hands every card a command: `make` is given its rank and desk.
    pub(crate) fn push(&self, mut make: impl FnMut(usize, &Desk) -> Command) -> Result<(), DeviceError> {
        self.try_push(|rank, desk| Some(make(rank, desk)))
    }

    /// The same; `None` from `make` says that the device has ended.
    pub(crate) fn try_push(&self, mut make: impl FnMut(usize, &Desk) -> Option<Command>) -> Result<(), DeviceError> {
        for (rank, desk) in self.cards.desks().enumerate() {
            let command = make(rank, desk).ok_or_else(|| self.cards.end())?;
            desk.queue.push_with(|| (command, ())).ok_or_else(|| self.cards.end())?;
        }
        Ok(())
    }
}

impl Candidate {
    fn start(opening: Opening) -> Result<Self, AscendOpenError> {
        let card = opening.card;
        let (open, opened) = mpsc::channel();
        let (go, word) = mpsc::channel::<Go>();
        let (join, joined) = mpsc::channel();
        let serve = move || {
            let (mut card, desk, facts) = match Card::open(&opening) {
                Ok(opened) => opened,
                Err(error) => return drop(open.send(Err(error))),
            };
            let root = match card.make_root(&opening) {
                Ok(root) => root,
                Err(error) => return drop(open.send(Err(error))),
            };
            if open.send(Ok(Opened { desk: Arc::clone(&desk), facts, root })).is_err() {
                return;
            }
            // No word comes if another card could not be opened.
            let Ok(go) = word.recv() else { return };
            let outcome = go.map_or(Ok(()), |(collectives, root, accord)| card.join(&collectives, &root, accord));
            if join.send(outcome).is_ok() {
                card.serve(&desk);
            }
        };
        let thread = std::thread::Builder::new().name(format!("ascend-{card}")).spawn(serve);
        let thread = thread.map_err(|error| AscendOpenError::Thread { reason: error.to_string() })?;
        Ok(Self { card, thread, opened, go, joined })
    }

    /// Ends a thread that waits for the word.
    fn give_up(self) {
        let Self { thread, go, .. } = self;
        drop(go);
        // Nothing is told of it any more.
        let _ = thread.join();
    }

    fn opened(&self) -> Result<Opened, AscendOpenError> {
        self.heard(&self.opened)
    }

    fn joined(&self) -> Result<(), AscendOpenError> {
        self.heard(&self.joined)
    }

    fn heard<T>(&self, from: &mpsc::Receiver<Result<T, AscendError>>) -> Result<T, AscendOpenError> {
        let heard = from.recv().map_err(|_| AscendOpenError::Thread { reason: "it ended at once".into() })?;
        heard.map_err(|source| AscendOpenError::Call { card: self.card, source })
    }
}

impl Drop for Cards {
    fn drop(&mut self) {
        for desk in self.desks() {
            // A thread that has ended takes nothing any more.
            let _ = desk.queue.push_with(|| (Command::Stop, ()));
        }
        for seat in &mut self.seats {
            if let Some(thread) = seat.thread.take() {
                // It reports its failures where it meets them.
                let _ = thread.join();
            }
        }
    }
}
