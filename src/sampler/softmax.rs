//! Arithmetic of the sampler: maximum, exponentials, sums.
//!
//! All operations are IEEE additions, multiplications and divisions in a fixed order. The compiler can vectorize them
//! without changing a bit, so equal logits yield equal weights on every machine. A masked entry is `-inf` and has
//! weight 0. The maximum is subtracted first, so no value overflows or becomes NaN.

use super::ranking;

/// Number of weights per block; the weights of a row are summed block by block.
///
/// A block is short enough for an f32 sum, and long enough that sampling from 150,000 tokens walks only a few thousand
/// block sums.
pub(super) const BLOCK: usize = 64;

/// Number of independent partial sums within a block. It is part of the definition of a sum and does not depend on the
/// machine.
const SUMS: usize = 8;

/// The argmax of a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct TopLogit {
    /// Its value.
    pub value: f32,
    /// Its id, the lowest among equals.
    pub id: u32,
}

/// Returns the argmax of a row (the lowest id wins a tie); `None` if the row is empty or fully masked.
pub(super) fn top_logit(row: &[f32]) -> Option<TopLogit> {
    let mut lanes = [f32::NEG_INFINITY; 2 * SUMS];
    let mut chunks = row.chunks_exact(2 * SUMS);
    for chunk in &mut chunks {
        for (lane, &value) in lanes.iter_mut().zip(chunk) {
            *lane = if value > *lane { value } else { *lane };
        }
    }
    let value = lanes.iter().chain(chunks.remainder()).fold(f32::NEG_INFINITY, |m, &v| if v > m { v } else { m });
    if value == f32::NEG_INFINITY {
        return None;
    }
    let id = row.iter().position(|&v| v == value)?;
    Some(TopLogit { value, id: ranking::token(id) })
}

/// Returns the first token whose logit is infinite or NaN.
pub(super) fn first_non_finite(row: &[f32]) -> Option<u32> {
    const EXPONENT: u32 = 0x7f80_0000;
    // One chunk at a time, so that a row without such an entry costs one pass of vector code.
    for (at, chunk) in row.chunks(256).enumerate() {
        let bad: u32 = chunk.iter().map(|v| u32::from(v.to_bits() & EXPONENT == EXPONENT)).sum();
        if bad > 0 {
            let within = chunk.iter().position(|v| !v.is_finite())?;
            return Some(ranking::token(at * 256 + within));
        }
    }
    None
}

/// Computes `e` to the power of `z` for `z ≤ 0`: exactly 1 at 0, within two units in the last place above −87, 0 below.
///
/// This is the Cephes polynomial. The system's `expf` is not used: its last bit differs between libraries, and the
/// compiler does not inline it into vector code. Below −87, the results leave the normal f32 numbers.
#[inline(always)]
pub(super) fn exp_neg(z: f32) -> f32 {
    const LOWEST: f32 = -87.0;
    /// 1.5 · 2²³: adding it rounds to an integer and leaves that integer in the low bits.
    const ROUND: f32 = 12_582_912.0;
    /// ln 2 in two parts; the first (355/512) has so few bits that its multiples are exact.
    const LN2: (f32, f32) = (0.693_359_4, -2.121_944_4e-4);
    let clamped = if z > LOWEST { z } else { LOWEST };
    let shifted = clamped * std::f32::consts::LOG2_E + ROUND;
    let whole = shifted - ROUND;
    let r = (clamped - whole * LN2.0) - whole * LN2.1;
    const TAIL: [f32; 5] = [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5];
    let mut y = 1.987_569_1e-4;
    for c in TAIL {
        y = y * r + c;
    }
    y = y * r * r + r + 1.0;
    let power = shifted.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(127) << 23;
    if z < LOWEST { 0.0 } else { y * f32::from_bits(power) }
}

/// Sums a block's weights in the fixed order: eight f32 partial sums, then their sum in f64.
#[inline(always)]
fn block_sum(mut weight_at: impl FnMut(usize) -> f32, len: usize) -> f64 {
    let mut lanes = [0.0f32; SUMS];
    let whole = len - len % SUMS;
    for start in (0..whole).step_by(SUMS) {
        for (lane, sum) in lanes.iter_mut().enumerate() {
            *sum += weight_at(start + lane);
        }
    }
    for at in whole..len {
        lanes[at - whole] += weight_at(at);
    }
    lanes.iter().map(|&lane| f64::from(lane)).sum()
}

