//! Tests of the scheduler against a model of it, and of plans in flight.

#[path = "../common/mod.rs"]
mod common;

mod against_model;
mod plans_in_flight;
