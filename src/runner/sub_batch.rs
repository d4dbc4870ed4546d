//! Sub-batch: the rows of a batch that one launch computes, which are all rows or those of some sequences.

use std::ops::Range;

use super::ForwardInput;
use crate::num::to_u32;

/// Sequences of a batch that one launch computes.
///
/// Maps the local rows of the launch to the rows of the batch.
///
/// ```text
/// batch rows    0 1 2 | 3 | 4 5        sequences 0, 1, 2
/// sub-batch     . 1 2 | . | 4 5        sequence 0 without its first row, and sequence 2
/// rows          [ 1, 2, 4, 5 ]         local row 2 is batch row 4
/// ```
#[derive(Debug, Default)]
pub(crate) struct SubBatch {
    /// Index of each sequence in the batch, and the number of its first rows that are skipped.
    pub sequences: Vec<(usize, u32)>,
    /// Batch row of each local row, ascending.
    pub rows: Vec<usize>,
    /// Index in the batch's `logit_rows` of each local logit row, ascending.
    pub logit_rows: Vec<usize>,
}

impl SubBatch {
    pub fn with_capacity(tokens: usize, seqs: usize, logit_rows: usize) -> Self {
        Self {
            sequences: Vec::with_capacity(seqs),
            rows: Vec::with_capacity(tokens),
            logit_rows: Vec::with_capacity(logit_rows),
        }
    }

    /// Selects the sequences for which `skipped_rows` returns `Some`: the number of their first rows to skip.
    ///
    /// `skipped_rows` is called once per sequence, in order.
    pub fn select(&mut self, batch: &ForwardInput, mut skipped_rows: impl FnMut(usize) -> Option<u32>) {
        self.sequences.clear();
        self.rows.clear();
        self.logit_rows.clear();
        let (mut first_row, mut first_logit_row) = (0, 0);
        for (index, &rows) in batch.q_lens.iter().enumerate() {
            let end = first_row + rows as usize;
            let logit_end = batch.logit_rows.partition_point(|&row| (row as usize) < end);
            if let Some(skipped) = skipped_rows(index) {
                let start = first_row + skipped as usize;
                self.sequences.push((index, skipped));
                self.rows.extend(start..end);
                let selected = |&logit_row: &usize| batch.logit_rows[logit_row] as usize >= start;
                self.logit_rows.extend((first_logit_row..logit_end).filter(selected));
            }
            (first_row, first_logit_row) = (end, logit_end);
        }
    }

    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Returns the local row of a batch row, or `None` if it is not selected.
    pub fn local_row(&self, batch_row: u32) -> Option<u32> {
        index_of(&self.rows, batch_row)
    }

    /// Returns the local logit row of a logit row of the batch, or `None` if it is not selected.
    pub fn local_logit_row(&self, batch_logit_row: u32) -> Option<u32> {
        index_of(&self.logit_rows, batch_logit_row)
    }
}

fn index_of(ascending: &[usize], value: u32) -> Option<u32> {
    ascending.binary_search(&(value as usize)).ok().map(to_u32)
}

/// Returns the ranges of indexes whose values are consecutive, each with its first value.
pub(crate) fn consecutive_runs(values: &[usize]) -> impl Iterator<Item = (Range<usize>, usize)> {
    let mut start = 0;
    std::iter::from_fn(move || {
        let first = *values.get(start)?;
        let len = values[start..].iter().zip(first..).take_while(|(value, expected)| *value == expected).count();
        let run = start..start + len;
        start = run.end;
        Some((run, first))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sub_batch_rows_map_back_to_the_batch() {
        let batch = ForwardInput { q_lens: vec![3, 1, 2], logit_rows: vec![0, 2, 3, 5], ..ForwardInput::default() };
        let mut part = SubBatch::default();
        part.select(&batch, |index| [Some(1), None, Some(0)][index]);
        assert_eq!(part.sequences, [(0, 1), (2, 0)]);
        assert_eq!((part.rows.as_slice(), part.logit_rows.as_slice()), ([1, 2, 4, 5].as_slice(), [1, 3].as_slice()));
        assert_eq!((part.local_row(4), part.local_row(3), part.local_logit_row(3)), (Some(2), None, Some(1)));
        part.select(&batch, |_| Some(0));
        assert_eq!(
            (part.rows.as_slice(), part.logit_rows.as_slice()),
            ((0..6).collect::<Vec<_>>().as_slice(), [0, 1, 2, 3].as_slice())
        );
        part.select(&batch, |_| None);
        assert!(part.is_empty() && part.sequences.is_empty() && part.logit_rows.is_empty());
    }

    #[test]
    fn runs_end_where_values_jump() {
        let runs: Vec<_> = consecutive_runs(&[1, 2, 4, 5, 6, 9]).collect();
        assert_eq!(runs, [(0..2, 1), (2..5, 4), (5..6, 9)]);
        assert_eq!(consecutive_runs(&[]).count(), 0);
    }
}
