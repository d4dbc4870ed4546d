//! Tests of the operations over the simulator.

#[path = "../common/mod.rs"]
mod common;

mod attention;
mod dense;
mod other;
mod speed;
