//! Tests of the runtime, the collectives and the card management over the simulator.

#[path = "../common/mod.rs"]
mod common;

mod capture;
mod collectives;
mod contexts_and_memory;
mod dcmi;
mod faults;
mod streams;
