//! Ranking of tokens: larger logit first, then lower id; selection of the top tokens without a full sort.
//!
//! A token is packed into one integer that sorts like (logit, −id). So comparisons are integer operations, and ties are
//! always resolved.

/// Packs a token into its sort key; a larger key ranks higher. Both zeros are equal.
pub(super) fn key(logit: f32, id: u32) -> u64 {
    // Adding 0 turns -0.0 into 0.0. Then the usual map to sortable integers: flip all bits of negative numbers, and the
    // sign bit of the others.
    let bits = (logit + 0.0).to_bits();
    let rising = if bits >> 31 == 1 { !bits } else { bits | 1 << 31 };
    u64::from(rising) << 32 | u64::from(!id)
}

/// Returns the token id of an index into a row.
#[allow(clippy::cast_possible_truncation)] // token ids and vocabulary sizes are u32
pub(super) fn token(at: usize) -> u32 {
    at as u32
}

/// Returns the token id of a key.
#[allow(clippy::cast_possible_truncation)] // the low half is the id
pub(super) fn id(key: u64) -> u32 {
    !(key as u32)
}

/// Moves the `count` largest keys to the front, in descending order.
pub(super) fn lead(keys: &mut [u64], count: usize) {
    if count > 0 && count < keys.len() {
        keys.select_nth_unstable_by(count - 1, |a, b| b.cmp(a));
    }
    let count = count.min(keys.len());
    keys[..count].sort_unstable_by(|a, b| b.cmp(a));
}

/// Fills `keys` with the keys of the `count` tokens of largest logit, in descending order, without masked ones
/// (`-inf`).
///
/// One pass with a rising threshold: one comparison rejects most tokens. `keys` never contains more entries than the
/// larger of twice `count` and 64, nor more than the row.
pub(super) fn top_tokens(row: &[f32], count: usize, keys: &mut Vec<u64>) {
    /// Number of tokens per run; a run without a candidate costs one vector comparison.
    const RUN: usize = 32;
    keys.clear();
    if count == 0 {
        return;
    }
    let capacity = count.saturating_mul(2).max(64).min(row.len());
    // Of equal logits the earlier ranks higher, so a token must exceed the threshold, not equal it.
    let mut threshold = f32::NEG_INFINITY;
    for (run, logits) in row.chunks(RUN).enumerate() {
        if logits.iter().map(|&logit| u32::from(logit > threshold)).sum::<u32>() == 0 {
            continue;
        }
        for (at, &logit) in logits.iter().enumerate() {
            if logit > threshold {
                if keys.len() == capacity {
                    keys.select_nth_unstable_by(count - 1, |a, b| b.cmp(a));
                    threshold = row[id(keys[count - 1]) as usize];
                    keys.truncate(count);
                    if logit <= threshold {
                        continue;
                    }
                }
                keys.push(key(logit, token(run * RUN + at)));
            }
        }
    }
    lead(keys, count);
    keys.truncate(count);
}

#[cfg(test)]
#[allow(clippy::cast_possible_truncation)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn keys_sort_like_logits_then_ids() {
        let rising = [f32::MIN, -1.5, -1e-40, 0.0, 1e-40, 1.5, f32::MAX];
        for pair in rising.windows(2) {
            assert!(key(pair[0], 0) < key(pair[1], u32::MAX));
        }
        assert!(key(1.0, 3) > key(1.0, 4));
        assert_eq!(key(-0.0, 7), key(0.0, 7));
        assert_eq!(id(key(-3.0, 123_456)), 123_456);
    }

    proptest! {
        #[test]
        fn the_first_few_are_those_of_a_full_sort(
            row in prop::collection::vec(
                prop_oneof![8 => (-40i8..40).prop_map(f32::from), 1 => Just(f32::NEG_INFINITY)], 1..400),
            count in 0usize..420,
        ) {
            let mut all: Vec<u32> = (0..row.len() as u32).filter(|&i| row[i as usize] != f32::NEG_INFINITY).collect();
            all.sort_by(|&a, &b| row[b as usize].total_cmp(&row[a as usize]).then(a.cmp(&b)));
            all.truncate(count);
            let mut keys = Vec::with_capacity(row.len());
            let capacity = keys.capacity();
            top_tokens(&row, count, &mut keys);
            prop_assert_eq!(keys.iter().map(|&k| id(k)).collect::<Vec<_>>(), all);
            prop_assert_eq!(keys.capacity(), capacity, "grew");
        }
    }
}
