//! Tests of the block allocator and the prefix cache.

#[path = "../common/mod.rs"]
mod common;

mod allocator;
mod prefix_cache;
