//! Pure rewrites of a graph: each takes a graph and gives a graph that computes the same.

mod fuse;
mod quantise;

pub use fuse::{FusionReport, fuse};
pub use quantise::select_quantised;
