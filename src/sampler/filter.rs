//! Filters and sampling: temperature, `min_p`, `top_k`, `top_p`, then the choice of a token.
//!
//! Every filter keeps the argmax. Equal logits are ordered by id, lowest first. If `top_k` is on, only the tokens that
//! it keeps are weighed. If only `top_p` is on, a search that halves the candidate range finds the last kept token,
//! among the tokens whose weights are large enough to matter. No path sorts the whole vocabulary.
//!
//! Sampling walks the kept tokens in id order, so a filter that is off samples the same token as a filter that removes
//! no token. Buffers keep their capacity between rows.

use super::softmax::{self, BLOCK, TopLogit};
use super::{SamplingParams, ranking};

/// Tokens that the last call of [`Filter::narrow`] kept, and the place where the filter stores them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Kept {
    /// All tokens with a weight above 0 in `weights`.
    Weights {
        /// Sum of the weights.
        total: f64,
    },
    /// The tokens in `picks`.
    Picks {
        /// Sum of their weights.
        total: f64,
    },
}

/// Scratch memory of the filters, of the vocabulary's size.
#[derive(Debug)]
pub(super) struct Filter {
    weights: Vec<f32>,
    blocks: Vec<f64>,
    /// Ids and weights of kept tokens, in id order.
    picks: Vec<(u32, f32)>,
    /// Scratch memory for sort keys; see [`ranking`].
    pub(super) keys: Vec<u64>,
}

impl Filter {
    pub(super) fn new(vocab_size: usize) -> Self {
        Self {
            weights: vec![0.0; vocab_size],
            blocks: vec![0.0; vocab_size.div_ceil(BLOCK)],
            picks: Vec::with_capacity(vocab_size),
            keys: Vec::with_capacity(vocab_size),
        }
    }

    /// Computes the weights of a row and filters it.
    pub(super) fn narrow(&mut self, row: &[f32], argmax: TopLogit, params: &SamplingParams) -> Kept {
        let top_k = usize::try_from(params.top_k).unwrap_or(0);
        let temperature = params.temperature;
        self.picks.clear();
        if top_k > 0 && top_k < row.len() {
            ranking::top_tokens(row, top_k, &mut self.keys);
            for &key in &self.keys {
                let id = ranking::id(key);
                let weight = softmax::exp_neg((row[id as usize] - argmax.value) / temperature);
                if weight < params.min_p {
                    break;
                }
                self.picks.push((id, weight));
            }
            if params.top_p < 1.0 {
                let goal = f64::from(params.top_p) * sum(&self.picks);
                let mut before = 0.0;
                let stays = |&&(_, weight): &&(u32, f32)| {
                    let stays = before < goal;
                    before += f64::from(weight);
                    stays
                };
                let kept = self.picks.iter().take_while(stays).count();
                self.picks.truncate(kept);
            }
            self.picks.sort_unstable_by_key(|&(id, _)| id);
        } else {
            let Self { weights, blocks, .. } = self;
            let total = softmax::weigh(row, argmax.value, temperature, params.min_p, weights, blocks);
            if params.top_p >= 1.0 {
                return Kept::Weights { total };
            }
            self.nucleus(row, f64::from(params.top_p), total);
        }
        Kept::Picks { total: sum(&self.picks) }
    }

    /// Keeps the tokens of largest weight until their sum reaches `top_p` of the total.
    fn nucleus(&mut self, row: &[f32], top_p: f64, total: f64) {
        let goal = top_p * total;
        let lightest = lightest(&self.weights, top_p, total);
        self.keys.clear();
        for (id, (&logit, &weight)) in row.iter().zip(&self.weights).enumerate() {
            if weight >= lightest {
                self.keys.push(ranking::key(logit, ranking::token(id)));
            }
        }
        let last = last_kept(&mut self.keys, &self.weights, goal);
        for (id, (&logit, &weight)) in row.iter().zip(&self.weights).enumerate() {
            let id = ranking::token(id);
            if weight >= lightest && ranking::key(logit, id) >= last {
                self.picks.push((id, weight));
            }
        }
    }

    /// Samples a kept token: the one at position `uniform` (in `0.0..1.0`) of the kept weights, laid end to end in id
    /// order.
    pub(super) fn sample(&self, kept: Kept, uniform: f64) -> u32 {
        match kept {
            Kept::Picks { total } => walk(self.picks.iter().copied(), uniform * total),
            Kept::Weights { total } => {
                let mut left = uniform * total;
                // Rounding may move a position near 1 past the end: the last block with a weight above 0 receives it.
                let (mut at, mut found) = (0, false);
                for (block, &sum) in self.blocks.iter().enumerate() {
                    if sum > 0.0 {
                        at = block;
                    }
                    if left < sum {
                        found = true;
                        break;
                    }
                    left -= sum;
                }
                let left = if found { left } else { f64::INFINITY };
                let start = at * BLOCK;
                let end = self.weights.len().min(start + BLOCK);
                walk((ranking::token(start)..).zip(self.weights[start..end].iter().copied()), left)
            }
        }
    }

