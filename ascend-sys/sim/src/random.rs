//! Seeded random numbers for delays and orders.

use crate::settings::Setting;
use std::time::Duration;

/// xorshift64* generator.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 16
    }

    /// A number below `n`.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        usize::try_from(self.next() % n.max(1) as u64).unwrap_or(0)
    }

    /// Sleeps for a random time up to the setting `delay_us`.
    pub(crate) fn delay(&mut self) {
        let longest = Setting::delay_us.size();
        if longest > 0 {
            let us = self.next() % (longest + 1);
            // Half of the tasks start without delay, so that gaps differ widely.
            if us.is_multiple_of(2) {
                std::thread::sleep(Duration::from_micros(us));
            }
        }
    }
}
