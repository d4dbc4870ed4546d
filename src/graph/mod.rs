//! The model as data: graph, passes, plan.

#![forbid(unsafe_code)]

/// Why a row of logits may or may not be used; plans write one a row beside the logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[non_exhaustive]
pub enum RowStatus {
    /// Every logit is finite.
    Ok = 0,
    /// At least one logit is infinite or NaN.
    NonFinite = 1,
}
