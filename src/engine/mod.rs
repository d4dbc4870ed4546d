//! The handle people hold, and the loop.

#![forbid(unsafe_code)]

mod forward;

pub use forward::{Forward, ForwardInput, LogitRows};
