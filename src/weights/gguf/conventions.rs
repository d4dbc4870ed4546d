//! Differences between the GGUF files of an architecture and the hub's files.

#![forbid(unsafe_code)]

use super::names::NameTable;

/// How an architecture's files differ from the hub's form of the same models.
#[derive(Clone, Copy, Debug)]
pub struct Conventions {
    /// Spellings of the tensors' names.
    pub names: &'static NameTable,
    /// Order of rows in query and key projections.
    pub qk_rows: QkRows,
}

/// Order of the rows of each head in query and key projections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum QkRows {
    /// That of the hub.
    AsOnHub,
    /// Rows that rotate together are neighbors; on the hub they are half a head apart.
    InterleavedPairs,
}
