//! The exported C functions, by library. Each runs in the wrapper [`crate::ffi::call`].

mod aclnn;
mod capture;
mod control;
mod dcmi;
mod descriptors;
mod hccl;
mod memory;
mod process;
mod streams;