    /// Masks the tokens that were not kept, for log-probabilities of the distribution that was sampled.
    pub(super) fn mask_rest(&self, kept: Kept, params: &SamplingParams, row: &mut [f32]) {
        match kept {
            // Without min_p, a weight of 0 means a token too unlikely for an f32, not a removed token.
            Kept::Weights { .. } if params.min_p == 0.0 => {}
            Kept::Weights { .. } => {
                for (logit, &weight) in row.iter_mut().zip(&self.weights) {
                    if weight == 0.0 {
                        *logit = f32::NEG_INFINITY;
                    }
                }
            }
            Kept::Picks { .. } => {
                let mut next = 0;
                for &(id, _) in &self.picks {
                    row[next..id as usize].fill(f32::NEG_INFINITY);
                    next = id as usize + 1;
                }
                row[next..].fill(f32::NEG_INFINITY);
            }
        }
    }
}

/// Returns a weight above 0 that is a lower bound for the tokens of the nucleus (the tokens kept by `top_p`).
///
/// The search steps down from the largest weight by factors of 16. The tokens above the first sufficient bound are few,
/// and each try is one pass of vector code. If no step suffices, the tokens below the fallback bound sum to at most
/// half of the weight that may be left out.
#[allow(clippy::cast_possible_truncation)] // f32 is what weights are compared with
fn lightest(weights: &[f32], top_p: f64, total: f64) -> f32 {
    /// Sums are f32 within a block; this margin is much larger than their error.
    const MARGIN: f64 = 1.0 + 1e-5;
    let resort = (0.5 * (1.0 - top_p) * total / weights.len() as f64) as f32;
    let mut step = 1.0f32 / 16.0;
    while step > resort {
        if softmax::sum_from(weights, step) > top_p * total * MARGIN {
            return step;
        }
        step /= 16.0;
    }
    resort
}

/// Returns the key of the token at which the weights, summed in descending order, reach `goal`; that of the last token
/// if they never do.
///
/// The search halves the range that contains the token, so that only the final part is sorted.
fn last_kept(keys: &mut [u64], weights: &[f32], goal: f64) -> u64 {
    let weight = |key: u64| f64::from(weights[ranking::id(key) as usize]);
    let (mut range, mut before) = (keys, 0.0);
    while range.len() > 64 {
        let middle = range.len() / 2;
        range.select_nth_unstable_by(middle, |a, b| b.cmp(a));
        let (upper, lower) = range.split_at_mut(middle);
        let through = before + upper.iter().copied().map(weight).sum::<f64>();
        if through >= goal {
            range = upper;
        } else {
            before = through;
            range = lower;
        }
    }
    ranking::lead(range, range.len());
    let mut last = 0;
    for &key in range.iter() {
        last = key;
        before += weight(key);
        if before >= goal {
            break;
        }
    }
    last
}

fn sum(picks: &[(u32, f32)]) -> f64 {
    picks.iter().map(|&(_, weight)| f64::from(weight)).sum()
}

/// Returns the id whose weight covers the distance `left`; the last id with a weight above 0 if `left` is past the end.
fn walk(weights: impl Iterator<Item = (u32, f32)>, mut left: f64) -> u32 {
    let mut last = 0;
    for (id, weight) in weights {
        let weight = f64::from(weight);
        if weight > 0.0 {
            last = id;
        }
        if left < weight {
            break;
        }
        left -= weight;
    }
    last
}

