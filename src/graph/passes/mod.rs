//! Pure rewrites of a graph: each returns a graph with the same result, up to the requested rounding.

mod fuse;
mod legalize;
mod precision;
mod shard;

pub use fuse::{FusionReport, fuse};
pub use legalize::{OpSet, legalize};
pub use precision::{PrecisionPolicy, apply_precision};
pub use shard::shard;
