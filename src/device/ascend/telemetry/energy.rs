//! Energy from power meters: samples of all cards, integrated over time.
//!
//! A card reports its current power, not its energy. The power between two samples is interpolated linearly if they are
//! close. Between samples that are far apart it is unknown and counts as the lowest power seen so far, so an hour
//! without a query never costs as much as one busy sample suggests.
//!
//! A thread samples ten times a second (a call of the driver may take a millisecond), only while there are queries: it
//! ends some time after the last one. Steps of an engine never wait for it.

#![forbid(unsafe_code)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use ascend_sys::{AscendError, DcmiCard};
use parking_lot::{Condvar, Mutex};

/// Time between samples: decode steps take tens of milliseconds, so the result is a mean over several.
const PERIOD: Duration = Duration::from_millis(100);
/// Largest distance of samples, in microseconds, between which the power is interpolated.
const CLOSE_US: u64 = 1_000_000;
/// Time that sampling continues after the last query: two intervals of a monitor that reads once a minute.
const IDLE_STOP_US: u64 = 120_000_000;

/// Integrated energy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct EnergyIntegrator {
    /// Twice the nanojoules: milliwatts times microseconds, with the powers at both ends of each interval added.
    twice_nj: u128,
    last: Option<(u64, u64)>,
    lowest_mw: u64,
}

impl EnergyIntegrator {
    fn add(&mut self, now_us: u64, power_mw: u64) {
        self.lowest_mw = self.last.map_or(power_mw, |_| self.lowest_mw.min(power_mw));
        if let Some((then_us, then_mw)) = self.last {
            let elapsed_us = now_us.saturating_sub(then_us);
            let both_mw = if elapsed_us <= CLOSE_US { then_mw + power_mw } else { 2 * self.lowest_mw };
            self.twice_nj += u128::from(both_mw) * u128::from(elapsed_us);
        }
        self.last = Some((now_us, power_mw));
    }

    fn uj(&self) -> u64 {
        u64::try_from(self.twice_nj / 2000).unwrap_or(u64::MAX)
    }

    fn age_us(&self, now_us: u64) -> u64 {
        self.last.map_or(u64::MAX, |(then_us, _)| now_us.saturating_sub(then_us))
    }
}

#[derive(Debug, Default)]
struct State {
    integral: EnergyIntegrator,
    /// Time at which sampling stops.
    until_us: u64,
    is_sampling: bool,
    is_ended: bool,
}

#[derive(Debug)]
struct Inner {
    cards: Vec<DcmiCard>,
    start: Instant,
    state: Mutex<State>,
    changed: Condvar,
}

/// Energy meter over several cards.
#[derive(Debug)]
pub(crate) struct Meter {
    inner: Arc<Inner>,
}

impl Meter {
    /// Creates a meter; every card must report its power.
    ///
    /// # Errors
    /// The error of the first card that does not.
    pub(crate) fn new(cards: Vec<DcmiCard>) -> Result<Self, AscendError> {
        let (state, changed) = (Mutex::default(), Condvar::new());
        let inner = Inner { cards, start: Instant::now(), state, changed };
        inner.sample(&mut inner.state.lock(), 0)?;
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Microjoules since the meter was created; keeps the sampling alive for a while.
    pub(crate) fn energy_uj(&self) -> u64 {
        let now_us = self.inner.now_us();
        let mut state = self.inner.state.lock();
        state.until_us = now_us.saturating_add(IDLE_STOP_US);
        if !state.is_sampling {
            let inner = Arc::clone(&self.inner);
            let thread = std::thread::Builder::new().name("ascend-power".into());
            // Without a thread, only the queries themselves sample.
            state.is_sampling = thread.spawn(move || inner.keep_sampling()).is_ok();
        }
        self.inner.asked(&mut state, now_us)
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        self.inner.state.lock().is_ended = true;
        self.inner.changed.notify_all();
    }
}

impl Inner {
    fn now_us(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    /// Energy now, from the last sample if it is recent enough, else from a new one.
    fn asked(&self, state: &mut State, now_us: u64) -> u64 {
        if u128::from(state.integral.age_us(now_us)) >= PERIOD.as_micros() {
            // A failed sample leaves a gap, which the next sample closes.
            let _ = self.sample(state, now_us);
        }
        state.integral.uj()
    }

    fn sample(&self, state: &mut State, now_us: u64) -> Result<(), AscendError> {
        let mut power_mw = 0;
        for card in &self.cards {
            power_mw += u64::from(card.power_mw()?);
        }
        state.integral.add(now_us, power_mw);
        Ok(())
    }

    fn keep_sampling(&self) {
        let mut state = self.state.lock();
        while !state.is_ended && self.now_us() < state.until_us {
            self.changed.wait_for(&mut state, PERIOD);
            let now_us = self.now_us();
            self.asked(&mut state, now_us);
        }
        state.is_sampling = false;
    }
}

#[cfg(test)]
mod tests {
    use ascend_sim::Simulator;
    use ascend_sys::Dcmi;

