//! Narrowing of counts and indices.

/// A count or an index as `u32`, saturating: what is counted (tokens, rows, blocks, ids) is bounded by `u32` where it is made.
#[allow(clippy::cast_possible_truncation, reason = "checked before")]
pub(crate) const fn to_u32(n: usize) -> u32 {
    if n > u32::MAX as usize { u32::MAX } else { n as u32 }
}
