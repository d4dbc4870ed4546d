//! Edits of a row of logits that depend on ids and history: allowed ids, bad words, `min_tokens`, bias, penalties.
//!
//! The edits are applied in this order, before the temperature. Masked entries become `-inf` and keep this value in
//! every later edit. All other entries stay finite, however large a penalty is. Ids of the history that are outside the
//! vocabulary are ignored. The counting tables have the vocabulary's size, and each call leaves them zeroed, so the
//! history of one row never affects another row.

use super::{SampleRow, SamplingParams};

const MASKED: f32 = f32::NEG_INFINITY;

/// Tables that count a history without sorting or allocating.
#[derive(Debug)]
pub(super) struct Penalties {
    /// Number of occurrences of each id in the output; all zero between calls.
    counts: Vec<u32>,
    /// Whether an id occurs in the prompt or the output; all false between calls.
    seen: Vec<bool>,
}

impl Penalties {
    pub(super) fn new(vocab_size: usize) -> Self {
        Self { counts: vec![0; vocab_size], seen: vec![false; vocab_size] }
    }

    /// Returns whether [`apply`](Self::apply) would change the row.
    pub(super) fn is_needed(row: &SampleRow<'_>) -> bool {
        let p = row.params;
        p.allowed_token_ids.is_some()
            || !row.bad_words.is_empty()
            || held_back(row).next().is_some()
            || !p.logit_bias.is_empty()
            || p.repetition_penalty != 1.0
            || p.presence_penalty != 0.0
            || p.frequency_penalty != 0.0
    }

    /// Returns whether no row of such a request is ever edited, for any output.
    pub(super) fn never_needed(p: &SamplingParams, eos_ids: &[u32], bad_words: &[Vec<u32>]) -> bool {
        let holds_back = p.min_tokens > 0 && !(eos_ids.is_empty() && p.stop_token_ids.is_empty());
        p.allowed_token_ids.is_none()
            && bad_words.is_empty()
            && !holds_back
            && p.logit_bias.is_empty()
            && p.repetition_penalty == 1.0
            && p.presence_penalty == 0.0
            && p.frequency_penalty == 0.0
    }

    /// Writes the edited row to `to`.
    pub(super) fn apply(&mut self, row: &SampleRow<'_>, raw: &[f32], to: &mut [f32]) {
        match &row.params.allowed_token_ids {
            None => to.copy_from_slice(raw),
            Some(allowed) => {
                to.fill(MASKED);
                for &id in allowed {
                    if let (Some(to), Some(&logit)) = (to.get_mut(id as usize), raw.get(id as usize)) {
                        *to = logit;
                    }
                }
            }
        }
        for word in row.bad_words {
            if let Some((&last, before)) = word.split_last()
                && row.output.ends_with(before)
            {
                mask(to, last);
            }
        }
        for id in held_back(row) {
            mask(to, id);
        }
        for &(id, bias) in &row.params.logit_bias {
            edit(to, id, |logit| logit + bias);
        }
        self.repetition(row, to);
        self.presence_and_frequency(row, to);
    }

    fn repetition(&mut self, row: &SampleRow<'_>, to: &mut [f32]) {
        let penalty = row.params.repetition_penalty;
        if penalty == 1.0 {
            return;
        }
        for &id in row.prompt.iter().chain(row.output) {
            if let Some(seen) = self.seen.get_mut(id as usize)
                && !std::mem::replace(seen, true)
            {
                edit(to, id, |logit| if logit > 0.0 { logit / penalty } else { logit * penalty });
            }
        }
        for &id in row.prompt.iter().chain(row.output) {
            if let Some(seen) = self.seen.get_mut(id as usize) {
                *seen = false;
            }
        }
    }

    fn presence_and_frequency(&mut self, row: &SampleRow<'_>, to: &mut [f32]) {
        let (presence, frequency) = (row.params.presence_penalty, row.params.frequency_penalty);
        if presence == 0.0 && frequency == 0.0 {
            return;
        }
        for &id in row.output {
            if let Some(count) = self.counts.get_mut(id as usize) {
                *count += 1;
            }
        }
        for &id in row.output {
            if let Some(count) = self.counts.get_mut(id as usize)
                && *count > 0
            {
                let times = std::mem::take(count) as f32;
                edit(to, id, |logit| logit - frequency * times - presence);
            }
        }
    }

    /// Checks that every table is zeroed.
    #[cfg(test)]
    fn check(&self) -> Result<(), String> {
        let clean = self.counts.iter().all(|&n| n == 0) && self.seen.iter().all(|&seen| !seen);
        if clean { Ok(()) } else { Err("the tables still contain a row's history".into()) }
    }
}