/// Fills `weights` with `exp((x − max) / temperature)`, or 0 if that is below `floor`, and `blocks` with the sum of
/// each block; returns the sum of the blocks.
pub(super) fn weigh(
    row: &[f32],
    max: f32,
    temperature: f32,
    floor: f32,
    weights: &mut [f32],
    blocks: &mut [f64],
) -> f64 {
    debug_assert_eq!(row.len(), weights.len());
    debug_assert_eq!(row.len().div_ceil(BLOCK), blocks.len());
    let mut total = 0.0;
    for ((xs, ws), block) in row.chunks(BLOCK).zip(weights.chunks_mut(BLOCK)).zip(blocks) {
        for (w, &x) in ws.iter_mut().zip(xs) {
            let weight = exp_neg((x - max) / temperature);
            *w = if weight < floor { 0.0 } else { weight };
        }
        *block = block_sum(|at| ws[at], ws.len());
        total += *block;
    }
    total
}

/// Returns the sum of the weights that are at least `least`.
pub(super) fn sum_from(weights: &[f32], least: f32) -> f64 {
    weights.chunks(BLOCK).map(|ws| block_sum(|at| if ws[at] >= least { ws[at] } else { 0.0 }, ws.len())).sum()
}

/// Returns the same sum as [`weigh`], without storing the weights.
pub(super) fn weight_sum(row: &[f32], max: f32, temperature: f32) -> f64 {
    let mut weights = [0.0; BLOCK];
    let mut total = 0.0;
    for xs in row.chunks(BLOCK) {
        let ws = &mut weights[..xs.len()];
        total += weigh(xs, max, temperature, 0.0, ws, &mut [0.0]);
    }
    total
}

#[cfg(test)]
#[allow(clippy::cast_possible_truncation)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn exponential_is_close_to_the_exact_one_everywhere() {
        assert_eq!(exp_neg(0.0), 1.0);
        assert_eq!(exp_neg(-0.0), 1.0);
        for step in 0..=870_000u32 {
            let z = -(step as f32) * 1e-4;
            let exact = f64::from(z).exp();
            let error = (f64::from(exp_neg(z)) - exact).abs() / exact;
            // Two units in the last place of an f32.
            assert!(error < 2.4e-7, "exp({z}) is off by {error:e}");
        }
        for z in [-87.1, -1e4, f32::MIN, f32::NEG_INFINITY] {
            assert_eq!(exp_neg(z), 0.0);
        }
    }

    #[test]
    fn non_finite_entries_are_found_wherever_they_stand() {
        for at in [0, 1, 255, 256, 599] {
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut row = vec![1.0; 600];
                row[at] = bad;
                assert_eq!(first_non_finite(&row), Some(at as u32));
            }
        }
        assert_eq!(first_non_finite(&[f32::MAX, f32::MIN, 0.0, f32::MIN_POSITIVE / 2.0]), None);
    }

    #[test]
    fn a_masked_or_empty_row_has_no_argmax() {
        assert_eq!(top_logit(&[]), None);
        assert_eq!(top_logit(&[f32::NEG_INFINITY; 40]), None);
        assert_eq!(top_logit(&[-0.0, 0.0]), Some(TopLogit { value: 0.0, id: 0 }));
    }

    proptest! {
        #[test]
        fn argmax_is_the_first_largest(row in prop::collection::vec((-4i8..4).prop_map(f32::from), 1..100)) {
            let mut want = 0;
            for (id, &value) in row.iter().enumerate() {
                if value > row[want] {
                    want = id;
                }
            }
            prop_assert_eq!(top_logit(&row), Some(TopLogit { value: row[want], id: want as u32 }));
        }

        #[test]
        fn both_sums_are_equal_and_near_the_exact_one(
            row in prop::collection::vec(-30.0f32..30.0, 1..300), temperature in 0.01f32..2.0,
        ) {
            let max = top_logit(&row).expect("the row is not empty").value;
            let mut weights = vec![0.0; row.len()];
            let mut blocks = vec![0.0; row.len().div_ceil(BLOCK)];
            let total = weigh(&row, max, temperature, 0.0, &mut weights, &mut blocks);
            prop_assert_eq!(total, weight_sum(&row, max, temperature));
            let exact: f64 = row.iter().map(|&x| (f64::from(x - max) / f64::from(temperature)).exp()).sum();
            prop_assert!((total - exact).abs() < 1e-5 * exact, "{} against {}", total, exact);
        }
    }
}
