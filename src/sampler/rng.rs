//! Random numbers by position: each number is a function of (seed, choice, position) only.
//!
//! No generator state is kept between steps. The position is the number of tokens that the choice has already
//! generated. So a number does not depend on the batch, the thread, the pipeline depth, or the number of preemptions of
//! the sequence.
//!
//! The numbers are part of the crate's stability promise: a change of any constant in this file changes the output of
//! every seed.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng as _, SeedableRng as _};

/// Rest of the key after the seed; it separates these streams from those of other programs.
const KEY_TAIL: [u8; 24] = *b"ascend-llm sampler draws";

/// Number of 32-bit words of the stream per position.
const WORDS_PER_POSITION: u128 = 2;

/// Returns a number in `0.0..1.0` with 53 random bits, for one position of one choice.
///
/// The seed is the `ChaCha8` key, the choice selects the stream, and the position selects the words in the stream.
pub(super) fn uniform(seed: u64, choice: u32, position: u64) -> f64 {
    /// 2⁻⁵³: the distance between two adjacent results.
    const STEP: f64 = 1.0 / (1u64 << 53) as f64;
    let mut stream = stream(seed, choice);
    stream.set_word_pos(u128::from(position) * WORDS_PER_POSITION);
    (stream.next_u64() >> 11) as f64 * STEP
}

fn stream(seed: u64, choice: u32) -> ChaCha8Rng {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    key[8..].copy_from_slice(&KEY_TAIL);
    let mut stream = ChaCha8Rng::from_seed(key);
    stream.set_stream(u64::from(choice));
    stream
}

#[cfg(test)]
#[allow(clippy::cast_possible_truncation)]
mod tests {
    use super::*;

    #[test]
    fn a_position_is_a_place_in_one_stream() {
        for (seed, choice) in [(0, 0), (7, 3), (u64::MAX, u32::MAX)] {
            let mut in_order = stream(seed, choice);
            let walked: Vec<f64> = (0..100).map(|_| (in_order.next_u64() >> 11) as f64 / (1u64 << 53) as f64).collect();
            // In reverse order, to show that no call leaves state for the next one.
            for position in (0..100).rev() {
                assert_eq!(uniform(seed, choice, position), walked[position as usize]);
            }
        }
    }

    #[test]
    fn seed_choice_and_position_each_change_the_number() {
        let here = uniform(1, 0, 0);
        assert_ne!(here, uniform(2, 0, 0));
        assert_ne!(here, uniform(1, 1, 0));
        assert_ne!(here, uniform(1, 0, 1));
    }

    #[test]
    fn numbers_fill_the_unit_interval_evenly() {
        let mut cells = [0u32; 16];
        for position in 0..16_000 {
            let number = uniform(5, 0, position);
            assert!((0.0..1.0).contains(&number));
            cells[(number * 16.0) as usize] += 1;
        }
        // Chi-square with 15 degrees of freedom: one seed in a thousand exceeds 37.7; this seed is fixed.
        let chi: f64 = cells.iter().map(|&n| (f64::from(n) - 1000.0).powi(2) / 1000.0).sum();
        assert!(chi < 37.7, "chi-square {chi}");
    }

    #[test]
    fn far_positions_are_reached() {
        assert_ne!(uniform(1, 0, u64::MAX), uniform(1, 0, u64::MAX - 1));
    }
}