/// Returns the ids that are masked until the output has `min_tokens` tokens: end-of-sequence ids and `stop_token_ids`.
fn held_back<'a>(row: &SampleRow<'a>) -> impl Iterator<Item = u32> + 'a {
    let early = row.output.len() < row.params.min_tokens as usize;
    let ids: [&[u32]; 2] = if early { [row.eos_ids, &row.params.stop_token_ids] } else { [&[], &[]] };
    ids.into_iter().flatten().copied()
}

fn mask(to: &mut [f32], id: u32) {
    if let Some(logit) = to.get_mut(id as usize) {
        *logit = MASKED;
    }
}

/// Changes an entry that is not masked and clamps it to finite values.
fn edit(to: &mut [f32], id: u32, change: impl FnOnce(f32) -> f32) {
    if let Some(logit) = to.get_mut(id as usize)
        && *logit != MASKED
    {
        *logit = change(*logit).clamp(f32::MIN, f32::MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampler::SamplingParams;
    use proptest::prelude::*;

    fn row<'a>(params: &'a SamplingParams, prompt: &'a [u32], output: &'a [u32]) -> SampleRow<'a> {
        SampleRow { row: 0, params, prompt, output, eos_ids: &[], bad_words: &[], seed: 0, choice: 0 }
    }

    fn edited(row: &SampleRow<'_>, raw: &[f32]) -> Vec<f32> {
        let mut penalties = Penalties::new(raw.len());
        let mut to = vec![0.0; raw.len()];
        penalties.apply(row, raw, &mut to);
        penalties.check().expect("clean tables");
        to
    }

    #[test]
    fn a_bad_word_is_stopped_at_its_last_token_only() {
        let params = SamplingParams::default();
        let words = [vec![3], vec![1, 2], vec![1, 2, 4], vec![], vec![9]];
        let cases: [(&[u32], &[usize]); 4] = [(&[], &[3]), (&[1], &[2, 3]), (&[0, 1, 2], &[3, 4]), (&[2, 1, 0], &[3])];
        for (output, masked) in cases {
            // The prompt ends with the first tokens of a bad word: only tokens of the output count.
            let row = SampleRow { bad_words: &words, ..row(&params, &[0, 1], output) };
            assert!(Penalties::is_needed(&row));
            let to = edited(&row, &[1.0; 5]);
            let found: Vec<usize> = (0..5).filter(|&id| to[id] == MASKED).collect();
            assert_eq!(found, masked, "after {output:?}");
        }
    }

    #[test]
    fn a_mask_holds_against_every_later_edit() {
        let params = SamplingParams {
            allowed_token_ids: Some(vec![1]),
            logit_bias: vec![(0, 100.0)],
            repetition_penalty: 0.5,
            presence_penalty: -2.0,
            frequency_penalty: -2.0,
            ..SamplingParams::default()
        };
        assert_eq!(edited(&row(&params, &[0], &[0, 0]), &[5.0, 1.0]), [MASKED, 1.0]);
    }

    #[test]
    fn extreme_penalties_keep_logits_finite() {
        for penalty in [f32::MIN_POSITIVE, f32::MAX] {
            let params = SamplingParams { repetition_penalty: penalty, ..SamplingParams::default() };
            let to = edited(&row(&params, &[0, 1], &[]), &[f32::MAX, f32::MIN]);
            assert!(to.iter().all(|logit| logit.is_finite()), "{to:?}");
        }
    }

    #[test]
    fn a_default_request_needs_no_edit() {
        let params = SamplingParams { min_tokens: 2, ..SamplingParams::default() };
        let eos = SampleRow { eos_ids: &[1], ..row(&params, &[], &[0]) };
        assert!(Penalties::is_needed(&eos));
        assert!(!Penalties::is_needed(&SampleRow { output: &[0, 0], ..eos }));
        assert!(!Penalties::is_needed(&row(&SamplingParams::default(), &[1, 1], &[1])));
    }

    proptest! {
        /// Reference implementation: counts by searching the history for each id.
        #[test]
        fn penalties_equal_counting_by_hand(
            raw in prop::collection::vec(-8.0f32..8.0, 12),
            prompt in prop::collection::vec(0u32..14, 0..20),
            output in prop::collection::vec(0u32..14, 0..20),
            repetition in 0.25f32..4.0, presence in -2.0f32..2.0, frequency in -2.0f32..2.0,
        ) {
            let params = SamplingParams {
                repetition_penalty: repetition, presence_penalty: presence, frequency_penalty: frequency,
                ..SamplingParams::default()
            };
            let to = edited(&row(&params, &prompt, &output), &raw);
            for id in 0..12u32 {
                let times = output.iter().filter(|&&o| o == id).count();
                let mut want = raw[id as usize];
                if times > 0 || prompt.contains(&id) {
                    want = if want > 0.0 { want / repetition } else { want * repetition };
                }
                if times > 0 {
                    want = want - frequency * times as f32 - presence;
                }
                prop_assert_eq!(to[id as usize], want);
            }
        }
    }
}
