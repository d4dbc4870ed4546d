//! Tests of the sampler and its parameters.

#[path = "../common/mod.rs"]
mod common;

mod cases;
mod params;
mod rows;
