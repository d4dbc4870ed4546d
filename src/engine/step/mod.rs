//! What one step works on: the requests in the engine, their choices, the batch, the steps in flight, and the end of a
//! choice.

pub(super) mod active_requests;
pub(super) mod batch_builder;
pub(super) mod choice;
pub(super) mod pipeline;
pub(super) mod sampling;
pub(super) mod stop;
