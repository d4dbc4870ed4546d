//! The handle people hold, and the loop.

#![forbid(unsafe_code)]

mod forward;
mod stop;

pub use forward::{Forward, ForwardInput, LogitRows};
pub use stop::{StopChecker, default_stop_ids};
