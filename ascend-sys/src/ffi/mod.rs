//! Foreign functions: finding the libraries, the tables of their symbols, and the declarations of the kernel shim.

pub(super) mod dl;
pub(super) mod loader;
pub(super) mod shim_ffi;
pub(super) mod symbols;
