//! What the cards of a device decide together, such as whether a step is captured: ranks that replay a graph cannot meet
//! ranks that issue operations.

#![forbid(unsafe_code)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use ascend_sys::AscendError;
use parking_lot::{Condvar, Mutex};

use super::wait::{LOOK_UP, elsewhere};
use crate::device::ascend::error::Failures;

/// A vote of all cards, again and again.
#[derive(Debug)]
pub(crate) struct Accord {
    cards: usize,
    failures: Arc<Failures>,
    limit: Duration,
    state: Mutex<State>,
    decided: Condvar,
}

#[derive(Debug)]
struct State {
    votes: usize,
    all_agree: bool,
    /// Votes that are over, and what the last one came to.
    rounds: u64,
    outcome: bool,
}

impl Accord {
    pub(crate) fn new(cards: usize, failures: Arc<Failures>, limit: Duration) -> Self {
        let state = State { votes: 0, all_agree: true, rounds: 0, outcome: true };
        Self { cards, failures, limit, state: Mutex::new(state), decided: Condvar::new() }
    }

    /// Waits for all cards' votes; whether all agree.
    ///
    /// # Errors
    /// Another card has failed, or does not come within the limit.
    pub(crate) fn vote(&self, agrees: bool) -> Result<bool, AscendError> {
        let mut state = self.state.lock();
        state.votes += 1;
        state.all_agree &= agrees;
        if state.votes == self.cards {
            *state = State { votes: 0, all_agree: true, rounds: state.rounds + 1, outcome: state.all_agree };
            self.decided.notify_all();
            return Ok(state.outcome);
        }
        let (round, start) = (state.rounds, Instant::now());
        // The next vote ends only with this card's, so the outcome stays until it was read.
        while state.rounds == round {
            if self.failures.fatal().is_some() || start.elapsed() >= self.limit {
                return Err(elsewhere());
            }
            self.decided.wait_for(&mut state, LOOK_UP);
        }
        Ok(state.outcome)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::DeviceError;

    #[test]
    fn all_cards_hear_the_same() {
        let failures = Arc::new(Failures::new(true));
        let accord = Accord::new(3, Arc::clone(&failures), Duration::from_secs(60));
        let heard = |round: u32, card: u32| accord.vote(round & 1 << card == 0).unwrap();
        std::thread::scope(|scope| {
            for card in 0..3 {
                scope.spawn(move || (0..8).for_each(|round| assert_eq!(heard(round, card), round == 0)));
            }
        });
        failures.note(DeviceError::Lost);
        assert!(accord.vote(true).is_err());
    }
}
