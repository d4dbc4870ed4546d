//! Decisions that the cards of a device take together, such as whether a step is captured: ranks that replay a graph
//! cannot run a collective with ranks that issue operations.

#![forbid(unsafe_code)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use ascend_sys::AscendError;
use parking_lot::{Condvar, Mutex};

use super::wait::{POLL_INTERVAL, peer_failed};
use crate::device::ascend::error::ErrorState;

/// Reusable barrier: all ranks agree on success or failure.
#[derive(Debug)]
pub(crate) struct Consensus {
    cards: usize,
    errors: Arc<ErrorState>,
    limit: Duration,
    state: Mutex<State>,
    decided: Condvar,
}

#[derive(Debug)]
struct State {
    votes: usize,
    all_agree: bool,
    /// Number of completed votes, and the outcome of the last one.
    rounds: u64,
    outcome: bool,
}

impl Consensus {
    pub(crate) fn new(cards: usize, errors: Arc<ErrorState>, limit: Duration) -> Self {
        let state = State { votes: 0, all_agree: true, rounds: 0, outcome: true };
        Self { cards, errors, limit, state: Mutex::new(state), decided: Condvar::new() }
    }

    /// Waits for the votes of all cards; returns whether all agree.
    ///
    /// # Errors
    /// If another card has failed, or does not vote within the time limit.
    pub(crate) fn all_agree(&self, agrees: bool) -> Result<bool, AscendError> {
        let mut state = self.state.lock();
        state.votes += 1;
        state.all_agree &= agrees;
        if state.votes == self.cards {
            *state = State { votes: 0, all_agree: true, rounds: state.rounds + 1, outcome: state.all_agree };
            self.decided.notify_all();
            return Ok(state.outcome);
        }
        let (round, start) = (state.rounds, Instant::now());
        // The next vote cannot complete without this card's, so the outcome stays until it has been read.
        while state.rounds == round {
            if self.errors.fatal().is_some() || start.elapsed() >= self.limit {
                return Err(peer_failed());
            }
            self.decided.wait_for(&mut state, POLL_INTERVAL);
        }
        Ok(state.outcome)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::DeviceError;

    #[test]
    fn all_cards_get_the_same_answer() {
        let errors = Arc::new(ErrorState::new(true));
        let consensus = Consensus::new(3, Arc::clone(&errors), Duration::from_secs(60));
        let heard = |round: u32, card: u32| consensus.all_agree(round & 1 << card == 0).unwrap();
        std::thread::scope(|scope| {
            for card in 0..3 {
                scope.spawn(move || (0..8).for_each(|round| assert_eq!(heard(round, card), round == 0)));
            }
        });
        errors.note(DeviceError::Lost);
        assert!(consensus.all_agree(true).is_err());
    }
}
