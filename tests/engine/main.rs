//! Tests of the engine from a caller's point of view: requests, steps, stops, failures, settings.

#[path = "../common/mod.rs"]
mod common;

mod api;
mod async_stream;
mod bad_input;
mod batch_invariance;
mod custom_ops;
mod engine_core;
mod faults;
mod lifecycle;
mod overflow;
mod pipeline;
mod pipeline_on_device;
mod runner;
mod setting_invariance;
mod step_times;
mod stops;
mod validation;
