//! model

pub mod rope;
