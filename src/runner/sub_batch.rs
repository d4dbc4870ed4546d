//! Parts of a batch that run in another program than the rest.

use super::ForwardInput;
use crate::num::to_u32;

/// Some rows of a batch as a batch of their own, and where they stand in the whole one.
#[derive(Debug, Default)]
pub(crate) struct SubBatch {
    pub input: ForwardInput,
    /// The row of the whole batch behind each row.
    pub rows: Vec<usize>,
    /// The row of the whole batch's logits behind each row of logits.
    pub logit_rows: Vec<usize>,
}

/// Where a row of the whole batch stands in a part: `places` are the part's, ascending.
pub(crate) fn local_row(places: &[usize], whole: u32) -> Option<u32> {
    places.binary_search(&(whole as usize)).ok().and_then(|index| u32::try_from(index).ok())
}

impl SubBatch {
    /// Takes the sequences for which `from` gives a number, without that many of their first rows. `from` is asked once for
    /// each sequence in order. Which rows are fed stays with the whole.
    pub fn select(&mut self, whole: &ForwardInput, block_size: usize, mut from: impl FnMut(usize) -> Option<u32>) {
        self.input.clear();
        self.rows.clear();
        self.logit_rows.clear();
        let (mut first_row, mut first_block, mut logit_row) = (0, 0, 0);
        for (index, (&rows, &kv_len)) in whole.q_lens.iter().zip(&whole.kv_lens).enumerate() {
            let end = first_row + rows as usize;
            let blocks = (kv_len as usize).div_ceil(block_size);
            let logit_end = whole.logit_rows.partition_point(|&row| (row as usize) < end);
            if let Some(skipped) = from(index) {
                let taken = first_row + skipped as usize..end;
                let before = self.rows.len();
                self.input.tokens.extend_from_slice(&whole.tokens[taken.clone()]);
                self.input.q_lens.push(rows - skipped);
                self.input.kv_lens.push(kv_len);
                self.input.tables.extend_from_slice(&whole.tables[first_block..first_block + blocks]);
                for wanted in logit_row..logit_end {
                    let row = whole.logit_rows[wanted] as usize;
                    if row >= taken.start {
                        let here = before + row - taken.start;
                        self.input.logit_rows.push(to_u32(here));
                        self.logit_rows.push(wanted);
                    }
                }
                self.rows.extend(taken);
            }
            first_row = end;
            first_block += blocks;
            logit_row = logit_end;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv_cache::BlockId;

    #[test]
    fn sub_batch_rows_map_back_to_the_batch() {
        let whole = ForwardInput {
            tokens: vec![10, 11, 12, 20, 30, 31],
            q_lens: vec![3, 1, 2],
            kv_lens: vec![3, 40, 18],
            tables: [7, 1, 4, 9, 2, 3].map(BlockId).to_vec(),
            logit_rows: vec![0, 2, 3, 5],
            ..ForwardInput::default()
        };
        let mut part = SubBatch::default();
        part.select(&whole, 16, |index| [Some(1), None, Some(0)][index]);
        assert_eq!(part.input.tokens, [11, 12, 30, 31]);
        assert_eq!(
            (part.input.q_lens.as_slice(), part.input.kv_lens.as_slice()),
            ([2, 2].as_slice(), [3, 18].as_slice())
        );
        assert_eq!(part.input.tables, [7, 2, 3].map(BlockId));
        assert_eq!(
            (part.input.logit_rows.as_slice(), part.logit_rows.as_slice()),
            ([1, 3].as_slice(), [1, 3].as_slice())
        );
        assert_eq!(part.rows, [1, 2, 4, 5]);
        part.select(&whole, 16, |_| Some(0));
        assert_eq!((&part.input.tokens, &part.input.tables), (&whole.tokens, &whole.tables));
        assert_eq!(part.input.logit_rows, whole.logit_rows);
        part.select(&whole, 16, |_| None);
        assert!(part.input.tokens.is_empty() && part.rows.is_empty() && part.logit_rows.is_empty());
    }
}
