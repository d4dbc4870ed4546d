//! Narrowing conversions of counts and indices.

/// Converts a count or an index to `u32`, saturating.
///
/// No value saturates in practice: the code that creates tokens, rows, blocks and ids bounds their number by
/// `u32::MAX`.
#[allow(clippy::cast_possible_truncation, reason = "checked before")]
pub(crate) const fn to_u32(n: usize) -> u32 {
    if n > u32::MAX as usize { u32::MAX } else { n as u32 }
}