    use super::*;

    /// Watts times seconds are joules; the time between distant samples counts at the lowest known power.
    #[test]
    fn samples_add_up() {
        let mut integral = EnergyIntegrator::default();
        assert_eq!((integral.uj(), integral.age_us(7)), (0, u64::MAX));
        integral.add(0, 100_000);
        integral.add(500_000, 300_000);
        assert_eq!(integral.uj(), 100_000_000, "half a second at 200 W on average");
        integral.add(1_500_000, 300_000);
        assert_eq!(integral.uj(), 400_000_000);
        // An hour without samples, between two busy ones.
        integral.add(1_500_000 + 3_600_000_000, 300_000);
        assert_eq!(integral.uj(), 400_000_000 + 3600 * 100_000_000);
        // Time that goes backwards is ignored, and large values do not overflow.
        let before = integral.uj();
        integral.add(0, 300_000);
        assert_eq!(integral.uj(), before);
        integral.add(u64::MAX, u64::from(u32::MAX));
        assert!(integral.uj() > before);
    }

    /// For a constant power, the energy does not depend on the sampling.
    #[test]
    fn how_often_is_asked_does_not_show_in_a_constant_power() {
        for step_us in [1, 1000, 99_999, 1_000_000, 2_500_000] {
            let mut integral = EnergyIntegrator::default();
            for at in 0..=20 {
                integral.add(at * step_us, 90_000);
            }
            assert_eq!(integral.uj(), 20 * step_us * 90, "{step_us} us");
        }
    }

    /// Two simulated cards, at times that the test sets.
    #[test]
    fn cards_are_metered_together() {
        let sim = Simulator::beside_this_binary().unwrap();
        sim.reset();
        sim.set("devices", 2);
        sim.set("power_dw", 1000);
        let dcmi = Dcmi::open(Some(sim.path())).unwrap();
        let meter = Meter::new(vec![dcmi.card(0).unwrap(), dcmi.card(1).unwrap()]).unwrap();
        let at = |now_us: u64| meter.inner.asked(&mut meter.inner.state.lock(), now_us);
        assert_eq!(at(99_999), 0, "fresh enough");
        assert_eq!(at(100_000), 20_000_000, "200 W for a tenth of a second");
        sim.set("power_dw", 3000);
        assert_eq!(at(600_000), 20_000_000 + 200_000_000, "rising to 600 W over half a second");
        assert_eq!(at(600_001), 220_000_000);
        assert_eq!(at(1_600_000), 820_000_000);
        // An hour idle without samples, then a meter that fails.
        assert_eq!(at(3_601_600_000), 820_000_000 + 3600 * 200_000_000);
        sim.set("devices", 1);
        assert_eq!(at(3_602_600_000), 820_000_000 + 3600 * 200_000_000, "no sample, no guess");
        assert!(Meter::new(vec![dcmi.card(0).unwrap(), meter.inner.cards[1]]).is_err());
        assert!(!meter.inner.state.lock().is_sampling);
        sim.reset();
    }
}
