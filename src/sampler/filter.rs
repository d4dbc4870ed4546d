//! Which tokens stay, and which of them is drawn: temperature, `min_p`, `top_k`, `top_p`, draw.
//!
//! The best token always stays. Equal logits are ordered by id, lowest first. With `top_k` only the tokens it keeps are
//! weighed; with `top_p` alone the last token kept is found by halving the range it can be in, among tokens heavy enough
//! to matter. No path sorts the vocabulary. Draws walk the kept tokens in id order, so a filter that is off draws as one
//! that drops nothing. Lists keep their room between rows.

use super::softmax::{self, BLOCK, TopLogit};
use super::{SamplingParams, ranking};

/// Tokens that were kept, as the last call of [`Filter::narrow`] left them in the filter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Kept {
    /// All with a weight above 0 in the table of weights.
    Weights {
        /// Sum of the weights.
        total: f64,
    },
    /// Those in the list of picks.
    Picks {
        /// Sum of their weights.
        total: f64,
    },
}

/// Scratch of the filters, of the vocabulary's size.
#[derive(Debug)]
pub(super) struct Filter {
    weights: Vec<f32>,
    blocks: Vec<f64>,
    /// Ids and weights of kept tokens, in id order.
    picks: Vec<(u32, f32)>,
    /// Room for ordering ids; see [`ranking`].
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

