//! Log-probabilities for the results of a request.
//!
//! Values are natural logarithms of a softmax, summed in fixed order. A masked token has no log-probability and is left
//! out of every list. So no list contains an infinity or a NaN, and every JSON writer accepts it.

use super::{ranking, softmax};
use serde::{Deserialize, Serialize};

/// A token and its log-probability. Lists are sorted, highest log-probability first.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokenLogprob {
    /// The token id.
    pub token: u32,
    /// Natural logarithm of its probability; finite.
    pub logprob: f32,
}

/// Returns the log-probability and the rank of `token` (1 = highest), and appends the `top` highest tokens to `out`.
///
/// `row` has at least one entry that is not masked, and the entry of `token` is not masked.
pub(super) fn gather(
    row: &[f32],
    temperature: f32,
    token: u32,
    top: usize,
    keys: &mut Vec<u64>,
    out: &mut Vec<TokenLogprob>,
) -> (f32, u32) {
    let max = softmax::top_logit(row).map_or(0.0, |argmax| argmax.value);
    let log_total = softmax::weight_sum(row, max, temperature).ln();
    #[allow(clippy::cast_possible_truncation)] // the last step rounds
    let logprob = |id: u32| {
        let above = (f64::from(row[id as usize]) - f64::from(max)) / f64::from(temperature) - log_total;
        // The difference of two finite logits can exceed the range of f32.
        above.max(f64::from(f32::MIN)) as f32
    };
    ranking::top_tokens(row, top.min(row.len()), keys);
    out.extend(keys.iter().map(|&key| ranking::id(key)).map(|token| TokenLogprob { token, logprob: logprob(token) }));
    (logprob(token), rank(row, token))
}

/// Returns the rank: one more than the number of tokens with a larger logit, or with an equal logit and a lower id.
fn rank(row: &[f32], token: u32) -> u32 {
    let (before, rest) = row.split_at(token as usize);
    let mine = rest[0];
    let higher = before.iter().map(|&logit| u32::from(logit >= mine)).sum::<u32>()
        + rest.iter().map(|&logit| u32::from(logit > mine)).sum::<u32>();
    higher + 1
}

#[cfg(test)]
#[allow(clippy::cast_possible_truncation)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_widest_row_stays_finite() {
        let mut top = Vec::new();
        let (logprob, rank) = gather(&[f32::MAX, f32::MIN], 1e-5, 1, 2, &mut Vec::new(), &mut top);
        assert_eq!((logprob, rank), (f32::MIN, 2));
        assert_eq!(top[0], TokenLogprob { token: 0, logprob: 0.0 });
    }

    proptest! {
        #[test]
        fn values_and_ranks_are_those_of_a_sorted_f64_softmax(
            row in prop::collection::vec(
                prop_oneof![9 => (-60i8..60).prop_map(|v| f32::from(v) / 4.0), 1 => Just(f32::NEG_INFINITY)], 1..200),
            temperature in 0.05f32..2.0, top in 0usize..220,
        ) {
            let mut ids: Vec<u32> = (0..row.len() as u32).filter(|&i| row[i as usize] != f32::NEG_INFINITY).collect();
            prop_assume!(!ids.is_empty());
            ids.sort_by(|&a, &b| row[b as usize].total_cmp(&row[a as usize]).then(a.cmp(&b)));
            let z = |id: u32| f64::from(row[id as usize]) / f64::from(temperature);
            let max = z(ids[0]);
            let log_total = max + ids.iter().map(|&id| (z(id) - max).exp()).sum::<f64>().ln();
            for (at, &token) in ids.iter().enumerate() {
                let mut list = Vec::new();
                let (logprob, rank) = gather(&row, temperature, token, top, &mut Vec::new(), &mut list);
                prop_assert_eq!(rank as usize, at + 1);
                let want = z(token) - log_total;
                prop_assert!((f64::from(logprob) - want).abs() < 1e-5 * want.abs().max(1.0));
                prop_assert_eq!(list.iter().map(|e| e.token).collect::<Vec<_>>(), &ids[..top.min(ids.len())]);
                if let Some(mine) = list.get(at) {
                    prop_assert_eq!(mine.logprob, logprob);
                }
            }
        }
    }
}