#[cfg(test)]
#[allow(clippy::cast_possible_truncation)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    impl Filter {
        /// Returns the kept tokens with their probabilities, in id order.
        fn kept(&self, kept: Kept) -> Vec<(u32, f64)> {
            let (list, total): (Vec<(u32, f32)>, f64) = match kept {
                Kept::Picks { total } => (self.picks.clone(), total),
                Kept::Weights { total } => ((0..).zip(self.weights.iter().copied()).collect(), total),
            };
            list.iter().filter(|e| e.1 > 0.0).map(|&(id, w)| (id, f64::from(w) / total)).collect()
        }
    }

    /// Reference implementation: f64, one full sort, one filter after the other. `None` if a token is so close to a
    /// limit that rounding decides.
    fn plain(row: &[f32], params: &SamplingParams) -> Option<Vec<(u32, f64)>> {
        const NEAR: f64 = 1e-5;
        let mut list: Vec<(u32, f64)> =
            (0..).zip(row).filter(|e| *e.1 != f32::NEG_INFINITY).map(|(id, &x)| (id, f64::from(x))).collect();
        list.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        let max = list[0].1;
        for entry in &mut list {
            entry.1 = ((entry.1 - max) / f64::from(params.temperature)).exp();
        }
        let min_p = f64::from(params.min_p);
        if list.iter().any(|e| e.1 < 1.0 && (e.1 - min_p).abs() < NEAR * min_p) {
            return None;
        }
        list.retain(|e| e.1 >= min_p);
        if params.top_k > 0 {
            list.truncate(params.top_k as usize);
        }
        let goal = f64::from(params.top_p) * list.iter().map(|e| e.1).sum::<f64>();
        let mut sum = 0.0;
        let mut kept = Vec::new();
        for entry in list {
            if sum >= goal && params.top_p < 1.0 {
                break;
            }
            sum += entry.1;
            if (sum - goal).abs() < NEAR * goal && params.top_p < 1.0 {
                return None;
            }
            kept.push(entry);
        }
        // The sampler's weights end at exp(-87).
        if kept.iter().any(|e| (-88.0..-86.0).contains(&e.1.ln())) {
            return None;
        }
        kept.retain(|e| e.1.ln() > -87.0);
        kept.sort_by_key(|e| e.0);
        Some(kept.iter().map(|e| (e.0, e.1 / sum)).collect())
    }

    fn logit() -> impl Strategy<Value = f32> {
        // A coarse grid makes ties common.
        prop_oneof![6 => (-40i8..40).prop_map(|v| f32::from(v) / 4.0), 3 => -10.0f32..10.0, 1 => Just(f32::NEG_INFINITY)]
    }

    fn params() -> impl Strategy<Value = SamplingParams> {
        let top_p = prop_oneof![1 => Just(1.0f32), 1 => 1e-6f32..0.2, 2 => 0.2f32..1.0, 1 => 0.99f32..1.0];
        let min_p = prop_oneof![2 => Just(0.0f32), 1 => 1e-4f32..1.0, 1 => Just(1.0)];
        (0.05f32..2.0, -1i32..350, top_p, min_p).prop_map(|(temperature, top_k, top_p, min_p)| SamplingParams {
            temperature,
            top_k,
            top_p,
            min_p,
            ..SamplingParams::default()
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn equals_the_reference(row in prop::collection::vec(logit(), 1..300), params in params(), u in 0.0f64..1.0) {
            let Some(argmax) = softmax::top_logit(&row) else { return Ok(()) };
            let Some(want) = plain(&row, &params) else { return Ok(()) };
            let mut filter = Filter::new(row.len());
            let capacity = (filter.picks.capacity(), filter.keys.capacity());
            let kept = filter.narrow(&row, argmax, &params);
            let got = filter.kept(kept);
            let ids = |list: &[(u32, f64)]| list.iter().map(|e| e.0).collect::<Vec<_>>();
            prop_assert_eq!(ids(&got), ids(&want));
            prop_assert!(got.iter().any(|e| e.0 == argmax.id), "the argmax was removed");
            for (got, want) in got.iter().zip(&want) {
                prop_assert!((got.1 - want.1).abs() < 1e-5, "token {}: {} against {}", got.0, got.1, want.1);
            }
            prop_assert_eq!(capacity, (filter.picks.capacity(), filter.keys.capacity()), "scratch grew");

            // The sampled token is the one at which the running sum passes u.
            let sampled = filter.sample(kept, u);
            let before: f64 = got.iter().take_while(|e| e.0 < sampled).map(|e| e.1).sum();
            let mine = got.iter().find(|e| e.0 == sampled);
            prop_assert!(mine.is_some(), "token {} was not kept", sampled);
            let mine = mine.expect("checked above").1;
            prop_assert!(before - 1e-6 <= u && u <= before + mine + 1e-6, "{u} in {before}+{mine}");

            // Log-probabilities use exactly the kept tokens.
            let mut seen = row.clone();
            filter.mask_rest(kept, &params, &mut seen);
            for (id, _) in &got {
                prop_assert_eq!(seen[*id as usize], row[*id as usize]);
            }
            let open = seen.iter().filter(|&&logit| logit != f32::NEG_INFINITY).count();
            prop_assert!(open >= got.len());
            if params.min_p > 0.0 {
                prop_assert_eq!(open, got.len());
            }
        }
    }

    #[test]
    fn the_nucleus_of_a_wide_flat_row_is_its_lowest_ids() {
        // 5,000 equal tokens: half of the sum is the 2,500 lowest ids.
        let row = vec![0.25; 5000];
        let argmax = softmax::top_logit(&row).expect("the row is not empty");
        let params = SamplingParams { top_p: 0.5, ..SamplingParams::default() };
        let mut filter = Filter::new(row.len());
        let kept = filter.narrow(&row, argmax, &params);
        assert_eq!(filter.kept(kept).iter().map(|e| e.0).collect::<Vec<_>>(), (0..2500).collect::<Vec<_>>());
    }

    #[test]
    fn a_sample_at_the_very_end_is_the_last_token_with_a_weight() {
        let mut row = vec![f32::NEG_INFINITY; 300];
        row[3] = 0.0;
        row[140] = 0.0;
        row[150] = -1.0;
        let argmax = softmax::top_logit(&row).expect("the row is not masked");
        let mut filter = Filter::new(row.len());
        for top_p in [1.0, 0.9999] {
            let kept = filter.narrow(&row, argmax, &SamplingParams { top_p, ..SamplingParams::default() });
            for end in [1.0, 2.0] {
                assert_eq!(filter.sample(kept, end), 150);
            }
            assert_eq!(filter.sample(kept, 0.0), 3);
        }
    }
}
