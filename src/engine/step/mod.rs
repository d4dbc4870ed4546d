//! State of the step loop: active requests, their choices, the batch, in-flight steps, sampling and stop conditions.

pub(super) mod active_requests;
pub(super) mod batch_builder;
pub(super) mod choice;
pub(super) mod pipeline;
pub(super) mod sampling;
pub(super) mod stop;
