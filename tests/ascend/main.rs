//! Tests of the Ascend device on the simulated runtime.

#![cfg(feature = "ascend")]

#[path = "../common/mod.rs"]
mod common;

mod cards;
mod cpu_vs_ascend;
mod device;
mod fallbacks;
mod pipeline;
mod steps;
mod weights;
