//! Tests of graphs, passes, plans and their costs.

#[path = "../common/mod.rs"]
mod common;

mod compile_options;
mod cost;
mod plan;
