//! What a sampler reads: rows of logits as a model's batch leaves them.

/// Logits of the rows asked for, with a status byte each.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct LogitRows<'a> {
    /// `rows × vocab` logits, row-major.
    pub logits: &'a [f32],
    /// Width of a row: the model's vocabulary.
    pub vocab: usize,
    /// One byte a row: 0 ok, otherwise why the row must not be sampled (see [`RowStatus`](crate::graph::RowStatus)).
    pub status: &'a [u8],
    /// Id of the largest logit of each row, the lowest of equals, where the model has found it already; else empty.
    pub argmax: &'a [u32],
}

impl<'a> LogitRows<'a> {
    /// No rows.
    pub const EMPTY: Self = Self::new(&[], 0, &[]);

    /// Rows whose argmax is not known yet.
    pub const fn new(logits: &'a [f32], vocab: usize, status: &'a [u8]) -> Self {
        Self { logits, vocab, status, argmax: &[] }
    }

    /// The same rows with the argmax of each.
    #[must_use]
    pub const fn with_argmax(self, argmax: &'a [u32]) -> Self {
        Self { argmax, ..self }
    }
}
