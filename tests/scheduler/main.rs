//! Tests of the scheduler against a reference model, and of in-flight plans.

#[path = "../common/mod.rs"]
mod common;

mod against_model;
mod plans_in_flight;
