//! Input of the sampler: rows of logits as a model's batch returns them.

/// Logits of the requested rows, with one status byte each.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct LogitRows<'a> {
    /// `rows × vocab` logits, row-major.
    pub logits: &'a [f32],
    /// Width of a row: the size of the model's vocabulary.
    pub vocab: usize,
    /// One byte per row: 0 if the row is valid, otherwise the reason why it must not be sampled (see
    /// [`RowStatus`](crate::graph::RowStatus)).
    pub status: &'a [u8],
    /// Argmax of each row (the lowest id wins a tie) if the model has computed it; otherwise empty.
    pub argmax: &'a [u32],
}

impl<'a> LogitRows<'a> {
    /// No rows.
    pub const EMPTY: Self = Self::new(&[], 0, &[]);

    /// Creates rows without argmax.
    pub const fn new(logits: &'a [f32], vocab: usize, status: &'a [u8]) -> Self {
        Self { logits, vocab, status, argmax: &[] }
    }

    /// Returns the same rows with the argmax of each row.
    #[must_use]
    pub const fn with_argmax(self, argmax: &'a [u32]) -> Self {
        Self { argmax, ..self }
    }
}
