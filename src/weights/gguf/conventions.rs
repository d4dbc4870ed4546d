//! Differences between the GGUF files of an architecture and the hub's files.

#![forbid(unsafe_code)]

use super::names::NameTable;

/// Conventions of an architecture's GGUF files.
#[derive(Clone, Copy, Debug)]
pub struct Conventions {
    /// Names of the tensors.
    pub names: &'static NameTable,
    /// Order of rows in query and key projections.
    pub qk_rows: QkRows,
}

/// Order of the rows of each head in query and key projections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum QkRows {
    /// The hub's order.
    AsOnHub,
    /// Rows that rotate together are adjacent; on the hub they are half a head apart.
    InterleavedPairs,
}