    /// Weighs and filters a row whose best entry is `best`.
    pub(super) fn narrow(&mut self, row: &[f32], best: TopLogit, params: &SamplingParams) -> Kept {
        let top_k = usize::try_from(params.top_k).unwrap_or(0);
        let temperature = params.temperature;
        self.picks.clear();
        if top_k > 0 && top_k < row.len() {
            ranking::best_first(row, top_k, &mut self.keys);
            for &key in &self.keys {
                let id = ranking::id(key);
                let weight = softmax::exp_neg((row[id as usize] - best.value) / temperature);
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
            let total = softmax::weigh(row, best.value, temperature, params.min_p, weights, blocks);
            if params.top_p >= 1.0 {
                return Kept::Weights { total };
            }
            self.nucleus(row, f64::from(params.top_p), total);
        }
        Kept::Picks { total: sum(&self.picks) }
    }

    /// Picks the best tokens until their weights reach `top_p` of the total.
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

    /// The token at `uniform` (in `0.0..1.0`) of the kept weights, laid end to end in id order.
    pub(super) fn draw(&self, kept: Kept, uniform: f64) -> u32 {
        match kept {
            Kept::Picks { total } => walk(self.picks.iter().copied(), uniform * total),
            Kept::Weights { total } => {
                let mut left = uniform * total;
                // Rounding may carry the last draws past the end: the last block of any weight takes them.
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

    /// Masks what was not kept, for log-probabilities of the distribution drawn from.
    pub(super) fn mask_rest(&self, kept: Kept, params: &SamplingParams, row: &mut [f32]) {
        match kept {
            // Without min_p a weight of 0 is a token too unlikely for an f32, not one left out.
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

/// A weight, above 0, that no token of the nucleus is below.
///
/// Steps of 16 down from the best: tokens above the first that holds enough are few, and each try is one pass of vector
/// code. Where none does, tokens below the last resort sum to at most half of what may be left out.
#[allow(clippy::cast_possible_truncation)] // f32 is what weights are compared with
fn lightest(weights: &[f32], top_p: f64, total: f64) -> f32 {
    /// Sums are f32 within a block; this is far more than their error.
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

/// The key of the token at which weights, summed from the best, reach `goal`; of the worst token if they never do.
///
/// Halves the range that holds it, so that nothing but its last part is sorted.
fn last_kept(keys: &mut [u64], weights: &[f32], goal: f64) -> u64 {
    let weight = |key: u64| f64::from(weights[ranking::id(key) as usize]);
    let (mut range, mut before) = (keys, 0.0);
    while range.len() > 64 {
        let middle = range.len() / 2;
        range.select_nth_unstable_by(middle, |a, b| b.cmp(a));
        let (better, worse) = range.split_at_mut(middle);
        let through = before + better.iter().copied().map(weight).sum::<f64>();
        if through >= goal {
            range = better;
        } else {
            before = through;
            range = worse;
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

/// The id whose weight covers the distance `left`; the last one of any weight if that lies past the end.
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
        /// Kept tokens with their probabilities, in id order.
        fn kept(&self, kept: Kept) -> Vec<(u32, f64)> {
            let (list, total): (Vec<(u32, f32)>, f64) = match kept {
                Kept::Picks { total } => (self.picks.clone(), total),
                Kept::Weights { total } => ((0..).zip(self.weights.iter().copied()).collect(), total),
            };
            list.iter().filter(|e| e.1 > 0.0).map(|&(id, w)| (id, f64::from(w) / total)).collect()
        }
    }

    /// The plain twin: f64, one full sort, one rule after the other. `None` where a token stands so near a limit that
    /// rounding decides.
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
        // A weight of the sampler ends at exp(-87).
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
        fn equals_the_plain_twin(row in prop::collection::vec(logit(), 1..300), params in params(), u in 0.0f64..1.0) {
            let Some(best) = softmax::top_logit(&row) else { return Ok(()) };
            let Some(want) = plain(&row, &params) else { return Ok(()) };
            let mut filter = Filter::new(row.len());
            let capacity = (filter.picks.capacity(), filter.keys.capacity());
            let kept = filter.narrow(&row, best, &params);
            let got = filter.kept(kept);
            let ids = |list: &[(u32, f64)]| list.iter().map(|e| e.0).collect::<Vec<_>>();
            prop_assert_eq!(ids(&got), ids(&want));
            prop_assert!(got.iter().any(|e| e.0 == best.id), "the best token went");
            for (got, want) in got.iter().zip(&want) {
                prop_assert!((got.1 - want.1).abs() < 1e-5, "token {}: {} against {}", got.0, got.1, want.1);
            }
            prop_assert_eq!(capacity, (filter.picks.capacity(), filter.keys.capacity()), "scratch grew");

            // The draw is the token at which the running sum passes u.
            let drawn = filter.draw(kept, u);
            let before: f64 = got.iter().take_while(|e| e.0 < drawn).map(|e| e.1).sum();
            let mine = got.iter().find(|e| e.0 == drawn);
            prop_assert!(mine.is_some(), "{} was not kept", drawn);
            let mine = mine.expect("checked").1;
            prop_assert!(before - 1e-6 <= u && u <= before + mine + 1e-6, "{u} in {before}+{mine}");

            // What log-probabilities see is what was kept.
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
        let best = softmax::top_logit(&row).expect("not empty");
        let params = SamplingParams { top_p: 0.5, ..SamplingParams::default() };
        let mut filter = Filter::new(row.len());
        let kept = filter.narrow(&row, best, &params);
        assert_eq!(filter.kept(kept).iter().map(|e| e.0).collect::<Vec<_>>(), (0..2500).collect::<Vec<_>>());
    }

    #[test]
    fn a_draw_at_the_very_end_is_the_last_token_of_any_weight() {
        let mut row = vec![f32::NEG_INFINITY; 300];
        row[3] = 0.0;
        row[140] = 0.0;
        row[150] = -1.0;
        let best = softmax::top_logit(&row).expect("not masked");
        let mut filter = Filter::new(row.len());
        for top_p in [1.0, 0.9999] {
            let kept = filter.narrow(&row, best, &SamplingParams { top_p, ..SamplingParams::default() });
            for end in [1.0, 2.0] {
                assert_eq!(filter.draw(kept, end), 150);
            }
            assert_eq!(filter.draw(kept, 0.0), 3);
        }
    }
}
