//! Parts that several test binaries share: engines for small models, references, simulated devices.

#![allow(dead_code, reason = "each binary uses only a part")]

pub mod deferred_device;
pub mod digest_model;
#[cfg(feature = "text")]
pub mod fable;
pub mod goldens;
pub mod model;
pub mod scripted_engine;
#[cfg(feature = "ascend")]
pub mod sim_npu;
pub mod smollm2;
